"""Writes a plan: checks it against what is stored, then one bulk statement per table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Insert, Table, delete, func, insert, not_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert_into

from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED, Cooldown, CooldownScope
from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.intents import IntentState
from spotd.core.domain.jobs import Job
from spotd.core.domain.records import with_records
from spotd.core.domain.states import AttemptState, EndReason, InvariantBroken, JobState
from spotd.core.domain.world import UnreadableRow
from spotd.core.plans.plan import Plan
from spotd.core.quarantine import QUARANTINE_MARK
from spotd.store import rows
from spotd.store.charges import append_charges
from spotd.store.columns import instant_out, words_out
from spotd.store.conditions import FINAL, IDS, chunks
from spotd.store.experience import delete_records
from spotd.store.mapping import Columns
from spotd.store.points import AtPoint, StorePoint
from spotd.store.row_cache import RowCache
from spotd.store.rules import StoredRows, check_plan
from spotd.store.tables import ATTEMPTS, CHECKPOINTS, COOLDOWNS, EVENTS, EXPERIENCE, INTENTS, JOBS
from spotd.store.world import load_checkpoints

_JOBS: Final = select(JOBS.c.id, JOBS.c.state).where(JOBS.c.id.in_(IDS))
_ATTEMPTS: Final = select(ATTEMPTS.c.job_id, ATTEMPTS.c.number, ATTEMPTS.c.state, ATTEMPTS.c.key).where(
    ATTEMPTS.c.job_id.in_(IDS)
)
_INTENTS: Final = select(INTENTS.c.id, INTENTS.c.state).where(INTENTS.c.id.in_(IDS))
_LAST_EVENT: Final = select(func.max(EVENTS.c.seq))


def write_plan(connection: Connection, memory: RowCache, plan: Plan, at_point: AtPoint) -> int:
    """Write the plan as part of this transaction; return the number of its last event, 0 if it has none.

    Raises:
        InvariantBroken: it breaks a rule; nothing of it was written.
    """
    if plan.is_empty:
        return 0
    check_plan(plan, _stored(connection, plan))
    try:
        return _write(connection, memory, plan, at_point)
    except (OverflowError, UnicodeError, ValueError) as exc:
        raise InvariantBroken(f"a value of the plan cannot be stored: {exc}") from exc


def _write(connection: Connection, memory: RowCache, plan: Plan, at_point: AtPoint) -> int:
    memory.lists.clear()
    _upsert(connection, JOBS, [rows.job_out(job, memory.spec_text(job)) for job in plan.jobs.values()])
    at_point(StorePoint.JOBS)
    _seal(connection, plan.sealed)
    # Those that stop to count come first, so that the unique index never sees two.
    attempts = sorted(plan.attempts.values(), key=lambda attempt: attempt.state.counts)
    _upsert(connection, ATTEMPTS, [rows.attempt_out(a, memory.quote_text(a.id, a.quote)) for a in attempts])
    at_point(StorePoint.ATTEMPTS)
    _write_checkpoints(connection, memory, plan.jobs.values())
    at_point(StorePoint.CHECKPOINTS)
    _upsert(connection, INTENTS, [rows.INTENT.out(intent) for intent in plan.intents.values()])
    at_point(StorePoint.INTENTS)
    _upsert(connection, COOLDOWNS, [rows.COOLDOWN.out(cooldown) for cooldown in _longest(plan.cooldowns)])
    _forget_cooldowns(connection, plan.cooldowns)
    _write_experience(connection, memory, plan)
    at_point(StorePoint.COOLDOWNS)
    append_charges(connection, plan.charges)
    at_point(StorePoint.CHARGES)
    last = _append_events(connection, plan)
    at_point(StorePoint.EVENTS)
    for job in plan.jobs:
        memory.jobs.pop(job, None)
    return last


def _stored(connection: Connection, plan: Plan) -> StoredRows:
    touched = set(plan.jobs) | {i.job for i in plan.attempts} | {charge.attempt.job for charge in plan.charges}
    touched |= {row.job for row in plan.sealed}
    touched |= {intent.attempt.job for intent in plan.intents.values() if intent.attempt is not None}
    jobs: dict[JobId, JobState] = {}
    attempts: dict[AttemptId, tuple[AttemptState, str]] = {}
    for some in chunks(touched):
        for job_id, state in connection.execute(_JOBS, {"ids": some}):
            jobs[job_id] = JobState(state)
        for job_id, number, state, key in connection.execute(_ATTEMPTS, {"ids": some}):
            attempts[AttemptId(job=job_id, number=number)] = (AttemptState(state), key)
    intents = {
        intent: IntentState(state)
        for some in chunks(plan.intents)
        for intent, state in connection.execute(_INTENTS, {"ids": some})
    }
    for row in plan.sealed:
        if row.attempt is not None and (known := attempts.get(AttemptId(job=row.job, number=row.attempt))):
            attempts[AttemptId(job=row.job, number=row.attempt)] = (AttemptState.ENDED, known[1])
    return StoredRows(jobs=jobs, attempts=attempts, intents=intents)


@cache
def _upsert_statement(table: Table) -> Insert:
    statement = upsert_into(table)
    changed: dict[str, Any] = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    where = statement.excluded.until >= COOLDOWNS.c.until if table is COOLDOWNS else None
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed, where=where)


def _seal(connection: Connection, sealed: Sequence[UnreadableRow]) -> None:
    """Mark rows that cannot be understood as over, without reading them."""
    for row in sealed:
        if row.attempt is None:
            update_job = update(JOBS).where(JOBS.c.id == row.job, not_(FINAL))
            reason = words_out(f"{QUARANTINE_MARK}its row in the state cannot be understood ({row.error})")
            connection.execute(update_job.values(state=JobState.FAILED.value, reason=reason))
        else:
            update_attempt = update(ATTEMPTS).where(ATTEMPTS.c.job_id == row.job, ATTEMPTS.c.number == row.attempt)
            ended = {"state": AttemptState.ENDED.value, "end_reason": EndReason.QUARANTINED.value}
            connection.execute(update_attempt.values(**ended, end_detail=words_out(row.error)))


def _upsert(connection: Connection, table: Table, values: Sequence[Columns]) -> None:
    if values:
        connection.execute(_upsert_statement(table), values)


def _append(connection: Connection, table: Table, values: Sequence[Columns]) -> None:
    if values:
        connection.execute(insert(table), values)


def _append_events(connection: Connection, plan: Plan) -> int:
    if not plan.events:
        return 0
    first = int(connection.execute(_LAST_EVENT).scalar() or 0) + 1
    _append(connection, EVENTS, [rows.event_out(first + n, event) for n, event in enumerate(plan.events)])
    return first + len(plan.events) - 1


def _forget_cooldowns(connection: Connection, fresh: Sequence[Cooldown]) -> None:
    """Delete rows that nothing reads any more: marketplaces name new offers and hosts for ever."""
    known = [min(cooldown.since, cooldown.until) for cooldown in fresh if cooldown.since is not None]
    if known:
        limit = instant_out(min(known) - 2 * COOLDOWNS_REMEMBERED)
        connection.execute(delete(COOLDOWNS).where(COOLDOWNS.c.until < limit))


def _write_experience(connection: Connection, memory: RowCache, plan: Plan) -> None:
    if not plan.experience:
        return
    if memory.experience is not None:
        memory.experience = with_records(memory.experience, plan.experience)
    kept = [one for one in plan.experience.values() if one.count or one.span]
    _upsert(connection, EXPERIENCE, [rows.RECORD.out(one) for one in kept])
    delete_records(connection, [one for one in plan.experience.values() if not (one.count or one.span)])


def _longest(cooldowns: Sequence[Cooldown]) -> list[Cooldown]:
    """Return one per subject: a cooldown may be prolonged, never cut short."""
    longest: dict[tuple[str, CooldownScope, str], Cooldown] = {}
    for cooldown in cooldowns:
        subject = (cooldown.provider, cooldown.scope, cooldown.subject)
        known = longest.get(subject)
        if known is None or cooldown.until > known.until:
            longest[subject] = cooldown
    return list(longest.values())


def _write_checkpoints(connection: Connection, memory: RowCache, jobs: Collection[Job]) -> None:
    changed = [job for job in jobs if not _remembered(memory, job)]
    stored: dict[JobId, tuple[Checkpoint, ...]] = {}
    for some in chunks(job.id for job in changed):
        stored.update(load_checkpoints(connection, some))
    added: list[Columns] = []
    replaced: list[JobId] = []
    for job in changed:
        before = stored.get(job.id, ())
        if job.checkpoints == before:
            continue
        kept = len(before)
        if job.checkpoints[len(job.checkpoints) - kept :] != before:
            replaced.append(job.id)
            kept = 0
        oldest_first = job.checkpoints[::-1]
        added += [rows.checkpoint_out(job.id, n, oldest_first[n]) for n in range(kept, len(oldest_first))]
    for some in chunks(replaced):
        connection.execute(delete(CHECKPOINTS).where(CHECKPOINTS.c.job_id.in_(some)))
    _append(connection, CHECKPOINTS, added)


def _remembered(memory: RowCache, job: Job) -> bool:
    known = memory.jobs.get(job.id)
    return known is not None and known.checkpoints == job.checkpoints
