"""When a job is over, done or not: its deadline has passed, or its command ran for as long as it may.

Its machine is ordered to save and stop at that instant, and the job has expired once it has. What it saved is kept, and
`spotctl retry` goes on from there. A machine whose command has ended and that only uploads is left to finish, for no
longer than any save.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial

from spotd.core.deadlines.due import due_at, due_words, duration_left
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import span_words
from spotd.core.quarantine import contain
from spotd.core.running.author import order_stop


def words_of_expiry(job: Job, now: datetime) -> str:
    """Why a job without a machine is over; empty while it is not."""
    over = _over(job, due_at(job), duration_left(job, None, now), now)
    return "" if over is None else over[0].sentence(over[1])


def enforce_deadlines(builder: PlanBuilder, world: World) -> None:
    """Order each machine to save and stop whose job is over."""
    bound = (a for a in world.attempts.values() if a.state.counts and _is_limited(world.jobs[a.id.job]))
    for item in sorted(bound, key=lambda a: (a.id.job, a.id.number)):
        contain(builder, item.id.job, partial(_enforce, builder, item), "its deadline cannot be judged")


def _is_limited(job: Job) -> bool:
    return job.spec.schedule.deadline is not None or job.spec.schedule.max_duration is not None


def _enforce(builder: PlanBuilder, item: Attempt) -> None:
    job, now = builder.job(item.id.job), builder.now
    if builder.attempt(item.id).stop is not None or not builder.attempt(item.id).state.counts:
        return
    due, left = due_at(job), duration_left(job, item, now)
    patience = builder.policy.save_limit if item.ends_itself else timedelta(0)
    over = _over(job, due, left, now, patience)
    if over is not None:
        order_stop(builder, item, *over)
        return
    if due is not None:
        builder.wake(due + patience)
    if left is not None and item.running_at is not None:
        builder.wake(now + left + patience)


def _over(
    job: Job, due: datetime | None, left: timedelta | None, now: datetime, patience: timedelta = timedelta(0)
) -> tuple[EndReason, str] | None:
    """Return why the job is over, with details; `None` while it is not, or is waited for."""
    if due is not None and due + patience <= now:
        reason, why = EndReason.DEADLINE_PASSED, f"it was due {due_words(due)}"
    elif left is not None and left + patience <= timedelta(0):
        limit = job.spec.schedule.max_duration or timedelta(0)
        reason, why = EndReason.MAX_DURATION, f"max_duration is {span_words(limit)}"
    else:
        return None
    return reason, f"{why}; its checkpoints are kept, and spotctl retry {job.name} goes on from the newest"
