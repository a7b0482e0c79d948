"""The tables of the state database. Rows never leave `spotd.store`.

Theory. One row per job, attempt, intent; they are replaced as their values change. Events and charges are only ever
added. Money is integer micro-dollars, instants are integer microseconds since the epoch, enums are their text. JSON
holds only what is never queried. What is queried of a quote is repeated in columns of its attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import date
from enum import StrEnum
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Date,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    event,
    false,
    literal_column,
    text,
)
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from spotd.core.domain.intents import CostSums, IntentState
from spotd.core.domain.states import AttemptState, JobState

_NAMES: Final = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
COUNTING_WHERE: Final = "state IN ({})".format(", ".join(f"'{s}'" for s in AttemptState if s.counts))
"""The same set that `AttemptState.counts` names, as the database enforces it."""


class Base(SQLModel, registry=registry(metadata=MetaData(naming_convention=_NAMES))):
    """Keeps these tables apart from any other SQLModel tables of the process."""


METADATA: Final = Base.metadata


def _text(*args: Any, primary_key: bool = False, nullable: bool = False, index: bool = False) -> Any:
    return Field(sa_column=Column(Text, *args, primary_key=primary_key, nullable=nullable, index=index))


def _big(*, primary_key: bool = False, nullable: bool = False, index: bool = False) -> Any:
    return Field(
        sa_column=Column(BigInteger, primary_key=primary_key, nullable=nullable, index=index, autoincrement=False)
    )


def _zero() -> Any:
    return Field(sa_column=Column(BigInteger, nullable=False, server_default=text("0")))


class JobRow(Base, table=True):
    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_name_submitted_at", "name", "submitted_at"),)

    id: str = _text(primary_key=True)
    name: str = _text()
    spec: str = _text()
    gpu_wanted: str = _text()
    code_sha256: str | None = _text(nullable=True)
    code_bytes: int = _big()
    submitted_at: int = _big(index=True)
    state: str = _text(index=True)
    reason: str = _text()
    state_since: int = _big()
    attempts_made: int = _big()
    errors: int = _big()
    image_errors: int = _big()
    recoveries: int = _big()
    spent: int = _big()
    on_demand: int = _big()
    lost: int = _big()
    started_at: int | None = _big(nullable=True)
    ended_at: int | None = _big(nullable=True)
    exit_code: int | None = _big(nullable=True)
    cancel_requested: bool = Field(sa_column=Column(Boolean, nullable=False))
    outputs_attempt: int | None = _big(nullable=True)
    outputs_sha256: str | None = _text(nullable=True)
    outputs_bytes: int | None = _big(nullable=True)
    outputs_problem: str | None = _text(nullable=True)
    idle_launches: int = _zero()
    failed_starts: int = _zero()
    not_before: int | None = _big(nullable=True)
    budget_set: int | None = _big(nullable=True)
    rate_low: int | None = _big(nullable=True)
    disk_gb_seen: int = _zero()
    totals_ran: int = _zero()
    totals_hosts: str = Field(sa_column=Column(Text, nullable=False, server_default="[]"))
    """Names, in JSON."""
    totals_preemptions: int = _zero()
    totals_uncompared: int = _zero()
    totals_estimated: int = _zero()
    pacing_counted_from: int | None = _big(nullable=True)
    pacing_ran_before: int = _zero()
    pacing_up_since: int | None = _big(nullable=True)
    pacing_past_up: int = _zero()
    pacing_past_runs: int = _zero()
    pacing_losses: int = _zero()
    pacing_is_slipping: bool = Field(sa_column=Column(Boolean, nullable=False, server_default=false()))
    pacing_spot_wanted_since: int | None = _big(nullable=True)
    save_time: int | None = _big(nullable=True)
    paces: str = Field(sa_column=Column(Text, nullable=False, server_default="[]"))
    """What its attempts showed, in JSON."""
    stalls: int = _zero()
    chain: str | None = _text(nullable=True)
    """The jobs that come before it, in JSON."""
    array_id: str | None = _text(nullable=True, index=True)
    array_name: str | None = _text(nullable=True, index=True)
    array_index: int | None = _big(nullable=True)
    array_count: int | None = _big(nullable=True)
    array_at_once: int | None = _big(nullable=True)
    moves: str = Field(sa_column=Column(Text, nullable=False, server_default="{}"))
    submitted_by: str = Field(sa_column=Column(Text, nullable=False, server_default=""))


class AttemptRow(Base, table=True):
    __tablename__ = "attempts"
    __table_args__ = (
        # Another database's condition beside it would have its whole dialect imported: two megabytes.
        Index("ix_attempts_one_counting", "job_id", unique=True, sqlite_where=text(COUNTING_WHERE)),
        Index("ix_attempts_key", "key", unique=True),
    )

    job_id: str = _text(ForeignKey("jobs.id"), primary_key=True)
    number: int = _big(primary_key=True)
    key: str = _text()
    state: str = _text(index=True)
    quote: str = _text()
    provider: str = _text()
    offer_id: str = _text()
    host_id: str | None = _text(nullable=True)
    gpu: str = _text()
    gpu_count: int = _big()
    price_total: int = _big()
    on_demand_total: int | None = _big(nullable=True)
    ceiling: int = _big()
    price_max: int = _big()
    intended_at: int = _big()
    ref_provider: str | None = _text(nullable=True)
    ref_id: str | None = _text(nullable=True)
    ref_scope: str | None = _text(nullable=True)
    outcome_unknown: bool = Field(sa_column=Column(Boolean, nullable=False))
    launched_at: int | None = _big(nullable=True)
    running_at: int | None = _big(nullable=True)
    ended_at: int | None = _big(nullable=True)
    meter_settled: int = _big()
    meter_rate: int = _big()
    meter_on_demand_rate: int | None = _big(nullable=True)
    meter_since: int | None = _big(nullable=True)
    on_demand_settled: int = _big()
    ever_listed: bool = Field(sa_column=Column(Boolean, nullable=False))
    missing_since: int | None = _big(nullable=True)
    machine: str = _text()
    heartbeat_seq: int = _big()
    heartbeat_seen_at: int | None = _big(nullable=True)
    read_at: int | None = _big(nullable=True)
    phase: str = _text()
    resumed_from: str | None = _text(nullable=True)
    notice_at: int | None = _big(nullable=True)
    stop: str | None = _text(nullable=True)
    end_reason: str | None = _text(nullable=True)
    end_detail: str = _text()
    exit_code: int | None = _big(nullable=True)
    meter_until: int | None = _big(nullable=True)
    meter_traffic: int = _zero()
    listed_at: int | None = _big(nullable=True)
    over_ceiling_at: int | None = _big(nullable=True)
    start_deadline: int | None = _big(nullable=True)
    uploaded_bytes: int = _zero()
    restored_bytes: int = _zero()
    traffic_since: int | None = _big(nullable=True)
    traffic_spent: int = _zero()
    bill_tries: int = _zero()
    billed: int | None = _big(nullable=True)
    save_every: int | None = _big(nullable=True)
    account: str = Field(sa_column=Column(Text, nullable=False, server_default=""))
    watch: str | None = _text(nullable=True)
    freshness: str | None = _text(nullable=True)
    bidding: str = Field(sa_column=Column(Text, nullable=False, server_default="{}"))
    ceiling_set: int | None = _big(nullable=True)
    bill_read: int | None = _big(nullable=True)
    bill_note: str = Field(sa_column=Column(Text, nullable=False, server_default=""))
    proven_at: int | None = _big(nullable=True)
    over_since: int | None = _big(nullable=True)
    notices_lapsed: int = _zero()
    notice_lapsed_at: int | None = _big(nullable=True)
    full_since: int | None = _big(nullable=True)


class CheckpointRow(Base, table=True):
    """An accepted checkpoint; `ordinal` grows with acceptance, so the newest is the largest."""

    __tablename__ = "checkpoints"

    job_id: str = _text(ForeignKey("jobs.id"), primary_key=True)
    ordinal: int = _big(primary_key=True)
    name: str = _text()
    attempt: int = _big()
    step: int | None = _big(nullable=True)
    bytes: int = _big()
    at: int = _big()
    manifest_key: str = _text()
    sha256: str = _text()
    metric: float | None = Field(sa_column=Column(Float, nullable=True))
    pinned: bool = Field(sa_column=Column(Boolean, nullable=False, server_default=false()))
    host: str = Field(sa_column=Column(Text, nullable=False, server_default=""))
    proven_by: int | None = _big(nullable=True)
    doubted_by: str = Field(sa_column=Column(Text, nullable=False, server_default="[]"))
    """Numbers of attempts, in JSON."""
    worked: int | None = _big(nullable=True)


class IntentRow(Base, table=True):
    """A paid call. It has no foreign key: a foreign machine under our label is ended although no attempt is known."""

    __tablename__ = "intents"

    id: str = _text(primary_key=True)
    kind: str = _text()
    provider: str = _text()
    key: str = _text()
    state: str = _text(index=True)
    created_at: int = _big()
    attempt_job: str | None = _text(nullable=True)
    attempt_number: int | None = _big(nullable=True)
    ref_provider: str | None = _text(nullable=True)
    ref_id: str | None = _text(nullable=True)
    ref_scope: str | None = _text(nullable=True)
    tries: int = _big()
    not_before: int | None = _big(nullable=True)
    accepted_at: int | None = _big(nullable=True)
    error: str = _text()
    account: str = Field(sa_column=Column(Text, nullable=False, server_default=""))
    stray_rate: int = _zero()
    stray_since: int | None = _big(nullable=True)


class CooldownRow(Base, table=True):
    __tablename__ = "cooldowns"

    provider: str = _text(primary_key=True)
    scope: str = _text(primary_key=True)
    subject: str = _text(primary_key=True)
    until: int = _big(index=True)
    reason: str = _text()
    since: int | None = _big(nullable=True)
    strikes: int = _zero()
    ends: str = Field(sa_column=Column(Text, nullable=False, server_default="time"))


class ExperienceRow(Base, table=True):
    """A record of what was seen of a provider, pool, host or image."""

    __tablename__ = "experience"

    kind: str = _text(primary_key=True)
    provider: str = _text(primary_key=True)
    subject: str = _text(primary_key=True)
    count: int = _big()
    span: int = _big()
    at: int = _big(index=True)


class ChargeRecord(Base, table=True):
    """Append-only; `charges.append_charges` keeps two of one attempt from beginning at one instant."""

    __tablename__ = "charges"
    __table_args__ = (ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),)

    job_id: str = _text(primary_key=True)
    attempt: int = _big(primary_key=True)
    start: int = _big(primary_key=True)
    end: int = _big()
    provider: str = _text()
    day: date = Field(sa_column=Column(Date, nullable=False, index=True))
    amount: int = _big()
    on_demand: int | None = _big(nullable=True)
    part: str = _text()
    fee: int = _big()


class EventRow(Base, table=True):
    """Append-only, numbered without gaps by the one writer. No foreign key: it may be about what is not ours."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_job_id_seq", "job_id", "seq"),
        Index("ix_events_kind_job_id", "kind", "job_id"),
    )

    seq: int = Field(
        sa_column=Column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False)
    )
    at: int = _big()
    kind: str = _text()
    message: str = _text()
    job_id: str | None = _text(nullable=True)
    attempt: int | None = _big(nullable=True)
    data: str = _text()


