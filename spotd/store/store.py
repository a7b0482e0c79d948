"""The state of one spotd installation, as transactions over core values.

Theory. One process writes. `tx` runs a function in one write transaction (SQLite: BEGIN IMMEDIATE, synchronous FULL;
PostgreSQL: fenced by the leader's row): when it
returns, what it committed survives a power cut; when it raises, nothing happened. `read` runs one in a snapshot, on a
connection of its own, so that no answer delays a decision. Both may be called from any thread, one of each kind at a
time; production calls each kind from one dedicated thread, a simulation inline. A state in memory has one connection.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from sqlalchemy import Connection, Engine, Select, and_, delete, exc, func, insert, or_, select, update

from spotd.core.domain.intents import IntentState, JobId
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.store import tables
from spotd.store.commit import write_plan
from spotd.store.encryption import EncryptedSecrets, write_secrets
from spotd.store.engine import (
    BUNDLED,
    AtPoint,
    StorePoint,
    WriterLock,
    has_log,
    migrate,
    open_engine,
    pass_on,
    stored_revision,
    translated,
)
from spotd.store.place import (
    MEMORY,
    DatabasePlace,
    StateUnavailable,
    StoreMoved,
    parse_place,
)
from spotd.store.queries import Reads
from spotd.store.tables import COOLDOWNS, EVENTS, FOLDING_KEY, INTENTS, JOBS, META, RowCache, chunks
from spotd.store.values import instant_in, instant_out
from spotd.store.world import WorldMemory, forget_faded

if TYPE_CHECKING:
    from spotd.store.postgres import Leadership

# Keeps the state from growing for ever: old events are folded into one line, and rows that nothing asks for go.
#
# Theory. Events record what happened; nothing is decided by them. The few kinds that receipts are made of are never
# folded, and charges, jobs and attempts are never touched: what was spent is computed from them. What matters to money
# and machines stays for its age, however much of it there is. Of what each checkpoint adds, a job keeps the newest few;
# of what hosts and providers cause otherwise, as many as a reader needs. The newest events stay whatever their age; the
# clock may be wrong, a count is not.
#
# The line counts how many of which kind are gone. It stands where the last of them stood, with their time, so that
# later events follow it, no reader who follows the events meets it as news, and it is folded in its turn with those
# around it. All happens a bounded piece at a time. The table's own trigger refuses every other deletion.


NEVER_FOLDED: Final = ("attempt.billed", "attempt.credited", "checkpoint.fallback")
"""What receipts are made of."""
ROUTINE: Final = ("checkpoint.accepted", "checkpoint.dropped")
"""What every save of a job adds. What the job may resume from is in its list of checkpoints, not here."""
FOLDED: Final = "events.folded"
KINDS_SAID: Final = 30
COOLDOWN_KEPT: Final = timedelta(days=7)
"""A cool-down that has run out still shows how often its cause came back."""
_BY_AGE_ALONE: Final = ("attempt.", "job.", "launch.", "machine.")
"""What these begin is bounded by what is bought, and matters for as long as it may be asked about."""
_FINAL: Final = sorted(state.value for state in JobState if state.is_final)
_SETTLED: Final = (IntentState.DONE.value, IntentState.FAILED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How much stays.

    Attributes:
        age: what is older may be folded.
        newest: so many events stay however old they are.
        routine: of each kind that every checkpoint adds, so many of one job stay.
        routine_least: fewer of such a kind are not worth a change of the job's line.
        of_a_job: of one job no more stay, however young they are, but for what matters to money and machines.
        most: of all jobs together no more stay, with the same exception.
        piece: about so many are folded at once.
        least: fewer are not worth a line of their own.
    """

    age: timedelta = timedelta(days=90)
    newest: int = 10_000
    routine: int = 100
    routine_least: int = 50
    of_a_job: int = 10_000
    most: int = 250_000
    piece: int = 5_000
    least: int = 500


def fold(connection: Connection, now: datetime, rules: Folding) -> int:
    """Fold one piece of what is too old or too much, if there is any; return how many events are gone."""
    return _fold_routine(connection, rules) or _fold_excess(connection, now, rules)


