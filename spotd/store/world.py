"""Loads what the core needs to decide: everything that is not over yet, and this month's spending.

Core selects, never ORM objects: a thousand jobs cost a list of their ids and the jobs that changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime
from itertools import groupby
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, or_, select

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED, Cooldown
from spotd.core.domain.intents import AttemptId, Intent, IntentId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
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
from spotd.store.values import CHECKPOINT, COOLDOWN, INTENT, JOB, PAST_JOB, RECORD, instant_out
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
_LIVE_ATTEMPTS: Final = select(ATTEMPTS).where(NOT_ENDED)
_OPEN_INTENTS: Final = select(INTENTS).where(OPEN).order_by(INTENTS.c.created_at, INTENTS.c.id)
_COOLDOWNS_AFTER: Final = (
    select(COOLDOWNS)
    .where(COOLDOWNS.c.until > bindparam("after"))
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
    attempts = _attempts(connection, memory, unreadable)
    jobs = _jobs(connection, memory, unreadable)
    for orphan in [attempt for attempt in attempts if attempt.job not in jobs]:
        item = attempts.pop(orphan)
        error = "the row of its job cannot be understood"
        unreadable.append(UnreadableRow(job=orphan.job, attempt=orphan.number, error=error, key=item.key, ref=item.ref))
    memory.keep_only(set(jobs), set(attempts))
    past = [before for before in awaited(jobs.values()) if before not in jobs]
    return World(
        policy=policy,
        jobs=jobs,
        attempts=attempts,
        intents=_intents(connection),
        cooldowns=_cooldowns(connection, now),
        experience=_experience(connection, memory),
        spent_by_day=_spent_by_day(connection, now),
        unreadable=tuple(unreadable),
        past=load_past(connection, past) if past else {},
    )


def load_past(connection: Connection, ids: Iterable[JobId]) -> dict[JobId, PastJob]:
    """Return what is known of jobs that others wait for; of those that cannot be understood, nothing."""
    found: dict[JobId, PastJob] = {}
    for some in chunks(ids):
        found.update((past.id, past) for past in kept(PAST_JOB.read, tables.fetch(connection, _PAST, {"ids": some})))
    return found


def _jobs(connection: Connection, memory: RowCache, unreadable: list[UnreadableRow]) -> dict[JobId, Job]:
    ids = connection.execute(_JOB_IDS).scalars().all()
    for some in chunks(job for job in ids if job not in memory.jobs):
        _read_jobs(connection, memory, some, unreadable)
    found = [memory.jobs[job] for job in ids if job in memory.jobs]
    return {job.id: job for job in sorted(found, key=lambda job: (job.submitted_at, job.id))}


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


def _attempts(connection: Connection, memory: RowCache, unreadable: list[UnreadableRow]) -> dict[AttemptId, Attempt]:
    found: dict[AttemptId, Attempt] = {}
    for row in tables.fetch(connection, _LIVE_ATTEMPTS):
        attempt_id = AttemptId(job=row.job_id, number=row.number)
        try:
            found[attempt_id] = memory.attempt(attempt_id, row)
        except ROW_ERRORS as exc:
            unreadable.append(
                UnreadableRow(
                    job=attempt_id.job, attempt=row.number, error=error_words(exc), key=row.key, ref=tables.ref_in(row)
                )
            )
    return dict(sorted(found.items(), key=lambda item: (item[0].job, item[0].number)))


def _intents(connection: Connection) -> dict[IntentId, Intent]:
    # One that cannot be understood is made anew, because without it a rule of the core does not hold.
    return {intent.id: intent for intent in kept(INTENT.read, tables.fetch(connection, _OPEN_INTENTS))}


def _cooldowns(connection: Connection, now: datetime) -> tuple[Cooldown, ...]:
    after = {"after": instant_out(now - COOLDOWNS_REMEMBERED)}
    return tuple(kept(COOLDOWN.read, tables.fetch(connection, _COOLDOWNS_AFTER, after)))


def _experience(connection: Connection, memory: RowCache) -> Experience:
    if memory.experience is None:
        memory.experience = load_experience(connection)
    return memory.experience


def _spent_by_day(connection: Connection, now: datetime) -> dict[date, MicroUsd]:
    first = now.astimezone(UTC).date().replace(day=1)
    costs = connection.execute(_COSTS_SINCE, {"first": first})
    return {day: MicroUsd(int(amount)) for day, amount in costs}
