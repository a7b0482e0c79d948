"""The calls spotd makes to vast.ai, each at its own pace, each with a typed outcome.

Reads may be repeated; the purchase is sent exactly once and says by its exception whether it can have had an effect.
The key travels in the `Authorization` header of this client only; log files lie on another host and are fetched by a
second client that has no key.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from random import Random
from typing import Any, Final, TypeVar, Unpack

import anyio

from spotd_providers.contract.errors import OutcomeUnknown, RateLimited, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.kit.calls import RequestPace, judge_apart, retry_read
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions
from spotd_providers.kit.shapes import as_model
from spotd_providers.vastai.wire import (
    WHO,
    ChargePage,
    CreateReply,
    InstancePage,
    LogReply,
    OfferRows,
    UserReply,
    VastRefused,
    body_of,
    offer_rows,
    raise_for,
    single_instance,
)

PAGE_ROWS_MAX: Final = 25
CHARGES_PAGE_ROWS: Final = 100
SEARCH_TIMEOUT_S: Final = 45.0
CREATE_TIMEOUT_S: Final = 60.0
SEARCHES_PER_MINUTE: Final = 8
SEARCH_WAIT_MAX: Final = timedelta(seconds=15)
"""A poll that has read something does not wait longer for its next search."""
MINUTE: Final = timedelta(minutes=1)
REST_MAX: Final = timedelta(minutes=4)
DESTROY_REST_MAX: Final = timedelta(seconds=20)
LOG_TRIES: Final = 30
LOG_WAIT: Final = timedelta(seconds=0.3)
T = TypeVar("T")


class VastEndpoint(Enum):
    """Minimum seconds between calls, and the pause after a 429 without advice.

    The intervals are a little above vast.ai's own thresholds, since requests arrive unevenly.
    """

    SEARCH = ("search", 0.0, 6.0)
    CREATE = ("create", 4.6, 12.0)
    SHOW = ("show instance", 2.1, 2.1)
    LIST = ("list instances", 1.1, 1.1)
    DESTROY = ("destroy", 3.1, 3.1)
    BID = ("change bid", 5.6, 5.6)
    LOGS = ("request logs", 1.1, 1.5)
    USER = ("account", 1.1, 1.1)
    CHARGES = ("charges", 1.1, 3.0)

    def __init__(self, title: str, interval_s: float, penalty_s: float) -> None:
        self.title = title
        self.interval = timedelta(seconds=interval_s)
        self.penalty = timedelta(seconds=penalty_s)

    @property
    def rest_max(self) -> timedelta:
        """Longest rest that is kept after a 429, whatever it asks for: a machine bills while its end waits."""
        return DESTROY_REST_MAX if self is VastEndpoint.DESTROY else REST_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A contract that exists; with `refused`, vast.ai refused the purchase and yet left a stopped, billing contract."""

    contract: int
    refused: VastRefused | None = None


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


