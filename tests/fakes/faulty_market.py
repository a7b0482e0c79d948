"""The local market's server with faults between its API and its customers: failing, late and lost answers.

`POST /control/faults` makes the next `times` calls of one kind fail, `POST /control/no-faults` ends that.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotd_providers.local.server.app import MarketApp

CALLS = {
    ("GET", "/v1/offers"): "offers",
    ("POST", "/v1/machines"): "launch",
    ("GET", "/v1/machines"): "list",
    ("DELETE", "/v1/machines"): "terminate",
    ("GET", "/v1/charges"): "charges",
}


@dataclass(slots=True, kw_only=True)
class Fault:
    """One kind of call fails, so many times.

    Attributes:
        lose: the connection breaks.
        after_effect: the market did what was asked, and only then failed.
        slow_s: seconds on the wall before the true answer.
    """

    call: str
    status: int = 503
    retry_after_s: int | None = None
    lose: bool = False
    after_effect: bool = False
    slow_s: float = 0.0
    times: int = 1


class FaultyMarketApp(MarketApp):
    """The market's API with faults in front of it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app = FrontDoor(self.app)  # type: ignore[assignment]  # an ASGI app is all that the server needs


class FrontDoor:
    """A queue of faults for each kind of call; without one, the answer is true."""

    def __init__(self, app: ASGIApp) -> None:
        self._true = app
        self._waiting: defaultdict[str, deque[Fault]] = defaultdict(deque)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/control/faults", "/control/no-faults"):
            body = json.loads(await Request(scope, receive).body())
            if body:
                self._waiting[body["call"]].append(Fault(**body))
            else:
                self._waiting.clear()
            await JSONResponse({"ok": True})(scope, receive, send)
            return
        fault = self._next(CALLS.get((scope["method"], "/".join(scope["path"].split("/")[:3])), ""))
        if fault is None or fault.slow_s:
            await anyio.sleep(fault.slow_s if fault else 0)
            await self._true(scope, receive, send)
            return
        if fault.after_effect:
            await self._true(scope, receive, _nowhere)
        if fault.lose:
            # More bytes are promised than ever come: the client sees its connection break.
            await StreamingResponse(_nothing(), headers={"content-length": "1000000"})(scope, receive, send)
            return
        headers = {"retry-after": str(fault.retry_after_s)} if fault.retry_after_s is not None else None
        answer = JSONResponse({"error": "injected", "message": "a fault was asked for"}, fault.status, headers=headers)
        await answer(scope, receive, send)

    def _next(self, call: str) -> Fault | None:
        queue = self._waiting[call]
        if not queue:
            return None
        queue[0].times -= 1
        return queue[0] if queue[0].times else queue.popleft()


async def _nowhere(message: Message) -> None:
    del message


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
