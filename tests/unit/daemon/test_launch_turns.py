"""Launches that wait for their turn at a provider are made only while somebody wants their machines."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import EndReason, InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.core.requests import set_ceiling
from spotd.daemon.commits import cycle_points
from spotd.daemon.executor import CALLS_PER_PROVIDER
from spotd.service.lifecycle import SHUTTING_DOWN
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import MicroUsdPerGpuHour
from tests.unit.core.builders import job, offer
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Hang

pytestmark = pytest.mark.anyio
JOBS = 2 * CALLS_PER_PROVIDER


async def full_turns(rig: Rig) -> list[JobId]:
    """Every turn is taken by a launch that hangs; as many more launches wait. Returns the jobs of those."""
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(JOBS)]
    rig.shop.faults["launch"].extend([Hang()] * CALLS_PER_PROVIDER)
    for number in range(1, JOBS + 1):
        await rig.submit(job(number))
    await rig.until(lambda: len(rig.shop.requests) == CALLS_PER_PROVIDER and rig.executor.busy == JOBS)
    sent = {request.key for request in rig.shop.requests}
    return [JobId(f"j{n}") for n in range(1, JOBS + 1) if f"spotd-lab-j{n}-1" not in sent]


async def test_a_job_cancelled_while_its_launch_waits_for_its_turn_is_never_bought(rig: Rig) -> None:
    async with rig.running():
        waiting = await full_turns(rig)
        for name in waiting:
            await rig.cancel(name)
        await rig.until(lambda: rig.executor.busy == 0)
        await rig.clock.sleep(timedelta(minutes=1))
    assert len(rig.shop.requests) == CALLS_PER_PROVIDER
    assert {rig.job(name).state for name in waiting} == {JobState.CANCELLED}
    assert {rig.job(name).spent for name in waiting} == {0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fee_ppm": 1_300_000}, "by now, accepted are $0.5000/GPU-h"),
        ({"unusable": "shop is disabled in the config"}, "shop is disabled in the config"),
    ],
    ids=["fee", "provider"],
)
async def test_a_config_that_is_read_anew_while_launches_wait_for_their_turn_counts_for_them(
    rig: Rig, changes: dict[str, Any], why: str
) -> None:
    async with rig.running():
        waiting = await full_turns(rig)
        policy = rig.commits.policy
        rules = replace(policy.providers[rig.shop.name], **changes)
        rig.policy.reload(replace(policy, providers={rig.shop.name: rules}))
        await rig.until(lambda: rig.executor.busy == 0)
        await rig.clock.sleep(timedelta(minutes=1))
        assert len(rig.shop.requests) == CALLS_PER_PROVIDER
        for name in waiting:
            [attempt] = rig.attempts(name)
            assert attempt.end_reason is EndReason.NOT_SENT
            assert why in attempt.end_detail
            assert rig.job(name).spent == 0


async def test_what_a_launch_may_cost_at_most_is_the_ceiling_at_its_call(rig: Rig) -> None:
    async with rig.running():
        waiting = await full_turns(rig)
        lower = PriceLimit(per_gpu_hour=MicroUsdPerGpuHour(450_000))
        await rig.commits.commit(
            lambda world, now: set_ceiling(world, [world.jobs[name] for name in waiting], lower, now), cycle_points
        )
        await rig.until(lambda: len(rig.shop.requests) == JOBS)
    assert {request.price_max for request in rig.shop.requests[:CALLS_PER_PROVIDER]} == {500_000}
    assert {request.price_max for request in rig.shop.requests[CALLS_PER_PROVIDER:]} == {450_000}


async def test_a_launch_that_two_plans_hold_is_made_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    take = rig.executor.take

    def take_twice(plan: Plan, world: World) -> None:
        take(plan, world)
        take(plan, world)
        # Before the executor runs, what it is to launch waits for it.
        under_way.append(rig.executor.busy + len(rig.executor._waiting))

    under_way: list[int] = []
    monkeypatch.setattr(rig.executor, "take", take_twice)
    async with rig.running():
        await rig.submit(job(1))
        await rig.until(lambda: rig.job(JobId("j1")).state is JobState.STARTING)
    assert (max(under_way), len(rig.attempts(JobId("j1"))), len(rig.shop.requests)) == (1, 1, 1)


async def test_launches_that_had_not_begun_at_the_end_are_not_made_and_come_first_in_the_next_life(rig: Rig) -> None:
    async with rig.running():
        waiting = await full_turns(rig)
        rig.policy.paused = SHUTTING_DOWN
        rig.control_loop.only_reconciles = True
        assert not await rig.executor.drain(seconds=25)
        await rig.clock.sleep(timedelta(seconds=90))
    assert len(rig.shop.requests) == CALLS_PER_PROVIDER
    rig.policy.paused = ""
    reborn = rig.reborn()
    async with reborn.running():
        since = reborn.clock.now()
        await reborn.until(lambda: len(reborn.shop.requests) >= JOBS)
        assert reborn.clock.now() - since < timedelta(minutes=1), "no window is waited for"
    assert {reborn.attempts(name)[0].end_reason for name in waiting} == {EndReason.NOT_SENT}


async def test_a_launch_that_only_waited_for_its_turn_when_the_daemon_was_killed_is_made_at_once(rig: Rig) -> None:
    async with rig.running():
        waiting = await full_turns(rig)
    reborn = rig.reborn()
    async with reborn.running():
        since = reborn.clock.now()
        await reborn.until(lambda: len(reborn.shop.requests) >= JOBS)
        assert reborn.clock.now() - since < timedelta(minutes=1)
    assert {r.key for r in rig.shop.requests[CALLS_PER_PROVIDER:]} == {f"spotd-lab-{name}-2" for name in waiting}


async def test_launches_of_jobs_that_are_over_are_forgotten(rig: Rig) -> None:
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(JOBS)]
    async with rig.running():
        names = [await rig.submit(job(number)) for number in range(1, JOBS + 1)]
        await rig.until(lambda: len(rig.shop.requests) == JOBS and rig.executor.busy == 0)
        for name in names:
            await rig.cancel(name)
        await rig.until(lambda: not rig.shop.not_gone())
        await rig.clock.sleep(timedelta(minutes=2))
        assert {rig.job(name).state for name in names} == {JobState.CANCELLED}
        state = rig.control_loop.state
        assert state is not None
        assert rig.executor._launched <= state.world.intents.keys() == set()


async def test_a_plan_that_would_break_a_rule_is_refused_whole(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)

    def forgotten(world: World, _now: datetime) -> Plan:
        return Plan(jobs={name: replace(world.jobs[name], attempts_made=0)})

    with pytest.raises(InvariantBroken, match="is not counted by its job"):
        await rig.commits.commit(forgotten, cycle_points)
    assert rig.job(name).attempts_made == 1
