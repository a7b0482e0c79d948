"""How much of a job one kind of machine does per hour, relative to a machine of speed 1.0.

Theory. A *kind* of machine is a GPU and a count of it. Three sources know its speed, in this order:

* `[speed]` of the job: throughput per GPU, so that a machine of four counts four times. A GPU that the table does not
  name counts like the slowest that it names.
* The pace of the job's own steps, once it was measured on two kinds at least. A kind that was not measured counts like
  the slowest that was, so that nothing unknown is preferred for its speed. Machines are not trusted: one kind counts at
  most `SPREAD` times as fast as another, whatever their hosts stated.
* What earlier jobs and the markets measured per GPU (`learnt_speeds`). Once the own pace is known as well, it is
  brought to the unit of what was learnt: the unit of work stays the same. A kind then counts at most `SPREAD` times as
  fast or as slow as was learnt, and one that was only learnt never faster than the fastest that the job ran on.

Where neither knows anything, every machine counts as one of speed 1.0.

Speeds that are learnt, for a job that states `[work]` and no `[speed]`: the steps of two jobs have no common unit, nor
have a job and a benchmark. What can be carried from one to another is a ratio: how many times the steps of one GPU
another GPU made, in the same job. So each job that ran on two GPUs is one *comparison*, and so are the scores of one
market's machines, and each of its tests. From a GPU of reference others are reached over comparisons, those with the
most comparisons first: the median of the ratios counts, of two in the middle the one nearer to 1. Jobs count before
markets, since their work is more like the work that is to be done than any benchmark is.

The first kind of machine that the job names and that was compared has speed 1.0, with all its GPUs: what `[work] time`
says of a job without `[speed]` is its time there, as it is where nothing was learnt.

Steps are a host's word. A ratio counts only once `JOBS_MIN` jobs showed it, and each with `SPREAD` at the most; an
array has one vote, and jobs of agents have none. A score counts only where `HOSTS_MIN` machines of its GPU state one.
The job's own steps count before all of this, and no ceiling or budget rests on a speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from math import isfinite, log
from statistics import median_low
from typing import Final

from spotd.core.domain import lineage
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Checkpoint, Job, PaceSample
from spotd.core.domain.market import MarketSnapshot, resolve_gpu
from spotd.core.metering import metered_until
from spotd_jobs.spec.model import GpuAlternative, GpuSpeed, JobSpec
from spotd_providers.contract import gpus
from spotd_providers.contract.values import NO_GPU, shares

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
        per_gpu: as the job states it, or else as others measured it.
        measured: of whole machines, by the pace of the job's own steps; empty where the job states speeds.
        is_learnt: whether `per_gpu` is what others measured.
    """

    per_gpu: tuple[GpuSpeed, ...] = ()
    measured: tuple[tuple[Kind, int], ...] = ()
    is_learnt: bool = False

    @property
    def is_known(self) -> bool:
        return bool(self.per_gpu or self.measured)

    def of(self, gpu: str, count: int) -> int:
        """Return the speed of a machine of this kind, in millionths; never 0."""
        if count <= 0:
            return PPM  # of machines without a GPU nothing is known
        found = dict(self.measured)
        if (gpu, count) in found:
            return found[gpu, count]
        if found and not (self.per_gpu and _exact_ppm(self.per_gpu, gpu)):
            return min(found.values())
        stated = max(1, _stated_ppm(self.per_gpu, gpu) * shares(count)) if self.per_gpu else PPM
        return min(stated, max(found.values(), default=stated))

    def knows(self, gpu: str, count: int) -> bool:
        """Whether the speed of this very kind is stated or measured."""
        if any(kind == (gpu, count) for kind, _ in self.measured):
            return True
        return bool(self.per_gpu) and count > 0 and _exact_ppm(self.per_gpu, gpu) is not None


UNKNOWN: Final = Speeds()
"""Every machine counts as one of speed 1.0."""


def speeds_of(job: Job) -> Speeds:
    """Return what is known of the speed of machines for this job."""
    if job.spec.speed:
        return Speeds(per_gpu=job.spec.speed)
    if len(job.paces) < 2 and not job.learnt:
        return UNKNOWN
    return _speeds_of(job.paces, job.learnt or ())


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


def _speeds_of(samples: tuple[PaceSample, ...], learnt: tuple[GpuSpeed, ...]) -> Speeds:
    if len({(one.gpu, one.gpu_count) for one in samples}) < 2:
        return Speeds(per_gpu=learnt, is_learnt=bool(learnt))
    return _speeds_of_kinds(samples, learnt)


