"""Moments at which a process can die, named so that tests can go through all of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class StorePoint(StrEnum):
    """A moment right after what its name states."""

    MIGRATION_BEGUN = "migration.begun"
    MIGRATION_STEP = "migration.step"
    MIGRATION_COMMITTED = "migration.committed"
    BEGUN = "begun"
    JOBS = "jobs"
    ATTEMPTS = "attempts"
    CHECKPOINTS = "checkpoints"
    INTENTS = "intents"
    COOLDOWNS = "cooldowns"
    CHARGES = "charges"
    EVENTS = "events"
    COMMITTED = "committed"


AtPoint = Callable[[StorePoint], None]


def pass_on(_point: StorePoint) -> None:
    """Do nothing at any point: what production uses."""
