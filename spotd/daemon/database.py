"""The state store as the daemon reaches it: one transaction at a time, off the event loop.

Transactions run in one worker thread and reads in another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from spotd.daemon.threads import Threads
from spotd.store import Reads, Store, Tx
from spotd.store.errors import StateError

T = TypeVar("T")


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