class NotificationRow(Base, table=True):
    """A notification in the queue of a channel. No foreign key: it may be about what is not ours."""

    __tablename__ = "notifications"

    id: int = _big(primary_key=True)
    channel: str = _text(index=True)
    key: str = _text()
    topic: str = _text()
    severity: str = _text()
    at: int = _big()
    title: str = _text()
    text: str = _text()
    job_id: str | None = _text(nullable=True)
    repeat_after: int = _big()
    sent_at: int | None = _big(nullable=True)


class MetaRow(Base, table=True):
    """Facts about this state itself."""

    __tablename__ = "meta"

    key: str = _text(primary_key=True)
    value: str = _text()


def _table(row: type[Base]) -> Table:
    return METADATA.tables[str(row.__tablename__)]


def _costs(name: str, *keys: Column[Any]) -> Table:
    """Return the table of what charges add up to under these keys, kept as they are booked."""
    sums = (Column(each.name, BigInteger, nullable=False) for each in fields(CostSums))
    return Table(name, METADATA, *keys, *sums)


JOBS: Final = _table(JobRow)
ATTEMPTS: Final = _table(AttemptRow)
CHECKPOINTS: Final = _table(CheckpointRow)
INTENTS: Final = _table(IntentRow)
COOLDOWNS: Final = _table(CooldownRow)
EXPERIENCE: Final = _table(ExperienceRow)
CHARGES: Final = _table(ChargeRecord)
ATTEMPT_COSTS: Final = _costs(
    "attempt_costs", Column("job_id", Text, primary_key=True), Column("attempt", BigInteger, primary_key=True)
)
DAY_COSTS: Final = _costs(
    "day_costs", Column("day", Date, primary_key=True), Column("provider", Text, primary_key=True)
)
EVENTS: Final = _table(EventRow)
META: Final = _table(MetaRow)
NOTIFICATIONS: Final = _table(NotificationRow)


