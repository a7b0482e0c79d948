"""Which of a job's `outputs` patterns match no file that was stored.

A pattern matches as the runner matches it: part by part as a shell would, `**` over any number of folders, a hidden
name only where the pattern writes the dot; a folder stands for all that is below it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from typing import Final

_EVERYWHERE: Final = "**"


def unmatched_patterns(patterns: Iterable[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return the patterns that match none of these paths, in their order."""
    split = [path.split("/") for path in paths]
    return tuple(
        pattern
        for pattern in patterns
        if (parts := [part for part in pattern.split("/") if part not in ("", ".")])
        and not any(_matches(parts, path) for path in split)
    )


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    *folders, file = path
    places = _with_empty(pattern, {0})
    for name in folders:
        places = _with_empty(pattern, _after(pattern, places, name))
        if len(pattern) in places:
            return True
    return len(pattern) in _after(pattern, places, file)


def _after(pattern: Sequence[str], places: set[int], name: str) -> set[int]:
    """Return the places in the pattern that are reached by one more part of the path."""
    reached: set[int] = set()
    for at in places:
        if at == len(pattern):
            continue
        part = pattern[at]
        if part == _EVERYWHERE:
            if not name.startswith("."):
                reached |= {at, at + 1} if at == len(pattern) - 1 else {at}
        elif (not name.startswith(".") or part.startswith(".")) and fnmatch.fnmatchcase(name, part):
            reached.add(at + 1)
    return reached


def _with_empty(pattern: Sequence[str], places: set[int]) -> set[int]:
    """Return the same with those that `**` reaches by standing for nothing."""
    found = set(places)
    for at in sorted(places):
        while at < len(pattern) and pattern[at] == _EVERYWHERE:
            at += 1
            found.add(at)
    return found
