"""For how long spot has been up for one job, and how long it usually stays so.

A run begins when a spot machine can be had, or is held, and ends when none can, or when one is lost. Policies judge by
it whether spot seems to last.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.domain.jobs import Pacing

RUNS_MAX = 10**6


def with_spot(pacing: Pacing, now: datetime, *, is_up: bool, recoveries: int) -> Pacing:
    """Return the pacing after one more reading; the same value where nothing changed."""
    lost = recoveries > pacing.losses
    since = pacing.up_since
    if since is not None and (lost or not is_up):
        ran = max(timedelta(0), now - since)
        runs = min(RUNS_MAX, pacing.past_runs + 1)
        pacing = replace(pacing, up_since=None, past_up=pacing.past_up + ran, past_runs=runs)
    if is_up and pacing.up_since is None:
        pacing = replace(pacing, up_since=now)
    return replace(pacing, losses=recoveries) if lost else pacing
