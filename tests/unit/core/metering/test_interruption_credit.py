"""A machine that its provider takes for nothing is left to it, and its job does not wait for that."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import Intent, IntentState, JobId
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import after_restart, terminate_accepted, terminate_failed
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import LEFT_MAX, TAKING, UNSEEN_NOTICE, accrued, is_left_to_provider, machines_in_use
from spotd_providers.contract.values import InstanceState, Loss
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, listing, market, offer, report, world_with

TAKEN_AT = NOW + timedelta(seconds=90)
JOB = JobId("j1")


def free_hour(world: World, span: timedelta = timedelta(hours=1)) -> World:
    rules = replace(world.policy.providers[SHOP], free_if_taken_within=span)
    return replace(world, policy=replace(world.policy, providers={SHOP: rules}))


def told(**changes: Any) -> World:
    return free_hour(world_with(AttemptState.RUNNING, **{"notice_at": TAKEN_AT, **changes}))


def several(world: World) -> World:
    """The same with four machines as one."""
    (item,) = world.attempts.values()
    quote = replace(item.quote, offer=replace(item.quote.offer, nodes=4))
    return replace(world, attempts={item.id: replace(item, quote=quote)})


def saved(world: World) -> Plan:
    """Its runner has saved and reported its own end, while the machine is still listed as running."""
    heard = report(seq=9, phase="done", exit_reason=EndReason.PREEMPTED, exit_code=143)
    return reconcile(world, listing(instance(InstanceState.RUNNING)), heard, NOW)


def order(plan: Plan) -> Intent:
    return next(iter(plan.intents.values()))


def test_a_machine_about_to_be_taken_for_nothing_is_ended_only_after_that() -> None:
    plan = saved(told())
    assert plan.jobs[JOB].state is JobState.RECOVERING
    assert order(plan).state is IntentState.OPEN
    assert order(plan).not_before == TAKEN_AT + TAKING
    assert plan.wake_at is not None
    assert plan.wake_at <= TAKEN_AT + TAKING


def test_a_machine_that_was_preempted_before_its_notice_was_seen_is_left_to_its_provider_as_well() -> None:
    world = told(notice_at=None)
    plan = saved(world)
    due = NOW + UNSEEN_NOTICE + TAKING
    assert (order(plan).state, order(plan).not_before) == (IntentState.OPEN, due)
    world = applied(world, plan)
    assert [is_left_to_provider(item, world) for item in world.attempts.values()] == [True]
    placed = decide(world, market(offer("o2")), NOW)
    assert placed.jobs[JOB].state is JobState.PROVISIONING, "its job does not wait for that"


def test_a_machine_that_a_list_shows_as_being_taken_is_not_ended_by_us() -> None:
    world = told(notice_at=None, over_since=NOW - MINUTE, phase="run")
    shown = listing(instance(InstanceState.ENDING, loss=Loss.PREEMPTED))
    plan = reconcile(world, shown, report(seq=9, phase="run"), NOW)
    assert order(plan).not_before == NOW + UNSEEN_NOTICE + TAKING
    ours = told(notice_at=None, over_since=NOW - MINUTE, phase="run")
    lost = reconcile(ours, listing(instance(InstanceState.ENDING, loss=Loss.HOST_LOST)), report(seq=9), NOW)
    assert order(lost).not_before is None
    paid = reconcile(free_hour(world, timedelta(0)), shown, report(seq=9, phase="run"), NOW)
    assert order(paid).not_before is None, "where it costs as much to be taken as to be ended"


@every(
    "world",
    [
        pytest.param(free_hour(told(), timedelta(0)), id="its provider bills what it takes"),
        pytest.param(told(launched_at=NOW - timedelta(minutes=59)), id="its first hour is over by then"),
        pytest.param(told(notice_at=NOW - MINUTE), id="it should have been taken a minute ago"),
        pytest.param(told(notice_at=NOW + LEFT_MAX), id="no provider warns that long ahead"),
        pytest.param(several(told()), id="one of several is taken, and the others are not"),
    ],
)
def test_every_other_machine_is_ended_at_once(world: World) -> None:
    assert order(saved(world)).not_before is None


def test_several_machines_of_which_one_is_taken_hold_their_places_until_their_end_is_accepted() -> None:
    world = several(told())
    plan = saved(world)
    world = applied(world, plan)
    (item,) = world.attempts.values()
    assert not is_left_to_provider(item, world)
    assert machines_in_use(world, NOW) == 4
    assert order(plan).state is IntentState.OPEN
    later = NOW + MINUTE
    before = accrued(item.meter, later)
    assert before > accrued(item.meter, NOW), "they are booked until then"
    world = applied(world, terminate_accepted(world, order(plan).id, later))
    (item,) = world.attempts.values()
    assert (item.machine, accrued(item.meter, later + MINUTE)) == (MachineState.HALTED, 0)
    assert machines_in_use(world, later) == 0


def test_a_machine_whose_runner_has_not_reported_its_end_is_not_left_alone() -> None:
    world = told(heartbeat_seen_at=NOW - timedelta(minutes=35))
    plan = reconcile(world, listing(instance(InstanceState.RUNNING)), report(seq=5), NOW)
    assert order(plan).not_before is None


@every("machines_max", [8, 1])
def test_the_next_machine_does_not_wait_for_one_that_is_only_left_to_be_taken(machines_max: int) -> None:
    world = told()
    world = replace(world, policy=replace(world.policy, machines_max=machines_max))
    world = applied(world, saved(world))
    plan = decide(world, market(offer("o2", price=300_000)), NOW)
    assert [a.id.number for a in plan.attempts.values()] == [2]


def test_the_next_machine_waits_as_ever_when_the_end_was_tried_and_not_accepted() -> None:
    world = told()
    world = applied(world, saved(world))
    (ending,) = world.intents
    due = TAKEN_AT + TAKING
    world = applied(world, terminate_failed(world, ending, "no answer", due))
    assert not decide(world, market(offer("o2", price=300_000), at=due), due).attempts


def test_a_restart_does_not_end_the_machine_earlier() -> None:
    world = told()
    world = applied(world, saved(world))
    world = applied(world, after_restart(world, NOW))
    assert next(iter(world.intents.values())).not_before == TAKEN_AT + TAKING


def test_a_machine_left_alone_is_over_when_its_provider_has_taken_it() -> None:
    world = told()
    world = applied(world, saved(world))
    later = TAKEN_AT + timedelta(seconds=5)
    world = applied(world, reconcile(world, listing(instance(InstanceState.GONE), at=later), {}, later))
    (item,) = world.attempts.values()
    assert item.state is AttemptState.ENDING, "one row may be wrong"
    later += timedelta(seconds=1)
    plan = reconcile(world, listing(instance(InstanceState.GONE), at=later), {}, later)
    (item,) = plan.attempts.values()
    assert (item.state, item.machine) == (AttemptState.ENDED, MachineState.GONE)
    assert order(plan).state is IntentState.DONE
