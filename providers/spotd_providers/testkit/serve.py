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
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
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
