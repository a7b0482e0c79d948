"""Slack reserve: wait for spot while more than a reserve of slack is left.

With w work left, T time left, overhead d and step g: spot whenever it is up; else stay on on-demand if on it; else wait
while `T > w + d + 2 g + share * w`. Source: the rule that LEVI found (arXiv 2605.09764), with `share` 0.1; scaled by
the overhead, `share` is `2 d` with d in hours. It is meant to run inside the shield.
"""

from __future__ import annotations

from fractions import Fraction

from spotd.core.policies.baselines import ceiling
from spotd.core.policies.observation import (
    HOUR_S,
    Action,
    Choice,
    Observation,
    hours_words,
    on_demand,
    spot,
    wait,
)

TENTH = Fraction(1, 10)


def slack_reserve(seen: Observation) -> Choice:
    """Keep a reserve of two overheads (in hours) per hour of work left."""
    return _with_reserve(seen, Fraction(2 * seen.overhead_s, HOUR_S))


def slack_reserve_tenth(seen: Observation) -> Choice:
    """Keep a reserve of a tenth of the work left."""
    return _with_reserve(seen, TENTH)


def _with_reserve(seen: Observation, share: Fraction) -> Choice:
    zone = seen.spot_now()
    if seen.left_s is None:
        return ceiling(seen)
    if zone is not None:
        return spot(zone, "spot is up")
    if seen.holds is Action.ON_DEMAND:
        return on_demand("stays on on-demand while spot is down")
    slack = seen.left_s - seen.work_s - seen.overhead_s
    reserve = 2 * seen.step_s + share * seen.work_s
    figures = f"slack is {hours_words(slack)}, the reserve is {hours_words(float(reserve))}"
    return wait(f"waits for spot: {figures}") if slack > reserve else on_demand(f"spot is down: {figures}")
