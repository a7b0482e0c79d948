"""The reads of vast.ai that more than one caller makes, and the pace of its searches."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.kit.calls import judge_apart
from spotd_providers.kit.http import Http, HttpAnswer
from spotd_providers.kit.rest import RestClient, RestRefused
from spotd_providers.kit.shapes import as_model
from spotd_providers.vastai.wire import (
    ACCOUNT,
    CHARGES,
    DIALECT,
    LIST,
    SEARCH,
    WHO,
    ChargePage,
    InstancePage,
    OfferRows,
    UserReply,
    offer_rows,
)

PAGE_ROWS_MAX: Final = 25
CHARGES_PAGE_ROWS: Final = 100
SEARCH_TIMEOUT_S: Final = 45.0
SEARCHES_PER_MINUTE: Final = 8
SEARCH_WAIT_MAX: Final = timedelta(seconds=15)
"""A poll that has read something does not wait longer for its next search."""
MINUTE: Final = timedelta(minutes=1)


class SearchWindow:
    """A limit of searches in any minute: vast.ai counts them per address, not by a minimum interval."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: deque[datetime] = deque(maxlen=SEARCHES_PER_MINUTE)

    async def turn(self) -> None:
        """Wait until one more search keeps the limit."""
        while (wait := self.wait()) > timedelta(0):
            await self._clock.sleep(wait)
        self._started.append(self._clock.now())

    def wait(self) -> timedelta:
        """Return the wait of the next search, never above a minute, even if the clock was set back."""
        now = self._clock.now()
        while self._started and self._started[-1] > now:
            self._started.pop()
        if len(self._started) < SEARCHES_PER_MINUTE:
            return timedelta(0)
        return max(timedelta(0), self._started[0] + MINUTE - now)


class VastClient(RestClient):
    """Calls to vast.ai, each kind at its own pace."""

    def __init__(self, http: Http, *, clock: Clock, rng: Random) -> None:
        super().__init__(http, DIALECT, clock=clock, rng=rng)
        self._searches = SearchWindow(clock)

    async def search(self, query: Mapping[str, Any]) -> OfferRows:
        """Return the rows of one search. Not repeated on failure: the poller comes back anyway."""
        await self._searches.turn()
        answer = await self.send("POST", "/api/v0/bundles/", what=SEARCH, json_body=query, timeout_s=SEARCH_TIMEOUT_S)
        # The body is parsed once, and only once its size has earned it: a refusal is short.
        if answer.status != 200 or len(answer.body) < 4096:
            try:
                self.judge(answer, SEARCH)
            except RestRefused as exc:
                raise Unavailable(f"vast.ai refused the search: {exc.detail or exc.code or exc.status}") from exc
        return await judge_apart(lambda: offer_rows(answer.body), size=len(answer.body))

    @property
    def may_search_soon(self) -> bool:
        """Whether one more search would not have to wait for long."""
        return self._searches.wait() <= SEARCH_WAIT_MAX

    async def instance_page(self, *, label: str | None, after: str | None) -> InstancePage:
        """Return a page of the account's machines in order of their ids."""
        params: dict[str, str | int] = {
            "limit": PAGE_ROWS_MAX,
            "order_by": as_json([{"col": "id", "dir": "asc"}]),
            "select_filters": as_json({} if label is None else {"label": {"eq": label}}),
            **_behind(after),
        }
        value = await self.ask("GET", "/api/v1/instances/", what=LIST, params=params)
        return as_model(InstancePage, value, who=WHO, what="the list of instances")

    async def user(self) -> tuple[UserReply, HttpAnswer]:
        """Return the money of the account, and the answer, of which only the `Date` header may be used."""
        answer, body = await self.answer("GET", "/api/v0/users/current/", what=ACCOUNT)
        return as_model(UserReply, body, who=WHO, what="the account"), answer

    async def charge_page(self, since: datetime, until: datetime, *, after: str | None) -> ChargePage:
        """Return a page of what was billed for instances."""
        span = {"gte": int(since.timestamp()), "lte": int(until.timestamp())}
        params: dict[str, str | int] = {
            "select_filters": as_json({"day": span, "type": {"in": ["instance"]}}),
            "format": "table",
            "limit": CHARGES_PAGE_ROWS,
            "latest_first": "true",
            **_behind(after),
        }
        value = await self.ask("GET", "/api/v0/charges/", what=CHARGES, params=params)
        return as_model(ChargePage, value, who=WHO, what="charges")


def _behind(token: str | None) -> dict[str, str]:
    return {} if token is None else {"after_token": token}


def as_json(value: Any) -> str:
    """Return a value of a query as vast.ai takes it."""
    return json.dumps(value, separators=(",", ":"))
