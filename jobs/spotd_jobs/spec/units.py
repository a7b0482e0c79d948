"""Durations, sizes and money as people write them, to exact values and back.

Nothing here rounds silently in the wrong direction: a size that a machine must have is rounded up to the unit the
core counts in, a figure of money finer than a micro-dollar is refused, a number without a unit is refused where the
unit is not obvious. Every error names what was wrong and shows how to write it.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Final

from spotd_jobs.spec.model import PriceLimit
from spotd_jobs.spec.problems import BadValue


class UnitError(BadValue):
    """A duration, size or figure of money that cannot be understood; `hint` shows how to write it."""


DURATION_HINT: Final = 'write it like "90s", "15m", "1h30m" or "2d"'
SIZE_HINT: Final = 'write it like "100GB", "40GiB" or "512MB"'
MONEY_HINT: Final = 'write dollars like 2.40 or "2.40"'
PRICE_HINT: Final = 'write dollars per GPU-hour like 2.40, or "19.20/h" for the whole machine'

MICRO: Final = 1_000_000
"""Micro-dollars in a dollar."""
MONEY_MAX_USD: Final = 10_000_000
DURATION_MAX: Final = timedelta(days=3650)
_TEXT_MAX: Final = 64
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")

_MICROSECONDS: Final = {
    "w": 7 * 86_400_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
    "ms": 1_000,
}
_DURATION_WORDS: Final = {
    "w": "w", "week": "w", "weeks": "w",
    "d": "d", "day": "d", "days": "d",
    "h": "h", "hr": "h", "hrs": "h", "hour": "h", "hours": "h",
    "m": "m", "min": "m", "mins": "m", "minute": "m", "minutes": "m",
    "s": "s", "sec": "s", "secs": "s", "second": "s", "seconds": "s",
    "ms": "ms", "millisecond": "ms", "milliseconds": "ms",
}  # fmt: skip
_PART: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*")

_BYTES: Final = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
SIZE_MAX_BYTES: Final = 10**18

_MONEY: Final = re.compile(r"\s*(?:\$|USD\s)?\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?:\$|USD)?\s*")
_PRICE: Final = re.compile(r"(?P<amount>[^/]*?)\s*(?:/\s*(?P<unit>.*?)\s*)?")
_GPU_HOUR: Final = frozenset({"gpu-h", "gpu/h", "gpuh", "gpu-hour", "gpu/hour", "h/gpu", "hour/gpu"})
_MACHINE_HOUR: Final = frozenset({"h", "hr", "hour"})


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."


def parse_duration(value: object) -> timedelta:
    """Return the duration a text like "1h30m" names, exact to the microsecond, at most ten years.

    Raises:
        UnitError: no unit, an unknown one, one given twice or out of order, too fine or too long.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{_shown(value)} is not a duration", hint=DURATION_HINT)
    if not isinstance(value, str):
        if not 0 <= value < float("inf"):
            raise UnitError(f"{_shown(value)} is not a duration", hint=DURATION_HINT)
        raise UnitError(
            f"{_shown(value)} has no unit of time", hint=f'write "{value}s" for seconds or "{value}m" for minutes'
        )
    if not value.strip() or len(value) > _TEXT_MAX:
        raise UnitError(f"{_shown(value)} is not a duration", hint=DURATION_HINT)
    total = Fraction(0)
    position = 0
    smallest: str | None = None
    order = list(_MICROSECONDS)
    while position < len(value):
        part = _PART.match(value, position)
        if part is None:
            raise UnitError(f"{_shown(value)} is not a duration", hint=DURATION_HINT)
        number, word = part.groups()
        if not word:
            raise UnitError(
                f"{_shown(value)} has no unit of time", hint=f'write "{number}s" for seconds or "{number}m" for minutes'
            )
        unit = _DURATION_WORDS.get(word) or _DURATION_WORDS.get(word.lower() if len(word) > 1 else "")
        if unit is None:
            raise UnitError(f'{_shown(value)} has the unknown unit of time "{word}"', hint=DURATION_HINT)
        if smallest is not None and order.index(unit) <= order.index(smallest):
            raise UnitError(f"{_shown(value)} does not go from the larger unit to the smaller", hint=DURATION_HINT)
        smallest = unit
        total += Fraction(number) * _MICROSECONDS[unit]
        position = part.end()
    if total.denominator != 1:
        raise UnitError(f"{_shown(value)} is finer than a microsecond", hint=DURATION_HINT)
    if total > DURATION_MAX // timedelta(microseconds=1):
        raise UnitError(f"{_shown(value)} is longer than ten years", hint=DURATION_HINT)
    return timedelta(microseconds=int(total))


