"""Inside the shield no policy is late, whatever it chooses and whatever the market does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from spotd.core.policies import POLICIES, Action, Choice, Observation, Rule, is_safe, shielded
from spotd_providers.contract.values import MicroUsdPerHour
from tests.replays.replay import ReplayTerms, ZoneTrace, replay

_ON_DEMAND: Final = MicroUsdPerHour(3_000_000)
_price = st.integers(1, 4_000_000).map(MicroUsdPerHour)


@st.composite
def _terms(draw: st.DrawFn) -> ReplayTerms:
    """Draw a job that on-demand from the first step on finishes in time, often just so."""
    step = draw(st.sampled_from([7, 60, 195, 600]))
    overhead = draw(st.integers(0, 4 * step))
    task = draw(st.integers(1, 40 * step))
    least = -(-(task + overhead) // step)
    spare = draw(st.sampled_from([0, 0, 1, 2, 3, 5, 10, 40]))
    deadline = (least + spare) * step + draw(st.integers(0, step - 1))
    return ReplayTerms(
        task_s=task, deadline_s=deadline, overhead_s=overhead, step_s=step, on_demand=_ON_DEMAND, start=0
    )


@st.composite
def _market(draw: st.DrawFn, terms: ReplayTerms) -> list[ZoneTrace]:
    """Draw up to three zones that come and go in runs."""
    length, rng = 4 * (terms.deadline_s // terms.step_s) + 4, Random(draw(st.integers(0, 2**32)))
    zones = []
    for number in range(draw(st.integers(1, 3))):
        stays = draw(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
        up, state = [], rng.random() < 0.5
        for _ in range(length):
            state = state if rng.random() < stays else not state
            up.append(state)
        zones.append(ZoneTrace(name=f"zone-{number}", up=tuple(up), prices=(draw(_price),)))
    return zones


@st.composite
def _games(draw: st.DrawFn) -> tuple[ReplayTerms, list[ZoneTrace]]:
    terms = draw(_terms())
    return terms, draw(_market(terms))


def _random_rule(seed: int) -> Rule:
    rng = Random(seed)

    def rule(seen: Observation) -> Choice:
        zone = rng.choice(seen.zones)
        return Choice(action=rng.choice(list(Action)), sentence="by chance", zone=zone.name)

    return rule


@given(_games(), st.integers(0, 2**32))
def test_a_random_policy_inside_the_shield_is_never_late(game: tuple[ReplayTerms, list[ZoneTrace]], seed: int) -> None:
    terms, zones = game
    assert not replay(partial(shielded, _random_rule(seed)), zones, terms).is_late


@given(_games(), st.sampled_from(sorted(POLICIES)))
def test_each_policy_of_the_library_inside_the_shield_is_never_late(
    game: tuple[ReplayTerms, list[ZoneTrace]], name: str
) -> None:
    terms, zones = game
    assert not replay(partial(shielded, POLICIES[name]), zones, terms).is_late


@given(_games(), st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False))
def test_the_order_of_zones_changes_nothing(game: tuple[ReplayTerms, list[ZoneTrace]], name: str, rng: Random) -> None:
    terms, zones = game
    other = rng.sample(zones, len(zones))
    rule = partial(shielded, POLICIES[name])
    assert replay(rule, other, terms) == replay(rule, zones, terms)


@given(_games(), st.integers(0, 2**32))
def test_where_work_is_lost_the_shield_is_never_milder(game: tuple[ReplayTerms, list[ZoneTrace]], seed: int) -> None:
    terms, zones = game
    rng = Random(seed)

    def compared(seen: Observation) -> Choice:
        chosen = shielded(_random_rule(rng.getrandbits(32)), seen)
        losing = replace(seen, keeps_work=False, unsaved_s=rng.randrange(0, 2 * seen.step_s))
        slow = replace(seen, overhead_max_s=seen.overhead_s + rng.randrange(0, 600), margin_steps=rng.randrange(3))
        for worse in (losing, slow):
            assert is_safe(seen, chosen) or not is_safe(worse, chosen)
        return chosen

    replay(compared, zones, terms)
