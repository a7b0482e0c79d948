"""Parts of the statements that read the state, and values of their rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    case,
    desc,
    func,
    literal,
    null,
    or_,
    select,
    text,
)

from spotd.core.calibration import BilledMachine
from spotd.core.domain.intents import CostSums, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import Event
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.pricing import egress_cost
from spotd.store import tables
from spotd.store.tables import (
    ATTEMPT_COSTS,
    ATTEMPTS,
    CHARGES,
    CHECKPOINTS,
    DAY_COSTS,
    EVENTS,
    GOES_ON,
    IDS,
    JOBS,
    ROW_ERRORS,
    kept,
)
from spotd.store.values import (
    ATTEMPT_VIEW,
    CHECKPOINT,
    COST_SUMS,
    EVENT,
    JOB,
    JOB_VIEW,
    Row,
)
from spotd.store.views import (
    AttemptView,
    CostGrouping,
    EventView,
    JobView,
)
from spotd.store.world import load_checkpoints
from spotd_providers.contract.values import MicroUsd

LAST_CHARACTER: Final = chr(sys.maxunicode)


OF_ATTEMPT: Final = tuple(c for c in ATTEMPTS.c if c.name not in {"quote", "stop"})


PLAIN_NUMBERS: Final = (
    "submitted_at",
    "lost",
    "spent",
    "on_demand",
    "attempts_made",
    "recoveries",
    "totals_ran",
    "totals_preemptions",
    "totals_uncompared",
    "totals_estimated",
)


JOBS_BY_ID: Final = select(JOBS).where(JOBS.c.id.in_(IDS))


OTHER: Final = CHECKPOINTS.alias()


NAMESAKE: Final = JOBS.alias()


COMPARED: Final = frozenset({"on_demand", "uncompared"})


def unless_failed(amount: ColumnElement[int], compared: ColumnElement[int]) -> ColumnElement[int]:
    """Return what is compared, but the amount itself for a job that failed: see `metering.compared_cost`."""
    return case((JOBS.c.state == JobState.FAILED.value, amount), else_=compared)


def sums_of(table: Table, *, with_jobs: bool = False) -> list[ColumnElement[Any]]:
    columns = {field.name: table.c[field.name] for field in dataclasses.fields(CostSums)}
    return [
        func.sum(unless_failed(table.c.amount, column) if with_jobs and name in COMPARED else column).label(name)
        for name, column in columns.items()
    ]


def by_attempts(
    key: ColumnElement[Any], name: ColumnElement[Any], joined: Table, on: ColumnElement[bool]
) -> Select[Any]:
    estimated = func.max(JOBS.c.totals_estimated) if joined is JOBS else func.sum(case((UNBILLED, 1), else_=0))
    columns = (key.label("group_key"), name.label("group_name"), func.count().label("attempts"))
    found = select(*columns, estimated.label("estimated"), *sums_of(ATTEMPT_COSTS, with_jobs=True))
    found = found.join_from(ATTEMPT_COSTS, joined, on)
    if joined is not JOBS:
        found = found.join(JOBS, JOBS.c.id == ATTEMPT_COSTS.c.job_id)
    return found.group_by(key)


UNBILLED: Final = and_(ATTEMPTS.c.billed.is_(None), ATTEMPT_COSTS.c.amount != 0)


def load_job(connection: Connection, job_id: JobId) -> Job | None:
    row = next(tables.fetch(connection, JOBS_BY_ID, {"ids": [job_id]}), None)
    if row is None:
        return None
    checkpoints = load_checkpoints(connection, [job_id]).get(job_id, ())
    return JOB.read(row, spec=tables.spec_in(row.spec), checkpoints=checkpoints)


def newest_named(name: str) -> ColumnElement[str]:
    """Return the id of the newest job of this name."""
    query = select(NAMESAKE.c.id).where(NAMESAKE.c.name == name)
    return query.order_by(desc(NAMESAKE.c.submitted_at), desc(NAMESAKE.c.id)).limit(1).scalar_subquery()


def begins_with(text: str) -> ColumnElement[bool]:
    """Return the condition of ids that begin with the text; its range is what the index is searched for."""
    return and_(JOBS.c.id.between(text, f"{text}{LAST_CHARACTER}"), func.substr(JOBS.c.id, 1, len(text)) == text)


def active_named(name: str) -> ColumnElement[bool]:
    # The name as an expression, so that the index of states is searched: few jobs go on, many may have had the name.
    return and_(JOBS.c.name.concat("") == name, GOES_ON)


def open_attempts(connection: Connection, picked: ColumnElement[bool]) -> Mapping[JobId, list[AttemptView]]:
    query = (
        select(*OF_ATTEMPT)
        .join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id)
        .where(picked, ATTEMPTS.c.state != AttemptState.ENDED.value)
        .order_by(ATTEMPTS.c.job_id, ATTEMPTS.c.number)
    )
    found: dict[JobId, list[AttemptView]] = {}
    for view in kept(ATTEMPT_VIEW.read, tables.fetch(connection, query)):
        found.setdefault(view.id.job, []).append(view)
    return found


def newest_checkpoints(connection: Connection, picked: ColumnElement[bool]) -> Mapping[JobId, Checkpoint]:
    # Driven from the jobs, so that it costs one search of the primary key for each however many checkpoints there are.
    newest = select(func.max(OTHER.c.ordinal)).where(OTHER.c.job_id == JOBS.c.id).scalar_subquery()
    query = (
        select(CHECKPOINTS)
        .select_from(JOBS)
        .join(CHECKPOINTS, and_(CHECKPOINTS.c.job_id == JOBS.c.id, CHECKPOINTS.c.ordinal == newest))
        .where(picked)
    )
    return dict(kept(lambda row: (row.job_id, CHECKPOINT.read(row)), tables.fetch(connection, query)))


def view_of_job(row: Row, attempts: tuple[AttemptView, ...], checkpoint: Checkpoint | None) -> JobView:
    """Return one line; of a row that cannot be understood, what of it can, since a list must show every job."""
    try:
        return JOB_VIEW.read(row, open=attempts, checkpoint=checkpoint)
    except ROW_ERRORS:
        known = {state.value for state in JobState}
        plain = row._replace(
            state=row.state if row.state in known else JobState.FAILED.value,
            **dict.fromkeys(PLAIN_NUMBERS, 0),
            totals_hosts="[]",
            moves="{}",
            **dict.fromkeys(("started_at", "ended_at", "exit_code", "outputs_attempt")),
        )
        return JOB_VIEW.read(plain, open=attempts, checkpoint=checkpoint)


def events_of(job_id: JobId | None, kinds: Sequence[str] = ()) -> Select[Any]:
    query = select(EVENTS)
    if kinds:
        families = [EVENTS.c.kind.startswith(f"{one}.", autoescape=True) for one in kinds if "." not in one]
        query = query.where(or_(EVENTS.c.kind.in_([one for one in kinds if "." in one]), *families))
    return query if job_id is None else query.where(EVENTS.c.job_id == job_id)


def billed_machine_of(row: Row) -> BilledMachine:
    sums = COST_SUMS.read(row)
    # No provider bills what the owner of the checkpoint store asks.
    read = egress_cost(tables.quote_in(row.quote), row.restored_bytes)
    return BilledMachine(
        provider=row.provider,
        bare=MicroUsd(sums.gpu + sums.disk),
        traffic=MicroUsd(max(0, sums.traffic - read)),
        booked=MicroUsd(sums.booked - read),
        billed=MicroUsd(row.bill),
    )


def view_of_event(row: Row) -> EventView:
    event: Event = EVENT.read(row)
    return EventView(seq=row.seq, event=event)


OF_COST: Final = and_(ATTEMPTS.c.job_id == ATTEMPT_COSTS.c.job_id, ATTEMPTS.c.number == ATTEMPT_COSTS.c.attempt)
_UNBILLED_DAYS: Final = (
    select(CHARGES.c.day)
    .join(ATTEMPTS, and_(ATTEMPTS.c.job_id == CHARGES.c.job_id, ATTEMPTS.c.number == CHARGES.c.attempt))
    .where(ATTEMPTS.c.billed.is_(None), CHARGES.c.amount != 0)
)
_UNKNOWN: Final = CHARGES.c.on_demand.is_(None)
_FAILED_DAYS: Final = (
    select(
        CHARGES.c.day,
        func.sum(case((_UNKNOWN, 0), else_=CHARGES.c.amount - CHARGES.c.on_demand)).label("on_demand"),
        func.sum(case((_UNKNOWN, 0), else_=CHARGES.c.amount)).label("uncompared"),
    )
    .join(JOBS, JOBS.c.id == CHARGES.c.job_id)
    .where(JOBS.c.state == JobState.FAILED.value)
    .group_by(CHARGES.c.day)
    .subquery()
)
"""What is to be added to the sums of a day, as `_OF_FAILED` to others."""
_NO_NAME: Final[ColumnElement[str]] = literal("")
_HOST: Final = ATTEMPTS.c.provider + "/" + func.coalesce(ATTEMPTS.c.host_id, ATTEMPTS.c.offer_id)
SERVER: Final = text(
    "SELECT s.system_identifier || '/' || d.oid || '/' || current_schema() "
    "FROM pg_control_system() s, pg_database d WHERE d.datname = current_database()"
)
SETTINGS: Final = text(
    "SELECT name, setting FROM pg_settings"
    " WHERE name IN ('server_version', 'fsync', 'full_page_writes', 'synchronous_standby_names')"
)
GROUPS: Final[Mapping[CostGrouping, Select[Any]]] = {
    CostGrouping.JOB: by_attempts(ATTEMPT_COSTS.c.job_id, JOBS.c.name, JOBS, JOBS.c.id == ATTEMPT_COSTS.c.job_id),
    CostGrouping.DAY: select(
        DAY_COSTS.c.day.label("group_key"),
        _NO_NAME.label("group_name"),
        null().label("attempts"),
        func.max(case((DAY_COSTS.c.day.in_(_UNBILLED_DAYS), 1), else_=0)).label("estimated"),
        *(
            (column + func.coalesce(func.max(_FAILED_DAYS.c[column.name]), 0)).label(column.name)
            if column.name in COMPARED
            else column
            for column in sums_of(DAY_COSTS)
        ),
    )
    .join_from(DAY_COSTS, _FAILED_DAYS, _FAILED_DAYS.c.day == DAY_COSTS.c.day, isouter=True)
    .group_by(DAY_COSTS.c.day),
    CostGrouping.PROVIDER: by_attempts(ATTEMPTS.c.provider, _NO_NAME, ATTEMPTS, OF_COST),
    CostGrouping.GPU: by_attempts(ATTEMPTS.c.gpu, _NO_NAME, ATTEMPTS, OF_COST),
    CostGrouping.HOST: by_attempts(_HOST, _NO_NAME, ATTEMPTS, OF_COST),
}
