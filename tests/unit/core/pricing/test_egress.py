"""What reading the checkpoint store costs counts where machines are compared, booked and budgeted."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from spotd.core.bills import Bill, Sharer, compared
from spotd.core.budgets import BudgetGuard
from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState, ReadBill
from spotd.core.domain.intents import AttemptId, Charge
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import ELSEWHERE, StoreEgress
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import settled, spent
from spotd.core.pricing import needs_of, quote, restore_cost
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.ranking.cost_words import cost_words
from spotd_providers.contract.values import InstanceState, MicroUsd, MicroUsdPerGb, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import (
    MINUTE,
    NOW,
    SHOP,
    instance,
    job,
    listing,
    market,
    offer,
    report,
    shop_policy,
    world_with,
)

FIRST = AttemptId(job=job().id, number=1)
HOUR = timedelta(hours=1)
GB = 10**9
S3 = StoreEgress(per_gb=MicroUsdPerGb(90_000))
IN_THE_SAME_CLOUD = StoreEgress(
    per_gb=MicroUsdPerGb(90_000),
    near={(SHOP, ELSEWHERE): MicroUsdPerGb(20_000), (SHOP, "here"): MicroUsdPerGb(0)},
)


def saved(size: int, *, attempt: int = 1) -> Checkpoint:
    at = NOW - 5 * MINUTE
    return Checkpoint(name="s", attempt=attempt, step=1, bytes=size, at=at, manifest_key="k", sha256="0" * 64)


def running(egress: StoreEgress, size: int = 50 * GB) -> World:
    """A machine at $0.40 for five hours, with a checkpoint of this size, and moves."""
    begun = NOW - 5 * HOUR
    world = world_with(AttemptState.RUNNING, launched_at=begun - 4 * MINUTE, running_at=begun)
    owner = replace(world.jobs[FIRST.job], checkpoints=(saved(size),))
    policy = shop_policy(moves_max=3, egress=egress)
    return replace(world, policy=policy, jobs={owner.id: owner})


def waiting(size: int, egress: StoreEgress, **changes: Any) -> World:
    owner = job(state=JobState.RECOVERING, checkpoints=(saved(size),) if size else (), attempts_made=1, **changes)
    return World(policy=shop_policy(egress=egress), jobs={owner.id: owner}, attempts={}, intents={})


def chosen(world: World, *offers: Any) -> str:
    [item] = decide(world, market(*offers), NOW).attempts.values()
    return str(item.quote.offer.offer_id)


def test_a_checkpoint_of_50_gb_does_not_move_for_less_than_its_restore_costs() -> None:
    def is_moved(egress: StoreEgress, size: int) -> bool:
        plan = decide(running(egress, size), market(offer("o1"), offer("o2", price=150_000)), NOW)
        return FIRST in plan.attempts and plan.attempts[FIRST].stop is not None

    assert is_moved(StoreEgress(), 50 * GB), "reading costs nothing: the move saves a dollar"
    assert not is_moved(S3, 50 * GB), "the restore costs $4.50"
    assert is_moved(S3, GB), "a small one is read for nine cents"


def test_a_restore_costs_what_host_and_store_ask() -> None:
    owner = waiting(50 * GB, S3).jobs[FIRST.job]
    sold = offer(download_price=MicroUsdPerGb(10_000))
    agreed = quote(sold, needs_of(owner, shop_policy()), 1_000_000, NOW, S3.price_for(sold))
    assert restore_cost(owner, agreed) == 4_500_000 + 500_000


def test_a_host_that_reads_for_nothing_is_worth_a_higher_price() -> None:
    far, near = offer("far", price=200_000, region="there"), offer("near", price=400_000, region="here")
    assert chosen(waiting(50 * GB, IN_THE_SAME_CLOUD), far, near) == "far", "$1.00 in six hours is $0.17 an hour"
    dear = replace(IN_THE_SAME_CLOUD, near={(SHOP, "here"): MicroUsdPerGb(0)})
    assert chosen(waiting(50 * GB, dear), far, near) == "near", "$4.50 in six hours are $0.75 an hour"
    assert chosen(waiting(0, dear), far, near) == "far", "nothing is read"
    assert chosen(waiting(50 * GB, StoreEgress()), far, near) == "far"


def test_no_ceiling_holds_what_the_owner_of_the_store_asks() -> None:
    """A ceiling that a large checkpoint broke could never be met again: the job would wait for ever."""
    plan = decide(waiting(500 * GB, S3), market(offer(price=499_000)), NOW)
    [item] = plan.attempts.values()
    assert item.quote.price.total == 499_000
    assert item.quote.egress_price == 90_000


def test_a_budget_sets_the_read_aside_before_the_launch() -> None:
    world = waiting(50 * GB, S3, budget=4_000_000)
    plan = decide(world, market(offer()), NOW)
    assert not plan.attempts
    assert "$4.5000 of it for its restore and uploads" in plan.verdicts[FIRST.job].sentence
    assert decide(waiting(50 * GB, S3, budget=6_000_000), market(offer()), NOW).attempts
    guard = BudgetGuard(world, NOW)
    agreed = next(_quotes(world))
    assert guard.refusal(world.jobs[FIRST.job], agreed) is not None


def _quotes(world: World) -> Any:
    catalogue = CandidateCatalogue(world, market(offer()), NOW)
    return catalogue.ranked(catalogue.list_for(catalogue.key_of(world.jobs[FIRST.job])))


def test_what_was_read_is_in_what_the_job_has_cost() -> None:
    sold = offer()
    agreed = quote(sold, needs_of(job(), shop_policy()), 1_000_000, NOW, MicroUsdPerGb(90_000))
    world = world_with(AttemptState.RUNNING, quote=agreed)
    owner = replace(world.jobs[FIRST.job], checkpoints=(saved(50 * GB, attempt=0),))
    world = replace(world, jobs={owner.id: owner})
    before = spent(world.attempts[FIRST], NOW)
    heard = report(seq=6, phase="run", restored_bytes=50 * GB)
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=NOW), heard, NOW))
    assert spent(world.attempts[FIRST], NOW) - before == 4_500_000


def ended() -> tuple[World, Job, Charge]:
    """A machine that cost $0.40 and read for $4.50, all of it booked."""
    agreed = quote(offer(), needs_of(job(), shop_policy()), 1_000_000, NOW, MicroUsdPerGb(90_000))
    world = world_with(AttemptState.ENDING, quote=agreed, restored_bytes=50 * GB)
    item = world.attempts[FIRST]
    meter = replace(item.meter, since=NOW - HOUR, traffic=MicroUsd(4_500_000))
    item, charges = settled(replace(item, meter=meter), NOW, MicroUsdPerHour(0), None)
    item = replace(item, state=AttemptState.ENDED, machine=MachineState.GONE, ended_at=NOW)
    owner = replace(world.jobs[FIRST.job], spent=item.meter.settled)
    return replace(world, attempts={item.id: item}), owner, charges[0]


@every("billed", [400_000, 300_000, 450_000])
def test_a_providers_bill_takes_nothing_back_of_what_the_store_asks(billed: int) -> None:
    world, owner, charge = ended()
    bill = Bill(amount=MicroUsd(billed), since=NOW - 24 * HOUR, until=NOW)
    item = replace(world.attempts[FIRST], bill=ReadBill(read=bill.amount))
    assert item.meter.settled == 4_900_000
    plan = compared(world, [Sharer(job=owner, item=item, booked=(charge,))], bill, NOW + 9 * HOUR)
    assert sum(one.amount for one in plan.charges) == billed - 400_000
    assert plan.attempts[FIRST].bill.believed == billed


def test_why_states_what_a_restore_costs() -> None:
    world = waiting(50 * GB, S3)
    words = cost_words(world.jobs[FIRST.job], world, market(offer()), NOW)
    assert words[-1] == (
        "a restore reads 50.0 GB of the checkpoint store, for which its owner asks $4.50 ($0.0900/GB), on top of the"
        " price per hour"
    )
    free = waiting(50 * GB, StoreEgress())
    assert not any("checkpoint store" in one for one in cost_words(free.jobs[FIRST.job], free, market(offer()), NOW))
