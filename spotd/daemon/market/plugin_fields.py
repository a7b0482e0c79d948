"""One value of a plugin at a time, held to its type and its bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, TypeVar

from spotd_providers.contract import values
from spotd_providers.contract.printable import HIDDEN, without_piles

ID_CHARS_MAX: Final = 256


TEXT_CHARS_MAX: Final = 1_000


PRICE_MAX: Final = 10_000 * 1_000_000
"""Micro-dollars per hour, GB or GB-month: far beyond what any machine has cost, and small enough for every product."""


DURATION_MAX: Final = timedelta(days=36_500)


OLDEST: Final = datetime(2010, 1, 1, tzinfo=UTC)
"""No machine that is rented by the hour is older."""


NEWEST: Final = datetime(2100, 1, 1, tzinfo=UTC)


UNPRINTABLE: Final = re.compile(f"[\x00-\x1f\x7f-\x9f{HIDDEN}]")


AnyEnum = TypeVar("AnyEnum", values.Market, values.Interruption, values.InstanceState, values.Loss, values.Billing)


class MalformedValue(Exception):
    """A value that cannot be used; the message names the field and what is wrong, never the value."""


def text(value: Any, *, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Return a printable, bounded text; anything else is empty."""
    if not isinstance(value, str):
        return ""
    if len(value) <= chars_max and value.isascii() and not UNPRINTABLE.search(value):
        return value
    return without_piles(UNPRINTABLE.sub(" ", value[: chars_max * 2]))[:chars_max].strip()


def identity(value: Any, field: str, *, chars_max: int = ID_CHARS_MAX) -> str:
    if not isinstance(value, str):
        raise MalformedValue(f"{field}: not a text")
    if not value or len(value) > chars_max:
        raise MalformedValue(f"{field}: not 1 to {chars_max} characters")
    if UNPRINTABLE.search(value):
        raise MalformedValue(f"{field}: holds a character that cannot be printed")
    return str(value)


def whole(value: Any, field: str, *, low: int, high: int) -> int:
    if type(value) is not int:
        raise MalformedValue(f"{field}: not a whole number")
    if not low <= value <= high:
        raise MalformedValue(f"{field}: not from {low} to {high}")
    return value


def price(value: Any, field: str) -> int:
    if type(value) is not int:
        raise MalformedValue(f"{field}: not a price in whole micro-dollars")
    if not 0 <= value <= PRICE_MAX:
        raise MalformedValue(f"{field}: below zero or beyond any price")
    return value


def whole_or_none(value: Any, *, low: int, high: int) -> int | None:
    return value if type(value) is int and low <= value <= high else None


def measure_or_none(value: Any, *, high: float) -> float | None:
    return value if type(value) in (int, float) and math.isfinite(value) and 0 <= value <= high else None


def member(kind: type[AnyEnum], value: Any) -> AnyEnum | None:
    if type(value) is kind:
        return value
    try:
        return kind(value) if isinstance(value, str) else None
    except ValueError:
        return None


def instant(value: Any) -> datetime | None:
    """Return the instant in UTC, or `None` without a zone or at a time at which no machine can have been rented."""
    if not isinstance(value, datetime):
        return None
    try:
        if value.utcoffset() is None:
            return None
        utc = value.astimezone(UTC)
    except (OverflowError, ValueError, TypeError):
        return None
    return utc if OLDEST <= utc <= NEWEST else None


def span_or_none(value: Any) -> timedelta | None:
    return value if isinstance(value, timedelta) and timedelta(0) <= value <= DURATION_MAX else None


def bounded(rows: Any, limit: int, *, what: str) -> tuple[list[Any], bool]:
    """Return the first rows of a list, and whether there were more.

    Raises:
        Malformed: it is no list.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise MalformedValue(f"{what}: not a list")
    found: list[Any] = []
    each: Iterator[Any] = iter(rows)
    found.extend(islice(each, limit))
    return found, len(found) == limit and next(each, END) is not END


END: Final = object()
