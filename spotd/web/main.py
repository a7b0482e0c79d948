"""The dashboard as a process: one server, one poller, all pages."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from nicegui import Client, ui
from nicegui import app as nicegui_app
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response

from spotd.client.daemon import Daemon
from spotd.slow_requests import TimedH11Protocol
from spotd.tokens import peer_of
from spotd.web.guard import COOKIE, LOGIN, SESSION_S, Guard, Place, Sessions, is_loopback, session_cookie
from spotd.web.markup import el, job_href
from spotd.web.pages import jobs, market, submit
from spotd.web.pages.live import TreeElement, shell
from spotd.web.poller import SharedPoller
from spotd.words import clean

# How many connections the dashboard has open, so that a peer which opens many or says nothing is in no one's way.


OPEN_MAX: Final = 256
OPEN_PER_PEER_MAX: Final = 48
"""Of each address but loopback, where a proxy may ask for others. A browser opens six, and one for each tab."""
FIRST_REQUEST_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Connection:
    peer: str
    transport: asyncio.Transport
    is_request_due: Callable[[], bool]


class Gate:
    """The open connections of one server."""

    def __init__(self) -> None:
        self._open: list[_Connection] = []

    def admits(self, transport: asyncio.Transport, is_request_due: Callable[[], bool]) -> bool:
        """Whether one more connection is served; one that has ended, or whose request has not arrived, makes room.

        Args:
            is_request_due: whether the peer owes a request, or the rest of one.
        """
        peer = peer_of(transport.get_extra_info("peername"), {})
        self._open = [one for one in self._open if not one.transport.is_closing()]
        if not is_loopback(peer) and not self._make_room(
            [one for one in self._open if one.peer == peer], per_peer=True
        ):
            return False
        if not self._make_room(self._open):
            return False
        self._open.append(_Connection(peer, transport, is_request_due))
        return True

    def _make_room(self, those: list[_Connection], *, per_peer: bool = False) -> bool:
        """Return whether one more of those may be open; the oldest of them that owes a request ends for it."""
        if len(those) < (OPEN_PER_PEER_MAX if per_peer else OPEN_MAX):
            return True
        silent = next((one for one in those if one.is_request_due()), None)
        if silent is None:
            return False
        silent.transport.abort()
        self._open = [one for one in self._open if one is not silent]
        return True

    def protocol(self) -> type[TimedH11Protocol]:
        """Return uvicorn's protocol, behind this gate."""
        gate = self

        class Gated(TimedH11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                super().connection_made(transport)
                if gate.admits(transport, lambda: self.is_request_due):
                    self.loop.call_later(FIRST_REQUEST_WITHIN_S, self._close_if_silent)
                else:
                    transport.abort()

            def _close_if_silent(self) -> None:
                if self.cycle is None and self in self.connections:
                    self.transport.abort()

        return Gated


# The page on which a browser states the token, once. Plain HTML: it works before anything else is served.


BODY_BYTES_MAX: Final = 4096
BODY_WITHIN_S: Final = 10.0
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Log in - spotd</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/favicon.svg"><link rel="stylesheet" href="/style.css"></head>
<body class="login"><main><h1>spotd</h1>
<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<p role="alert">{message}</p>
<button type="submit">Log in</button>
<p class="muted">spotctl web showed it when it started, or it is in the file that was given to it.</p>
</form></main></body></html>
"""


def page(message: str = "", *, status: int = 200) -> Response:
    return HTMLResponse(
        _PAGE.format(message=escape(message)), status_code=status, headers={"cache-control": "no-store"}
    )


async def login(request: Request, sessions: Sessions) -> Response:
    """Open a session for the right token."""
    text, peer = await _token(request), peer_of(request.client, request.headers)
    if wait_s := math.ceil(sessions.wait_s(peer)):
        return page(f"Too many wrong tokens. Try again in {wait_s} s.", status=429)
    await asyncio.sleep(sessions.delay_s())
    if not sessions.is_token(text, peer):
        return page("That is not the token.", status=403)
    answer = RedirectResponse("/", status_code=303)
    answer.set_cookie(
        COOKIE,
        sessions.open(),
        max_age=SESSION_S,
        httponly=True,
        samesite="strict",
        secure=request.headers.get("x-forwarded-proto") == "https",
    )
    return answer


async def logout(request: Request, sessions: Sessions) -> Response:
    """End the session of this browser."""
    sessions.close(session_cookie(request.headers))
    answer = RedirectResponse(LOGIN, status_code=303)
    answer.delete_cookie(COOKIE)
    return answer


async def _token(request: Request) -> str:
    """Return the field of the form, from a body of bounded size."""
    body = b""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return ""
    except TimeoutError:
        return ""
    from urllib.parse import parse_qs

    return parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()


STATIC: Final = Path(__file__).parent / "static"
FAVICON: Final = STATIC / "favicon.svg"
_STOP_S: Final = 3
_PATH_SHOWN: Final = 200
"""Characters of a wrong address that are repeated."""
_HEAD: Final = '<link rel="stylesheet" href="/style.css">'


def make_app(poller: SharedPoller, place: Place, sessions: Sessions | None) -> Any:
    """Return the application behind its guard."""
    has_login = sessions is not None
    _pages(poller, has_login=has_login)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        asking = asyncio.create_task(poller.run(), name="poller")
        yield
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    server = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @server.get("/style.css")
    def style() -> Response:
        return FileResponse(STATIC / "style.css", media_type="text/css", headers={"cache-control": "no-cache"})

    @server.get("/favicon.svg")
    def favicon() -> Response:
        return FileResponse(FAVICON, media_type="image/svg+xml")

    if sessions is not None:

        @server.get(LOGIN)
        def login_page() -> Response:
            return page()

        @server.post(LOGIN)
        async def log_in(request: Request) -> Response:
            return await login(request, sessions)

        @server.post("/logout")
        async def log_out(request: Request) -> Response:
            return await logout(request, sessions)

    nicegui_app.config.quasar_config["brand"] = {"primary": "#2f6fb3", "negative": "#c2410c", "positive": "#15803d"}
    ui.run_with(
        server,
        title="spotd",
        favicon=FAVICON,
        dark=None,
        language="en-US",
        tailwind=False,
        reconnect_timeout=20,
        message_history_length=200,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    return Guard(server, place, sessions)


def _pages(poller: SharedPoller, *, has_login: bool) -> None:
    ui.add_head_html(_HEAD, shared=True)

    def add(path: str, title: str, build: Callable[..., None]) -> None:
        @ui.page(path)
        def draw(request: Request) -> None:
            with shell(poller, request, title, path, has_login=has_login) as page:
                build(page, request)

    add("/", "Overview", lambda page, _request: market.overview_page(page))
    add("/jobs", "Jobs", lambda page, request: jobs.jobs_page(page, *_request_of(request)))
    add("/market", "Market", lambda page, _request: market.market_page(page))
    add("/providers", "Providers", lambda page, _request: market.providers_page(page))
    add("/events", "Events", lambda page, _request: market.events_page(page))
    add("/submit", "Submit", lambda page, _request: submit.submit_page(page))
    add("/job/{ref}", "Job", lambda page, request: jobs.job_page(page, request.path_params["ref"]))

    @ui.page("/jobs/{ref}")
    def job_by_its_other_name(request: Request) -> Response:
        return RedirectResponse(job_href(request.path_params["ref"]))

    @nicegui_app.exception_handler(404)
    async def not_found(request: Request, _error: Exception) -> Response:
        if _is_of_the_library(request.url.path):
            return PlainTextResponse("not found", status_code=404)
        with (
            Client(ui.page(""), request=request) as client,
            shell(poller, request, "No such page", "", has_login=has_login),
        ):
            TreeElement(
                el("p", f"There is no page {clean(request.url.path[:_PATH_SHOWN])} here."),
                el("p", el("a", "All jobs", href="/jobs"), " lists each job with its page."),
            )
        return client.build_response(request, 404)


def _request_of(request: Request) -> tuple[str, str]:
    """Return which group of jobs and which array are asked for."""
    return request.query_params.get("show", "all"), request.query_params.get("array", "")[:_PATH_SHOWN]


def _is_of_the_library(path: str) -> bool:
    """Whether a program asked for a part of a page: no person reads the answer."""
    return path.startswith("/_nicegui")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        OSError
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is stated; without it a body waits 40 ms for the ACK of its head.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound


def serve(bound: socket.socket, daemon: Daemon, place: Place, token: str | None) -> None:
    """Serve until the process is asked to end."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    warnings.simplefilter("ignore", DeprecationWarning)
    application = make_app(SharedPoller(daemon), place, None if token is None else Sessions(token))
    config = uvicorn.Config(
        application,
        http=Gate().protocol(),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_STOP_S,
    )
    with bound:
        asyncio.run(uvicorn.Server(config).serve(sockets=[bound]))
