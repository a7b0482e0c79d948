"""How much the GPUs of a machine are used, as its heartbeat states it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.ids import AttemptId
from spotd.daemon.hosts.monitor import HostMonitor

FRESH_FOR: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The mean over the GPUs of one machine, each from 0 to 1; `None` where unknown."""

    gpu: float | None = None
    memory: float | None = None


def use_of(hosts: HostMonitor, attempt: AttemptId, now: datetime) -> HostUse:
    """Return what the newest heartbeat states, as far as it does; nothing where it is old."""
    heartbeat, at = hosts.heartbeat(attempt), hosts.heartbeat_at(attempt)
    gpus = () if heartbeat is None or at is None or now - at > FRESH_FOR else heartbeat.gpus
    memory = [
        min(1.0, gpu.mem_used_mb / gpu.mem_total_mb) for gpu in gpus if gpu.mem_used_mb is not None and gpu.mem_total_mb
    ]
    return HostUse(gpu=_mean(gpu.util_pct / 100 for gpu in gpus if gpu.util_pct is not None), memory=_mean(memory))


def _mean(figures: Iterable[float]) -> float | None:
    found = list(figures)
    return sum(found) / len(found) if found else None
