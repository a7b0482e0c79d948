"""How much of a job one kind of machine does per hour, relative to a machine of speed 1.0.

Theory. A *kind* of machine is a GPU and a count of it. Two sources know its speed, in this order:

* `[speed]` of the job: throughput per GPU, so that a machine of four counts four times. A GPU that the table does not
  name counts like the slowest that it names.
* The pace of the job's own steps, once it was measured on two kinds at least. A kind that was not measured counts like
  the slowest that was, so that nothing unknown is preferred for its speed. Machines are not trusted: one kind counts at
  most `SPREAD` times as fast as another, whatever their hosts stated.

Where neither knows anything, every machine counts as one of speed 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from statistics import median_low
from typing import Final

from spotd.core.domain.gpu_names import resolve_gpu
from spotd.core.domain.jobs import Job, PaceSample
from spotd_jobs.spec.model import GpuSpeed
from spotd_providers.contract import gpus
from spotd_providers.contract.money import shares

PPM: Final = 1_000_000
SPREAD: Final = 4
"""How many times faster than another one kind of machine can count by steps that hosts stated."""
_HOUR: Final = timedelta(hours=1)
_TICK: Final = timedelta(microseconds=1)

Kind = tuple[str, int]
"""Canonical GPU and how many of it one machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speed of every kind of machine for one job, in millionths; equal values rank offers equally.

    Attributes:
        per_gpu: as the job states it.
        measured: of whole machines, by the pace of the job's own steps; empty where `per_gpu` is not.
    """

    per_gpu: tuple[GpuSpeed, ...] = ()
    measured: tuple[tuple[Kind, int], ...] = ()

    @property
    def is_known(self) -> bool:
        return bool(self.per_gpu or self.measured)

    def of(self, gpu: str, count: int) -> int:
        """Return the speed of a machine of this kind, in millionths; never 0."""
        if count <= 0:
            return PPM  # of machines without a GPU nothing is known
        if self.per_gpu:
            return max(1, _stated_ppm(self.per_gpu, gpu) * shares(count))
        if self.measured:
            found = dict(self.measured)
            return found.get((gpu, count), min(found.values()))
        return PPM

    def knows(self, gpu: str, count: int) -> bool:
        """Whether the speed of this very kind is stated or measured."""
        if self.per_gpu and count > 0:
            return _exact_ppm(self.per_gpu, gpu) is not None
        return any(kind == (gpu, count) for kind, _ in self.measured)


UNKNOWN: Final = Speeds()
"""Every machine counts as one of speed 1.0."""


def speeds_of(job: Job) -> Speeds:
    """Return what is known of the speed of machines for this job."""
    if job.spec.speed:
        return Speeds(per_gpu=job.spec.speed)
    if len(job.paces) < 2:
        return UNKNOWN
    return _measured(job.paces)


def machine_speed_ppm(job: Job, gpu: str, count: int) -> int:
    """Return the speed of a machine of this kind for the job, in millionths."""
    return speeds_of(job).of(gpu, count)


def paces_per_hour(samples: tuple[PaceSample, ...]) -> Mapping[Kind, int]:
    """Return the steps per hour of each kind that was measured: of several attempts the lower median, never 0."""
    found: dict[Kind, list[int]] = {}
    for one in samples:
        found.setdefault((one.gpu, one.gpu_count), []).append(pace_of(one))
    return {kind: median_low(paces) for kind, paces in sorted(found.items())}


def pace_of(sample: PaceSample) -> int:
    """Return the steps per hour of one attempt, never 0."""
    return max(1, sample.steps * (_HOUR // _TICK) // max(1, sample.span // _TICK))


@lru_cache(maxsize=1024)
def _measured(samples: tuple[PaceSample, ...]) -> Speeds:
    paces = paces_per_hour(samples)
    if len(paces) < 2:
        return UNKNOWN
    slowest = min(paces.values())
    return Speeds(measured=tuple((kind, min(pace * PPM // slowest, SPREAD * PPM)) for kind, pace in paces.items()))


def _stated_ppm(speeds: tuple[GpuSpeed, ...], gpu: str) -> int:
    found = _exact_ppm(speeds, gpu)
    return min(one.ppm for one in speeds) if found is None else found


@lru_cache(maxsize=4096)
def _exact_ppm(speeds: tuple[GpuSpeed, ...], gpu: str) -> int | None:
    """Return the speed that is stated for this GPU; of several names that mean it, the most exact one counts."""
    fitting = [(len(meant), one.ppm) for one in speeds if gpus.matches(meant := resolve_gpu(one.name), gpu)]
    return min(fitting)[1] if fitting else None
