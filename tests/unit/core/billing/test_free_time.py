"""A machine that its provider takes soon after its launch costs nothing but its disk: what was booked is taken back."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, on_demand_spent, spent_in_month, spent_on_day
from spotd.core.pricing import needs_of, quote
from spotd.store.commit import StoredRows, check_plan
from spotd_providers.contract.values import InstanceState, Loss, MicroUsd, MicroUsdPerGb, MicroUsdPerGbMonth
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, job, listing, offer, report, shop_policy, world_with

JOB = JobId("j1")
DISK = MicroUsdPerGbMonth(720_000)
"""A cent per hour for the ten gigabytes of a job that asks for nothing else."""


def world(*, free: timedelta = timedelta(hours=1), launched: datetime = NOW - 10 * MINUTE, **changes: Any) -> World:
    """A machine at $0.40 an hour plus a cent for its disk, of a provider that bills none of its first hour."""
    agreed = quote(offer(storage_price=DISK), needs_of(job(), shop_policy()), 1_000_000, launched)
    assert agreed.price.total == 410_000
    known = {
        "quote": agreed,
        "launched_at": launched,
        "intended_at": launched,
        "over_since": NOW - timedelta(microseconds=1),
    }
    base = world_with(AttemptState.RUNNING, **{**known, **changes})
    (item,) = base.attempts.values()
    meter = replace(item.meter, rate=agreed.price.total, since=launched)
    rules = replace(base.policy.providers[SHOP], free_if_taken_within=free)
    return replace(
        base,
        policy=replace(base.policy, providers={SHOP: rules}),
        attempts={item.id: replace(item, meter=meter)},
    )


def seen(before: World, state: InstanceState, loss: Loss | None, at: datetime = NOW) -> tuple[World, Plan]:
    """A listing tells this of the machine, whose runner has written nothing new."""
    heard = {i: replace(r, read_at=at) for i, r in report(seq=5).items()}
    plan = reconcile(before, listing(instance(state, loss=loss), at=at), heard, at)
    check_plan(
        plan, StoredRows(jobs={j: before.jobs[j].state for j in before.jobs}, attempts=_stored(before), intents={})
    )
    return applied(before, plan), plan


def _stored(before: World) -> Any:
    return {i: (a.state, a.key) for i, a in before.attempts.items()}


def attempt(after: World) -> Attempt:
    (item,) = after.attempts.values()
    return item


def taken_back(plan: Plan) -> list[tuple[date, int]]:
    return [(c.day, c.amount) for c in plan.charges if c.amount < 0]


@every("loss", [Loss.PREEMPTED, Loss.OUTBID])
def test_what_the_provider_took_in_the_first_hour_costs_its_disk_alone(loss: Loss) -> None:
    after, plan = seen(world(), InstanceState.ENDING, loss)
    # Ten minutes at $0.40 are $0.066667; the disk's cent per hour is owed in any case.
    assert attempt(after).meter.settled == 1_667
    assert taken_back(plan) == [(NOW.date(), -66_667)]
    assert job_spent(after, after.jobs[JOB], NOW) == spent_on_day(after, NOW) == spent_in_month(after, NOW) == 1_667
    assert attempt(after).on_demand_settled == on_demand_spent(attempt(after), NOW) > 66_667, "it would have cost this"
    (told,) = [event for event in plan.events if event.kind == "attempt.credited"]
    assert told.message == "shop took the machine within 60 minutes, which makes its time free: $0.0667"


def test_its_traffic_is_not_taken_back() -> None:
    before = world()
    item = attempt(before)
    priced = replace(item.quote, offer=replace(item.quote.offer, upload_price=MicroUsdPerGb(20_000)))
    moved = replace(item, quote=priced, uploaded_bytes=10**9, meter=replace(item.meter, traffic=MicroUsd(20_000)))
    plans = [
        seen(replace(before, attempts={item.id: one}), InstanceState.GONE, Loss.PREEMPTED)[1] for one in (item, moved)
    ]
    assert taken_back(plans[0]) == taken_back(plans[1]) != []


def test_it_is_taken_back_once_however_often_its_end_is_listed() -> None:
    after, _ = seen(world(), InstanceState.ENDING, Loss.PREEMPTED)
    for minutes in (1, 2):
        after, plan = seen(after, InstanceState.ENDING, Loss.PREEMPTED, NOW + minutes * MINUTE)
        assert not taken_back(plan)
    last, plan = seen(after, InstanceState.GONE, Loss.PREEMPTED, NOW + 3 * MINUTE)
    assert not taken_back(plan)
    assert last.jobs[JOB].spent == 1_667


def test_a_machine_first_seen_when_it_is_gone_is_free_as_well() -> None:
    after, plan = seen(world(), InstanceState.GONE, Loss.PREEMPTED)
    assert sum(amount for _, amount in taken_back(plan)) == -66_667
    assert after.jobs[JOB].spent == 1_667


def test_an_end_that_we_ordered_too_does_not_make_it_cost() -> None:
    lost, _ = seen(world(heartbeat_seen_at=NOW - 35 * MINUTE), InstanceState.RUNNING, None)
    (ending,) = lost.intents
    ordered = applied(lost, terminate_accepted(lost, ending, NOW))
    assert attempt(ordered).meter.settled == 68_334
    after, _ = seen(ordered, InstanceState.GONE, Loss.PREEMPTED, NOW + 2 * MINUTE)
    assert after.jobs[JOB].spent == 2_000, "the disk until it was seen to be gone, and no more"


@every(
    ("before", "loss"),
    [
        pytest.param(world(), None, id="ended-by-us"),
        pytest.param(world(), Loss.SELF, id="ended-itself"),
        pytest.param(world(), Loss.HOST_LOST, id="a-broken-host"),
        pytest.param(world(free=timedelta(0)), Loss.PREEMPTED, id="a-provider-that-bills-what-it-takes"),
        pytest.param(world(launched=NOW - timedelta(hours=1)), Loss.PREEMPTED, id="after-its-first-hour"),
        pytest.param(
            world(free=timedelta(0), launched_at=NOW + 10 * MINUTE),
            Loss.PREEMPTED,
            id="answered-after-its-end",
        ),
    ],
)
def test_every_other_end_is_paid_for(before: World, loss: Loss | None) -> None:
    after, plan = seen(before, InstanceState.GONE, loss)
    assert not taken_back(plan)
    assert after.jobs[JOB].spent == attempt(before).meter.settled + sum(c.amount for c in plan.charges) > 68_000


def test_what_was_booked_before_midnight_is_taken_back_from_that_day() -> None:
    launched = datetime(2026, 3, 1, 23, 40, tzinfo=UTC)
    at = datetime(2026, 3, 2, 0, 10, tzinfo=UTC)
    before = world(launched=launched, heartbeat_seen_at=at, over_since=at - MINUTE)
    after, plan = seen(before, InstanceState.GONE, Loss.PREEMPTED, at)
    assert [day for day, _ in taken_back(plan)] == [date(2026, 3, 1), date(2026, 3, 2)]
    # Half an hour of disk is half a cent, two thirds of it yesterday's.
    assert after.spent_by_day == {date(2026, 3, 1): 3_333, date(2026, 3, 2): 1_667}
    assert after.jobs[JOB].spent == 5_000


def test_what_was_taken_in_the_first_hour_is_free_when_its_end_is_seen_later() -> None:
    stage = world()
    (item,) = stage.attempts.values()
    began = NOW - timedelta(minutes=80)
    heard = began + timedelta(minutes=49)
    item = replace(
        item,
        intended_at=began,
        launched_at=began,
        heartbeat_seen_at=heard,
        notice_at=began + timedelta(minutes=50),
        meter=replace(item.meter, since=began, until=heard + timedelta(minutes=34)),
    )
    stage = replace(stage, attempts={item.id: item})
    gone = listing(instance(InstanceState.GONE, loss=Loss.PREEMPTED))
    assert reconcile(stage, gone, report(), NOW).attempts[item.id].meter.settled <= 14_000, "its disk"
    spoke_later = replace(item, heartbeat_seen_at=began + timedelta(minutes=61))
    stage = replace(stage, attempts={item.id: spoke_later})
    assert reconcile(stage, gone, report(), NOW).attempts[item.id].meter.settled > 300_000
