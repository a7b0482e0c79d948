"""How this process uses its memory: one pool of the C library for all threads, and few searches for garbage.

glibc gives each of the first threads that allocate at once a pool of its own and returns little of it: up to four
megabytes of a daemon, whose threads mostly wait. Of the one pool it gives back by itself only what is free at the end,
so that one small block that stays keeps all that was free before it, and the process grows although what it uses does
not. Large blocks are not for the pool, but glibc takes ever larger ones from there once such a one was freed.

A start makes a few hundred thousand objects, modules above all, of which next to none is garbage: searching for some
again and again is a tenth of its processor time. Afterwards Python would search all that ever lived for some once a
quarter is new, as after each write of all jobs' signs of life: a third of a second with 10,000 of them, in which
nothing else runs, for some hundred objects. Young garbage is searched for as ever.
"""

from __future__ import annotations

import gc
from typing import Final

_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
"""`mallopt(3)`, glibc's `malloc.h`."""
LARGE_BYTES: Final = 128 * 1024
"""Blocks from this size on are the kernel's again as soon as they are free; where glibc begins by itself."""
GIVE_BACK_EVERY_S: Final = 60.0
"""What becomes free in between is the bound of what is kept for nothing. A call takes a few milliseconds."""
SEARCH_EVERY: Final = 10
"""How often memory is given back until all is searched for garbage."""
_NEVER: Final = 2**31 - 1


def share_one_pool() -> None:
    """Let all threads allocate from one pool, but for large blocks, where the C library knows of that.

    To be called before any thread.
    """
    try:
        import ctypes

        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    except (ImportError, OSError, AttributeError, TypeError):
        pass  # another C library; only memory is lost


def give_back() -> None:
    """Return every free page of the pool to the kernel, where the C library can."""
    try:
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)
    except (ImportError, OSError, AttributeError, TypeError):
        pass  # another C library; only memory is lost


def search() -> None:
    """Free what old garbage there is."""
    gc.collect()


def postpone_gc() -> None:
    """Collect nothing until `begin_gc`. To be called before the daemon is imported."""
    gc.disable()


def begin_gc() -> None:
    """Do once what `postpone_gc` put off, and from then on leave out what the start has left: that stays.

    Old garbage is from then on freed by `search` only.
    """
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        gc.enable()
