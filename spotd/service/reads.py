"""Answers from a database that another process writes: the handlers of a daemon of which nothing runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
        self._store: Store | None = None
        self._context: HandlerContext | None = None
        self._app: ASGIApp | None = None
        self._closing = anyio.Event()
        self._is_over = False
        self._read_s = 0.0

    async def app(self) -> ASGIApp:
        """Return what answers, with the world as it is now.

        Raises:
            StateError, StoreError: database or checkpoint store cannot be read.
        """
        async with self._turn:
            if self._is_over:  # what is made anew would be beside a daemon that leads
                raise StateUnavailable("nothing is read from the database any more", hint="try again in a moment")
            if self._app is None or self._context is None:
                store = self._store = self._store or Store.open_to_read(self._url)
                self._context = context = await self._make(store)
                context.policy.gates.clear()
                context.policy.owned = lambda policy: policy
                self._app = make_app(Handlers(context), on_failure=self._on_failure, closing=self._closing, only=READS)
                self._read_s = -WORLD_KEPT_S
            context = self._context
            context.policy.paused = f"this spotd waits: {self._why()}"
            if anyio.current_time() - self._read_s >= WORLD_KEPT_S or context.database.last_error:
                policy, now = context.policy.current, context.clock.now()
                world = await context.database.read(lambda reads: reads.world(policy, now))
                context.control_loop.state = LoopState(world=world, verdicts={}, at=now)
                self._read_s = anyio.current_time()
            return self._app

    def end(self) -> None:
        """End what is being followed; nothing more is answered."""
        self._is_over = True
        self._closing.set()

    async def close(self) -> None:
        """End what is being followed, and give the database back."""
        async with self._turn:
            self._closing.set()
            self._closing = anyio.Event()
            store, self._store, self._context, self._app = self._store, None, None, None
            if store is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(store.close)
