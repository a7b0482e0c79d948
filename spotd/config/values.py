"""Tables of the config and types of their values: human strings in, exact values out, refusals with a way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from spotd_jobs.spec import units
from spotd_jobs.spec.problems import PROBLEMS_MAX, BadValue, FileProblems, Problem, key_path, unknown_key

PPM: Final = 1_000_000
HINTED: Final = "spotd_hinted"
"""The type of validation errors whose context carries our own hint."""

SCALE_MAX: Final = 1_000_000
"""How much faster than the wall a clock may run."""
EGRESS_MAX: Final = 1_000_000
"""Micro-dollars per gigabyte."""
FEE_LEAST: Final = Decimal("0.5")
FEE_MOST: Final = Decimal(5)


class Section(BaseModel):
    """One table of the config: nothing unknown, nothing coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def hinted(message: str, hint: str) -> PydanticCustomError:
    """Return an error that pydantic collects and the reader of problems turns back into message and hint."""
    return PydanticCustomError(HINTED, "{message}", {"message": message, "hint": hint})


def url_parts(text: str, hint: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        PydanticCustomError: it is none, as with a bracket of an IPv6 address that is missing, or with no port's number.
    """
    try:
        parts = urlsplit(text)
        _ = parts.port  # is judged only where it is read
    except ValueError:
        raise hinted(
            "is no URL: an IPv6 address stands in brackets, and a port is a number up to 65535", hint
        ) from None
    return parts


def _reading(parse: Callable[[object], Any], already: type[Any] | None = None) -> BeforeValidator:
    def read(value: object) -> Any:
        if already is not None and isinstance(value, already):
            return value
        try:
            return parse(value)
        except BadValue as exc:
            raise hinted(str(exc), exc.hint) from exc

    return BeforeValidator(read)


def _interval(value: object) -> timedelta:
    duration = units.parse_duration(value)
    if not timedelta(milliseconds=50) <= duration <= timedelta(days=1):
        raise BadValue(f'"{value}" is not between 50ms and 1d', hint='write it like "60s" or "5m"')
    return duration


def _hold(value: object) -> timedelta:
    duration = units.parse_duration(value)
    if duration > timedelta(minutes=15):
        raise BadValue(f'"{value}" is longer than 15m', hint='write it like "10m"; "0s" keeps none')
    return duration


def _canary(value: object) -> timedelta:
    span = units.parse_duration(value)
    if span and not timedelta(seconds=10) <= span <= timedelta(minutes=5):
        raise BadValue(f'"{value}" is not between 10s and 5m', hint='write it like "60s"; "0s" measures nothing')
    return span


class Bytes(int):
    """A number of bytes that is written as a size."""


OWN_MAX: Final = timedelta(days=30)


def _own(value: object) -> timedelta:
    span = units.parse_duration(value)
    if span > OWN_MAX:
        raise BadValue(f'"{value}" is more than 30 days', hint='write it like "2h"')
    return span


def _bytes_between(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        size = units.parse_size(value)
        if not least <= size <= most:
            between = f"{units.format_size(least)} and {units.format_size(most)}"
            raise BadValue(f'"{value}" is not between {between}', hint=f'write it like "{units.format_size(least)}"')
        return size

    return read


def _positive_money(value: object) -> int:
    amount = units.parse_money(value)
    if amount == 0:
        raise BadValue("must be above 0", hint="write dollars like 50.0, or leave the key out for no limit")
    return amount


def _ceiling(value: object) -> int:
    limit = units.parse_price(value)
    if limit.per_gpu_hour is None:
        raise BadValue(
            f'"{value}" is for the whole machine; ceilings are per GPU-hour',
            hint="write dollars per GPU-hour like 2.40",
        )
    return limit.per_gpu_hour


def _fee(value: object) -> int:
    hint = "write the factor on the listed price, like 1.20 for 20 percent on top"
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        factor = Fraction(Decimal(value if isinstance(value, str) else repr(value)))
    except (ValueError, ArithmeticError) as exc:
        raise BadValue(f"{value!r} is not a factor", hint=hint) from exc
    if not FEE_LEAST <= factor <= FEE_MOST:
        raise BadValue(f"{value} is not between {FEE_LEAST} and {FEE_MOST}", hint=hint)
    return -(-factor.numerator * PPM // factor.denominator)


def _egress(value: object) -> int:
    price = units.parse_money(value)
    if price > EGRESS_MAX:
        raise BadValue(f"{value} is more than a dollar for each GB", hint="write dollars per GB like 0.09; 0 for none")
    return price


def _scale(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= SCALE_MAX:
        raise BadValue(f"{value!r} is not a number from 1 to {SCALE_MAX}", hint="write time_scale = 1.0 for real time")
    return float(value)


Interval = Annotated[timedelta, _reading(_interval, timedelta)]
"""Written "60s"; between 50 milliseconds and a day."""
HoldSpan = Annotated[timedelta, _reading(_hold, timedelta)]
"""Written "10m"; at most a quarter of an hour, since a host that is silent for longer is given up."""
CanarySpan = Annotated[timedelta, _reading(_canary, timedelta)]
"""Written "60s"; nothing, or between ten seconds and five minutes."""
OwnSpan = Annotated[timedelta, _reading(_own, timedelta)]
"""Written "2h"; at most 30 days."""
DayBytes = Annotated[int, _reading(_bytes_between(10**9, 10**15), Bytes)]
"""Written "11TB", held in bytes; what a machine may write in a day."""
DayLogBytes = Annotated[int, _reading(_bytes_between(10**6, 10**12), Bytes)]
"""The same of logs."""
Money = Annotated[int, _reading(_positive_money)]
"""Written in dollars, held in micro-dollars; above zero."""
CeilingPrice = Annotated[int, _reading(_ceiling)]
"""Written in dollars per GPU-hour, held in micro-dollars."""
FeePpm = Annotated[int, _reading(_fee)]
"""Written as a factor, held in parts per million, rounded up."""
EgressPrice = Annotated[int, _reading(_egress)]
"""Written in dollars per decimal gigabyte, held in micro-dollars; 0 for none."""
Scale = Annotated[float, _reading(_scale)]
"""How much faster than the wall a clock runs."""


# What pydantic found wrong, turned into problems a person can act on.


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
    "string_pattern_mismatch": "is empty, too long, or has a character that it does not take",
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


TABLES_MAX: Final = 32
_TABLE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
S = TypeVar("S", bound=Section)


def named_tables(kind: str, tables: Any, model: type[S], example: str, problems: list[Problem]) -> dict[str, S]:
    """Return every `[kind.NAME]` as its model, by name; what is wrong is added to the problems."""
    noun = "registry" if kind == "registries" else kind.removesuffix("s")
    if not isinstance(tables, Mapping):
        problems.append(Problem(key=kind, message=f"must hold a table for each {noun}", hint=f"write {example}"))
        return {}
    if len(tables) > TABLES_MAX:
        problems.append(Problem(key=kind, message=f"has more than {TABLES_MAX} {kind}", hint="remove some"))
        return {}
    found: dict[str, S] = {}
    for name, table in tables.items():
        place = key_path((kind, name))
        if not isinstance(table, Mapping):
            hint = f"each {noun} is a table of its own: {example}"
            problems.append(Problem(key=place, message=f"is no table of a {noun}", hint=hint))
        elif not _TABLE_NAME.fullmatch(name):
            hint = "name it with up to 32 of a-z, 0-9, - and _"
            problems.append(Problem(key=place, message=f"is no name for a {noun}", hint=hint))
        else:
            try:
                found[name] = model.model_validate(dict(table))
            except ValidationError as exc:
                problems += problems_of(exc, (kind, name), model)
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
    if detail["type"] == "too_short":
        message = f"has fewer entries than the {context['min_length']} that it needs"
        return Problem(key=key, message=message, hint=_SEE)
    if detail["type"] == "too_long":
        return Problem(key=key, message=f"has more entries than {context['max_length']}", hint=_SEE)
    reason = detail["msg"].replace("Input should", "must", 1)
    message = _KINDS.get(detail["type"], reason[:1].lower() + reason[1:])
    return Problem(key=key, message=message, hint=_hint_for(model, detail["loc"]))


def _hint_for(model: type[BaseModel], place: Sequence[str | int]) -> str:
    """Return what a right value is: of a number its bounds; and the default."""
    field = model.model_fields.get(str(place[0])) if len(place) == 1 else None
    if field is None or any(isinstance(one, PlainSerializer) for one in field.metadata):
        return _SEE  # dollars are kept as micro-dollars
    default, words = field.default, _bounds(field)
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default != "":
        words.append(f"the default is {default}")
    return "; ".join(words) or _SEE


_LIMITS: Final = ("ge", "gt", "le", "lt", "multiple_of")
_BOUNDS: Final = (("ge", "from {}"), ("gt", "above {}"), ("le", "up to {}"), ("lt", "below {}"))


def _bounds(field: FieldInfo) -> list[str]:
    """Return `write a number from 0 up to 1000, in steps of 8`, or nothing where the key takes no bounded number."""
    found = {name: getattr(one, name) for one in field.metadata for name in _LIMITS if hasattr(one, name)}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    parts = [words.format(numbers[name]) for name, words in _BOUNDS if name in numbers]
    if "multiple_of" in numbers:
        parts.append(f"in steps of {numbers['multiple_of']}")
    kind = "a whole number" if field.annotation is int else "a number"
    return [f"write {kind} {' '.join(parts)}"] if parts else []


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
