"""What is booked for a machine follows what shows that it exists and runs, never an instant that is merely stated."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.core.budgets import committed
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import LaunchOutcome, launch_contained
from spotd.core.kernel.outcomes import launched, terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, machines_in_use, on_demand_spent, settled, spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import needs_of, quote, total_per_hour
from spotd.core.timeline import redated
from spotd_providers.contract.values import Billing, InstanceState, Market, MicroUsdPerGbMonth, MicroUsdPerHour, cost
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

JOB = JobId("j1")
HOUR = timedelta(hours=1)
RATE = MicroUsdPerHour(400_000)
BEYOND = shop_policy().lease + shop_policy().save_allowance + job().spec.checkpoint.stop_grace
"""How long a machine may live without a sign of life."""


def the(world: World) -> Attempt:
    (item,) = world.attempts.values()
    return item


def with_rules(world: World, **changes: Any) -> World:
    rules = replace(world.policy.providers[SHOP], **changes)
    return replace(world, policy=replace(world.policy, providers={SHOP: rules}))


def seen(world: World, state: InstanceState, at: datetime, heard: Any = None, **row: Any) -> World:
    """A listing of this instant, and a look of the same that shows the host as it was unless something was heard."""
    last = {i: HostStatus(attempt=i, read_at=at, seq=the(world).heartbeat_seq) for i in world.attempts}
    look = {i: replace(r, read_at=at) for i, r in (last if heard is None else heard).items()}
    plan = reconcile(world, listing(replace(instance(state), **row), at=at), look, at)
    return applied(world, plan)


def over(world: World, state: InstanceState, at: datetime, **row: Any) -> World:
    """Two listings in a row that show it so."""
    return seen(seen(world, state, at, **row), state, at + MINUTE, **row)


def started(**rules: Any) -> World:
    """A machine that was launched now."""
    before = with_rules(world_with(AttemptState.INTENDED, intended_at=NOW), **rules)
    made = replace(instance(InstanceState.PENDING), created_at=NOW)
    return applied(before, launched(before, the(before).id, made, NOW))


# --- a start is never earlier than the intent ---


@every(
    ("stated", "since"),
    [
        pytest.param(datetime(1970, 1, 1, tzinfo=UTC), NOW - 10 * MINUTE, id="1970"),
        pytest.param(datetime(9999, 12, 31, tzinfo=UTC), NOW - 10 * MINUTE, id="9999, which says nothing"),
        pytest.param(NOW + 8 * HOUR, NOW - 10 * MINUTE, id="by a clock that is 8 h ahead"),
        pytest.param(NOW - 4 * MINUTE, NOW - 4 * MINUTE, id="as it was"),
        pytest.param(None, NOW - 10 * MINUTE, id="not stated"),
    ],
)
def test_an_adopted_machine_bills_from_its_intent_at_the_earliest(stated: datetime | None, since: datetime) -> None:
    before = world_with(AttemptState.INTENDED, intended_at=NOW - 10 * MINUTE)
    after = seen(before, InstanceState.RUNNING, NOW, {}, created_at=stated)
    assert the(after).meter.since == the(after).launched_at == since
    assert job_spent(after, after.jobs[JOB], NOW) <= cost(RATE, 10 * MINUTE)
    assert not decide(after, market(), NOW).attempts


# --- what was not watched is booked as far as lease and listing allow ---


def running() -> World:
    """A machine that has run for ten minutes and was seen to live a moment ago."""
    world = started()
    world = seen(world, InstanceState.RUNNING, NOW + MINUTE, report(seq=1, phase="run"))
    for minutes in range(2, 11):
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE, report(seq=minutes, phase="run"))
    assert the(world).state is AttemptState.RUNNING
    return world


ASLEEP = NOW + 10 * MINUTE
AWAKE = ASLEEP + 8 * HOUR


def test_hours_that_nobody_watched_break_no_budget_before_a_listing_shows_the_machine() -> None:
    world = running()
    spec = replace(world.jobs[JOB].spec, job_budget=2_000_000)
    world = replace(world, jobs={JOB: replace(world.jobs[JOB], spec=spec)})
    assert spent(the(world), AWAKE) <= cost(RATE, 10 * MINUTE + BEYOND)
    assert not decide(world, market(), AWAKE).attempts


@every("state", [InstanceState.GONE, InstanceState.ENDING, InstanceState.PAUSED])
def test_a_machine_that_is_over_after_a_gap_is_booked_up_to_the_last_sign_of_its_life(state: InstanceState) -> None:
    """Its host wrote nothing more, and its provider does not state when it ended."""
    after = over(running(), state, AWAKE)
    assert cost(RATE, 8 * MINUTE) <= job_spent(after, after.jobs[JOB], AWAKE) <= cost(RATE, 12 * MINUTE)


@every(
    ("stated", "ran", "within"),
    [
        pytest.param(ASLEEP + 25 * MINUTE, 35 * MINUTE, timedelta(0), id="in the gap"),
        pytest.param(ASLEEP + BEYOND + HOUR, 10 * MINUTE + BEYOND, 2 * MINUTE, id="after its lease"),
        pytest.param(NOW - HOUR, timedelta(0), timedelta(0), id="before it began"),
    ],
)
@every("state", [InstanceState.GONE, InstanceState.ENDING, InstanceState.PAUSED])
def test_a_machine_is_booked_up_to_the_end_that_its_provider_states(
    state: InstanceState, stated: datetime, ran: timedelta, within: timedelta
) -> None:
    after = over(running(), state, AWAKE, ended_at=stated)
    booked = job_spent(after, after.jobs[JOB], AWAKE)
    assert cost(RATE, ran - within) - 1 <= booked <= cost(RATE, ran) + 1


def test_a_machine_that_lists_lack_after_a_gap_is_booked_up_to_the_last_sign_of_its_life() -> None:
    world, at = running(), AWAKE
    for minutes in range(5):
        at = AWAKE + minutes * MINUTE
        look = {i: HostStatus(attempt=i, read_at=at, seq=the(world).heartbeat_seq) for i in world.attempts}
        world = applied(world, reconcile(world, listing(at=at), look, at))
    assert cost(RATE, 8 * MINUTE) <= job_spent(world, world.jobs[JOB], at) <= cost(RATE, 12 * MINUTE)
    assert not any(item.state.counts for item in world.attempts.values())


def test_a_machine_that_nothing_but_an_order_ends_is_booked_up_to_the_list_that_shows_its_end() -> None:
    world = with_rules(started(), ends_itself=False)
    for minutes in range(1, 91):
        heard = report(seq=minutes, phase="run")
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE, heard)
    stopped = NOW + 91 * MINUTE
    world = over(world, InstanceState.GONE, stopped)
    assert cost(RATE, 90 * MINUTE) <= job_spent(world, world.jobs[JOB], stopped) <= cost(RATE, 92 * MINUTE)


# --- what its provider states to bill now ---


def test_a_machine_that_is_listed_and_not_billed_is_not_booked_until_it_is_billed_again() -> None:
    """A host that is out of reach for its provider, as vast.ai's `offline`."""
    world = running()
    for minutes in range(11, 41):
        heard = report(seq=minutes, phase="run")
        world = seen(world, InstanceState.UNKNOWN, NOW + minutes * MINUTE, heard, billing=Billing.NOTHING)
    assert the(world).state.counts
    assert spent(the(world), NOW + 40 * MINUTE) == cost(RATE, 11 * MINUTE)
    for minutes in range(41, 51):
        heard = report(seq=minutes, phase="run")
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE, heard, billing=Billing.FULL)
    assert spent(the(world), NOW + 50 * MINUTE) == cost(RATE, 20 * MINUTE)


