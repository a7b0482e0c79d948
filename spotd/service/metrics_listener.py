"""Answers scrapers over HTTP, without ever being in the daemon's way.

An answer is computed at most once in `KEPT_S`, by one task, whatever number of scrapers ask. Each connection is one
request and one answer within a deadline, and no more than `CONNECTIONS_MAX` are open: one that is slow, silent or
hostile costs a socket for a few seconds, and one that has not asked yet makes room for the next.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio
import anyio.abc

from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.doctor import row_of
from spotd.api.responses import ApiRefusal
from spotd.api.schemas.answers import CheckResponse
from spotd.daemon.commits import Threads
from spotd.daemon.controllers import Controller, Outage
from spotd.service.metrics import MetricsReader, text_of, text_while_waiting
from spotd_providers.contract.provider import Logger

KEPT_S: Final = 2.0
COMPUTED_WITHIN_S: Final = 20.0
REQUEST_WITHIN_S: Final = 5.0
ANSWER_WITHIN_S: Final = 10.0
HEAD_BYTES_MAX: Final = 8 * 1024
CONNECTIONS_MAX: Final = 16
BIND_AGAIN_S: Final = 30.0
_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def is_loopback(host: str) -> bool:
    """Whether only programs of this computer reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class MetricsText:
    """The newest text, made at most once in `KEPT_S`."""

    def __init__(self, compute: Callable[[], Awaitable[bytes]], *, log: Logger) -> None:
        self._compute = compute
        self._log = log
        self._turn = anyio.Lock()
        self._text: bytes | None = None
        self._computed_s = -KEPT_S

    async def get(self) -> bytes | None:
        """Return text that is no older than `KEPT_S`; `None` where none can be made now."""
        async with self._turn:
            if anyio.current_time() - self._computed_s >= KEPT_S:
                self._text = None
                with anyio.move_on_after(COMPUTED_WITHIN_S):
                    self._text = await self._new_text()
                self._computed_s = anyio.current_time()
            return self._text

    async def _new_text(self) -> bytes | None:
        try:
            return await self._compute()
        except ApiRefusal:
            return None  # the state cannot be read now, which `doctor` states
        except Exception as exc:  # noqa: BLE001 - the outermost frame: figures that cannot be shown must end nothing
            self._log.error("metrics.failed", exc_info=exc)
            return None


