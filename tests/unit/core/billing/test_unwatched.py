"""Time of a machine in which nobody looked, as while the daemon was dead: what its host wrote decides when it ran."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.billing import ENDING_TAKES, HEARTBEATS_APART
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import applied
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, outlives, spent
from spotd.core.pricing import needs_of, quote
from spotd_providers.contract.values import InstanceState, MicroUsdPerGbMonth, MicroUsdPerHour, cost
from tests.cases import every
from tests.unit.core.billing.test_bills import HOUR, JOB, RATE, over, running, seen, the, with_rules
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, offer, report, shop_policy

DIED = NOW + 10 * MINUTE
"""The daemon; its last list, and the last heartbeat that it read, are of this instant."""
BACK = DIED + 3 * HOUR
SECOND = timedelta(seconds=1)
KINDS = every("ends_itself", [True, False], ids=["ends itself", "ended by orders alone"])


def left(*, ends_itself: bool) -> World:
    """What the daemon left when it died, with a disk that costs something."""
    world = with_rules(running(), ends_itself=ends_itself)
    agreed = quote(offer(storage_price=MicroUsdPerGbMonth(1)), needs_of(job(), shop_policy()), 1_000_000, NOW)
    item = the(world)
    meter = item.meter if ends_itself else replace(item.meter, until=None)
    return replace(world, attempts={item.id: replace(item, quote=agreed, meter=meter)})


def heard(at: datetime, *, seq: int = 500, phase: str = "run", **changes: Any) -> Any:
    return {i: replace(r, read_at=at) for i, r in report(seq=seq, phase=phase, **changes).items()}


def is_about(booked: int, span: timedelta) -> bool:
    return cost(RATE, span - 2 * MINUTE) <= booked <= cost(RATE, span + 2 * MINUTE)


@every("rules", [True, False])
@every("sold", [True, False])
def test_a_machine_counts_beyond_its_lease_where_nothing_but_an_order_ends_it(*, rules: bool, sold: bool) -> None:
    world = with_rules(left(ends_itself=True), ends_itself=rules)
    item = the(world)
    item = replace(item, quote=replace(item.quote, offer=replace(item.quote.offer, ends_itself=sold)))
    assert (outlives(item, world.jobs[JOB], world.policy) is not None) == (rules and sold)


@KINDS
@every("state", [InstanceState.GONE, InstanceState.PAUSED])
def test_a_machine_that_stopped_meanwhile_is_booked_up_to_what_its_host_wrote_last(
    state: InstanceState, *, ends_itself: bool
) -> None:
    wrote = heard(BACK, alive_at=DIED + 20 * MINUTE)
    world = applied(left(ends_itself=ends_itself), reconcile(left(ends_itself=ends_itself), {}, wrote, BACK))
    world = over(world, state, BACK + MINUTE)
    assert is_about(job_spent(world, world.jobs[JOB], BACK + 2 * MINUTE), 30 * MINUTE)


@every("lived", [timedelta(seconds=s) for s in (1, 50, 90, 110, 20 * 60, 80 * 60)], ids=str)
@every("state", [InstanceState.GONE, InstanceState.ENDING])
@KINDS
def test_a_machine_that_was_lost_meanwhile_is_booked_to_within_a_heartbeat(
    lived: timedelta, state: InstanceState, *, ends_itself: bool
) -> None:
    """EC2 does not state when it took a machine, and bills by the second."""
    world = left(ends_itself=ends_itself)
    wrote = heard(BACK, alive_at=DIED + lived)
    world = over(applied(world, reconcile(world, {}, wrote, BACK)), state, BACK + MINUTE)
    booked = job_spent(world, world.jobs[JOB], BACK + 2 * MINUTE)
    least, most = (cost(RATE, 10 * MINUTE + lived + span) for span in (timedelta(0), HEARTBEATS_APART))
    assert least <= booked <= most


@every("lived", [timedelta(minutes=m) for m in (2, 12, 25)], ids=str)
@every("has_exited", [True, False], ids=["its runner had ended", "it was stopped"])
@KINDS
def test_a_list_that_is_read_before_the_host_takes_nothing_from_the_time_that_the_host_ran(
    lived: timedelta, *, has_exited: bool, ends_itself: bool
) -> None:
    world = seen(left(ends_itself=ends_itself), InstanceState.PAUSED, BACK)
    world = seen(world, InstanceState.PAUSED, BACK + MINUTE)
    ended: dict[str, Any] = (
        {"phase": "done", "exit_reason": EndReason.LEASE_EXPIRED, "exit_at": DIED + lived} if has_exited else {}
    )
    wrote = heard(BACK + 2 * MINUTE, alive_at=DIED + lived, **ended)
    world = seen(world, InstanceState.PAUSED, BACK + 2 * MINUTE, wrote)
    booked = job_spent(world, world.jobs[JOB], BACK + 3 * MINUTE)
    assert cost(RATE, 10 * MINUTE + lived) <= booked <= cost(RATE, 12 * MINUTE + lived)


def test_a_machine_that_was_seen_to_stop_is_not_booked_until_a_date_that_its_host_states_later() -> None:
    world = seen(left(ends_itself=False), InstanceState.PAUSED, DIED + 30 * SECOND)
    world = seen(world, InstanceState.PAUSED, DIED + MINUTE)
    before = job_spent(world, world.jobs[JOB], DIED + 3 * HOUR)
    wrote = heard(BACK, alive_at=DIED + 2 * HOUR)
    world = seen(world, InstanceState.PAUSED, BACK, wrote)
    assert job_spent(world, world.jobs[JOB], BACK) - before <= cost(RATE, MINUTE)


@every("away", [timedelta(seconds=s) for s in (130, 200, 290)], ids=str)
@every("lived", [timedelta(seconds=s) for s in (1, 20, 50)], ids=str)
@KINDS
def test_a_machine_that_was_lost_while_the_daemon_was_dead_for_minutes_is_booked_to_within_a_heartbeat(
    lived: timedelta, away: timedelta, *, ends_itself: bool
) -> None:
    world, back = left(ends_itself=ends_itself), DIED + away
    world = applied(world, reconcile(world, {}, heard(back, alive_at=DIED + lived), back))
    world = over(world, InstanceState.GONE, back + timedelta(seconds=5))
    booked = job_spent(world, world.jobs[JOB], back + MINUTE)
    least, most = (cost(RATE, 10 * MINUTE + lived + span) for span in (timedelta(0), HEARTBEATS_APART))
    assert least <= booked <= most


@KINDS
def test_a_host_that_wrote_late_once_and_goes_on_is_booked_until_it_is_gone(*, ends_itself: bool) -> None:
    """A busy uplink held one heartbeat back for a minute and a half; the next ones came in time."""
    world, at = left(ends_itself=ends_itself), DIED + 100 * SECOND
    world = applied(world, reconcile(world, {}, heard(at, alive_at=DIED + 5 * SECOND), at))
    for n in range(1, 9):
        at += 15 * SECOND
        world = applied(world, reconcile(world, {}, heard(at, seq=500 + n, alive_at=at - 3 * SECOND), at))
    world = over(world, InstanceState.GONE, at + 10 * SECOND)
    booked = job_spent(world, world.jobs[JOB], at + MINUTE)
    ran = at + 10 * SECOND - NOW
    assert cost(RATE, ran - 10 * SECOND) <= booked <= cost(RATE, ran)


@KINDS
def test_a_date_that_is_behind_what_is_proven_ends_no_bill_early(*, ends_itself: bool) -> None:
    """The clock of its host was set back by ten minutes."""
    world, at = left(ends_itself=ends_itself), DIED
    for n in range(1, 9):
        at = DIED + n * 30 * SECOND
        world = applied(world, reconcile(world, {}, heard(at, seq=500 + n, alive_at=at - 10 * MINUTE), at))
    world = over(world, InstanceState.GONE, at + 10 * SECOND)
    booked = job_spent(world, world.jobs[JOB], at + MINUTE)
    assert cost(RATE, at - NOW) <= booked <= cost(RATE, at + 10 * SECOND - NOW)


@every("after", [timedelta(seconds=s) for s in (1, 100, 5 * 60, 12 * 60)], ids=str)
def test_a_machine_that_ended_itself_meanwhile_is_booked_up_to_the_end_of_its_runner_and_little_more(
    after: timedelta,
) -> None:
    world, over_at = left(ends_itself=True), DIED + after
    wrote = heard(BACK, phase="done", exit_reason=EndReason.LEASE_EXPIRED, alive_at=over_at, exit_at=over_at)
    world = over(applied(world, reconcile(world, {}, wrote, BACK)), InstanceState.GONE, BACK + MINUTE)
    booked = job_spent(world, world.jobs[JOB], BACK + 2 * MINUTE)
    least, most = (cost(RATE, 10 * MINUTE + after + span) for span in (timedelta(0), 2 * ENDING_TAKES))
    assert least <= booked <= most


@every("rested", [timedelta(minutes=20), HOUR], ids=str)
def test_a_rest_begins_half_a_heartbeat_after_the_last_sign_before_it(rested: timedelta) -> None:
    world, woke = left(ends_itself=False), DIED + 2 * HOUR
    wrote = heard(BACK, alive_at=BACK, script_began_at=woke, checkpoints=(saved(woke - rested),))
    world = applied(world, reconcile(world, {}, wrote, BACK))
    ran = 10 * MINUTE + 3 * HOUR - rested
    assert cost(RATE, ran) <= spent(the(world), BACK) <= cost(RATE, ran + HEARTBEATS_APART) + cost(RATE, rested) // 1000


@KINDS
def test_a_machine_that_rested_meanwhile_is_booked_until_it_stopped_and_from_when_it_began_again(
    *, ends_itself: bool
) -> None:
    """It was outbid a minute later, and came back two hours later, an hour ago."""
    world = left(ends_itself=ends_itself)
    woke = DIED + 2 * HOUR
    wrote = heard(BACK, alive_at=BACK - MINUTE, script_began_at=woke)
    world = seen(world, InstanceState.RUNNING, BACK, wrote)
    assert is_about(spent(the(world), BACK), 10 * MINUTE + HOUR)
    world = seen(world, InstanceState.RUNNING, BACK + MINUTE, heard(BACK + MINUTE, seq=501, script_began_at=woke))
    assert is_about(spent(the(world), BACK + MINUTE), 11 * MINUTE + HOUR), "and once only"


def test_a_machine_that_came_back_without_a_lease_is_booked_from_then_until_it_is_ended() -> None:
    """World 0 of few machines: $1.20 were booked for $0.11, the daemon having been dead while it was outbid."""
    world, woke = left(ends_itself=False), DIED + 2 * HOUR
    wrote = heard(
        BACK, phase="done", exit_reason=EndReason.LEASE_EXPIRED, alive_at=DIED, exit_at=woke, script_began_at=woke
    )
    world = applied(world, reconcile(world, {}, wrote, BACK))
    (order,) = world.intents.values()
    world = applied(world, terminate_accepted(world, order.id, BACK))
    assert is_about(the(world).meter.settled, 10 * MINUTE + HOUR)


def saved(at: datetime) -> Checkpoint:
    return Checkpoint(name="c", attempt=1, step=1, bytes=1, at=at, manifest_key="k", sha256="0" * 64)


@every(
    "changes",
    [
        pytest.param({"alive_at": DIED + HOUR}, id="a heartbeat"),
        pytest.param({"alive_at": BACK, "checkpoints": (saved(DIED + HOUR),)}, id="a checkpoint"),
    ],
)
def test_what_a_host_wrote_before_it_rested_is_booked_in_full(changes: dict[str, Any]) -> None:
    """Drawn world 1000311: it worked on for half an hour without a daemon before it was outbid."""
    world = left(ends_itself=False)
    wrote = heard(BACK, script_began_at=DIED + 2 * HOUR, **changes)
    world = applied(world, reconcile(world, {}, wrote, BACK))
    assert is_about(spent(the(world), BACK), 10 * MINUTE + 2 * HOUR)


def test_a_machine_that_was_idle_before_its_host_began_again_is_booked_in_full() -> None:
    world = left(ends_itself=False)
    over_at, woke = DIED + 30 * MINUTE, DIED + 2 * HOUR
    wrote = heard(BACK, exit_reason=EndReason.LEASE_EXPIRED, alive_at=over_at, exit_at=over_at, script_began_at=woke)
    world = applied(world, reconcile(world, {}, wrote, BACK))
    assert is_about(spent(the(world), BACK), 10 * MINUTE + 3 * HOUR)


@KINDS
@every(
    "changes",
    [
        pytest.param({"script_began_at": NOW}, id="it ran all the time"),
        pytest.param({"script_began_at": DIED + 4 * MINUTE}, id="it began again a moment after it was seen"),
        pytest.param({}, id="it does not say"),
    ],
)
def test_a_machine_that_still_runs_is_booked_for_all_of_the_time(changes: dict[str, Any], *, ends_itself: bool) -> None:
    wrote = heard(BACK, alive_at=BACK - MINUTE, **changes)
    world = seen(left(ends_itself=ends_itself), InstanceState.RUNNING, BACK, wrote)
    assert is_about(spent(the(world), BACK), 10 * MINUTE + 3 * HOUR)


@every("off", [timedelta(0), HOUR, -HOUR, 400 * HOUR], ids=str)
@every("rested", [True, False])
def test_a_rest_is_dated_by_the_clock_that_dated_the_start_before_it(off: timedelta, *, rested: bool) -> None:
    """Drawn world 9500046: a host wrote an hour ahead, and an hour before it was read. No clock dates that."""
    world, woke = left(ends_itself=False), DIED + 2 * HOUR
    first = heard(DIED, began_there_s=int((NOW + off).timestamp()))
    world = applied(world, reconcile(world, {}, first, DIED))
    began = woke if rested else NOW
    wrote = heard(BACK, seq=501, script_began_at=woke, began_there_s=int((began + off).timestamp()) + 30)
    world = seen(world, InstanceState.RUNNING, BACK, wrote)
    assert is_about(spent(the(world), BACK), 10 * MINUTE + (HOUR if rested else 3 * HOUR))


def test_a_first_start_that_nobody_watched_is_no_rest() -> None:
    world = left(ends_itself=False)
    item: Attempt = replace(the(world), heartbeat_seen_at=None, heartbeat_seq=-1)
    world = replace(world, attempts={item.id: item})
    world = seen(world, InstanceState.RUNNING, BACK, heard(BACK, alive_at=BACK, script_began_at=BACK - HOUR))
    assert is_about(spent(the(world), BACK), 10 * MINUTE + 3 * HOUR)


def test_what_lists_have_shown_to_run_was_no_rest_whatever_its_host_says() -> None:
    world = left(ends_itself=False)
    for minutes in range(1, 181):
        world = applied(
            world,
            reconcile(
                world, listing(instance(InstanceState.RUNNING), at=DIED + minutes * MINUTE), {}, DIED + minutes * MINUTE
            ),
        )
    world = seen(world, InstanceState.RUNNING, BACK, heard(BACK, alive_at=BACK, script_began_at=BACK - HOUR))
    assert is_about(spent(the(world), BACK), 10 * MINUTE + 3 * HOUR)


@pytest.mark.parametrize("state", [InstanceState.GONE, InstanceState.PAUSED])
@pytest.mark.parametrize("at_once", [True, False], ids=["read with its stop", "read before its stop"])
def test_an_idle_machine_that_nothing_but_an_order_ends_is_booked_until_it_is_seen_to_be_over(
    state: InstanceState, *, at_once: bool
) -> None:
    world = left(ends_itself=False)
    wrote = heard(
        BACK, phase="run", exit_reason=EndReason.LEASE_EXPIRED, alive_at=DIED + MINUTE, exit_at=DIED + 30 * MINUTE
    )
    rows = listing(instance(state), at=BACK) if at_once else {}
    world = applied(world, reconcile(world, rows, wrote, BACK))
    world = over(world, state, BACK + MINUTE)
    assert is_about(job_spent(world, world.jobs[JOB], BACK + 2 * MINUTE), 11 * MINUTE + 3 * HOUR)


def test_a_held_machine_that_woke_meanwhile_is_booked_in_full_from_when_its_host_began_again() -> None:
    world, woke = left(ends_itself=True), DIED + 2 * HOUR
    world = applied(world, reconcile(world, {}, heard(DIED + MINUTE, seq=400), DIED + MINUTE))
    item = the(world)
    halted = replace(item.meter, rate=MicroUsdPerHour(0), since=DIED, until=None)
    bidding = replace(item.bidding, held_since=DIED + 2 * MINUTE)
    world = replace(world, attempts={item.id: replace(item, bidding=bidding, meter=halted)})
    world = applied(world, reconcile(world, {}, heard(BACK, alive_at=BACK - MINUTE, script_began_at=woke), BACK))
    assert is_about(spent(the(world), BACK), HOUR)
