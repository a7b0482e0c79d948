"""The real application over a daemon whose state is in memory, at a real unix socket in a thread of its own."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal

from spotd.api.app import make_app
from spotd.api.handlers import Handlers
from spotd.core.domain.plan import Plan
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
        self._handlers: Handlers | None = None
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.app
        if self.rig.control_loop.state is None:
            await self.rig.control_loop.adopt()
        await app(scope, receive, send)

    @property
    def rig(self) -> Rig:
        if self._rig is None:
            self._rig = worlds.still_rig(Path(tempfile.mkdtemp(dir=self._folder)))
        return self._rig

    @property
    def handlers(self) -> Handlers:
        if self._handlers is None:
            self._handlers = self.rig.handlers()
        return self._handlers

    @property
    def app(self) -> Any:
        if self._app is None:
            self._app = make_app(
                self.handlers,
                on_failure=lambda route, exc: self.failures.append((route, exc)),
                code_bytes_max=self._code_bytes_max,
            )
        return self._app

    def reset(self) -> None:
        """Nothing is known and nothing is wrong, as at first."""
        if self._rig is not None:
            self._rig.store.close()
            shutil.rmtree(self._rig.folder)
        self._rig = self._handlers = self._app = None
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

    def write_three_jobs(self) -> None:
        """`llama-lora` runs, `prep` waits for its price, `old` failed."""
        self.rig.shop.offer_index = [worlds.h100("h4", price=2_610_000)]
        self.rig.shop.put_machine(worlds.attempt().key)
        self.write(worlds.running(), worlds.ended(), worlds.waiting())
        self.cycle()

    def answers(self, handler: str, answer: Any) -> list[tuple[Any, ...]]:
        """From now on a handler, such as `prices.quotes`, gives this answer, or raises it; returns what it is asked."""
        asked: list[tuple[Any, ...]] = []

        async def given(*args: Any, **_: Any) -> Any:
            asked.append(args)
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.replace(handler, given)
        return asked

    def asked(self, handler: str) -> list[tuple[Any, ...]]:
        """What a handler is asked from now on; it answers as always."""
        asked: list[tuple[Any, ...]] = []
        group, _, name = handler.partition(".")
        real = getattr(getattr(self.handlers, group), name)

        async def noted(*args: Any) -> Any:
            asked.append(args)
            return await real(*args)

        self.replace(handler, noted)
        return asked

    def streams(self, handler: str, records: Sequence[Any]) -> None:
        """From now on a handler, such as `logs.stream`, yields these records."""

        async def given(*_: Any, **__: Any) -> AsyncIterator[Any]:
            for record in records:
                yield record

        self.replace(handler, given)

    def replace(self, handler: str, by: Any) -> None:
        """From now on this is called instead of a handler."""
        group, _, name = handler.partition(".")
        setattr(getattr(self.handlers, group), name, by)


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
