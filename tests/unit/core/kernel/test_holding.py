"""An outbid machine that its provider keeps: waited for, left, or gone on with."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.bids import SPEAKS_WITHIN, hold_words, leave_above_ceiling
from spotd.core.decide import decide
from spotd.core.domain.attempts import Bidding
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import set_ceiling
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import (
    InstanceState,
    Loss,
    Market,
    MicroUsd,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
)
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, offer, report, world_with
from tests.unit.core.kernel.test_raised_bids import bid_market, bid_world, usd

FIRST = AttemptId(job=job().id, number=1)
SAVED = Checkpoint(name="s", attempt=1, step=1, bytes=1, at=NOW - 5 * MINUTE, manifest_key="k", sha256="0" * 64)


def world(*, hold: timedelta = 10 * MINUTE, checkpoints: tuple[Checkpoint, ...] = (SAVED,), **known: Any) -> World:
    some = bid_world(known=Bidding(placed=(usd(0.44),), **known))
    item = replace(some.attempts[FIRST], over_since=NOW - MINUTE)
    some = replace(some, attempts={FIRST: item})
    owner = replace(some.jobs[FIRST.job], checkpoints=checkpoints)
    policy = replace(some.policy, raise_bids=False, hold_max=hold)
    return replace(some, policy=policy, jobs={owner.id: owner})


def seen(some: World, state: InstanceState, *, seq: int = 5, minutes: float = 0, loss: Loss | None = None) -> Plan:
    at = NOW + timedelta(minutes=minutes)
    mine = replace(instance(state, loss=loss), market=Market.SPOT)
    reports = {i: replace(one, read_at=at) for i, one in report(seq=seq, phase="run").items()}
    return reconcile(some, listing(mine, at=at), reports, at)


def outbid(some: World, **changes: Any) -> Plan:
    return seen(some, InstanceState.PAUSED, loss=Loss.OUTBID, **changes)


def test_an_outbid_machine_is_kept_and_counts() -> None:
    plan = outbid(world())
    item = plan.attempts[FIRST]
    assert (item.state, item.bidding.held_since) == (AttemptState.RUNNING, NOW)
    assert item.meter.rate == 0, "its disk is free here"
    assert plan.intents == {}
    words = hold_words(item, world().policy, NOW + 4 * MINUTE)
    disk = "$0.0000 per hour for its disk"
    assert words == f"outbid: it is kept for 6 min more at {disk}, since no other machine is as cheap"
    assert words in decide(applied(world(), plan), bid_market(), NOW + 4 * MINUTE).verdicts[FIRST.job].sentence


@every(
    "some",
    [
        pytest.param(world(hold=timedelta(0)), id="nobody asked for it"),
        pytest.param(world(checkpoints=()), id="nothing was saved"),
    ],
)
def test_an_outbid_machine_is_ended(some: World) -> None:
    assert outbid(some).attempts[FIRST].end_reason is EndReason.OUTBID


def left(some: World, *offers: Offer) -> str:
    plan = decide(some, bid_market(*offers), NOW)
    if FIRST not in plan.attempts:
        return ""
    item = plan.attempts[FIRST]
    assert item.stop is not None
    assert (item.state, item.stop.reason, item.stop.flush) == (AttemptState.STOPPING, EndReason.OUTBID, True)
    return next(event.message for event in plan.events if event.kind == "attempt.left").partition(": ")[2]


def test_it_is_left_for_another_machine_that_is_as_cheap() -> None:
    held = world(held_since=NOW - MINUTE)
    assert left(held) == ""
    assert left(held, offer("o2", price=490_000)) == ""
    assert left(held, offer("o2", price=480_000)) == "another costs $0.4800 per hour, this one $0.4400"


@every(
    ("left_in_budget", "is_left"),
    [pytest.param(160_000, False, id="for ten minutes"), pytest.param(400_000, True, id="for an hour")],
)
@every("whose", ["job", "day"])
def test_it_is_left_for_another_machine_only_if_a_budget_carries_that_one(
    left_in_budget: int, whose: str, *, is_left: bool
) -> None:
    """It may wake and go on for what is left, which is too little to begin anew elsewhere."""
    held = world(held_since=NOW - MINUTE)
    owner = held.jobs[FIRST.job]
    if whose == "job":
        held = replace(held, jobs={owner.id: replace(owner, budget_set=MicroUsd(left_in_budget))})
    else:
        held = replace(held, policy=replace(held.policy, budget_day=MicroUsd(left_in_budget)))
    assert bool(left(held, offer("o2", price=480_000))) is is_left


@every(
    ("priority", "machines_max", "is_left"),
    [
        pytest.param(5, 1, False, id="its only place is awaited"),
        pytest.param(5, 2, True, id="there is a place for both"),
        pytest.param(-5, 1, True, id="it comes first itself"),
    ],
)
@every("raises", [True, False], ids=["bids are raised", "bids stay"])
def test_it_is_left_for_another_machine_only_if_no_other_job_gets_its_place(
    priority: int, machines_max: int, *, is_left: bool, raises: bool
) -> None:
    held = world(held_since=NOW - MINUTE, floor=usd(0.45))
    waits = replace(job(2), spec=replace(job(2).spec, priority=priority))
    policy = replace(held.policy, machines_max=machines_max, raise_bids=raises)
    held = replace(held, jobs={**held.jobs, waits.id: waits}, policy=policy)
    others = (offer("o2", price=420_000), offer("o3", price=425_000))
    assert bool(left(held, *others)) is is_left
    if not is_left:
        words = "leave is held back: job2 waits for its place of [budget] machines"
        assert words in decide(held, bid_market(*others), NOW).verdicts[FIRST.job].sentence


def test_it_is_left_when_its_price_is_out_of_reach_or_its_time_is_up() -> None:
    far = world(held_since=NOW - MINUTE, floor=usd(0.70))
    assert left(far) == "the lowest bid that wins is $0.7000, at most $0.5000 may be bid"
    assert left(world(held_since=NOW - 11 * MINUTE)) == "it was kept for 10 min"
    assert left(world(held_since=NOW + 9 * MINUTE)) == "it was kept for 10 min", "the clock was set back"


def test_an_outbid_machine_is_bid_for_again_under_the_ceiling() -> None:
    some = world(held_since=NOW - MINUTE, floor=usd(0.45))
    some = replace(some, policy=replace(some.policy, raise_bids=True))
    plan = decide(some, bid_market(), NOW)
    assert plan.attempts[FIRST].price_max == usd(0.495)
    assert plan.attempts[FIRST].state is AttemptState.RUNNING


@every(
    ("some", "why"),
    [
        pytest.param(
            world(held_since=NOW - MINUTE, floor=usd(0.45)),
            "another costs $0.5000 per hour, this one $0.4950",
            id="at the raised bid another one is as good",
        ),
        pytest.param(
            world(held_since=NOW - 11 * MINUTE, floor=usd(0.45)), "it was kept for 10 min", id="its time is up"
        ),
    ],
)
def test_no_bid_is_raised_for_an_outbid_machine_that_is_left(some: World, why: str) -> None:
    some = replace(some, policy=replace(some.policy, raise_bids=True))
    assert left(some, offer("o2", price=500_000)) == why
    plan = decide(some, bid_market(offer("o2", price=500_000)), NOW)
    assert [event.kind for event in plan.events if event.kind.startswith("bid.")] == []
    assert plan.intents == {}
    assert plan.attempts[FIRST].price_max == usd(0.44)


def test_a_machine_that_wakes_goes_on_once_it_has_spoken() -> None:
    first = world(held_since=NOW - 6 * MINUTE)
    awake = applied(first, seen(first, InstanceState.RUNNING))
    assert awake.attempts[FIRST].bidding.woke_at == NOW
    assert awake.attempts[FIRST].bidding.held_since is not None, "its grant still offers what to go on from"
    silent = applied(awake, seen(awake, InstanceState.RUNNING, minutes=3))
    assert silent.attempts[FIRST].bidding.held_since is not None
    after = applied(awake, seen(awake, InstanceState.RUNNING, seq=6, minutes=3))
    item = after.attempts[FIRST]
    assert item.bidding.held_since is None
    before = first.attempts[FIRST].running_at
    assert before is not None
    assert item.running_at == before + 6 * MINUTE, "its command did not run meanwhile"
    assert item.meter.rate == MicroUsdPerHour(usd(0.44))


def heard(some: World, *, seq: int, minutes: float, listed_at: float = 0) -> Plan:
    """Its host wrote, and the newest list is older and shows the machine as outbid."""
    mine = replace(instance(InstanceState.PAUSED, loss=Loss.OUTBID), market=Market.SPOT)
    at = NOW + timedelta(minutes=minutes)
    reports = {i: replace(one, read_at=at) for i, one in report(seq=seq, phase="run").items()}
    return reconcile(some, listing(mine, at=NOW + timedelta(minutes=listed_at)), reports, at)


def test_a_machine_whose_host_speaks_goes_on_though_its_provider_is_away_and_its_time_is_up() -> None:
    some = world(held_since=NOW - 9 * MINUTE)
    some = applied(some, heard(some, seq=5, minutes=0))
    for minutes in (3, 4):
        some = applied(some, heard(some, seq=5 + minutes, minutes=minutes))
        assert decide(some, bid_market(), NOW + minutes * MINUTE).attempts == {}, "it computes, and is not left"
    item = some.attempts[FIRST]
    assert (item.state, item.bidding.held_since) == (AttemptState.RUNNING, None)
    assert item.meter.rate == MicroUsdPerHour(usd(0.44)), "it bills in full"


@every("state", [InstanceState.PAUSED, InstanceState.GONE])
def test_a_list_from_before_it_woke_is_no_first_of_two_that_say_it_is_over(state: InstanceState) -> None:
    some = world(held_since=NOW - 9 * MINUTE)
    for minutes in (0, 3, 4, 5, 6):
        some = applied(some, heard(some, seq=5 + minutes, minutes=minutes))
    assert (some.attempts[FIRST].bidding.held_since, some.attempts[FIRST].over_since) == (None, None)
    wrong = replace(instance(state, loss=Loss.OUTBID), market=Market.SPOT)
    at = NOW + timedelta(minutes=9)
    reports = {i: replace(one, read_at=at) for i, one in report(seq=20, phase="run").items()}
    once = applied(some, reconcile(some, listing(wrong, at=at), reports, at))
    assert once.attempts[FIRST].state is AttemptState.RUNNING, "one row says so, and its host has just spoken"
    later = {i: replace(one, read_at=at + 2 * MINUTE) for i, one in reports.items()}
    again = reconcile(once, listing(wrong, at=at + MINUTE), later, at + 2 * MINUTE)
    assert again.attempts[FIRST] != once.attempts[FIRST], "two lists since it woke"


def test_what_its_host_wrote_before_a_list_that_shows_it_paused_wakes_nothing_twice() -> None:
    some = world(held_since=NOW - 9 * MINUTE)
    some = applied(some, heard(some, seq=6, minutes=1))
    assert some.attempts[FIRST].bidding.woke_at is not None
    for minutes in (2, 3, 4):
        some = applied(some, heard(some, seq=6, minutes=minutes, listed_at=minutes - 0.1))
        assert some.attempts[FIRST].bidding.woke_at is None, "a newer list shows it as it was"
    assert some.attempts[FIRST].bidding.held_since == NOW - 9 * MINUTE


def test_a_machine_that_wakes_and_stays_silent_is_left() -> None:
    some = world(held_since=NOW - 30 * MINUTE, woke_at=NOW - SPEAKS_WITHIN)
    assert left(some) == "it runs again and gave no sign of life for 15 min"
    assert left(world(held_since=NOW - 30 * MINUTE, woke_at=NOW - MINUTE)) == ""


def test_a_cancelled_or_stopped_job_holds_nothing() -> None:
    some = world_with(AttemptState.STOPPING, over_since=NOW - MINUTE)
    some = replace(some, policy=replace(some.policy, hold_max=10 * MINUTE))
    assert outbid(some).attempts[FIRST].end_reason is EndReason.CANCELLED


def test_a_job_whose_cancelling_is_on_its_way_holds_nothing() -> None:
    some = world()
    owner = replace(some.jobs[FIRST.job], cancel_requested=True)
    item = outbid(replace(some, jobs={owner.id: owner})).attempts[FIRST]
    assert (item.state.counts, item.bidding.held_since) == (False, None)


def test_an_outbid_machine_above_the_ceiling_of_today_is_left_once() -> None:
    some = world(held_since=NOW - MINUTE)
    limit = PriceLimit(per_gpu_hour=MicroUsdPerGpuHour(10_000))
    some = applied(some, set_ceiling(some, some.jobs.values(), limit, NOW))
    builder = PlanBuilder(some, NOW)
    assert leave_above_ceiling(builder, builder.attempt(FIRST))
    assert not leave_above_ceiling(builder, builder.attempt(FIRST))
    assert [event.kind for event in builder.plan().events].count("attempt.left") == 1


def test_a_machine_that_nobody_looked_at_for_hours_is_ended_only_where_a_new_list_shows_it_halted() -> None:
    """It may have woken and worked meanwhile: what it has not saved would be lost."""
    asleep = world(held_since=NOW - 8 * 60 * MINUTE)
    stopping = applied(asleep, decide(asleep, bid_market(), NOW))
    assert stopping.attempts[FIRST].state is AttemptState.STOPPING
    old = replace(instance(InstanceState.PAUSED, loss=Loss.OUTBID), market=Market.SPOT)
    stale = reconcile(stopping, listing(old, at=NOW - MINUTE), report(seq=5, phase="run"), NOW)
    assert FIRST not in stale.attempts or stale.attempts[FIRST].state is AttemptState.STOPPING
    assert stale.list_again
    halted = outbid(applied(stopping, stale), minutes=1)
    assert halted.attempts[FIRST].end_reason is EndReason.OUTBID
    awake = seen(stopping, InstanceState.RUNNING, minutes=1)
    assert awake.attempts[FIRST].state is AttemptState.STOPPING, "it has its time to save"


def test_a_machine_whose_host_gave_notice_before_is_left_in_time_too() -> None:
    some = world(held_since=NOW - 11 * MINUTE)
    noticed = replace(some.attempts[FIRST], notice_at=NOW - 12 * MINUTE)
    assert left(replace(some, attempts={FIRST: noticed})) == "it was kept for 10 min"


def lacking(some: World, *, minutes: float, read: bool = True, **changes: Any) -> Plan:
    """A complete list without it, and a full read of its host."""
    at = NOW + timedelta(minutes=minutes)
    reports = {i: replace(one, read_at=at, **changes) for i, one in report(seq=5, phase="run").items()}
    return reconcile(some, listing(at=at), reports if read else {}, at)


def held_for(minutes: float = 1, **known: Any) -> World:
    """A machine that is held, and was heard before."""
    some = world(held_since=NOW - minutes * MINUTE, **known)
    spoke = replace(some.attempts[FIRST], heartbeat_seen_at=NOW - (minutes + 1) * MINUTE)
    return replace(some, attempts={FIRST: spoke})


def test_a_held_machine_that_two_complete_lists_lack_frees_its_job() -> None:
    some = held_for()
    once = lacking(some, minutes=1)
    assert once.list_again, "another list decides"
    after = applied(some, once)
    assert after.attempts[FIRST].state is AttemptState.RUNNING, "one list may lack a row"
    assert applied(after, lacking(after, minutes=1)).attempts[FIRST].state is AttemptState.RUNNING, "the same list"
    gone = applied(after, lacking(after, minutes=2))
    item = gone.attempts[FIRST]
    assert (item.end_reason, item.end_detail) == (EndReason.OUTBID, "the provider lists it no more")


def test_a_held_machine_that_is_listed_again_in_between_stays() -> None:
    some = held_for()
    back = applied(some, lacking(some, minutes=1))
    back = applied(back, outbid(back, minutes=2))
    back = applied(back, lacking(back, minutes=3))
    assert back.attempts[FIRST].state is AttemptState.RUNNING
    assert back.attempts[FIRST].missing_since == NOW + 3 * MINUTE


def test_a_held_machine_that_was_left_and_is_listed_no_more_ends_by_the_second_list() -> None:
    some = held_for(11)
    left_it = applied(some, decide(some, bid_market(), NOW))
    assert left_it.attempts[FIRST].state is AttemptState.STOPPING
    once = applied(left_it, lacking(left_it, minutes=0.2))
    assert once.attempts[FIRST].state is AttemptState.STOPPING
    twice = applied(once, lacking(once, minutes=0.4))
    assert twice.attempts[FIRST].end_reason is EndReason.OUTBID


def test_a_held_machine_that_woke_and_speaks_is_not_lost_by_lists() -> None:
    some = held_for(5, woke_at=NOW - 2 * MINUTE)
    spoke = replace(some.attempts[FIRST], heartbeat_seen_at=NOW)
    some = replace(some, attempts={FIRST: spoke})
    for minutes in (0.2, 0.4, 0.6):
        some = applied(some, lacking(some, minutes=minutes))
    assert some.attempts[FIRST].state is AttemptState.RUNNING


def test_while_hosts_cannot_write_a_held_machine_may_have_woken() -> None:
    some = held_for()
    for minutes in (1.0, 2.0, 3.0):
        some = applied(some, lacking(some, minutes=minutes, store_takes_no_writes=True))
    assert some.attempts[FIRST].state is AttemptState.RUNNING
    late = applied(some, lacking(some, minutes=6, store_takes_no_writes=True))
    assert late.attempts[FIRST].end_reason is EndReason.OUTBID


def test_why_says_that_a_machine_is_held() -> None:
    verdict = decide(held_for(), bid_market(), NOW).verdicts[FIRST.job]
    assert verdict.kind is VerdictKind.HELD
    assert verdict.sentence.startswith("outbid: it is kept for 9 min more")


def test_a_machine_that_is_outbid_again_before_its_job_got_further_is_not_kept_again() -> None:
    """One that flaps for hours is paid while it runs and restores, and gets nowhere."""
    back = world(held_last=NOW - 3 * MINUTE)
    assert outbid(back).attempts[FIRST].end_reason is EndReason.OUTBID
    saved = replace(SAVED, name="s2", at=NOW - MINUTE)
    assert outbid(world(held_last=NOW - 3 * MINUTE, checkpoints=(saved, SAVED))).attempts[FIRST].end_reason is None
    held = applied(world(), outbid(world()))
    assert held.attempts[FIRST].bidding.held_last == NOW
