"""The order in which processes were started, which their numbers do not tell: these begin anew at some point."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def oldest_first(pids: Iterable[int]) -> list[int]:
    """Return these processes as they were started; those that have ended come last."""
    return sorted(pids, key=lambda pid: (_started(pid), pid))


def _started(pid: int) -> int:
    """When it was started, in ticks since the computer's start (`proc(5)`, field 22)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize
