"""How long a job waits for spot before it may take on-demand, where its owner states it.

Theory. With `market = "auto"` and `on_demand_after = "2h"` a job is placed on spot alone at first. The time counts from
the first decision in which nothing but the market kept it from a machine, within its windows, and it goes on over
launches that come to nothing. Once it has reached the limit the job takes what costs least of both markets, under its
ceiling as ever. It counts anew once a machine got the job further (a checkpoint, or half an hour of its command): after
a preemption the job tries spot first again. A machine that runs on-demand is not left for spot by this rule.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.deadlines.due import time_until
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.pricing.words import span_words


def with_spot_wait(pacing: Pacing, now: datetime) -> Pacing:
    """Return what is remembered of a job that waits for spot now."""
    since = pacing.spot_wanted_since
    return pacing if since is not None and since <= now else replace(pacing, spot_wanted_since=now)


def time_to_on_demand(job: Job, limit: timedelta, now: datetime) -> timedelta:
    """Return how much longer the job waits for spot alone; 0 or less once it may take on-demand."""
    since = job.pacing.spot_wanted_since
    waited = timedelta(0) if since is None or since >= now else time_until(now, job.spec.schedule, since)
    return limit - waited


def wait_words(left: timedelta, limit: timedelta) -> str:
    """Return what the rule means for the job now."""
    if left > timedelta(0):
        return f"on-demand may be used after {span_words(limit)} without spot, in {span_words(left)}"
    return f"it waited {span_words(limit - left)} for spot, so on-demand may be used under its ceiling"
