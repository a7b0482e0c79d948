"""The state store as the daemon reaches it: one transaction at a time, off the event loop.

Transactions run in one worker thread and reads in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from spotd.store import Reads, Store, Tx
from spotd.store.engine import StateError
from spotd_jobs.objects.api import StoreError

# The one door through which the daemon runs blocking calls: few threads, each call with a deadline.
#
# In virtual time there are no threads: the same calls run inline, so that a test's order of events is the program's and
# nothing else's.


T = TypeVar("T")


LEFT_BEHIND_MAX: Final = 16
"""So many threads may hang in calls whose callers have given them up; the next call waits for one of them."""
_ROOM_ASKED_EVERY_S: Final = 1.0


class Threads:
    """At most `count` blocking calls at a time, beside those that were given up."""

    def __init__(self, count: int = 1, *, inline: bool = False) -> None:
        self._count = count
        self._inline = inline
        self._limiter: anyio.CapacityLimiter | None = None
        self._under_way: set[object] = set()

    async def run(self, work: Callable[[], T], *, deadline_s: float = math.inf) -> T:
        """Return what the call returned. A thread cannot be stopped: a caller that is cancelled leaves it behind.

        Raises:
            TimeoutError: nothing within the deadline; the call may still take effect.
        """
        if self._inline:
            return work()
        call = object()

        def noted() -> T:
            self._under_way.add(call)
            try:
                return work()
            finally:
                self._under_way.discard(call)

        with anyio.fail_after(deadline_s):
            while len(self._under_way) >= self._count + LEFT_BEHIND_MAX:  # noqa: ASYNC110 - a thread sets no event here
                await anyio.sleep(_ROOM_ASKED_EVERY_S)
            return await anyio.to_thread.run_sync(noted, abandon_on_cancel=True, limiter=self._limit())

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """Return what the call returned; a caller that is cancelled waits for its end."""
        return work() if self._inline else await anyio.to_thread.run_sync(work, limiter=self._limit())

    def _limit(self) -> anyio.CapacityLimiter:
        # Not earlier: it belongs to the event loop that runs by now.
        self._limiter = self._limiter or anyio.CapacityLimiter(self._count)
        return self._limiter


class StoreThreads(Threads):
    """Threads for calls of the object store; its silence is one of its errors."""

    async def run(self, work: Callable[[], T], *, deadline_s: float = math.inf) -> T:
        """Return what the call returned.

        Raises:
            StoreError: the store refused, or did not answer within the deadline.
        """
        try:
            return await super().run(work, deadline_s=deadline_s)
        except TimeoutError as exc:
            raise StoreError(f"the checkpoint store did not answer within {deadline_s:.0f} s") from exc


PROOF: Final = "written"
"""A fact in the state that says nothing: writing it shows that the state can be written again."""


class Database:
    """The state store off the event loop. `last_error`: why it cannot be written or read, empty when it can."""

    def __init__(self, store: Store, *, inline: bool = False) -> None:
        self._store = store
        self._writer = Threads(inline=inline)
        self._reader = Threads(inline=inline)
        self._writing = ""
        self._reading = ""

    @property
    def last_error(self) -> str:
        return self._writing or self._reading

    async def tx(self, work: Callable[[Tx], T]) -> T:
        """Return what the work returned, durably committed.

        A transaction that has begun is never abandoned: a cancelled caller waits for its end, because "maybe
        committed" is what the intents exist to avoid. After a failure the next one must write something, since one
        that has nothing to write succeeds on a full disk, too.

        Raises:
            StoreError: nothing of it was written.
        """

        def proven(tx: Tx) -> T:
            result = work(tx)
            tx.set_meta(PROOF, "1")
            return result

        try:
            result = await self._writer.run_to_end(lambda: self._store.tx(proven if self._writing else work))
        except StateError as exc:
            self._writing = exc.message
            raise
        self._writing = ""
        return result

    async def read(self, work: Callable[[Reads], T]) -> T:
        """Return what the work read, from one consistent state."""
        try:
            result = await self._reader.run_to_end(lambda: self._store.read(work))
        except StateError as exc:
            self._reading = exc.message
            raise
        self._reading = ""
        return result
