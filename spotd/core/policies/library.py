"""The policies by the names that users write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spotd.core.policies.baselines import always_on_demand, ceiling, greedy
from spotd.core.policies.observation import Action, Choice, Observation, Rule, spot, wait
from spotd.core.policies.shield import shielded
from spotd.core.policies.slack_pacing import slack_pacing
from spotd.core.policies.slack_reserve import slack_reserve, slack_reserve_tenth
from spotd.core.policies.uniform_progress import uniform_progress, uniform_progress_eager

WITHOUT_DEADLINE: Final = "ceiling"
WITH_DEADLINE: Final = "slack-pacing"
POLICIES: Final[Mapping[str, Rule]] = {
    WITHOUT_DEADLINE: ceiling,
    "greedy": greedy,
    "uniform-progress": uniform_progress,
    "uniform-progress-eager": uniform_progress_eager,
    "slack-reserve": slack_reserve,
    "slack-reserve-tenth": slack_reserve_tenth,
    WITH_DEADLINE: slack_pacing,
    "on-demand": always_on_demand,
}


def choose(name: str, seen: Observation) -> Choice:
    """Return what the policy of this name chooses, inside the shield where there is a deadline."""
    chosen = shielded(POLICIES[name], seen)
    if chosen.action is not Action.ON_DEMAND or seen.on_demand is not None:
        return chosen
    zone = seen.spot_now()
    why = f"{chosen.sentence}; no on-demand machine may be used"
    return wait(why) if zone is None else spot(zone, why)
