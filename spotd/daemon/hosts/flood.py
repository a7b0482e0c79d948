"""Limits on how much a host writes: its write permission limits the size of an object at most, never their number.

Theory. A host that fills the store harms no data, only the bill. So it is enough to count seldom: everything below an
attempt's own prefix is listed every few minutes at most, and the listing ends where a limit is passed, which bounds
what a count can cost. What is billed is counted: every version of an object that was written over, and the parts of
uploads that were never completed. An attempt that is past a limit is ended with a reason of its own, its grant is
withdrawn instead of renewed, and its write permission is revoked where the store can do that.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectStore

_DAY: Final = timedelta(days=1)
_LOGS: Final = "log/"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodLimits:
    """What one attempt may have written for each day, or part of one, that it has lasted; `[store]` in the config.

    Attributes:
        bytes_day: as much as a line of 1 Gbit/s carries in a day.
        log_bytes_day: more than twice what a runner of ours sends.
        audit_every: of the wall clock.
    """

    objects_day: int = 1_000_000
    bytes_day: int = 11 * 1000**4
    log_bytes_day: int = 1000**3
    audit_every: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one host wrote: the bytes, and what of it is too much, in words; empty while it is within its limits."""

    bytes: int
    flood: str


def count(objects: ObjectStore, attempt: Attempt, limits: FloodLimits, *, at: datetime) -> Count:
    """Count what the host wrote, up to the first limit that it is past.

    Raises:
        StoreError
    """
    days = max(1, -(-(at - attempt.intended_at) // _DAY))
    prefix = object_keys.prefix_of(attempt.id)
    size = logs = 0
    for number, info in enumerate(objects.stored(prefix), start=1):
        size += info.size
        if info.key.startswith(_LOGS, len(prefix)):
            logs += info.size
        for what, found, limit in (
            ("objects", number, limits.objects_day),
            ("bytes", size, limits.bytes_day),
            ("bytes of logs", logs, limits.log_bytes_day),
        ):
            if found > limit * days:
                words = f"more than {limit * days} {what} in {days} day{'s' if days > 1 else ''}"
                return Count(bytes=size, flood=words)
    return Count(bytes=size, flood="")
