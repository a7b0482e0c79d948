"""How many requests one provider gets, so that a person can hold it against the provider's limits."""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta
from typing import Final

HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)
SAMPLES_MAX: Final = 4_000
"""More than an hour's polls at the shortest pace; older ones leave first."""


class RequestCounts:
    """The counts of the last hour, from samples of a number that only rises while the provider is open."""

    def __init__(self) -> None:
        self._samples: deque[tuple[datetime, int]] = deque(maxlen=SAMPLES_MAX)
        self._since: datetime | None = None
        self._before = 0

    def note(self, total: int, *, at: datetime) -> None:
        """So many requests were sent since the provider was opened."""
        sent = total - self._before if total >= self._before else total
        self._before = total
        if self._since is None:
            self._since = at
        if self._samples and at < self._samples[-1][0]:
            # The clock was set back: what was counted before cannot be dated any more.
            self._samples.clear()
            self._since = at
        self._samples.append((at, sent))
        while self._samples and at - self._samples[0][0] >= HOUR:
            self._samples.popleft()

    @property
    def total(self) -> int:
        """Return the requests since the provider was opened."""
        return self._before

    def last_minute(self, now: datetime) -> int:
        """Return the requests of the last minute."""
        return sum(sent for at, sent in self._samples if now - at < MINUTE)

    def per_hour(self, now: datetime) -> int:
        """Return the requests of the last hour; before one has passed, as many as there would be at the pace so far."""
        counted = sum(sent for at, sent in self._samples if now - at < HOUR)
        if self._since is None or now - self._since >= HOUR:
            return counted
        return round(counted * (HOUR / max(now - self._since, MINUTE)))
