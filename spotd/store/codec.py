"""Frozen values to JSON text and back, by the types that their dataclasses declare.

For values that are never queried and never change once written: a quote, a stop order. A codec is built once per
type. On reading, a key that the type no longer has is passed over and a missing one takes its default, so that an
old row stays readable when a value grows a field.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from spotd.store.columns import duration_in, duration_out, instant_in, instant_out

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_PLAIN = frozenset({str, int, float, bool})


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """Both directions of one type; `None` where the value is its own JSON."""

    out: _Convert | None
    back: _Convert | None


_AS_IS = _Way(None, None)


class Codec(Generic[T]):
    """Turns values of one dataclass into JSON text and back."""

    def __init__(self, type_: type[T]) -> None:
        hint: Any = type_
        self._way = _way(hint)

    def dumps(self, value: T) -> str:
        """Return the JSON text; object keys in the order of the fields."""
        out = self._way.out
        return json.dumps(value if out is None else out(value), separators=(",", ":"), allow_nan=False)

    def loads(self, text: str) -> T:
        """Return the value that `dumps` was given."""
        back = self._way.back
        raw = json.loads(text)
        value: T = raw if back is None else back(raw)
        return value


@cache
def _way(hint: Hashable) -> _Way:
    if isinstance(hint, typing.NewType):
        return _way(hint.__supertype__)
    if hint in _PLAIN:
        return _AS_IS
    if hint is datetime:
        return _Way(instant_out, instant_in)
    if hint is timedelta:
        return _Way(duration_out, duration_in)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Way(str, hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_way(hint)
    return _generic_way(hint)


def _generic_way(hint: Any) -> _Way:
    origin, args = get_origin(hint), get_args(hint)
    if origin in {typing.Union, types.UnionType} and type(None) in args:
        [inner] = [arg for arg in args if arg is not type(None)]
        return _optional(_way(inner))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(_way(args[0]))
    if origin is tuple:
        ways = [_way(arg) for arg in args]
        return _Way(
            lambda v: [_apply(w.out, x) for w, x in zip(ways, v, strict=True)],
            lambda v: tuple(_apply(w.back, x) for w, x in zip(ways, v, strict=True)),
        )
    if origin is Mapping and _way(args[0]) is _AS_IS and _way(args[1]) is _AS_IS:
        return _Way(dict, dict)
    raise TypeError(f"no way to store {hint!r} as JSON")


def _apply(convert: _Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def _optional(way: _Way) -> _Way:
    out, back = way.out, way.back
    return _Way(
        None if out is None else lambda v: None if v is None else out(v),
        None if back is None else lambda v: None if v is None else back(v),
    )


def _sequence(way: _Way) -> _Way:
    out, back = way.out, way.back
    return _Way(
        list if out is None else lambda v: [out(x) for x in v],
        tuple if back is None else lambda v: tuple([back(x) for x in v]),
    )


def _dataclass_way(type_: type[Any]) -> _Way:
    hints = get_type_hints(type_)
    ways = [(field.name, _way(hints[field.name])) for field in dataclasses.fields(type_)]
    backs = {name: way.back for name, way in ways}

    def out(value: Any) -> dict[str, Any]:
        return {name: _apply(way.out, getattr(value, name)) for name, way in ways}

    def back(raw: dict[str, Any]) -> Any:
        return type_(**{name: _apply(backs[name], v) for name, v in raw.items() if name in backs})

    return _Way(out, back)
