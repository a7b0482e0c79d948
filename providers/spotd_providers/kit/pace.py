"""Minimum intervals between calls of one kind, so that a provider's rate limit is never met by accident."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from random import Random
from typing import Final

import anyio

from spotd_providers.contract.errors import RateLimited
from spotd_providers.contract.provider import Clock

RETRY_AFTER_MAX: Final = timedelta(days=1)


def too_often(who: str, what: str, wait: timedelta, rng: Random) -> RateLimited:
    """Build the error of a 429 with its wait, bounded and with some jitter."""
    jitter = timedelta(seconds=0.1 + 0.4 * rng.random())
    return RateLimited(f"{who} is asked too often ({what})", retry_after=min(wait, RETRY_AFTER_MAX) + jitter)


class Rest:
    """A pause in which nothing is sent. A clock that is set back does not make it longer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted_at: datetime | None = None
        self._until: datetime | None = None

    def take(self, span: timedelta) -> None:
        """Start the pause now, or lengthen it to `span` from now."""
        now = self._clock.now()
        if self._until is None or self.left() < span:
            self._noted_at, self._until = now, now + span

    def left(self) -> timedelta:
        now = self._clock.now()
        if self._until is None or self._noted_at is None:
            return timedelta(0)
        if now < self._noted_at:
            self._until -= self._noted_at - now
            self._noted_at = now
        return max(timedelta(0), self._until - now)


class RequestPace:
    """At most one call per `interval` and endpoint; callers queue in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rests: dict[str, Rest] = {}
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def turn(self, endpoint: str, interval: timedelta) -> None:
        """Wait until a call to this endpoint is due."""
        async with self._locks[endpoint]:
            rest = self._rests.setdefault(endpoint, Rest(self._clock))
            if (left := rest.left()) > timedelta(0):
                await self._clock.sleep(left)
            rest.take(interval)

    def penalise(self, endpoint: str, wait: timedelta) -> None:
        """Delay the next call to this endpoint by at least `wait`."""
        self._rests.setdefault(endpoint, Rest(self._clock)).take(wait)
