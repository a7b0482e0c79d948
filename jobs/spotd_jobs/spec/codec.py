"""A `JobSpec` as JSON and back, for the state database and `spec.json`.

Driven by the model's own type hints, so that a field added to the model is carried without a change here: missing in
an old document, it takes its default. An unknown field means a newer spotd wrote the document, and is refused.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.units import UnitError, format_duration, parse_duration

SCHEMA: Final = 1


class SpecDocumentError(ValueError):
    """A stored document is no job spec, or one of a newer spotd."""


def spec_to_json(spec: JobSpec) -> dict[str, Any]:
    """Plain JSON data from which `spec_from_json` makes an equal value. Of secrets, a spec has only names."""
    return {"schema": SCHEMA, **_encoded(spec)}


def spec_from_json(document: Mapping[str, Any]) -> JobSpec:
    """The job spec a document holds.

    Raises:
        SpecDocumentError: naming the field that cannot be understood.
    """
    if document.get("schema") != SCHEMA:
        raise SpecDocumentError(f"job spec of schema {document.get('schema')!r}; this spotd understands {SCHEMA}")
    fields = {key: value for key, value in document.items() if key != "schema"}
    spec = _decoded(JobSpec, fields, "spec")
    if not isinstance(spec, JobSpec):
        raise SpecDocumentError("not a job spec")
    return spec


def _encoded(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, timedelta):
        return format_duration(value)
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)


def _decoded(hint: Any, value: Any, place: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        return None if value is None else _decoded(inner[0], value, place)
    if origin is tuple:
        return _decoded_tuple(get_args(hint), value, place)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decoded_dataclass(hint, value, place)
    if hint is timedelta and isinstance(value, str):
        try:
            return parse_duration(value)
        except UnitError as exc:
            raise SpecDocumentError(f"{place}: {exc}") from exc
    if isinstance(hint, type) and issubclass(hint, StrEnum) and value in list(hint):
        return hint(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint in (str, int) and type(value) is hint:
        return value
    raise SpecDocumentError(f"{place}: cannot understand {value!r:.60}")


def _decoded_tuple(args: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise SpecDocumentError(f"{place}: not a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decoded(args[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if len(value) != len(args):
        raise SpecDocumentError(f"{place}: not a list of {len(args)}")
    return tuple(_decoded(arg, item, place) for arg, item in zip(args, value, strict=True))


def _decoded_dataclass(cls: Any, value: Any, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecDocumentError(f"{place}: not an object")
    hints = _hints(cls)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise SpecDocumentError(f"{place}.{unknown[0]}: unknown field; a newer spotd wrote this job spec")
    fields = {name: _decoded(hints[name], item, f"{place}.{name}") for name, item in value.items()}
    try:
        return cls(**fields)
    except TypeError as exc:
        raise SpecDocumentError(f"{place}: a required field is missing") from exc
