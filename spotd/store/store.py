"""The state of one spotd installation, as transactions over core values.

Theory. One process writes. `tx` runs a function in one write transaction (BEGIN IMMEDIATE, synchronous FULL): when it
returns, what it committed survives a power cut; when it raises, nothing happened. `read` runs one in a snapshot, on a
connection of its own, so that no answer delays a decision. Both may be called from any thread, one of each kind at a
time; production calls each kind from one dedicated thread, a simulation inline. A state in memory has one connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from sqlalchemy import Connection, Engine, delete, exc, insert, update

from spotd.core.domain.ids import JobId
from spotd.core.domain.states import InvariantBroken
from spotd.core.plans.plan import Plan
from spotd.store.commit import write_plan
from spotd.store.engine import DatabasePlace, has_log, open_engine, parse_place, translated
from spotd.store.errors import StateUnavailable
from spotd.store.folding import Folding, fold, forget_settled
from spotd.store.lock import WriterLock
from spotd.store.migrate import migrate, stored_revision
from spotd.store.points import AtPoint, StorePoint, pass_on
from spotd.store.queries import Reads
from spotd.store.row_cache import RowCache
from spotd.store.tables import COOLDOWNS, META

T = TypeVar("T")
NESTED: Final = "a transaction was begun inside another one"


class Tx(Reads):
    """A write transaction. What it reads includes what it wrote."""

    def __init__(self, place: DatabasePlace, connection: Connection, memory: RowCache, at_point: AtPoint) -> None:
        super().__init__(place, connection, memory)
        self._at_point = at_point
        self.spoiled = False
        self.changed: set[JobId] = set()

    def commit(self, plan: Plan) -> int:
        """Write the plan as part of this transaction; return the number of its last event, 0 if it has none.

        Raises:
            InvariantBroken: the plan breaks a rule. The transaction can not be saved any more.
        """
        self.changed.update(plan.jobs, (attempt.job for attempt in plan.attempts))
        try:
            return write_plan(self._connection, self._memory, plan, self._at_point)
        except BaseException:
            self.spoiled = True
            raise

    def forget_cooldowns(self) -> None:
        """Delete every cool-down; those of the next plan are all there are."""
        self._connection.execute(delete(COOLDOWNS))

    def fold(self, now: datetime, rules: Folding) -> int:
        """Fold one piece of old events and forget what nothing asks for any more; return how many rows are gone."""
        self._memory.experience = None
        return forget_settled(self._connection, now, rules) + fold(self._connection, now, rules)

    def set_meta(self, key: str, value: str) -> None:
        """Set a fact about this state itself."""
        changed = self._connection.execute(update(META).where(META.c.key == key).values(value=value))
        if changed.rowcount == 0:
            self._connection.execute(insert(META).values(key=key, value=value))


class Store:
    """The state, open for reading and writing until it is closed. Made by `Store.open`."""

    def __init__(
        self,
        *,
        place: DatabasePlace,
        engine: Engine,
        lock: WriterLock | None,
        reader: Engine | None = None,
        at_point: AtPoint = pass_on,
    ) -> None:
        self._place = place
        self._engine = engine
        self._lock = lock
        self._at_point = at_point
        self._memory = RowCache()
        self._turn = _Turn(place)
        self._reader = engine if reader is None else reader
        self._reading = self._turn if reader is None else _Turn(place)
        self._read_memory = self._memory if reader is None else RowCache()
        self._stale: deque[frozenset[JobId]] = deque()
        """Jobs that were written, and that the reader must read again."""

    @classmethod
    def open(cls, url: str | Path, *, at_point: AtPoint = pass_on) -> Self:
        """Open the state at a path, `sqlite:///` URL or `:memory:`, at this version's schema; made if it is not there.

        Args:
            at_point: called at every `StorePoint`; tests end the process there.

        Raises:
            StoreInUse: another process writes it.
            StoreTooNew, StoreOtherSchema, StoreCorrupt: the file was left as it is.
            StateUnavailable: it cannot be opened now.
            StoreUnsupported: another kind of database.
        """
        place = parse_place(url)
        lock = None if place.path is None else WriterLock(place.path)
        engine: Engine | None = None
        try:
            if has_log(place):
                engine = open_engine(place, keeps_log=True)
                with translated(place), engine.connect() as connection:
                    stored_revision(connection, place)
                engine.dispose()
            engine = open_engine(place)
            with translated(place), engine.connect() as connection:
                migrate(connection, place, at_point)
                if place.path is not None:
                    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
                connection.rollback()
        except BaseException:
            if engine is not None:
                engine.dispose()
            if lock is not None:
                lock.release()
            raise
        reader = None if place.path is None else open_engine(place, reads_only=True)
        return cls(place=place, engine=engine, reader=reader, lock=lock, at_point=at_point)

    def close(self) -> None:
        """Release everything of the state; closing twice is fine."""
        with self._reading.closing():
            self._reader.dispose()
        with self._turn.closing():
            self._engine.dispose()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tx(self, fn: Callable[[Tx], T]) -> T:
        """Return what the function returned, once everything it committed is durable; if it raises, nothing happened.

        Raises:
            StateUnavailable: nothing was written; the same call may work later.
            InvariantBroken: a plan broke a rule.
        """
        if self._reading.is_mine:
            raise InvariantBroken(NESTED)
        with self._turn.mine(), translated(self._place), self._engine.connect() as connection:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                self._at_point(StorePoint.BEGUN)
                tx = Tx(self._place, connection, self._memory, self._at_point)
                result = fn(tx)
                changed = frozenset(tx.changed)
                self._forget_later(changed)
                if tx.spoiled:
                    raise InvariantBroken("a transaction went on after one of its plans was refused")
                connection.commit()
                # Once more: the reader may have remembered the former values in between.
                self._forget_later(changed)
            except BaseException:
                self._memory.forget()
                with suppress(exc.DBAPIError):
                    connection.rollback()
                raise
        self._at_point(StorePoint.COMMITTED)
        return result

    def read(self, fn: Callable[[Reads], T]) -> T:
        """Return what the function returned, from one consistent view.

        Raises:
            StateUnavailable: it cannot be read now.
        """
        if self._turn.is_mine:
            raise InvariantBroken(NESTED)
        with self._reading.mine(), translated(self._place), self._reader.connect() as connection:
            self._forget_now()
            connection.exec_driver_sql("BEGIN")
            try:
                return fn(Reads(self._place, connection, self._read_memory))
            finally:
                with suppress(exc.DBAPIError):
                    connection.rollback()

    def _forget_later(self, changed: frozenset[JobId]) -> None:
        if self._reader is not self._engine:
            self._stale.append(changed)

    def _forget_now(self) -> None:
        while self._stale:
            changed = self._stale.popleft()
            self._read_memory.lists.clear()
            for job in changed:
                self._read_memory.jobs.pop(job, None)


class _Turn:
    """One function at a time, and none inside itself or after the end."""

    def __init__(self, place: DatabasePlace) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._of: int | None = None
        self._is_over = False

    @property
    def is_mine(self) -> bool:
        return self._of == threading.get_ident()

    @contextmanager
    def mine(self) -> Iterator[None]:
        if self.is_mine:
            raise InvariantBroken(NESTED)
        with self._lock:
            if self._is_over:
                raise StateUnavailable(f"the state {self._place} was closed", hint="open it again")
            self._of = threading.get_ident()
            try:
                yield
            finally:
                self._of = None

    @contextmanager
    def closing(self) -> Iterator[None]:
        with self._lock:
            self._is_over = True
            yield
