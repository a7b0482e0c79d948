"""Frozen values as columns of a row and back, by the types that their dataclasses declare.

A field is the column of its name. A nested value is the columns that begin with the name of its field; they are all
null where it is absent. What is no number, text, instant or duration is JSON. What each type needs is found out once.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, timedelta
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Generic, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from spotd.store.columns import duration_in, duration_out, instant_in, instant_out, words_out

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
    """Both directions of one dataclass.

    Args:
        names: columns that are not named as their field (`id.job` is a field of a nested value).
        words: sentences with text of others, in which some characters cannot be stored.
        nested_json: nested values that are one column of JSON.
        without: fields that are stored elsewhere.
    """

    def __init__(
        self,
        type_: type[T],
        *,
        names: Mapping[str, str] = MappingProxyType({}),
        words: Collection[str] = (),
        nested_json: Collection[str] = (),
        without: Collection[str] = (),
        prefix: str = "",
    ) -> None:
        self._type = type_
        self._fields: dict[str, str] = {}
        """The column of each field that is one."""
        self._paths: dict[str, str] = {}
        """The same, with the fields of nested values that are always there, by their path."""
        self._outs: list[tuple[str, _Convert]] = []
        self._backs: list[tuple[str, _Convert]] = []
        self._always: list[tuple[str, RowMap[Any]]] = []
        self._maybe: list[tuple[str, RowMap[Any]]] = []
        numbers: list[str] = []
        hints: dict[str, Any] = get_type_hints(type_)
        for field in [field.name for field in dataclasses.fields(type_) if field.name not in without]:  # type: ignore[arg-type]  # T is a dataclass, which no bound can express
            column = names.get(field, f"{prefix}{field}")
            hint, is_optional = _plain(hints[field])
            if isinstance(hint, type) and dataclasses.is_dataclass(hint) and field not in nested_json:
                of_it = f"{field}."
                below = {key: key.removeprefix(of_it) for key in (*names, *words) if key.startswith(of_it)}
                inner: RowMap[Any] = RowMap(
                    hint,
                    prefix=f"{column}_",
                    names={below[key]: name for key, name in names.items() if key in below},
                    words={below[key] for key in words if key in below},
                )
                (self._maybe if is_optional else self._always).append((field, inner))
                continue
            self._fields[field] = column
            out, back = (words_out, None) if field in words else _way(hint)
            if out is not None:
                self._outs.append((column, out))
            if back is int and not is_optional:
                numbers.append(column)
            elif back is not None:
                self._backs.append((field, back))
        self._paths.update(self._fields)
        for field, inner in self._always:
            if inner._always or inner._maybe:  # noqa: SLF001 - of this very class
                raise TypeError(f"{field} of {type_.__name__} holds values that are nested deeper")
            self._paths.update({f"{field}.{path}": column for path, column in inner._paths.items()})  # noqa: SLF001 - of this very class
            self._outs += inner._outs  # noqa: SLF001 - of this very class
        self._values_of = attrgetter(*self._paths)
        self._values_in = attrgetter(*self._fields.values())
        self._numbers_in = attrgetter(*numbers, numbers[0]) if numbers else None  # of two names at least, for a tuple
        self._first = next(iter(self._fields.values()))

    def out(self, value: T) -> Columns:
        """Return the columns of a value."""
        found: Columns = dict(zip(self._paths.values(), self._values_of(value), strict=True))
        for column, convert in self._outs:
            if (item := found[column]) is not None:
                found[column] = convert(item)
        for field, inner in self._maybe:
            part = getattr(value, field)
            found.update(dict.fromkeys(inner._paths.values()) if part is None else inner.out(part))  # noqa: SLF001 - of this very class
        return found

    def read(self, row: Row, **given: Any) -> T:
        """Return the value in a row, with the fields that are stored elsewhere."""
        found = dict(zip(self._fields, self._values_in(row), strict=True))
        if self._numbers_in is not None:
            sum(self._numbers_in(row))  # one text among them is a TypeError, at a tenth of what a check of each costs
        for field, convert in self._backs:
            if (item := found[field]) is not None:
                found[field] = convert(item)
        for field, inner in self._always:
            found[field] = inner.read(row)
        for field, inner in self._maybe:
            found[field] = None if getattr(row, inner._first) is None else inner.read(row)  # noqa: SLF001 - of this very class
        return self._type(**found, **given)


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
    if get_origin(hint) is tuple:
        return compact, lambda text: tuple(json.loads(text))
    if get_origin(hint) is Mapping:
        return lambda value: compact(dict(value)), json.loads
    raise TypeError(f"no way to store {hint!r}")
