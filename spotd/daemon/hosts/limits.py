"""What one host may cost the daemon: its share of a read, and its ration of lines in the job's history.

Theory. Everything a host writes is an untrusted host's choice: how many manifests, how large, how often. A read
therefore spends a bounded number of bytes, documents and seconds on each host and goes on where it stopped the next
time, and each host may cause so many events at once and then only a few in an hour; the rest becomes one line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

MANIFESTS_PER_READ: Final = 16
BYTES_PER_READ: Final = 32 * 1024 * 1024
LARGE: Final = 1024 * 1024
"""A manifest beyond this takes a while to parse, so one of them is read of each host at a time."""
SECONDS_PER_READ: Final = 2.0
LINES_AT_ONCE: Final = 50
LINES_PER_HOUR: Final = 6
KINDS_MAX: Final = 32


class HostShare:
    """What one read may spend on one host.

    Args:
        ticks: a clock that only goes forward, in seconds.
        over: whether the read of all hosts has run out of time.
    """

    def __init__(
        self,
        *,
        ticks: Callable[[], float] = time.monotonic,
        over: Callable[[], bool] = lambda: False,
        seconds: float = SECONDS_PER_READ,
    ) -> None:
        self._ticks = ticks
        self._over = over
        self._until = ticks() + seconds
        self._has_begun = False
        self._documents = 0
        self._bytes = 0
        self._large = 0
        self.is_spent = False
        """Something was left for the next read."""

    def has_time(self) -> bool:
        """Whether this read may go on; one thing is always done, so that each read comes further than the last."""
        if self._has_begun and (self._over() or self._ticks() >= self._until):
            self.is_spent = True
        self._has_begun = True
        return not self.is_spent

    def take(self, size: int) -> bool:
        """Whether a document of so many bytes may be read now."""
        large = int(size > LARGE)
        fits = self._documents == 0 or (
            self._documents < MANIFESTS_PER_READ
            and self._bytes + size <= BYTES_PER_READ
            and self._large + large <= 1
            and self.has_time()
        )
        if not fits:
            self.is_spent = True
            return False
        self._documents += 1
        self._bytes += size
        self._large += large
        return True


@dataclass(slots=True)
class HostRation:
    """How many lines of each kind one host may add to its job's history."""

    _left: dict[str, float] = field(default_factory=dict)
    _at: dict[str, datetime] = field(default_factory=dict)
    _folded: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, at: datetime) -> bool:
        """Whether one more line of this kind may be added; else it is counted."""
        if kind not in self._left and len(self._left) >= KINDS_MAX:
            kind = "others"
        since = max(timedelta(0), at - self._at.get(kind, at))
        earned = since / timedelta(hours=1) * LINES_PER_HOUR
        left = min(float(LINES_AT_ONCE), self._left.get(kind, LINES_AT_ONCE) + earned)
        self._at[kind] = max(at, self._at.get(kind, at))
        if left < 1:
            self._left[kind] = left
            self._folded[kind] += 1
            return False
        self._left[kind] = left - 1
        return True

    def folded(self, at: datetime, *, is_end: bool = False) -> list[str]:
        """Return the lines for what was only counted, each at its turn, or all of them at the end."""
        lines = []
        for kind, count in sorted(self._folded.items()):
            if is_end or self._is_due(kind, at):
                lines.append(f"and {count:,} more of this kind: {kind}")
                del self._folded[kind]
        return lines

    def _is_due(self, kind: str, at: datetime) -> bool:
        """Whether a line of this kind was not added within the last hour."""
        key = f"folded {kind}"
        if key in self._at and at - self._at[key] < timedelta(hours=1):
            return False
        self._at[key] = at
        return True
