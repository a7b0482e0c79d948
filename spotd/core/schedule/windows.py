"""Weekly windows as spans between instants, correct where clocks are changed.

Theory. A window is two times of local clocks on a day. Each is turned into one instant, by one rule for both: of a time
that clocks show twice, the first; for one that they skip, the instant at which they skip it. This keeps the order of
times, so windows that touch still touch, none opens twice for one begin, and a window that is skipped as a whole is
empty. A window over a change is an hour longer or shorter than its times say.

What is searched is bounded: so many days ahead, whatever the rules of a zone do. Rules of zones are data of the
computer, read once for each name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from spotd_jobs.spec.model import Window

DAY: Final = timedelta(days=1)
BEFORE: Final = 3
"""Days before an instant on which a window that is open at it can have begun: a day may be skipped as a whole."""
AHEAD: Final = 23
"""Days that are searched for the next window. In one week a change of clocks may skip the only one; the next has it."""
ALWAYS: Final = timedelta(days=15)
"""A span as long as this has no end: in two weeks every time of a week comes that clocks do not skip."""
_YEARS: Final = range(2, 9990)
"""Of which days before and after can be counted."""


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A time in which windows are open; `closes` is `None` where no end is known."""

    opens: datetime
    closes: datetime | None

    def left(self, at: datetime) -> timedelta:
        """Return how long it stays open from this instant on, or from its begin."""
        return timedelta.max if self.closes is None else self.closes - max(self.opens, at)


def zone_of(name: str | None) -> ZoneInfo | None:
    """Return the rules of a zone, `None` where this computer does not know it."""
    try:
        return ZoneInfo(name or "UTC")
    except (KeyError, ValueError, OSError):
        return None


def open_spans(windows: tuple[Window, ...], zone: ZoneInfo, at: datetime) -> tuple[OpenSpan, ...]:
    """Return the spans that end after this instant, in order, none of which touches the next."""
    if at.year not in _YEARS:
        return ()
    spans = _spans_around(windows, zone, at.astimezone(zone).date())
    return tuple(span for span in spans if span.closes is None or span.closes > at)


@lru_cache(maxsize=4096)
def _spans_around(windows: tuple[Window, ...], zone: ZoneInfo, today: date) -> tuple[OpenSpan, ...]:
    days = [today + offset * DAY for offset in range(-BEFORE, AHEAD)]
    found = [_span_on(window, zone, day) for day in days for window in windows if day.weekday() in window.days]
    joined: list[tuple[datetime, datetime]] = []
    for opens, closes in sorted(span for span in found if span[0] < span[1]):
        if joined and opens <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(closes, joined[-1][1]))
        else:
            joined.append((opens, closes))
    return tuple(OpenSpan(opens, None if closes - opens >= ALWAYS else closes) for opens, closes in joined)


def _span_on(window: Window, zone: ZoneInfo, day: date) -> tuple[datetime, datetime]:
    midnight = datetime.combine(day, time())
    opens, closes = (midnight + timedelta(minutes=minutes) for minutes in (window.start_min, window.end_min))
    return instant_of(opens, zone), instant_of(closes if closes > opens else closes + DAY, zone)


def instant_of(local: datetime, zone: ZoneInfo) -> datetime:
    """Return when clocks of the zone show this time first, or when they skip it."""
    first, last = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first <= last:
        return first
    # Skipped: the offset from before the change puts it behind the change, the one from after it before the change.
    before = last.astimezone(zone).utcoffset()
    while first - last > timedelta(seconds=1):
        middle = last + (first - last) // 2
        if middle.astimezone(zone).utcoffset() == before:
            last = middle
        else:
            first = middle
    return first.replace(microsecond=0)
