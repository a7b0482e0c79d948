"""A listing from before a machine's end was accepted lies on the board until the next one, and proves nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import IntentState, Meter
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.kernel.listed import TERMINATE_AGAIN_AFTER
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import NOW, instance, listing, world_with

ACCEPTED_AT = NOW - timedelta(seconds=30)
BEFORE, AFTER = ACCEPTED_AT - timedelta(seconds=1), ACCEPTED_AT + timedelta(seconds=1)
LATER = ACCEPTED_AT + 2 * TERMINATE_AGAIN_AFTER
ENDED = {"machine": MachineState.HALTED, "meter": Meter()}


def test_a_machine_is_not_ended_again_because_of_an_outdated_listing() -> None:
    world = world_with(AttemptState.ENDING, **ENDED)
    assert reconcile(world, listing(instance(InstanceState.RUNNING), at=BEFORE), {}, LATER).is_empty


def test_a_machine_that_a_newer_listing_shows_alive_is_ended_again() -> None:
    world = world_with(AttemptState.ENDING, **ENDED)
    plan = reconcile(world, listing(instance(InstanceState.RUNNING), at=AFTER), {}, LATER)
    (intent,) = plan.intents.values()
    assert intent.state is IntentState.OPEN
    assert [event.kind for event in plan.events] == ["machine.ending"]


@every("state", [InstanceState.PAUSED, InstanceState.RUNNING, InstanceState.UNKNOWN])
def test_an_outdated_listing_starts_no_meter_again(state: InstanceState) -> None:
    world = world_with(AttemptState.ENDING, **ENDED)
    quote = next(iter(world.attempts.values())).quote
    dear_disk = replace(quote, price=replace(quote.price, storage=quote.price.gpu))
    world = replace(world, attempts={i: replace(a, quote=dear_disk) for i, a in world.attempts.items()})
    after = applied(world, reconcile(world, listing(instance(state), at=BEFORE), {}, NOW))
    (item,) = after.attempts.values()
    assert item.meter == Meter()


def test_a_machine_that_an_outdated_listing_calls_gone_is_gone() -> None:
    world = world_with(AttemptState.ENDING, **ENDED)
    after = applied(world, reconcile(world, listing(instance(InstanceState.GONE), at=BEFORE), {}, NOW))
    assert not after.attempts


@every(("at", "is_over"), [(BEFORE, False), (ACCEPTED_AT, False), (AFTER, True)])
def test_only_a_list_that_was_begun_after_the_end_was_accepted_shows_that_it_took_effect(
    at: datetime, *, is_over: bool
) -> None:
    world = world_with(AttemptState.ENDING, **ENDED)
    after = applied(world, reconcile(world, listing(at=at), {}, NOW))
    assert (not after.attempts) is is_over