def test_a_machine_that_runs_and_bills_its_disk_is_booked_so() -> None:
    agreed = quote(offer(storage_price=MicroUsdPerGbMonth(720_000)), needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.RUNNING, quote=agreed)
    world = seen(world, InstanceState.UNKNOWN, NOW + MINUTE, billing=Billing.DISK)
    disk = the(world).meter.rate
    assert 0 < disk < RATE
    world = seen(world, InstanceState.RUNNING, NOW + 11 * MINUTE)
    assert the(world).meter.rate == agreed.price.total


def test_a_paused_machine_that_still_holds_its_gpu_is_booked_in_full() -> None:
    world = over(running(), InstanceState.PAUSED, NOW + 11 * MINUTE, billing=Billing.FULL)
    assert the(world).meter.rate == RATE


def test_a_paused_machine_that_bills_nothing_is_not_booked() -> None:
    world = over(running(), InstanceState.PAUSED, NOW + 11 * MINUTE, billing=Billing.NOTHING)
    assert spent(the(world), AWAKE) == cost(RATE, 11 * MINUTE)


def test_a_machine_whose_host_is_out_of_reach_while_it_starts_starts_anew_when_it_is_back() -> None:
    world = started(bills_from_running=True)
    world = seen(world, InstanceState.UNKNOWN, NOW + MINUTE, {}, billing=Billing.NOTHING)
    assert the(world).meter.since is None
    world = seen(world, InstanceState.PENDING, NOW + 2 * MINUTE, {}, billing=Billing.DISK)
    assert the(world).meter.rate == 0 or the(world).meter.on_demand_rate == 0
    world = seen(world, InstanceState.RUNNING, NOW + 3 * MINUTE, {}, billing=Billing.FULL)
    assert the(world).meter.rate == RATE
    assert spent(the(world), NOW + 3 * MINUTE) <= cost(RATE, MINUTE)


