"""An end that was taken for a loss becomes a preemption once its provider says so, in all that it had changed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.cooldowns import CooldownEnd, CooldownScope
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import ONE, Record, RecordId, RecordKind, World, faded
from spotd.core.late_causes import CORRECTED_WITHIN, correct_end
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import retry
from spotd_providers.contract.values import HostId, Instance, InstanceState, Loss, Market, MicroUsd
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, world_with
from tests.unit.core.checkpoints.test_found_late import saved

TAKEN = replace(instance(InstanceState.GONE, loss=Loss.PREEMPTED), ended_at=NOW - timedelta(seconds=20))


def running(*, host: str | None = "host-o1", job: dict[str, Any] | None = None, **changes: Any) -> World:
    world = world_with(AttemptState.RUNNING, **changes)
    ((number, item),) = world.attempts.items()
    ((name, owner),) = world.jobs.items()
    named = replace(item.quote.offer, host_id=None if host is None else HostId(host), market=Market.SPOT)
    item = replace(item, quote=replace(item.quote, offer=named))
    return replace(world, attempts={number: item}, jobs={name: replace(owner, **(job or {}))})


def ended(world: World, reason: EndReason, detail: str = "") -> tuple[World, Plan, Job, Attempt]:
    """The world after this end of its one attempt, with what the store would show of both."""
    (item,) = world.attempts.values()
    builder = PlanBuilder(world, NOW)
    builder.machine_gone(item.id)
    builder.end_attempt(item.id, reason, detail)
    plan = builder.plan()
    return applied(world, plan), plan, plan.jobs[item.id.job], plan.attempts[item.id]


def lost(**changes: Any) -> tuple[World, Job, Attempt]:
    world, _, owner, item = ended(running(**changes), EndReason.HOST_LOST, "the provider lists it no more")
    return world, owner, item


def correct(world: World, owner: Job, item: Attempt, row: Instance = TAKEN, now: datetime = NOW + MINUTE) -> Plan:
    return correct_end(world, owner, (item,), item, row, now)


def counts(records: dict[RecordId, Record], now: datetime) -> dict[RecordId, tuple[int, int]]:
    """What is left of them, rounded as records are."""
    left = {identity: faded(one, now) for identity, one in records.items()}
    seconds = {i: (round(one.count / 100), round(one.span.total_seconds())) for i, one in left.items()}
    return {i: found for i, found in seconds.items() if found != (0, 0)}


def cooling(world: World, now: datetime) -> dict[tuple[CooldownScope, str], tuple[datetime, CooldownEnd]]:
    newest = {(one.scope, one.subject): (one.until, one.ends) for one in world.cooldowns}
    return {key: found for key, found in newest.items() if found[0] > now}


@given(
    spoke=st.booleans(),
    ran=st.none() | st.integers(min_value=1, max_value=9),
    has_saved=st.booleans(),
    mute_starts=st.none() | st.integers(min_value=0, max_value=3),
    host=st.none() | st.just("host-o1"),
    failed_starts=st.integers(min_value=0, max_value=3),
    idle_launches=st.integers(min_value=0, max_value=6),
    late=st.sampled_from([0, 1, 5, 59]),
)
def test_what_is_corrected_is_as_if_the_provider_had_said_it_at_once(
    *,
    spoke: bool,
    ran: int | None,
    has_saved: bool,
    mute_starts: int | None,
    host: str | None,
    failed_starts: int,
    idle_launches: int,
    late: int,
) -> None:
    world = running(
        host=host,
        running_at=None if ran is None or not spoke else NOW - ran * MINUTE,
        heartbeat_seen_at=NOW - MINUTE if spoke else None,
        job={
            "failed_starts": failed_starts,
            "idle_launches": idle_launches,
            "mute_starts": min(mute_starts or 0, failed_starts) or None,
            "checkpoints": (
                *((saved(1),) if has_saved and spoke else ()),
                *((saved(1, 100),) if mute_starts is not None else ()),
            ),
        },
    )
    now = NOW + late * MINUTE
    right, _, owed, taken = ended(world, EndReason.PREEMPTED)
    wrong, _, owner, item = ended(world, EndReason.HOST_LOST, "the provider lists it no more")
    plan = correct(wrong, owner, item, now=now)
    found = plan.jobs[owner.id]
    if owner.state is owed.state:  # one that has failed meanwhile stays failed
        assert replace(found, state_since=owed.state_since, ended_at=owed.ended_at) == owed
    assert found.totals.preemptions == 1
    assert plan.attempts[item.id] == replace(taken, end_detail="")
    after = applied(wrong, plan)
    assert counts(dict(after.experience), now) == counts(dict(right.experience), now)
    assert cooling(after, now) == cooling(right, now)


def test_a_silent_start_that_was_an_eviction_is_counted_against_neither_the_job_nor_the_host() -> None:
    world, owner, item = lost(running_at=None, heartbeat_seen_at=None)
    assert owner.failed_starts == 1
    assert owner.not_before is not None
    of_host = RecordId(kind=RecordKind.FAILED_STARTS, provider=SHOP, subject="host-o1")
    assert world.experience[of_host].count == ONE
    plan = correct(world, owner, item)
    after = applied(world, plan)
    assert after.experience.get(of_host, None) is None or after.experience[of_host].count < ONE // 1000
    found = plan.jobs[owner.id]
    assert (found.failed_starts, found.not_before, found.totals.preemptions) == (0, None, 1)
    assert found.reason == "the provider took the machine back"
    assert plan.attempts[item.id].end_reason is EndReason.PREEMPTED
    (event,) = plan.events
    assert event.kind == "attempt.corrected"
    assert event.data == {"reason": "preempted"}
    assert plan.charges == ()


def test_its_host_cools_down_no_longer_than_one_that_was_taken_back() -> None:
    world, owner, item = lost()
    (cooldown,) = correct(world, owner, item).cooldowns
    assert (cooldown.scope, cooldown.subject) == (CooldownScope.HOST, "host-o1")
    assert (cooldown.until, cooldown.ends) == (NOW + world.policy.pool_cooldown, CooldownEnd.TIME)


def test_a_correction_is_made_once() -> None:
    world, owner, item = lost()
    plan = correct(world, owner, item)
    again = correct(applied(world, plan), plan.jobs[owner.id], plan.attempts[item.id])
    assert again.is_empty


STOP = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW)


@every(
    ("attempt", "row", "now"),
    [
        pytest.param({"end_reason": EndReason.DONE}, TAKEN, NOW + MINUTE, id="done"),
        pytest.param({"end_reason": EndReason.USER_ERROR}, TAKEN, NOW + MINUTE, id="failed"),
        pytest.param({"end_reason": EndReason.LEASE_EXPIRED}, TAKEN, NOW + MINUTE, id="lease expired"),
        pytest.param({"stop": STOP}, TAKEN, NOW + MINUTE, id="stopped by us"),
        pytest.param({"phase": "done"}, TAKEN, NOW + MINUTE, id="reported by its host"),
        pytest.param({"launched_at": None}, TAKEN, NOW + MINUTE, id="never launched"),
        pytest.param({}, TAKEN, NOW + CORRECTED_WITHIN + MINUTE, id="too late"),
        pytest.param({}, TAKEN, NOW - MINUTE, id="a clock set back"),
        pytest.param({}, replace(TAKEN, loss=None), NOW + MINUTE, id="without a cause"),
        pytest.param({}, replace(TAKEN, loss=Loss.HOST_LOST), NOW + MINUTE, id="lost"),
        pytest.param({}, replace(TAKEN, ended_at=NOW + MINUTE), NOW + 2 * MINUTE, id="taken after its end"),
        pytest.param({}, replace(TAKEN, ended_at=None), NOW + MINUTE, id="taken nobody knows when"),
        pytest.param({}, instance(InstanceState.GONE, loss=Loss.PREEMPTED, ident="m2"), NOW + MINUTE, id="another"),
    ],
)
def test_nothing_else_is_corrected(attempt: dict[str, Any], row: Instance, now: datetime) -> None:
    world, owner, item = lost()
    assert correct(world, owner, replace(item, **attempt), row, now).is_empty


@every("ended_at", [None, NOW + 2 * MINUTE], ids=["unstated", "first seen absent later"])
def test_a_machine_that_a_list_showed_as_over_before_its_end_was_taken_before_it(ended_at: datetime | None) -> None:
    world, owner, item = lost(over_since=NOW - MINUTE)
    plan = correct(world, owner, item, replace(TAKEN, ended_at=ended_at), NOW + 3 * MINUTE)
    assert plan.attempts[item.id].end_reason is EndReason.PREEMPTED


def test_a_start_that_a_later_machine_has_made_good_is_not_taken_back_twice() -> None:
    world, owner, item = lost(running_at=None, heartbeat_seen_at=None)
    later = replace(item, id=replace(item.id, number=2), running_at=NOW, ended_at=NOW + 9 * MINUTE)
    owner = replace(owner, failed_starts=1, attempts_made=3)  # of the third machine
    plan = correct_end(world, owner, (item, later), item, TAKEN, NOW + 10 * MINUTE)
    assert plan.jobs[owner.id].failed_starts == 1


def test_a_late_credit_is_booked_on_the_days_on_which_the_machine_was() -> None:
    yesterday = datetime(NOW.year, NOW.month, NOW.day, tzinfo=UTC) - 20 * MINUTE
    world, owner, item = lost(launched_at=yesterday, intended_at=yesterday)
    rules = replace(world.policy.providers[SHOP], free_if_taken_within=timedelta(hours=1))
    world = replace(world, policy=replace(world.policy, providers={SHOP: rules}))
    ended_at = yesterday + 15 * MINUTE
    item = replace(item, ended_at=ended_at + MINUTE, meter=replace(item.meter, settled=MicroUsd(50_000)))
    plan = correct(world, owner, item, replace(TAKEN, ended_at=ended_at), ended_at + 45 * MINUTE)
    assert {charge.day for charge in plan.charges} == {yesterday.date()}
    assert sum(charge.amount for charge in plan.charges) < 0


def test_a_job_that_failed_meanwhile_says_how_many_of_its_starts_still_count() -> None:
    world, _, owner, item = ended(
        running(running_at=None, heartbeat_seen_at=None, job={"failed_starts": 4}), EndReason.HOST_LOST, "gone"
    )
    assert (owner.state, owner.failed_starts) == (JobState.FAILED, 5)
    found = correct(world, owner, item).jobs[owner.id]
    assert (found.state, found.failed_starts) == (JobState.FAILED, 4)
    assert found.reason == (
        "the provider took the machine back; 5 starts in a row failed, [retry] starts allows 5; as machines were taken "
        f"back, which was stated later, 4 of them count; spotctl retry {owner.name} goes on"
    )
    earlier = replace(item, id=replace(item.id, number=2), ref=item.ref)
    newest = replace(found, attempts_made=3)
    [again] = correct_end(world, newest, (earlier,), earlier, TAKEN, NOW + MINUTE).jobs.values()
    assert again.reason == found.reason.replace("4 of them", "3 of them")


def at_the_limit(*, market: Market = Market.SPOT, within: timedelta = 10 * MINUTE, starts: int = 4) -> World:
    world = running(running_at=None, heartbeat_seen_at=None, job={"failed_starts": starts})
    [item] = world.attempts.values()
    sold = replace(item.quote, offer=replace(item.quote.offer, market=market))
    rules = replace(world.policy.providers[SHOP], causes_within=within)
    policy = replace(world.policy, providers={SHOP: rules})
    return replace(world, policy=policy, attempts={item.id: replace(item, quote=sold)})


def test_a_job_does_not_fail_for_a_start_that_was_lost_before_its_provider_can_have_stated_why() -> None:
    world, _, owner, item = ended(at_the_limit(), EndReason.HOST_LOST, "gone")
    assert (owner.state, owner.failed_starts, owner.not_before) == (JobState.RECOVERING, 5, NOW + 10 * MINUTE)
    assert owner.reason == (
        "the machine was lost: gone; 5 starts in a row failed, [retry] starts allows 5; shop may state within 10 min "
        "that it took this one back"
    )
    found = correct(world, owner, item, now=NOW + 4 * MINUTE).jobs[owner.id]
    assert (found.state, found.failed_starts, found.not_before) == (JobState.RECOVERING, 4, None)
    assert found.reason == "the provider took the machine back"


@every(("starts", "waits"), [(4, True), (6, True), (19, True), (20, False), (25, False)])
def test_a_job_that_has_saved_waits_up_to_the_bound_of_hosts_that_never_spoke(starts: int, *, waits: bool) -> None:
    world = at_the_limit(starts=starts)
    [item], [owner] = world.attempts.values(), world.jobs.values()
    spoke = replace(item, heartbeat_seen_at=NOW - MINUTE, id=replace(item.id, number=2))
    owner = replace(owner, checkpoints=(saved(1, 100),), attempts_made=2)
    world = replace(world, attempts={spoke.id: spoke}, jobs={owner.id: owner})
    after = ended(world, EndReason.HOST_LOST)[2]
    assert after.state is (JobState.RECOVERING if waits else JobState.FAILED)


@every(
    ("world", "reason"),
    [
        pytest.param(at_the_limit(starts=5), EndReason.HOST_LOST, id="it has waited once"),
        pytest.param(at_the_limit(market=Market.ON_DEMAND), EndReason.HOST_LOST, id="on-demand"),
        pytest.param(at_the_limit(within=timedelta(0)), EndReason.HOST_LOST, id="nothing is stated late"),
        pytest.param(at_the_limit(), EndReason.LEASE_EXPIRED, id="another reason"),
    ],
)
def test_any_other_start_that_fails_too_often_fails_its_job_at_once(world: World, reason: EndReason) -> None:
    owner = ended(world, reason)[2]
    assert owner.state is JobState.FAILED


def test_a_start_that_was_counted_before_its_job_was_retried_takes_nothing_from_the_starts_since() -> None:
    world, _, owner, item = ended(
        running(running_at=None, heartbeat_seen_at=None, job={"failed_starts": 4}), EndReason.HOST_LOST, "gone"
    )
    [retried] = retry(world, owner, NOW + MINUTE).jobs.values()
    later = tuple(replace(item, id=replace(item.id, number=n), ended_at=NOW + n * MINUTE) for n in (2, 3, 4))
    retried = replace(retried, failed_starts=3, attempts_made=4)
    plan = correct_end(world, retried, (item, *later), item, TAKEN, NOW + 10 * MINUTE)
    assert plan.jobs[owner.id].failed_starts == 3
    plan = correct_end(world, retried, (item, *later), later[0], TAKEN, NOW + 10 * MINUTE)
    assert plan.jobs[owner.id].failed_starts == 2


def test_what_the_provider_does_not_bill_is_credited_late_too() -> None:
    world, owner, item = lost(launched_at=NOW - 10 * MINUTE)
    rules = replace(world.policy.providers[SHOP], free_if_taken_within=timedelta(hours=1))
    world = replace(world, policy=replace(world.policy, providers={SHOP: rules}))
    assert owner.spent == item.meter.settled > 0
    plan = correct(world, owner, item)
    left = sum(charge.amount for charge in plan.charges)
    assert left < 0
    assert plan.jobs[owner.id].spent == owner.spent + left
    assert plan.attempts[item.id].meter.settled == plan.jobs[owner.id].spent
    assert [event.kind for event in plan.events] == ["attempt.corrected", "attempt.credited"]
    billed = replace(item, bill=replace(item.bill, believed=MicroUsd(7)))
    assert correct(world, owner, billed).charges == ()
