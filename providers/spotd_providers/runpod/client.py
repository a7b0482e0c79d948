"""The calls spotd makes to RunPod's REST v2, each with a typed outcome.

Reads may be repeated; a create is sent exactly once and says by its exception whether it can have had an effect.
Every answer carries what is left of the account's minute, hour and day (`RateLimit`): when one of them is used up,
the next call waits for its reset if that is near, and is refused here if it is not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from random import Random
from typing import Any, Final, TypeVar, Unpack
from urllib.parse import quote

from spotd_providers.contract.errors import OutcomeUnknown, RateLimited, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import RegistryLogin
from spotd_providers.kit.calls import Rest, judge_apart, retry_read
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions
from spotd_providers.kit.shapes import Rows, as_model, row_or_none
from spotd_providers.kit.text import quote_safely
from spotd_providers.runpod.wire import (
    NOTHING_MADE_WORDS,
    WHO,
    BillingPage,
    GpuRow,
    PodPage,
    PodRow,
    RunpodRefused,
    body_of,
    gpu_rows,
    problem_of,
    raise_for,
    running_low,
    says,
    used_up,
)

CREATE_TIMEOUT_S: Final = 60.0
SEARCH_TIMEOUT_S: Final = 45.0
WAIT_MAX: Final = timedelta(seconds=15)
MINUTE_WINDOW: Final = timedelta(seconds=61)
PODS_PER_PAGE: Final = 1000
PROBE: Final[Mapping[str, Any]] = {"spotdCheck": True}
LOG_LINES_MAX: Final = 5000
REGISTRIES_MAX: Final = 10_000
ID_CHARS_MAX: Final = 128
T = TypeVar("T")


class RunpodClient:
    """Typed calls over one HTTP client that carries the key."""

    def __init__(self, http: Http, *, clock: Clock, rng: Random) -> None:
        self._http = http
        self._clock = clock
        self._rng = rng
        self._used_up = Rest(clock)
        self._low = Rest(clock)

    @property
    def requests_sent(self) -> int:
        return self._http.requests_sent

    async def gpus(self, *, cloud: str, count: int, cuda_min: str | None) -> Rows[GpuRow]:
        """Return the GPU types for machines of this size. Not repeated on failure: the poller comes back anyway.

        Prices are asked for most often and matter least: the last quarter of a minute's requests is kept for machines.
        """
        if (low := self._low.left()) > timedelta(0):
            raise RateLimited("RunPod's minute is nearly used up (the catalogue)", retry_after=low)
        params: dict[str, str | int] = {"include": "AVAILABILITY", "product": "POD", "count": count, "cloud": cloud}
        if cuda_min is not None:
            params["minCudaVersion"] = cuda_min
        try:
            value = await self._json(
                "/v2/catalog/gpus", what="the catalogue", params=params, timeout_s=SEARCH_TIMEOUT_S
            )
        except RunpodRefused as exc:
            raise Unavailable(f"RunPod refused the catalogue: {exc.detail or exc.status}") from exc
        listed = value.get("gpus")
        rows = await judge_apart(lambda: gpu_rows(value), rows=len(listed) if isinstance(listed, list) else 0)
        if rows.is_cut:
            raise Unavailable(f"RunPod's catalogue has more than {rows.count:,} rows, which no answer has")
        return rows

    async def create(self, body: Mapping[str, Any], *, key: str) -> PodRow:
        """Make one pod by one POST, never two.

        Raises:
            OutcomeUnknown: the pod may exist.
            Refused, RateLimited, AuthFailed, NoBalance, Unavailable: it certainly does not.
        """
        self._refuse_if_used_up("a create")
        try:
            answer = await self._http.send("POST", "/v2/pods", json_body=dict(body), timeout_s=CREATE_TIMEOUT_S)
        except AnswerLost as exc:
            raise OutcomeUnknown("RunPod's answer to a create was lost", key=key) from exc
        value = body_of(answer)
        self._note(answer)
        try:
            raise_for(answer, value, what="a create", rng=self._rng, create=True)
        except Unavailable as exc:
            if answer.status < 500 and answer.status != 408:
                raise  # a redirect or the edge: no pod was made
            detail = quote_safely(problem_of(value)) if isinstance(value, dict) else ""
            if says(detail, NOTHING_MADE_WORDS):
                raise RunpodRefused(status=answer.status, detail=detail) from exc
            raise OutcomeUnknown(f"RunPod answered {answer.status} to a create", key=key) from exc
        row = row_or_none(PodRow, value)
        if row is None:
            raise OutcomeUnknown("RunPod's answer to a create names no pod", key=key)
        return row

    async def may_create(self) -> None:
        """Send a create that is certainly refused, with nothing but a field that no create has.

        A key that may create is answered what is wrong with it. RunPod has no other way to find out.

        Raises:
            AuthFailed: this key may read and not create.
            ProviderError: it was not found out.
        """
        answer = await self._http.send("POST", "/v2/pods", json_body=PROBE, timeout_s=CREATE_TIMEOUT_S)
        value = body_of(answer)
        self._note(answer)
        made = row_or_none(PodRow, value)
        if answer.status < 300 and made is not None:
            await self.delete(made.id)
        try:
            raise_for(answer, value, what="creating pods", rng=self._rng)
        except RunpodRefused:
            return

    async def pod(self, pod_id: str) -> Any | None:
        """Return the row of one pod, or `None` when RunPod says that it does not exist (or not yet)."""

        async def call() -> Any | None:
            try:
                return await self._json(_pod_path(pod_id), what="a pod")
            except RunpodRefused as exc:
                if exc.status == 404:
                    return None
                raise

        return await self._repeat(call)

    async def pod_page(self, *, cursor: str | None) -> PodPage:
        """Return a page of the account's pods, as long as RunPod allows. Filters would be ignored, so none are sent."""
        params: dict[str, str | int] = {"limit": PODS_PER_PAGE}
        if cursor is not None:
            params["cursor"] = cursor

        async def call() -> PodPage:
            value = await self._json("/v2/pods", what="the list of pods", params=params, urgent=True)
            return as_model(PodPage, value, who=WHO, what="the list of pods")

        return await self._repeat(call)

    async def delete(self, pod_id: str) -> None:
        """Delete this pod; return once RunPod accepted that, or said that the pod does not exist."""

        async def call() -> None:
            answer = await self._ask("DELETE", _pod_path(pod_id), urgent=True)
            body = body_of(answer)
            try:
                raise_for(answer, body, what="a deletion", rng=self._rng)
            except RunpodRefused as exc:
                if exc.status == 404 and (isinstance(body, dict) or not answer.body):
                    return
                raise
            if answer.body and not isinstance(body, dict):
                raise Unavailable("RunPod's answer to a deletion is not its own")

        await self._repeat(call, attempts=4)

    async def registries(self) -> Sequence[Any]:
        """Return the rows of the account's registry credentials; RunPod never shows their passwords."""

        async def call() -> Sequence[Any]:
            value = await self._json("/v2/registries", what="the registry credentials")
            rows = value.get("registries")
            if not isinstance(rows, list) or len(rows) > REGISTRIES_MAX:
                raise Unavailable("RunPod's answer holds no list of registry credentials")
            return rows

        return await self._repeat(call)

    async def add_registry(self, name: str, login: RegistryLogin) -> str:
        """Store a login under this name, by one POST; return its id.

        Raises:
            AnswerLost: it may be stored.
            RunpodRefused, RateLimited, AuthFailed, Unavailable: it is not, or is stored for nothing.
        """
        body = {"name": name, "username": login.username, "password": login.password.reveal()}
        answer = await self._http.send("POST", "/v2/registries", json_body=body, timeout_s=CREATE_TIMEOUT_S)
        value = body_of(answer)
        self._note(answer)
        raise_for(answer, value, what="a registry credential", rng=self._rng)
        found = value.get("id") if isinstance(value, dict) else None
        if not isinstance(found, str) or not 0 < len(found) <= ID_CHARS_MAX:
            raise Unavailable("RunPod's answer to a registry credential names none")
        return found

    async def delete_registry(self, identity: str) -> None:
        """Delete a registry credential, once.

        Raises:
            RunpodRefused: it is absent, which RunPod answers with a 400, or a pod uses it.
        """
        answer = await self._ask("DELETE", f"/v2/registries/{quote(identity, safe='')}")
        raise_for(answer, body_of(answer), what="the end of a registry credential", rng=self._rng)

    async def log_lines(self, pod_id: str, *, source: str, lines: int) -> list[str]:
        """Return the last lines of a pod's log: `container`, or `system` (what the host did with it)."""
        await self._turn()
        answer = await self._http.read_stream(
            f"{_pod_path(pod_id)}/logs",
            params={"source": source, "tail": min(max(lines, 0), LOG_LINES_MAX)},
            headers={"accept": "text/event-stream"},
        )
        self._note(answer)
        try:
            raise_for(answer, body_of(answer), what="a log", rng=self._rng)
        except RunpodRefused as exc:
            raise Unavailable(f"RunPod has no log of pod {pod_id}: {exc.detail or exc.status}") from exc
        return _events(answer.text)[-lines:] if lines > 0 else []

    async def billing(self, since: datetime, until: datetime) -> BillingPage:
        """Return what was billed for pods, hour by hour."""
        params: dict[str, str | int] = {"bucketSize": "hour", "startTime": _zulu(since), "endTime": _zulu(until)}

        async def call() -> BillingPage:
            value = await self._json("/v2/billing/pods", what="billing", params=params)
            return as_model(BillingPage, value, who=WHO, what="billing")

        return await self._repeat(call)

    async def greeting(self) -> HttpAnswer:
        """Send the cheapest call that needs the key; its answer is used for the `Date` header."""

        async def call() -> HttpAnswer:
            answer = await self._ask("GET", "/v2/pods")
            body = body_of(answer)
            raise_for(answer, body, what="the list of pods", rng=self._rng)
            as_model(PodPage, body, who=WHO, what="the list of pods")
            return answer

        return await self._repeat(call)

    async def _repeat(self, call: Callable[[], Awaitable[T]], *, attempts: int = 3) -> T:
        """Await the call a few times; a refusal that it does not handle proves nothing, so it is repeated as well."""

        async def once() -> T:
            try:
                return await call()
            except RunpodRefused as exc:
                raise Unavailable(str(exc)) from exc

        return await retry_read(once, clock=self._clock, rng=self._rng, attempts=attempts)

    async def _json(
        self, path: str, *, what: str, urgent: bool = False, **options: Unpack[RequestOptions]
    ) -> Mapping[str, Any]:
        answer = await self._ask("GET", path, urgent=urgent, **options)
        body = body_of(answer)
        raise_for(answer, body, what=what, rng=self._rng)
        if not isinstance(body, dict):
            raise Unavailable(f"RunPod's answer to {what} is not a JSON object")
        return body

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        urgent: bool = False,
        **options: Unpack[RequestOptions],
    ) -> HttpAnswer:
        await self._turn(urgent=urgent)
        answer = await self._http.read(method, path, **options)
        self._note(answer)
        return answer

    def _note(self, answer: HttpAnswer) -> None:
        if answer.status != 429 and (wait := used_up(answer)) is not None:
            self._used_up.take(wait)
        low = running_low(answer)
        self._low = Rest(self._clock)
        if low is not None:
            self._low.take(low)

    def _refuse_if_used_up(self, what: str) -> None:
        if (wait := self._used_up.left()) > timedelta(0):
            raise RateLimited(f"RunPod's rate limit is used up ({what})", retry_after=wait)

    async def _turn(self, *, urgent: bool = False) -> None:
        """Wait until the account has a request left, if that is soon.

        An end, and the list that shows whether it took effect, wait for no longer window than that of a minute: they
        are sent all the same, as seldom as their callers do, and RunPod may refuse them itself.
        """
        wait = self._used_up.left()
        if wait > WAIT_MAX:
            if urgent and wait > MINUTE_WINDOW:
                return
            self._refuse_if_used_up("any call")
        elif wait > timedelta(0):
            await self._clock.sleep(wait)
        self._used_up = Rest(self._clock)


def _pod_path(pod_id: str) -> str:
    return f"/v2/pods/{quote(pod_id, safe='')}"


def _zulu(instant: datetime) -> str:
    return instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def _events(text: str) -> list[str]:
    """Return the lines in a stream of log events; other events are left out."""
    found = []
    for line in text.splitlines():
        if not line.startswith("data:"):
            continue
        try:
            event = json.loads(line.removeprefix("data:"))
        except ValueError:
            continue  # the stream was cut in the middle of an event
        text_line = event.get("line") if isinstance(event, dict) else None
        if isinstance(text_line, str):
            found.extend(text_line.splitlines() or [""])
    return found
