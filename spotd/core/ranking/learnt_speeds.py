"""Speeds of GPUs as earlier jobs and the markets measured them, for a job that states `[work]` and no `[speed]`.

Theory. The steps of two jobs have no common unit, nor have a job and a benchmark. What can be carried from one to
another is a ratio: how many times the steps of one GPU another GPU made, in the same job. So each job that ran on two
GPUs is one *comparison*, and so are the scores of one market's machines, and each of its tests. From a GPU of reference
others are reached over comparisons, those with the most comparisons first: the median of the ratios counts, of two in
the middle the one nearer to 1. Jobs count before markets, since their work is more like the work that is to be done
than any benchmark is.

The first kind of machine that the job names and that was compared has speed 1.0, with all its GPUs: what `[work] time`
says of a job without `[speed]` is its time there, as it is where nothing was learnt.

Bounds. Steps are a host's word. A ratio counts only once `JOBS_MIN` jobs showed it, and each with `SPREAD` at the most;
an array has one vote, and jobs of agents have none. A score counts only where `HOSTS_MIN` machines of its GPU state
one. The job's own steps count before all of this, and no ceiling or budget rests on a speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite, log
from statistics import median_low
from typing import Final

from spotd.core.domain.jobs import PaceSample
from spotd.core.domain.market import MarketSnapshot, resolve_gpu
from spotd.core.ranking.remaining_work import PPM, SPREAD, pace_of
from spotd_jobs.spec.model import GpuAlternative, GpuSpeed, JobSpec
from spotd_providers.contract import gpus
from spotd_providers.contract.values import NO_GPU, shares

JOBS_READ: Final = 200
"""The newest jobs with steps that are compared."""
JOBS_MIN: Final = 2
HOSTS_MIN: Final = 3
SPEEDS_MAX: Final = 24
_SCORE_SPREAD: Final = 64
"""No market's benchmark counts one GPU as more than so many times as fast as another."""

Comparison = Mapping[str, float]
"""What each GPU did in one unit, by canonical name: more is faster, and only the ratio of two has a meaning."""


def is_asked(spec: JobSpec) -> bool:
    """Whether this job is ranked by speeds that others measured."""
    return not spec.speed and (spec.work.time is not None or spec.work.steps is not None)


def learnt_speeds(spec: JobSpec, paces: Iterable[Sequence[PaceSample]], market: MarketSnapshot) -> tuple[GpuSpeed, ...]:
    """Return the speed of one GPU of each kind that the job admits and that can be compared; empty if none can.

    Args:
        paces: of other jobs, what their steps show.
    """
    jobs = [found for one in paces if len(found := _of_job(one)) > 1]
    markets = [found for found in _of_markets(market) if len(found) > 1]
    wanted = spec.resources.gpu
    reference, count = _reference(wanted, [*jobs, *markets])
    if not count:
        return ()
    known = {reference: 1.0}
    while len(known) < SPEEDS_MAX:
        step = _next(known, jobs, JOBS_MIN, SPREAD) or _next(known, markets, 1, _SCORE_SPREAD)
        if step is None:
            break
        known[step[0]] = step[1]
    admitted = [name for name in sorted(known) if any(gpus.matches(resolve_gpu(one.name), name) for one in wanted)]
    if len(admitted) < 2:
        return ()
    return tuple(GpuSpeed(name=name, ppm=max(1, round(known[name] * PPM / count))) for name in admitted)


def _of_job(samples: Sequence[PaceSample]) -> Comparison:
    """Return the steps per hour and GPU on each GPU; of several attempts the lower median."""
    found: dict[str, list[float]] = {}
    for one in samples:
        if one.gpu != NO_GPU:
            found.setdefault(one.gpu, []).append(pace_of(one) / shares(one.gpu_count))
    return {gpu: median_low(paces) for gpu, paces in found.items()}


def _of_markets(market: MarketSnapshot) -> Iterable[Comparison]:
    """Yield what each provider measured: in each of its tests, and the lower median of the scores of its machines."""
    for known in market.by_provider.values():
        tests: dict[str, dict[str, float]] = {}
        for one in known.benchmarks:
            tests.setdefault(one.test, {})[one.gpu] = one.score
        yield from tests.values()
        scores: dict[str, dict[str, float]] = {}
        for offer in chain.from_iterable(known.offer_index.by_gpu.values()):
            score = offer.speed_score
            if score is not None and isfinite(score) and score > 0 and offer.gpu_count > 0:
                hosts = scores.setdefault(offer.gpu, {})
                hosts[offer.host_id or offer.offer_id] = score / offer.gpu_count
        yield {gpu: median_low(hosts.values()) for gpu, hosts in scores.items() if len(hosts) >= HOSTS_MIN}


def _reference(wanted: Iterable[GpuAlternative], comparisons: Sequence[Comparison]) -> tuple[str, int]:
    """Return the GPU and count of the first kind that is wanted and was compared; a count of 0 where none was."""
    often: dict[str, int] = {}
    for one in comparisons:
        for gpu in one:
            often[gpu] = often.get(gpu, 0) + 1
    order = sorted(often, key=lambda gpu: (-often[gpu], gpu))
    for kind in wanted:
        meant = resolve_gpu(kind.name)
        for gpu in order:
            if gpus.matches(meant, gpu):
                return gpu, shares(kind.count)
    return "", 0


def _next(
    known: Mapping[str, float], comparisons: Collection[Comparison], least: int, spread: int
) -> tuple[str, float] | None:
    """Return the unknown GPU that most comparisons connect with known ones, and its speed; `None` without any."""
    speeds: dict[str, list[float]] = {}
    for one in comparisons:
        bases = [(one[gpu], speed) for gpu, speed in known.items() if gpu in one]
        for gpu, pace in one.items():
            if bases and gpu not in known:
                speeds.setdefault(gpu, []).append(
                    _median([speed * min(max(pace / base, 1 / spread), spread) for base, speed in bases])
                )
    found = [(-len(ratios), gpu, ratios) for gpu, ratios in speeds.items() if len(ratios) >= least]
    if not found:
        return None
    _, gpu, ratios = min(found, key=lambda one: one[:2])
    return gpu, _median(ratios)


def _median(ratios: Sequence[float]) -> float:
    """Return the median; of two in the middle the one nearer to 1, so that one word against another moves least."""
    ordered, half = sorted(ratios), len(ratios) // 2
    return min(ordered[half - 1 + len(ratios) % 2 : half + 1], key=lambda ratio: abs(log(ratio)))