class VastClient:
    """Paced, typed calls over one HTTP client that carries the key."""

    def __init__(self, http: Http, *, keyless: Http, clock: Clock, rng: Random) -> None:
        self._http = http
        self._keyless = keyless
        self._clock = clock
        self._rng = rng
        self._pace = RequestPace(clock)
        self._searches = SearchWindow(clock)
        self._one_purchase = anyio.Lock()

    async def search(self, query: Mapping[str, Any]) -> OfferRows:
        """Return the rows of one search. Not repeated on failure: the poller comes back anyway."""
        await self._searches.turn()
        answer = await self._ask(
            VastEndpoint.SEARCH, "POST", "/api/v0/bundles/", json_body=query, timeout_s=SEARCH_TIMEOUT_S
        )
        # The body is parsed once, and only once its size has earned it: a refusal is short.
        if answer.status != 200 or len(answer.body) < 4096:
            try:
                self._judge(answer, body_of(answer), VastEndpoint.SEARCH)
            except VastRefused as exc:
                raise Unavailable(f"vast.ai refused the search: {exc.detail or exc.code or exc.status}") from exc
        return await judge_apart(lambda: offer_rows(answer.body), size=len(answer.body))

    @property
    def may_search_soon(self) -> bool:
        """Whether one more search would not have to wait for long."""
        return self._searches.wait() <= SEARCH_WAIT_MAX

    @property
    def requests_sent(self) -> int:
        return self._http.requests_sent + self._keyless.requests_sent

    async def create(self, ask: int, body: Mapping[str, Any], *, key: str) -> Created:
        """Make one contract by one PUT, never two.

        Raises:
            OutcomeUnknown: the contract may exist.
            Refused, RateLimited, AuthFailed, Unavailable: it certainly does not.
        """
        # One purchase at a time, and the interval counts from its end: a refused one costs its offer's quote.
        async with self._one_purchase:
            await self._pace.turn(VastEndpoint.CREATE.title, VastEndpoint.CREATE.interval)
            try:
                answer = await self._http.send(
                    "PUT", f"/api/v0/asks/{ask}/", json_body=dict(body), timeout_s=CREATE_TIMEOUT_S
                )
            except AnswerLost as exc:
                raise OutcomeUnknown(f"vast.ai's answer to the purchase of offer {ask} was lost", key=key) from exc
            finally:
                self._pace.penalise(VastEndpoint.CREATE.title, VastEndpoint.CREATE.interval)
        value = body_of(answer)
        reply = as_model(CreateReply, value, who=WHO, what="a purchase") if isinstance(value, dict) else CreateReply()
        try:
            self._judge(answer, value, VastEndpoint.CREATE)
        except VastRefused as exc:
            if reply.new_contract is None:
                raise
            return Created(contract=reply.new_contract, refused=exc)
        except Unavailable as exc:
            if reply.new_contract is not None:
                left = VastRefused(status=answer.status, code="", detail=str(exc))
                return Created(contract=reply.new_contract, refused=left)
            if answer.status < 400:
                raise  # a redirect: nothing was bought
            raise OutcomeUnknown(f"vast.ai answered {answer.status} to the purchase of offer {ask}", key=key) from exc
        if reply.new_contract is None:
            raise OutcomeUnknown(f"vast.ai's answer to the purchase of offer {ask} names no contract", key=key)
        return Created(contract=reply.new_contract)

    async def instance(self, contract: int) -> Any | None:
        """Return the row of one machine, or `None` when vast.ai says that it does not exist (or not yet)."""

        async def call() -> Any | None:
            try:
                value = await self._json(
                    VastEndpoint.SHOW, "GET", f"/api/v0/instances/{contract}/", params={"owner": "me"}
                )
            except VastRefused as exc:
                if exc.says_absent or exc.status in (404, 410):
                    return None
                raise Unavailable(str(exc)) from exc
            return single_instance(value)

        return await self._repeat(call)

    async def instance_page(self, *, label: str | None, after: str | None) -> InstancePage:
        """Return a page of the account's machines in order of their ids."""
        params: dict[str, str | int] = {
            "limit": PAGE_ROWS_MAX,
            "order_by": _compact([{"col": "id", "dir": "asc"}]),
            "select_filters": _compact({} if label is None else {"label": {"eq": label}}),
        }
        if after is not None:
            params["after_token"] = after

        async def call() -> InstancePage:
            value = await self._json(VastEndpoint.LIST, "GET", "/api/v1/instances/", params=params)
            return as_model(InstancePage, value, who=WHO, what="the list of instances")

        return await self._repeat(call)

    async def destroy(self, contract: int) -> None:
        """Destroy this contract; return once vast.ai accepted that, or said that the contract does not exist."""

        async def call() -> None:
            path = f"/api/v0/instances/{contract}/"
            answer = await self._ask(VastEndpoint.DESTROY, "DELETE", path, json_body={})
            body = body_of(answer)
            try:
                self._judge(answer, body, VastEndpoint.DESTROY)
            except VastRefused as exc:
                if not exc.says_absent:
                    raise Unavailable(str(exc)) from exc
                return
            if not isinstance(body, dict) and answer.status != 204:
                raise Unavailable("vast.ai's answer to destroy is not a JSON object")

        await self._repeat(call, attempts=5)

    async def change_bid(self, contract: int, price_usd: float) -> None:
        """Change the bid of this contract. Repeating it is harmless: the same price is set again."""

        async def call() -> None:
            body = {"client_id": "me", "price": price_usd}
            await self._json(VastEndpoint.BID, "PUT", f"/api/v0/instances/bid_price/{contract}/", json_body=body)

        await self._repeat(call)

    async def user(self) -> tuple[UserReply, HttpAnswer]:
        """Return the money of the account, and the answer, of which only the `Date` header may be used."""

        async def call() -> tuple[UserReply, HttpAnswer]:
            answer = await self._ask(VastEndpoint.USER, "GET", "/api/v0/users/current/")
            body = body_of(answer)
            self._judge(answer, body, VastEndpoint.USER)
            return as_model(UserReply, body, who=WHO, what="the account"), answer

        return await self._repeat(call)

    async def charge_page(self, since: datetime, until: datetime, *, after: str | None) -> ChargePage:
        """Return a page of what was billed for instances."""
        span = {"gte": int(since.timestamp()), "lte": int(until.timestamp())}
        params: dict[str, str | int] = {
            "select_filters": _compact({"day": span, "type": {"in": ["instance"]}}),
            "format": "table",
            "limit": CHARGES_PAGE_ROWS,
            "latest_first": "true",
        }
        if after is not None:
            params["after_token"] = after

        async def call() -> ChargePage:
            value = await self._json(VastEndpoint.CHARGES, "GET", "/api/v0/charges/", params=params)
            return as_model(ChargePage, value, who=WHO, what="charges")

        return await self._repeat(call)

    async def log_url(self, contract: int, *, lines: int) -> str:
        """Request the log of this contract; return the URL at which it will be."""

        async def call() -> str:
            path = f"/api/v0/instances/request_logs/{contract}/"
            value = await self._json(VastEndpoint.LOGS, "PUT", path, json_body={"tail": str(lines)})
            return as_model(LogReply, value, who=WHO, what="a log").result_url

        return await self._repeat(call)

    async def fetch_log(self, url: str) -> str:
        """Return the text behind a log URL, once vast.ai has put it there.

        Raises:
            Unavailable: nothing there in time.
        """
        for _ in range(LOG_TRIES):
            await self._clock.sleep(LOG_WAIT)
            answer = await self._keyless.read("GET", url, timeout_s=10.0)
            if answer.status == 200:
                return answer.text
        raise Unavailable("vast.ai did not deliver the log in time")

    async def _repeat(self, call: Callable[[], Awaitable[T]], *, attempts: int = 3) -> T:
        return await retry_read(call, clock=self._clock, rng=self._rng, attempts=attempts)

    async def _json(
        self, endpoint: VastEndpoint, method: str, path: str, **options: Unpack[RequestOptions]
    ) -> Mapping[str, Any]:
        answer = await self._ask(endpoint, method, path, **options)
        body = body_of(answer)
        self._judge(answer, body, endpoint)
        if not isinstance(body, dict):
            raise Unavailable(f"vast.ai's answer to {endpoint.title} is not a JSON object")
        return body

    async def _ask(
        self, endpoint: VastEndpoint, method: str, path: str, **options: Unpack[RequestOptions]
    ) -> HttpAnswer:
        await self._pace.turn(endpoint.title, endpoint.interval)
        return await self._http.read(method, path, **options)

    def _judge(self, answer: HttpAnswer, body: Any, endpoint: VastEndpoint) -> None:
        try:
            raise_for(
                answer,
                body,
                endpoint=endpoint.title,
                penalty=endpoint.penalty,
                now=self._clock.now(),
                rng=self._rng,
                purchase=endpoint is VastEndpoint.CREATE,
            )
        except RateLimited as exc:
            # The caller learns the whole wait. Kept here, it would hold back an end, or the list that proves one.
            self._pace.penalise(endpoint.title, min(exc.retry_after, endpoint.rest_max))
            raise


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
