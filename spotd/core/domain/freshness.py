"""The alarm for checkpoints that come later than the job states in `[checkpoint] every`.

Judged by a full read of what the host wrote, so that a checkpoint that is there is never missed, and by the smaller of
two spans: the daemon's own, and the host's. A computer that slept and a clock that was stepped cause no alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

LATE_AFTER: Final = 2
"""Intervals without a checkpoint."""
UPLOAD_TAKES: Final = timedelta(minutes=2)
"""To settle, and to arrive in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How old the newest checkpoint of an attempt is, or its command where it has none.

    Attributes:
        since: when the daemon took it in.
        up: for how long the host had run then, by its own steady clock.
        every: how often the job saves, as it states.
        late_at: when the alarm was raised; `None` while there is none.
    """

    since: datetime
    up: timedelta
    every: timedelta
    late_at: datetime | None = None


def due_after(every: timedelta) -> timedelta:
    """Return the age from which a checkpoint is late."""
    return LATE_AFTER * every + UPLOAD_TAKES


def is_due(known: Freshness, now: datetime) -> bool:
    """Whether the next checkpoint should have come by now, by the daemon's clock."""
    return now - known.since >= due_after(known.every)


def is_due_there(known: Freshness, up: timedelta) -> bool:
    """Whether the same is so by the host's clock."""
    ran = up - known.up
    # A runner that was started again counts from the beginning.
    return (ran if ran >= timedelta(0) else up) >= due_after(known.every)
