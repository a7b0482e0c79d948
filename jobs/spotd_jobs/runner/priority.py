"""Threads that give way to the training they serve.

No thread can be relied on to get back what it gave up (a container's root may not even leave `SCHED_IDLE` again): when
an upload becomes more urgent, it is new threads that carry it on.
"""

from __future__ import annotations

import enum
import os
import sys
import threading

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_BEST_EFFORT_LAST = (2 << 13) | 7
_NICE = 10


class Priority(enum.IntEnum):
    """How far a thread gives way to all others of the machine."""

    NOT = 0
    MOSTLY = 1
    """It gets about a tenth of what a thread of the training gets on the same processor."""
    WHOLLY = 2
    """It gets what no other process uses, and three thousandths of a processor that is never idle."""


def lower_priority(how: Priority) -> None:
    """Let the calling thread yield processor and disk so far, where the system lets single threads do so."""
    if how is Priority.NOT or not hasattr(threading, "get_native_id") or not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)  # on Linux this is one thread's own
        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None:
            import ctypes

            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, thread, _BEST_EFFORT_LAST)
        if how is Priority.WHOLLY:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        return  # it is only a courtesy
