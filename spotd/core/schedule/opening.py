"""Whether the windows of a job let it have a machine now, and when the one that it has must save.

Theory. A machine is bought only where what is left of the window holds a useful run and the save behind it, and it is
ordered to save so early that it should be gone when the window closes. Both are estimates: a save that takes longer is
waited for as any other, since work comes before the window.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Final
from zoneinfo import ZoneInfo

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.bounds import bytes_within
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndKind, EndReason
from spotd.core.domain.world import World
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.usefulness import transfer_time, useful_run
from spotd.core.pricing.words import span_words
from spotd.core.quarantine import contain
from spotd.core.running.author import order_stop
from spotd.core.schedule.windows import OpenSpan, open_spans, zone_of
from spotd_jobs.spec.model import Schedule
from spotd_jobs.spec.windows import window_words
from spotd_providers.contract.values import Offer

_WEEK: Final = timedelta(days=6)


def window_wait(job: Job, policy: Policy, now: datetime) -> tuple[str, datetime | None] | None:
    """Return why the job gets no machine now, and until when; `None` where its windows are no reason."""
    schedule = job.spec.schedule
    if (zone := zone_of(schedule.timezone)) is None:
        return f"the time zone {schedule.timezone} of its windows is unknown on this computer: install tzdata", None
    needed = useful_run(job, None, policy) + save_lead(job, None, policy)
    spans = open_spans(schedule.windows, zone, now)
    usable = next((span for span in spans if span.left(now) >= needed), None)
    if usable is None:
        longest = max((span.left(now) for span in spans), default=timedelta(0))
        words = f"the longest that comes lasts {span_words(longest)}" if longest else "none comes in the next weeks"
        return (
            f"waits for a window in which it can run: {words}, a useful run and its save take {span_words(needed)}",
            None,
        )
    if usable.opens <= now:
        return None
    opens = f"opens {_instant_words(usable.opens, schedule, now)}"
    closing = spans[0]
    if closing.opens <= now and closing.closes is not None:
        short = f"its window closes in {span_words(closing.closes - now)}, too soon for a useful run"
        return f"{short}; the next {opens}", usable.opens
    return f"waits for its window, {opens}", usable.opens


def enforce_windows(builder: PlanBuilder, world: World) -> None:
    """Stop each machine whose window closes, so early that its job has saved by then."""
    bound = (a for a in world.attempts.values() if a.state.counts and world.jobs[a.id.job].spec.schedule.windows)
    for item in sorted(bound, key=lambda a: (a.id.job, a.id.number)):
        contain(builder, item.id.job, partial(_enforce, builder, item), "its windows cannot be judged")


def _enforce(builder: PlanBuilder, item: Attempt) -> None:
    job, now = builder.job(item.id.job), builder.now
    if builder.attempt(item.id).stop is not None:
        return
    zone = zone_of(job.spec.schedule.timezone)
    if zone is None:
        return  # what runs goes on: which hour it is there cannot be known
    why, save_at = _why_to_save(job, item, builder.policy, zone, now)
    if why and item.ends_itself:
        # Its command has ended: what it still uploads is waited for as long as any save, as if it were earlier.
        patience = builder.policy.save_limit
        earlier, save_at = _why_to_save(job, item, builder.policy, zone, now - patience)
        why, save_at = (why if earlier else ""), None if save_at is None else save_at + patience
    if why:
        order_stop(builder, item, EndReason.WINDOW_CLOSED, why)
    elif save_at is not None:
        builder.wake(save_at)


def _why_to_save(job: Job, item: Attempt, policy: Policy, zone: ZoneInfo, at: datetime) -> tuple[str, datetime | None]:
    """Return why the machine must save at this instant, empty where it need not, and when it must at last."""
    schedule = job.spec.schedule
    span = next(iter(open_spans(schedule.windows, zone, at)), None)
    if span is None or span.opens > at:
        words = ", ".join(map(window_words, schedule.windows))
        return f"it is outside of {words} {schedule.timezone}", None
    if span.closes is None:
        return "", None
    save_at = save_instant(job, item.quote.offer, policy, span.opens, span.closes)
    return ("" if at < save_at else f"closes {_clock_words(span.closes, schedule, at)}"), save_at


def save_instant(job: Job, offer: Offer | None, policy: Policy, opens: datetime, closes: datetime) -> datetime:
    """Return when a machine must begin to save; at least half of its window is for work."""
    return closes - min(save_lead(job, offer, policy), (closes - opens) / 2)


def save_lead(job: Job, offer: Offer | None, policy: Policy) -> timedelta:
    """How long before its window closes a machine is ordered to save: time to stop, and to upload the newest state."""
    size = job.checkpoints[0].bytes if job.checkpoints else 0
    upload = transfer_time(bytes_within(size), None if offer is None else offer.upload_mbps)
    return job.spec.checkpoint.stop_grace + policy.save_allowance + min(upload, policy.save_limit)


def closing_words(job: Job, item: Attempt, now: datetime) -> str:
    """`its window closes Tue 08:00 Europe/Kyiv (in 5 h 2 min)`, for a job that runs; empty where none closes."""
    if item.stop is not None and item.stop.reason.traits.kind is EndKind.FOR_TIME:
        return f"it saves and stops: {item.stop.reason.sentence(item.stop.detail)}"
    schedule = job.spec.schedule
    zone = zone_of(schedule.timezone) if schedule.windows else None
    if zone is None:
        return ""
    span = next(iter(open_spans(schedule.windows, zone, now)), OpenSpan(now, None))
    if span.opens > now or span.closes is None:
        return ""
    return f"its window closes {_instant_words(span.closes, schedule, now)}"


def _instant_words(at: datetime, schedule: Schedule, now: datetime) -> str:
    return f"{_clock_words(at, schedule, now)} (in {span_words(at - now)})"


def _clock_words(at: datetime, schedule: Schedule, now: datetime) -> str:
    """`Mon 22:00 Europe/Kyiv`; with its date where the day of the week alone may mean another."""
    local = at.astimezone(zone_of(schedule.timezone))
    date = "" if at - now < _WEEK else f" {local:%Y-%m-%d}"
    return f"{local:%a}{date} {local:%H:%M} {schedule.timezone}"
