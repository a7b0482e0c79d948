"""The range that values from outside are held to before they are added, multiplied or stored.

Theory. A host, a provider or a user can state any number. The parsers refuse most; whatever passes them is held here
to a range in which sums fit 64 bits and instants stay in the calendar. A value at its bound is wrong by little that
matters: no checkpoint is larger, no machine more expensive, no notice longer.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

BYTES_MAX: Final = 10**15
"""Ten times the largest checkpoint that is promised to work."""
MOVED_MAX: Final = 2**62
"""Bytes that one machine can have moved in all."""
MOVED_COST_MAX: Final = 10**15
"""Micro-dollars for them: a thousand million dollars."""
HOURLY_MAX: Final = 10**12
"""Micro-dollars per hour for one machine: a million dollars."""
COOLDOWN_MAX: Final = timedelta(hours=24)
NOTICE_PAST_MAX: Final = timedelta(days=1)
NOTICE_AHEAD_MAX: Final = timedelta(days=1)
_TICK: Final = timedelta(microseconds=1)
_TICKS_PER_HOUR: Final = timedelta(hours=1) // _TICK


def bytes_within(size: int) -> int:
    """Return the size, held to what a checkpoint can have."""
    return size if 0 <= size <= BYTES_MAX else min(max(size, 0), BYTES_MAX)


def hourly_within(amount: int) -> int:
    """Return the price per hour, held to what a machine can cost."""
    return amount if 0 <= amount <= HOURLY_MAX else min(max(amount, 0), HOURLY_MAX)


def per_hour(amount: int, span: timedelta) -> int:
    """Return an amount in each span as an amount per hour; in integers, which no size overflows."""
    return amount * _TICKS_PER_HOUR // max(1, span // _TICK)


def span_within(span: timedelta, most: timedelta) -> timedelta:
    """Return the span, neither negative nor longer than `most`."""
    return min(max(span, timedelta(0)), most)


def notice_within(at: datetime, now: datetime) -> datetime:
    """Return the instant of an interruption notice, close enough to now to be added to."""
    return min(max(at, now - NOTICE_PAST_MAX), now + NOTICE_AHEAD_MAX)