@lru_cache(maxsize=1024)
def _speeds_of_kinds(samples: tuple[PaceSample, ...], learnt: tuple[GpuSpeed, ...]) -> Speeds:
    """Return the speeds of several kinds; what is remembered of ended jobs would be most of it with one kind, too."""
    others, paces = Speeds(per_gpu=learnt, is_learnt=bool(learnt)), paces_per_hour(samples)
    if not learnt:
        slowest = min(paces.values())
        return Speeds(measured=tuple((kind, min(pace * PPM // slowest, SPREAD * PPM)) for kind, pace in paces.items()))
    unit = median_low(others.of(*kind) / pace for kind, pace in paces.items())
    found = ((kind, others.of(*kind), round(pace * unit)) for kind, pace in paces.items())
    return replace(
        others,
        measured=tuple((kind, max(1, known // SPREAD, min(own, known * SPREAD))) for kind, known, own in found),
    )


def _stated_ppm(speeds: tuple[GpuSpeed, ...], gpu: str) -> int:
    found = _exact_ppm(speeds, gpu)
    return min(one.ppm for one in speeds) if found is None else found


@lru_cache(maxsize=4096)
def _exact_ppm(speeds: tuple[GpuSpeed, ...], gpu: str) -> int | None:
    """Return the speed that is stated for this GPU; of several names that mean it, the most exact one counts."""
    fitting = [(len(meant), one.ppm) for one in speeds if gpus.matches(meant := resolve_gpu(one.name), gpu)]
    return min(fitting)[1] if fitting else None


# What is left of a job: in time on a machine of speed 1.0, and on a given kind of machine.
#
# Theory. Only what a checkpoint holds is done, since everything else is lost with its machine. Two figures say how much
# that is. Each checkpoint carries the *work* in it (`Checkpoint.worked`): that of the checkpoint from which its attempt
# resumed, and the time for which the attempt's command had run when it was saved, times the speed of its machine. And
# it may carry a step. So:
#
#     left by time  = [work] time - work in the checkpoint that the next attempt begins with
#     left by steps = ([work] steps - step of that checkpoint) / pace
#
# where the pace is steps per hour as the job's own attempts showed it, or [work] steps / [work] time before any did.
# Steps count where they are given. Nothing is known without `[work]`, or with steps alone before the first pace.
#
# Bounds. The instants are the daemon's, or held to the span in which the daemon knows the command to have run. Steps
# are a host's word and cannot be checked. An attempt is believed at most `BELIEVED` times as many steps as the pace
# of the job's other attempts makes in its time, or as [work] states where there is no other; of several paces the
# lower median counts. The most that a wrong figure does is that this job ranks machines by up to `SPREAD`
# (`machine_speed`), or that it is believed to be nearly done: the estimate then reads 0 and the job runs on. No
# budget or ceiling rests on it.


BELIEVED: Final = 4
"""How many times the pace of the job's other attempts one attempt is believed at most."""
PACE_SPAN_MIN: Final = timedelta(minutes=1)
"""A shorter run shows no pace."""
SAMPLES_MAX: Final = 32
"""So many attempts are remembered for the pace."""
STEPS_BOUND: Final = 10**15
LEFT_MAX: Final = timedelta(days=36_500)


class WorkSource(StrEnum):
    """What an estimate rests on."""

    STATED_TIME = "[work] time"
    STEPS = "steps of its checkpoints"
    STATED_PACE = "[work] steps and time"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """What is left of a job.

    Attributes:
        time: on a machine of speed 1.0; 0 where the estimate is used up although the job goes on.
    """

    time: timedelta
    source: WorkSource


def remaining_work(job: Job) -> RemainingWork | None:
    """Return what is left from the checkpoint with which the next attempt begins; `None` where it is not known."""
    plan = job.spec.work
    if plan.steps is not None:
        found = _left_by_steps(job, plan.steps)
        if found is not None:
            return found
    if plan.time is None:
        return None
    return RemainingWork(time=max(timedelta(0), plan.time - saved_work(job)), source=WorkSource.STATED_TIME)


def remaining_on(job: Job, gpu: str, count: int) -> timedelta | None:
    """Return how long the command still runs on a machine of this kind, without any start; `None` if not known."""
    left = remaining_work(job)
    if left is None:
        return None
    return time_on(job, left, gpu, count)


def time_on(job: Job, left: RemainingWork, gpu: str, count: int) -> timedelta:
    """Return how long so much work takes on a machine of this kind."""
    return _scale(left.time, PPM / machine_speed_ppm(job, gpu, count))


def saved_work(job: Job) -> timedelta:
    """Return the work in the checkpoint with which the next attempt begins, on a machine of speed 1.0."""
    order = _restore_order(job)
    return next((saved.worked for saved in order if saved.worked is not None), timedelta(0))


def unsaved_work(job: Job, item: Attempt, now: datetime) -> timedelta:
    """Return the work of this attempt, on a machine of speed 1.0, that its loss now would repeat."""
    span, offer = lineage.unsaved_time(job, item, metered_until(item.meter, now)), item.quote.offer
    return _scale(span, machine_speed_ppm(job, offer.gpu, offer.gpu_count) / PPM)


def with_work(job: Job, item: Attempt, fresh: Collection[Checkpoint], now: datetime) -> tuple[Checkpoint, ...]:
    """Return fresh checkpoints of this attempt with the work that each holds, where the job's owner states any."""
    if job.spec.work.time is None:
        return tuple(fresh)
    source = lineage.source_of(job, item)
    before = timedelta(0) if source is None or source.worked is None else source.worked
    speed = machine_speed_ppm(job, item.quote.offer.gpu, item.quote.offer.gpu_count)
    return tuple(
        replace(one, worked=min(LEFT_MAX, before + _scale(_ran(item, one, now), speed / PPM))) for one in fresh
    )


def with_pace(job: Job, item: Attempt, fresh: Collection[Checkpoint], now: datetime) -> Job:
    """Return the job with what these checkpoints of the attempt show about the pace of its steps."""
    stepped = [one for one in fresh if one.step is not None and 0 <= one.step <= STEPS_BOUND]
    newest = max(stepped, key=lambda one: (one.at, one.step or 0), default=None)
    if newest is None or newest.step is None:
        return job
    steps = newest.step - _first_step(job, item)
    span = _ran(item, newest, now)
    if steps <= 0 or span < PACE_SPAN_MIN:
        return job
    offer = item.quote.offer
    sample = PaceSample(
        attempt=item.id.number, gpu=offer.gpu, gpu_count=offer.gpu_count, steps=min(steps, STEPS_BOUND), span=span
    )
    others = [one for one in job.paces if one.attempt != item.id.number]
    return replace(job, paces=(*others, sample)[-SAMPLES_MAX:])


def _ran(item: Attempt, saved: Checkpoint, now: datetime) -> timedelta:
    """For how long the attempt's command had run when this was saved, as far as something proves it."""
    if item.running_at is None:
        return timedelta(0)
    at = min(saved.at, metered_until(item.meter, now))
    return max(timedelta(0), at - item.running_at)


def _first_step(job: Job, item: Attempt) -> int:
    source = lineage.source_of(job, item)
    return 0 if source is None or source.step is None else source.step


def _restore_order(job: Job) -> list[Checkpoint]:
    return lineage.restore_order(job.checkpoints, lineage.doubts_allowed(job))


def _left_by_steps(job: Job, total: int) -> RemainingWork | None:
    left = max(0, total - _steps_done(job))
    pace = _pace_at_speed_one(job)
    if pace is not None:
        return RemainingWork(time=_scale(_HOUR, left / pace), source=WorkSource.STEPS)
    if job.spec.work.time is None:
        return None
    return RemainingWork(time=_scale(job.spec.work.time, left / total), source=WorkSource.STATED_PACE)


def _steps_done(job: Job) -> int:
    """Return the step of the checkpoint with which the next attempt begins, as far as it is believed."""
    for saved in _restore_order(job):
        if saved.step is not None:
            return max(0, min(saved.step, STEPS_BOUND) - _beyond_belief(job, saved.attempt))
    return 0


def _beyond_belief(job: Job, number: int) -> int:
    """Return how many steps of this attempt, and of those before it, are more than it can have made."""
    doubted = 0
    for one in job.paces:
        pace = _believed_pace(job, one)
        if one.attempt <= number and pace is not None:
            doubted += max(0, one.steps - BELIEVED * pace * max(1, one.span // timedelta(seconds=1)) // 3600)
    return doubted


def _believed_pace(job: Job, sample: PaceSample) -> int | None:
    """Return the pace of the job's other attempts, brought to this kind of machine; else the one that is stated."""
    states_speed = bool(job.spec.speed)
    own = machine_speed_ppm(job, sample.gpu, sample.gpu_count) if states_speed else PPM
    others = [
        pace_of(one) * own // (machine_speed_ppm(job, one.gpu, one.gpu_count) if states_speed else PPM)
        for one in job.paces
        if one.attempt != sample.attempt
    ]
    if others:
        return max(1, median_low(others))
    work = job.spec.work
    if work.steps is None or work.time is None:
        return None
    return max(1, int(work.steps * (_HOUR / work.time)) * own // PPM)


def _pace_at_speed_one(job: Job) -> int | None:
    """Return the steps per hour on a machine of speed 1.0; `None` before any attempt showed its pace."""
    paces = paces_per_hour(job.paces)
    if not paces:
        return None
    return max(1, median_low([pace * PPM // machine_speed_ppm(job, *kind) for kind, pace in paces.items()]))


def _scale(span: timedelta, factor: float) -> timedelta:
    """Return so many times the span, held to what an instant can be moved by."""
    return timedelta(hours=min(span / _HOUR * factor, LEFT_MAX / _HOUR))


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
