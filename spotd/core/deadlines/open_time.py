"""How much time a job has until it is due, of which its windows let it use only a part."""

from __future__ import annotations

from datetime import datetime, timedelta

from spotd.core.schedule.windows import open_spans, zone_of
from spotd_jobs.spec.model import Schedule


def time_until(due: datetime, schedule: Schedule, now: datetime) -> timedelta:
    """Return the time until then, or what of it is within windows; of the far future no windows are known."""
    if not schedule.windows or due <= now or (zone := zone_of(schedule.timezone)) is None:
        return due - now
    open_ = timedelta(0)
    for span in open_spans(schedule.windows, zone, now):
        until = due if span.closes is None else min(due, span.closes)
        open_ += max(timedelta(0), until - max(now, span.opens))
    return open_
