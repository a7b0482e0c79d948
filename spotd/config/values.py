"""Tables of the config and types of their values: human strings in, exact values out, refusals with a way out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from spotd_jobs.spec import units
from spotd_jobs.spec.problems import BadValue

PPM: Final = 1_000_000
HINTED: Final = "spotd_hinted"
"""The type of validation errors whose context carries our own hint."""

SCALE_MAX: Final = 1_000_000
EGRESS_MAX: Final = 1_000_000
"""Micro-dollars per gigabyte."""
_FEE_LEAST: Final = Fraction(1, 2)
_FEE_MOST: Final = Fraction(5)


class Section(BaseModel):
    """One table of the config: nothing unknown, nothing coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def hinted(message: str, hint: str) -> PydanticCustomError:
    """Return an error that pydantic collects and the reader of problems turns back into message and hint."""
    return PydanticCustomError(HINTED, "{message}", {"message": message, "hint": hint})


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


class Bytes(int):
    """A number of bytes that is written as a size."""


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
    if not _FEE_LEAST <= factor <= _FEE_MOST:
        raise BadValue(f"{value} is not between 0.5 and 5", hint=hint)
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
