"""A back-test on every core: each process plays some of the starts and sends back what came of them.

The recording is shared with the processes by `fork` and never copied. A run depends on nothing but its own start and
case, so the outcome is the same whatever the number of processes.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Final

from spotd.backtest.question import Question
from spotd.backtest.refusals import BacktestRefused
from spotd.backtest.replay import MarketReplay, PlannedRun
from spotd.backtest.run import JobRun, RunOutcome, policy_of, series_key

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
                message = _received(ready)
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


def _received(connection: Connection) -> int | str | Outcomes:
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
