"""How much the GPUs of a machine are used, as its heartbeat states it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotd_jobs.wire.reports import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The mean over the GPUs of one machine, each from 0 to 1; `None` where unknown."""

    gpu: float | None = None
    memory: float | None = None


def use_of(heartbeat: Heartbeat | None) -> HostUse:
    """Return what the heartbeat states, as far as it does."""
    gpus = () if heartbeat is None else heartbeat.gpus
    memory = [
        min(1.0, gpu.mem_used_mb / gpu.mem_total_mb) for gpu in gpus if gpu.mem_used_mb is not None and gpu.mem_total_mb
    ]
    return HostUse(gpu=_mean(gpu.util_pct / 100 for gpu in gpus if gpu.util_pct is not None), memory=_mean(memory))


def _mean(figures: Iterable[float]) -> float | None:
    found = list(figures)
    return sum(found) / len(found) if found else None
