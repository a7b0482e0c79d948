"""Garbage collection around the start of a daemon.

A start makes a few hundred thousand objects, modules above all, and next to none of them is garbage: searching for some
again and again is a tenth of its processor time.
"""

from __future__ import annotations

import gc


def postpone() -> None:
    """Collect nothing until `begin`. To be called before the daemon is imported."""
    gc.disable()


def begin() -> None:
    """Do once what `postpone` put off, and from then on leave out what the start has left: that stays."""
    if not gc.isenabled():
        gc.collect()
        gc.freeze()
        gc.enable()
