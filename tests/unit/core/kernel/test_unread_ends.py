"""What a machine saved last is read before its attempt is over, whoever was away; what is gone is not booked on."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.cooldowns import setback
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, terminate_intent_id
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import record_unsaved_ends, terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.requests import cancel
from spotd_providers.contract.values import InstanceId, InstanceRef, InstanceState, cost
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, REF, instance, listing, market, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
END = terminate_intent_id(REF)


def saved(name: str = "late", at: datetime = NOW) -> Checkpoint:
    return Checkpoint(name=name, attempt=1, step=7, bytes=1, at=at, manifest_key=f"k{name}", sha256="0" * 64)


def looked(at: datetime, **changes: object) -> dict[AttemptId, HostStatus]:
    return {i: replace(r, read_at=at) for i, r in report(**changes).items()}


def attempt_of(world: World) -> Attempt:
    return world.attempts[FIRST]


def cancelled_after(away: timedelta, state: AttemptState = AttemptState.STARTING) -> World:
    """A cancel of a machine that was read so long ago, before anything was heard of it."""
    world = world_with(state, read_at=NOW - away)
    return applied(world, cancel(world, FIRST.job, NOW))


@every("state", [AttemptState.STARTING, AttemptState.INTENDED])
def test_a_cancelled_machine_that_was_not_read_for_long_is_read_before_its_attempt_ends(state: AttemptState) -> None:
    world = cancelled_after(4 * HOUR, state)
    assert attempt_of(world).state.counts
    assert world.jobs[FIRST.job].state is JobState.CANCELLING
    at = NOW + 2 * SECOND
    seen = looked(
        at, seq=90, phase="done", checkpoints=(saved(),), exit_reason=EndReason.LEASE_EXPIRED, exit_at=NOW - HOUR
    )
    world = applied(world, reconcile(world, {}, seen, at))
    assert not attempt_of(world).state.counts
    assert world.jobs[FIRST.job].state is JobState.CANCELLED
    assert [c.name for c in world.jobs[FIRST.job].checkpoints] == ["late"]


def test_one_that_says_nothing_when_it_is_read_is_ended_at_once() -> None:
    world = cancelled_after(4 * HOUR)
    at = NOW + 2 * SECOND
    world = applied(world, reconcile(world, {}, looked(at), at))
    assert attempt_of(world).end_reason is EndReason.CANCELLED
    assert END in world.intents


def test_a_machine_that_was_read_just_now_and_never_spoke_is_ended_at_once() -> None:
    world = cancelled_after(5 * SECOND)
    assert attempt_of(world).end_reason is EndReason.CANCELLED
    assert world.jobs[FIRST.job].state is JobState.CANCELLED


def without_store() -> tuple[World, datetime]:
    """A running job was cancelled and its time to save is over, and since the order nothing could be read."""
    world = world_with(AttemptState.RUNNING)
    world = applied(world, cancel(world, FIRST.job, NOW))
    stop = attempt_of(world).stop
    assert stop is not None
    world = applied(world, reconcile(world, {}, {}, stop.deadline))
    return world, stop.deadline


def test_with_the_store_away_the_machine_is_ended_in_time_and_its_attempt_once_the_store_was_read() -> None:
    world, at = without_store()
    assert world.intents[END].state is IntentState.OPEN
    assert attempt_of(world).state is AttemptState.STOPPING
    assert "read once the checkpoint store answers" in world.jobs[FIRST.job].reason
    world = applied(world, terminate_accepted(world, END, at + SECOND))
    assert attempt_of(world).meter.since is None
    at += 2 * HOUR
    world = applied(world, reconcile(world, listing(at=at), looked(at, seq=9, checkpoints=(saved(),)), at))
    world = applied(world, reconcile(world, listing(at=at), looked(at), at))
    assert attempt_of(world).end_reason is EndReason.CANCELLED if FIRST in world.attempts else True
    job = world.jobs.get(FIRST.job)
    assert job is None or [c.name for c in job.checkpoints] == ["late"]


def test_a_list_from_before_its_end_does_not_bring_it_back_and_a_forgotten_order_is_repeated() -> None:
    world, at = without_store()
    world = applied(world, terminate_accepted(world, END, at + SECOND))
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at + 2 * SECOND))
    assert attempt_of(world).machine is MachineState.HALTED
    assert attempt_of(world).meter.since is None
    late = at + 5 * MINUTE
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=late), {}, late))
    assert world.intents[END].state is IntentState.OPEN


def test_one_that_is_gone_is_ended_only_once_while_the_store_is_away() -> None:
    world, at = without_store()
    world = applied(world, terminate_accepted(world, END, at + SECOND))
    said = []
    for minute in range(1, 60):
        now = at + minute * MINUTE
        plan = reconcile(world, listing(instance(InstanceState.GONE), at=now), {}, now)
        said += [e for e in plan.events if e.kind == "machine.ending"]
        world = applied(world, plan)
        world = applied(world, decide(world, market(at=now), now))
    assert said == []
    assert attempt_of(world).state is AttemptState.STOPPING


def test_after_a_day_without_the_store_the_attempt_ends_unread() -> None:
    world, at = without_store()
    before = reconcile(world, {}, {}, at + 24 * HOUR - SECOND)
    assert FIRST not in before.attempts or before.attempts[FIRST].state.counts
    plan = reconcile(world, {}, {}, at + 24 * HOUR)
    assert plan.attempts[FIRST].end_reason is EndReason.CANCELLED


@every("silent", [False, True])
def test_a_machine_that_is_believed_lost_late_is_booked_up_to_the_first_list_that_lacked_it(silent: bool) -> None:
    missing = NOW - 6 * HOUR
    began = NOW - 10 * HOUR
    world = world_with(AttemptState.RUNNING, missing_since=missing, heartbeat_seen_at=missing - 10 * MINUTE)
    item = attempt_of(world)
    read_at = NOW - 6 * HOUR
    item = replace(item, launched_at=began, read_at=read_at, meter=replace(item.meter, since=began, until=None))
    world = replace(world, attempts={FIRST: item})
    plan = reconcile(world, {} if silent else listing(at=NOW - SECOND), looked(NOW), NOW)
    assert plan.attempts[FIRST].end_reason is EndReason.HOST_LOST
    assert sum(c.amount for c in plan.charges) == pytest.approx(cost(item.meter.rate, 4 * HOUR), abs=2)


@every(
    ("saved_by", "heard_at", "worked"),
    [
        pytest.param(None, None, False, id="no sign"),
        pytest.param(1, NOW - SECOND, True, id="a checkpoint from before"),
        pytest.param(None, NOW - 5 * MINUTE, True, id="a heartbeat from before"),
        pytest.param(0, NOW - SECOND, False, id="a checkpoint of another attempt"),
    ],
)
def test_a_machine_found_late_is_booked_from_its_launch_if_it_worked_before_it_is_said_to_have_been_made(
    saved_by: int | None, heard_at: datetime | None, worked: bool
) -> None:
    world = world_with(AttemptState.INTENDED, heartbeat_seen_at=heard_at)
    owner = world.jobs[FIRST.job]
    checkpoints = () if saved_by is None else (replace(saved(at=NOW - 5 * MINUTE), attempt=saved_by),)
    world = replace(world, jobs={owner.id: replace(owner, checkpoints=checkpoints)})
    woken = replace(instance(InstanceState.RUNNING), created_at=NOW - 2 * MINUTE)
    plan = reconcile(world, listing(woken), looked(NOW), NOW)
    launched = NOW - (10 if worked else 2) * MINUTE
    assert plan.attempts[FIRST].launched_at == launched


@every(
    ("reason", "has_saved", "was_heard", "allowed"),
    [
        (EndReason.PROVISION_TIMEOUT, True, False, 20),
        (EndReason.HOST_LOST, True, False, 20),
        (EndReason.HOST_LOST, True, True, 5),
        (EndReason.PROVISION_TIMEOUT, False, False, 5),
        (EndReason.DISK_FULL, True, False, 5),
        (EndReason.NOT_PREPARED, True, False, 5),
    ],
)
def test_a_job_that_has_saved_before_bears_more_machines_of_which_nothing_is_heard(
    reason: EndReason, has_saved: bool, was_heard: bool, allowed: int
) -> None:
    world = world_with(AttemptState.STARTING, heartbeat_seen_at=NOW - SECOND if was_heard else None)
    job = replace(world.jobs[FIRST.job], checkpoints=(replace(saved(), attempt=0),) if has_saved else ())
    starts = 0
    while not (back := setback(replace(job, failed_starts=starts), attempt_of(world), reason, NOW)).gives_up:
        starts = back.failed_starts
        assert back.not_before is not None
    assert back.failed_starts == allowed


def ended_unsaved(ref: InstanceRef = REF) -> Intent:
    return Intent(
        id=terminate_intent_id(ref),
        kind=IntentKind.TERMINATE,
        provider=ref.provider,
        key=attempt_of(world_with(AttemptState.RUNNING)).key,
        state=IntentState.ACCEPTED,
        created_at=NOW - 2 * MINUTE,
        accepted_at=NOW - MINUTE,
        attempt=FIRST,
        ref=ref,
    )


def test_a_machine_that_was_ended_unsaved_bills_no_longer_and_what_it_saved_is_read_before_its_attempt_ends() -> None:
    world = world_with(AttemptState.RUNNING)
    since = attempt_of(world).meter.since
    assert since is not None
    plan = record_unsaved_ends(world, [ended_unsaved()], NOW)
    world = applied(world, plan)
    item = attempt_of(world)
    assert (item.state, item.machine) == (AttemptState.RUNNING, MachineState.HALTED)
    assert sum(c.amount for c in plan.charges) == cost(item.quote.price.total, NOW - MINUTE - since)
    assert world.intents[END].accepted_at == NOW - MINUTE
    assert record_unsaved_ends(world, [ended_unsaved()], NOW + MINUTE).is_empty, "once is enough"
    at = NOW + HOUR
    plan = reconcile(world, listing(at=at - SECOND), looked(at, checkpoints=(saved(),)), at)
    assert not plan.contained
    world = applied(world, plan)
    assert [c.name for c in world.jobs[FIRST.job].checkpoints] == ["late"]
    assert attempt_of(world).end_reason is EndReason.HOST_LOST
    world = applied(world, reconcile(world, listing(at=at + SECOND), {}, at + 2 * SECOND))
    assert FIRST not in world.attempts
    assert world.jobs[FIRST.job].spent == item.meter.settled


def test_an_end_of_another_machine_says_nothing_of_this_one() -> None:
    other = replace(REF, instance_id=InstanceId("other"))
    assert record_unsaved_ends(world_with(AttemptState.RUNNING), [ended_unsaved(other)], NOW).is_empty
    assert record_unsaved_ends(replace(world_with(AttemptState.RUNNING), attempts={}), [ended_unsaved()], NOW).is_empty
