"""The state store as the daemon reaches it: one transaction at a time, off the event loop.

In production every transaction runs in a worker thread behind a limiter of one. In virtual time there are no threads:
the same calls run inline, so that a test's order of events is the program's and nothing else's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from spotd.store import Reads, Store, Tx
from spotd.store.errors import StoreError

T = TypeVar("T")


class Database:
    """`trouble` says in one sentence why the last transaction failed, and is empty when it did not."""

    def __init__(self, store: Store, *, inline: bool = False) -> None:
        self._store = store
        self._inline = inline
        self._one: anyio.CapacityLimiter | None = None
        self.trouble = ""

    async def tx(self, work: Callable[[Tx], T]) -> T:
        """What the work returned, durably committed.

        A transaction that has begun is never abandoned: a cancelled caller waits for its end, because "maybe
        committed" is what the intents exist to avoid.

        Raises:
            StoreError: nothing of it was written.
        """
        return await self._run(lambda: self._store.tx(work))

    async def read(self, work: Callable[[Reads], T]) -> T:
        """What the work read, from one consistent state."""
        return await self._run(lambda: self._store.read(work))

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            if self._inline:
                result = call()
            else:
                if self._one is None:
                    self._one = anyio.CapacityLimiter(1)
                result = await anyio.to_thread.run_sync(call, limiter=self._one)
        except StoreError as exc:
            self.trouble = exc.message
            raise
        self.trouble = ""
        return result
