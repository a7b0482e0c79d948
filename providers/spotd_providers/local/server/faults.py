"""Faults between the market's API and its customers, for tests: refused, failing, late and lost answers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from spotd_providers.local.server.bodies import FaultBody, MarketCall

_PROMISED_BYTES = "1000000"


@dataclass(slots=True)
class _Waiting:
    fault: FaultBody
    left: int


class FrontDoor:
    """A queue of faults for each kind of call; without one, the answer is true."""

    def __init__(self) -> None:
        self._waiting: defaultdict[MarketCall, deque[_Waiting]] = defaultdict(deque)

    def add(self, fault: FaultBody) -> None:
        """Make the next calls of the fault's kind fail as it states."""
        self._waiting[fault.call].append(_Waiting(fault, fault.times))

    def clear(self) -> None:
        """Drop all faults."""
        self._waiting.clear()

    async def answer(
        self, call: MarketCall, request: Request, do: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer truly, or as the next queued fault has it."""
        fault = self._next(call)
        if fault is None:
            return await do(request)
        if fault.slow_s:
            await anyio.sleep(fault.slow_s)
            return await do(request)
        if fault.after_effect:
            await do(request)
        if fault.lose:
            return _broken_off()
        headers = {"retry-after": str(fault.retry_after_s)} if fault.retry_after_s is not None else None
        return JSONResponse({"error": "injected", "message": "a fault was asked for"}, fault.status, headers=headers)

    def _next(self, call: MarketCall) -> FaultBody | None:
        queue = self._waiting[call]
        if not queue:
            return None
        queue[0].left -= 1
        return queue[0].fault if queue[0].left else queue.popleft().fault


def _broken_off() -> Response:
    """Promise more bytes than ever come: the client sees its connection break."""

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    return StreamingResponse(nothing(), headers={"content-length": _PROMISED_BYTES})
