"""Core values as columns of a row and back; the tables are made of the same declarations.

Theory. A field is the column of its name, of the type that its hint asks for. A nested value is the columns that begin
with the name of its field; they are all null where it is absent. What is no number, text, instant or duration is JSON.
So a field that is added to a value is a column of its table without a change here, and a new revision of the schema.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import cache
from operator import attrgetter, index
from typing import Any, Final, Generic, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from sqlalchemy import BigInteger, Boolean, Date, Float, Text
from sqlalchemy.types import TypeEngine

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.intents import Charge, CostSums, Intent
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import Event
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import PastJob, Record
from spotd.core.notifications import Notification, Queued
from spotd.store.views import AttemptView, JobPaces, JobView

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


T = TypeVar("T")
Row = Any
"""A result row with the columns of one table as attributes."""
Columns = dict[str, Any]
_Convert = Callable[[Any], Any]
_Way = tuple[type[TypeEngine[Any]], _Convert | None, _Convert | None]
_WAYS: Final[Mapping[Any, _Way]] = {
    str: (Text, None, None),
    bool: (Boolean, None, None),
    float: (Float, None, None),
    date: (Date, None, None),
    int: (BigInteger, None, index),  # SQLite stores a text where a number should be, and that must be an error
    datetime: (BigInteger, instant_out, instant_in),
    timedelta: (BigInteger, duration_out, duration_in),
}
"""The type of the column, to the column, and back; `None` where the value is what the database holds."""


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


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column as the field behind it declares it."""

    name: str
    type: type[TypeEngine[Any]] | TypeEngine[Any]
    nullable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """Where the columns of a value are not what its fields alone say.

    Attributes:
        names: columns that are not named as their field (`id.job` is a field of a nested value).
        words: sentences with text of others, in which some characters cannot be stored.
        nested_json: nested values that are one column of JSON.
        without: fields that are stored elsewhere, and that `read` takes as they are.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    words: Collection[str] = ()
    nested_json: Collection[str] = ()
    without: Collection[str] = ()


_AS_DECLARED: Final = ColumnRules()


class RowMap(Generic[T]):
    """Both directions of one dataclass, and its columns: those of its own fields, then those of its nested values."""

    columns: tuple[ColumnSpec, ...]

    def __init__(self, type_: type[T], rules: ColumnRules = _AS_DECLARED, **below: Any) -> None:
        """`below` is for nested values: path of the field, prefix of its columns, whether it may be absent."""
        self._type = type_
        path, prefix, may_be_absent = below.get("path", ""), below.get("prefix", ""), below.get("absent", False)
        columns: list[ColumnSpec] = []
        self._fields: list[str] = []
        self._out: list[tuple[str, _Convert, bool]] = []
        self._back: list[tuple[str, _Convert, bool]] = []
        nested: list[tuple[str, Any, str, bool]] = []
        hints: dict[str, Any] = get_type_hints(type_)
        for name in [entry.name for entry in dataclasses.fields(cast("Any", type_))]:
            key = f"{path}{name}"
            if key in rules.without:
                continue
            (hint, optional), column = _plain(hints[name]), rules.names.get(key, f"{prefix}{name}")
            if dataclasses.is_dataclass(hint) and key not in rules.nested_json:
                nested.append((name, hint, column, optional))
                continue
            kind, out, back = (Text, words_out, None) if key in rules.words else _way(hint)
            self._fields.append(name)
            columns.append(ColumnSpec(column, kind, optional or may_be_absent))
            if out is not None:
                self._out.append((column, out, optional))
            if back is not None:
                self._back.append((name, back, optional))
        self._own = [column.name for column in columns]
        self._nested: list[tuple[str, RowMap[Any], slice, bool]] = []
        for name, hint, column, optional in nested:
            inner: RowMap[Any] = RowMap(
                hint, rules, path=f"{path}{name}.", prefix=f"{column}_", absent=optional or may_be_absent
            )
            at = slice(len(columns), len(columns) + len(inner.columns))
            self._nested.append((name, inner, at, optional))
            columns += inner.columns
        self.columns = tuple(columns)
        self._of_value = _getter(self._fields)
        self._of_row = _getter([column.name for column in columns])

    def out(self, value: T) -> Columns:
        """Return the columns of a value."""
        columns = dict(zip(self._own, self._of_value(value), strict=True))
        for column, convert, optional in self._out:
            if not (optional and columns[column] is None):
                columns[column] = convert(columns[column])
        for name, inner, _, _ in self._nested:
            part = getattr(value, name)
            columns.update(dict.fromkeys(c.name for c in inner.columns) if part is None else inner.out(part))
        return columns

    def read(self, row: Row, **given: Any) -> T:
        """Return the value in a row; the fields that are stored elsewhere are given."""
        return self.made(self._of_row(row), given)

    def made(self, stored: tuple[Any, ...], given: dict[str, Any]) -> T:
        """Return the value of these columns, in the order of `columns`; `given` becomes its fields."""
        # A row has the columns of nested values behind those of the fields.
        given.update(zip(self._fields, stored, strict=False))
        for name, convert, optional in self._back:
            if not (optional and given[name] is None):
                given[name] = convert(given[name])
        for name, inner, at, optional in self._nested:
            part = stored[at]
            given[name] = None if optional and part[0] is None else inner.made(part, {})
        return self._type(**given)


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads these attributes of an object, in one call."""
    read = attrgetter(*names) if names else lambda _: ()
    return read if len(names) != 1 else lambda found: (read(found),)


