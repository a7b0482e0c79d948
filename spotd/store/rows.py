"""Core values as rows of their tables."""

from __future__ import annotations

import dataclasses
import json
import types
from collections import namedtuple
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Final, Generic, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from sqlalchemy import Connection, Select, select

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.intents import AttemptId, Charge, CostSums, Intent, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import Quote
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import Experience, PastJob, Record, UnreadableRow
from spotd.core.plan import Event
from spotd.store.tables import ATTEMPTS, CHECKPOINTS, JOBS
from spotd.store.views import AttemptView, JobView
from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec, Resources
from spotd_providers.contract.values import NO_GPU, InstanceId, InstanceRef, ProviderName

# How instants, durations and whole values become column values, without losing anything.
#
# Instants are integer microseconds since the epoch: they sort, they compare, and no driver rounds them.


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TICK: Final = timedelta(microseconds=1)


def instant_out(at: datetime) -> int:
    """Return microseconds since the epoch.

    Raises:
        InvariantBroken: the instant has no time zone.
    """
    if at.tzinfo is None:
        raise InvariantBroken(f"an instant without a time zone cannot be stored: {at.isoformat()}")
    return (at - _EPOCH) // _TICK


def instant_in(stored: int) -> datetime:
    """Return the aware UTC instant."""
    return _EPOCH + timedelta(microseconds=stored)


def duration_out(duration: timedelta) -> int:
    """Return microseconds."""
    return duration // _TICK


def duration_in(stored: int) -> timedelta:
    return timedelta(microseconds=stored)


def words_out(text: str) -> str:
    """Return the text without what some database cannot hold: NUL and lone surrogates become visible escapes.

    Sentences quote providers and hosts, and an odd character of theirs must not keep a state from being written.
    """
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


# Frozen values as columns of a row and back, by the types that their dataclasses declare.
#
# A field is the column of its name. A nested value is the columns that begin with the name of its field; they are all
# null where it is absent. What is no number, text, instant or duration is JSON.


T = TypeVar("T")
Row = Any
"""A result row with the columns of one table as attributes."""
Columns = dict[str, Any]
_Convert = Callable[[Any], Any]
_WAYS: Final[Mapping[Any, tuple[_Convert | None, _Convert | None]]] = {
    str: (None, None),
    bool: (None, None),
    float: (None, None),
    date: (None, None),
    int: (None, int),  # SQLite stores a text where a number should be, and that must be an error
    datetime: (instant_out, instant_in),
    timedelta: (duration_out, duration_in),
}
"""To the column and back; `None` where the value is what the database holds."""


@cache
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)


def to_json(value: Any) -> str:
    """Return a dataclass as JSON text."""
    kind: Any = type(value)
    return _adapter(kind).dump_json(value).decode()


def from_json(type_: type[T], text: str) -> T:
    """Return the value of a stored JSON text; an unknown key is passed over and a missing one takes its default.

    Raises:
        ValueError: the text holds no such value.
    """
    kind: Any = type_
    value: T = _adapter(kind).validate_json(text)
    return value


