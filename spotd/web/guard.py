"""Who may speak to the dashboard: checks before every request and every websocket.

Theory. The dashboard acts with its user's money, and a browser sends requests for any page that it shows. So: the
`Host` must be a name that was meant (a foreign name that resolves to this address is refused), what comes from another
page is refused by its `Origin` or `Sec-Fetch-Site`, and no page may frame ours. On loopback another user of this
computer is refused, as at the daemon's socket, unless a proxy is expected. Where a token is set, everything but the
login needs a session or the token itself in a header; it is never part of an address.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spotd.web.peers import is_other_user, peer_of
from spotd.web.sessions import COOKIE, Sessions

LOGIN: Final = "/login"
OPEN: Final = frozenset(
    {(LOGIN, "POST"), *((path, "GET") for path in (LOGIN, "/style.css", "/favicon.svg", "/favicon.ico"))}
)
"""What is served without a session: nothing of the daemon's is in it. Any other method would make a page's state."""
_ENDED: Final = {"type": "websocket.disconnect", "code": 1008}
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
        return is_loopback(name) or (_address(name) is not None and not self.is_loopback)


def is_loopback(host: str) -> bool:
    """Whether nothing but this computer reaches the address."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
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
