"""Faults between a provider and its cloud, as ASGI middleware with a queue of them.

    faults = Faults(app, classify=which_call)
    with serving(faults) as cloud:
        faults.lose_answer(Call.LAUNCH)           # the machine is bought, the answer never arrives
        faults.answer(Call.LIST, Canned(status=503), times=3)

Faults wait in one queue per call and are used up in order, one per request; a call without a waiting fault is answered
truly. *After effect* means that the cloud did what was asked before the fault struck.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from spotd_providers.testkit.serve import (
    AsgiApp,
    Message,
    Receive,
    RecordedRequest,
    Scope,
    Send,
    as_request,
    cut,
    read_body,
    receive_again,
)

FOR_EVER: Final = 1_000_000
_POLL_S: Final = 0.02


class Call(StrEnum):
    """The purpose of a request to a cloud, under any API."""

    OFFERS = "offers"
    LAUNCH = "launch"
    LIST = "list"
    """Listing machines; also asking for one of them."""
    TERMINATE = "terminate"
    ACCOUNT = "account"
    """Key, balance, quota, charges."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canned:
    """An answer given instead of the true one."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})


GATEWAY_ERROR: Final = Canned(
    status=502, body=b"<html><body>502 Bad Gateway</body></html>", headers={"content-type": "text/html"}
)
SERVER_ERROR: Final = Canned(status=500, body=b'{"error":"internal"}')
NOT_JSON: Final = Canned(status=200, body=b"<html>we'll be back soon</html>", headers={"content-type": "text/html"})
NOTHING: Final = Canned(status=200, body=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """One request, and the true answer to it; an empty one where the cloud was not asked."""

    scope: Scope
    receive: Receive
    send: Send
    true: Canned


@dataclass(slots=True, kw_only=True)
class _Fault:
    strike: Callable[[_Exchange], Awaitable[None]]
    after_effect: bool
    left: int


class Faults:
    """Middleware that applies the next queued fault to a request. All methods may be called from any thread."""

    def __init__(self, app: AsgiApp, *, classify: Callable[[RecordedRequest], Call]) -> None:
        """Wrap an app. `classify` gets `headers` and `body` too: one URL may serve several calls."""
        self._app = app
        self.classify = classify
        self._lock = threading.Lock()
        self._waiting: dict[Call, deque[_Fault]] = {call: deque() for call in Call}
        self._hung = 0
        self._released = 0

    def answer(self, call: Call, canned: Canned, *, times: int = 1, after_effect: bool = False) -> None:
        """Give the next requests this answer; by default the cloud does nothing for them."""
        self._add(call, lambda it: _send(it.send, canned), times, after_effect=after_effect)

    def lose_answer(self, call: Call, *, times: int = 1, after_effect: bool = True) -> None:
        """Break the connection before the first byte of the answer."""

        async def lose(it: _Exchange) -> None:
            cut(it.scope)

        self._add(call, lose, times, after_effect=after_effect)

    def cut_body(self, call: Call, *, times: int = 1) -> None:
        """Break off the true answer in the middle of its body, after the effect."""
        self._add(call, _send_half_and_cut, times)

    def truncate(self, call: Call, *, times: int = 1) -> None:
        """Deliver the first half of the true answer, in a perfectly valid HTTP message."""

        def half(true: Canned) -> Canned:
            return Canned(status=true.status, body=true.body[: len(true.body) // 2], headers=true.headers)

        self.edit(call, half, times=times)

    def edit(self, call: Call, edit: Callable[[Canned], Canned], *, times: int = 1) -> None:
        """Change the true answer on its way back."""
        self._add(call, lambda it: _send(it.send, edit(it.true)), times)

    def hang(self, call: Call, *, times: int = 1, after_effect: bool = True) -> None:
        """Hold the answer until `clear()` or until the client gives up."""

        async def hold(it: _Exchange) -> None:
            await self._hold(it.receive)
            cut(it.scope)

        self._add(call, hold, times, after_effect=after_effect)

    @property
    def hanging(self) -> bool:
        """Whether a client is being kept waiting."""
        with self._lock:
            return self._hung > 0

    def clear(self) -> None:
        """Drop all queued faults, and release what hangs."""
        with self._lock:
            for queue in self._waiting.values():
                queue.clear()
            self._released += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        fault = self._next(as_request(scope, body))
        if fault is None:
            await self._app(scope, receive_again(body, receive), send)
            return
        true = await self._perform(scope, body, receive) if fault.after_effect else NOTHING
        await fault.strike(_Exchange(scope=scope, receive=receive, send=send, true=true))

    def _add(
        self, call: Call, strike: Callable[[_Exchange], Awaitable[None]], times: int, *, after_effect: bool = True
    ) -> None:
        with self._lock:
            self._waiting[call].append(_Fault(strike=strike, after_effect=after_effect, left=times))

    def _next(self, request: RecordedRequest) -> _Fault | None:
        call = self.classify(request)
        with self._lock:
            queue = self._waiting[call]
            if not queue:
                return None
            queue[0].left -= 1
            return queue[0] if queue[0].left else queue.popleft()

    async def _perform(self, scope: Scope, body: bytes, receive: Receive) -> Canned:
        """Let the cloud do what was asked, and keep its answer here."""
        status = 500
        headers: dict[str, str] = {}
        content = b""

        async def keep(message: Message) -> None:
            nonlocal status, content
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update({n.decode("latin-1").lower(): v.decode("latin-1") for n, v in message["headers"]})
            else:
                content += message.get("body", b"")

        await self._app(scope, receive_again(body, receive), keep)
        return Canned(status=status, body=content, headers=headers)

    async def _hold(self, receive: Receive) -> None:
        with self._lock:
            self._hung += 1
            release_no = self._released
        gone = asyncio.ensure_future(receive())
        try:
            while not gone.done():
                with self._lock:
                    if self._released != release_no:
                        return
                await asyncio.wait([gone], timeout=_POLL_S)
        finally:
            gone.cancel()
            with self._lock:
                self._hung -= 1


def _answer_with(canned: Canned) -> Callable[[Faults, Call, int], None]:
    return lambda faults, call, times: faults.answer(call, canned, times=times, after_effect=True)


STRIKES: Final[dict[str, Callable[[Faults, Call, int], None]]] = {
    "connection lost": lambda faults, call, times: faults.lose_answer(call, times=times),
    "no answer": lambda faults, call, times: faults.hang(call, times=times),
    "answer cut": lambda faults, call, times: faults.cut_body(call, times=times),
    "answer truncated": lambda faults, call, times: faults.truncate(call, times=times),
    "not JSON": _answer_with(NOT_JSON),
    "empty": _answer_with(NOTHING),
    "gateway error": _answer_with(GATEWAY_ERROR),
    "server error": _answer_with(SERVER_ERROR),
}
"""Ways to lose the answer of a call so many times, after its effect."""


async def _send(send: Send, answer: Canned) -> None:
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    await _start(send, answer.status, headers)
    await send({"type": "http.response.body", "body": answer.body})


async def _send_half_and_cut(it: _Exchange) -> None:
    body = it.true.body or b"{}"
    await _start(it.send, it.true.status, {**it.true.headers, "content-length": str(len(body))})
    await it.send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
    await asyncio.sleep(0)
    cut(it.scope)


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
