"""Who may speak to the dashboard: checks before every request and every websocket.

Theory. The dashboard acts with its user's money, and a browser sends requests for any page that it shows. So: the
`Host` must be a name that was meant (a foreign name that resolves to this address is refused), what comes from another
page is refused by its `Origin` or `Sec-Fetch-Site`, and no page may frame ours. On loopback another user of this
computer is refused, as at the daemon's socket, unless a proxy is expected. Where a token is set, everything but the
login needs a session or the token itself in a header; it is never part of an address.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotd.tokens import WrongTokens, digest_of, left_s, peer_of
from spotd.web.folder import CODE_BYTES_MAX

# Who is at the other end of a connection: an address, and on loopback the user, where Linux states it.


_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_OWN: Final = frozenset({0})
GONE: Final = -1


def is_other_user(client: Sequence[Any] | None, server: Sequence[Any] | None) -> bool:
    """Whether the peer is a user other than this process's and root, or has gone; false where nothing is known."""
    if client is None or server is None:
        return False
    uid = peer_uid(str(client[0]), int(client[1]), int(server[1] or 0))
    return uid is not None and uid not in _OWN | {os.geteuid()}


def peer_uid(address: str, port: int, to_port: int) -> int | None:
    """Return the owner of the socket with this end and that other end; `None` where the system does not say.

    One that its process has closed is `GONE`: such a socket is listed as root's, whosever it was.
    """
    ends = {f"{text}:{port:04X}" for text in _as_in_table(address)}
    for table in _TABLES:
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if len(columns) > 9 and columns[1] in ends and columns[2].endswith(f":{to_port:04X}"):
                return GONE if columns[9] == "0" else int(columns[7])
    return None


def _as_in_table(address: str) -> list[str]:
    """Return an address as the tables write it: words of four bytes in the byte order of the processor."""
    try:
        packed = ipaddress.ip_address(address).packed
    except ValueError:
        return []
    if len(packed) == 4:
        return [_words(packed), _words(b"\0" * 10 + b"\xff\xff" + packed)]
    return [_words(packed)]


def _words(packed: bytes) -> str:
    import sys

    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words)


# The token of a dashboard, and the sessions of the browsers that were shown to know it.


COOKIE: Final = "spotd_session"
TOKEN_LENGTH_MIN: Final = 16
SESSION_S: Final = 7 * 86_400
SESSIONS_MAX: Final = 64
"""One more closes the oldest."""
ALL_FAILURES_MAX: Final = 64
DELAY_S: Final = 1.0
"""How long each comparison waits while so many tokens were wrong in so long, from wherever they came."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Sessions:
    """Open sessions. Only hashes are kept: what could open a session is nowhere in memory for long."""

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = digest_of(token)
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._wrong = WrongTokens(clock)
        self._all_failures: deque[float] = deque(maxlen=ALL_FAILURES_MAX)

    def is_token(self, text: str, peer: str) -> bool:
        """Whether this is the token; false without a comparison while too many of this peer were wrong."""
        if self.wait_s(peer):
            return False
        is_right = hmac.compare_digest(digest_of(text), self._token)
        if not is_right:
            self._wrong.note(peer)
            self._all_failures.append(self._clock())
        return is_right

    def wait_s(self, peer: str) -> float:
        """Return the seconds until a token of this peer is compared again."""
        return self._wrong.wait_s(peer)

    def delay_s(self) -> float:
        """Return how long the next comparison is to wait, of any peer: that locks out none."""
        return DELAY_S if left_s(self._all_failures, ALL_FAILURES_MAX, self._clock()) else 0.0

    def open(self) -> str:
        """Return the cookie of a new session."""
        value = secrets.token_urlsafe(32)
        self._until[digest_of(value)] = self._clock() + SESSION_S
        while len(self._until) > SESSIONS_MAX:
            self._until.popitem(last=False)
        return value

    def is_open(self, value: str) -> bool:
        """Whether this is the cookie of an open session."""
        return bool(value) and self._until.get(digest_of(value), 0.0) > self._clock()

    def close(self, value: str) -> None:
        """End a session, if there is such a one."""
        self._until.pop(digest_of(value), None)


LOGIN: Final = "/login"
OPEN: Final = frozenset(
    {(LOGIN, "POST"), *((path, "GET") for path in (LOGIN, "/style.css", "/favicon.svg", "/favicon.ico"))}
)
"""What is served without a session: nothing of the daemon's is in it. Any other method would make a page's state."""
_ENDED: Final = {"type": "websocket.disconnect", "code": 1008}
BODY_BYTES_MAX: Final = CODE_BYTES_MAX + 65_536
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'"
)
"""Templates are compiled in the browser, hence `unsafe-eval`; nothing comes from or goes to another place."""
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address that is listened on.

    Attributes:
        names: further names under which a proxy serves it.
    """

    host: str
    names: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def needs_token(self) -> bool:
        """Whether others may reach it; a name is for a proxy, and whom that lets in is not known."""
        return bool(self.names) or not self.is_loopback

    def allows(self, host: str) -> bool:
        """Whether a `Host` header names this place; a port may be forwarded, so any will do.

        An address as such cannot be made to point elsewhere, so each is good where others may connect at all.
        """
        name = _name_of(host)
        if not name:
            return False
        if name == "localhost" or name == self.host.lower() or name in self.names:
            return True
        return is_loopback(name) or (_shown_address(name) is not None and not self.is_loopback)


