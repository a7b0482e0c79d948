"""What tests ask of a state and no part of spotd does."""

from __future__ import annotations

from datetime import date
from typing import Any

from sqlalchemy import ColumnElement, Table, func, select

from spotd.core.domain.intents import Intent, JobId
from spotd.core.domain.jobs import Checkpoint
from spotd.store import EventView, Reads, tables
from spotd.store.selects import view_of_event
from spotd.store.tables import ATTEMPT_COSTS, DAY_COSTS, EVENTS, INTENTS
from spotd.store.values import INTENT
from spotd.store.world import load_checkpoints

Sums = list[tuple[Any, int, int]]
"""Of what, spent, and what on-demand would have cost."""


def intents_of(reads: Reads, job_id: JobId) -> tuple[Intent, ...]:
    """Every paid call for a job, settled ones too, oldest first."""
    query = select(INTENTS).where(INTENTS.c.attempt_job == job_id).order_by(INTENTS.c.created_at, INTENTS.c.id)
    return tuple(map(INTENT.read, tables.fetch(reads._connection, query)))


def checkpoints_of(reads: Reads, job_id: JobId) -> tuple[Checkpoint, ...]:
    """The accepted checkpoints of a job, newest first."""
    return load_checkpoints(reads._connection, [job_id]).get(job_id, ())


def events_of_kind(reads: Reads, kind: str) -> tuple[EventView, ...]:
    """All events of a kind, in the order they happened."""
    query = select(EVENTS).where(EVENTS.c.kind == kind).order_by(EVENTS.c.seq)
    return tuple(map(view_of_event, tables.fetch(reads._connection, query)))


def _sums(reads: Reads, table: Table, subject: ColumnElement[Any], *where: ColumnElement[bool]) -> Sums:
    sums = select(subject, func.sum(table.c.amount), func.sum(table.c.on_demand)).where(*where)
    found = reads._connection.execute(sums.group_by(subject).order_by(subject))
    return [(one, int(amount), int(on_demand)) for one, amount, on_demand in found]


def costs_by_job(reads: Reads) -> Sums:
    return _sums(reads, ATTEMPT_COSTS, ATTEMPT_COSTS.c.job_id)


def costs_by_provider(reads: Reads, *, until: date = date.max) -> Sums:
    return _sums(reads, DAY_COSTS, DAY_COSTS.c.provider, DAY_COSTS.c.day <= until)


def costs_by_day(reads: Reads, *, since: date = date.min, until: date = date.max) -> Sums:
    return _sums(reads, DAY_COSTS, DAY_COSTS.c.day, DAY_COSTS.c.day >= since, DAY_COSTS.c.day <= until)
