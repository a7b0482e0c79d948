"""Passes one request on to the daemon that leads, and its answer back, by TLS.

Theory. The leader's row in the database names its URL and the hash of its certificate. Nothing but that very
certificate is spoken to, so neither a name, an authority nor a clock has to be right, and nothing is sent anywhere
else. Where there is a `secrets_key`, nothing that another one wrote into that row is believed (`Leader.proofs`). Each
request states the term that it is meant for: a daemon that leads in no such term does nothing with it, so a request
goes over one such hop only, and never to a successor. Until the first byte of a request is sent nothing can have been
done. From then on what was done is unknown until the answer begins.
"""

from __future__ import annotations

import hashlib
import math
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import h11
from anyio.streams.tls import TLSAttribute
from starlette.types import Receive, Scope, Send

from spotd.api.responses import NDJSON_TYPE
from spotd.store import Leader

TERM_HEADER: Final = b"spotd-term"
CONNECT_S: Final = 3.0
"""For the connection and its handshake, in which a leader that is frozen is noticed."""
TURN_S: Final = 10.0
"""Until it may be opened, since so many others are."""
SEND_S: Final = 30.0
IDLE_S: Final = 180.0
"""Between two pieces of an answer; a stream sends an empty line every ten seconds."""
_PIECE: Final = 64 * 1024
_SENT: Final = frozenset({b"content-type", b"content-length"})
_RETURNED: Final = frozenset({b"content-type", b"content-length", b"retry-after", b"www-authenticate"})
_NOT_LET_IN: Final = {
    HTTPStatus.UNAUTHORIZED: "has another secrets_key in [daemon] than this spotd",
    HTTPStatus.TOO_MANY_REQUESTS: "lets no more in from this computer now: is secrets_key in [daemon] the same here?",
}
_BROKEN: Final = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.ProtocolError)


class NotDone(Exception):
    """The leader did nothing with the request, and nothing was answered; the message says why."""


class NotAnswered(Exception):
    """The request was sent, at least in part, and no answer came; nothing was answered."""


class AnswerCut(Exception):
    """The answer has begun and does not go on."""


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # in its place the certificate is compared, before anything is sent
    return context


