"""What shows whether the job gets on: its output, writing in its checkpoint folder, and the use of its GPUs over time.

Counters, and not rates: two heartbeats show what lies between them, however far apart they are.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from spotd_jobs.wire.client.clocks import steady

_ENTRIES_MAX = 5000
_GAP_MAX_S = 60.0
"""A figure says nothing about more time than this."""


class ProgressMeter:
    """Counts from one heartbeat to the next.

    Args:
        printed: gives the bytes that the job has printed so far.
        folder: where its checkpoints appear.
    """

    def __init__(self, printed: Callable[[], int], folder: str) -> None:
        self._printed = printed
        self._folder = folder
        self._state: tuple[int, int, int] | None = None
        self._writes = 0
        self._read_at: float | None = None
        self._gpu_s = 0.0
        self._busy_s = 0.0
        self._has_figures = False

    def read(self, gpus: list[dict[str, Any]], *, runs: bool) -> dict[str, Any]:
        """Return the counters now.

        Args:
            gpus: the newest figures.
            runs: the job's command is running.
        """
        state = _state_of(self._folder)
        if self._state is not None and state != self._state:
            self._writes += 1
        self._state = state
        self._count_gpus(gpus if runs else [])
        return {
            "printed": self._printed(),
            "writes": self._writes,
            "gpu_s": round(self._gpu_s, 3) if self._has_figures else None,
            "gpu_busy_s": round(self._busy_s, 3) if self._has_figures else None,
        }

    def _count_gpus(self, gpus: list[dict[str, Any]]) -> None:
        now, before = steady(), self._read_at
        used = [row["util_pct"] for row in gpus if row.get("util_pct") is not None]
        self._read_at = now if used else None
        if not used:
            return
        self._has_figures = True
        if before is not None:
            span = min(max(0.0, now - before), _GAP_MAX_S)
            self._gpu_s += span
            self._busy_s += span * min(max(0.0, max(used)), 100.0) / 100.0


def _state_of(folder: str) -> tuple[int, int, int]:
    """Return what changes when something below the folder is written: entries, bytes, the newest change."""
    entries = size = newest = 0
    for place, folders, files in os.walk(folder):
        for name in files:
            try:
                facts = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            entries += 1
            size += facts.st_size
            newest = max(newest, facts.st_mtime_ns)
            if entries >= _ENTRIES_MAX:
                return entries, size, newest
        entries += len(folders)
        # What is written now is in the newest folder: a job that keeps much more than is read is seen to save, too.
        folders.sort(key=lambda name: _changed_ns(os.path.join(place, name)), reverse=True)
    return entries, size, newest


def _changed_ns(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0
