"""A back-test on every core: each process plays some of the starts and sends back what came of them.

The recording is shared with the processes by `fork` and never copied. A run depends on nothing but its own start and
case, so the outcome is the same whatever the number of processes.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from random import Random
from typing import Final

from spotd.backtest.recorded import Assumptions, BacktestRefused, RecordedMarket
from spotd.backtest.replay import MarketReplay, PlannedRun
from spotd.backtest.run import JobRun, RunOutcome, policy_of, series_key
from spotd_jobs.spec.model import Deadline, JobSpec, PolicyName, PriceLimit, WatchdogPolicy
from spotd_providers.contract import gpus

# What one back-test plays: a job, a recording, ceilings and policies, and the instants at which it is submitted.


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


Outcomes = list[list[RunOutcome]]
"""Of each case, of each start."""
Progress = Callable[[int], None]
"""Called with how many more runs are over."""
_REPORT_EVERY: Final = 8
_END_WITHIN_S: Final = 2.0


def play(question: Question, *, processes: int, progress: Progress) -> Outcomes:
    """Play every case from every start.

    Raises:
        BacktestRefused: a process was ended from outside.
    """
    shares = _shares(question.starts, processes)
    if len(shares) == 1:
        return play_some(question, question.starts, progress)
    parts = _in_processes(question, shares, progress)
    return [[one for part in parts for one in part[case]] for case in range(len(question.cases))]


def _shares(starts: Sequence[int], processes: int) -> list[Sequence[int]]:
    """Return neighbouring starts together, since they need the same part of the recording."""
    count = max(1, min(processes, len(starts)))
    bounds = [len(starts) * part // count for part in range(count + 1)]
    return [starts[first:last] for first, last in pairwise(bounds)]


def play_some(question: Question, starts: Sequence[int], progress: Progress) -> Outcomes:
    """Play every case from these starts, in this process."""
    recorded, terms = question.recorded, question.terms
    fees = {name: terms.fee_ppm.get(name, 1_000_000) for name in recorded.providers}
    policy = policy_of(terms, recorded.providers, paced=question.deadline is not None)
    numbers = {series_key(offer): number for number, offer in enumerate(recorded.series)}
    runs = [
        PlannedRun(JobRun(question.spec_for(case), policy, terms, numbers, start), start, case.limit)
        for case in question.cases
        for start in starts
    ]
    replay = MarketReplay(
        recorded, runs, step_s=terms.step_s, fees=fees, per_gpu=all(case.is_per_gpu for case in question.cases)
    )
    for _ in replay.advance():
        progress(1)
    outcomes = [one.run.outcome(recorded.ends_at) for one in runs]
    count = len(starts)
    return [outcomes[case * count : (case + 1) * count] for case in range(len(question.cases))]


def _in_processes(question: Question, shares: Sequence[Sequence[int]], progress: Progress) -> list[Outcomes]:
    context = multiprocessing.get_context("fork")
    parts: dict[Connection, Outcomes] = {}
    workers: list[tuple[ForkProcess, Connection]] = []
    try:
        for share in shares:
            ours, theirs = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(question, share, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers.append((worker, ours))
        open_ends = [ours for _, ours in workers]
        while open_ends:
            for ready in wait(open_ends):
                if not isinstance(ready, Connection):
                    continue
                message = _next_message(ready)
                if isinstance(message, int):
                    progress(message)
                    continue
                if isinstance(message, str):
                    raise BacktestRefused(message, hint="--processes 1 shows where it fails")
                parts[ready] = message
                open_ends.remove(ready)
    finally:
        for worker, ours in workers:
            ours.close()
            if worker.is_alive() and len(parts) < len(shares):
                worker.terminate()
            worker.join(_END_WITHIN_S)
            if worker.is_alive():
                worker.kill()
    return [parts[ours] for _, ours in workers]


def _next_message(connection: Connection) -> int | str | Outcomes:
    try:
        message: int | str | Outcomes = connection.recv()
    except EOFError:
        raise BacktestRefused(
            "a process of the back-test was ended from outside, which mostly means that memory ran out",
            hint="--processes 1, fewer --starts, or a shorter history",
        ) from None
    return message


def _work(question: Question, starts: Sequence[int], connection: Connection) -> None:
    """Play in a process of its own; the parent ends it on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting = 0

    def progress(count: int) -> None:
        nonlocal waiting
        waiting += count
        if waiting >= _REPORT_EVERY:
            connection.send(waiting)
            waiting = 0

    with suppress(BrokenPipeError):
        try:
            connection.send(play_some(question, starts, progress))
        except Exception as exc:  # noqa: BLE001 - the outermost frame of a process: the parent says what went wrong
            connection.send(f"a defect of spotd itself: {type(exc).__name__}: {exc}")
