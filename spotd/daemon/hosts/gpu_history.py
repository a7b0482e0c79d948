"""The use of one host's GPUs over time, as its heartbeats stated it. It is only shown, and lost with the process."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from spotd_jobs.wire.reports import Gpu

SAMPLES_MAX: Final = 120
"""When so many are kept, every second is dropped and half as many are taken: four kilobytes a host, however long."""
_WIDTH: Final = 4
_NOTHING: Final = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """All GPUs of a host at one instant: their mean use and the sum of their memory; `None` where nothing is stated."""

    at: datetime
    util_pct: float | None
    mem_used_mb: float | None
    mem_total_mb: float | None


@dataclass(slots=True)
class GpuHistory:
    """Samples from the first heartbeat to the newest, at about equal distances."""

    _values: array[float] = field(default_factory=lambda: array("d"))
    _every_s: float = 0.0

    def take(self, gpus: Sequence[Gpu], at: datetime) -> None:
        """Take in what the newest heartbeat states, unless it comes too soon after the last sample."""
        now = at.timestamp()
        if not gpus or (self._values and now - self._values[-_WIDTH] < self._every_s):
            return
        used = [gpu.util_pct for gpu in gpus if gpu.util_pct is not None]
        row = (now, sum(used) / len(used) if used else _NOTHING, _sum(g.mem_used_mb for g in gpus))
        self._values.extend((*row, _sum(g.mem_total_mb for g in gpus)))
        if len(self._values) >= SAMPLES_MAX * _WIDTH:
            rows = [self._values[i : i + _WIDTH] for i in range(0, len(self._values), 2 * _WIDTH)]
            self._every_s = (now - self._values[0]) / len(rows)
            self._values = array("d", [value for kept in rows for value in kept])

    def samples(self) -> Iterator[GpuSample]:
        """Yield them, oldest first."""
        for i in range(0, len(self._values), _WIDTH):
            at, util, used, total = self._values[i : i + _WIDTH]
            yield GpuSample(
                at=datetime.fromtimestamp(at, tz=UTC),
                util_pct=_known(util),
                mem_used_mb=_known(used),
                mem_total_mb=_known(total),
            )


def _sum(values: Iterator[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) if known else _NOTHING


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
