"""A machine that no attempt owns is ended, and what it cost is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.intents import IntentState
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.listed import UNSEEN_MAX
from spotd.core.kernel.outcomes import after_restart, terminate_accepted, terminate_failed
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import stray_cost
from spotd.store import Store
from spotd_providers.contract.values import InstanceState, MicroUsdPerHour, cost
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, listing, shop_policy, world_with

EMPTY = World(policy=shop_policy(), jobs={}, attempts={}, intents={})
RATE = MicroUsdPerHour(400_000)


def stray(**row: Any) -> World:
    row = {"price": RATE, **row}
    found = replace(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"), **row)
    return applied(EMPTY, reconcile(EMPTY, listing(found), {}, NOW))


@every(
    ("made", "since"),
    [
        pytest.param(NOW - timedelta(hours=2), NOW - timedelta(hours=2), id="as it was"),
        pytest.param(None, NOW, id="not stated"),
        pytest.param(datetime(1970, 1, 1, tzinfo=UTC), NOW - UNSEEN_MAX, id="1970"),
        pytest.param(datetime(9999, 12, 31, tzinfo=UTC), NOW, id="9999"),
    ],
)
def test_the_cost_of_a_stray_machine_is_told_when_it_is_gone(made: datetime | None, since: datetime) -> None:
    world = stray(created_at=made)
    (intent,) = world.intents.values()
    assert (intent.stray_since, intent.stray_rate) == (since, RATE)
    world = applied(world, terminate_accepted(world, intent.id, NOW + MINUTE))
    plan = reconcile(world, listing(at=NOW + 2 * MINUTE), {}, NOW + 2 * MINUTE)
    (told,) = plan.events
    assert told.data["cost_microusd"] == cost(RATE, NOW + MINUTE - since)
    assert "no job pays" in told.message
    (ended,) = plan.intents.values()
    assert stray_cost(ended, NOW + MINUTE) == told.data["cost_microusd"]


def test_no_machine_is_taken_for_a_stray_before_it_is_sure_which_install_this_is() -> None:
    unsure = replace(EMPTY, policy=replace(EMPTY.policy, identity_sure=False))
    found = listing(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"))
    assert reconcile(unsure, found, {}, NOW).is_empty


def test_a_price_that_is_stated_later_counts_from_the_beginning() -> None:
    world = stray(created_at=NOW - timedelta(hours=1), price=None)
    found = replace(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"), price=RATE)
    world = applied(world, reconcile(world, listing(found, at=NOW + MINUTE), {}, NOW + MINUTE))
    (intent,) = world.intents.values()
    assert stray_cost(intent, NOW) == cost(RATE, timedelta(hours=1))


def test_what_is_known_of_a_stray_machine_is_stored() -> None:
    found = replace(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"), price=RATE)
    plan = reconcile(EMPTY, listing(found), {}, NOW)
    with Store.open(":memory:") as store:
        store.tx(lambda tx: tx.commit(plan))
        (kept,) = store.read(lambda reads: reads.strays())
    assert {kept.id: kept} == plan.intents
    assert kept.stray_rate == RATE


@every("seconds", [-120, -1, 0])
def test_a_list_that_is_no_later_than_its_end_does_not_settle_a_stray_machine(seconds: int) -> None:
    """A list that was asked for before the end was accepted may not show the machine yet, or not any more."""
    world = stray()
    (intent,) = world.intents.values()
    accepted = NOW + 5 * MINUTE
    world = applied(world, terminate_accepted(world, intent.id, accepted))
    plan = reconcile(world, listing(at=accepted + timedelta(seconds=seconds)), {}, accepted + MINUTE)
    assert not plan.events
    assert applied(world, plan).intents[intent.id].is_open
    plan = reconcile(world, listing(at=accepted + timedelta(seconds=1)), {}, accepted + MINUTE)
    assert [event.kind for event in plan.events] == ["machine.gone"]


def test_a_list_that_is_not_complete_does_not_settle_a_stray_machine() -> None:
    world = stray()
    (intent,) = world.intents.values()
    world = applied(world, terminate_accepted(world, intent.id, NOW + MINUTE))
    part = listing(at=NOW + 2 * MINUTE, complete=False)
    assert not reconcile(world, part, {}, NOW + 2 * MINUTE).events


def test_a_stray_machine_that_is_still_listed_is_not_settled_whatever_else_is_listed() -> None:
    world = stray()
    (intent,) = world.intents.values()
    world = applied(world, terminate_accepted(world, intent.id, NOW + MINUTE))
    at = NOW + 2 * MINUTE
    alive = instance(InstanceState.RUNNING, key="spotd-lab-lost-3")
    assert applied(world, reconcile(world, listing(alive, at=at), {}, at)).intents[intent.id].is_open
    gone, other = replace(alive, state=InstanceState.GONE), instance(InstanceState.RUNNING, ident="m9", key="theirs")
    assert [e.kind for e in reconcile(world, listing(gone, other, at=at), {}, at).events] == ["machine.gone"]


HIGH = MicroUsdPerHour(2_000_000_000)


@every(
    ("prices", "believed"),
    [
        pytest.param([RATE, HIGH], RATE, id="one wrong row"),
        pytest.param([RATE, HIGH, HIGH], HIGH, id="two lists"),
        pytest.param([RATE, HIGH, RATE, HIGH], RATE, id="never two in a row"),
        pytest.param([HIGH, RATE], RATE, id="the first was wrong"),
        pytest.param([RATE, None, 0], RATE, id="stated no more"),
        pytest.param([RATE, HIGH, None, HIGH], HIGH, id="with a row without a price between"),
        pytest.param([10**30, RATE], RATE, id="beyond what a machine can cost"),
    ],
)
def test_a_higher_price_of_a_stray_is_believed_from_a_second_list_on(prices: list[int | None], believed: int) -> None:
    world = EMPTY
    for step, price in enumerate(prices):
        at = NOW + step * MINUTE
        stated = None if price is None else MicroUsdPerHour(price)
        row = replace(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"), price=stated)
        for _ in range(3):  # a list that is judged again is no second one
            world = applied(world, reconcile(world, listing(row, at=at), {}, at))
    (intent,) = world.intents.values()
    assert intent.stray_rate == believed


def test_a_stray_that_is_paused_ran_at_the_price_of_before() -> None:
    world = stray()
    row = replace(instance(InstanceState.PAUSED, key="spotd-lab-lost-3"), price=MicroUsdPerHour(1_000))
    world = applied(world, reconcile(world, listing(row, at=NOW + MINUTE), {}, NOW + MINUTE))
    (intent,) = world.intents.values()
    assert intent.stray_rate == RATE


def test_a_second_machine_of_an_attempt_counts_until_it_is_gone() -> None:
    world = world_with(AttemptState.RUNNING)
    double = replace(instance(InstanceState.RUNNING, ident="m8"), price=RATE)
    for hours in range(7):
        at = NOW + timedelta(hours=hours)
        plan = reconcile(world, listing(instance(InstanceState.RUNNING), double, at=at), {}, at)
        world = applied(world, plan)
        if owed := [i for i in world.intents.values() if i.attempt is None]:
            world = applied(world, terminate_failed(world, owed[0].id, "it does not answer", at))
    (intent,) = (i for i in world.intents.values() if i.attempt is None)
    assert (intent.stray_since, intent.stray_rate) == (double.created_at, RATE)
    assert stray_cost(intent, NOW + timedelta(hours=6)) == cost(RATE, timedelta(hours=6, minutes=10))


def test_an_end_that_a_new_process_orders_again_was_accepted_at_first() -> None:
    world = applied(stray(), terminate_accepted(stray(), next(iter(stray().intents)), NOW + MINUTE))
    world = applied(world, after_restart(world, NOW + timedelta(hours=5)))
    (intent,) = world.intents.values()
    assert intent.state is IntentState.OPEN
    world = applied(world, terminate_accepted(world, intent.id, NOW + timedelta(hours=5, minutes=1)))
    (intent,) = world.intents.values()
    assert (intent.state, intent.accepted_at) == (IntentState.ACCEPTED, NOW + MINUTE)
