"""Slack pacing, the policy of a job with a deadline: restarts are a budget of slack.

The shorter the slack, the longer-lived spot must seem before on-demand is left; and waiting keeps a small reserve. In
hours, with w work left, T time left, d the overhead of a restart, g the step, K the on-demand price divided by the
spot price, `age` the length of the present up-run with this step, and U, n the hours and number of up-runs that have
ended since the job began:

    slack = T - w - d        R = min(0.10, 2 d) w + 2.5 g        m = (U + 9 h) / (n + 3)
    gate  = 5 d K / (K - 1) (sqrt(2.5 R / slack) - 1)            with sqrt(50) where slack <= 0.05 R
    spot up:    on spot or idle: spot;    on on-demand: spot if age + m / 3 >= gate, else on-demand
    spot down:  on on-demand: on-demand;  idle: wait if slack > R, else on-demand

Where spot costs as much as on-demand, on-demand is used. `m` is the mean up-run, shrunk towards three runs of three
hours. With several zones the cheapest that is up is launched, the cheapest that passes the gate is returned to, and a
running spot machine is never moved. Source: own derivation, compared with published policies on recorded traces. It
runs inside the shield.
"""

from __future__ import annotations

import math
from typing import Final

from spotd.core.policies.baselines import ceiling
from spotd.core.policies.observation import (
    HOUR_S,
    Action,
    Choice,
    Observation,
    Zone,
    cheapest_first,
    hours_words,
    on_demand,
    spot,
    wait,
)

RESERVE_SHARE_MAX: Final = 0.10
RESERVE_STEPS: Final = 2.5
PRIOR_UP_S: Final = 9 * HOUR_S
PRIOR_RUNS: Final = 3
ROOT_MAX: Final = math.sqrt(50)


def slack_pacing(seen: Observation) -> Choice:
    """Wait above a small reserve, and return to spot once it seems to last."""
    if seen.left_s is None or seen.on_demand is None:
        return ceiling(seen)
    held = seen.held_spot()
    if held is not None:
        return spot(held, "spot is up")
    worth = sorted((z for z in seen.zones if z.is_up and z.price < seen.on_demand), key=cheapest_first)
    slack, kept = slack_s(seen), reserve_s(seen)
    figures = f"slack is {hours_words(slack)} beside a reserve of {hours_words(kept)}"
    if seen.holds is Action.ON_DEMAND:
        return _on_on_demand(seen, worth, figures)
    if worth:
        return spot(worth[0], "spot is up")
    if any(zone.is_up for zone in seen.zones):
        return on_demand("spot costs no less than on-demand")
    return wait(f"waits for spot: {figures}") if slack > kept else on_demand(f"spot is down: {figures}")


def _on_on_demand(seen: Observation, worth: list[Zone], figures: str) -> Choice:
    if not worth:
        return on_demand(f"stays on on-demand while spot is down: {figures}")
    for zone in worth:
        if zone.up_s + mean_run_s(zone) / 3 >= gate_s(seen, zone):
            return spot(zone, f"goes back to spot, up for {hours_words(zone.up_s)}: {figures}")
    first = worth[0]
    asked = max(0.0, gate_s(seen, first) - mean_run_s(first) / 3)
    return on_demand(
        f"stays on on-demand: spot has been up {hours_words(first.up_s)}, asks for {hours_words(asked)},"
        f" because {figures}"
    )


def slack_s(seen: Observation) -> int:
    """Return the time that may still be lost."""
    return (seen.left_s or 0) - seen.work_s - seen.overhead_s


def reserve_s(seen: Observation) -> float:
    """Return R: slack below which a job without a machine does not wait."""
    share = min(RESERVE_SHARE_MAX, 2 * seen.overhead_s / HOUR_S)
    return share * seen.work_s + RESERVE_STEPS * seen.step_s


def mean_run_s(zone: Zone) -> float:
    """Return m: the mean length of an up-run, shrunk towards a prior."""
    return (zone.past_up_s + PRIOR_UP_S) / (zone.past_runs + PRIOR_RUNS)


def gate_s(seen: Observation, zone: Zone) -> float:
    """Return how long an up-run must promise to be before on-demand is left for it."""
    saved = (seen.on_demand or 0) - zone.price
    if saved <= 0:
        return math.inf
    slack, kept = slack_s(seen), reserve_s(seen)
    root = ROOT_MAX if slack <= 0.05 * kept else math.sqrt(2.5 * kept / slack)
    return 5 * seen.overhead_s * (seen.on_demand or 0) / saved * (root - 1)
