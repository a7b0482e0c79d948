"""Threads that give way to the training they serve."""

from __future__ import annotations

import os
import sys
import threading

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_BEST_EFFORT_LAST = (2 << 13) | 7
_NICE = 10


def be_lowkey() -> None:
    """The calling thread yields processor and disk to others, where the system lets single threads do so."""
    if not hasattr(threading, "get_native_id") or not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)  # on Linux this is one thread's own
        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None:
            import ctypes

            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, thread, _BEST_EFFORT_LAST)
    except (OSError, AttributeError):
        return  # it is only a courtesy