def compact(value: Any) -> str:
    """Return plain JSON data as text.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class RowMap(Generic[T]):
    """Both directions of one dataclass, each compiled into one expression: a world reads thousands of rows in a cycle.

    Args:
        names: columns that are not named as their field (`id.job` is a field of a nested value).
        words: sentences with text of others, in which some characters cannot be stored.
        nested_json: nested values that are one column of JSON.
        without: fields that are stored elsewhere, and that `read` takes as they are.
    """

    def __init__(
        self,
        type_: type[T],
        *,
        names: Mapping[str, str] = MappingProxyType({}),
        words: Collection[str] = (),
        nested_json: Collection[str] = (),
        without: Collection[str] = (),
    ) -> None:
        self._names = names
        self._words = words
        self._nested_json = nested_json
        self._without = without
        self._used: dict[str, Any] = {}
        """What the expressions call, by the name they have for it."""
        self._stored: dict[str, str] = {}
        """The expression of each column."""
        made = self._expression(type_, path="", prefix="", absent="")
        columns = ", ".join(f"{column!r}: {stored}" for column, stored in self._stored.items())
        given = "".join(f", {field}" for field in without)
        # Made of the names of our own fields and of nothing else, as `dataclasses` makes what it adds to a class.
        self.out: Callable[[T], Columns] = eval(f"lambda value: {{{columns}}}", self._used)  # noqa: S307 - of our own names, as above
        """Return the columns of a value."""
        self.read: Callable[..., T] = eval(f"lambda row{given}: {made}", self._used)  # noqa: S307 - of our own names, as above
        """Return the value in a row."""

    def _expression(self, type_: Any, *, path: str, prefix: str, absent: str) -> str:
        """Add the columns of a type; return the expression that makes a value of it of a row."""
        arguments = []
        hints: dict[str, Any] = get_type_hints(type_)
        for name in [entry.name for entry in dataclasses.fields(type_)]:
            key = f"{path}{name}"
            if key in self._without:
                arguments.append(f"{name}={name}")
                continue
            column, value = self._names.get(key, f"{prefix}{name}"), f"value.{key}"
            hint, is_optional = _plain(hints[name])
            if dataclasses.is_dataclass(hint) and key not in self._nested_json:
                first = len(self._stored)
                nothing = f"{value} is None" if is_optional else absent
                made = self._expression(hint, path=f"{key}.", prefix=f"{column}_", absent=nothing)
                is_absent = f"row.{list(self._stored)[first]} is None"
                arguments.append(f"{name}=None if {is_absent} else {made}" if is_optional else f"{name}={made}")
                continue
            out, back = (words_out, None) if key in self._words else _way(hint)
            stored, found = self._converted(out, value), self._converted(back, f"row.{column}")
            if is_optional and out is not None:
                stored = f"None if {value} is None else {stored}"
            if is_optional and back is not None:
                found = f"None if row.{column} is None else {found}"
            self._stored[column] = f"None if {absent} else {stored}" if absent else stored
            arguments.append(f"{name}={found}")
        return f"{self._name_of(type_)}({', '.join(arguments)})"

    def _converted(self, convert: _Convert | None, expression: str) -> str:
        if convert is None:
            return expression
        # A sum costs a fifth of a call, and a text that stands where a number should be is a TypeError all the same.
        return f"{expression} + 0" if convert is int else f"{self._name_of(convert)}({expression})"

    def _name_of(self, used: Any) -> str:
        name = f"used_{len(self._used)}"
        self._used[name] = used
        return name


def _plain(hint: Any) -> tuple[Any, bool]:
    """Return the type below `NewType` and `None`, and whether the value may be absent."""
    if isinstance(hint, NewType):
        return _plain(hint.__supertype__)
    if get_origin(hint) in {Union, types.UnionType}:
        [inner] = [arg for arg in get_args(hint) if arg is not type(None)]
        return _plain(inner)[0], True
    return hint, False


def _way(hint: Any) -> tuple[_Convert | None, _Convert | None]:
    if hint in _WAYS:
        return _WAYS[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str, hint
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return to_json, lambda text: from_json(hint, text)
    if get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
        # An adapter of nested values takes up to a megabyte; a daemon without such rows needs none.
        return lambda value: _adapter(hint).dump_json(value).decode(), lambda text: _adapter(hint).validate_json(text)
    if get_origin(hint) is tuple:
        return compact, lambda text: tuple(json.loads(text))
    if get_origin(hint) is Mapping:
        return lambda value: compact(dict(value)), json.loads
    raise TypeError(f"no way to store {hint!r}")


_ID: Final = {"id.job": "job_id", "id.number": "number"}
_REF: Final = {"ref.instance_id": "ref_id"}

JOB: Final = RowMap(
    Job, words=("reason", "outputs.problem"), nested_json=("chain", "moves"), without=("spec", "checkpoints")
)
PAST_JOB: Final = RowMap(PastJob, words=("reason", "outputs.problem"))
ATTEMPT: Final = RowMap(
    Attempt,
    names=_ID | _REF,
    words=("phase", "end_detail", "account", "bill_note"),
    nested_json=("stop", "watch", "freshness", "bidding"),
    without=("quote",),
)
CHECKPOINT: Final = RowMap(Checkpoint, words=("host",))
INTENT: Final = RowMap(Intent, names=_REF, words=("error", "account"))
COOLDOWN: Final = RowMap(Cooldown, words=("reason",))
RECORD: Final = RowMap(Record, names={"id.kind": "kind", "id.provider": "provider", "id.subject": "subject"})
CHARGE: Final = RowMap(Charge, names={"attempt.job": "job_id", "attempt.number": "attempt"})
EVENT: Final = RowMap(Event, names={"job": "job_id"}, words=("message",))
COST_SUMS: Final = RowMap(CostSums)
ATTEMPT_VIEW: Final = RowMap(AttemptView, names=_ID | {"price": "price_total", "on_demand": "on_demand_total"})
JOB_VIEW: Final = RowMap(
    JobView,
    names={"settled": "spent", "on_demand_settled": "on_demand"},
    nested_json=("moves",),
    without=("open", "checkpoint"),
)


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
# Only what `world` showed last is remembered. A job is forgotten when it is written, and everything is forgotten after
# a
# rollback: what a transaction showed that never happened must not vouch for anything.


_LISTS_MAX: Final = 4


@dataclass(slots=True)
class RowCache:
    """Values by id; of specs and quotes with the text they were read from; lists of jobs by what was asked."""

    jobs: dict[JobId, Job] = field(default_factory=dict)
    specs: dict[JobId, tuple[str, JobSpec]] = field(default_factory=dict)
    quotes: dict[AttemptId, tuple[str, Quote]] = field(default_factory=dict)
    lists: dict[Hashable, tuple[JobView, ...]] = field(default_factory=dict)
    experience: Experience | None = None

    def forget(self) -> None:
        self.jobs.clear()
        self.specs.clear()
        self.quotes.clear()
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
