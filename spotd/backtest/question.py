"""What one back-test plays: a job, a recording, ceilings and policies, and the instants at which it is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Final

from spotd.backtest.model import Assumptions
from spotd.backtest.recorded import RecordedMarket
from spotd.backtest.refusals import BacktestRefused
from spotd_jobs.spec.model import Deadline, JobSpec, PolicyName, PriceLimit, WatchdogPolicy
from spotd_providers.contract import gpus

ROOM: Final = 2
"""A start leaves the job so many times its work until the record ends, where the record is long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestCase:
    """One row of the result."""

    policy: str
    ceiling: PriceLimit

    @property
    def limit(self) -> int:
        """Micro-dollars per hour, of a GPU or of the machine."""
        return self.ceiling.per_gpu_hour or self.ceiling.machine_hour or 0

    @property
    def is_per_gpu(self) -> bool:
        return self.ceiling.per_gpu_hour is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a result follows from."""

    spec: JobSpec
    recorded: RecordedMarket
    cases: Sequence[BacktestCase]
    starts: Sequence[int]
    terms: Assumptions
    deadline: timedelta | None = None

    def spec_for(self, case: BacktestCase) -> JobSpec:
        """Return the job as it is submitted in this case."""
        spec = self.spec
        work = spec.work
        if self.deadline is not None:
            work = replace(work, time=timedelta(seconds=self.terms.work_s), steps=None)
        deadline = None if self.deadline is None else Deadline(span=self.deadline)
        return replace(
            spec,
            price=case.ceiling,
            checkpoint=replace(spec.checkpoint, every=timedelta(seconds=self.terms.every_s)),
            schedule=replace(spec.schedule, deadline=deadline, policy=PolicyName(case.policy), after=(), preempt=False),
            work=work,
            watchdog=WatchdogPolicy(),
        )


def is_wanted_by(spec: JobSpec, gpu: str, count: int) -> bool:
    """Whether a machine of this GPU and count is one that the job asks for."""
    wanted = spec.resources
    if not wanted.gpu:
        return count == wanted.gpu_count
    return any(count == one.count and gpus.matches(_names(one.name), gpu) for one in wanted.gpu)


def _names(name: str) -> frozenset[str]:
    try:
        return gpus.resolve(name)
    except gpus.UnknownGpu as exc:
        return frozenset({exc.kept})


def without_unrecorded(spec: JobSpec, recorded: RecordedMarket) -> tuple[JobSpec, tuple[str, ...]]:
    """Return the job without what no history shows of a machine, and what was left out, in sentences."""
    wanted = spec.resources
    left_out = [
        name for name in ("cpus", "memory_mb", "min_cuda", "min_reliability") if getattr(wanted, name) is not None
    ]
    changes: dict[str, object] = dict.fromkeys(left_out)
    if wanted.regions and not any(offer.region for offer in recorded.series):
        left_out.append("regions")
        changes["regions"] = ()
    if wanted.providers and not {*wanted.providers} & {*recorded.providers}:
        left_out.append("providers")
        changes["providers"] = ()
    if not left_out:
        return spec, ()
    words = ", ".join(name.removesuffix("_mb") for name in left_out)
    note = f"the history does not show these of a machine, so they are not asked for: {words}"
    return replace(spec, resources=replace(wanted, **changes)), (note,)  # type: ignore[arg-type]  # keys are fields of it


def starts_over(
    recorded: RecordedMarket, terms: Assumptions, *, fastest: int, count: int, seed: int
) -> tuple[int, ...]:
    """Return instants of submission, one at random in each of so many equal parts of the record.

    Args:
        fastest: the speed of the fastest machine in the record, in millionths.

    Raises:
        BacktestRefused: the record is shorter than the job.
    """
    step = terms.step_s
    first = -(-recorded.begins_at // step) * step
    span = recorded.ends_at - first
    least = terms.restart_s + -(-terms.work // fastest)
    if span <= least:
        raise BacktestRefused(
            f"the history holds {_span(span)}, and the job needs {_span(least)} even on a machine that is never lost",
            hint="record for longer, or give a shorter --work",
        )
    room = span - max(step, min(ROOM * least, span - step) if span >= ROOM * least + step else least)
    places = max(1, room // step)
    rng = Random(seed)
    found = {first + step * min(places - 1, int((part + rng.random()) * places / count)) for part in range(count)}
    return tuple(sorted(found))


def _span(seconds: int) -> str:
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def cases_of(ceilings: Sequence[PriceLimit], policies: Sequence[str]) -> tuple[BacktestCase, ...]:
    """Return every policy under every ceiling, cheapest first."""
    return tuple(BacktestCase(policy=policy, ceiling=ceiling) for policy in policies for ceiling in ceilings)