def _fold_routine(connection: Connection, rules: Folding) -> int:
    """Fold what checkpoints have added to some jobs beyond the newest of each kind, into one line a job."""
    gone: dict[JobId, list[int]] = {}
    count = func.count()
    query = (
        select(EVENTS.c.kind, EVENTS.c.job_id, count)
        .where(EVENTS.c.kind.in_(ROUTINE), EVENTS.c.job_id.is_not(None))
        .group_by(EVENTS.c.kind, EVENTS.c.job_id)
        .having(count >= rules.routine + rules.routine_least)
    )
    total = 0
    for kind, job_id, number in connection.execute(query).all():
        if total >= rules.piece:
            break
        of_kind = select(EVENTS.c.seq).where(EVENTS.c.kind == kind, EVENTS.c.job_id == job_id)
        oldest = of_kind.order_by(EVENTS.c.seq).limit(min(rules.piece, number - rules.routine))
        found = connection.execute(oldest).scalars().all()
        gone.setdefault(job_id, []).extend(found)
        total += len(found)
    for job_id, numbers in gone.items():
        former = select(EVENTS.c.seq).where(EVENTS.c.kind == FOLDED, EVENTS.c.job_id == job_id)
        _replace(connection, [*connection.execute(former).scalars(), *numbers], job_id)
    return total


def _fold_excess(connection: Connection, now: datetime, rules: Folding) -> int:
    kinds = set(connection.execute(select(EVENTS.c.kind).distinct()).scalars()).difference(NEVER_FOLDED)
    capped = [kind for kind in kinds if not kind.startswith(_BY_AGE_ALONE)]
    gone = (
        _too_many_of_a_job(connection, capped, rules)
        or _too_many(connection, capped, rules)
        or _too_old(connection, kinds, now, rules)
    )
    if len(gone) < rules.least:
        return 0
    _replace(connection, gone, None)
    return len(gone)


def forget_settled(connection: Connection, now: datetime, rules: Folding) -> int:
    """Delete cool-downs that have run out, and settled calls of jobs that ended long ago; return how many they were."""
    past, long_ago = instant_out(now - COOLDOWN_KEPT), instant_out(now - rules.age)
    ended = select(JOBS.c.id).where(JOBS.c.state.in_(_FINAL), JOBS.c.ended_at < long_ago)
    settled = and_(
        INTENTS.c.state.in_(_SETTLED),
        INTENTS.c.created_at < long_ago,
        or_(INTENTS.c.attempt_job.is_(None), INTENTS.c.attempt_job.in_(ended)),
    )
    count = connection.execute(delete(COOLDOWNS).where(COOLDOWNS.c.until < past)).rowcount
    count += forget_faded(connection, now)
    return count + connection.execute(delete(INTENTS).where(settled)).rowcount


def _too_many_of_a_job(connection: Connection, kinds: Sequence[str], rules: Folding) -> list[int]:
    count, limit = func.count(), rules.of_a_job + rules.least
    of_jobs = select(EVENTS.c.job_id).where(EVENTS.c.job_id.is_not(None)).group_by(EVENTS.c.job_id)
    for job_id in connection.execute(of_jobs.having(count >= limit)).scalars().all():
        some = and_(EVENTS.c.job_id == job_id, EVENTS.c.kind.in_(kinds))
        number = int(connection.execute(select(count).select_from(EVENTS).where(some)).scalar() or 0)
        if number >= limit:
            return _numbers(connection, select(EVENTS.c.seq).where(some), min(rules.piece, number - rules.of_a_job))
    return []


def _too_many(connection: Connection, kinds: Sequence[str], rules: Folding) -> list[int]:
    some = EVENTS.c.kind.in_(kinds)
    number = int(connection.execute(select(func.count()).select_from(EVENTS).where(some)).scalar() or 0)
    if number < rules.most + rules.least:
        return []
    return _numbers(connection, select(EVENTS.c.seq).where(some), min(rules.piece, number - rules.most))


def _too_old(connection: Connection, kinds: Iterable[str], now: datetime, rules: Folding) -> list[int]:
    newest = int(connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0)
    old = and_(EVENTS.c.at < instant_out(now - rules.age), EVENTS.c.seq <= newest - rules.newest)
    return _numbers(connection, select(EVENTS.c.seq).where(old, EVENTS.c.kind.in_([*kinds])), rules.piece)


