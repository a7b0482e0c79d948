"""A fake cloud on loopback: any ASGI app, served by a thread, with every request recorded.

    with serving(app) as cloud:
        settings = Settings(base_url=cloud.url)
        ...
        assert [r.path for r in cloud.requests] == ["/api/v0/bundles/"]

The thread has its own event loop, so that synchronous clients (official SDKs, boto3) and tests that move their own
loop's time can be served alike. An app may kill the connection of the request it is answering with `cut(scope)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

START_TIMEOUT_S: Final = 10.0
ACCEPT_STEPS_MAX: Final = 100
_CUT: Final = "spotd.testkit.cut"


@dataclass(slots=True, kw_only=True)
class RecordedRequest:
    """One request as it arrived.

    Attributes:
        headers: names in lower case; the last value where one came several times.
        status: what was answered; `None` while unanswered, and for ever if the answer was lost.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    status: int | None = None

    @property
    def url(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


@dataclass(slots=True, kw_only=True)
class Served:
    """A running server.

    Attributes:
        url: `http://127.0.0.1:PORT`.
        requests: everything that arrived, in order; append-only while the server runs.
    """

    url: str
    port: int
    requests: list[RecordedRequest]
    _stop: Callable[[], None]

    def stop(self) -> None:
        """Stop the server and drop its connections. Stopping again changes nothing."""
        self._stop()


def cut(scope: Scope) -> None:
    """Drop the connection of this request, as if a cable was pulled; the app should return at once."""
    scope["extensions"][_CUT]()


async def read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def as_request(scope: Scope, body: bytes) -> RecordedRequest:
    """Build the record of an ASGI scope whose body was read."""
    return RecordedRequest(
        method=scope["method"],
        path=scope["raw_path"].decode("latin-1").partition("?")[0],
        query=scope["query_string"].decode("latin-1"),
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
        body=body,
    )


def receive_again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers the body once more."""
    delivered = False

    async def replay() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


@contextmanager
def serving(app: AsgiApp) -> Iterator[Served]:
    """Serve `app` on a free port of 127.0.0.1 until the block ends."""
    requests: list[RecordedRequest] = []
    transports: dict[tuple[str, int], asyncio.Transport] = {}
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    # asyncio sets it only where it made the socket; without it the body of each answer waits 40 ms for the head's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        _Recorder(app, requests, transports), http="h11", ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    protocol = _protocol(transports)
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        state = ServerState()
        stopping = asyncio.Event()
        # Not uvicorn's own main loop: it checks ten times a second whether to stop, which a suite pays for every time.
        server = await loop.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}, _loop=loop), sock=listener
        )
        ready.set_result((loop, stopping))
        await stopping.wait()
        # Python 3.11 drops a connection that is just being accepted when its server closes, without closing it.
        for _ in range(ACCEPT_STEPS_MAX):
            if not any("_accept_connection" in str(task.get_coro()) for task in asyncio.all_tasks()):
                break
            await asyncio.sleep(0)
        server.close()
        for _ in range(3):  # connections meet and leave their protocols a step later
            for transport in list(transports.values()):
                transport.abort()
            await asyncio.sleep(0)
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    def run() -> None:
        with asyncio.Runner() as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name=f"fake cloud on port {port}", daemon=True)

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: stopped before
            loop.call_soon_threadsafe(stopping.set)
        thread.join(START_TIMEOUT_S)

    thread.start()
    loop, stopping = ready.result(timeout=START_TIMEOUT_S)
    try:
        yield Served(url=f"http://127.0.0.1:{port}", port=port, requests=requests, _stop=stop)
    finally:
        stop()


class _Recorder:
    def __init__(
        self,
        app: AsgiApp,
        requests: list[RecordedRequest],
        transports: dict[tuple[str, int], asyncio.Transport],
    ) -> None:
        self._app = app
        self._requests = requests
        self._transports = transports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        record = as_request(scope, body)
        self._requests.append(record)
        transport = self._transports.get(tuple(scope["client"]))
        is_cut = False

        def cut_connection() -> None:
            nonlocal is_cut
            is_cut = True
            if transport is not None:
                transport.abort()

        async def watched(message: Message) -> None:
            if is_cut:
                return
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        await self._app({**scope, "extensions": {_CUT: cut_connection}}, receive_again(body, receive), watched)
        if is_cut:
            record.status = None
            # Let the server notice the lost connection, or it would complain that nothing was answered.
            await asyncio.sleep(0)


def _protocol(transports: dict[tuple[str, int], asyncio.Transport]) -> type[H11Protocol]:
    class RememberedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
            transports[transport.get_extra_info("peername")] = transport
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            transports.pop(self.client, None)  # type: ignore[arg-type] # a TCP peer is always an address and a port
            super().connection_lost(exc)

    return RememberedProtocol


# Faults between a provider and its cloud, as ASGI middleware with a queue of them.
#
#     faults = Faults(app, classify=which_call)
#     with serving(faults) as cloud:
#         faults.lose_answer(Call.LAUNCH)           # the machine is bought, the answer never arrives
#         faults.answer(Call.LIST, Canned(status=503), times=3)
#
# Faults wait in one queue per call and are used up in order, one per request; a call without a waiting fault is
# answered truly. *After effect* means that the cloud did what was asked before the fault struck.


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