def test_a_machine_that_is_over_and_not_billed_is_ended_and_has_not_woken() -> None:
    world = world_with(AttemptState.ENDING)
    for minutes in range(1, 4):
        at = NOW + minutes * MINUTE
        row = replace(instance(InstanceState.UNKNOWN), billing=Billing.NOTHING)
        plan = reconcile(world, listing(row, at=at), {}, at)
        assert not [event for event in plan.events if event.kind == "machine.woke"]
        world = applied(world, plan)
    assert the(world).meter.since is None
    assert any(intent.is_open for intent in world.intents.values())
    booked = spent(the(world), AWAKE)
    world = seen(world, InstanceState.RUNNING, NOW + 4 * MINUTE, {}, billing=Billing.FULL)
    assert the(world).meter.since is not None
    assert spent(the(world), NOW + 5 * MINUTE) > booked


def test_a_machine_that_a_listing_shows_running_after_a_gap_is_booked_in_full() -> None:
    after = seen(running(), InstanceState.RUNNING, AWAKE, {})
    assert spent(the(after), AWAKE) == cost(RATE, 10 * MINUTE + 8 * HOUR)


def test_the_report_of_its_end_says_when_a_machine_ended_in_the_gap() -> None:
    left = ASLEEP + timedelta(minutes=30)
    last = report(seq=40, phase="done", exit_reason=EndReason.LEASE_EXPIRED, exit_at=left, alive_at=left)
    after = seen(seen(running(), InstanceState.GONE, AWAKE, last), InstanceState.GONE, AWAKE + MINUTE)
    assert cost(RATE, timedelta(minutes=40)) <= after.jobs[JOB].spent <= cost(RATE, timedelta(minutes=42))


def test_a_host_that_could_report_its_end_only_later_is_booked_up_to_what_it_wrote_last() -> None:
    """Its command had ended, and its machine waited for the store."""
    left, wrote = ASLEEP + 5 * MINUTE, ASLEEP + 25 * MINUTE
    last = report(seq=40, phase="done", exit_reason=EndReason.DONE, exit_code=0, exit_at=left, alive_at=wrote)
    world = applied(running(), reconcile(running(), {}, {i: replace(r, read_at=wrote) for i, r in last.items()}, wrote))
    assert cost(RATE, 35 * MINUTE) <= spent(the(world), AWAKE) <= cost(RATE, 36 * MINUTE)