def is_loopback(host: str) -> bool:
    """Whether nothing but this computer reaches the address."""
    address = _shown_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _shown_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """Return the name of `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`; empty for anything else."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        return ""
    plain = parts.netloc == host and not parts.username and not parts.path
    return (parts.hostname or "") if plain else ""


def refusal(place: Place, method: str, headers: Mapping[str, str], *, is_socket: bool) -> str:
    """Return why a request may not pass, as a sentence; empty where it may.

    Args:
        headers: by names in small letters.
    """
    host = headers.get("host", "")
    if not place.allows(host):
        return "this address is not one of the dashboard's; spotctl web --name NAME permits a name"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return "another page sent this request"
    if is_socket and origin is None:
        return "a websocket needs an Origin"
    site = headers.get("sec-fetch-site", "same-origin")
    if site in {"same-origin", "none"}:
        return "" if origin is not None or method in SAFE else "a request that changes something needs an Origin"
    # A link on another page may open ours, and nothing else.
    is_visit = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return "" if is_visit and headers.get("sec-fetch-dest") == "document" else "another page sent this request"


class Guard:
    """The checks, around the application."""

    def __init__(self, app: ASGIApp, place: Place, sessions: Sessions | None) -> None:
        self._app = app
        self._place = place
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        is_socket = scope["type"] == "websocket"
        headers = _headers(scope)
        sentence = refusal(self._place, scope.get("method", "GET"), headers, is_socket=is_socket)
        if not sentence and not self._place.needs_token and is_other_user(scope.get("client"), scope.get("server")):
            sentence = "the dashboard is another user's; spotctl web starts one of your own"
        if sentence:
            await _refuse(scope, receive, send, sentence)
        elif not is_socket and (scope["path"], scope["method"]) in OPEN:
            await self._app(scope, receive, _with_headers(send))
        elif await self._is_known_now(scope, headers):
            if not is_socket and _is_too_large(headers):
                text = "a request holds at most 500 MB, and says how much"
                await PlainTextResponse(text, status_code=413)(scope, receive, _with_headers(send))
                return

            async def receiving() -> Message:
                """Return the next message; a websocket ends with its session, at the next sign of life."""
                message = await receive()
                return message if not is_socket or self._is_known(scope, headers) else dict(_ENDED)

            await self._app(scope, receiving, _with_headers(send))
        elif not is_socket and headers.get("sec-fetch-mode", "navigate") == "navigate":
            await RedirectResponse(LOGIN, status_code=303)(scope, receive, _with_headers(send))
        else:
            await _refuse(scope, receive, send, "log in first")

    async def _is_known_now(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        if self._sessions is not None and "authorization" in headers:
            await asyncio.sleep(self._sessions.delay_s())
        return self._is_known(scope, headers)

    def _is_known(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        if self._sessions is None:
            return True
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._sessions.is_token(value.strip(), peer_of(scope.get("client"), headers))
        return self._sessions.is_open(session_cookie(headers))


def _is_too_large(headers: Mapping[str, str]) -> bool:
    """Whether the body exceeds the largest upload with its form, or states no length; the server enforces a length."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not length.isdecimal() or int(length[:20]) > BODY_BYTES_MAX


def session_cookie(headers: Mapping[str, str]) -> str:
    """Return the value of our cookie, empty without it."""
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == COOKIE), "")


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers by name; a name that is given twice has no value that can be relied on."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        if key in {"host", "origin"} and key in found:
            return {"host": ""}
        found[key] = value.decode("latin-1")
    return found


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra: Collection[tuple[bytes, bytes]] = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sending


async def _refuse(scope: Scope, receive: Receive, send: Send, sentence: str) -> None:
    if scope["type"] == "websocket":
        closing: dict[str, Any] = {"type": "websocket.close", "code": 1008, "reason": sentence}
        await receive()
        await send(closing)
        return
    await PlainTextResponse(sentence, status_code=403)(scope, receive, _with_headers(send))
