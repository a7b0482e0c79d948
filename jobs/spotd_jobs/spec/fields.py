"""Converters for single values and a reader for tables of them, which collects every problem it meets.

By hand and not with pydantic, for two reasons: `spotctl` parses job files and must not pay for importing pydantic,
and each message is written for the person who made that very mistake.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final, TypeVar

from spotd_jobs.spec.model import Deadline, Window
from spotd_jobs.spec.problems import BadValue, Problem, key_path, nearest, unknown_keys
from spotd_jobs.spec.units import UnitError, format_duration, parse_duration

T = TypeVar("T")
D = TypeVar("D")
E = TypeVar("E", bound=StrEnum)
Convert = Callable[[object], T]

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED_PREFIX: Final = "SPOTD_"


def kind(value: object) -> str:
    """Return what a person would call this value."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return "a date or time"


def shown(value: object, *, length_max: int = 60) -> str:
    """Return the value as TOML would spell it, cut short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= length_max else text[: length_max - 3] + "..."


def text(*, length_max: int, example: str, pattern: str | None = None, rule: str = "") -> Convert[str]:
    """Return a converter for text that is not blank, holds no NUL and matches the pattern; `rule` describes it."""

    def convert(value: object) -> str:
        if not isinstance(value, str):
            raise BadValue(f"must be text, not {kind(value)}", hint=f"write {example}")
        if not value.strip():
            raise BadValue("must not be empty", hint=f"write {example}")
        if "\0" in value:
            raise BadValue("must not hold a NUL character", hint=f"write {example}")
        if len(value) > length_max:
            raise BadValue(f"is longer than {length_max} characters", hint=f"write {example}")
        if pattern is not None and not re.fullmatch(pattern, value):
            raise BadValue(f"{shown(value)} {rule}", hint=f"write {example}")
        return value

    return convert


def integer(*, least: int, most: int, example: str) -> Convert[int]:
    """Return a converter for a whole number within bounds."""

    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            wrong = f"{shown(value)} is not a whole number" if isinstance(value, float | str) else f"is {kind(value)}"
            raise BadValue(f"must be a whole number: {wrong}", hint=f"write {example}")
        if not least <= value <= most:
            raise BadValue(f"{shown(value)} is not between {least} and {most}", hint=f"write {example}")
        return value

    return convert


def truth(*, example: str) -> Convert[bool]:
    """Return a converter for true or false."""

    def convert(value: object) -> bool:
        if not isinstance(value, bool):
            raise BadValue(f"must be true or false, not {shown(value)}", hint=f"write {example}")
        return value

    return convert


def fraction(*, example: str) -> Convert[float]:
    """Return a converter for a number from 0 to 1."""

    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadValue(f"must be a number from 0 to 1, not {shown(value)}", hint=f"write {example}")
        if not 0 <= value <= 1:
            per_cent = f"; {shown(value)} percent is {value / 100:g}" if 1 < value <= 100 else ""
            raise BadValue(f"{shown(value)} is not between 0 and 1", hint=f"write {example}{per_cent}")
        return float(value)

    return convert


def choice(members: type[E]) -> Convert[E]:
    """Return a converter for one member of a closed set."""
    names = [str(member) for member in members]

    def convert(value: object) -> E:
        if isinstance(value, str) and value in names:
            return members(value)
        match = nearest(value, names) if isinstance(value, str) else None
        hint = f'did you mean "{match}"?' if match else "write one of them"
        raise BadValue(f"must be one of {', '.join(names)}, not {shown(value)}", hint=hint)

    return convert


def bounded(convert: Convert[T], *, least: T, most: T, words: str) -> Convert[T]:
    """Return the converter, refusing what lies outside; `words` names both bounds."""

    def within(value: object) -> T:
        result = convert(value)
        if not least <= result <= most:  # type: ignore[operator]  # T is only ever an ordered type here
            raise BadValue(f"{shown(value)} is not between {words}", hint="choose a value within these bounds")
        return result

    return within


def env_name(value: object) -> str:
    """Return the name of an environment variable that the job may choose itself.

    Raises:
        BadValue: not a portable name, or one of those that spotd sets.
    """
    if not isinstance(value, str) or not _ENV_NAME.fullmatch(value):
        raise BadValue(
            f"{shown(value)} is not a name for an environment variable",
            hint="use letters, digits and _, not starting with a digit, as in WANDB_API_KEY",
        )
    if value.upper().startswith(_RESERVED_PREFIX):
        raise BadValue(f"{value} is set by spotd itself", hint="choose a name that does not start with SPOTD_")
    return value


class Table:
    """One table of a file while it is read: every value goes through a converter, every problem is kept."""

    def __init__(self, data: Mapping[str, object], path: tuple[str | int, ...], problems: list[Problem]) -> None:
        self._data = data
        self._path = path
        self._problems = problems

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def report(self, key: str | int | tuple[str | int, ...], message: str, hint: str) -> None:
        """Keep a problem of a key of this table."""
        parts = key if isinstance(key, tuple) else (key,)
        self._problems.append(Problem(key=key_path((*self._path, *parts)), message=message, hint=hint))

    def required(self, key: str, hint: str) -> None:
        """Keep a problem if the key is absent."""
        if key not in self._data:
            self.report(key, "is missing", hint)

    def take(self, key: str, convert: Convert[T], default: T) -> T:
        """Return the converted value; `default` where the key is absent or, with a problem kept, wrong."""
        if key not in self._data:
            return default
        return self._convert((key,), self._data[key], convert, default)

    def take_list(
        self, key: str, convert: Convert[T], *, count_min: int = 0, count_max: int, example: str, lone: bool = False
    ) -> tuple[T, ...]:
        """Each element converted; those that are wrong are left out with a problem kept.

        `lone` permits a single value in place of a list of one.
        """
        if key not in self._data:
            return ()
        value = self._data[key]
        if lone and isinstance(value, str):
            value = [value]
            places: list[tuple[str | int, ...]] = [(key,)]
        elif isinstance(value, list | tuple):
            places = [(key, index) for index in range(len(value))]
        else:
            self.report(key, f"must be a list, not {kind(value)}", f"write {example}")
            return ()
        if not count_min <= len(value) <= count_max:
            wrong = "must not be empty" if not value else f"has more than {count_max} entries"
            self.report(key, wrong, f"write {example}")
            return ()
        results: list[T] = []
        for place, item in zip(places, value, strict=True):
            result = self._convert(place, item, convert, None)
            if result in results:
                self.report(place, f"{shown(item)} is given twice", "remove one of them")
            elif result is not None:
                results.append(result)
        return tuple(results)

    def take_env(self, key: str, *, count_max: int, length_max: int) -> tuple[tuple[str, str], ...]:
        """Return a table of environment variables as sorted pairs."""
        value = self._data.get(key, {})
        if not isinstance(value, Mapping):
            self.report(key, f"must be a table, not {kind(value)}", 'write env = { HF_HOME = "/workspace/hf" }')
            return ()
        if len(value) > count_max:
            self.report(key, f"has more than {count_max} variables", "put them into a file that `setup` reads")
            return ()
        pairs = []
        for name, content in value.items():
            if self._convert((key, name), name, env_name, None) is None:
                continue
            if not isinstance(content, str):
                spelled = shown(content)
                self.report(
                    (key, name), f"must be text, not {kind(content)}", f'put it in quotes: {name} = "{spelled}"'
                )
            elif "\0" in content or len(content) > length_max:
                self.report((key, name), f"holds a NUL or is longer than {length_max} characters", "shorten it")
            else:
                pairs.append((name, content))
        return tuple(sorted(pairs))

    def take_numbers(
        self, key: str, *, least: float, most: float, count_max: int, name_pattern: str, example: str
    ) -> tuple[tuple[str, float], ...]:
        """Return a table of numbers within bounds as sorted pairs."""
        value = self._data.get(key, {})
        if not isinstance(value, Mapping):
            self.report(key, f"must be a table, not {kind(value)}", f"write {example}")
            return ()
        if len(value) > count_max:
            self.report(key, f"has more than {count_max} entries", "name only what the job may run on")
            return ()
        pairs = []
        for name, number in value.items():
            if not re.fullmatch(name_pattern, name):
                self.report((key, name), f"{shown(name)} is not a name that can stand here", f"write {example}")
            elif isinstance(number, bool) or not isinstance(number, int | float):
                self.report((key, name), f"must be a number, not {kind(number)}", f"write {example}")
            elif not least <= number <= most:  # a NaN is within no bounds
                self.report((key, name), f"{shown(number)} is not between {least:g} and {most:g}", f"write {example}")
            else:
                pairs.append((name, float(number)))
        return tuple(sorted(pairs))

    def table(self, key: str, *, example: str) -> Table:
        """Return the table below `key`; an empty one if it is absent or, with a problem kept, no table."""
        value = self._data.get(key, {})
        if not isinstance(value, Mapping):
            self.report(key, f"must be a table, not {kind(value)}", f"write {example}")
            value = {}
        return Table(value, (*self._path, key), self._problems)

    def tables(self, key: str, *, count_max: int, example: str) -> list[Table]:
        """Return the tables of an array of tables; none if it is absent or, with a problem kept, none."""
        value = self._data.get(key, [])
        if not isinstance(value, list | tuple):
            self.report(key, f"must be a list of tables, not {kind(value)}", f"write {example}")
            return []
        if len(value) > count_max:
            self.report(key, f"has more than {count_max} entries", "put several folders into one")
            return []
        for index, one in enumerate(value):
            if not isinstance(one, Mapping):
                self.report((key, index), f"must be a table, not {kind(one)}", f"write {example}")
        return [
            Table(one, (*self._path, key, index), self._problems)
            for index, one in enumerate(value)
            if isinstance(one, Mapping)
        ]

    def refuse_unknown(self, known: Collection[str], *, elsewhere: Mapping[str, str]) -> None:
        """Every key that is not among the known ones is reported with the one that was most likely meant.

        `elsewhere` gives the full path of keys that belong into another table.
        """
        self._problems += unknown_keys(self._data, known, self._path, elsewhere=elsewhere)

    def _convert(self, place: tuple[str | int, ...], value: object, convert: Convert[T], default: D) -> T | D:
        try:
            return convert(value)
        except BadValue as exc:
            self.report(place, str(exc), exc.hint)
            return default


# Weekly windows and time zones as people write them, to exact values and back.
#
# `Mon-Fri 22:00-08:00` begins on each of these days at 22:00 and ends on the day after at 08:00; days alone are whole
# days; times alone are of every day. All times are those of the clocks in the job's time zone.


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


# Deadlines as people write them, to exact values and back: a span from the submission, or an instant with its zone.


DEADLINE_HINT: Final = 'write deadline = "36h", or an instant with its zone: deadline = 2026-11-24T08:00:00+02:00'
SPAN_MIN: Final = timedelta(minutes=1)
LATEST: Final = datetime(2100, 1, 1, tzinfo=UTC)
_INSTANT: Final = re.compile(r"\s*[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ].*)?")
_DEADLINE_TEXT_MAX: Final = 64


def parse_deadline(value: object) -> Deadline:
    """Return the deadline that a text like `36h` or `2026-11-24T08:00+02:00` names.

    Raises:
        BadValue: neither of them, an instant without a zone, or one that no job can mean.
    """
    if isinstance(value, datetime):
        return Deadline(at=_utc_within(value, value.isoformat()))
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)}", hint=DEADLINE_HINT)
    if len(value) <= _DEADLINE_TEXT_MAX and _INSTANT.fullmatch(value):
        try:
            at = datetime.fromisoformat(value.strip().upper())
        except ValueError as exc:
            raise BadValue(f"{shown(value)} is no instant that a calendar has", hint=DEADLINE_HINT) from exc
        return Deadline(at=_utc_within(at, value))
    try:
        span = parse_duration(value)
    except UnitError as exc:
        raise BadValue(str(exc), hint=DEADLINE_HINT) from exc
    if span < SPAN_MIN:
        raise BadValue(f"{shown(value)} is shorter than a minute", hint=DEADLINE_HINT)
    return Deadline(span=span)


def _utc_within(at: datetime, written: str) -> datetime:
    if at.tzinfo is None:
        raise BadValue(f"{shown(written)} has no time zone", hint=DEADLINE_HINT)
    try:
        at = at.astimezone(UTC)
    except OverflowError as exc:
        raise BadValue(f"{shown(written)} is no instant that a calendar has", hint=DEADLINE_HINT) from exc
    if at >= LATEST:
        raise BadValue(f"{shown(written)} is after {LATEST:%Y}: no job waits so long", hint="leave the deadline out")
    return at


def deadline_words(deadline: Deadline | None) -> str | None:
    """Return the deadline as a job file has it."""
    if deadline is None:
        return None
    if deadline.at is not None:
        return deadline.at.isoformat()
    return None if deadline.span is None else format_duration(deadline.span)
