"""Questions of the API, each a fixed number of statements however many rows answer it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, desc, func, or_, select, true

from spotd.core.attempts import Attempt
from spotd.core.charges import Charge
from spotd.core.checkpoints import OF_ANOTHER_JOB, Checkpoint
from spotd.core.ids import AttemptId, JobId
from spotd.core.intents import Intent, IntentState
from spotd.core.jobs import Job
from spotd.core.plan import Event
from spotd.core.quarantine import QUARANTINE_MARK
from spotd.core.states import AttemptState, JobState
from spotd.store import rows
from spotd.store.columns import duration_in, instant_in, instant_out, maybe_instant_in
from spotd.store.readable import ROW_ERRORS, kept
from spotd.store.tables import ATTEMPT_COSTS, ATTEMPTS, CHARGES, CHECKPOINTS, DAY_COSTS, EVENTS, INTENTS, JOBS
from spotd.store.views import (
    AmbiguousJob,
    AttemptCost,
    AttemptView,
    CostView,
    EventView,
    JobView,
    MachineView,
    Totals,
)
from spotd.store.world import chunks, load_checkpoints
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import AttemptKey, ProviderName

AMBIGUOUS_MAX: Final = 10
_LAST_CHARACTER: Final = chr(sys.maxunicode)
_ACTIVE: Final = sorted(s.value for s in JobState if not s.is_final)
_NOT_ENDED: Final = sorted(s.value for s in AttemptState if s is not AttemptState.ENDED)
_OPEN_INTENT: Final = sorted(s.value for s in IntentState if s not in {IntentState.DONE, IntentState.FAILED})
_IN_LIST: Final = tuple(c for c in JOBS.c if c.name not in {"spec", "code_sha256", "code_bytes"})
_OF_ATTEMPT: Final = tuple(c for c in ATTEMPTS.c if c.name not in {"quote", "stop"})
_OTHER: Final = CHECKPOINTS.alias()
_NAMESAKE: Final = JOBS.alias()
_NEWEST_FIRST: Final = (desc(JOBS.c.submitted_at), desc(JOBS.c.id))


def job(connection: Connection, job_id: JobId) -> Job | None:
    """Return the whole job, spec and checkpoints included."""
    row = connection.execute(select(JOBS).where(JOBS.c.id == job_id)).one_or_none()
    if row is None:
        return None
    return rows.job_in(row, rows.spec_in(row.spec), load_checkpoints(connection, [job_id]).get(job_id, ()))


def find_job(connection: Connection, text: str) -> JobView | AmbiguousJob | None:
    """Return the job that a user means: by id, else by name (the newest), else by the only id that begins so.

    A name goes before a prefix, because names are chosen and the beginning of an id is chance. Only the jobs that are
    answered are read: ten thousand runs of one job file have one name.
    """
    if not text:
        return None
    exact = list_jobs(connection, where=or_(JOBS.c.id == text, JOBS.c.id == _newest_named(text)))
    if exact:
        return next((view for view in exact if view.id == text), exact[0])
    begins = list_jobs(connection, where=_begins_with(text), limit=AMBIGUOUS_MAX)
    if len(begins) > 1:
        return AmbiguousJob(text=text, candidates=begins)
    return begins[0] if begins else None


def _newest_named(name: str) -> ColumnElement[str]:
    """Return the id of the newest job of this name."""
    query = select(_NAMESAKE.c.id).where(_NAMESAKE.c.name == name)
    return query.order_by(desc(_NAMESAKE.c.submitted_at), desc(_NAMESAKE.c.id)).limit(1).scalar_subquery()


def _begins_with(text: str) -> ColumnElement[bool]:
    """Return the condition of ids that begin with the text; its range is what the index is searched for."""
    return and_(JOBS.c.id.between(text, f"{text}{_LAST_CHARACTER}"), func.substr(JOBS.c.id, 1, len(text)) == text)


def quarantined() -> ColumnElement[bool]:
    """Return the condition of jobs that failed by a quarantine."""
    return and_(JOBS.c.state == JobState.FAILED.value, JOBS.c.reason.startswith(QUARANTINE_MARK, autoescape=True))


def active_or_all(*, active: bool) -> ColumnElement[bool]:
    """Return the condition of a list of jobs."""
    return JOBS.c.state.in_(_ACTIVE) if active else true()


def active_named(name: str) -> ColumnElement[bool]:
    """Return the condition of jobs of this name that are not final."""
    # The name as an expression, so that the index of states is searched: few jobs go on, many may have had the name.
    return and_(JOBS.c.name.concat("") == name, JOBS.c.state.in_(_ACTIVE))


def ended() -> ColumnElement[bool]:
    """Return the condition of final jobs."""
    return JOBS.c.state.not_in(_ACTIVE)


def with_id(job_id: JobId) -> ColumnElement[bool]:
    """Return the condition of one job."""
    return JOBS.c.id == job_id


def list_jobs(connection: Connection, *, where: ColumnElement[bool], limit: int | None = None) -> tuple[JobView, ...]:
    """Jobs, newest first."""
    listed = select(JOBS.c.id).where(where).order_by(*_NEWEST_FIRST).limit(limit)
    picked = where if limit is None else JOBS.c.id.in_(listed)
    attempts: dict[JobId, list[AttemptView]] = {}
    for view in _newest_and_open(connection, picked):
        attempts.setdefault(view.id.job, []).append(view)
    checkpoints = _newest_checkpoints(connection, picked)
    found = rows.fetch(connection, select(*_IN_LIST).where(where).order_by(*_NEWEST_FIRST).limit(limit))
    return tuple([_job_view(row, attempts.get(row.id, ()), checkpoints.get(row.id)) for row in found])


def _newest_and_open(connection: Connection, picked: ColumnElement[bool]) -> Iterable[AttemptView]:
    query = (
        select(*_OF_ATTEMPT)
        .join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id)
        .where(
            picked,
            or_(ATTEMPTS.c.number == JOBS.c.attempts_made, ATTEMPTS.c.state != AttemptState.ENDED.value),
        )
        .order_by(ATTEMPTS.c.job_id, ATTEMPTS.c.number)
    )
    return kept(_attempt_view, rows.fetch(connection, query))


def _newest_checkpoints(connection: Connection, picked: ColumnElement[bool]) -> Mapping[JobId, tuple[Checkpoint, int]]:
    # Driven from the jobs, so that it costs one search of the primary key for each however many checkpoints there are.
    newest = select(func.max(_OTHER.c.ordinal)).where(_OTHER.c.job_id == JOBS.c.id).scalar_subquery()
    query = (
        select(CHECKPOINTS)
        .select_from(JOBS)
        .join(CHECKPOINTS, and_(CHECKPOINTS.c.job_id == JOBS.c.id, CHECKPOINTS.c.ordinal == newest))
        .where(picked)
    )
    found = kept(lambda row: (row.job_id, rows.checkpoint_in(row), row.ordinal + 1), rows.fetch(connection, query))
    return {job_id: (checkpoint, count) for job_id, checkpoint, count in found}


def _attempt_view(row: rows.Row) -> AttemptView:
    return AttemptView(
        id=AttemptId(job=row.job_id, number=row.number),
        state=AttemptState(row.state),
        provider=row.provider,
        offer_id=row.offer_id,
        host_id=row.host_id,
        region=row.region,
        gpu=row.gpu,
        gpu_count=row.gpu_count,
        price=row.price_total,
        price_per_gpu=row.price_per_gpu,
        meter=rows.meter_in(row),
        on_demand_settled=row.on_demand_settled,
        phase=row.phase,
        intended_at=instant_in(row.intended_at),
        running_at=maybe_instant_in(row.running_at),
        ended_at=maybe_instant_in(row.ended_at),
    )


def _job_view(row: rows.Row, attempts: Sequence[AttemptView], checkpoint: tuple[Checkpoint, int] | None) -> JobView:
    """One line; of a row that cannot be understood, what of it can, since a list must show every job."""
    try:
        return _job_view_of(row, attempts, checkpoint)
    except ROW_ERRORS:
        known = {state.value for state in JobState}
        plain = row._replace(
            state=row.state if row.state in known else JobState.FAILED.value,
            **dict.fromkeys(("submitted_at", "state_since", "lost", "spent", "on_demand"), 0),
            **dict.fromkeys(("attempts_made", "errors", "recoveries"), 0),
            **dict.fromkeys(("started_at", "ended_at", "exit_code", "outputs_attempt")),
        )
        return _job_view_of(plain, attempts, checkpoint)


def _job_view_of(row: rows.Row, attempts: Sequence[AttemptView], checkpoint: tuple[Checkpoint, int] | None) -> JobView:
    return JobView(
        id=row.id,
        name=row.name,
        state=JobState(row.state),
        reason=row.reason,
        state_since=instant_in(row.state_since),
        submitted_at=instant_in(row.submitted_at),
        started_at=maybe_instant_in(row.started_at),
        ended_at=maybe_instant_in(row.ended_at),
        exit_code=row.exit_code,
        cancel_requested=row.cancel_requested,
        gpu_wanted=row.gpu_wanted,
        attempts_made=int(row.attempts_made),
        errors=row.errors,
        recoveries=row.recoveries,
        lost=duration_in(row.lost),
        settled=MicroUsd(int(row.spent)),
        on_demand_settled=MicroUsd(int(row.on_demand)),
        newest=attempts[-1] if attempts else None,
        open=tuple(a for a in attempts if a.state is not AttemptState.ENDED),
        checkpoint=None if checkpoint is None else checkpoint[0],
        checkpoint_count=0 if checkpoint is None else checkpoint[1],
        outputs=rows.outputs_in(row),
    )


def ended_ids(connection: Connection) -> tuple[JobId, ...]:
    """Return the ids of all final jobs, newest first."""
    query = select(JOBS.c.id).where(ended()).order_by(*_NEWEST_FIRST)
    return tuple(JobId(one) for one in connection.execute(query).scalars())


def names_of(connection: Connection, ids: Iterable[JobId]) -> Mapping[JobId, str]:
    """Return the names of these jobs, as far as there are such jobs."""
    found: dict[JobId, str] = {}
    for some in chunks(ids):
        query = select(JOBS.c.id, JOBS.c.name).where(JOBS.c.id.in_(some))
        found.update((JobId(one), name) for one, name in connection.execute(query))
    return found


def attempts_of(connection: Connection, job_id: JobId) -> tuple[Attempt, ...]:
    """Every attempt of a job that can be understood, ended ones too, oldest first."""
    query = select(ATTEMPTS).where(ATTEMPTS.c.job_id == job_id).order_by(ATTEMPTS.c.number)
    return tuple(kept(_attempt, rows.fetch(connection, query)))


def _attempt(row: rows.Row) -> Attempt:
    return rows.attempt_in(row, rows.quote_in(row.quote))


def attempt_by_key(connection: Connection, key: AttemptKey) -> Attempt | None:
    """Return the attempt whose machine carries this key."""
    row = connection.execute(select(ATTEMPTS).where(ATTEMPTS.c.key == key)).one_or_none()
    return None if row is None else rows.attempt_in(row, rows.quote_in(row.quote))


def open_machines(connection: Connection) -> tuple[MachineView, ...]:
    """Every machine that the state has to manage, or may have to, in order of its key."""
    attempts = select(ATTEMPTS.c.key, ATTEMPTS.c.provider, ATTEMPTS.c.ref_id).where(ATTEMPTS.c.state.in_(_NOT_ENDED))
    intents = select(INTENTS.c.key, INTENTS.c.provider, INTENTS.c.ref_id).where(INTENTS.c.state.in_(_OPEN_INTENT))
    found: dict[str, MachineView] = {}
    for query in (intents, attempts):
        for key, provider, ref in connection.execute(query):
            if key not in found or ref is not None:
                found[key] = MachineView(key=AttemptKey(key), provider=provider, instance=ref)
    return tuple(found[key] for key in sorted(found))


def intents_of(connection: Connection, job_id: JobId) -> tuple[Intent, ...]:
    """Every paid call for a job, settled ones too, oldest first."""
    query = select(INTENTS).where(INTENTS.c.attempt_job == job_id).order_by(INTENTS.c.created_at, INTENTS.c.id)
    return tuple(map(rows.intent_in, rows.fetch(connection, query)))


def checkpoints_of(connection: Connection, job_id: JobId) -> tuple[Checkpoint, ...]:
    """Return the accepted checkpoints of a job, newest first."""
    return load_checkpoints(connection, [job_id]).get(job_id, ())


def borrowed_checkpoints(connection: Connection) -> tuple[Checkpoint, ...]:
    """Checkpoints on the list of a job that another job wrote."""
    query = select(CHECKPOINTS).where(CHECKPOINTS.c.attempt == OF_ANOTHER_JOB)
    return tuple(map(rows.checkpoint_in, rows.fetch(connection, query)))


def counts_by_state(connection: Connection) -> Mapping[JobState, int]:
    """How many jobs are in each state; every state is there."""
    query = select(JOBS.c.state, func.count()).group_by(JOBS.c.state)
    found: dict[str, int] = dict(connection.execute(query).all())
    return {state: found.get(state.value, 0) for state in JobState}


def events(
    connection: Connection, *, since: int = 0, job_id: JobId | None = None, limit: int = 1000
) -> tuple[EventView, ...]:
    """Events with a number above `since`, in the order they happened, the first `limit` of them."""
    query = _events_of(job_id).where(EVENTS.c.seq > since).order_by(EVENTS.c.seq).limit(limit)
    return tuple(map(_event_view, rows.fetch(connection, query)))


def events_of_kind(connection: Connection, kind: str, *, job_id: JobId | None = None) -> tuple[EventView, ...]:
    """All events of a kind, of one job or of all, in the order they happened."""
    query = _events_of(job_id).where(EVENTS.c.kind == kind).order_by(EVENTS.c.seq)
    return tuple(map(_event_view, rows.fetch(connection, query)))


def newest_events(connection: Connection, *, job_id: JobId | None = None, limit: int = 100) -> tuple[EventView, ...]:
    """Return the last `limit` events, in the order they happened."""
    query = _events_of(job_id).order_by(desc(EVENTS.c.seq)).limit(limit)
    return tuple(map(_event_view, rows.fetch(connection, query)))[::-1]


def last_event(connection: Connection) -> int:
    """Return the number of the newest event, 0 before the first."""
    return int(connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0)


def _events_of(job_id: JobId | None) -> Select[Any]:
    query = select(EVENTS)
    return query if job_id is None else query.where(EVENTS.c.job_id == job_id)


def _event_view(row: rows.Row) -> EventView:
    event: Event = rows.event_in(row)
    return EventView(seq=row.seq, event=event)


def charges_of(connection: Connection, job_id: JobId) -> tuple[Charge, ...]:
    """Every booked span of a job, in order of attempt and time."""
    query = select(CHARGES).where(CHARGES.c.job_id == job_id).order_by(CHARGES.c.attempt, CHARGES.c.start)
    return tuple(map(rows.charge_in, rows.fetch(connection, query)))


def jobs_by_id(connection: Connection, ids: Sequence[JobId]) -> Mapping[JobId, Job]:
    """Whole jobs without their checkpoints, as far as they can be understood."""
    found = rows.fetch(connection, select(JOBS).where(JOBS.c.id.in_(ids)))
    return {job.id: job for job in kept(lambda row: rows.job_in(row, rows.spec_in(row.spec), ()), found)}


def readable_jobs(connection: Connection, ids: Sequence[JobId]) -> tuple[Job, ...]:
    """Whole jobs with their checkpoints, those left out that are not there or cannot be understood."""
    found: list[Job] = []
    for job_id in ids:
        with suppress(*ROW_ERRORS):
            one = job(connection, job_id)
            found += [] if one is None else [one]
    return tuple(found)


def attempts_of_jobs(connection: Connection, ids: Sequence[JobId]) -> Mapping[JobId, tuple[Attempt, ...]]:
    """Every attempt of these jobs that can be understood, oldest first."""
    query = select(ATTEMPTS).where(ATTEMPTS.c.job_id.in_(ids)).order_by(ATTEMPTS.c.job_id, ATTEMPTS.c.number)
    found: dict[JobId, list[Attempt]] = {}
    for attempt in kept(_attempt, rows.fetch(connection, query)):
        found.setdefault(attempt.id.job, []).append(attempt)
    return {job_id: tuple(some) for job_id, some in found.items()}


def attempt_costs(connection: Connection, ids: Sequence[JobId]) -> Mapping[AttemptId, AttemptCost]:
    """Return what is booked for each attempt of these jobs."""
    query = select(ATTEMPT_COSTS).where(ATTEMPT_COSTS.c.job_id.in_(ids))
    return {
        AttemptId(job=row.job_id, number=row.attempt): AttemptCost(
            amount=MicroUsd(row.amount),
            on_demand=MicroUsd(row.on_demand),
            billed=duration_in(row.billed),
            free=MicroUsd(row.free),
        )
        for row in rows.fetch(connection, query)
    }


def events_of_jobs(connection: Connection, kinds: Sequence[str], ids: Sequence[JobId]) -> tuple[EventView, ...]:
    """Events of these kinds and jobs, in the order they happened."""
    query = select(EVENTS).where(EVENTS.c.kind.in_(kinds), EVENTS.c.job_id.in_(ids)).order_by(EVENTS.c.seq)
    return tuple(map(_event_view, rows.fetch(connection, query)))


def totals(connection: Connection) -> Totals:
    """Return what all jobs together cost, as far as it is booked."""
    amount, on_demand = func.sum(DAY_COSTS.c.amount), func.sum(DAY_COSTS.c.on_demand)
    spent, compared = connection.execute(select(amount, on_demand)).one()
    count, recoveries, lost = connection.execute(
        select(func.count(), func.sum(JOBS.c.recoveries), func.sum(JOBS.c.lost))
    ).one()
    return Totals(
        jobs=int(count),
        spent=MicroUsd(int(spent or 0)),
        on_demand=MicroUsd(int(compared or 0)),
        recoveries=int(recoveries or 0),
        lost=duration_in(int(lost or 0)),
    )


def _costs(
    connection: Connection, table: Table, subject: ColumnElement[Any], since: date | None, until: date | None
) -> tuple[CostView, ...]:
    query = select(subject, func.sum(table.c.amount), func.sum(table.c.on_demand)).group_by(subject).order_by(subject)
    if since is not None:
        query = query.where(DAY_COSTS.c.day >= since)
    if until is not None:
        query = query.where(DAY_COSTS.c.day <= until)
    return tuple(
        CostView(subject=one, amount=MicroUsd(int(amount)), on_demand=MicroUsd(int(on_demand)))
        for one, amount, on_demand in connection.execute(query)
    )


def costs_by_job(connection: Connection) -> tuple[CostView, ...]:
    """Booked cost of each job."""
    return _costs(connection, ATTEMPT_COSTS, ATTEMPT_COSTS.c.job_id, None, None)


def costs_by_provider(
    connection: Connection, since: date | None = None, until: date | None = None
) -> tuple[CostView, ...]:
    """Booked cost at each provider on these UTC days, both included."""
    return _costs(connection, DAY_COSTS, DAY_COSTS.c.provider, since, until)


def costs_by_day(connection: Connection, since: date | None = None, until: date | None = None) -> tuple[CostView, ...]:
    """Booked cost of each of these UTC days, both included; a day without any is left out."""
    return _costs(connection, DAY_COSTS, DAY_COSTS.c.day, since, until)


def strays(connection: Connection) -> tuple[Intent, ...]:
    query = (
        select(INTENTS)
        .where(INTENTS.c.stray_since.is_not(None), INTENTS.c.attempt_job.is_(None))
        .order_by(INTENTS.c.created_at, INTENTS.c.id)
    )
    return tuple(map(rows.intent_in, rows.fetch(connection, query)))


def unchecked_bills(
    connection: Connection, provider: ProviderName, since: datetime, until: datetime, *, limit: int
) -> tuple[Attempt, ...]:
    """Return attempts that ended in this span, had a machine, and whose bill was not compared yet; the oldest first."""
    query = (
        select(ATTEMPTS)
        .where(
            ATTEMPTS.c.state == AttemptState.ENDED.value,
            ATTEMPTS.c.provider == provider,
            ATTEMPTS.c.bill_tries >= 0,
            ATTEMPTS.c.ref_id.is_not(None),
            ATTEMPTS.c.ended_at.between(instant_out(since), instant_out(until)),
        )
        .order_by(ATTEMPTS.c.ended_at)
        .limit(limit)
    )
    return tuple(kept(_attempt, rows.fetch(connection, query)))