def test_an_order_that_is_accepted_after_a_gap_books_no_more_than_the_lease() -> None:
    world = running()
    left = ASLEEP + timedelta(minutes=30)
    last = report(seq=40, phase="done", exit_reason=EndReason.LEASE_EXPIRED, exit_at=left, alive_at=left)
    plan = reconcile(world, {}, {i: replace(r, read_at=AWAKE) for i, r in last.items()}, AWAKE)
    world = applied(world, plan)
    (owed,) = world.intents
    world = applied(world, terminate_accepted(world, owed, AWAKE))
    assert the(world).meter.settled <= cost(RATE, timedelta(minutes=42))


@every("stated", [NOW - 20 * HOUR, NOW, AWAKE + 20 * HOUR], ids=["past", "its start", "future"])
def test_an_end_that_cannot_be_changes_nothing(stated: datetime) -> None:
    last = report(seq=40, phase="done", exit_reason=EndReason.LEASE_EXPIRED, exit_at=stated, alive_at=stated)
    after = seen(seen(running(), InstanceState.GONE, AWAKE, last), InstanceState.GONE, AWAKE + MINUTE)
    booked = after.jobs[JOB].spent
    assert cost(RATE, 10 * MINUTE) <= booked <= cost(RATE, 10 * MINUTE + BEYOND) + 1


def test_a_host_that_beats_keeps_its_meter_running_while_its_provider_is_away() -> None:
    world, at = running(), ASLEEP
    for minutes in range(1, 121):
        at = ASLEEP + minutes * MINUTE
        heard = {i: replace(r, read_at=at) for i, r in report(seq=100 + minutes, phase="run").items()}
        world = applied(world, reconcile(world, {}, heard, at))
    assert spent(the(world), at) == cost(RATE, timedelta(minutes=130))


def test_a_machine_that_nothing_but_an_order_ends_is_booked_until_its_end_is_confirmed() -> None:
    world = with_rules(running(), ends_itself=False)
    world = seen(world, InstanceState.RUNNING, ASLEEP + MINUTE)
    assert spent(the(world), AWAKE) == cost(RATE, 10 * MINUTE + 8 * HOUR)


def test_the_disk_of_a_paused_machine_is_booked_for_as_long_as_it_is_kept() -> None:
    agreed = quote(offer(storage_price=MicroUsdPerGbMonth(720_000)), needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.ENDING, quote=agreed)
    world = seen(world, InstanceState.PAUSED, NOW + MINUTE)
    assert the(world).meter.rate > 0
    assert spent(the(world), AWAKE) - spent(the(world), NOW + MINUTE) >= cost(the(world).meter.rate, 8 * HOUR) - 1


# --- from the state in which the provider bills ---


DISK = MicroUsdPerGbMonth(720_000)


def test_a_machine_that_starts_costs_its_disk_where_only_what_runs_is_billed() -> None:
    agreed = quote(offer(storage_price=DISK), needs_of(job(), shop_policy()), 1_000_000, NOW)
    before = with_rules(world_with(AttemptState.INTENDED, intended_at=NOW, quote=agreed), bills_from_running=True)
    made = replace(instance(InstanceState.PENDING), created_at=NOW)
    world = applied(before, launched(before, the(before).id, made, NOW))
    for minutes in range(1, 11):
        world = seen(world, InstanceState.PENDING, NOW + minutes * MINUTE, {})
    assert spent(the(world), NOW + 10 * MINUTE) == cost(MicroUsdPerHour(10_000), 10 * MINUTE)
    world = seen(world, InstanceState.RUNNING, NOW + 11 * MINUTE, {})
    # It began to run at some instant between the last two listings.
    most = cost(MicroUsdPerHour(10_000), 10 * MINUTE) + cost(agreed.price.total, MINUTE)
    assert spent(the(world), NOW + 11 * MINUTE) in range(most, most + 2)


