"""One pool of memory of the C library for all threads.

glibc gives each of the first threads that allocate at once a pool of its own and returns little of it: up to four
megabytes of a daemon, whose threads mostly wait.
"""

from __future__ import annotations

from typing import Final

_M_ARENA_MAX: Final = -8
"""`mallopt(3)`, glibc's `malloc.h`."""


def share_one_pool() -> None:
    """Let all threads allocate from one pool, where the C library knows of that. To be called before any thread."""
    try:
        import ctypes

        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    except (ImportError, OSError, AttributeError, TypeError):
        pass  # another C library; only memory is lost
