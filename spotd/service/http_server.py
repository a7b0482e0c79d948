"""Serves the API with uvicorn on a socket that is bound already."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from starlette.applications import Starlette

GRACE_S: Final = 2


def _import_uvicorn() -> None:
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


async def serve(app: Starlette, sock: socket.socket, *, started: anyio.Event, closing: anyio.Event) -> None:
    """Answer requests until `closing` is set; those under way then get a moment to end.

    uvicorn is imported here, because importing it takes longer than most of the daemon's start.
    """
    _import_uvicorn()
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
    async with anyio.create_task_group() as group:

        async def close() -> None:
            await closing.wait()
            server.should_exit = True

        async def set_started() -> None:
            while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
                await anyio.sleep(0.005)
            started.set()

        group.start_soon(close, name="api-closing")
        group.start_soon(set_started, name="api-started")
        await server.serve(sockets=[sock])
        group.cancel_scope.cancel()
