"""Indexes of an array as people write them: `0-15`, `0-15:2`, `1,3,7`, and with `%4` how many run at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from spotd_jobs.spec.problems import BadValue

ARRAY_MAX: Final = 10_000
"""Jobs of one array."""
INDEX_MAX: Final = 999_999_999
NAME_MAX: Final = 63
ARRAY_HINT: Final = "write --array 0-15, 0-15:2, 1,3,7 or 0-99%4"
_PART: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.ASCII)
_AT_ONCE: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_TEXT_MAX: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayIndexes:
    """The indexes of an array, ascending, and how many of its jobs may run at once; `None` for no limit."""

    indexes: tuple[int, ...]
    at_once: int | None = None


def parse_array(text: str) -> ArrayIndexes:
    """Return the indexes that the text names.

    Raises:
        BadValue: it names none, too many, or one of them twice.
    """
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    listed, percent, most = text.strip().partition("%")
    if percent and not (_AT_ONCE.fullmatch(most) and int(most) > 0):
        raise BadValue(f'"{shown}" does not say behind % how many jobs run at once', hint=ARRAY_HINT)
    parts = listed.split(",") if len(text) <= _TEXT_MAX else []
    ranges = [_range(part.strip(), shown) for part in parts]
    count = sum(map(len, ranges))
    if not ranges or count > ARRAY_MAX:
        many = f"{count:,}" if ranges else "too many"
        raise BadValue(
            f'"{shown}" makes {many} jobs, and an array has at most {ARRAY_MAX:,}',
            hint="submit several arrays, or let each job do more",
        )
    indexes = sorted({index for some in ranges for index in some})
    if len(indexes) < count:
        raise BadValue(f'"{shown}" names an index twice', hint=ARRAY_HINT)
    return ArrayIndexes(indexes=tuple(indexes), at_once=int(most) if percent else None)


def _range(part: str, shown: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise BadValue(f'"{shown}" is not a list of indexes', hint=ARRAY_HINT)
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if step == 0 or last < first:
        raise BadValue(f'"{shown}" has a range without an index', hint=ARRAY_HINT)
    return range(first, last + 1, step)


def task_names(name: str, array: ArrayIndexes) -> tuple[str, ...]:
    """Return the names of the jobs of an array.

    Raises:
        BadValue: the longest is no name of a job.
    """
    longest = f"{name}-{array.indexes[-1]}"
    if len(longest) > NAME_MAX:
        raise BadValue(f"{longest} is longer than {NAME_MAX} characters", hint="give the job a shorter name")
    return tuple(f"{name}-{index}" for index in array.indexes)
