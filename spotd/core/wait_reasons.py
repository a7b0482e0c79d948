"""What a reason to wait says of its job: the state in which it waits, and whether the market is the cause."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd.core.domain.world import VerdictKind
from spotd.core.schedule import WAITS_FOR_ITS_TURN

_WAITS_FOR_PRICE = frozenset(
    {
        VerdictKind.ABOVE_CEILING,
        VerdictKind.NO_CEILING,
        VerdictKind.NO_MATCH,
        VerdictKind.NO_OFFERS,
        VerdictKind.PACED,
        VerdictKind.OWN,
    }
)
_SAYS_NOTHING_OF_PRICES = frozenset(
    {
        VerdictKind.MACHINES,
        VerdictKind.LAUNCH_LIMIT,
        VerdictKind.ARRAY,
        VerdictKind.COOLING,
        VerdictKind.BACKING_OFF,
        VerdictKind.RECONCILING,
        VerdictKind.PAUSED,
    }
)
"""What comes and goes with machines and launches: a job that waits for a price does so behind it, too."""
FROM_MARKET: Final = frozenset(
    {VerdictKind.ABOVE_CEILING, VerdictKind.NO_MATCH, VerdictKind.NO_OFFERS, VerdictKind.COOLING}
)
"""What the market keeps from a job, so that its time of waiting for spot counts."""
BEFORE_MARKET: Final = frozenset(
    {
        VerdictKind.NO_CEILING,
        VerdictKind.BUDGET_JOB,
        VerdictKind.BUDGET_DAY,
        VerdictKind.BUDGET_MONTH,
        VerdictKind.BALANCE,
        VerdictKind.MACHINES,
        VerdictKind.PAUSED,
        VerdictKind.WINDOW,
        VerdictKind.AFTER,
        VerdictKind.ARRAY,
    }
)
"""What keeps a job from any machine, whatever the market: its time does not count. What launches leave behind does."""
PRICE_DWELL: Final = timedelta(minutes=30)
"""A job that waits for a price does so at least so long, unless its window or its turn is the reason to wait."""
RECOVERY_MAX: Final = timedelta(hours=1)
"""A job that lost its host is RECOVERING for so long; after that its state is that of any job which waits so.

A lack of offers, of a ceiling or of money may last until its owner does something about it.
"""


def state_of_waiting(job: Job, kind: VerdictKind, now: datetime) -> JobState:
    """Return the state of a job that waits for this; what comes and goes with machines changes none."""
    waited = now - job.state_since
    is_over = kind not in _SAYS_NOTHING_OF_PRICES and not timedelta(0) <= waited < RECOVERY_MAX
    is_recovering = job.state is JobState.RECOVERING and not is_over
    if kind in _WAITS_FOR_PRICE and not (is_recovering and kind not in {VerdictKind.ABOVE_CEILING, VerdictKind.PACED}):
        return JobState.WAITING_PRICE
    if is_recovering and kind not in WAITS_FOR_ITS_TURN:
        return job.state
    if job.state is JobState.WAITING_PRICE and kind not in {VerdictKind.WINDOW, VerdictKind.AFTER}:
        is_new = timedelta(0) <= waited < PRICE_DWELL
        if is_new or kind in _SAYS_NOTHING_OF_PRICES:
            return job.state
    return JobState.QUEUED
