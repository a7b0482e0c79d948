"""Serves the API with uvicorn on a bound socket, also while another process leads the state.

A daemon on PostgreSQL may be one of several. Nothing of its own begins before it leads: no poll, no call, no decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Final

import anyio
from anyio.lowlevel import checkpoint
from starlette.types import ASGIApp

from spotd.service.lifecycle import SystemdNotifier
from spotd.store import StateUnavailable, Store, StoreInUse
from spotd_providers.contract.provider import Logger

if TYPE_CHECKING:
    from spotd.service.waiting import WaitingApp

GRACE_S: Final = 2
ASK_EVERY_S: Final = 2.0
"""How often a process that waits for the lead tries to open the state."""


def import_uvicorn() -> None:
    """Import uvicorn without its command line, which it imports wherever it is imported itself.

    The reloader behind it, multiprocessing and click are one and a half megabytes that a daemon has no use for. Names
    of it that a later version may ask for are absent in the same way; a version that is put together otherwise is
    imported whole.
    """
    if "uvicorn" in sys.modules:
        return
    absent = ModuleType("uvicorn.main")
    vars(absent)["__getattr__"] = lambda _: None
    sys.modules["uvicorn.main"] = absent
    try:
        import uvicorn
        from uvicorn.server import Server

        vars(uvicorn)["Server"] = Server
        for name in ("main", "run"):
            vars(uvicorn).pop(name, None)
    except Exception:  # noqa: BLE001 - whatever it was: without these savings uvicorn is what it is
        for name in [name for name in sys.modules if name.partition(".")[0] == "uvicorn"]:
            del sys.modules[name]
    finally:
        sys.modules.pop("uvicorn.main", None)


def is_failure(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn is more than a request that the daemon's end cut short.

    uvicorn writes such a request down with the traceback of a failed application, and before that how many there are.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


async def serve(app: ASGIApp, sock: socket.socket, *, started: anyio.Event, closing: anyio.Event) -> None:
    """Answer requests until `closing` is set; those under way then get a moment to end.

    uvicorn is imported here, because importing it takes longer than most of the daemon's start.
    """
    import_uvicorn()
    import uvicorn

    from spotd.slow_requests import TimedH11Protocol

    class Server(uvicorn.Server):
        """uvicorn without its own signal handlers: signals are the daemon's."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        http=TimedH11Protocol,  # the same parser whatever else is installed
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = Server(config)
    logging.getLogger("uvicorn.error").addFilter(is_failure)
    async with anyio.create_task_group() as group:

        async def close() -> None:
            await closing.wait()
            server.should_exit = True

        async def note_start() -> None:
            while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
                await anyio.sleep(0.005)
            started.set()

        group.start_soon(close, name="api-closing")
        group.start_soon(note_start, name="api-started")
        await server.serve(sockets=[sock])
        group.cancel_scope.cancel()


async def wait_to_lead(
    url: str,
    app: WaitingApp,
    sock: socket.socket,
    received: AsyncIterator[signal.Signals],
    *,
    notify: SystemdNotifier,
    log: Logger,
    reload: Callable[[], Awaitable[None]] = checkpoint,
) -> Store | None:
    """Return the state, opened by this process as the one that writes it; `None` where a signal ended the wait.

    Args:
        app: answers meanwhile, and knows why the state could not be opened at once.
        reload: called when the config is to be read again.

    Raises:
        StateError: it cannot be opened, and waiting does not mend that.
    """
    wait = _Wait(url, app)
    first = app.reason.message
    log.info("daemon.waits", reason=first)
    notify.waiting()
    async with anyio.create_task_group() as group:
        closing = anyio.Event()
        # A server closes what it was given; the daemon goes on with the socket itself.
        serving = partial(serve, app, sock.dup(), started=anyio.Event(), closing=closing)
        group.start_soon(serving, name="standby-api")
        async with anyio.create_task_group() as waiting:

            async def end() -> None:
                async for number in received:
                    if number is not signal.SIGHUP:
                        wait.is_ended = True
                        waiting.cancel_scope.cancel()
                        return
                    await reload()

            async def lead() -> None:
                await wait.until_leading()
                waiting.cancel_scope.cancel()

            waiting.start_soon(end, name="standby-signals")
            waiting.start_soon(lead, name="standby")
        app.update(None)
        closing.set()
    if wait.store is not None and wait.is_ended:
        # It came while the state was being opened: the lead is given back at once, and not after its lease.
        await anyio.to_thread.run_sync(wait.store.close)
        return None
    if wait.store is not None:
        log.info("daemon.leads", waited_for=first)
    return wait.store


class _Wait:
    """A wait for the lead. `store` is there once this process leads, a signal sets `is_ended`."""

    def __init__(self, url: str, app: WaitingApp) -> None:
        self._url = url
        self._app = app
        self.store: Store | None = None
        self.is_ended = False

    async def until_leading(self) -> None:
        while self.store is None:
            await anyio.sleep(ASK_EVERY_S)
            try:
                # Not to be left in the middle: it would lead without a daemon.
                with anyio.CancelScope(shield=True):
                    self.store = await anyio.to_thread.run_sync(Store.open, self._url)
            except (StoreInUse, StateUnavailable) as error:
                self._app.update(error)
