"""Weekly hours as users write them in settings: when a machine is its owner's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

HOURS_HINT: Final = 'write them like ["Mon-Fri 08:00-18:00", "Sat"]'
_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW: Final = re.compile(
    r"(?:(?P<days>[a-z]{3}(?:-[a-z]{3})?(?:, ?[a-z]{3}(?:-[a-z]{3})?)*) ?)?"
    r"(?:(?P<start>\d?\d:\d\d)-(?P<end>\d?\d:\d\d))?"
)
_DAY: Final = timedelta(days=1)
_AHEAD_DAYS: Final = 9
"""A week and the days at its ends, whatever the zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeeklyHours:
    """Windows of weekdays, begin and end by the clocks of a zone; one that ends by its begin ends the next day."""

    windows: tuple[tuple[frozenset[int], time, time], ...]
    zone: tzinfo

    def next_begin(self, now: datetime) -> datetime | None:
        """Return when they begin next: `now` inside of them, `None` where there are none."""
        today = now.astimezone(self.zone).date()
        found: list[datetime] = []
        for day in (today + days * _DAY for days in range(-1, _AHEAD_DAYS)):
            for weekdays, start, end in self.windows:
                if day.weekday() not in weekdays:
                    continue
                begin = min(self._instants(day, start))
                last = day + _DAY if end <= start else day
                if begin <= now < max(self._instants(last, end)):
                    return now
                if begin > now:
                    found.append(begin)
        return min(found, default=None)

    def _instants(self, day: date, at: time) -> tuple[datetime, datetime]:
        """Return when a clock shows this time, which may be twice, or never: then as if it were not set, and after."""
        first, second = (datetime.combine(day, at.replace(fold=fold), tzinfo=self.zone) for fold in (0, 1))
        return first.astimezone(UTC), second.astimezone(UTC)


def weekly_hours(texts: Sequence[str], zone: str) -> WeeklyHours:
    """Parse windows and the name of their time zone.

    Raises:
        ValueError: they are not written so, or this computer knows no such zone.
    """
    try:
        where: tzinfo = UTC if zone == "UTC" else ZoneInfo(zone)
    except (ValueError, OSError, ZoneInfoNotFoundError) as exc:
        raise ValueError(f"{zone!r} is no time zone that this computer knows") from exc
    return WeeklyHours(windows=tuple(_window(text) for text in texts), zone=where)


def _window(text: str) -> tuple[frozenset[int], time, time]:
    parts = _WINDOW.fullmatch(" ".join(text.lower().split()))
    if parts is None or not any(parts.groups()):
        raise ValueError(HOURS_HINT)
    try:
        start, end = (time.fromisoformat((parts[name] or "00:00").zfill(5)) for name in ("start", "end"))
        return _weekdays((parts["days"] or "mon-sun").replace(" ", "").split(",")), start, end
    except ValueError as exc:
        raise ValueError(HOURS_HINT) from exc


def _weekdays(parts: Sequence[str]) -> frozenset[int]:
    days: set[int] = set()
    for part in parts:
        first, _, last = part.partition("-")
        begin = _DAYS.index(first)
        span = (_DAYS.index(last or first) - begin) % 7
        days.update((begin + step) % 7 for step in range(span + 1))
    return frozenset(days)
