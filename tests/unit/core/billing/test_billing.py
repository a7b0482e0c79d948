"""When a machine begins to cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.decide import decide
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import launched
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import spent_in_month
from spotd_providers.contract.values import InstanceState, MicroUsd, MicroUsdPerHour, cost
from tests.cases import every
from tests.unit.core.builders import NOW, instance, listing, market, report, world_with

ASKED = NOW - timedelta(minutes=10)


@every(
    ("made_at", "billed_from"),
    [
        pytest.param(NOW - timedelta(minutes=2), NOW - timedelta(minutes=2), id="from-when-it-was-made"),
        pytest.param(None, NOW, id="from-the-answer-when-nobody-says"),
        pytest.param(ASKED - timedelta(days=1), ASKED, id="never-before-it-was-asked-for"),
        pytest.param(NOW + timedelta(hours=1), NOW, id="never-from-the-future"),
    ],
)
def test_a_machine_costs_from_when_it_was_made_and_not_from_when_we_heard_of_it(
    made_at: datetime | None, billed_from: datetime
) -> None:
    world = world_with(AttemptState.INTENDED)
    (attempt,) = world.attempts
    machine = replace(instance(InstanceState.RUNNING), created_at=made_at)
    plan = launched(world, attempt, machine, NOW)
    assert plan.attempts[attempt].meter.since == billed_from


@every(
    ("made_at", "billed_from"),
    [
        pytest.param(NOW + timedelta(hours=6), ASKED, id="our-clock-was-set-back"),
        pytest.param(NOW + timedelta(seconds=61), ASKED, id="by-another-clock"),
        pytest.param(NOW + timedelta(seconds=59), NOW, id="by-a-clock-that-is-a-little-ahead"),
        pytest.param(NOW - timedelta(minutes=2), NOW - timedelta(minutes=2), id="from-when-it-was-made"),
    ],
)
def test_a_machine_that_a_list_shows_first_costs_from_its_launch_where_its_birth_is_by_another_clock(
    made_at: datetime, billed_from: datetime
) -> None:
    world = world_with(AttemptState.INTENDED, ref=None, outcome_unknown=True)
    (item,) = world.attempts.values()
    assert item.intended_at == ASKED
    machine = replace(instance(InstanceState.RUNNING), created_at=made_at)
    plan = reconcile(world, listing(machine), {}, NOW)
    assert plan.attempts[item.id].meter.since == billed_from


def booked_after(*prices: int, every: timedelta = timedelta(minutes=1)) -> tuple[World, int]:
    """The world after lists that state these prices, and what is booked from the first of them to the last."""
    world = world_with(AttemptState.RUNNING)
    (owner,) = world.jobs.values()
    world = replace(world, jobs={owner.id: replace(owner, budget_set=MicroUsd(1_000_000))})
    at, booked = NOW, list[int]()
    for price in (400_000, *prices):
        shown = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(price))
        reports = {i: replace(one, read_at=at) for i, one in report(seq=6 + len(booked), phase="run").items()}
        world = applied(world, reconcile(world, listing(shown, at=at), reports, at))
        world = applied(world, decide(world, market(at=at), at))
        (item,) = world.attempts.values()
        since = item.meter.since
        assert since is not None
        booked.append(item.meter.settled + cost(item.meter.rate, at - since))
        at += every
    return world, booked[-1] - booked[0]


@every("wrong", [40_000_000, 4_000, 900_000])
def test_every_other_list_may_state_a_price_that_leaps_and_nothing_is_booked_or_stopped(wrong: int) -> None:
    world, booked = booked_after(*[wrong, 400_000] * 30)
    (item,) = world.attempts.values()
    assert item.stop is None
    assert booked == pytest.approx(400_000, rel=0.001), "an hour of it"


@every(("price", "is_stopped"), [(40_000_000, True), (100_000, False)])
def test_a_price_that_leaps_is_booked_from_the_first_of_two_lists_that_state_it(price: int, is_stopped: bool) -> None:
    world, booked = booked_after(price, price)
    (item,) = world.attempts.values()
    assert booked == pytest.approx((400_000 + price) / 60, abs=3)
    assert (item.stop is not None) is is_stopped


def test_a_month_is_spent_from_its_first_day_on() -> None:
    days = {NOW.date().replace(day=1): MicroUsd(7), NOW.date().replace(day=1) - timedelta(days=1): MicroUsd(100)}
    world = replace(world_with(AttemptState.RUNNING), attempts={}, spent_by_day=days)
    assert spent_in_month(world, NOW) == 7


def test_a_list_that_states_a_leap_and_is_judged_again_is_no_second_one() -> None:
    world = world_with(AttemptState.RUNNING)
    shown = listing(replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(40_000_000)), at=NOW)
    for _ in range(2):
        world = applied(world, reconcile(world, shown, report(seq=6, phase="run"), NOW))
    assert [item.meter.rate for item in world.attempts.values()] == [400_000]


def test_a_price_that_rises_by_less_is_booked_at_once() -> None:
    assert booked_after(480_000, 480_000)[1] == pytest.approx((400_000 + 480_000) / 60, abs=3)
