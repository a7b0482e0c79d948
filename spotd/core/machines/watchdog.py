"""What a read of a host shows of progress and of saving, recorded on its attempt."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.freshness import Freshness, is_due, is_due_there
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.progress import RUN, watched
from spotd.core.domain.states import AttemptState
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import span_words

READS_PER_INTERVAL: Final = 4
"""A host of which only the liveness is checked is read so often in full while its checkpoint is late."""


def note_progress(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus, *, is_new: bool) -> None:
    """Record what a heartbeat that was not read before states of progress, where the job is watched.

    Args:
        is_new: the heartbeat is a new one.
    """
    item, rules = builder.attempt(attempt_id), builder.job(attempt_id.job).spec.watchdog
    if is_new and report.sample is not None and rules.is_on and item.stop is None:
        builder.put_attempt(replace(item, watch=watched(item.watch, report.sample, rules, report.read_at)))


def note_freshness(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus, *, is_new: bool) -> None:
    """Raise the alarm once when checkpoints fall behind; the next one ends it."""
    item, job = builder.attempt(attempt_id), builder.job(attempt_id.job)
    every, known = job.spec.checkpoint.every, item.freshness
    if every is None or item.state is not AttemptState.RUNNING or report.up is None:
        return
    if known is None or report.checkpoints:
        builder.put_attempt(replace(item, freshness=Freshness(since=report.read_at, up=report.up, every=every)))
        if known is not None and known.late_at is not None:
            age = span_words(report.read_at - known.since)
            builder.event("checkpoint.fresh", f"a checkpoint has come, after {age} without one", attempt=attempt_id)
        return
    if known.late_at is not None or report.phase != RUN or not is_due(known, builder.now):
        return
    if report.liveness_check:
        if builder.now - (item.read_at or known.since) >= every / READS_PER_INTERVAL:
            builder.read_in_full(attempt_id)
    elif is_new and is_due_there(known, report.up):
        late = replace(known, late_at=builder.now)
        builder.put_attempt(replace(item, freshness=late))
        words = late_words(late, job.checkpoints[0].name if job.checkpoints else "", builder.now)
        builder.event("checkpoint.late", f"{words}: a preemption would repeat all of it", attempt=attempt_id)


def late_words(known: Freshness | None, newest: str, now: datetime) -> str:
    """Return for how long nothing was saved; empty where there is no alarm."""
    if known is None or known.late_at is None:
        return ""
    after = f" since {newest}" if newest else ""
    age = span_words(max(now - known.since, timedelta(0)))
    return f"no new checkpoint{after} for {age}, [checkpoint] every is {span_words(known.every)}"