FOLDING_KEY: Final = "folding"
"""While this fact is in `meta`, which is within one transaction of `folding.fold`, events may be deleted."""


def _append_only(table: Table, connection: Connection, **_: object) -> None:
    """Forbid to change or delete rows of the table, but for events that are folded."""
    for verb in ("UPDATE", "DELETE"):
        folded = table is EVENTS and verb == "DELETE"
        unless = "WHEN NOT EXISTS (SELECT 1 FROM meta WHERE key = 'folding') " if folded else ""
        trigger = (
            f"CREATE TRIGGER {table.name}_no_{verb.lower()} BEFORE {verb} ON {table.name} {unless}"
            f"BEGIN SELECT RAISE(ABORT, '{table.name} are append-only'); END"
        )
        connection.execute(text(trigger))


for _kept in (EVENTS, CHARGES):
    event.listen(_kept, "after_create", _append_only)


# Conditions of statements, built once: to build a statement costs more than to run it.


T = TypeVar("T")
PARAMETERS_MAX: Final = 10_000
"""Values in one IN list; SQLite's limit is 32,766."""
IDS: Final[BindParameter[Any]] = bindparam("ids", expanding=True)
"""The list that a statement is run with: `column.in_(IDS)`, then `{"ids": some}`."""


def chunks(values: Iterable[T]) -> Iterator[Sequence[T]]:
    """Yield the values in pieces that fit into one statement."""
    every = list(values)
    for start in range(0, len(every), PARAMETERS_MAX):
        yield every[start : start + PARAMETERS_MAX]


def _one_of(column: Column[Any], words: Iterable[StrEnum]) -> ColumnElement[bool]:
    # In the text of the statement: parameters of a list are put together anew each time that it runs.
    return column.in_([literal_column(f"'{word.value}'") for word in sorted(words)])


ACTIVE: Final = _one_of(JOBS.c.state, (state for state in JobState if not state.is_final))
FINAL: Final = _one_of(JOBS.c.state, (state for state in JobState if state.is_final))
NOT_ENDED: Final = _one_of(ATTEMPTS.c.state, (state for state in AttemptState if state is not AttemptState.ENDED))
OPEN: Final = _one_of(INTENTS.c.state, (s for s in IntentState if s not in {IntentState.DONE, IntentState.FAILED}))
