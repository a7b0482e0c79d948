"""A `JobSpec` as JSON and back, for the state database and `spec.json`.

Driven by the model's own type hints, so that a field added to the model is carried without a change here: missing in
an old document, it takes its default. An unknown field means a newer spotd wrote the document, and is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.units import UnitError, format_duration, parse_duration

SCHEMA: Final = 1


class SpecDocumentError(ValueError):
    """A stored document is no job spec, or one of a newer spotd."""


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Plain JSON data from which `spec_from_json` makes an equal value. Of secrets, a spec has only names."""
    return {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(spec), default=_as_text))}


def _as_text(value: datetime | timedelta) -> str:
    return value.isoformat() if isinstance(value, datetime) else format_duration(value)


def spec_from_json(document: Mapping[str, Any]) -> JobSpec:
    """Return the job spec that a document holds.

    Raises:
        SpecDocumentError: naming the field that cannot be understood.
    """
    if document.get("schema") != SCHEMA:
        raise SpecDocumentError(f"job spec of schema {document.get('schema')!r}; this spotd understands {SCHEMA}")
    fields = {key: value for key, value in document.items() if key != "schema"}
    try:
        spec: JobSpec = _decoder(JobSpec)(fields)
    except _Unclear as exc:
        raise SpecDocumentError(f"spec{exc.place}: {exc.reason}") from exc
    return spec


_Decode = Callable[[Any], Any]


class _Unclear(Exception):
    """What cannot be understood; each container it passes adds its part of the place, so that good ones build none."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = ""

    def within(self, part: str) -> _Unclear:
        self.place = part + self.place
        return self


@cache
def _decoder(hint: Any) -> _Decode:
    """How values of this type are read: made once per type, since a daemon reads a thousand specs at its start."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        [inner] = [arg for arg in get_args(hint) if arg is not type(None)]
        decode = _decoder(inner)
        return lambda value: None if value is None else decode(value)
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        whole = _dataclass_decoder(hint)
        return whole if hint is JobSpec else lambda value: _shared(whole(value))
    if hint is timedelta:
        return _duration
    if hint is datetime:
        return _instant
    if hint is float:
        return _number
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_decoder(hint)
    return _plain_decoder(hint)


def _strange(value: Any) -> _Unclear:
    return _Unclear(f"cannot understand {value!r:.60}")


@lru_cache(maxsize=1024)
def _shared(part: object) -> object:
    """Return one value for all equal parts of specs: jobs differ in few, and there are ten thousand jobs."""
    return part


_remembered = lru_cache(maxsize=256)(parse_duration)
"""Most jobs leave the durations at their defaults."""


def _duration(value: Any) -> timedelta:
    if not isinstance(value, str):
        raise _strange(value)
    try:
        return _remembered(value)
    except UnitError as exc:
        raise _Unclear(str(exc)) from exc


def _instant(value: Any) -> datetime:
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise _strange(value) from exc
    if at.tzinfo is None:
        raise _strange(value)
    return at


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _strange(value)
    return float(value)


def _enum_decoder(hint: type[StrEnum]) -> _Decode:
    members: Mapping[str, StrEnum] = {member.value: member for member in hint}

    def decode(value: Any) -> StrEnum:
        if not isinstance(value, str) or value not in members:
            raise _strange(value)
        return members[value]

    return decode


def _plain_decoder(hint: Any) -> _Decode:
    if hint not in (str, int, bool):
        raise TypeError(f"no way to read {hint!r} from JSON")

    def decode(value: Any) -> Any:
        if type(value) is not hint:
            raise _strange(value)
        return value

    return decode


def _tuple_decoder(args: tuple[Any, ...]) -> _Decode:
    repeated = len(args) == 2 and args[1] is Ellipsis
    decoders = [_decoder(arg) for arg in args if arg is not Ellipsis]

    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Unclear("not a list")
        if not repeated and len(value) != len(decoders):
            raise _Unclear(f"not a list of {len(decoders)}")
        read = []
        for index, item in enumerate(value):
            try:
                read.append(decoders[0 if repeated else index](item))
            except _Unclear as exc:
                raise exc.within(f"[{index}]") from exc.__cause__
        return tuple(read)

    return decode


def _dataclass_decoder(cls: type[Any]) -> _Decode:
    decoders = {name: _decoder(hint) for name, hint in get_type_hints(cls).items()}

    def decode(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Unclear("not an object")
        fields = {}
        for name, item in value.items():
            if name not in decoders:
                raise _Unclear("unknown field; a newer spotd wrote this job spec").within(f".{name}")
            try:
                fields[name] = decoders[name](item)
            except _Unclear as exc:
                raise exc.within(f".{name}") from exc.__cause__
        try:
            return cls(**fields)
        except TypeError as exc:
            raise _Unclear("a required field is missing") from exc

    return decode
