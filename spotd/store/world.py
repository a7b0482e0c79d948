"""Loads what the core needs to decide: everything that is not over yet, and this month's spending.

Core selects, never ORM objects: a thousand jobs cost a list of their ids and the jobs that changed. What the one writer
has loaded it remembers (`WorldMemory`), so that its next transaction reads what was written since and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime
from itertools import groupby
from typing import Any, ClassVar, Final

from sqlalchemy import Connection, Engine, bindparam, delete, event, func, or_, select

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED, Cooldown, CooldownScope, is_remembered
from spotd.core.domain.intents import AttemptId, Intent, IntentId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import (
    RECORDS_MAX,
    Experience,
    PastJob,
    Record,
    RecordKind,
    UnreadableRow,
    World,
    awaited,
    is_faded,
)
from spotd.store import tables
from spotd.store.tables import (
    ACTIVE,
    ATTEMPTS,
    CHECKPOINTS,
    COOLDOWNS,
    DAY_COSTS,
    EXPERIENCE,
    FENCE,
    IDS,
    INTENTS,
    JOBS,
    NOT_ENDED,
    OPEN,
    ROW_ERRORS,
    RowCache,
    chunks,
    error_words,
    kept,
)
from spotd.store.values import CHECKPOINT, COOLDOWN, INTENT, JOB, PAST_JOB, RECORD, Row, instant_out
from spotd_providers.contract.values import MicroUsd

# The records of what was seen of providers, pools, hosts and images.


_NEWEST: Final = select(EXPERIENCE).order_by(EXPERIENCE.c.at.desc()).limit(2 * len(RecordKind) * RECORDS_MAX)
"""All of them, and a bound on what was added since the last that faded were deleted."""
_ONE: Final = delete(EXPERIENCE).where(
    EXPERIENCE.c.kind == bindparam("k"), EXPERIENCE.c.provider == bindparam("p"), EXPERIENCE.c.subject == bindparam("s")
)


def load_experience(connection: Connection) -> Experience:
    """Return every record; one that cannot be understood is left out."""
    found = kept(RECORD.read, tables.fetch(connection, _NEWEST))
    return {one.id: one for one in found}


def delete_records(connection: Connection, records: Collection[Record]) -> int:
    """Delete these records; return how many they are."""
    if records:
        connection.execute(_ONE, [{"k": r.id.kind.value, "p": r.id.provider, "s": r.id.subject} for r in records])
    return len(records)


def forget_faded(connection: Connection, now: datetime) -> int:
    """Delete what has faded, and of each kind what is more than is kept; return how many records it was."""
    newest_first = sorted(load_experience(connection).values(), key=lambda one: (one.id.kind, -one.at.timestamp()))
    gone: list[Record] = []
    for _, of_kind in groupby(newest_first, key=lambda one: one.id.kind):
        gone += [one for n, one in enumerate(of_kind) if n >= RECORDS_MAX or is_faded(one, now)]
    return delete_records(connection, gone)


_IN_WORLD: Final = or_(ACTIVE, JOBS.c.id.in_(select(ATTEMPTS.c.job_id).where(NOT_ENDED)))

_OF_PAST: Final = tuple(
    c for c in JOBS.c if c.name in {"id", "name", "state", "reason"} or c.name.startswith("outputs_")
)

# Built once: each pass of the control loop reads the world, and to build a statement costs more than to run it.
_JOB_IDS: Final = select(JOBS.c.id).where(_IN_WORLD)
_THESE_JOB_IDS: Final = _JOB_IDS.where(JOBS.c.id.in_(IDS))
_LIVE_ATTEMPTS: Final = select(ATTEMPTS).where(NOT_ENDED)
_THEIR_LIVE_ATTEMPTS: Final = _LIVE_ATTEMPTS.where(ATTEMPTS.c.job_id.in_(IDS))
_OPEN_INTENTS: Final = select(INTENTS).where(OPEN).order_by(INTENTS.c.created_at, INTENTS.c.id)
_COOLDOWNS_AFTER: Final = (
    select(COOLDOWNS)
    .where(COOLDOWNS.c.until > bindparam("after"))
    .where(or_(COOLDOWNS.c.scope != CooldownScope.BID.value, COOLDOWNS.c.until > bindparam("now")))
    .order_by(COOLDOWNS.c.provider, COOLDOWNS.c.scope, COOLDOWNS.c.subject)
)
_COSTS_SINCE: Final = (
    select(DAY_COSTS.c.day, func.sum(DAY_COSTS.c.amount))
    .where(DAY_COSTS.c.day >= bindparam("first"))
    .group_by(DAY_COSTS.c.day)
    .order_by(DAY_COSTS.c.day)
)
_JOBS: Final = select(JOBS).where(JOBS.c.id.in_(IDS))
_PAST: Final = select(*_OF_PAST).where(JOBS.c.id.in_(IDS))
_CHECKPOINTS: Final = select(CHECKPOINTS).where(CHECKPOINTS.c.job_id.in_(IDS)).order_by(CHECKPOINTS.c.ordinal.desc())


def load_world(connection: Connection, memory: RowCache, policy: Policy, now: datetime) -> World:
    """Return the world at this moment, jobs in the order of their submission."""
    unreadable: list[UnreadableRow] = []
    attempts = _by_job(_attempts(memory, tables.fetch(connection, _LIVE_ATTEMPTS), unreadable))
    jobs = _in_order(_jobs(connection, memory, connection.execute(_JOB_IDS).scalars().all(), unreadable))
    for orphan in [attempt for attempt in attempts if attempt.job not in jobs]:
        item = attempts.pop(orphan)
        error = "the row of its job cannot be understood"
        unreadable.append(UnreadableRow(job=orphan.job, attempt=orphan.number, error=error, key=item.key, ref=item.ref))
    memory.keep_only(set(jobs), set(attempts))
    return World(
        policy=policy,
        jobs=jobs,
        attempts=attempts,
        intents=_intents(connection),
        cooldowns=_cooldowns(connection, now),
        experience=_experience(connection, memory),
        spent_by_day=_spent_by_day(connection, now),
        unreadable=tuple(unreadable),
        past=_past(connection, jobs),
    )


@dataclass(slots=True)
class _Written:
    """What plans have written since the world was loaded."""

    jobs: set[JobId] = field(default_factory=set)
    """Jobs of which any row was written, of their attempts and checkpoints, too."""
    intents: bool = False
    cooldowns: bool = False
    days: bool = False


class WorldMemory:
    """The world as the one writer knows it, which reads again what was written since, and nothing else.

    Theory. Memory and database cannot disagree, since each way to a write is known. The engine of the writer sends all
    of its statements past `_count_write`: what neither reads nor begins a transaction is a write. `note` alone says
    which rows a write touched, and they are read again; after each other write everything is. What another connection
    writes moves SQLite's data version (PRAGMA data_version). In PostgreSQL the fence of each transaction proves that no
    other daemon has led in between; what a person changes there by hand in a job is not seen while the daemon runs. A
    transaction that fails makes the writer forget everything. A world with rows that cannot be understood is not
    remembered.
    """

    is_proved: ClassVar[bool] = False
    """Tests: each world is compared with a whole load."""

    def __init__(self, engine: Engine) -> None:
        self._writes = 0
        self._world: World | None = None
        self._mark: tuple[object, int, int] | None = None
        self._loaded_at = datetime.min.replace(tzinfo=UTC)
        self._written = _Written()
        event.listen(engine, "before_cursor_execute", self._count_write)

    def _count_write(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("SELECT", "BEGIN", FENCE)):
            self._writes += 1

    def _mark_of(self, connection: Connection) -> tuple[object, int, int]:
        """Return what changes with each write, by whichever connection."""
        driver: Any = connection.connection.driver_connection
        version = 0
        if connection.dialect.name == "sqlite":
            [version] = driver.execute("PRAGMA data_version").fetchone()
        return driver, version, self._writes

    def forget(self) -> None:
        self._world = None

    def note(self, connection: Connection, before: tuple[object, int, int] | None, plan: Plan) -> None:
        """Note that nothing but this plan was written since `before`."""
        if before is None or before != self._mark or self._world is None:
            self._world = None
            return
        written = self._written
        written.jobs.update(plan.jobs, (i.job for i in plan.attempts), (row.job for row in plan.sealed))
        written.intents |= bool(plan.intents)
        written.cooldowns |= bool(plan.cooldowns)
        written.days |= bool(plan.charges)
        self._mark = self._mark_of(connection)

    def before_write(self, connection: Connection) -> tuple[object, int, int] | None:
        """Return what `note` is to be given once the plan is written."""
        return None if self._world is None else self._mark_of(connection)

    def world(self, connection: Connection, rows: RowCache, policy: Policy, now: datetime) -> World:
        """Return what `load_world` would."""
        mark, known = self._mark_of(connection), self._world
        if self._mark is not None and mark[:2] != self._mark[:2]:
            rows.forget()  # another connection has written; what it changed is not known
        if known is None or mark != self._mark or now < self._loaded_at:
            world = load_world(connection, rows, policy, now)
        else:
            world = self._renewed(connection, rows, replace(known, policy=policy), now)
            if self.is_proved:
                _require_same(world, load_world(connection, RowCache(), policy, now))
        self._world = None if world.unreadable else world
        self._mark, self._loaded_at, self._written = mark, now, _Written()
        return world

    def _renewed(self, connection: Connection, rows: RowCache, known: World, now: datetime) -> World:
        written = self._written
        world = replace(
            known,
            intents=_intents(connection) if written.intents else known.intents,
            cooldowns=_cooldowns(connection, now) if written.cooldowns else _remembered(known.cooldowns, now),
            experience=_experience(connection, rows),
        )
        if written.days or _first_of_month(now) != _first_of_month(self._loaded_at):
            world = replace(world, spent_by_day=_spent_by_day(connection, now))
        if not written.jobs:
            return world
        unreadable: list[UnreadableRow] = []
        attempts = {i: item for i, item in known.attempts.items() if i.job not in written.jobs}
        jobs = {i: job for i, job in known.jobs.items() if i not in written.jobs}
        for some in chunks(written.jobs):
            attempts |= _attempts(rows, tables.fetch(connection, _THEIR_LIVE_ATTEMPTS, {"ids": some}), unreadable)
            ids = connection.execute(_THESE_JOB_IDS, {"ids": some}).scalars().all()
            jobs |= _jobs(connection, rows, ids, unreadable)
        if unreadable or any(i.job not in jobs for i in attempts):
            return load_world(connection, rows, known.policy, now)
        rows.keep_only(set(jobs), set(attempts))
        return replace(world, jobs=_in_order(jobs), attempts=_by_job(attempts), past=_past(connection, jobs))


def _require_same(world: World, stored: World) -> None:
    """Raise AssertionError, which nothing takes for a damaged row, unless the worlds are equal and in one order."""
    for name in (one.name for one in fields(World)):
        mine, other = getattr(world, name), getattr(stored, name)
        if mine != other or (name in {"jobs", "attempts", "intents"} and [*mine] != [*other]):
            raise AssertionError(f"the {name} in memory are not those of the state")


def _remembered(known: tuple[Cooldown, ...], now: datetime) -> tuple[Cooldown, ...]:
    return known if all(is_remembered(one, now) for one in known) else tuple(o for o in known if is_remembered(o, now))


def _past(connection: Connection, jobs: Mapping[JobId, Job]) -> dict[JobId, PastJob]:
    past = [before for before in awaited(jobs.values()) if before not in jobs]
    return load_past(connection, past) if past else {}


def load_past(connection: Connection, ids: Iterable[JobId]) -> dict[JobId, PastJob]:
    """Return what is known of jobs that others wait for; of those that cannot be understood, nothing."""
    found: dict[JobId, PastJob] = {}
    for some in chunks(ids):
        found.update((past.id, past) for past in kept(PAST_JOB.read, tables.fetch(connection, _PAST, {"ids": some})))
    return found


def _jobs(
    connection: Connection, memory: RowCache, ids: Sequence[JobId], unreadable: list[UnreadableRow]
) -> dict[JobId, Job]:
    for some in chunks(job for job in ids if job not in memory.jobs):
        _read_jobs(connection, memory, some, unreadable)
    return {job: memory.jobs[job] for job in ids if job in memory.jobs}


def _in_order(jobs: Mapping[JobId, Job]) -> dict[JobId, Job]:
    return {job.id: job for job in sorted(jobs.values(), key=lambda job: (job.submitted_at, job.id))}


def _read_jobs(connection: Connection, memory: RowCache, ids: Sequence[JobId], unreadable: list[UnreadableRow]) -> None:
    try:
        checkpoints = load_checkpoints(connection, ids)
    except ROW_ERRORS:
        checkpoints = {}
        for job in ids:
            try:
                checkpoints.update(load_checkpoints(connection, [job]))
            except ROW_ERRORS as exc:
                unreadable.append(UnreadableRow(job=job, attempt=None, error=error_words(exc)))
    broken = {row.job for row in unreadable if row.attempt is None}
    for row in tables.fetch(connection, _JOBS, {"ids": ids}):
        if row.id in broken:
            continue
        try:
            memory.jobs[row.id] = JOB.read(
                row, spec=memory.spec(row.id, row.spec), checkpoints=checkpoints.get(row.id, ())
            )
        except ROW_ERRORS as exc:
            unreadable.append(UnreadableRow(job=JobId(row.id), attempt=None, error=error_words(exc)))


def load_checkpoints(connection: Connection, ids: Sequence[JobId]) -> dict[JobId, tuple[Checkpoint, ...]]:
    """Return the accepted checkpoints of these jobs, newest first; jobs without any are left out."""
    found: dict[JobId, list[Checkpoint]] = {}
    for row in tables.fetch(connection, _CHECKPOINTS, {"ids": ids}):
        found.setdefault(row.job_id, []).append(CHECKPOINT.read(row))
    return {job: tuple(some) for job, some in found.items()}


def _attempts(memory: RowCache, rows: Iterable[Row], unreadable: list[UnreadableRow]) -> dict[AttemptId, Attempt]:
    found: dict[AttemptId, Attempt] = {}
    for row in rows:
        attempt_id = AttemptId(job=row.job_id, number=row.number)
        try:
            found[attempt_id] = memory.attempt(attempt_id, row)
        except ROW_ERRORS as exc:
            unreadable.append(
                UnreadableRow(
                    job=attempt_id.job, attempt=row.number, error=error_words(exc), key=row.key, ref=tables.ref_in(row)
                )
            )
    return found


def _by_job(attempts: Mapping[AttemptId, Attempt]) -> dict[AttemptId, Attempt]:
    return dict(sorted(attempts.items(), key=lambda item: (item[0].job, item[0].number)))


def _intents(connection: Connection) -> dict[IntentId, Intent]:
    # One that cannot be understood is made anew, because without it a rule of the core does not hold.
    return {intent.id: intent for intent in kept(INTENT.read, tables.fetch(connection, _OPEN_INTENTS))}


def _cooldowns(connection: Connection, now: datetime) -> tuple[Cooldown, ...]:
    asked = {"after": instant_out(now - COOLDOWNS_REMEMBERED), "now": instant_out(now)}
    return tuple(kept(COOLDOWN.read, tables.fetch(connection, _COOLDOWNS_AFTER, asked)))


def _experience(connection: Connection, memory: RowCache) -> Experience:
    if memory.experience is None:
        memory.experience = load_experience(connection)
    return memory.experience


def _spent_by_day(connection: Connection, now: datetime) -> dict[date, MicroUsd]:
    costs = connection.execute(_COSTS_SINCE, {"first": _first_of_month(now)})
    return {day: MicroUsd(int(amount)) for day, amount in costs}


def _first_of_month(now: datetime) -> date:
    return now.astimezone(UTC).date().replace(day=1)
