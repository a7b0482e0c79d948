"""Waiting for the real processes of machines, which are about to do what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests import waiting

T = TypeVar("T")


def until(condition: Callable[[], T], *, seconds: float = 20.0, what: str = "the condition") -> T:
    """The first true answer of `condition`; fails when there is none in time."""
    return waiting.until(condition, what, within=seconds, every=0.02)