def _numbers(connection: Connection, query: Select[Any], limit: int) -> list[int]:
    """Return the numbers of the oldest of these events."""
    return [*connection.execute(query.order_by(EVENTS.c.seq).limit(limit)).scalars()]


def _replace(connection: Connection, gone: Sequence[int], job: JobId | None) -> None:
    """Delete these events; one line counts what they were, of the job or of no one job."""
    counts: Counter[str] = Counter()
    total = 0
    for some in chunks(gone):
        for kind, data in connection.execute(select(EVENTS.c.kind, EVENTS.c.data).where(EVENTS.c.seq.in_(some))):
            former = _said(data) if kind == FOLDED else {"events": 1, kind: 1}
            total += former.pop("events", 0)
            counts.update(former)
    last = max(gone)
    at = instant_in(connection.execute(select(EVENTS.c.at).where(EVENTS.c.seq == last)).scalar_one())
    connection.execute(insert(META).values(key=FOLDING_KEY, value="1"))
    for some in chunks(gone):
        connection.execute(delete(EVENTS).where(EVENTS.c.seq.in_(some)))
    connection.execute(delete(META).where(META.c.key == FOLDING_KEY))
    whose = "" if job is None else " of this job"
    line = Event(
        at=at,
        kind=FOLDED,
        message=f"{total:,} older events{whose} are folded into this line",
        job=job,
        data={"events": total, **dict(counts.most_common(KINDS_SAID))},
    )
    connection.execute(insert(EVENTS), [tables.event_out(last, line)])


