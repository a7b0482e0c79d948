"""The least time that a provider bills, and the unit to which it rounds: booked at the end, and promised before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from spotd.core.budgets import BudgetGuard, committed
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import ChargePart
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import Needs, halted_rate, metered_rate, quote
from spotd_providers.contract.values import InstanceState, MicroUsd, MicroUsdPerGbMonth, MicroUsdPerHour, cost
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, instance, listing, offer, report, shop_policy, world_with

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
EC2 = {"bills_at_least": MINUTE, "bills_by": SECOND}
DISK = Needs(disk_gb=100, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
QUOTE = quote(offer("o1", storage_price=MicroUsdPerGbMonth(100_000)), DISK, 1_000_000, NOW)
GPU = MicroUsdPerHour(metered_rate(QUOTE) - halted_rate(QUOTE))


def ran_for(span: timedelta, **rules: Any) -> World:
    """A machine that bills in full since so long before now."""
    policy = shop_policy()
    policy = replace(policy, providers={SHOP: replace(policy.providers[SHOP], **rules)})
    began = NOW - span
    world = world_with(
        AttemptState.RUNNING,
        intended_at=began,
        launched_at=began,
        running_at=began,
        full_since=began,
        over_since=NOW - timedelta(microseconds=1),
        quote=QUOTE,
    )
    item = the(world)
    meter = replace(item.meter, since=began, rate=metered_rate(QUOTE))
    return replace(world, policy=policy, attempts={item.id: replace(item, meter=meter)})


def the(world: World) -> Attempt:
    (item,) = world.attempts.values()
    return item


def gone(world: World, state: InstanceState = InstanceState.GONE) -> Plan:
    return reconcile(world, listing(instance(state)), report(seq=5), NOW)


@every(
    ("rules", "ran", "billed"),
    [
        (EC2, 9 * SECOND, MINUTE),
        (EC2, 59.5 * SECOND, MINUTE),
        (EC2, MINUTE, MINUTE),
        (EC2, 61.4 * SECOND, 62 * SECOND),
        (EC2, 2 * HOUR, 2 * HOUR),
        ({"bills_by": HOUR}, 9 * SECOND, HOUR),
        ({"bills_by": HOUR}, HOUR, HOUR),
        ({"bills_by": HOUR}, HOUR + SECOND, 2 * HOUR),
        ({"bills_at_least": HOUR, "bills_by": MINUTE}, 61.5 * MINUTE, 62 * MINUTE),
        ({}, 9.5 * SECOND, 9.5 * SECOND),
    ],
    ids=str,
)
def test_a_machine_is_booked_for_the_time_that_its_provider_bills(
    rules: dict[str, Any], ran: timedelta, billed: timedelta
) -> None:
    plan = gone(ran_for(ran, **rules))
    (job,), (item,) = plan.jobs.values(), plan.attempts.values()
    expected = cost(GPU, billed) + cost(halted_rate(QUOTE), ran)
    assert abs(item.meter.settled - expected) <= 3, "each part is rounded up"
    assert sum(charge.amount for charge in plan.charges) == item.meter.settled
    assert {charge.part for charge in plan.charges} == {ChargePart.MACHINE}
    assert job.recoveries == 1
    again = gone(applied(ran_for(ran, **rules), plan))
    assert not again.charges, "once"


def test_a_price_that_changes_begins_no_new_minute() -> None:
    world = ran_for(9 * SECOND, **EC2)
    plan = reconcile(world, listing(replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(410_000))), {}, NOW)
    world = applied(world, plan)
    assert the(world).full_since == NOW - 9 * SECOND
    later = NOW + 71 * SECOND
    world = applied(world, reconcile(world, listing(instance(InstanceState.GONE), at=later), report(seq=9), later))
    assert the(world).meter.settled <= cost(MicroUsdPerHour(metered_rate(QUOTE) + 10_000), 80 * SECOND) + 3


def test_a_machine_that_only_started_is_billed_no_minute() -> None:
    world = ran_for(9 * SECOND, **EC2, bills_from_running=True)
    item = the(world)
    meter = replace(item.meter, rate=halted_rate(QUOTE), on_demand_rate=MicroUsdPerHour(0))
    starts = replace(item, state=AttemptState.STARTING, running_at=None, full_since=None, meter=meter)
    plan = gone(replace(world, attempts={item.id: starts}))
    assert plan.attempts[item.id].meter.settled <= cost(halted_rate(QUOTE), 9 * SECOND) + 1


def test_a_machine_that_is_woken_is_billed_from_a_new_start() -> None:
    world = ran_for(9 * SECOND, **EC2)
    builder = PlanBuilder(world, NOW)
    builder.set_rate(the(world).id, halted_rate(QUOTE), None)
    assert builder.attempt(the(world).id).full_since is None
    builder.set_rate(the(world).id, metered_rate(QUOTE), None, at=NOW + 20 * SECOND)
    builder.set_rate(the(world).id, MicroUsdPerHour(0), None, at=NOW + 25 * SECOND)
    item = builder.attempt(the(world).id)
    expected = 2 * cost(GPU, MINUTE) + cost(halted_rate(QUOTE), 34 * SECOND)
    assert abs(item.meter.settled - expected) <= 6


@every("ran", [timedelta(0), MINUTE, 50 * MINUTE, 59 * MINUTE, 61 * MINUTE], ids=str)
def test_what_is_promised_covers_what_is_billed_at_once(ran: timedelta) -> None:
    """However soon the machine is ended, spent and promised together are never less than its bill."""
    world = ran_for(ran, bills_by=HOUR)
    item = the(world)
    held = spent(item, NOW) + committed(world, item, NOW)
    assert held >= cost(metered_rate(QUOTE), world.policy.providers[SHOP].billed_time(ran + MINUTE))


def test_a_launch_needs_what_its_first_hour_costs_where_hours_are_sold() -> None:
    world = replace(ran_for(MINUTE), attempts={})
    (job,) = world.jobs.values()
    poor = replace(job, budget_set=MicroUsd(cost(QUOTE.price.total, 40 * MINUTE)))
    assert BudgetGuard(replace(world, jobs={job.id: poor}), NOW).refusal(poor, QUOTE) is None
    hourly = replace(ran_for(MINUTE, bills_by=HOUR), attempts={}, jobs={job.id: poor})
    assert BudgetGuard(hourly, NOW).refusal(poor, QUOTE) is not None
