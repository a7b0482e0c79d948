"""The state of one spotd installation, as transactions over core values.

Theory. One process writes. `tx` runs a function in one write transaction (BEGIN IMMEDIATE, synchronous FULL): when it
returns, what it committed survives a power cut; when it raises, nothing happened. `read` runs one in a snapshot, on a
connection of its own, so that no answer delays a decision. Both may be called from any thread, one of each kind at a
time; production calls each kind from one dedicated thread, a simulation inline. A state in memory has one connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path
from types import TracebackType
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, Engine, delete, exc, insert, select, update

from spotd.core.attempts import Attempt
from spotd.core.charges import Charge
from spotd.core.checkpoints import Checkpoint
from spotd.core.ids import AttemptId, JobId
from spotd.core.intents import Intent
from spotd.core.jobs import Job
from spotd.core.plan import Plan
from spotd.core.policy import Policy
from spotd.core.states import InvariantBroken, JobState
from spotd.core.world import UnreadableRow, World
from spotd.store import queries
from spotd.store.commit import write_plan
from spotd.store.engine import DatabasePlace, open_engine, parse_place, translated
from spotd.store.errors import StateUnavailable, StoreCorrupt
from spotd.store.folding import Folding, fold, forget_settled
from spotd.store.lock import WriterLock
from spotd.store.migrate import migrate
from spotd.store.points import AtPoint, StorePoint, pass_on
from spotd.store.readable import ROW_ERRORS, set_aside
from spotd.store.row_cache import RowCache
from spotd.store.tables import COOLDOWNS, META
from spotd.store.views import AmbiguousJob, AttemptCost, CostView, EventView, JobView, MachineView, Totals
from spotd.store.world import load_world
from spotd_providers.contract.values import AttemptKey, ProviderName

T = TypeVar("T")
P = ParamSpec("P")
NESTED: Final = "a transaction was begun inside another one"


class Reads:
    """One consistent view of the state, valid until the function it was given to returns."""

    def __init__(self, place: DatabasePlace, connection: Connection, memory: RowCache) -> None:
        self._place = place
        self._connection = connection
        self._memory = memory

    def _ask(self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return question(self._connection, *args, **kwargs)
        except ROW_ERRORS as exc:
            raise StoreCorrupt(
                f"the state {self._place} holds a value that cannot be understood: {exc}",
                hint="if a newer spotd has written it, install that one again; else restore a copy of the file",
            ) from exc

    def world(self, policy: Policy, now: datetime) -> World:
        """Everything that is not over yet, unexpired cooldowns, and the books of this UTC month."""
        return self._ask(load_world, self._memory, policy, now)

    def job(self, job_id: JobId) -> Job | None:
        """Return the whole job, spec and checkpoints included."""
        return self._ask(queries.job, job_id)

    def find_job(self, text: str) -> JobView | AmbiguousJob | None:
        """Return the job a user means by an id, a name (the newest of that name) or a unique beginning of an id."""
        return self._ask(queries.find_job, text)

    def jobs(self, *, active: bool = False, limit: int | None = None) -> tuple[JobView, ...]:
        """All jobs, or those that are not final; newest first."""
        where = queries.active_or_all(active=active)
        return self._memory.listed((active, limit), lambda: self._ask(queries.list_jobs, where=where, limit=limit))

    def ended_jobs(self, *, limit: int) -> tuple[JobView, ...]:
        """Return the newest jobs that are final."""
        where = queries.ended()
        return self._memory.listed(("ended", limit), lambda: self._ask(queries.list_jobs, where=where, limit=limit))

    def quarantined_jobs(self, *, limit: int = 20) -> tuple[JobView, ...]:
        """Return the newest jobs that spotd could not go on with and that were not queued again."""
        return self._ask(queries.list_jobs, where=queries.quarantined(), limit=limit)

    def job_view(self, job_id: JobId) -> JobView | None:
        """One line of the list of jobs."""
        found = self._ask(queries.list_jobs, where=queries.with_id(job_id))
        return found[0] if found else None

    def active_named(self, name: str) -> tuple[JobView, ...]:
        """Jobs of this name that are not final, newest first."""
        return self._ask(queries.list_jobs, where=queries.active_named(name))

    def ended_ids(self) -> tuple[JobId, ...]:
        """Return the ids of all final jobs, newest first."""
        return self._ask(queries.ended_ids)

    def names_of(self, ids: Iterable[JobId]) -> Mapping[JobId, str]:
        """Return the names of these jobs, as far as there are such jobs."""
        return self._ask(queries.names_of, ids)

    def counts_by_state(self) -> Mapping[JobState, int]:
        """How many jobs are in each state; every state is there."""
        return self._ask(queries.counts_by_state)

    def readable_jobs(self, ids: Sequence[JobId]) -> tuple[Job, ...]:
        """Whole jobs, those left out that are not there or cannot be understood."""
        return self._ask(queries.readable_jobs, ids)

    def set_aside(self, job_id: JobId) -> tuple[UnreadableRow, ...]:
        """Which rows of this job cannot be understood."""
        return self._ask(set_aside, job_id)

    def attempts_of(self, job_id: JobId) -> tuple[Attempt, ...]:
        """Every attempt of a job that can be understood, ended ones too, oldest first."""
        return self._ask(queries.attempts_of, job_id)

    def attempt_by_key(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt whose machine carries this key."""
        return self._ask(queries.attempt_by_key, key)

    def intents_of(self, job_id: JobId) -> tuple[Intent, ...]:
        """Every paid call for a job, settled ones too, oldest first."""
        return self._ask(queries.intents_of, job_id)

    def open_machines(self) -> tuple[MachineView, ...]:
        """Every machine that the state has to manage, or may have to, in order of its key."""
        return self._ask(queries.open_machines)

    def checkpoints_of(self, job_id: JobId) -> tuple[Checkpoint, ...]:
        """Return the accepted checkpoints of a job, newest first."""
        return self._ask(queries.checkpoints_of, job_id)

    def borrowed_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return what jobs have on their lists that other jobs wrote; in no order."""
        return self._ask(queries.borrowed_checkpoints)

    def events(self, *, since: int = 0, job_id: JobId | None = None, limit: int = 1000) -> tuple[EventView, ...]:
        """Events with a number above `since`, oldest first, the first `limit` of them."""
        return self._ask(queries.events, since=since, job_id=job_id, limit=limit)

    def newest_events(self, *, job_id: JobId | None = None, limit: int = 100) -> tuple[EventView, ...]:
        """Return the last `limit` events, oldest first."""
        return self._ask(queries.newest_events, job_id=job_id, limit=limit)

    def events_of_kind(self, kind: str, *, job_id: JobId | None = None) -> tuple[EventView, ...]:
        """All events of a kind, of one job or of all, oldest first."""
        return self._ask(queries.events_of_kind, kind, job_id=job_id)

    def last_event(self) -> int:
        """Return the number of the newest event, 0 before the first."""
        return self._ask(queries.last_event)

    def charges_of(self, job_id: JobId) -> tuple[Charge, ...]:
        """Every booked span of a job, in order of attempt and time."""
        return self._ask(queries.charges_of, job_id)

    def jobs_by_id(self, ids: Sequence[JobId]) -> Mapping[JobId, Job]:
        """Whole jobs, without their checkpoints."""
        return self._ask(queries.jobs_by_id, ids)

    def attempts_of_jobs(self, ids: Sequence[JobId]) -> Mapping[JobId, tuple[Attempt, ...]]:
        """Every attempt of these jobs, oldest first."""
        return self._ask(queries.attempts_of_jobs, ids)

    def attempt_costs(self, ids: Sequence[JobId]) -> Mapping[AttemptId, AttemptCost]:
        """Return what is booked for each attempt of these jobs."""
        return self._ask(queries.attempt_costs, ids)

    def events_of_jobs(self, kinds: Sequence[str], ids: Sequence[JobId]) -> tuple[EventView, ...]:
        """Events of these kinds and jobs, oldest first."""
        return self._ask(queries.events_of_jobs, kinds, ids)

    def totals(self) -> Totals:
        """Return what all jobs together cost, as far as it is booked."""
        return self._ask(queries.totals)

    def costs_by_job(self) -> tuple[CostView, ...]:
        """Booked cost of each job."""
        return self._ask(queries.costs_by_job)

    def costs_by_provider(self, since: date | None = None, until: date | None = None) -> tuple[CostView, ...]:
        """Booked cost at each provider on these UTC days, both included."""
        return self._ask(queries.costs_by_provider, since, until)

    def costs_by_day(self, since: date | None = None, until: date | None = None) -> tuple[CostView, ...]:
        """Booked cost of each of these UTC days, both included; a day without any is left out."""
        return self._ask(queries.costs_by_day, since, until)

    def unchecked_bills(
        self, provider: ProviderName, *, since: datetime, until: datetime, limit: int
    ) -> tuple[Attempt, ...]:
        """Return attempts that ended in this span, had a machine, and whose bill was not compared yet, oldest first."""
        return self._ask(queries.unchecked_bills, provider, since, until, limit=limit)

    def strays(self) -> tuple[Intent, ...]:
        """Return the ends of machines that no attempt owned, owed or done, as far as their cost is known."""
        return self._ask(queries.strays)

    def meta(self, key: str) -> str | None:
        """Return a fact about this state itself."""
        return self._connection.execute(select(META.c.value).where(META.c.key == key)).scalar_one_or_none()


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
        """No cool-down is stored; those of the next plan are all there are."""
        self._connection.execute(delete(COOLDOWNS))

    def fold(self, now: datetime, rules: Folding) -> int:
        """Fold one piece of old events and forget what nothing asks for any more; return how many rows are gone."""
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
            StoreTooNew, StoreCorrupt: the file was left as it is.
            StoreUnavailable: it cannot be opened now.
            StoreUnsupported: another kind of database.
        """
        place = parse_place(url)
        lock = None if place.path is None else WriterLock(place.path)
        engine: Engine | None = None
        try:
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
        """Nothing of the state is held any more; closing twice is fine."""
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
            StoreUnavailable: nothing was written; the same call may work later.
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
            StoreUnavailable: it cannot be read now.
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
