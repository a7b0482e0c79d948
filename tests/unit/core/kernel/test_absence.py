"""Which list proves that a machine is absent: each rule alone, at its instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from spotd.core.domain.intents import IntentState
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.loss_evidence import is_missing_for_long, is_missing_twice, proves_absence
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import Listing
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, listing, report, world_with

SECOND = timedelta(seconds=1)
LAUNCHED = NOW - 10 * MINUTE


def proves(world: World, at: Any) -> bool:
    builder = PlanBuilder(world, NOW)
    (item,) = builder.attempts()
    return proves_absence(builder, item, listing(at=at)[SHOP])


def with_intent(world: World, **changes: Any) -> World:
    return replace(world, intents={key: replace(one, **changes) for key, one in world.intents.items()})


def test_a_machine_that_no_list_has_shown_yet_is_absent_once_lists_may_lag_no_longer() -> None:
    world = world_with(AttemptState.STARTING, ever_listed=False)
    lag = world.policy.list_lag(SHOP)
    assert lag > timedelta(0)
    assert not proves(world, LAUNCHED + SECOND)
    assert not proves(world, LAUNCHED + lag)
    assert proves(world, LAUNCHED + lag + SECOND)


def test_without_the_instant_of_its_launch_it_counts_from_its_intent() -> None:
    world = world_with(AttemptState.STARTING, ever_listed=False, launched_at=None, intended_at=NOW - MINUTE)
    lag = world.policy.list_lag(SHOP)
    assert not proves(world, NOW - MINUTE + lag)
    assert proves(world, NOW - MINUTE + lag + SECOND)


def test_a_machine_that_was_listed_is_absent_from_any_later_list() -> None:
    world = world_with(AttemptState.RUNNING)
    assert not proves(world, LAUNCHED)
    assert proves(world, LAUNCHED + SECOND)


@every("state", [IntentState.OPEN, IntentState.SENT])
def test_no_list_speaks_against_a_launch_whose_call_is_under_way(state: IntentState) -> None:
    world = with_intent(world_with(AttemptState.INTENDED), state=state)
    assert not proves(world, NOW + timedelta(days=1))


def test_a_launch_of_unknown_outcome_is_absent_after_its_window() -> None:
    world = with_intent(world_with(AttemptState.INTENDED), not_before=NOW + MINUTE)
    assert not proves(world, NOW + MINUTE)
    assert proves(world, NOW + MINUTE + SECOND)


def missing(listings: Mapping[Any, Listing], since: Any, *, twice: bool) -> bool:
    builder = PlanBuilder(world_with(AttemptState.INTENDED, missing_since=since), NOW)
    (item,) = builder.attempts()
    return (is_missing_twice if twice else is_missing_for_long)(builder, item, listings[SHOP])


def test_two_lists_that_lack_it_are_two_lists() -> None:
    assert not missing(listing(at=NOW), None, twice=True)
    assert not missing(listing(at=NOW), NOW, twice=True), "the same list once more"
    assert missing(listing(at=NOW + SECOND), NOW, twice=True)


def test_lists_that_lack_it_for_long_span_what_they_may_lag() -> None:
    lag = world_with(AttemptState.INTENDED).policy.list_lag(SHOP)
    assert not missing(listing(at=NOW), None, twice=False)
    assert not missing(listing(at=NOW + lag - SECOND), NOW, twice=False)
    assert missing(listing(at=NOW + lag), NOW, twice=False)


@every("complete", [True, False])
def test_a_list_that_is_not_complete_is_not_the_first_of_two(*, complete: bool) -> None:
    world = world_with(AttemptState.RUNNING)
    after = applied(world, reconcile(world, listing(complete=complete), report(seq=9, phase="run"), NOW))
    [item] = after.attempts.values()
    assert item.missing_since == (NOW if complete else None)
