"""The tables of the state database, and core values as their rows. Rows never leave `spotd.store`.

Theory. One row per job, attempt, intent; they are replaced as their values change. Events and charges are only ever
added. A table is the columns of its value (`spotd.store.values`), and those that are queried of what the value holds
as JSON. Money is integer micro-dollars, instants are integer microseconds since the epoch, enums are their text.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import pairwise
from types import MappingProxyType, new_class
from typing import Any, Final

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
    Select,
    Table,
    Text,
    bindparam,
    event,
    literal_column,
    or_,
    select,
    text,
)
from sqlalchemy.orm import registry
from sqlalchemy.schema import SchemaItem
from sqlmodel import Field, SQLModel

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, IntentState, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import Quote
from spotd.core.domain.plan import Event
from spotd.core.domain.states import AttemptState, InvariantBroken, JobState
from spotd.core.domain.world import Experience, UnreadableRow
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
    Columns,
    ColumnSpec,
    Row,
    T,
    compact,
    from_json,
    to_json,
)
from spotd.store.views import JobView
from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec, Resources
from spotd_providers.contract.values import NO_GPU, InstanceId, InstanceRef, ProviderName

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
FENCE: Final = "UPDATE leader SET commits"
"""Begins the first statement of each transaction in PostgreSQL. It changes no row of the state."""


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
    indexed=["state", "machine_key"],
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
JOB_SECRETS: Final = _table(
    "job_secrets", _queried(job_id=Text, key_id=Text, data=Text), key=["job_id"], refers={"job_id": "jobs.id"}
)
"""The values of jobs' secrets, encrypted; only in a state that several computers share."""
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
        when = "NOT EXISTS (SELECT 1 FROM meta WHERE key = 'folding')" if folded else ""
        name, words = f"{table.name}_no_{verb.lower()}", f"{table.name} are append-only"
        begin = f"CREATE TRIGGER {name} BEFORE {verb} ON {table.name} "
        if connection.dialect.name == "postgresql":
            body = f"RAISE EXCEPTION '{words}' USING ERRCODE = 'check_violation';"
            within = f"IF {when} THEN {body} END IF; RETURN OLD;" if when else body
            connection.execute(
                text(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {within} END$$")
            )
            connection.execute(text(f"{begin}FOR EACH ROW EXECUTE FUNCTION {name}()"))
            continue
        unless = f"WHEN {when} " if when else ""
        connection.execute(text(f"{begin}{unless}BEGIN SELECT RAISE(ABORT, '{words}'); END"))


for _kept in (EVENTS, CHARGES):
    event.listen(_kept, "after_create", _append_only)


# Conditions of statements, built once: to build a statement costs more than to run it.


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


@cache
def _shape(names: tuple[str, ...]) -> Any:
    shape: Any = namedtuple("Row", names)  # type: ignore[misc]  # the names are known only at run time
    return shape._make


def fetch(connection: Connection, query: Select[Any], values: Mapping[str, object] | None = None) -> Iterator[Row]:
    """Return the rows of a select, as named tuples: an attribute of SQLAlchemy's own rows costs ten times as much."""
    result = connection.execute(query, values)
    return map(_shape(tuple(result.keys())), result)


def spec_out(spec: JobSpec) -> str:
    return compact(spec_to_json(spec))


@lru_cache(maxsize=64)
def spec_in(text: str) -> JobSpec:
    """Return the value of a stored spec; the jobs of an array share one."""
    return spec_from_json(json.loads(text))


def quote_in(text: str) -> Quote:
    return from_json(Quote, text)


def gpu_wanted(resources: Resources) -> str:
    """Return what the user asked for, short enough for a column of a table."""
    if resources.nodes > 1:
        return f"{resources.nodes_words} x {gpu_wanted(replace(resources, nodes=1, nodes_max=None))}"
    if resources.gpu:
        return ", ".join(f"{gpu.name}:{gpu.count}" for gpu in resources.gpu)
    if resources.min_vram_mb is not None:
        return f">={-(-resources.min_vram_mb // 1000)}GB:{resources.gpu_count}"
    return f"any:{resources.gpu_count}" if resources.gpu_count else f"{NO_GPU}:0"


def job_out(job: Job, spec_text: str) -> Columns:
    return {**JOB.out(job), "spec": spec_text, "gpu_wanted": gpu_wanted(job.spec.resources)}


def checkpoint_out(job: JobId, ordinal: int, checkpoint: Checkpoint) -> Columns:
    return {"job_id": job, "ordinal": ordinal, **CHECKPOINT.out(checkpoint)}


def attempt_out(attempt: Attempt, quote_text: str) -> Columns:
    """Raise InvariantBroken for a machine at another provider than the one that was agreed."""
    offer = attempt.quote.offer
    if attempt.ref is not None and attempt.ref.provider != offer.provider:
        raise InvariantBroken(
            f"attempt {attempt.key} was bought at {offer.provider} but its machine is {attempt.ref.provider}'s"
        )
    return {
        **ATTEMPT.out(attempt),
        "quote": quote_text,
        "provider": offer.provider,
        "offer_id": offer.offer_id,
        "host_id": offer.host_id,
        "gpu": offer.gpu,
        "gpu_count": offer.gpu_count,
        "price_total": attempt.quote.price.total,
        "on_demand_total": attempt.quote.on_demand,
    }


def attempt_in(row: Row) -> Attempt:
    """Return the attempt in a row, its quote read anew."""
    return ATTEMPT.read(row, quote=quote_in(row.quote))


def ref_in(row: Row) -> InstanceRef | None:
    """Return the machine in a row of an attempt that cannot be understood, by its columns alone."""
    if not isinstance(row.ref_id, str) or not isinstance(row.provider, str):
        return None
    return InstanceRef(
        provider=ProviderName(row.provider), instance_id=InstanceId(row.ref_id), scope=str(row.ref_scope or "")
    )


def event_out(seq: int, event: Event) -> Columns:
    return {"seq": seq, **EVENT.out(event)}


# What the one writer remembers of rows it has read, so that an unchanged row is not read again.
#
# Only what `world` showed last is remembered. A job is forgotten when it is written, and everything is forgotten
# after a rollback: what a transaction showed that never happened must not vouch for anything.


_LISTS_MAX: Final = 4


@dataclass(slots=True)
class RowCache:
    """Values by id; specs, quotes and attempts with what they were read from; lists of jobs by what was asked."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    specs: dict[JobId, tuple[str, JobSpec]] = field(default_factory=dict)
    quotes: dict[AttemptId, tuple[str, Quote]] = field(default_factory=dict)
    attempts: dict[AttemptId, tuple[Row, Attempt]] = field(default_factory=dict)
    lists: dict[Hashable, tuple[JobView, ...]] = field(default_factory=dict)
    experience: Experience | None = None

    def forget(self) -> None:
        self.jobs.clear()
        self.specs.clear()
        self.quotes.clear()
        self.attempts.clear()
        self.lists.clear()
        self.experience = None

    def listed(self, asked: Hashable, read: Callable[[], tuple[JobView, ...]]) -> tuple[JobView, ...]:
        """Return the same lines until anything is written: a person's screen asks more often than a job changes."""
        found = self.lists.get(asked)
        if found is None:
            found = read()
            if len(self.lists) >= _LISTS_MAX:
                self.lists.clear()
            self.lists[asked] = found
        return found

    def spec(self, job: JobId, text: str) -> JobSpec:
        """Return the value of a stored spec."""
        known = self.specs.get(job)
        if known is None or known[0] != text:
            known = self.specs[job] = (text, spec_in(text))
        return known[1]

    def spec_text(self, job: Job) -> str:
        """Return the text of a spec that is to be stored."""
        known = self.specs.get(job.id)
        if known is not None and known[1] is job.spec:
            return known[0]
        return spec_out(job.spec)

    def attempt(self, attempt: AttemptId, row: Row) -> Attempt:
        """Return the attempt in a row: to compare two rows costs a tenth of reading one."""
        known = self.attempts.get(attempt)
        if known is None or known[0] != row:
            known = self.attempts[attempt] = (row, ATTEMPT.read(row, quote=self.quote(attempt, row.quote)))
        return known[1]

    def quote(self, attempt: AttemptId, text: str) -> Quote:
        """Return the value of a stored quote."""
        known = self.quotes.get(attempt)
        if known is None or known[0] != text:
            known = self.quotes[attempt] = (text, quote_in(text))
        return known[1]

    def quote_text(self, attempt: AttemptId, quote: Quote) -> str:
        """Return the text of a quote that is to be stored."""
        known = self.quotes.get(attempt)
        if known is not None and known[1] is quote:
            return known[0]
        return to_json(quote)

    def keep_only(self, jobs: set[JobId], attempts: set[AttemptId]) -> None:
        """Forget everything else, so that the memory is as small as the world."""
        if len(self.jobs) > len(jobs) or len(self.specs) > len(jobs):
            self.jobs = {i: v for i, v in self.jobs.items() if i in jobs}
            self.specs = {i: v for i, v in self.specs.items() if i in jobs}
        if len(self.quotes) > len(attempts):
            self.quotes = {i: v for i, v in self.quotes.items() if i in attempts}
        if len(self.attempts) > len(attempts):
            self.attempts = {i: v for i, v in self.attempts.items() if i in attempts}


# Rows that hold a value of which nothing can be made: each is set aside alone, and every other one is read.
#
# A damaged file, another program or a newer version writes such rows. No answer and no decision may fail for one of
# them.


ROW_ERRORS: Final = (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError, InvariantBroken)
WORDS_MAX: Final = 300


def error_words(error: Exception) -> str:
    """Return what is wrong with a row, short enough to be shown."""
    return f"{type(error).__name__}: {error}"[:WORDS_MAX]


def kept(read: Callable[[Row], T], found: Iterable[Row]) -> Iterator[T]:
    """Return what is made of those rows that can be understood."""
    for row in found:
        with suppress(*ROW_ERRORS):
            yield read(row)


def set_aside(connection: Connection, job_id: JobId) -> tuple[UnreadableRow, ...]:
    """Return which rows of this job cannot be understood: its own or its checkpoints', then its attempts'."""
    found: list[UnreadableRow] = []

    def attempted(read: Callable[[], object], attempt: int | None) -> None:
        try:
            read()
        except ROW_ERRORS as exc:
            found.append(UnreadableRow(job=job_id, attempt=attempt, error=error_words(exc)))

    for row in fetch(connection, select(JOBS).where(JOBS.c.id == job_id)):
        attempted(lambda row=row: JOB.read(row, spec=spec_in(row.spec), checkpoints=()), None)  # type: ignore[misc]  # mypy cannot type a lambda's defaults
    if not found:
        for row in fetch(connection, select(CHECKPOINTS).where(CHECKPOINTS.c.job_id == job_id)):
            attempted(lambda row=row: CHECKPOINT.read(row), None)  # type: ignore[misc]  # as above
    attempts = select(ATTEMPTS).where(ATTEMPTS.c.job_id == job_id).order_by(ATTEMPTS.c.number)
    for row in fetch(connection, attempts):
        attempted(lambda row=row: attempt_in(row), row.number)  # type: ignore[misc]  # as above
    return tuple(found)