def test_what_is_billed_with_the_disk_is_booked_from_the_launch_and_counts_for_the_ceiling() -> None:
    sold = offer(storage_price=DISK, storage_fixed=MicroUsdPerHour(5_000))
    needs = needs_of(job(), shop_policy())
    agreed = quote(sold, needs, 1_000_000, NOW)
    without = quote(replace(sold, storage_fixed=MicroUsdPerHour(0)), needs, 1_000_000, NOW)
    assert agreed.price.total == total_per_hour(sold, needs, 1_000_000, sold.gpu_price) == without.price.total + 5_000
    before = with_rules(world_with(AttemptState.INTENDED, intended_at=NOW, quote=agreed), bills_from_running=True)
    made = replace(instance(InstanceState.PENDING), created_at=NOW)
    world = applied(before, launched(before, the(before).id, made, NOW))
    assert spent(the(world), NOW + 10 * MINUTE) == cost(MicroUsdPerHour(15_000), 10 * MINUTE)


def test_the_first_sign_of_life_of_its_host_begins_the_bill_as_well() -> None:
    world = started(bills_from_running=True)
    world = seen(world, InstanceState.PENDING, NOW + 5 * MINUTE, {})
    heard = {i: replace(r, read_at=NOW + 6 * MINUTE) for i, r in report(seq=0).items()}
    world = applied(world, reconcile(world, {}, heard, NOW + 6 * MINUTE))
    assert the(world).meter.rate == RATE
    assert spent(the(world), NOW + 7 * MINUTE) == cost(RATE, 2 * MINUTE)


LIST_GAP = timedelta(seconds=12)
SECOND = timedelta(seconds=1)


def first_words(world: World, at: datetime, script_began_at: datetime | None) -> World:
    """The host is heard for the first time, at this instant."""
    heard = report(seq=0, phase="boot", script_began_at=script_began_at)
    heard = {i: replace(r, read_at=at) for i, r in heard.items()}
    return applied(world, reconcile(world, {}, heard, at))


@every("listed_first", [True, False], ids=["a listing shows it first", "its host speaks first"])
def test_a_container_is_booked_from_when_its_host_says_that_it_began_and_not_from_the_list_before(
    listed_first: bool,
) -> None:
    world = started(bills_from_running=True, bills_from_script=True)
    last_pending = NOW + 5 * MINUTE
    ran_from = last_pending + 11 * SECOND
    world = seen(world, InstanceState.PENDING, last_pending, {})
    if listed_first:
        world = seen(world, InstanceState.RUNNING, last_pending + LIST_GAP, {})
    world = first_words(world, last_pending + 14 * SECOND, ran_from)
    billed = cost(RATE, 3 * MINUTE)
    booked = spent(the(world), ran_from + 3 * MINUTE)
    assert billed <= booked <= billed + cost(RATE, SECOND)
    assert on_demand_spent(the(world), ran_from + 3 * MINUTE) <= cost(MicroUsdPerHour(1_000_000), 3 * MINUTE + SECOND)


@every(
    "stated",
    [
        pytest.param(None, id="an older runner"),
        pytest.param(datetime(1970, 1, 1, tzinfo=UTC), id="1970"),
        pytest.param(NOW, id="the launch"),
        pytest.param(datetime(9999, 12, 30, tzinfo=UTC), id="9999"),
        pytest.param(NOW + 30 * MINUTE, id="the future"),
    ],
)
def test_a_wrong_word_of_its_host_moves_the_bill_by_no_more_than_two_listings(stated: datetime | None) -> None:
    world = started(bills_from_running=True, bills_from_script=True)
    world = seen(world, InstanceState.PENDING, NOW + 5 * MINUTE, {})
    world = first_words(world, NOW + 15 * MINUTE, stated)
    booked = spent(the(world), NOW + 20 * MINUTE)
    assert cost(RATE, 15 * MINUTE - MINUTE / 2) <= booked <= cost(RATE, 15 * MINUTE)


