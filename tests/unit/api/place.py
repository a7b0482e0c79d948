"""The real application over a daemon whose state is in memory, at a real unix socket in a thread of its own."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal

from spotd.api.app import make_app
from spotd.core.plan import Plan
from tests.unit.api import worlds
from tests.unit.daemon.rig import Rig

T = TypeVar("T")
_STOP_S = 10.0


class Place:
    """A daemon that does only what a test asks it to, and the socket of its API.

    A rig is made when the first request or the first arrangement needs one, and is forgotten by `reset`.
    """

    def __init__(self, folder: Path, portal: BlockingPortal, *, code_bytes_max: int) -> None:
        self.socket = folder / "spotd.sock"
        self.failures: list[tuple[str, Exception]] = []
        self._folder = folder
        self._portal = portal
        self._code_bytes_max = code_bytes_max
        self._rig: Rig | None = None
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    @property
    def rig(self) -> Rig:
        if self._rig is None:
            self._rig = worlds.still_rig(Path(tempfile.mkdtemp(dir=self._folder)))
        return self._rig

    @property
    def app(self) -> Any:
        if self._app is None:
            self._app = make_app(
                self.rig.handlers(),
                on_failure=lambda route, exc: self.failures.append((route, exc)),
                code_bytes_max=self._code_bytes_max,
            )
        return self._app

    def reset(self) -> None:
        """Nothing is known and nothing is wrong, as at first."""
        if self._rig is not None:
            self._rig.store.close()
            shutil.rmtree(self._rig.folder)
        self._rig = self._app = None
        self.failures.clear()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of what runs in the loop of the API."""
        return self._portal.call(work)

    def write(self, *plans: Plan) -> None:
        """The state holds this, and the daemon has seen it."""
        for plan in plans:
            self.rig.store.tx(lambda tx, plan=plan: tx.commit(plan))  # type: ignore[misc]  # a lambda's default
        self.call(self.rig.control_loop.adopt)

    def cycle(self) -> None:
        """The prices are asked for, the machines are listed, and one decision is made."""

        async def work() -> None:
            for poller in self.rig.pollers.values():
                await poller.poll_offers()
                await poller.poll_machines()
            await self.rig.control_loop.reconcile_once()

        self.call(work)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """The control loop runs until the block ends."""
        loop = self._portal.start_task_soon(self.rig.control_loop.controller.run)
        try:
            yield
        finally:
            loop.cancel()

    def pass_time(self, span: timedelta) -> None:
        self.rig.clock.offset += span


@contextmanager
def place(*, code_bytes_max: int = 1_000_000) -> Iterator[Place]:
    """The API answers at a socket until the block ends."""
    # pytest's own temporary folders are too deep for the path of a socket.
    folder = Path(tempfile.mkdtemp(prefix="spotd-"))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.fspath(folder / "spotd.sock"))
    listening.listen(32)
    try:
        with start_blocking_portal("asyncio") as portal:
            served = Place(folder, portal, code_bytes_max=code_bytes_max)
            config = uvicorn.Config(served, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            running = portal.start_task_soon(server.serve, [listening])
            try:
                yield served
            finally:
                server.should_exit = True
                running.result(_STOP_S)
                served.reset()
    finally:
        listening.close()
        shutil.rmtree(folder)
