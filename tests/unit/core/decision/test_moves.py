"""A healthy job moves to a cheaper machine when that clearly pays, a few times at most, and says what for."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core import relocation
from spotd.core.decide import decide
from spotd.core.domain.cooldowns import EVERYWHERE, Cooldown, CooldownScope
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint, Claim, MachineVerdict, Moves, target_words
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import RecordKind, World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import needs_of, quote
from spotd.core.ranking.relocating import _HAZARD, HAZARD_MEAN, Staying, expected_losses
from spotd_jobs.spec.model import Deadline, GpuAlternative, GpuSpeed, Resources, Schedule, Window, Work
from spotd_providers.contract.values import MicroUsd, MicroUsdPerGb, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, market, offer, shop_policy, world_with
from tests.unit.core.experiences import experience, record

FIRST = AttemptId(job=job().id, number=1)
HOUR = timedelta(hours=1)
CHEAP = offer("o2", price=200_000)
MOVED = Moves(count=1, at=NOW, attempt=1, provider="shop", offer="o2", host="host-o2", rate=CHEAP.gpu_price)


def saved(at: datetime, *, size: int = 0) -> Checkpoint:
    return Checkpoint(name="s", attempt=1, step=1, bytes=size, at=at, manifest_key="k", sha256="0" * 64)


def running(*, hours: float = 5, saved_ago: timedelta = 5 * MINUTE, most: int = 3, **changes: Any) -> World:
    """A machine at $0.40 that has run for so long and saved a moment ago."""
    begun = NOW - timedelta(hours=hours)
    world = world_with(AttemptState.RUNNING, launched_at=begun - 4 * MINUTE, running_at=begun)
    owner = world.jobs[FIRST.job]
    spec = {name: changes.pop(name) for name in ("schedule", "work") if name in changes}
    owner = replace(owner, checkpoints=(saved(NOW - saved_ago),), spec=replace(owner.spec, **spec), **changes)
    policy = shop_policy(moves_max=most)
    return replace(world, policy=policy, jobs={owner.id: owner})


def move(world: World, price: int = 200_000, **offered: Any) -> Plan:
    return decide(world, market(offer("o1"), offer("o2", price=price, **offered)), NOW)


def is_moved(plan: Plan) -> bool:
    item = plan.attempts.get(FIRST)
    return item is not None and item.stop is not None


def test_a_job_whose_secrets_could_not_be_given_to_another_machine_stays_on_its_own() -> None:
    world = running()
    assert is_moved(move(world))
    assert not is_moved(move(replace(world, policy=replace(world.policy, locked={FIRST.job: "no key"}))))


def test_a_job_moves_for_a_clear_saving_and_says_every_figure() -> None:
    plan = move(running())
    stop = plan.attempts[FIRST].stop
    assert stop is not None
    assert (stop.reason, stop.flush) == (EndReason.MIGRATED, True)
    assert stop.detail == (
        "1 x RTX_4090 at shop/host-o2 for $0.2000 per hour instead of $0.4000: $1.10 instead of $2.00 over the next"
        " 5 h 0 min, since it is not known what is left, $0.09 of it for the move"
    )
    moves = plan.jobs[FIRST.job].moves
    claim = Claim(
        verdict=MachineVerdict.MOVE,
        at=NOW,
        attempt=1,
        provider="shop",
        subject="spot host-o2",
        nodes=1,
        rate=MicroUsdPerHour(400_000),
    )
    assert (replace(moves, claim=None), moves.claim) == (MOVED, claim)
    assert len(plan.attempts) == 1, "no machine is launched beside it"


@every(
    ("world", "price"),
    [
        pytest.param(running(most=0), 200_000, id="nobody asked for it"),
        pytest.param(running(hours=0.9), 50_000, id="it has not run for long"),
        pytest.param(running(), 330_000, id="the saving is small"),
        pytest.param(running(saved_ago=5 * HOUR), 200_000, id="nothing was saved"),
        pytest.param(running(saved_ago=2 * HOUR), 20_000, id="hours of work are not saved"),
        pytest.param(running(moves=Moves(count=3)), 50_000, id="it was moved often enough"),
        pytest.param(running(moves=Moves(count=1, at=NOW - 30 * MINUTE)), 50_000, id="it was moved a moment ago"),
        pytest.param(running(schedule=Schedule(deadline=Deadline(span=50 * HOUR))), 50_000, id="it has a deadline"),
        pytest.param(
            running(schedule=Schedule(windows=(Window(days=(0,), start_min=0, end_min=1439),), timezone="UTC")),
            50_000,
            id="it has windows",
        ),
        pytest.param(running(work=Work(time=12 * MINUTE)), 50_000, id="it is nearly done"),
    ],
)
def test_a_job_stays(world: World, price: int) -> None:
    assert not is_moved(move(world, price))


def test_a_machine_of_another_kind_counts_only_where_speeds_are_known() -> None:
    world = running()
    owner = world.jobs[FIRST.job]
    both = Resources(gpu=tuple(GpuAlternative(name=name, count=1) for name in ("RTX_4090", "RTX_3090")))
    unknown = replace(owner, spec=replace(owner.spec, resources=both))
    known = replace(
        unknown,
        spec=replace(
            unknown.spec,
            work=Work(time=50 * HOUR),
            speed=(GpuSpeed(name="RTX_4090", ppm=1_000_000), GpuSpeed(name="RTX_3090", ppm=500_000)),
        ),
    )
    moves = [
        is_moved(move(replace(world, jobs={owner.id: one}), price, gpu="RTX_3090"))
        for one, price in ((unknown, 50_000), (known, 50_000), (known, 250_000))
    ]
    assert moves == [False, True, False], "half as fast for more than half of the price is no saving"


def test_dear_traffic_keeps_a_job_where_it_is() -> None:
    world = running()
    owner = replace(world.jobs[FIRST.job], checkpoints=(saved(NOW - MINUTE, size=100 * 10**9),))
    world = replace(world, jobs={owner.id: owner})
    assert not is_moved(move(world, download_price=MicroUsdPerGb(50_000)))


@every(("budget", "moves"), [(250_000, False), (500_000, False), (3_000_000, True)])
def test_a_job_stays_where_its_budget_carries_no_restore_elsewhere(budget: int, *, moves: bool) -> None:
    world = running(budget_set=budget, work=Work(time=50 * HOUR))
    owner = replace(world.jobs[FIRST.job], checkpoints=(saved(NOW - MINUTE, size=5 * 10**9),))
    plan = move(replace(world, jobs={owner.id: owner}), download_price=MicroUsdPerGb(50_000))
    assert is_moved(plan) is moves


@every(
    ("limits", "moves"),
    [
        pytest.param({"budget_set": 700_000}, False, id="an hour and a half of a job"),
        pytest.param({"budget_set": 20_000_000}, True, id="all of a job"),
        pytest.param({"budget_day": 700_000}, False, id="an hour and a half of a day"),
        pytest.param({"budget_day": 9_000_000}, True, id="all of a day"),
        pytest.param({"budget_month": 700_000}, False, id="an hour and a half of a month"),
    ],
)
def test_a_move_pays_within_what_the_budget_pays_for_and_not_within_what_is_left_of_the_work(
    limits: dict[str, Any], *, moves: bool
) -> None:
    own = {name: limits[name] for name in limits if name == "budget_set"}
    world = running(work=Work(time=50 * HOUR), **own)
    world = replace(world, policy=replace(world.policy, **{n: v for n, v in limits.items() if n not in own}))
    plan = move(world, 300_000)
    assert is_moved(plan) is moves
    stop = plan.attempts[FIRST].stop if moves else None
    assert stop is None or "over the" in stop.detail


@every("is_held", [False, True])
def test_no_job_moves_on_a_budget_for_which_machines_were_stopped(*, is_held: bool) -> None:
    limit = MicroUsd(9_000_000)
    held = Cooldown(
        provider=EVERYWHERE, scope=CooldownScope.BUDGET, subject=f"day:{limit}", until=NOW + HOUR, reason="it was short"
    )
    world = running()
    policy = replace(world.policy, budget_day=limit)
    assert is_moved(move(replace(world, policy=policy, cooldowns=(held,) * is_held))) is not is_held


def test_two_jobs_do_not_move_to_one_machine() -> None:
    world = running()
    second = AttemptId(job=job(2).id, number=1)
    owner = replace(world.jobs[FIRST.job], id=second.job, name="job2")
    twin = replace(world.attempts[FIRST], id=second, key="spotd-lab-j2-1")  # type: ignore[arg-type]  # a key
    both = replace(world, jobs={**world.jobs, owner.id: owner}, attempts={**world.attempts, second: twin})
    plan = move(both)
    assert sum(item.stop is not None for item in plan.attempts.values()) == 1


def test_a_moved_job_is_placed_again_after_its_machine_has_ended_and_is_no_loss() -> None:
    world = applied(running(), move(running()))
    builder = PlanBuilder(world, NOW + 2 * MINUTE)
    builder.end_attempt(FIRST, EndReason.MIGRATED, "x")
    after = applied(world, builder.plan())
    assert (after.jobs[FIRST.job].state, after.jobs[FIRST.job].recoveries) == (JobState.RECOVERING, 0)
    blocked = decide(after, market(offer("o2", price=200_000)), NOW + 2 * MINUTE)
    assert blocked.intents == {}, "two machines never count"


def test_a_launch_says_that_the_machine_it_moved_for_is_gone() -> None:
    owner = job()
    other = quote(offer("o3"), needs_of(owner, shop_policy()), 1_000_000, NOW)
    meant = quote(offer("o2"), needs_of(owner, shop_policy()), 1_000_000, NOW)
    gone = "; the one at shop/host-o2 for $0.2000 per hour, for which it was moved, is gone"
    assert [target_words(MOVED, 1, one) for one in (other, meant)] == [gone, ""]
    assert target_words(MOVED, 2, other) == ""


@given(
    price=st.integers(1, 1_000_000),
    hours=st.floats(0, 5000),
    age=st.floats(0, 5000),
)
def test_no_job_moves_to_a_machine_that_costs_as_much(price: int, hours: float, age: float) -> None:
    world = running(hours=age, work=Work(time=timedelta(hours=hours + 0.01)))
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    there = quote(offer("o2", price=price), needs_of(owner, shop_policy()), 1_000_000, NOW)
    found = Staying(owner, item, NOW).compare(there)
    assert found is not None
    assert found.fixed <= found.moving
    if price >= 400_000:
        assert found.saving <= 0


@given(
    hours=st.floats(1.0, 12),
    left=st.none() | st.floats(0.2, 20),
    prices=st.lists(st.integers(250_000, 345_000) | st.integers(1_000, 400_000), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["RTX_4090", "RTX_3090"]), min_size=4, max_size=4),
    speed=st.none() | st.integers(300_000, 2_000_000),
)
def test_machines_above_the_bound_of_a_move_change_no_decision(
    hours: float, left: float | None, prices: list[int], kinds: list[str], speed: int | None
) -> None:
    both = Resources(gpu=tuple(GpuAlternative(name=name, count=1) for name in ("RTX_4090", "RTX_3090")))
    world = running(hours=hours, work=Work(time=None if left is None else left * HOUR))
    owner = world.jobs[FIRST.job]
    speeds = () if speed is None else (GpuSpeed(name="RTX_4090", ppm=1_000_000), GpuSpeed(name="RTX_3090", ppm=speed))
    owner = replace(owner, spec=replace(owner.spec, resources=both, speed=speeds))
    world = replace(world, jobs={owner.id: owner})
    sold = zip(prices, kinds, strict=False)
    shown = market(offer("o1"), *(offer(f"o{n}", price=price, gpu=kind) for n, (price, kind) in enumerate(sold, 2)))
    plan = decide(world, shown, NOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relocation, "rate_limit", lambda *_: 10**12)
        assert decide(world, shown, NOW) == plan


def test_the_hazard_falls_with_age() -> None:
    ages = [timedelta(0), HOUR, 4 * HOUR, 24 * HOUR]
    losses = [expected_losses(age, HOUR) for age in ages]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 100_000


@every("minutes", [0, 0.001, 15, 20, 30, 59.9, 60, 100, 240, 470, 480, 481, 10**6])
def test_the_losses_up_to_an_age_are_the_sum_of_the_steps_up_to_it(minutes: float) -> None:
    total, begun = 0.0, timedelta(0)
    for ends, rate in (*_HAZARD, (timedelta.max, 100_000)):
        total += rate * (max(begun, min(ends, minutes * MINUTE)) - begun) / HOUR
        begun = ends
    assert expected_losses(timedelta(0), minutes * MINUTE) == pytest.approx(total, abs=len(_HAZARD) + 1)
    assert expected_losses(-HOUR, timedelta(0)) == 0


def test_the_mean_of_the_table_is_that_of_its_first_six_hours() -> None:
    assert expected_losses(timedelta(0), 6 * HOUR) == pytest.approx(6 * HAZARD_MEAN, rel=1e-5)


def test_what_was_seen_of_a_host_counts_against_a_move_to_it_and_for_one_away_from_it() -> None:
    def moving(*, here: int = 0, there_is: int = 0) -> int:
        world = running()
        there = quote(offer("o2", price=200_000), needs_of(world.jobs[FIRST.job], world.policy), 1_000_000, NOW)
        staying = Staying(world.jobs[FIRST.job], world.attempts[FIRST], NOW)
        found = staying.compare(there, hazard_here_ppm=here, hazard_there_ppm=there_is)
        assert found is not None
        return found.moving

    plain, bad = moving(), 3 * HAZARD_MEAN
    assert moving(there_is=bad) > plain
    assert moving(here=bad) < plain
    assert moving(there_is=HAZARD_MEAN // 3) == plain, "a quiet record lowers nothing"
    world = running()
    known = experience(
        record(RecordKind.LOSSES_PROVIDER, "spot", count=30, hours=40),
        record(RecordKind.LOSSES_HOST, "spot host-o2", count=30, hours=30),
    )
    assert move(world, 290_000).attempts
    assert not move(replace(world, experience=known), 290_000).attempts


def test_a_machine_that_a_job_is_on_its_way_to_draws_no_other_one() -> None:
    world = running()
    second = AttemptId(job=job(2).id, number=1)
    owner = replace(world.jobs[FIRST.job], id=second.job, name="job2")
    twin = replace(world.attempts[FIRST], id=second, key="spotd-lab-j2-1")  # type: ignore[arg-type]  # a key
    both = replace(world, jobs={**world.jobs, owner.id: owner}, attempts={**world.attempts, second: twin})
    first = applied(both, move(both))
    assert not [item for item in move(first).attempts.values() if item.stop is not None]
    assert [i for i, item in move(first, 150_000).attempts.items() if item.stop is not None] == []
    late = {
        i: replace(one, moves=replace(one.moves, claim=replace(one.moves.claim, at=NOW - 2 * HOUR)))
        for i, one in first.jobs.items()
        if one.moves.claim
    }
    assert is_moved(move(applied(first, Plan(jobs=late)))) is False, "its own machine saves already"
    assert second in move(applied(first, Plan(jobs=late))).attempts, "a move that never ended holds no machine"


def test_a_job_whose_command_has_ended_stays() -> None:
    world = running()
    [item] = world.attempts.values()
    assert is_moved(move(world))
    assert not is_moved(move(replace(world, attempts={item.id: replace(item, phase="upload")})))
