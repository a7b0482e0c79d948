"""The dashboard as a process: one server, one poller, all pages."""

from __future__ import annotations

import asyncio
import logging
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from nicegui import Client, ui
from nicegui import app as nicegui_app
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response

from spotd.client.daemon import Daemon
from spotd.web import login
from spotd.web.gate import Gate
from spotd.web.guard import LOGIN, Guard, Place
from spotd.web.markup import el, job_href
from spotd.web.pages import events, job, jobs, market, overview, providers, submit
from spotd.web.pages.shell import shell
from spotd.web.poller import SharedPoller
from spotd.web.sessions import Sessions
from spotd.web.tree import TreeElement
from spotd.words import clean

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
            return login.page()

        @server.post(LOGIN)
        async def log_in(request: Request) -> Response:
            return await login.login(request, sessions)

        @server.post("/logout")
        async def log_out(request: Request) -> Response:
            return await login.logout(request, sessions)

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

    add("/", "Overview", lambda page, _request: overview.build(page))
    add("/jobs", "Jobs", lambda page, request: jobs.build(page, *_asked(request)))
    add("/market", "Market", lambda page, _request: market.build(page))
    add("/providers", "Providers", lambda page, _request: providers.build(page))
    add("/events", "Events", lambda page, _request: events.build(page))
    add("/submit", "Submit", lambda page, _request: submit.build(page))
    add("/job/{ref}", "Job", lambda page, request: job.build(page, request.path_params["ref"]))

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


def _asked(request: Request) -> tuple[str, str]:
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
    bound = socket.socket(family, socket.SOCK_STREAM)
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
