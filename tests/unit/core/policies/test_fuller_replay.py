"""Where work is lost, starts fail and machines end in silence, the shield still lets no job be late."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Final

import pytest

from spotd.core.policies import HOUR_S, POLICIES, WITH_DEADLINE, Action, Choice, Observation, shielded
from spotd_providers.contract.values import MicroUsdPerHour
from tests.cases import every
from tests.replays.fuller import replay_fully
from tests.replays.replay import ReplayTerms, ZoneTrace
from tests.replays.traces import ABSENT, SCORES, windows

_STEP_S: Final = 600


def _zone(seed: int, stays: float) -> ZoneTrace:
    rng, up, state = Random(seed), [], True
    for _ in range(400):
        state = state if rng.random() < stays else not state
        up.append(state)
    return ZoneTrace(name="z", up=tuple(up), prices=(MicroUsdPerHour(900_000),))


def _terms(seed: int) -> ReplayTerms:
    return ReplayTerms(
        task_s=6 * HOUR_S,
        deadline_s=round((7.5 + 3 * Random(seed).random()) * HOUR_S),
        overhead_s=360,
        step_s=_STEP_S,
        on_demand=MicroUsdPerHour(3_000_000),
    )


@every("stays", [0.3, 0.8, 0.97])
def test_a_random_policy_inside_the_shield_is_not_late(stays: float) -> None:
    for seed in range(12):
        rng = Random(seed)

        def rule(seen: Observation, rng: Random = rng) -> Choice:
            return Choice(action=rng.choice(list(Action)), sentence="by chance", zone=seen.zones[0].name)

        result = replay_fully(partial(shielded, rule), [_zone(seed, stays)], _terms(seed), seed)
        assert not result.is_late, (stays, seed, result)


@every("policy", sorted(set(POLICIES) - {"ceiling"}))
def test_no_policy_of_the_library_is_late(policy: str) -> None:
    for seed in range(6):
        result = replay_fully(partial(shielded, POLICIES[policy]), [_zone(seed, 0.9)], _terms(seed), seed)
        assert not result.is_late, (seed, result)


@pytest.mark.long
@pytest.mark.skipif(not SCORES.exists(), reason=ABSENT)
def test_on_recorded_traces_the_default_is_in_time_and_costs_less_than_greedy() -> None:
    spent: dict[str, float] = {}
    for policy in (WITH_DEADLINE, "greedy"):
        results = [
            replay_fully(partial(shielded, POLICIES[policy]), [window.zone], window.terms, number)
            for number, window in enumerate(windows()[::40])
        ]
        assert not any(result.is_late for result in results)
        spent[policy] = sum(result.usd for result in results)
    assert spent[WITH_DEADLINE] < spent["greedy"]