@dataclass(eq=False, kw_only=True)
class Exchange:
    """One request on its way.

    Attributes:
        token: by which the leader knows the caller.
        is_own: it is the token of this daemon; else that of the user who asks.
        answer_s: within how many seconds after the end of the request the answer has to begin.
        opening: how many connections to the leader may be opened at a time.
        is_refused: the leader answered at once that it did nothing.
    """

    leader: Leader
    token: str = field(repr=False)
    is_own: bool
    answer_s: float
    opening: anyio.Semaphore
    scope: Scope
    receive: Receive
    send: Send
    is_between_lines: bool = False
    """What was passed on of a stream of records ends with a whole line."""
    is_refused: bool = False
    _begun: bool = False
    _is_whole: bool = False
    _is_of_lines: bool = False
    _departed: bool = False
    _failure: NotDone | None = None
    _wanted: anyio.Event = field(default_factory=anyio.Event)
    """The leader takes the body."""
    _waiting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _wire: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    async def run(self, ended: anyio.Event) -> None:
        """Exchange request and answer, until `ended` is set.

        Raises:
            NotDone, NotAnswered, AnswerCut
        """
        stream: anyio.abc.ByteStream | None = None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._end, ended, group.cancel_scope, name="forward-end")
                try:
                    stream = await self._connect()
                except NotDone as exc:
                    self._failure = exc
                else:
                    group.start_soon(self._feed, stream, group.cancel_scope, name="forward-request")
                    with self._waiting:
                        await self._return(stream)
                group.cancel_scope.cancel()
        finally:
            if stream is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(stream)
        if self._failure is not None:
            raise self._failure
        if stream is None:
            raise NotDone(f"{self.leader.words} does not lead any more")
        if not self._is_whole and not self._departed:
            words = f"{self.leader.words} did not answer at {self.leader.url}"
            raise AnswerCut(words) if self._begun else NotAnswered(words)

    async def _connect(self) -> anyio.abc.ByteStream:
        """Return a connection to the leader and to nothing else."""
        url = self.leader.url
        try:
            parts = urlsplit(url)
            with anyio.fail_after(TURN_S):
                await self.opening.acquire()
            try:
                with anyio.fail_after(CONNECT_S):
                    stream = await anyio.connect_tcp(
                        parts.hostname or "",
                        parts.port or 443,
                        ssl_context=_context(),
                        tls_hostname=parts.hostname,
                        tls_standard_compatible=False,
                    )
            finally:
                self.opening.release()
        except TimeoutError:
            raise NotDone(f"the leader does not answer at {url}") from None
        except (*_BROKEN, ValueError) as exc:
            raise NotDone(f"the leader cannot be reached at {url}: {_words(exc)}") from exc
        certificate = stream.extra(TLSAttribute.peer_certificate_binary)  # noqa: S610 - anyio's, not Django's
        shown = hashlib.sha256(certificate or b"").hexdigest()
        if shown != self.leader.certificate:
            await anyio.aclose_forcefully(stream)
            raise NotDone(f"what answers at {url} has another certificate than the leader")
        return stream

    async def _end(self, ended: anyio.Event, scope: anyio.CancelScope) -> None:
        await ended.wait()
        scope.cancel()

    async def _feed(self, stream: anyio.abc.ByteStream, scope: anyio.CancelScope) -> None:
        """Send the request as it comes; then wait for who asked to go away."""
        headers = [*self._headers()]
        if has_body := any(name in {b"content-length", b"transfer-encoding"} for name, _ in headers):
            # One that refuses it early closes at once, and what is on its way then can take the refusal with it.
            headers.append((b"expect", b"100-continue"))
        target = self.scope["raw_path"] + (b"?" + self.scope["query_string"] if self.scope["query_string"] else b"")
        try:
            await self._put(stream, h11.Request(method=self.scope["method"], target=target, headers=headers))
            if has_body:
                with anyio.move_on_after(SEND_S):
                    await self._wanted.wait()
            more = has_body
            while more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    self._departed = True
                    scope.cancel()
                    return
                if body := message.get("body", b""):
                    await self._put(stream, h11.Data(data=body))
                more = message.get("more_body", False)
            await self._put(stream, h11.EndOfMessage())
        except _BROKEN:
            pass  # an answer that refuses the rest may have come
        self._waiting.deadline = anyio.current_time() + self.answer_s
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._departed = True
        scope.cancel()

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"host", urlsplit(self.leader.url).netloc.encode()
        yield b"authorization", f"Bearer {self.token}".encode("latin-1")
        yield TERM_HEADER, self.leader.term.encode()
        yield b"connection", b"close"
        for name, value in self.scope["headers"]:
            if name in _SENT:
                yield name, value
            elif name == b"transfer-encoding":
                yield name, b"chunked"

    async def _put(self, stream: anyio.abc.ByteStream, event: h11.Event) -> None:
        data = self._wire.send(event)
        if data:
            with anyio.fail_after(SEND_S):
                await stream.send(data)

    async def _return(self, stream: anyio.abc.ByteStream) -> None:
        """Pass the answer on as it comes."""
        try:
            while True:
                event = self._wire.next_event()
                if event is h11.NEED_DATA:
                    with anyio.fail_after(IDLE_S if self._begun else math.inf):
                        self._wire.receive_data(await self._piece(stream))
                elif isinstance(event, h11.InformationalResponse):
                    self._wanted.set()
                elif isinstance(event, h11.Response):
                    if not await self._begin(event):
                        return
                elif isinstance(event, h11.Data):
                    data = bytes(event.data)
                    self.is_between_lines = self._is_of_lines and data.endswith(b"\n")
                    await self.send({"type": "http.response.body", "body": data, "more_body": True})
                elif isinstance(event, h11.EndOfMessage):
                    self._is_whole = True
                    await self.send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                    return
        except _BROKEN:
            return  # `run` says what is then known

    async def _piece(self, stream: anyio.abc.ByteStream) -> bytes:
        try:
            return await stream.receive(_PIECE)
        except anyio.EndOfStream:
            return b""

    async def _begin(self, event: h11.Response) -> bool:
        """Pass the head of the answer on, unless it says that nothing was done."""
        words = ""
        if event.status_code == HTTPStatus.MISDIRECTED_REQUEST:
            words = "does not lead any more"
        elif event.status_code in _NOT_LET_IN and self.is_own:
            words = _NOT_LET_IN[HTTPStatus(event.status_code)]
        if words:
            self.is_refused, self._failure = True, NotDone(f"{self.leader.words} {words}")
            return False
        self._begun = True
        self._waiting.deadline = math.inf
        headers = [(name, value) for name, value in event.headers if name in _RETURNED]
        self._is_of_lines = self.is_between_lines = (b"content-type", NDJSON_TYPE.encode()) in headers
        await self.send({"type": "http.response.start", "status": event.status_code, "headers": headers})
        return True


def _words(exc: Exception) -> str:
    return getattr(exc, "strerror", None) or getattr(exc, "reason", None) or type(exc).__name__