def format_duration(duration: timedelta) -> str:
    """Return the text that `parse_duration` turns back into the same value, like `1h30m`."""
    rest = duration // timedelta(microseconds=1)
    if rest < 0:
        raise ValueError("a negative duration has no text")
    parts = []
    for unit in ("d", "h", "m"):
        count, rest = divmod(rest, _MICROSECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
    if rest and rest % 1000 == 0 and rest < 1_000_000 and not parts:
        return f"{rest // 1000}ms"
    if rest or not parts:
        seconds = format(Decimal(rest).scaleb(-6).normalize(), "f")
        parts.append(f"{seconds}s")
    return "".join(parts)


def parse_size(value: object) -> int:
    """Return the bytes a text like "100GB" (decimal) or "40GiB" (binary) names, rounded up.

    Raises:
        UnitError: no unit, an ambiguous or unknown one, too large.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnitError(f"{_shown(value)} is not a size", hint=SIZE_HINT)
    if not isinstance(value, str):
        raise UnitError(f"{_shown(value)} has no unit of size", hint=f'write "{value}GB" for gigabytes')
    match = _SIZE.fullmatch(value) if len(value) <= _TEXT_MAX else None
    if match is None:
        raise UnitError(f"{_shown(value)} is not a size", hint=SIZE_HINT)
    number, word = match.groups()
    if not word:
        raise UnitError(f"{_shown(value)} has no unit of size", hint=f'write "{number}GB" for gigabytes')
    if len(word) == 1 and word.upper() in "KMGTP":
        prefix = word.upper()
        raise UnitError(
            f"{_shown(value)} could be decimal or binary", hint=f'write "{number}{prefix}B" or "{number}{prefix}iB"'
        )
    if re.fullmatch(r"[KMGTP]i?b", word):
        raise UnitError(f'{_shown(value)} is in bits ("b"), not bytes', hint=f'write "{number}{word[:-1]}B" for bytes')
    factor = _BYTES.get(word.upper())
    if factor is None:
        raise UnitError(f'{_shown(value)} has the unknown unit of size "{word}"', hint=SIZE_HINT)
    exact = Fraction(number) * factor
    if exact > SIZE_MAX_BYTES:
        raise UnitError(f"{_shown(value)} is larger than an exabyte", hint=SIZE_HINT)
    return -(-exact.numerator // exact.denominator)


def parse_size_mb(value: object) -> int:
    """Return the decimal megabytes that hold this size."""
    return -(-parse_size(value) // 10**6)


def parse_size_gb(value: object) -> int:
    """Return the decimal gigabytes that hold this size."""
    return -(-parse_size(value) // 10**9)


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` turns back into the same number of bytes."""
    if size < 0:
        raise ValueError("a negative size has no text")
    for unit in ("PB", "TB", "GB", "MB", "KB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return f"{size}B"


def parse_money(value: object) -> int:
    """Return the micro-dollars of a figure like 2.40, "2.40", "$2.40" or 120.

    Raises:
        UnitError: not a number, not finite, negative, too large or finer than a micro-dollar.
    """
    if isinstance(value, str):
        match = _MONEY.fullmatch(value) if len(value) <= _TEXT_MAX else None
        if match is None:
            if "," in value:
                raise UnitError(f"{_shown(value)} has a comma", hint="write 1200.50 with a point and no comma")
            if value.strip().startswith("-"):
                raise UnitError(f"{_shown(value)} is negative", hint=MONEY_HINT)
            raise UnitError(f"{_shown(value)} is not a figure of money", hint=MONEY_HINT)
        exact = Decimal(match.group(1))
    elif isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise UnitError(f"{_shown(value)} is not a figure of money", hint=MONEY_HINT)
    else:
        exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
        if not exact.is_finite():
            raise UnitError(f"{_shown(value)} is not a figure of money", hint=MONEY_HINT)
        if exact < 0:
            raise UnitError(f"{_shown(value)} is negative", hint=MONEY_HINT)
    if exact > MONEY_MAX_USD:
        raise UnitError(f"{_shown(value)} is more than ten million dollars", hint=MONEY_HINT)
    amount = Fraction(exact) * MICRO
    if amount.denominator != 1:
        raise UnitError(f"{_shown(value)} is finer than a millionth of a dollar", hint=MONEY_HINT)
    return int(amount)


def format_money(amount: int) -> str:
    """Dollars with at least two and at most six decimals; `parse_money` turns it back into the same amount."""
    if amount < 0:
        return "-" + format_money(-amount)
    dollars, rest = divmod(amount, MICRO)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{dollars}.{decimals}"


def parse_price(value: object) -> PriceLimit:
    """Return the price limit of a figure: per GPU-hour as it stands, "19.20/h" for the whole machine.

    Raises:
        UnitError: not money, not above zero, or an unknown unit after the slash.
    """
    unit: str | None = None
    amount: object = value
    if isinstance(value, str):
        match = _PRICE.fullmatch(value)
        if match is None:
            raise UnitError(f"{_shown(value)} is not a price", hint=PRICE_HINT)
        amount, unit = match.group("amount"), match.group("unit")
    try:
        figure = parse_money(amount)
    except UnitError as exc:
        raise UnitError(str(exc), hint=PRICE_HINT) from exc
    if figure == 0:
        raise UnitError("a price limit must be above 0", hint=PRICE_HINT)
    spelled = None if unit is None else unit.lower().replace(" ", "")
    if spelled is None or spelled in _GPU_HOUR:
        return PriceLimit(per_gpu_hour=figure)
    if spelled in _MACHINE_HOUR:
        return PriceLimit(machine_hour=figure)
    raise UnitError(f'{_shown(value)} has the unknown unit "/{unit}"', hint=PRICE_HINT)


def parse_number(text: str, *, unit: str = "", most: int, above: bool = False) -> Fraction:
    """Return the number a text like `450`, `450W` or `0.5` names; `unit` may stand behind it.

    Raises:
        BadValue: not a number, or not within the bounds; with `above` zero is refused, too.
    """
    value = text.strip()
    if unit and value.lower().endswith(unit.lower()):
        value = value[: -len(unit)].strip()
    hint = f"write a number from 0 to {most}" + (f", like {most // 2}{unit}" if unit else "")
    if len(value) > _TEXT_MAX or not _NUMBER.fullmatch(value):
        negative = value.startswith("-") and _NUMBER.fullmatch(value[1:])
        raise BadValue(f"{_shown(text)} is {'negative' if negative else 'not a number'}", hint=hint)
    number = Fraction(value)
    if number > most or number < 0 or (above and number == 0):
        bounds = f"above 0 and at most {most}" if above else f"between 0 and {most}"
        raise BadValue(f"{_shown(text)} is not {bounds}", hint=hint)
    return number
