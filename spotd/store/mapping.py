"""Frozen values as columns of a row and back, by the types that their dataclasses declare.

A field is the column of its name. A nested value is the columns that begin with the name of its field; they are all
null where it is absent. What is no number, text, instant or duration is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime, timedelta
from enum import StrEnum
from functools import cache
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
        for name in [field.name for field in dataclasses.fields(type_)]:
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
