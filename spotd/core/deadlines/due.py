"""When a job is due, how much time it has until then, and how long its command has run."""

from __future__ import annotations

from datetime import datetime, timedelta

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.metering.metering import metered_until
from spotd.core.schedule.windows import open_spans, zone_of
from spotd_jobs.spec.model import Schedule


def due_at(job: Job) -> datetime | None:
    """Return the deadline; `None` without one. A span follows a clock that is set, an instant does not."""
    deadline = job.spec.schedule.deadline
    if deadline is None or deadline.span is None:
        return None if deadline is None else deadline.at
    return (job.pacing.counted_from or job.submitted_at) + deadline.span


def due_words(due: datetime) -> str:
    """`2026-11-24 08:00 UTC`."""
    return f"{due:%Y-%m-%d %H:%M} UTC"


def time_until(due: datetime, schedule: Schedule, now: datetime) -> timedelta:
    """Return the time until then, or what of it is within windows; of the far future no windows are known."""
    if not schedule.windows or due <= now or (zone := zone_of(schedule.timezone)) is None:
        return due - now
    open_ = timedelta(0)
    for span in open_spans(schedule.windows, zone, now):
        until = due if span.closes is None else min(due, span.closes)
        open_ += max(timedelta(0), until - max(now, span.opens))
    return open_


def duration_left(job: Job, item: Attempt | None, now: datetime) -> timedelta | None:
    """Return how much longer its command may run on all machines together; `None` where nothing limits it.

    Args:
        item: the machine that it has now.
    """
    limit = job.spec.schedule.max_duration
    if limit is None:
        return None
    ran = job.totals.ran - job.pacing.ran_before
    if item is not None and item.running_at is not None:
        ran += max(timedelta(0), metered_until(item.meter, now) - item.running_at)
    return limit - ran