class MetricsListener:
    """Serves the newest text. `last_error`: why nothing is served, empty while something is."""

    def __init__(self, host: str, port: int, text: MetricsText, *, log: Logger) -> None:
        self._host, self._port = host, port
        self._text = text
        self._outage = Outage(log, "metrics.not_served", "metrics.served")
        self._open: dict[object, anyio.CancelScope | None] = {}
        """Each open connection, oldest first, with what ends it while its request has not arrived."""

    @property
    def last_error(self) -> str:
        return self._outage.error

    @property
    def where(self) -> str:
        return f"http://{self._host}:{self._port}/metrics"

    async def run(self) -> None:
        """Serve until this is cancelled; an address in use, or no file left to open, is tried again and again."""
        while True:
            try:
                listener = await anyio.create_tcp_listener(local_host=self._host, local_port=self._port)
            except OSError as exc:
                self._outage.update(f"cannot listen at {self._host}:{self._port}: {exc.strerror}")
                await anyio.sleep(BIND_AGAIN_S)
                continue
            self._outage.update("")
            try:
                async with listener:
                    await listener.serve(self.answer)
            except* OSError as failed:
                first: BaseException = failed
                while isinstance(first, BaseExceptionGroup):
                    first = first.exceptions[0]
                self._outage.update(f"no connection can be taken at {self.where}: {first}")
            await anyio.sleep(BIND_AGAIN_S)

    async def answer(self, stream: anyio.abc.ByteStream) -> None:
        """Answer one connection and close it."""
        mine = object()
        is_served = self._make_room()
        if is_served:
            self._open[mine] = None
        try:
            async with stream:
                if not is_served:
                    await self._send(stream, 503, "too many connections; ask less often", lingers=False)
                    return
                head: bytes | None = None
                with anyio.move_on_after(REQUEST_WITHIN_S) as asking:
                    self._open[mine] = asking
                    head = await _head_of(stream)
                if head and mine in self._open:
                    self._open[mine] = None
                    await self._send(stream, *await self._reply_to(head))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError):
            pass  # it went away, which is its own affair
        finally:
            self._open.pop(mine, None)

    def _make_room(self) -> bool:
        """Return whether one more can be served; the oldest that has not asked yet ends for it."""
        if len(self._open) < CONNECTIONS_MAX:
            return True
        for silent, asking in self._open.items():
            if asking is not None:
                asking.cancel()
                del self._open[silent]
                return True
        return False

    async def _reply_to(self, head: bytes) -> tuple[int, str | bytes]:
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return 405, "only GET is answered"
        if not self._is_for_us(lines[1:]):
            return 403, "this is served to programs of this computer, by its address or as localhost"
        if path == "/":
            return 200, "the metrics of spotd are at /metrics"
        if path != "/metrics":
            return 404, "the metrics are at /metrics"
        text = await self._text.get()
        return (503, "the figures cannot be read now") if text is None else (200, text)

    def _is_for_us(self, headers: list[str]) -> bool:
        """Whether the request names an address: a page in a browser reaches loopback only by a name of its own."""
        if not is_loopback(self._host):
            return True
        named = [line.partition(":")[2].strip() for line in headers if line.lower().startswith("host:")]
        hosts = {one.removesuffix(f":{self._port}").strip("[]") for one in named}
        return all(is_loopback(host) for host in hosts)

    async def _send(
        self, stream: anyio.abc.ByteStream, status: int, body: str | bytes, *, lingers: bool = True
    ) -> None:
        data = body if isinstance(body, bytes) else f"{body}\n".encode()
        kind = _TYPE if isinstance(body, bytes) else "text/plain; charset=utf-8"
        reason = {200: "OK", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}.get(status, "Unavailable")
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
            "Connection: close\r\n\r\n"
        )
        with anyio.move_on_after(ANSWER_WITHIN_S):
            await stream.send(head.encode() + data)
            if not lingers:
                return
            # To close at once would drop what the other side has not taken yet.
            await stream.send_eof()
            while True:
                await stream.receive()


async def _head_of(stream: anyio.abc.ByteStream) -> bytes:
    """Return the request without its body; nothing where it is too long."""
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > HEAD_BYTES_MAX:
            return b""
        head += await stream.receive(4096)
    return head


# The metrics of one daemon, put together.


def make_text(context: HandlerContext, controllers: Sequence[Controller], *, log: Logger) -> MetricsText:
    """Return what makes the text of this daemon's figures; they are computed in a thread of their own."""
    reader, threads = MetricsReader(context, controllers), Threads(inline=context.inline)

    async def compute() -> bytes:
        return await threads.run(partial(text_of, await reader.read()))

    return MetricsText(compute, log=log)


def text_of_waiting(version: str, *, log: Logger) -> MetricsText:
    """Return what makes the text of a daemon that waits for the lead."""

    async def compute() -> bytes:
        return text_while_waiting(version)

    return MetricsText(compute, log=log)


def make_listener(
    host: str, port: int, context: HandlerContext, controllers: Sequence[Controller], *, log: Logger
) -> MetricsListener:
    """Return what serves this daemon's figures, with a line in `doctor`."""
    listener = MetricsListener(host, port, make_text(context, controllers, log=log), log=log)

    def findings() -> list[CheckResponse]:
        error = listener.last_error
        hint = "see [metrics] in the config; everything else goes on without them" if error else ""
        return [row_of("daemon", "metrics", error or f"at {listener.where}", ok=not error, hint=hint)]

    context.findings.append(findings)
    return listener
