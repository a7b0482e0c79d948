"""A contract clock over trio's virtual time."""

from __future__ import annotations

from datetime import datetime, timedelta

import anyio

from tests.unit.core.builders import NOW


class VirtualClock:
    """Starts at NOW when first asked inside a run; `speed` virtual seconds pass for each second of the loop."""

    def __init__(self, *, speed: float = 1.0) -> None:
        self.speed = speed
        self._origin: float | None = None
        self.offset = timedelta(0)

    def now(self) -> datetime:
        if self._origin is None:
            self._origin = anyio.current_time()
        return NOW + self.offset + timedelta(seconds=(anyio.current_time() - self._origin) * self.speed)

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(self.real_seconds(duration))

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / self.speed