def test_what_its_host_says_of_its_start_counts_only_where_a_machine_begins_with_its_script() -> None:
    world = started(bills_from_running=True)
    world = seen(world, InstanceState.PENDING, NOW + 5 * MINUTE, {})
    world = first_words(world, NOW + 6 * MINUTE, NOW + 6 * MINUTE)
    assert spent(the(world), NOW + 7 * MINUTE) == cost(RATE, 2 * MINUTE)


@every(
    ("rules", "minutes", "looks"),
    [
        ({"bills_from_running": True}, 1, True),
        ({"bills_from_running": True}, 2, False),
        ({"bills_from_running": True, "bills_from_script": True}, 1, False),
        ({}, 1, False),
    ],
    ids=["it starts", "it starts for long", "its host will say", "its start is billed"],
)
def test_a_start_that_only_a_listing_shows_is_looked_for_more_often(
    rules: dict[str, Any], minutes: int, *, looks: bool
) -> None:
    at = NOW + minutes * MINUTE
    plan = reconcile(started(**rules), listing(instance(InstanceState.PENDING), at=at), {}, at)
    assert plan.list_again == ({SHOP} if looks else frozenset())


def test_where_a_start_is_billed_it_is_booked_from_the_launch() -> None:
    world = seen(started(), InstanceState.PENDING, NOW + 5 * MINUTE, {})
    assert spent(the(world), NOW + 5 * MINUTE) == cost(RATE, 5 * MINUTE)


# --- a price above the ceiling ---


@every("sold", [{"pays_bid": True}, {"market": Market.ON_DEMAND}], ids=["a bid", "on-demand"])
def test_a_fixed_price_above_the_ceiling_ends_a_machine_once_two_listings_state_it(sold: dict[str, Any]) -> None:
    agreed = quote(offer(**sold), needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.RUNNING, quote=agreed)
    price = {"price": MicroUsdPerHour(1_500_000), "market": sold.get("market")}
    world = seen(world, InstanceState.RUNNING, NOW, **price)
    assert not decide(world, market(), NOW).attempts, "one row may be wrong"
    world = seen(world, InstanceState.RUNNING, NOW, **price)
    assert not decide(world, market(), NOW).attempts, "nor does the same listing twice prove it"
    world = seen(world, InstanceState.RUNNING, NOW + MINUTE / 2, **price)
    plan = decide(world, market(), NOW + MINUTE / 2)
    (item,) = plan.attempts.values()
    assert item.stop is not None
    assert item.stop.reason is EndReason.PRICE_ROSE
    assert "$1.5000/GPU-h" in plan.events[0].message


def test_one_wrong_row_between_right_ones_ends_nothing() -> None:
    agreed = quote(offer(pays_bid=True), needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.RUNNING, quote=agreed)
    for minutes, price in enumerate((400_000, 9_000_000, 400_000, 9_000_000)):
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE / 4, price=MicroUsdPerHour(price))
        assert not decide(world, market(), NOW).attempts


def test_a_machine_of_eight_gpus_is_compared_by_the_gpu() -> None:
    big = offer(gpu_count=8, price=3_200_000, pays_bid=True)
    agreed = quote(big, needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.RUNNING, quote=agreed)
    for minutes in (0, 1):
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE / 2, price=MicroUsdPerHour(4_000_000))
    assert not decide(world, market(), NOW).attempts, "$4.00 for eight is $0.50 for each, which was accepted"


def test_what_was_on_demand_is_compared_over_the_same_time() -> None:
    world = running()
    assert on_demand_spent(the(world), AWAKE) <= cost(MicroUsdPerHour(1_000_000), 10 * MINUTE + BEYOND)


def test_a_machine_that_reported_its_end_and_is_listed_as_running_is_booked_until_it_is_gone() -> None:
    world = running()
    last = report(seq=40, phase="done", exit_reason=EndReason.DONE, exit_code=0, exit_at=ASLEEP + MINUTE)
    world = seen(world, InstanceState.RUNNING, ASLEEP + 2 * MINUTE, last)
    assert the(world).state is AttemptState.ENDING
    for hours in range(1, 9):
        world = seen(world, InstanceState.RUNNING, ASLEEP + hours * HOUR, {})
    world = over(world, InstanceState.GONE, AWAKE)
    assert sum(world.spent_by_day.values()) >= cost(RATE, 8 * HOUR), "its runner did not end it, and no order was taken"


