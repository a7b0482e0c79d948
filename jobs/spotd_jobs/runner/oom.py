"""Whether the kernel killed something of the job for want of memory, by whatever this machine lets be read.

The count of the own control group is best: a container's is its own, and it counts a worker that was killed while the
command itself ended with an ordinary exit code. Without it, a hard kill is searched for in the kernel's log, and
where even that is closed, a count of the whole machine that did not rise still proves that it was not the memory.
"""

from __future__ import annotations

import os
from typing import Sequence

from spotd_jobs.runner.process import ProcessEnd

_V2 = "/sys/fs/cgroup%s/memory.events"
_V1 = "/sys/fs/cgroup/memory%s/memory.oom_control"
_WHOLE_MACHINE = "/proc/vmstat"
_KERNEL_LOG = "/dev/kmsg"
_KILLED = b"Killed process"
_RECORDS_MAX = 100_000
_RECORD_BYTES = 8192


class OomWatch:
    """Counts from when it is made."""

    def __init__(
        self, groups: Sequence[str] | None = None, machine: str = _WHOLE_MACHINE, log: str = _KERNEL_LOG
    ) -> None:
        self._groups = _own_groups() if groups is None else groups
        self._machine = machine
        self._in_group = _first_count(self._groups)
        self._in_machine = _first_count([machine])
        self._log = _open_at_end(log)

    def happened(self, ended: ProcessEnd) -> bool | None:
        """`None`: the job was killed hard and nothing here shows by what."""
        if ended.succeeded:
            return False
        now = _first_count(self._groups)
        if now is not None and self._in_group is not None:
            return now > self._in_group
        if not ended.killed_hard:
            return False
        if self._log is not None:
            return _shows_a_kill(self._log)
        now = _first_count([self._machine])
        return False if now is not None and now == self._in_machine else None


def _own_groups() -> list[str]:
    """Where this process's control group counts, most specific first; in a container its own is often the root."""
    places = []
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as stream:
            for line in stream:
                _, controllers, path = line.strip().split(":", 2)
                if not controllers:
                    places.append(_V2 % path.rstrip("/"))
                elif "memory" in controllers.split(","):
                    places.append(_V1 % path.rstrip("/"))
    except (OSError, ValueError):
        places = []
    return [*places, _V2 % "", _V1 % ""]


def _first_count(places: Sequence[str]) -> int | None:
    for place in places:
        try:
            with open(place, encoding="ascii", errors="replace") as stream:
                for line in stream:
                    word, _, number = line.partition(" ")
                    if word == "oom_kill":
                        return int(number)
        except (OSError, ValueError):
            continue
    return None


def _open_at_end(log: str) -> int | None:
    """Open the kernel's log after its last record; `None` where it may not be read."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def _shows_a_kill(descriptor: int) -> bool:
    for _ in range(_RECORDS_MAX):
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return False  # that was the last one
        except BrokenPipeError:
            continue  # records were overwritten before they were read
        except OSError:
            return False
        if not record:
            return False
        if _KILLED in record:
            return True
    return False
