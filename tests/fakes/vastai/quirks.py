"""The switches of the fake: every odd behaviour of vast.ai that a launcher has met, one field each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(slots=True, kw_only=True)
class Quirks:
    """How this vast.ai behaves; change a field while it runs and the next request sees it.

    Attributes:
        boot: from purchase to `running`.
        null_status_for: how long a new contract reports no `actual_status` at all.
        list_lag: how long a new contract is missing from lists and from its own route (404).
        first_shows_missing: how many times a new contract's own route answers 404, whatever the time.
        auto_resume: an outbid contract runs its start script again once its bid wins.
        outbid_as_scheduling: an outbid contract keeps `intended_status: running` ("Scheduling").
        sells_on_demand: ignores `price` and sells on-demand, as for a misspelt bid.
        low_bid_status: HTTP status of the error that leaves a stopped contract behind.
        low_bid_leaves_contract: a bid that is too low leaves a stopped contract behind an error.
        gone_status: how a vanished ask is told: 404 (`invalid_args`) or 410 (`no_such_ask`).
        bid_is_per_gpu: `change_bid` takes its price for one GPU.
        base_shows_bid: `type=bid` rows show the bid as their `dph_base`, as the service does since 2026.
        auth_status: how a bad key is told: 404 or 401, the body says `auth_error` either way.
        rate_limits: every endpoint's threshold is enforced, per key.
        retry_after: whether a 429 carries the header.
        search_rows_max: rows of one search answer, whatever `limit` asks; `None` for as many as it asks.
        search_quota: searches a day; `None` for no limit.
        spend_rate_limit: purchases are refused as for a new account.
        email_verified: what the account says of its e-mail address.
        content_type: of every JSON answer; the official CLI takes nothing but exactly `application/json`.
        ports: shape of an instance's ports: `map`, `list` or `null`.
        total_instances: overrides what the listing says there is.
        page_rows_max: rows of one listing page.
        log_tries: how often a log's URL answers 404 before the log is there.
        trailing_slash_redirects: routes without the final slash are redirected with 301.
        metrics_need_machine: the account has no machine of its own, so that it is shown no past prices.
        edit_offers: the last word on the rows of a search answer.
        edit_instance: by contract id, fields that replace an instance row's, or anything else to stand for the row.
    """

    boot: timedelta = timedelta(seconds=20)
    null_status_for: timedelta = timedelta(seconds=2)
    list_lag: timedelta = timedelta(0)
    first_shows_missing: int = 0
    auto_resume: bool = True
    outbid_as_scheduling: bool = False
    sells_on_demand: bool = False
    low_bid_status: int = 400
    low_bid_leaves_contract: bool = True
    gone_status: int = 404
    bid_is_per_gpu: bool = False
    base_shows_bid: bool = False
    auth_status: int = 404
    rate_limits: bool = True
    retry_after: bool = False
    search_rows_max: int | None = None
    search_quota: int | None = None
    spend_rate_limit: bool = False
    email_verified: bool | int | None = True
    content_type: str = "application/json"
    ports: str = "map"
    total_instances: int | None = None
    page_rows_max: int = 25
    log_tries: int = 2
    trailing_slash_redirects: bool = True
    metrics_need_machine: bool = False
    edit_offers: Callable[[list[Any]], list[Any]] | None = None
    edit_instance: dict[int, Any] = field(default_factory=dict)
