"""What a machine for a job may plausibly be had for soon, whatever the price of this moment is."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from spotd.core.billing.budgets import BudgetGuard
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.world import World
from spotd.core.ranking.candidates import CandidateCatalogue

PLAUSIBLE_PERCENT: Final = 75
"""Of the lowest price that is known: so much cheaper a machine may become while a job waits."""
UNKNOWN_DROP: Final = 8
"""Where the price of this moment is all that is known, it may be so many times what is usual."""


def plausible_rates(catalogue: CandidateCatalogue, job: Job) -> list[int]:
    """Whole machines per hour: a bit below what is asked now, was asked lately, and was paid for this job before.

    Offers that cool down or were taken a moment ago count, since they come back.
    """
    offers = catalogue.list_for(catalogue.key_of(job))
    known: list[int] = [*catalogue.lows(job.spec.resources)]
    if job.rate_low is not None:
        known.append(job.rate_low)
    if offers.at(0) is not None:
        best = catalogue.quote_at(offers, 0)
        now: int = best.price.total
        if not offers.is_by_price:
            now = min(now, offers.lowest_total_from(best))  # the best need not be the cheapest
        known.append(now if known else now // UNKNOWN_DROP)
    return [rate * PLAUSIBLE_PERCENT // 100 for rate in known]


def used_up(world: World, market: MarketSnapshot, job: Job, now: datetime, *, unspent: bool = False) -> str:
    """Why the next decision would end this job for its budget, were it queued; empty if it would not."""
    if job.budget is None:
        return ""
    rates = plausible_rates(CandidateCatalogue(world, market, now), job)
    return BudgetGuard(world, now).is_hopeless(job, rates, unspent=unspent)
