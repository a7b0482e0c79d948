"""Weekly windows and time zones as people write them, to exact values and back.

`Mon-Fri 22:00-08:00` begins on each of these days at 22:00 and ends on the day after at 08:00; days alone are whole
days; times alone are of every day. All times are those of the clocks in the job's time zone.
"""

from __future__ import annotations

import re
from typing import Final

from spotd_jobs.spec.fields import kind, shown
from spotd_jobs.spec.model import Window
from spotd_jobs.spec.problems import BadValue, nearest

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY_MINUTES: Final = 24 * 60
WINDOW_HINT: Final = 'write windows = ["Mon-Fri 22:00-08:00", "Sat,Sun"]'
ZONE_HINT: Final = 'write timezone = "Europe/Kyiv", or "UTC"'
_FULL_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NUMBER_OF_DAY: Final = {name.lower(): number for names in (DAYS, _FULL_DAYS) for number, name in enumerate(names)}
_WINDOW: Final = re.compile(r"\s*(?P<days>[A-Za-z][A-Za-z,\s-]*?)?\s*(?P<times>[0-9][0-9:\s-]*)?\s*")
_TIMES: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})\s*-\s*([0-9]{1,2}):([0-9]{2})\s*")
_ZONE: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_NO_ZONES_HINT: Final = "install the time zones of this computer (on Debian and Ubuntu: apt-get install tzdata)"
_TEXT_MAX: Final = 100


def parse_window(value: object) -> Window:
    """Return the window that a text like `Mon-Fri 22:00-08:00` names.

    Raises:
        BadValue: neither days nor times, an unknown day, a time that no clock shows, or no time between the two.
    """
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)}", hint=WINDOW_HINT)
    match = _WINDOW.fullmatch(value) if len(value) <= _TEXT_MAX else None
    if match is None or not (match["days"] or match["times"]):
        raise BadValue(f"{shown(value)} is not a window of days and times", hint=WINDOW_HINT)
    days = _days(value, match["days"]) if match["days"] else tuple(range(7))
    start, end = _times(value, match["times"]) if match["times"] else (0, DAY_MINUTES)
    return Window(days=days, start_min=start, end_min=end)


def _days(value: str, text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        begin = _day(value, first)
        count = (_day(value, last) - begin) % 7 if dash else 0
        found.update((begin + further) % 7 for further in range(count + 1))
    return tuple(sorted(found))


def _day(value: str, name: str) -> int:
    number = _NUMBER_OF_DAY.get(name.lower())
    if number is not None:
        return number
    match = nearest(name, (*DAYS, *_FULL_DAYS)) if name else None
    hint = f'did you mean "{match}"?' if match else f"the days are {', '.join(DAYS)}"
    raise BadValue(f'{shown(value)} names "{name}", which is no day of the week', hint=hint)


def _times(value: str, text: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(text)
    if match is None:
        raise BadValue(f"{shown(value)} has no time from and to", hint="write the times as 22:00-08:00")
    start, end = (60 * int(match[n]) + int(match[n + 1]) for n in (1, 3))
    minutes = (int(match[2]), int(match[4]))
    if max(minutes) > 59 or end > DAY_MINUTES or start >= DAY_MINUTES:
        raise BadValue(
            f"{shown(value)} has a time that no clock shows", hint="a window begins at 00:00 to 23:59 and ends by 24:00"
        )
    if start == end:
        raise BadValue(f"{shown(value)} ends when it begins", hint="the whole day is 00:00-24:00")
    return start, end


def window_words(window: Window) -> str:
    """Return the window as a job file has it."""
    days = "" if len(window.days) == 7 else ",".join(_day_words(window.days))
    if (window.start_min, window.end_min) == (0, DAY_MINUTES):
        return days or "Mon-Sun"
    times = f"{_time_words(window.start_min)}-{_time_words(window.end_min)}"
    return f"{days} {times}" if days else times


def _day_words(days: tuple[int, ...]) -> list[str]:
    """Return the days, where three or more that follow each other are one entry."""
    runs: list[list[int]] = []
    for day in days:
        if runs and day == runs[-1][-1] + 1:
            runs[-1].append(day)
        else:
            runs.append([day])
    found: list[str] = []
    for run in runs:
        names = [DAYS[day % 7] for day in run]
        found += [f"{names[0]}-{names[-1]}"] if len(names) > 2 else names
    return found


def _time_words(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def parse_zone(value: object) -> str:
    """Return the name of a time zone that this computer knows.

    Raises:
        BadValue: with the zone that was most likely meant.
    """
    # Only jobs with windows pay for it: `spotctl` starts without.
    from zoneinfo import ZoneInfo, available_timezones

    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)}", hint=ZONE_HINT)
    if len(value) <= _TEXT_MAX and _ZONE.fullmatch(value):
        try:
            ZoneInfo(value)
        except (KeyError, ValueError, OSError):
            pass  # a name that is none, or that of a folder of names
        else:
            return value
    known = available_timezones()
    if not known:
        raise BadValue(f"{shown(value)} cannot be checked: this computer knows no time zones", hint=_NO_ZONES_HINT)
    same_city = sorted(name for name in known if name.rpartition("/")[2].lower() == value.lower().replace(" ", "_"))
    match = same_city[0] if same_city else nearest(value[:_TEXT_MAX], known)
    hint = f'did you mean "{match}"?' if match else ZONE_HINT
    raise BadValue(f"{shown(value)} is not a time zone that this computer knows", hint=hint)