def test_a_bid_that_its_provider_rounds_up_to_just_above_the_ceiling_ends_nothing() -> None:
    agreed = quote(offer(pays_bid=True, price=500_000), needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = world_with(AttemptState.RUNNING, quote=agreed)
    for minutes in range(4):
        world = seen(world, InstanceState.RUNNING, NOW + minutes * MINUTE / 2, price=MicroUsdPerHour(500_001))
        assert not decide(world, market(), NOW).attempts


def test_a_market_price_that_leaps_is_believed_when_two_listings_state_it() -> None:
    world = world_with(AttemptState.RUNNING)
    world = seen(world, InstanceState.RUNNING, NOW, price=MicroUsdPerHour(8 * 400_000))
    assert not decide(world, market(), NOW).attempts, "a price of all GPUs where one was meant"
    world = seen(world, InstanceState.RUNNING, NOW + MINUTE / 2, price=MicroUsdPerHour(8 * 400_000))
    assert decide(world, market(), NOW + MINUTE / 2).attempts


def test_a_meter_that_begins_in_the_future_books_nothing_and_begins_now() -> None:
    world = world_with(AttemptState.RUNNING)
    item = replace(the(world), meter=replace(the(world).meter, since=NOW + timedelta(seconds=1)))
    after, charges = settled(item, NOW, RATE, None)
    assert not charges
    assert after.meter.since == NOW
    assert spent(item, NOW) == 0


# --- every machine that bills in full has a limit ---


def woken() -> World:
    """A machine whose end was accepted, and which is listed as running two minutes later."""
    world = world_with(AttemptState.ENDING, machine=MachineState.HALTED, meter=Meter())
    at = NOW + 2 * MINUTE
    return applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at))


def set_aside() -> World:
    """A machine that was launched for a job that cannot be judged."""
    world = world_with(AttemptState.INTENDED)
    made = instance(InstanceState.RUNNING)
    return applied(world, launch_contained(world, the(world).id, LaunchOutcome.MADE, made, "it raises", NOW))


@every("world", [woken(), set_aside()], ids=["woken after its end", "set aside at its launch"])
def test_no_machine_that_is_never_seen_again_is_booked_or_counted_for_ever(world: World) -> None:
    later = NOW + timedelta(days=40)
    assert the(world).meter.rate > 0
    assert spent(the(world), later) <= cost(RATE, HOUR + BEYOND)
    assert (machines_in_use(world, later), committed(world, the(world), later)) == (0, 0)


@every("step", [-30 * MINUTE, MINUTE, 8 * HOUR], ids=str)
def test_a_clock_that_is_set_while_nothing_proves_a_machine_loses_none_of_its_time(step: timedelta) -> None:
    gap, back = ASLEEP + 3 * HOUR, ASLEEP + 4 * HOUR
    plain = spent(the(seen(running(), InstanceState.RUNNING, back, {})), back)
    world = running()
    world = applied(replace(world, cooldowns=()), redated(world, step, gap))
    world = seen(world, InstanceState.RUNNING, back + step, {})
    assert spent(the(world), back + step) - plain in {0, 1}, "but for rounding up"


def test_a_clock_that_is_set_daily_holds_no_slot_for_a_machine_that_nothing_shows() -> None:
    now = ASLEEP
    builder = PlanBuilder(running(), now)
    builder.end_attempt(the(running()).id, EndReason.HOST_LOST, "")
    world = applied(running(), builder.plan())
    for _ in range(3):
        now += 20 * HOUR
        world = applied(replace(world, cooldowns=()), redated(world, MINUTE, now))
    assert machines_in_use(world, now) == 0
