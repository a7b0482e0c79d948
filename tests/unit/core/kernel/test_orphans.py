"""A machine that no attempt owns is ended, and what it cost is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.plan import applied
from spotd.core.domain.world import World
from spotd.core.kernel.listed import UNSEEN_MAX
from spotd.core.kernel.outcomes import terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import stray_cost
from spotd.store import Store
from spotd_providers.contract.values import InstanceState, MicroUsdPerHour, cost
from tests.unit.core.builders import MINUTE, NOW, instance, listing, shop_policy

EMPTY = World(policy=shop_policy(), jobs={}, attempts={}, intents={})
RATE = MicroUsdPerHour(400_000)


def stray(**row: Any) -> World:
    row = {"price": RATE, **row}
    found = replace(instance(InstanceState.RUNNING, key="spotd-lab-lost-3"), **row)
    return applied(EMPTY, reconcile(EMPTY, listing(found), {}, NOW))


@pytest.mark.parametrize(
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


@pytest.mark.parametrize("seconds", [-120, -1, 0])
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