def _plain(hint: Any) -> tuple[Any, bool]:
    """Return the type below `NewType` and `None`, and whether the value may be absent."""
    if isinstance(hint, NewType):
        return _plain(hint.__supertype__)
    if get_origin(hint) in {Union, types.UnionType}:
        [inner] = [arg for arg in get_args(hint) if arg is not type(None)]
        return _plain(inner)[0], True
    return hint, False


def _way(hint: Any) -> _Way:
    if hint in _WAYS:
        return _WAYS[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Text, str, hint
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return Text, to_json, lambda text: from_json(hint, text)
    if get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
        # An adapter of nested values takes up to a megabyte; a daemon without such rows needs none.
        return (
            Text,
            lambda value: _adapter(hint).dump_json(value).decode(),
            lambda text: _adapter(hint).validate_json(text),
        )
    if get_origin(hint) is tuple:
        return Text, compact, lambda text: tuple(json.loads(text))
    if get_origin(hint) is Mapping:
        return Text, lambda value: compact(dict(value)), json.loads
    raise TypeError(f"no way to store {hint!r}")


_ID: Final = {"id.job": "job_id", "id.number": "number"}
_REF: Final = {"ref.instance_id": "ref_id"}
_OF_RULES: Final = {
    "bill.believed": "billed",
    "debt.since": "traffic_since",
    "debt.spent": "traffic_spent",
    "lapsed.count": "notices_lapsed",
    "lapsed.named": "notice_lapsed_at",
}
_SENTENCES_OF_JOBS: Final = ("reason", "outputs.problem")
_OF_NOTIFICATIONS: Final = {f"notification.{each.name}": each.name for each in dataclasses.fields(Notification)}

JOB: Final = RowMap(
    Job,
    ColumnRules(words=_SENTENCES_OF_JOBS, nested_json=("chain", "moves"), without=("spec", "checkpoints")),
)
PAST_JOB: Final = RowMap(PastJob, ColumnRules(words=_SENTENCES_OF_JOBS))
PACES: Final = RowMap(JobPaces)
ATTEMPT: Final = RowMap(
    Attempt,
    ColumnRules(
        names=_ID | _REF | _OF_RULES,
        words=("phase", "end_detail", "account", "bill.note"),
        nested_json=("stop", "watch", "freshness", "bidding", "members"),
        without=("quote",),
    ),
)
CHECKPOINT: Final = RowMap(Checkpoint, ColumnRules(words=("host",)))
INTENT: Final = RowMap(Intent, ColumnRules(names=_REF, words=("error", "account")))
COOLDOWN: Final = RowMap(Cooldown, ColumnRules(words=("reason",)))
RECORD: Final = RowMap(
    Record, ColumnRules(names={"id.kind": "kind", "id.provider": "provider", "id.subject": "subject"})
)
CHARGE: Final = RowMap(Charge, ColumnRules(names={"attempt.job": "job_id", "attempt.number": "attempt"}))
EVENT: Final = RowMap(Event, ColumnRules(names={"job": "job_id"}, words=("message",)))
QUEUED: Final = RowMap(
    Queued,
    ColumnRules(
        names=_OF_NOTIFICATIONS | {"notification.job": "job_id"},
        words=("notification.title", "notification.text", "notification.key"),
    ),
)
COST_SUMS: Final = RowMap(CostSums)
ATTEMPT_VIEW: Final = RowMap(
    AttemptView, ColumnRules(names=_ID | {"price": "price_total", "on_demand": "on_demand_total"})
)
JOB_VIEW: Final = RowMap(
    JobView,
    ColumnRules(
        names={"settled": "spent", "on_demand_settled": "on_demand"},
        nested_json=("moves",),
        without=("open", "checkpoint"),
    ),
)
