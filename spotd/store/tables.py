"""The tables of the state database. Rows never leave `spotd.store`.

Theory. One row per job, attempt, intent; they are replaced as their values change. Events and charges are only ever
added. A table is the columns of its value (`spotd.store.values`), and those that are queried of what the value holds
as JSON. Money is integer micro-dollars, instants are integer microseconds since the epoch, enums are their text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType, new_class
from typing import Any, Final, TypeVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Date,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    event,
    literal_column,
    or_,
    text,
)
from sqlalchemy.orm import registry
from sqlalchemy.schema import SchemaItem
from sqlmodel import Field, SQLModel

from spotd.core.domain.intents import IntentState
from spotd.core.domain.states import AttemptState, JobState
from spotd.store.values import (
    ATTEMPT,
    CHARGE,
    CHECKPOINT,
    COOLDOWN,
    COST_SUMS,
    EVENT,
    INTENT,
    JOB,
    QUEUED,
    RECORD,
    ColumnSpec,
)

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


def _table(
    name: str,
    columns: Iterable[ColumnSpec],
    *constraints: SchemaItem,
    key: Sequence[str],
    indexed: Collection[str] = (),
    refers: Mapping[str, str] = MappingProxyType({}),
) -> Table:
    """Make a table.

    Args:
        key: columns of the primary key, in its order.
        indexed: columns with an index of their own.
        refers: columns that refer to a column of another table.
    """
    by_name = {spec.name: spec for spec in columns}
    ordered = [*(by_name.pop(part) for part in key), *by_name.values()]

    def body(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__tablename__": name, "__table_args__": constraints}
        namespace["__annotations__"] = {spec.name: Any for spec in ordered}
        for spec in ordered:
            column = Column(
                spec.type,
                *(ForeignKey(refers[part]) for part in [spec.name] if part in refers),
                primary_key=spec.name in key,
                nullable=spec.nullable,
                index=spec.name in indexed,
                autoincrement=False,
            )
            namespace[spec.name] = Field(sa_column=column)

    new_class(f"{name}_row", (Base,), {"table": True}, body)
    return METADATA.tables[name]


def _queried(nullable: Collection[str] = (), **columns: Any) -> Iterator[ColumnSpec]:
    """Columns beside those of the value: parts of it that are queried, or what it holds as one text."""
    for name, type_ in columns.items():
        yield ColumnSpec(name, type_, nullable=name in nullable)


JOBS: Final = _table(
    "jobs",
    [*JOB.columns, *_queried(spec=Text, gpu_wanted=Text)],
    Index("ix_jobs_name_submitted_at", "name", "submitted_at"),
    key=["id"],
    indexed=["submitted_at", "state", "array_id", "array_name"],
)
ATTEMPTS: Final = _table(
    "attempts",
    [
        *ATTEMPT.columns,
        *_queried(quote=Text, provider=Text, offer_id=Text, gpu=Text, gpu_count=BigInteger, price_total=BigInteger),
        *_queried(["host_id", "on_demand_total"], host_id=Text, on_demand_total=BigInteger),
    ],
    # Another database's condition beside it would have its whole dialect imported: two megabytes.
    Index("ix_attempts_one_counting", "job_id", unique=True, sqlite_where=text(COUNTING_WHERE)),
    Index("ix_attempts_key", "key", unique=True),
    key=["job_id", "number"],
    indexed=["state"],
    refers={"job_id": "jobs.id"},
)
CHECKPOINTS: Final = _table(
    "checkpoints",
    [*_queried(job_id=Text, ordinal=BigInteger), *CHECKPOINT.columns],
    key=["job_id", "ordinal"],
    refers={"job_id": "jobs.id"},
)
"""Accepted checkpoints; `ordinal` grows with acceptance, so the newest is the largest."""
INTENTS: Final = _table("intents", INTENT.columns, key=["id"], indexed=["state"])
"""Paid calls. No foreign key: a foreign machine under our label is ended although no attempt is known."""
COOLDOWNS: Final = _table("cooldowns", COOLDOWN.columns, key=["provider", "scope", "subject"], indexed=["until"])
EXPERIENCE: Final = _table("experience", RECORD.columns, key=["kind", "provider", "subject"], indexed=["at"])
"""What was seen of providers, pools, hosts and images."""
CHARGES: Final = _table(
    "charges",
    CHARGE.columns,
    ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"]),
    key=["job_id", "attempt", "start"],
    indexed=["day"],
)
"""Append-only; `commit.append_charges` keeps two of one attempt from beginning at one instant."""
ATTEMPT_COSTS: Final = _table(
    "attempt_costs", [*_queried(job_id=Text, attempt=BigInteger), *COST_SUMS.columns], key=["job_id", "attempt"]
)
"""What charges add up to, kept as they are booked."""
DAY_COSTS: Final = _table(
    "day_costs",
    [*_queried(day=Date, provider=Text), *COST_SUMS.columns],
    key=["day", "provider"],
)
EVENTS: Final = _table(
    "events",
    # In SQLite a whole number that is the primary key alone is the number of the row.
    [*_queried(seq=BigInteger().with_variant(Integer, "sqlite")), *EVENT.columns],
    Index("ix_events_job_id_seq", "job_id", "seq"),
    Index("ix_events_kind_job_id", "kind", "job_id"),
    key=["seq"],
)
"""Append-only, numbered without gaps by the one writer. No foreign key: it may be about what is not ours."""
META: Final = _table("meta", _queried(key=Text, value=Text), key=["key"])
"""Facts about this state itself."""
NOTIFICATIONS: Final = _table(
    "notifications",
    [*QUEUED.columns, *_queried(["sent_at"], sent_at=BigInteger)],
    key=["id"],
    indexed=["channel"],
)
"""Notifications in the queues of their channels. No foreign key: they may be about what is not ours."""


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


def _none_of(column: Column[Any], words: Iterable[StrEnum]) -> ColumnElement[bool]:
    """Whatever is none of the words, a word of no version included: as ranges, which the column's index serves."""
    name, bounds = f"{column.table.name}.{column.name}", [f"'{word.value}'" for word in sorted(words)]
    between = (f"{name} > {low} AND {name} < {high}" for low, high in pairwise(bounds))
    # Each range as one text: some statements are built anew for an answer, and each element of them costs.
    ranges = (f"{name} < {bounds[0]}", *between, f"{name} > {bounds[-1]}")
    return or_(*(text(one) for one in ranges))


ACTIVE: Final = _none_of(JOBS.c.state, (state for state in JobState if state.is_final))
GOES_ON: Final = _one_of(JOBS.c.state, (state for state in JobState if not state.is_final))
FINAL: Final = _one_of(JOBS.c.state, (state for state in JobState if state.is_final))
NOT_ENDED: Final = _none_of(ATTEMPTS.c.state, (AttemptState.ENDED,))
OPEN: Final = _none_of(INTENTS.c.state, (IntentState.DONE, IntentState.FAILED))
"""What is open, active or not ended is what is in none of the states in which nothing is owed any more."""
