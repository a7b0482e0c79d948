"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


class ManualClock:
    """Virtual time moved by hand; a real second lasts one virtual second."""

    def __init__(self, start: datetime = START, *, scale: float = 1.0) -> None:
        self.time = start
        self.scale = scale

    def now(self) -> datetime:
        return self.time

    def advance(self, duration: timedelta) -> datetime:
        self.time += duration
        return self.time

    async def sleep(self, duration: timedelta) -> None:
        self.time += duration

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / self.scale
