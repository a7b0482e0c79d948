"""What a checkpoint costs to upload is promised before it is spent: to go on, to be launched, and to save at a stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.budgets import BudgetGuard, committed, still_to_run
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, spent_in_month, spent_on_day
from spotd.core.pricing import needs_of, quote
from spotd.core.requests import cancel
from spotd_providers.contract.values import AttemptKey, InstanceState, MicroUsd, MicroUsdPerGb, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, market, offer, report, shop_policy, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
GB = 1_000_000_000
USD = 1_000_000
BUDGETS = ("day", "month", "job")


def the(world: World) -> Attempt:
    return world.attempts[FIRST]


def saved(gigabytes: float, *, at: datetime = NOW - 10 * MINUTE, attempt: int = 1, number: int = 1) -> Checkpoint:
    return Checkpoint(
        name=f"step-{number}",
        attempt=attempt,
        step=number,
        bytes=int(gigabytes * GB),
        at=at,
        manifest_key=f"manifest-{number}",
        sha256="0" * 64,
    )


def limited(world: World, budget: str, usd: float) -> World:
    """The world with this budget, of which nothing was spent before."""
    amount = MicroUsd(int(usd * USD))
    if budget == "job":
        return replace(world, jobs={i: replace(j, budget_set=amount) for i, j in world.jobs.items()})
    changes: dict[str, Any] = {f"budget_{budget}": amount}
    return replace(world, policy=replace(world.policy, **changes))


def running(gigabytes: float | None, upload: int, **changes: Any) -> World:
    """A machine at $0.40 under a very high ceiling; its job has saved one checkpoint before, or none."""
    sold = offer(upload_price=MicroUsdPerGb(upload))
    world = world_with(
        AttemptState.RUNNING,
        quote=quote(sold, needs_of(job(), shop_policy()), 1_000_000, NOW),
        ceiling=10_000 * USD,
        **changes,
    )
    if gigabytes is None:
        return world
    owner = world.jobs[FIRST.job]
    return replace(world, jobs={owner.id: replace(owner, checkpoints=(saved(gigabytes, attempt=0),))})


def cycle(world: World, at: datetime, fresh: tuple[Checkpoint, ...] = ()) -> World:
    seq = the(world).heartbeat_seq + 1
    told = {i: replace(r, read_at=at) for i, r in report(seq=seq, phase="run", checkpoints=fresh).items()}
    first = reconcile(world, listing(instance(InstanceState.RUNNING), at=at), told, at)
    world = applied(world, first)
    return applied(world, decide(world, market(at=at), at))


def life(world: World, gigabytes: float, budget: str) -> Iterator[tuple[World, int]]:
    """A machine that saves every quarter of an hour until it is stopped, and once more then if it may."""
    at, number = NOW, 1
    for step in range(6 * 12):
        at = NOW + step * 5 * MINUTE
        fresh: tuple[Checkpoint, ...] = ()
        if step % 3 == 2:
            number += 1
            fresh = (saved(gigabytes, at=at, number=number),)
        world = cycle(world, at, fresh)
        if the(world).stop is not None:
            break
        yield world, cost_so_far(world, budget, at)
    stop = the(world).stop
    if stop is not None and stop.flush:
        at += MINUTE
        world = cycle(world, at, (saved(gigabytes, at=at, number=number + 1),))
    yield world, cost_so_far(world, budget, at)


def cost_so_far(world: World, budget: str, at: datetime) -> int:
    if budget == "job":
        return job_spent(world, world.jobs[FIRST.job], at)
    return spent_on_day(world, at) if budget == "day" else spent_in_month(world, at)


SIZES = [
    (gigabytes, upload, usd)
    for gigabytes in (0.001, 24.5, 392, 10_000)
    for upload in (0, 10_000, 90_000)
    for usd in (1, 6, 25, 400)
]
TABLE = [
    pytest.param(*case, BUDGETS[number % 3], id="{:g} GB at {} micro-dollars of ${}".format(*case))
    for number, case in enumerate(SIZES)
]


@every(("gigabytes", "upload", "usd", "budget"), TABLE)
def test_no_budget_is_broken_by_an_upload_whose_size_was_known(
    gigabytes: float, upload: int, usd: float, budget: str
) -> None:
    world = limited(running(gigabytes, upload), budget, usd)
    worlds = list(life(world, gigabytes, budget))
    assert max(amount for _, amount in worlds) <= usd * USD
    stop = the(worlds[-1][0]).stop
    save = gigabytes * upload
    if 2 * save + 200_000 < usd * USD:
        assert stop is None or stop.flush, "it was stopped early enough to save"


@every(("gigabytes", "upload", "usd", "budget"), TABLE)
def test_the_first_checkpoint_of_unknown_size_is_the_only_upload_that_can_break_a_budget(
    gigabytes: float, upload: int, usd: float, budget: str
) -> None:
    worlds = list(life(limited(running(None, upload), budget, usd), gigabytes, budget))
    first = int(gigabytes * upload) + 200_000
    assert max(amount for _, amount in worlds) <= max(usd * USD, first)


def test_a_stop_for_money_saves_where_that_fits_and_stops_at_once_where_it_does_not() -> None:
    for usd, flush in ((6, False), (9, True)):
        world = limited(running(None, 10_000), "day", usd)
        world = cycle(world, NOW, (saved(392, at=NOW),))
        stop = the(world).stop
        assert stop is not None
        assert stop.reason is EndReason.BUDGET_PAUSED
        assert stop.flush is flush
        grace = world.jobs[FIRST.job].spec.checkpoint.stop_grace
        assert (stop.deadline - NOW >= grace + world.policy.save_allowance) is flush


def test_a_stop_for_another_reason_in_the_same_decision_uploads_no_more_than_is_left() -> None:
    for usd, flush in ((6, False), (60, True)):
        world = limited(running(None, 10_000), "day", usd)
        item = the(world)
        order = StopOrder(reason=EndReason.PRICE_ROSE, detail="", ordered_at=NOW, deadline=NOW + 5 * MINUTE)
        item = replace(item, stop=order, state=AttemptState.STOPPING)
        owner = replace(world.jobs[FIRST.job], checkpoints=(saved(392),), spent=MicroUsd(0))
        world = replace(
            world,
            attempts={FIRST: item},
            jobs={owner.id: owner},
            spent_by_day={NOW.date(): MicroUsd(3_920_000)},
        )
        stop = the(applied(world, decide(world, market(), NOW))).stop
        assert stop is not None
        assert stop.reason is EndReason.PRICE_ROSE
        assert stop.flush is flush


def test_of_several_machines_those_save_that_have_most_to_lose() -> None:
    world = running(100, 10_000)
    others = {}
    jobs = dict(world.jobs)
    for number, minutes in ((1, 5), (2, 50), (3, 20)):
        owner = replace(
            job(number, attempts_made=1, state=world.jobs[FIRST.job].state),
            checkpoints=(saved(100, at=NOW - minutes * MINUTE),),
        )
        jobs[owner.id] = owner
        identity = AttemptId(job=owner.id, number=1)
        others[identity] = replace(the(world), id=identity, key=AttemptKey(f"spotd-lab-{owner.id}-1"))
    world = replace(world, jobs=jobs, attempts=others, spent_by_day={NOW.date(): MicroUsd(6_300_000)})
    world = limited(world, "day", 9)
    after = applied(world, decide(world, market(), NOW))
    may = {i.job: a.stop.flush for i, a in after.attempts.items() if a.stop is not None}
    assert may == {"j1": False, "j2": True, "j3": True}


def test_what_is_promised_falls_to_the_last_save_at_a_stop_and_to_none_once_that_has_come() -> None:
    world = running(50, 10_000)
    time = committed(running(None, 10_000), the(world), NOW)
    assert committed(world, the(world), NOW) - time == 2 * 500_000
    world = applied(world, cancel(world, FIRST.job, NOW))
    assert committed(world, the(world), NOW) - time == 500_000
    after = NOW + MINUTE
    world = cycle(world, after, (saved(50, at=after, number=2),))
    assert committed(world, the(world), after) == time


@every("budget", BUDGETS)
@every(
    ("gigabytes", "upload", "download", "usd", "launched"),
    [
        pytest.param(392, 10_000, 0, 6, False, id="neither of two saves"),
        pytest.param(392, 10_000, 0, 12, True, id="both"),
        pytest.param(392, 0, 10_000, 3, False, id="not even the restore"),
        pytest.param(392, 0, 10_000, 6, True, id="the restore"),
        pytest.param(392, 0, 0, 3, True, id="free traffic"),
        pytest.param(0, 90_000, 90_000, 1, True, id="unknown size"),
        pytest.param(100_000, 90_000, 90_000, 1_000, False, id="a hundred terabytes"),
    ],
)
def test_a_launch_carries_its_restore_and_two_saves(
    gigabytes: float, upload: int, download: int, usd: float, launched: bool, budget: str
) -> None:
    owner = job(ceiling=20_000 * USD, checkpoints=(saved(gigabytes, attempt=0),) if gigabytes else (), attempts_made=1)
    every = replace(owner.spec.checkpoint, every=timedelta(hours=12))
    owner = replace(owner, spec=replace(owner.spec, checkpoint=every))
    world = World(
        policy=replace(shop_policy(), expected_stay=timedelta(days=9)), jobs={owner.id: owner}, attempts={}, intents={}
    )
    # Fast enough that the time of the restore costs next to nothing.
    sold = offer(upload_price=MicroUsdPerGb(upload), download_price=MicroUsdPerGb(download), download_mbps=100_000.0)
    world = limited(world, budget, usd)
    plan = decide(world, market(sold), NOW)
    assert bool(plan.attempts) is launched
    if launched:
        after = applied(world, plan)
        again = decide(after, market(sold), NOW + MINUTE)
        assert all(a.stop is None for a in again.attempts.values()), "what was admitted is not stopped at once"


def test_an_offer_whose_traffic_fits_the_budget_is_taken_where_the_best_does_not() -> None:
    owner = job(checkpoints=(saved(100, attempt=0),), attempts_made=1)
    every = replace(owner.spec.checkpoint, every=timedelta(hours=24))
    owner = replace(owner, spec=replace(owner.spec, checkpoint=every))
    world = limited(World(policy=shop_policy(), jobs={owner.id: owner}, attempts={}, intents={}), "day", 1.5)
    best = offer("best", price=100_000, upload_price=MicroUsdPerGb(10_000))
    free = offer("free", price=400_000)
    plan = decide(world, market(best, free), NOW)
    (item,) = plan.attempts.values()
    assert item.quote.offer.offer_id == "free"
    refused = decide(world, market(best), NOW)
    assert refused.verdicts[owner.id].kind is VerdictKind.BUDGET_DAY
    assert "uploads" in refused.verdicts[owner.id].sentence


def test_a_launch_is_admitted_only_beside_a_useful_run_of_every_machine() -> None:
    world, newcomer = running(1, 10_000, intended_at=NOW), job(2)
    agreed = quote(offer("o2"), needs_of(newcomer, shop_policy()), 1_000_000, NOW)
    rich = BudgetGuard(limited(world, "day", 1_000), NOW)
    lacking = rich.lacking(newcomer, agreed)
    assert lacking is not None
    enough = 1_000 * USD + lacking
    assert still_to_run(world, the(world), NOW) > 0
    for limit, is_admitted in ((enough, True), (enough - 1, False)):
        poor = replace(world, policy=replace(world.policy, budget_day=MicroUsd(limit)))
        assert (BudgetGuard(poor, NOW).refusal(newcomer, agreed) is None) is is_admitted


@every("budget", BUDGETS)
def test_of_two_raises_in_one_decision_the_second_finds_the_money_of_the_first_set_aside(budget: str) -> None:
    world = running(None, 0)
    item, owner = the(world), world.jobs[FIRST.job]
    higher = MicroUsdPerHour(item.quote.price.total + 100_000)

    def guard(cents: int) -> tuple[BudgetGuard, Job]:
        some = limited(world, budget, cents / 100)
        return BudgetGuard(some, NOW), some.jobs[owner.id]

    least = next(c for c in range(1, 200) if guard(c)[0].carries_raise(guard(c)[1], item, higher))
    twice, owner = guard(least)
    assert [twice.carries_raise(owner, item, higher) for _ in range(2)] == [True, False]
