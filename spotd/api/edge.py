"""The edge of the API: what can go wrong becomes JSON, every wait has an end, and a stream can refuse with a status."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import date
from typing import Any, Final, TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from spotd.api.handlers import Handlers
from spotd.api.handlers.context import CALLER
from spotd.api.requests import (
    utc_text,
)
from spotd.api.responses import (
    INTERNAL,
    STATUS_OF_DEFECT,
    ApiRefusal,
    ApiUnavailable,
    ByteStream,
    Forbidden,
    Record,
    RecordStream,
    error_body,
    json_response,
    refusal_response,
)
from spotd.api.routes import (
    ApiRoute,
)
from spotd.core.domain.policy import OWNER, Caller, Right

QUICK_S: Final = 30.0
"""Longest that a query of rows may take; the client waits a little longer."""
PATIENT_S: Final = 150.0
"""Longest for what asks providers or the object store."""
REQUESTS_OF_ONE_MAX: Final = 4
"""Of one user by TCP, at a time; others wait for their turn. What is uploaded has bounds of its own."""
ADOPTION_S: Final = 600.0
"""To read the files of ten thousand jobs from a slow store."""
_ERROR_CHECK_S: Final = 0.1

CALLER_KEY: Final = "spotd.caller"
"""Of a request's scope: set by who has checked a token. A request without it came by the owner's socket."""
Failure = Callable[[str, Exception], None]
"""Called with the route and what broke; must not raise."""
T = TypeVar("T")


def require_right(route: ApiRoute, caller: Caller) -> None:
    """Check that the caller may use the route.

    Raises:
        Forbidden
    """
    if caller.right >= route.right:
        return
    if route.right is Right.LOCAL:
        raise Forbidden(f"{route.path} leads to a place on the daemon's own computer", hint="run spotctl there")
    raise Forbidden(
        f"{caller.name} may {caller.right.name.lower()} only, and this needs the right to {route.right.name.lower()}",
        hint=f"role in [users.{caller.name}] of the daemon's config",
    )


def _store_down(sentence: str) -> ApiUnavailable:
    return ApiUnavailable(sentence, hint="running jobs go on; ask again when it is back, or spotctl doctor")


class RequestEdge:
    """Between a request and a handler: what can go wrong becomes JSON, and every wait has an end."""

    def __init__(
        self, handlers: Handlers, on_failure: Failure, closing: anyio.Event | None, code_bytes_max: int
    ) -> None:
        self._handlers = handlers
        self._on_failure = on_failure
        self._closing = closing
        self._code_bytes_max = code_bytes_max
        self._turns: dict[str, anyio.CapacityLimiter] = {}
        self._uploads: Counter[str] = Counter()
        """Of each user who may not operate, those under way."""
        self._bytes_day: date | None = None
        self._bytes_of: Counter[str] = Counter()

    def guarded(self, route: ApiRoute) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a route, with everything that can go wrong turned into JSON."""
        endpoint = getattr(self, route.name)

        async def answer(request: Request) -> Response:
            caller: Caller = request.scope.get(CALLER_KEY, OWNER)
            CALLER.set(caller)
            try:
                require_right(route, caller)
                arguments = await route.arguments(request)
                async with self._turn(caller.name if route.method != "PUT" else ""):
                    if route.is_of_own and caller.right < Right.OPERATE:
                        ref = arguments["ref"]
                        arguments["ref"] = await self._ask(lambda: self._handlers.context.own(ref, caller))
                    found = await endpoint(**arguments)
                return found if isinstance(found, Response) else self._reply(found, status=route.status)
            except ApiRefusal as refusal:
                return refusal_response(refusal)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as exc:  # noqa: BLE001 - the edge of the API: the cause goes to the log, a sentence to the caller
                self._on_failure(route.path, exc)
                message = "the daemon met an error of its own; nothing is known to have changed"
                return json_response(
                    error_body(INTERNAL, message, hint="see the daemon's log"), status=STATUS_OF_DEFECT
                )

        return answer

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Let a user's request be answered beside few others of the same user; the owner's, of no name, at once.

        Raises:
            ApiUnavailable: it was not its turn in time.
        """
        if not name:
            yield
            return
        turns, mine = self._turns.setdefault(name, anyio.CapacityLimiter(REQUESTS_OF_ONE_MAX)), object()
        with anyio.move_on_after(QUICK_S) as waiting:
            await turns.acquire_on_behalf_of(mine)
        if waiting.cancelled_caught:
            raise ApiUnavailable(f"{name} has {REQUESTS_OF_ONE_MAX} requests under way", hint="wait for their answers")
        try:
            yield
        finally:
            turns.release_on_behalf_of(mine)

    async def _ask(self, call: Callable[[], Awaitable[T]], *, limit_s: float = QUICK_S) -> T:
        """Return the call's result, given up as soon as the state store has an error.

        Raises:
            Unavailable: the store does not answer, or the limit has passed.
        """
        if sentence := self._handlers.context.database.last_error:
            raise _store_down(sentence)
        results: list[T] = []
        failures: list[Exception] = []
        sentence = ""

        async def work(scope: anyio.CancelScope) -> None:
            try:
                results.append(await call())
            except Exception as exc:  # noqa: BLE001 - carried out of the task group unchanged, which would wrap it
                failures.append(exc)
            scope.cancel()

        with anyio.move_on_after(limit_s):
            async with anyio.create_task_group() as group:
                group.start_soon(work, group.cancel_scope, name="api call")
                while not sentence:
                    await anyio.sleep(_ERROR_CHECK_S)
                    sentence = self._handlers.context.database.last_error
                group.cancel_scope.cancel()
        if failures:
            raise failures[0]
        if results:
            return results[0]
        if sentence:
            raise _store_down(sentence)
        raise ApiUnavailable(f"the daemon did not find an answer within {limit_s:.0f} s", hint="spotctl doctor")

    def _reply(self, body: Mapping[str, Any], *, status: int) -> Response:
        return json_response({"now": utc_text(self._handlers.context.clock.now()), **body}, status=status)

    async def _bytes(self, chunks: AsyncIterator[bytes], route: str) -> ByteStream:
        first = await self._first(chunks)
        return ByteStream(first, chunks, on_failure=lambda exc: self._on_failure(route, exc))

    async def _records(self, records: AsyncIterator[Record], *, route: str, follow: bool) -> RecordStream[Record]:
        """Answer with a stream; its first record is awaited only where that cannot take as long as a job."""
        first = [] if follow else await self._first(records)
        return RecordStream(first, records, closing=self._closing, on_failure=lambda exc: self._on_failure(route, exc))

    async def _first(self, items: AsyncIterator[T]) -> list[T]:
        """Return the first item or nothing, so that a refusal still gets its status code."""

        async def step() -> list[T]:
            async for item in items:
                return [item]
            return []

        return await self._ask(step, limit_s=PATIENT_S)
