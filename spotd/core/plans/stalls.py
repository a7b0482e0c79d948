"""Whether a job has stalled, in words, and what becomes of it: it moves to another machine, a few times at most.

Theory. A hung machine and a hung job show the same. So a job that stalls goes to another machine, unless its owner
wants it to stop; one that stalls on `STALLS_MAX` machines in a row has itself to blame and has failed. The row ends
with a machine on which the job got on for many times longer than it took to see that it stalled: then what stalls cost
stays a small share of what the job gets done, however often they come.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.progress import NOTHING, Watch
from spotd.core.domain.states import AttemptState
from spotd.core.pricing.words import span_words
from spotd_jobs.spec.model import StallAction, WatchdogPolicy

PREPARATION: Final = 3
"""A job that has not begun its own work yet has so many times as long: it may download, unpack and convert data."""
STALLS_MAX: Final = 3
WORTH: Final = 10
"""A machine on which the job got on for so many times its limit ends a row of stalls."""


def stall_words(item: Attempt, job: Job) -> str:
    """Return how long and by which limit the attempt has got nowhere; empty while it gets on, saves or is stopped."""
    watch, rules = item.watch, job.spec.watchdog
    if watch is None or item.stop is not None or item.notice_at is not None or not rules.is_on:
        return ""
    if item.state not in {AttemptState.STARTING, AttemptState.RUNNING}:
        return ""
    factor = 1 if watch.has_begun else PREPARATION
    patient = "" if watch.has_begun else f", {PREPARATION} times as long before its own work begins"
    if rules.min_gpu_util is not None and watch.idle >= rules.window * factor:
        used = 100 * (watch.idle_busy / watch.idle) if watch.idle else 0.0
        return (
            f"its busiest GPU was used {used:.1f} % for {span_words(watch.idle)},"
            f" [watchdog] asks for {rules.min_gpu_util} % over {span_words(rules.window)}{patient}"
        )
    if rules.no_progress is not None and watch.quiet >= rules.no_progress * factor:
        return (
            f"no new output, step or checkpoint for {span_words(watch.quiet)},"
            f" [watchdog] no_progress is {span_words(rules.no_progress)}{patient}"
        )
    return ""


def stalls_after(job: Job, item: Attempt) -> int:
    """Return how many machines in a row the job has stalled on, with this one."""
    return 1 if _was_worth_it(item.watch, job.spec.watchdog) else job.stalls + 1


def _was_worth_it(watch: Watch | None, rules: WatchdogPolicy) -> bool:
    limits = [rules.no_progress] if rules.no_progress is not None else []
    limits += [rules.window] if rules.min_gpu_util is not None else []
    worth = WORTH * max(limits, default=NOTHING)
    return watch is not None and watch.has_begun and watch.active >= worth > NOTHING


def words_after(job: Job, stalls: int) -> tuple[bool, str]:
    """Whether the job is over, and what is added to the sentence of the stall."""
    goes_on = f"; spotctl retry {job.name} goes on from its newest checkpoint"
    if job.spec.watchdog.action is StallAction.STOP:
        return True, f'; [watchdog] action is "stop"{goes_on}'
    if stalls >= STALLS_MAX:
        return True, f"; it stalled on {stalls} machines in a row{goes_on}"
    return False, f"; it moves to another machine, after {stalls} of {STALLS_MAX} stalls in a row"


def watch_every(rules: WatchdogPolicy) -> timedelta | None:
    """Return how often figures of progress are worth reading; `None` where nothing is watched."""
    limits = [span for span in (rules.min_gpu_util and rules.window, rules.no_progress) if span]
    return min(READ_MAX, max(READ_MIN, min(limits) / READS)) if limits else None


READS: Final = 10
READ_MIN: Final = timedelta(seconds=1)
READ_MAX: Final = timedelta(minutes=5)
