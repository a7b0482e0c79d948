"""Writes a plan: checks it against what is stored, then one bulk statement per table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, timedelta
from functools import cache
from typing import Any, Final, cast

from sqlalchemy import Connection, Insert, Table, bindparam, delete, func, insert, not_, or_, select, update
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as insert_into_sqlite

from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED, Cooldown, CooldownScope
from spotd.core.domain.intents import (
    AttemptId,
    Charge,
    CostSums,
    Intent,
    IntentId,
    IntentKind,
    IntentState,
    JobId,
    sums_of,
)
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import (
    JOB_TRANSITIONS,
    AttemptState,
    EndReason,
    InvariantBroken,
    JobState,
    check_attempt_transition,
    check_job_transition,
)
from spotd.core.domain.world import UnreadableRow, with_records
from spotd.core.kernel.quarantine import QUARANTINE_MARK
from spotd.core.metering import day_start
from spotd.store import tables
from spotd.store.encryption import delete_secrets
from spotd.store.engine import AtPoint, StorePoint
from spotd.store.place import POSTGRES
from spotd.store.tables import (
    ATTEMPT_COSTS,
    ATTEMPTS,
    CHARGES,
    CHECKPOINTS,
    COOLDOWNS,
    DAY_COSTS,
    EVENTS,
    EXPERIENCE,
    FINAL,
    IDS,
    INTENTS,
    JOBS,
    RowCache,
    chunks,
)
from spotd.store.values import CHARGE, COOLDOWN, COST_SUMS, INTENT, RECORD, Columns, instant_out, words_out
from spotd.store.world import delete_records, load_checkpoints
from spotd_providers.contract.values import ProviderName

# What a plan must obey before it is written, checked against what is stored.
#
# Theory. Every changed state has an event that explains it, in the same plan. A plan may hold two steps of one job
# when the first ends in a state that wants a machine (a loss is taken in, then the next machine is placed): each step
# must be a row of the table of transitions and have its event. A job has at most one attempt that counts, and none
# when it is final. A launch belongs to an attempt that was made for it, and once its outcome is settled it is never
# open again.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """What the database holds of everything a plan touches: all attempts of its jobs, its jobs, its intents."""

    jobs: Mapping[JobId, JobState]
    attempts: Mapping[AttemptId, tuple[AttemptState, str]]
    """State and key."""
    intents: Mapping[IntentId, IntentState]


def check_plan(plan: Plan, stored: StoredRows) -> None:
    """Raise InvariantBroken unless every rule holds."""
    _check_job_steps(plan, stored)
    _check_attempt_steps(plan, stored)
    _check_counting(plan, stored)
    for intent in plan.intents.values():
        _check_intent(intent, plan, stored)
    for charge in plan.charges:
        _check_charge(charge, plan, stored)


def _check_job_steps(plan: Plan, stored: StoredRows) -> None:
    explained = Counter(event.job for event in plan.events)
    for job in plan.jobs.values():
        before = stored.jobs.get(job.id)
        needed = 1 if before is None else _steps(before, job)
        if explained[job.id] < needed:
            raise InvariantBroken(
                f"job {job.id} goes from {before or 'nothing'} to {job.state} "
                f"with {explained[job.id]} of {needed} events"
            )


def _steps(before: JobState, job: Job) -> int:
    """Return how many rows of the table lead from one state to the other."""
    if before is job.state:
        return 0
    by_way_of = [s for s in JOB_TRANSITIONS[before] if s.may_be_placed and job.state in JOB_TRANSITIONS[s]]
    if job.state not in JOB_TRANSITIONS[before] and by_way_of:
        return 2
    check_job_transition(before, job.state)
    return 1


def _check_attempt_steps(plan: Plan, stored: StoredRows) -> None:
    explained = {(event.job, event.attempt) for event in plan.events}
    for attempt in plan.attempts.values():
        before, key = stored.attempts.get(attempt.id, (None, attempt.key))
        if key != attempt.key:
            raise InvariantBroken(f"attempt {key} cannot change its key to {attempt.key}")
        if before is None and attempt.id.job not in stored.jobs and attempt.id.job not in plan.jobs:
            raise InvariantBroken(f"attempt {attempt.key} has no job")
        if before is not None:
            check_attempt_transition(before, attempt.state)
        if before is not attempt.state and (attempt.id.job, attempt.id.number) not in explained:
            raise InvariantBroken(
                f"attempt {attempt.key} goes from {before or 'nothing'} to {attempt.state} without an event"
            )


def _check_counting(plan: Plan, stored: StoredRows) -> None:
    states = {i: state for i, (state, _) in stored.attempts.items()}
    states.update((i, attempt.state) for i, attempt in plan.attempts.items())
    counting = Counter(i.job for i, state in states.items() if state.counts)
    for job_id, count in counting.items():
        if count > 1:
            raise InvariantBroken(f"job {job_id} would have {count} attempts that count")
        planned = plan.jobs.get(job_id)
        state = stored.jobs[job_id] if planned is None else planned.state
        if state.is_final:
            raise InvariantBroken(f"job {job_id} is {state} but would keep an attempt that counts")


def _check_intent(intent: Intent, plan: Plan, stored: StoredRows) -> None:
    if intent.kind is not IntentKind.LAUNCH:
        return
    before = stored.intents.get(intent.id)
    if before in {IntentState.DONE, IntentState.FAILED} and intent.is_open:
        raise InvariantBroken(f"intent {intent.id} is settled as {before} and cannot be {intent.state} again")
    if before in {IntentState.SENT, IntentState.UNKNOWN} and intent.state is IntentState.OPEN:
        raise InvariantBroken(f"intent {intent.id} was {before}, and one that is open counts as never sent")
    if intent.attempt is None:
        raise InvariantBroken(f"intent {intent.id} launches a machine for no attempt")
    planned = plan.attempts.get(intent.attempt)
    found = stored.attempts.get(intent.attempt) if planned is None else (planned.state, planned.key)
    if found is None or found[1] != intent.key:
        raise InvariantBroken(f"intent {intent.id} launches a machine whose attempt is not stored")
    if before is None and intent.is_open and found[0] is not AttemptState.INTENDED:
        raise InvariantBroken(f"intent {intent.id} launches a machine for an attempt that is {found[0]} already")


def _check_charge(charge: Charge, plan: Plan, stored: StoredRows) -> None:
    who = f"{charge.attempt.job}-{charge.attempt.number}"
    if charge.attempt not in plan.attempts and charge.attempt not in stored.attempts:
        raise InvariantBroken(f"a charge for attempt {who}, which is not stored")
    next_day = day_start(charge.day + timedelta(days=1))
    if charge.start.astimezone(UTC).date() != charge.day or not charge.start <= charge.end <= next_day:
        raise InvariantBroken(
            f"a charge of attempt {who} from {charge.start} to {charge.end} is not within {charge.day}"
        )
    taken_back = charge.start == charge.end and not charge.on_demand
    if charge.amount < 0 and not taken_back:
        raise InvariantBroken(f"a charge of attempt {who} is negative")


# Charges as rows: append-only, and never two of one attempt at one instant.
#
# Theory. A charge is known by its attempt and the instant at which it begins. Where the wall clock is set back over an
# instant at which a charge began (midnight, above all), the next one begins there again. Both are owed, so the later
# row begins a microsecond after the instants that are taken; its day and its amount stay what they are.


_BEGUN: Final = select(CHARGES.c.job_id, CHARGES.c.attempt, CHARGES.c.start).where(
    CHARGES.c.start >= bindparam("earliest"), CHARGES.c.job_id.in_(IDS)
)


def append_charges(connection: Connection, charges: Sequence[Charge]) -> None:
    """Write the charges behind those that are stored."""
    if not charges:
        return
    fresh = [CHARGE.out(charge) for charge in charges]
    earliest = min(int(row["start"]) for row in fresh)
    taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for some in chunks({str(row["job_id"]) for row in fresh}):
        for job_id, attempt, start in connection.execute(_BEGUN, {"ids": some, "earliest": earliest}):
            taken[job_id, attempt].add(start)
    for row in fresh:
        _begin_apart(row, taken[str(row["job_id"]), int(row["attempt"])])
    connection.execute(insert(CHARGES), fresh)
    _add_up(connection, charges)


def _add_up(connection: Connection, charges: Sequence[Charge]) -> None:
    """Keep the sums that answers are made of, so that no answer reads the charges of years."""
    attempts: defaultdict[AttemptId, CostSums] = defaultdict(CostSums)
    days: defaultdict[tuple[date, ProviderName], CostSums] = defaultdict(CostSums)
    for charge in charges:
        sums = sums_of(charge)
        attempts[charge.attempt] += sums
        days[charge.day, charge.provider] += sums
    of_attempts = [{"job_id": i.job, "attempt": i.number, **COST_SUMS.out(sums)} for i, sums in attempts.items()]
    of_days = [{"day": day, "provider": name, **COST_SUMS.out(sums)} for (day, name), sums in days.items()]
    dialect = connection.dialect.name
    connection.execute(_adding(ATTEMPT_COSTS, dialect), of_attempts)
    connection.execute(_adding(DAY_COSTS, dialect), of_days)


def _inserting(table: Table, dialect: str) -> SqliteInsert:
    """Return an INSERT of the table that may state what to do with a row that is there; each dialect has its own."""
    if dialect != POSTGRES:
        return insert_into_sqlite(table)
    from sqlalchemy.dialects.postgresql import insert as insert_into_postgres

    return cast(SqliteInsert, insert_into_postgres(table))  # the same methods


@cache
def _adding(table: Table, dialect: str) -> Insert:
    statement = _inserting(table, dialect)
    added: dict[str, Any] = {c.name: c + statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)


def _begin_apart(row: Columns, taken: set[int]) -> None:
    start = int(row["start"])
    while start in taken:
        start += 1
    taken.add(start)
    row["start"], row["end"] = start, max(start, int(row["end"]))


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
    _upsert(connection, JOBS, [tables.job_out(job, memory.spec_text(job)) for job in plan.jobs.values()])
    at_point(StorePoint.JOBS)
    _seal(connection, plan.sealed)
    delete_secrets(connection, [j.id for j in plan.jobs.values() if j.state is JobState.SUCCEEDED and j.spec.secrets])
    # Those that stop to count come first, so that the unique index never sees two.
    attempts = sorted(plan.attempts.values(), key=lambda attempt: attempt.state.counts)
    _upsert(connection, ATTEMPTS, [tables.attempt_out(a, memory.quote_text(a.id, a.quote)) for a in attempts])
    at_point(StorePoint.ATTEMPTS)
    _write_checkpoints(connection, memory, plan.jobs.values())
    at_point(StorePoint.CHECKPOINTS)
    _upsert(connection, INTENTS, [INTENT.out(intent) for intent in plan.intents.values()])
    at_point(StorePoint.INTENTS)
    _upsert(connection, COOLDOWNS, [COOLDOWN.out(cooldown) for cooldown in _longest(plan.cooldowns)])
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
    sealed = {(row.job, row.attempt) for row in plan.sealed}
    jobs: dict[JobId, JobState] = {}
    attempts: dict[AttemptId, tuple[AttemptState, str]] = {}
    for some in chunks(touched):
        for job_id, state in connection.execute(_JOBS, {"ids": some}):
            jobs[job_id] = _state_of_job(state) if (job_id, None) in sealed else JobState(state)
        for job_id, number, state, key in connection.execute(_ATTEMPTS, {"ids": some}):
            # What is sealed is over whatever its row states, which may be a word that no version knows.
            is_over = (job_id, number) in sealed
            attempts[AttemptId(job=job_id, number=number)] = (
                AttemptState.ENDED if is_over else AttemptState(state),
                key,
            )
    intents = {
        # A word that no version knows is of a row that was passed over: its call is owed anew.
        intent: IntentState(state) if state in set(IntentState) else IntentState.OPEN
        for some in chunks(plan.intents)
        for intent, state in connection.execute(_INTENTS, {"ids": some})
    }
    return StoredRows(jobs=jobs, attempts=attempts, intents=intents)


def _state_of_job(stored: str) -> JobState:
    """Return the state of a job that is sealed; a word that no version knows is none that is final."""
    return JobState(stored) if stored in set(JobState) else JobState.RECOVERING


@cache
def _upsert_statement(table: Table, dialect: str) -> Insert:
    statement = _inserting(table, dialect)
    changed: dict[str, Any] = {c.name: statement.excluded[c.name] for c in table.c if not c.primary_key}
    where = None
    if table is COOLDOWNS:  # it may be prolonged, and cut short only where the same refusal had another cause
        same = statement.excluded.since == COOLDOWNS.c.since
        where = or_(statement.excluded.until >= COOLDOWNS.c.until, same)
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
        connection.execute(_upsert_statement(table, connection.dialect.name), values)


def _append(connection: Connection, table: Table, values: Sequence[Columns]) -> None:
    if values:
        connection.execute(insert(table), values)


def _append_events(connection: Connection, plan: Plan) -> int:
    if not plan.events:
        return 0
    first = int(connection.execute(_LAST_EVENT).scalar() or 0) + 1
    _append(connection, EVENTS, [tables.event_out(first + n, event) for n, event in enumerate(plan.events)])
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
    _upsert(connection, EXPERIENCE, [RECORD.out(one) for one in kept])
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
        added += [tables.checkpoint_out(job.id, n, oldest_first[n]) for n in range(kept, len(oldest_first))]
    for some in chunks(replaced):
        connection.execute(delete(CHECKPOINTS).where(CHECKPOINTS.c.job_id.in_(some)))
    _append(connection, CHECKPOINTS, added)


def _remembered(memory: RowCache, job: Job) -> bool:
    known = memory.jobs.get(job.id)
    return known is not None and known.checkpoints == job.checkpoints
