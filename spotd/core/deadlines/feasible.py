"""Whether a job that is submitted now can be done in time at all."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from spotd.core.deadlines.due import due_at, due_words, time_until
from spotd.core.deadlines.pacer import UNKNOWN_WORK
from spotd.core.domain.jobs import Job
from spotd.core.pricing.usefulness import startup
from spotd.core.pricing.words import machine_words, span_words
from spotd.core.ranking.remaining_work import remaining_work, time_on
from spotd_jobs.spec.model import MarketChoice
from spotd_providers.contract.values import Offer

_MINUTE: Final = timedelta(minutes=1)


class Infeasible(NamedTuple):
    """The key that asks too much, why, and the way out."""

    key: str
    why: str
    hint: str


def infeasible(job: Job, offers: Iterable[Offer], now: datetime) -> Infeasible | None:
    """Return what cannot be met; `None` where nothing proves that.

    The fastest machine that fits is taken, whatever it costs and without a single interruption: what that one cannot
    do, none can.

    Args:
        offers: that fit the job; where there is none, a machine of speed 1.0 is assumed.
    """
    schedule, work, due = job.spec.schedule, remaining_work(job), due_at(job)
    if work is None or (due is None and schedule.max_duration is None):
        return None
    times = {(one.gpu, one.gpu_count): (time_on(job, work, one.gpu, one.gpu_count), one) for one in offers}
    fastest, offer = min(times.values(), key=lambda pair: pair[0], default=(work.time, None))
    where = (
        "a machine of speed 1.0"
        if offer is None
        else f"{machine_words(offer.gpu, offer.gpu_count)}, the fastest that fits"
    )
    needed = f"{span_words(fastest)} of work on {where}"
    if schedule.max_duration is not None and fastest > schedule.max_duration:
        why = f"max_duration is {span_words(schedule.max_duration)}, and there are {needed}"
        return Infeasible("schedule.max_duration", why, "raise it, or leave it out")
    if due is None:
        return None
    total, left = fastest + startup(job, offer), time_until(due, schedule, now)
    if total <= left:
        return None
    inside = " within its windows" if schedule.windows else ""
    why = f"{needed}, take {span_words(total)} with the start, and until then there are {span_words(left)}{inside}"
    hint = "write a later deadline, or wider windows"
    if not schedule.windows:
        hint = f"the earliest deadline that can be met is {due_words(now + total + _MINUTE)}"
    return Infeasible("schedule.deadline", why, hint)


def deadline_warnings(job: Job) -> list[str]:
    """Return what weakens the deadline of a job that is submitted."""
    if job.spec.schedule.deadline is None:
        return []
    if remaining_work(job) is None:
        return [f'{UNKNOWN_WORK}; write [work] time = "24h" or steps = 100000']
    if job.spec.resources.market in {MarketChoice.AUTO, MarketChoice.ON_DEMAND}:
        return []
    return ['its market is not "auto": when the deadline slips, spotd warns and pays for no on-demand machine']
