"""What pydantic found wrong, turned into problems a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spotd.config.values import HINTED
from spotd_jobs.spec.problems import PROBLEMS_MAX, FileProblems, Problem, key_path, unknown_key

_SEE: Final = "see `spotd config example` for every key with its meaning"
_KINDS: Final[Mapping[str, str]] = {
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "missing": "is missing",
    "timezone_aware": "needs a time zone, like the Z in 2026-03-02T00:00:00Z",
    "datetime_type": "must be a date and time without quotes, like 2026-03-02T00:00:00Z",
}


class ConfigError(FileProblems):
    """The configuration was refused."""


def problems_of(error: ValidationError, path: Sequence[str], model: type[BaseModel]) -> list[Problem]:
    """Return each error as a problem; `path` is where the model's table stands."""
    details = error.errors(include_url=False, include_input=False)
    found = [_problem(detail, path, model) for detail in details[:PROBLEMS_MAX]]
    if len(details) > PROBLEMS_MAX:
        more = f"has {len(details) - PROBLEMS_MAX:,} more errors"
        found.append(Problem(key=key_path(path), message=more, hint="mend the others first"))
    return found


def _problem(detail: ErrorDetails, path: Sequence[str], model: type[BaseModel]) -> Problem:
    place = (*path, *detail["loc"])
    key = key_path(place)
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        return unknown_key(place, known_keys(model, detail["loc"][:-1]))
    if detail["type"] == HINTED:
        return Problem(key=key, message=str(context["message"]), hint=str(context["hint"]))
    if detail["type"] == "value_error":
        message, _, hint = str(context.get("error", detail["msg"])).partition("; ")
        return Problem(key=key, message=message, hint=hint or _SEE)
    if detail["type"] in ("literal_error", "enum"):
        return Problem(key=key, message=f"must be one of {context['expected']}", hint=_SEE)
    reason = detail["msg"].replace("Input should", "must", 1)
    message = _KINDS.get(detail["type"], reason[:1].lower() + reason[1:])
    return Problem(key=key, message=message, hint=_hint_for(model, detail["loc"]))


def _hint_for(model: type[BaseModel], place: Sequence[str | int]) -> str:
    field = model.model_fields.get(str(place[0])) if len(place) == 1 else None
    default = None if field is None else field.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        return f"the default is {default}"
    return _SEE


def known_keys(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Return the keys of the table at a place below a model; those of the model itself where that is unknown."""
    current: type[BaseModel] = model
    for part in place:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            continue  # the tag of a union's member, or a free mapping
        current = inner
    return sorted(field.alias or name for name, field in current.model_fields.items())


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple, list):
        found = [inner for arg in get_args(annotation) if (inner := _model_in(arg)) is not None]
        return found[0] if len(found) == 1 else None
    return None
