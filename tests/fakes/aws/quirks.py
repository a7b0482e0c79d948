"""The switches of the fake: every odd behaviour of EC2 that matters to a launcher, one field each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass(slots=True, kw_only=True)
class Quirks:
    """How this EC2 behaves; change a field while it runs and the next request sees it.

    Attributes:
        boot: from `pending` to `running`.
        shutting_down: from `shutting-down` to `terminated`.
        lingers: how long a terminated instance stays in listings.
        list_lag: how long a new instance is missing from DescribeInstances.
        tag_lag: how long its tags are missing there, and from filters by tag.
        page_rows_max: rows of one page, whatever was asked for.
        failing_regions: regions whose EC2 answers 503 `Unavailable`.
        refuse_launch: error code, HTTP status and sentence for every launch.
        refusals: the same for every call of an action (`GetSpotPlacementScores`).
        pool_refusals: the same for one pool, `type:zone`.
        sells_on_demand: the next launches ignore `InstanceMarketOptions`.
        allowed: actions this account may do; `None` for all.
        last_token_empty: the last page carries an empty token instead of none.
        edit_instance: by instance id, fields that replace its row's; a value of `None` drops the field.
        scores: by zone id, the placement score of whatever is asked for there.
        clock_ahead: how far AWS's clock, as its answers tell it, is ahead of everybody's.
        enforce_quotas: a launch beyond the account's vCPUs of its family is refused, as for real.
        image_disks: by device, size and whether it goes along with its machine, of disks that the machine image
            brings besides its root.
        full_subnets: those without a free address.
        edit_request: by instance id, fields that replace those of its spot request's row.
        room: by `type:zone`, how many machines it still has; others have enough.
        unlisted: ids of instances that DescribeInstances does not show yet.
        raw_prices: by `type:zone`, the text to answer as its spot price.
    """

    boot: timedelta = timedelta(seconds=20)
    shutting_down: timedelta = timedelta(seconds=30)
    lingers: timedelta = timedelta(hours=1)
    list_lag: timedelta = timedelta(0)
    tag_lag: timedelta = timedelta(0)
    page_rows_max: int = 25
    failing_regions: set[str] = field(default_factory=set)
    refuse_launch: tuple[str, int, str] | None = None
    refusals: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    pool_refusals: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    sells_on_demand: bool = False
    allowed: Callable[[str], bool] | None = None
    last_token_empty: bool = True
    edit_instance: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)
    clock_ahead: timedelta = timedelta(0)
    enforce_quotas: bool = False
    image_disks: dict[str, tuple[int, bool]] = field(default_factory=dict)
    full_subnets: set[str] = field(default_factory=set)
    edit_request: dict[str, dict[str, Any]] = field(default_factory=dict)
    room: dict[str, int] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)
    raw_prices: dict[str, str] = field(default_factory=dict)