def _said(data: str) -> dict[str, int]:
    """Return the numbers that a line of this kind holds, as far as they are numbers."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return {k: n for k, n in found.items() if type(n) is int and n > 0} if isinstance(found, dict) else {}


MOVED_TO: Final = "moved_to"
"""Fact of a state that was moved: where it is used now. Such a state is never opened again."""
_MOVED_TO: Final = select(META.c.value).where(META.c.key == MOVED_TO)
T = TypeVar("T")
NESTED: Final = "a transaction was begun inside another one"


class Tx(Reads):
    """A write transaction. What it reads includes what it wrote."""

    def __init__(
        self, place: DatabasePlace, connection: Connection, memory: RowCache, known: WorldMemory, at_point: AtPoint
    ) -> None:
        super().__init__(place, connection, memory)
        self._known = known
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
            before = self._known.before_write(self._connection)
            last = write_plan(self._connection, self._memory, plan, self._at_point)
            self._known.note(self._connection, before, plan)
        except BaseException:
            self.spoiled = True
            raise
        return last

    def _load_world(self, policy: Policy, now: datetime) -> World:
        return self._known.world(self._connection, self._memory, policy, now)

    def write_secrets(self, rows: Iterable[EncryptedSecrets]) -> None:
        """Store encrypted secrets of jobs that are in the state."""
        write_secrets(self._connection, rows)

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
        lock: WriterLock | Leadership | None,
        reader: Engine | None = None,
        at_point: AtPoint = pass_on,
        only_reads: bool = False,
    ) -> None:
        self._place = place
        self._only_reads = only_reads
        self._newest: tuple[object, ...] = ()
        self._engine = engine
        self._lock = lock
        self._leads = None if isinstance(lock, WriterLock) else lock
        self._at_point = at_point
        self._memory = RowCache()
        self._known = WorldMemory(engine)
        self._turn = _Turn(place)
        self._reader = engine if reader is None else reader
        self._reading = self._turn if reader is None else _Turn(place)
        self._read_memory = self._memory if reader is None else RowCache()
        self._stale: deque[frozenset[JobId]] = deque()
        """Jobs that were written, and that the reader must read again."""

    @classmethod
    def open(cls, url: str | Path, *, at_point: AtPoint = pass_on, for_move_to: str = "") -> Self:
        """Open the state at a place that `parse_place` knows, at this version's schema; made if it is not there.

        Args:
            at_point: called at every `StorePoint`; tests end the process there.
            for_move_to: where the state is being moved to: one that was sealed for that place is opened all the same.

        Raises:
            StoreInUse: another process writes it.
            StoreMoved: it was moved to another place.
            StoreTooNew, StoreOtherSchema, StoreCorrupt: the file was left as it is.
            StateUnavailable: it cannot be opened now.
            StoreUnsupported: another kind of database.
        """
        place = parse_place(url)
        lock = _lock(place)
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
                moved_to = connection.execute(_MOVED_TO).scalar()
                connection.rollback()
            if moved_to not in {None, for_move_to}:
                raise StoreMoved(f"the state {place} was moved to {moved_to}", hint="name that one in [daemon] state")
        except BaseException:
            if engine is not None:
                engine.dispose()
            if lock is not None:
                lock.release()
            raise
        reader = None if str(place) == MEMORY else open_engine(place, reads_only=True)
        return cls(place=place, engine=engine, reader=reader, lock=lock, at_point=at_point)

    @classmethod
    def open_to_read(cls, url: str) -> Self:
        """Open a state in PostgreSQL that another process leads. Nothing is connected, locked, made or changed.

        Raises:
            StoreUnsupported: the driver is not installed.
        """
        place = parse_place(url)
        reader = open_engine(place, reads_only=True)
        return cls(place=place, engine=reader, reader=reader, lock=None, only_reads=True)

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

    @property
    def is_shared(self) -> bool:
        """Whether processes of other computers may open it."""
        return self._leads is not None or self._only_reads

    @property
    def term(self) -> str:
        """What names the lead of this process; empty where no other can lead."""
        return "" if self._leads is None else self._leads.term

    def state_api(self, url: str, certificate: str, proofs: Sequence[str]) -> None:
        """State to those that wait where this process serves its API; nowhere where the URL is empty."""
        if self._leads is not None:
            self._leads.state_api(url, certificate, proofs)

    @property
    def is_lost(self) -> bool:
        """Whether another process may write this state: what this one remembers of it is not to be acted on."""
        return self._leads is not None and self._leads.is_lost

    def tx(self, fn: Callable[[Tx], T]) -> T:
        """Return what the function returned, once everything it committed is durable; if it raises, nothing happened.

        Raises:
            StateUnavailable: nothing was written; the same call may work later.
            InvariantBroken: a plan broke a rule.
        """
        if self._reading.is_mine:
            raise InvariantBroken(NESTED)
        if self._only_reads:
            raise StateUnavailable(f"the state {self._place} is written by another spotd", hint="ask that one")
        with self._turn.mine(), translated(self._place), self._engine.connect() as connection:
            try:
                self._begin(connection)
                self._at_point(StorePoint.BEGUN)
                tx = Tx(self._place, connection, self._memory, self._known, self._at_point)
                result = fn(tx)
                changed = frozenset(tx.changed)
                self._forget_later(changed)
                if tx.spoiled:
                    raise InvariantBroken("a transaction went on after one of its plans was refused")
                self._commit(connection)
                # Once more: the reader may have remembered the former values in between.
                self._forget_later(changed)
            except BaseException:
                self._memory.forget()
                self._known.forget()
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
            if self._place.url is None:
                connection.exec_driver_sql("BEGIN")
            try:
                if self._only_reads:
                    self._forget_older(connection)
                return fn(Reads(self._place, connection, self._read_memory))
            finally:
                with suppress(exc.DBAPIError):
                    connection.rollback()

    def _forget_older(self, connection: Connection) -> None:
        """Forget what was read before the newest commit of the leader."""
        from spotd.store.postgres import newest_commit

        newest = newest_commit(connection, self._place, BUNDLED.head)
        if newest != self._newest:
            self._read_memory.forget()
            self._newest = newest

    def _begin(self, connection: Connection) -> None:
        """Begin a transaction that writes."""
        if self._leads is None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            self._leads.begin(connection)

    def _commit(self, connection: Connection) -> None:
        if self._leads is None:
            connection.commit()
        else:
            self._leads.commit(connection)

    def _forget_later(self, changed: frozenset[JobId]) -> None:
        if self._reader is not self._engine:
            self._stale.append(changed)

    def _forget_now(self) -> None:
        while self._stale:
            changed = self._stale.popleft()
            self._read_memory.lists.clear()
            self._read_memory.experience = None
            for job in changed:
                self._read_memory.jobs.pop(job, None)


def _lock(place: DatabasePlace) -> WriterLock | Leadership | None:
    """Make this process the one that writes there."""
    if place.url is not None:
        from spotd.store.postgres import Leadership

        return Leadership(place)
    return None if place.path is None else WriterLock(place.path)


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
