"""A machine whose attempt is over and that wakes up all the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.domain.intents import IntentState, Meter
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import accrued
from spotd_providers.contract.values import InstanceState, Loss, MicroUsdPerHour
from tests.unit.core.builders import NOW, instance, listing, world_with


def paused_and_not_ended_yet() -> World:
    """The provider failed to end it, and the order is repeated only in some minutes."""
    world = world_with(AttemptState.ENDING)
    (intent,) = world.intents.values()
    waiting = replace(intent, state=IntentState.OPEN, accepted_at=None, tries=8, not_before=NOW + timedelta(minutes=4))
    world = replace(world, intents={intent.id: waiting})
    return applied(world, reconcile(world, listing(instance(InstanceState.PAUSED, loss=Loss.OUTBID)), {}, NOW))


def test_a_woken_machine_is_ended_at_once_and_not_at_the_next_repetition() -> None:
    world = paused_and_not_ended_yet()
    at = NOW + timedelta(seconds=30)
    plan = reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at)
    assert [event.kind for event in plan.events] == ["machine.woke"]
    (intent,) = applied(world, plan).intents.values()
    assert intent.not_before is None


def test_a_woken_machine_is_metered_in_full_again() -> None:
    world = paused_and_not_ended_yet()
    at = NOW + timedelta(seconds=30)
    after = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at))
    (item,) = after.attempts.values()
    assert accrued(item.meter, at + timedelta(minutes=30)) == item.quote.price.total // 2


def test_one_that_goes_on_running_waits_for_the_repetition_like_any_other() -> None:
    world, plan = paused_and_not_ended_yet(), Plan()
    for seconds in (30, 60):
        at = NOW + timedelta(seconds=seconds)
        plan = reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at)
        world = applied(world, plan)
    assert plan.events == ()


def test_one_that_its_provider_does_not_end_is_metered_at_the_stated_price_while_it_is_listed() -> None:
    world = paused_and_not_ended_yet()
    for minutes in range(1, 181):
        at = NOW + timedelta(minutes=minutes)
        mine = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(700_000))
        world = applied(world, reconcile(world, listing(mine, at=at), {}, at))
    (item,) = world.attempts.values()
    assert item.meter.rate >= 700_000
    booked = accrued(item.meter, NOW + timedelta(hours=3)) + item.meter.settled
    assert booked >= 3 * 700_000 * 99 // 100


def test_an_own_machine_that_costs_nothing_has_not_woken_while_it_waits_for_its_end() -> None:
    world = world_with(AttemptState.ENDING)
    (item,), (intent,) = world.attempts.values(), world.intents.values()
    nothing = MicroUsdPerHour(0)
    price = replace(item.quote.price, gpu=nothing, storage=nothing, upload=nothing, restore=nothing, total=nothing)
    free = replace(item.quote, price=price)
    waits = replace(intent, state=IntentState.OPEN, accepted_at=None, tries=8, not_before=NOW + timedelta(minutes=4))
    item = replace(item, quote=free, meter=Meter())
    world = replace(world, attempts={item.id: item}, intents={intent.id: waits})
    for seconds in (30, 60):
        at = NOW + timedelta(seconds=seconds)
        plan = reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at)
        assert plan.events == ()
        world = applied(world, plan)
    assert [one.not_before for one in world.intents.values()] == [waits.not_before], "its order keeps its back-off"
