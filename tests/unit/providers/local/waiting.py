"""Waiting for real processes: until a condition holds, with a deadline, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], *, seconds: float = 20.0, what: str = "the condition") -> T:
    """The first true answer of `condition`; fails when there is none in time."""
    give_up_at = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.02)
