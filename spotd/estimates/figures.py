"""Numbers as people write them on a command line, to exact values; every refusal says how to write it."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from spotd.estimates.architecture import PARAMS_MAX, PARAMS_MIN
from spotd_jobs.spec.fields import shown
from spotd_jobs.spec.problems import BadValue

COUNT_HINT: Final = "write a number of parameters like 7B, 350M, 1.5T or 6738415616"
_TEXT_MAX: Final = 32
_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)", re.IGNORECASE)
_BYTES: Final = re.compile(r"[0-9.]+\s*[KMGTP]i?B", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_FACTORS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_params(text: str) -> int:
    """Return the number of parameters that a text like `7B` names.

    Raises:
        BadValue: not a number, a size in bytes, or no model's number of parameters.
    """
    value = text.strip()
    match = _COUNT.fullmatch(value) if len(value) <= _TEXT_MAX else None
    if match is None:
        if len(value) <= _TEXT_MAX and _BYTES.fullmatch(value):
            raise BadValue(f"{shown(text)} is a size in bytes, not a number of parameters", hint=COUNT_HINT)
        raise BadValue(f"{shown(text)} is not a number of parameters", hint=COUNT_HINT)
    params = Fraction(match[1]) * _FACTORS[match[2].upper()]
    if not PARAMS_MIN <= params <= PARAMS_MAX:
        raise BadValue(f"{shown(text)} is not between 1M and 1000T parameters", hint=COUNT_HINT)
    return int(params)


def parse_number(text: str, *, unit: str = "", least: int = 0, most: int, above: bool = False) -> Fraction:
    """Return the number a text like `450`, `450W` or `0.5` names; `unit` may stand behind it.

    Raises:
        BadValue: not a number, or not within the bounds; with `above` the lower bound itself is refused.
    """
    value = text.strip()
    if unit and value.lower().endswith(unit.lower()):
        value = value[: -len(unit)].strip()
    hint = f"write a number from {least} to {most}" + (f", like {most // 2}{unit}" if unit else "")
    if len(value) > _TEXT_MAX or not _NUMBER.fullmatch(value):
        negative = value.startswith("-") and _NUMBER.fullmatch(value[1:])
        raise BadValue(f"{shown(text)} is {'negative' if negative else 'not a number'}", hint=hint)
    number = Fraction(value)
    if number > most or number < least or (above and number == least):
        bounds = f"above {least} and at most {most}" if above else f"between {least} and {most}"
        raise BadValue(f"{shown(text)} is not {bounds}", hint=hint)
    return number
