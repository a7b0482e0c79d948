"""Minimum intervals between calls of one kind, so that a provider's rate limit is never met by accident."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

import anyio

from spotd_providers.contract.provider import Clock


class Pace:
    """At most one call per `interval` and endpoint; callers queue in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_at: dict[str, datetime] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def turn(self, endpoint: str, interval: timedelta) -> None:
        """Returns when a call to this endpoint is due."""
        async with self._locks[endpoint]:
            now = self._clock.now()
            due = self._next_at.get(endpoint, now)
            if due > now:
                await self._clock.sleep(due - now)
            self._next_at[endpoint] = max(due, now) + interval

    def penalise(self, endpoint: str, wait: timedelta) -> None:
        """The next call to this endpoint is at least `wait` away."""
        until = self._clock.now() + wait
        self._next_at[endpoint] = max(self._next_at.get(endpoint, until), until)
