"""No two healthy machines are stopped for one other machine, nor for money that carries one other machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.author import CLAIM_HOLDS
from spotd.core.decide import decide
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Pacing
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import AttemptKey, HostId, MicroUsd, MicroUsdPerHour, Offer, OfferId
from tests.cases import every
from tests.unit.core.builders import NOW, market, offer
from tests.unit.core.deadlines.test_pacer import _HOUR, _SPOT, _running, _sold
from tests.unit.core.decision.test_moves import running
from tests.unit.core.running.test_author import leaving as left
from tests.unit.core.schedule.test_preemption import running as lower
from tests.unit.core.schedule.test_preemption import urgent, world_of

Scene = tuple[World, Offer]


def twins(world: World) -> World:
    """The same with another job like this one, on a machine of its own."""
    [item], [owner] = world.attempts.values(), world.jobs.values()
    second = JobId("j2")
    spec = replace(owner.spec, name="job2")
    here = replace(item.quote.offer, offer_id=OfferId("x2"), host_id=HostId("host-x2"))
    twin = replace(
        item,
        id=AttemptId(job=second, number=1),
        key=AttemptKey("spotd-lab-j2-1"),
        quote=replace(item.quote, offer=here),
    )
    jobs = {owner.id: owner, second: replace(owner, id=second, name="job2", spec=spec)}
    return replace(world, jobs=jobs, attempts={item.id: item, twin.id: twin})


def moving() -> Scene:
    return twins(running()), offer("o2", price=200_000)


def leaving() -> Scene:
    world, (target,) = left()
    return twins(world), target


def going_on_demand() -> Scene:
    return twins(_running(_SPOT, 20.5)), _sold()


def going_back() -> Scene:
    up = Pacing(up_since=NOW - 5 * _HOUR)
    return twins(_running(_sold(), 40, ran=2 * _HOUR, saved=False, pacing=up)), _SPOT


def making_room() -> Scene:
    other = replace(urgent(), id=JobId("j8"), name="urgent2")
    return world_of(lower(1), lower(2), waiting=(urgent(), other)), offer("a")


def decided(world: World, target: Offer, after: timedelta = timedelta(0)) -> tuple[World, int]:
    plan: Plan = decide(world, market(target, at=NOW + after), NOW + after)
    new = [i for i, item in plan.attempts.items() if item.stop is not None and world.attempts[i].stop is None]
    return applied(world, plan), len(new)


@every(
    "scene",
    [pytest.param(scene, id=scene.__name__) for scene in (moving, leaving, going_on_demand, going_back, making_room)],
)
def test_one_machine_is_left_for_another_one_and_the_next_only_where_there_may_be_more_of_it(
    scene: Callable[[], Scene],
) -> None:
    world, target = scene()
    world, stopped = decided(world, target)
    assert stopped == 1
    assert decided(world, target, timedelta(minutes=1))[1] == 0
    if scene is not moving:  # each of its jobs would have to have saved since
        assert decided(world, target, CLAIM_HOLDS)[1] == 1, "a stop that never ended keeps no machine for ever"
    pool = replace(target, host_id=None)
    assert decided(scene()[0], pool)[1] == 2


def ended(world: World, at: datetime) -> World:
    """The same once every machine that was stopped is gone."""
    builder = PlanBuilder(world, at)
    over = [item for item in world.attempts.values() if item.stop is not None]
    for item in over:
        builder.set_rate(item.id, MicroUsdPerHour(0), None)
        builder.end_attempt(item.id, EndReason.MIGRATED, "")
    world = applied(world, builder.plan())
    left = {i: item for i, item in world.attempts.items() if i not in {one.id for one in over}}
    return replace(world, attempts=left, intents={})


@pytest.mark.long
@every(
    "scene",
    [pytest.param(scene, id=scene.__name__) for scene in (moving, leaving, going_back, making_room)],
)
def test_no_more_machines_are_stopped_than_a_budget_carries_in_their_place(scene: Callable[[], Scene]) -> None:
    found = set()
    for budget in range(150_000, 2_000_000, 25_000):
        world, target = scene()
        world = replace(world, policy=replace(world.policy, budget_day=MicroUsd(budget)))
        pool = replace(target, host_id=None)
        world, stopped = decided(world, pool)
        gone = [i.stop.reason for i in world.attempts.values() if i.stop is not None]
        if EndReason.BUDGET_PAUSED in gone or not stopped:
            continue
        at = NOW + timedelta(minutes=2)
        plan = decide(ended(world, at), market(pool, at=at), at)
        launched = [item for item in plan.attempts.values() if item.state is AttemptState.INTENDED]
        assert len(launched) >= stopped, budget
        found.add(stopped)
    assert found >= {2}
