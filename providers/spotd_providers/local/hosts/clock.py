"""The time of hosts on this computer: virtual for prices and bills, real for the processes themselves.

`virtual = virtual0 + (real - real0) * scale`. The three parameters are written once to a `clock.json` and never
change, so that every process that reads the file speaks of the same instant, across restarts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from spotd_providers.kit.files import write_atomically

_READINGS: Final = 9


class HostClock(Protocol):
    """The part of `contract.provider.Clock` that hosts need."""

    def now(self) -> datetime: ...

    def real_seconds(self, duration: timedelta) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledClock:
    """A virtual clock that runs `scale` times as fast as the wall clock."""

    real0: float
    virtual0: datetime
    scale: float

    def now(self) -> datetime:
        return self.at_real(time.time())

    def at_real(self, epoch_s: float) -> datetime:
        """Convert a wall clock's time (say, the change time of a file) to virtual time."""
        return self.virtual0 + timedelta(seconds=(epoch_s - self.real0) * self.scale)

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / self.scale


REAL_TIME = ScaledClock(real0=0.0, virtual0=datetime(1970, 1, 1, tzinfo=UTC), scale=1.0)


def measure(clock: HostClock) -> ScaledClock:
    """Measure the parameters of any clock that runs evenly against the wall clock.

    The tightest of a few readings is taken: being descheduled between two reads is hours at a high scale.
    """
    an_hour = timedelta(hours=1)
    readings: list[tuple[float, float, datetime]] = []
    for _ in range(_READINGS):
        before = time.time()
        virtual = clock.now()
        after = time.time()
        readings.append((after - before, (before + after) / 2, virtual))
    _, real, virtual = min(readings)
    return ScaledClock(real0=real, virtual0=virtual, scale=an_hour.total_seconds() / clock.real_seconds(an_hour))


def write_clock(path: Path, clock: ScaledClock) -> None:
    """Write the clock's parameters to a `clock.json`."""
    content = {"real0": clock.real0, "virtual0": clock.virtual0.isoformat(), "scale": clock.scale}
    write_atomically(path, json.dumps(content))


def read_clock(path: Path) -> ScaledClock:
    """Read a `clock.json`.

    Raises:
        ValueError: the file does not hold one.
    """
    try:
        content = json.loads(path.read_text())
        clock = ScaledClock(
            real0=float(content["real0"]),
            virtual0=datetime.fromisoformat(content["virtual0"]),
            scale=float(content["scale"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{path} is no clock file: {exc}") from exc
    if clock.virtual0.tzinfo is None or not 0 < clock.scale < float("inf"):
        raise ValueError(f"{path} is no clock file: it needs a zone and a scale above 0")
    return clock


def real_now() -> datetime:
    """Return the wall clock's time, which processes on this computer compare with their own."""
    return datetime.now(UTC)
