"""Answers from a database that another process writes: the handlers of a daemon of which nothing runs."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from spotd.api.app import make_app
from spotd.api.edge import Failure
from spotd.api.handlers import HandlerContext, Handlers
from spotd.daemon.control_loop import LoopState
from spotd.store import StateUnavailable, Store

READS: Final = frozenset(
    {
        "checkpoints",
        "cost",
        "datasets",
        "events",
        "file_content",
        "file_contents",
        "files",
        "hosts",
        "job",
        "job_cost",
        "jobs",
        "logs",
        "openapi",
        "status",
        "why",
    }
)
"""Names of routes that database and checkpoint store alone can answer. Offers and verdicts only the leader knows."""
WORLD_KEPT_S: Final = 1.0
"""As at the leader, the world of an answer may be this much older than its rows."""
Make = Callable[[Store], Awaitable[HandlerContext]]


@dataclass(eq=False)
class _Opened:
    """The database as it was opened under one config, until that is read again and the last of its readers has left."""

    store: Store
    context: HandlerContext | None = None
    app: ASGIApp | None = None
    read_s: float = -math.inf
    readers: int = 0
    is_former: bool = False
    closing: anyio.Event = field(default_factory=anyio.Event)

    async def close_unread(self) -> None:
        if self.is_former and not self.readers:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.store.close)


class DatabaseReads:
    """Made when it is first needed, and anew after the config has changed."""

    def __init__(self, url: str, make: Make, *, why: Callable[[], str], on_failure: Failure) -> None:
        """Make it.

        Args:
            url: of the state.
            make: returns the parts of a daemon on this state, none of which runs.
            why: why this process waits.
        """
        self._url, self._make, self._why, self._on_failure = url, make, why, on_failure
        self._turn = anyio.Lock()
        self._opened: _Opened | None = None
        self._is_over = False

    @asynccontextmanager
    async def app(self) -> AsyncIterator[ASGIApp]:
        """Yield what answers, with the world as it is now; what it reads stays open until the block ends.

        Raises:
            StateError, StoreError: database or checkpoint store cannot be read.
        """
        opened: _Opened | None = None
        try:
            async with self._turn:
                if self._is_over:  # what is made anew would be beside a daemon that leads
                    raise StateUnavailable("nothing is read from the database any more", hint="try again in a moment")
                opened = self._opened = self._opened or _Opened(Store.open_to_read(self._url))
                opened.readers += 1
                app = await self._current(opened)
            yield app
        finally:
            if opened is not None:
                opened.readers -= 1
                await opened.close_unread()

    async def _current(self, opened: _Opened) -> ASGIApp:
        """Return what answers, with the newest world."""
        if opened.context is None or opened.app is None:
            opened.context = context = await self._make(opened.store)
            context.policy.gates.clear()
            context.policy.owned = lambda policy: policy
            handlers = Handlers(context)
            opened.app = make_app(handlers, on_failure=self._on_failure, closing=opened.closing, only=READS)
        context = opened.context
        context.policy.paused = f"this spotd waits: {self._why()}"
        if anyio.current_time() - opened.read_s >= WORLD_KEPT_S or context.database.last_error:
            policy, now = context.policy.current, context.clock.now()
            world = await context.database.read(lambda reads: reads.world(policy, now))
            context.control_loop.state = LoopState(world=world, verdicts={}, at=now)
            opened.read_s = anyio.current_time()
        return opened.app

    def end(self) -> None:
        """End what is being followed; nothing more is answered."""
        self._is_over = True
        if self._opened is not None:
            self._opened.closing.set()

    async def close(self) -> None:
        """End what is being followed; who reads still reads on, and the last one gives the database back."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.is_former = True
            opened.closing.set()
            await opened.close_unread()
