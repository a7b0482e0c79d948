"""Whether a path, or the target of a link, stays below the folder it is relative to."""

from __future__ import annotations


def is_plain(path: str) -> bool:
    """Whether no part of the path is empty, `.` or `..`, so that it leads down and nowhere else."""
    return not any(part in ("", ".", "..") for part in path.split("/"))


def climb(target: str) -> tuple[int, list[str]]:
    """How many levels the target of a link climbs at its beginning, and the parts that follow."""
    parts = target.split("/")
    count = 0
    while count < len(parts) and parts[count] == "..":
        count += 1
    return count, parts[count:]
