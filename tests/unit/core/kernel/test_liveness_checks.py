"""A glance keeps an attempt alive and never ends one: what would end it asks for a look at its host first."""

from __future__ import annotations

from datetime import timedelta

from spotd.core.domain.attempts import HostStatus, StopOrder
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import Instance, InstanceState, Loss
from tests.cases import every
from tests.unit.core.builders import NOW, instance, listing, report, world_with

A, S = AttemptState, InstanceState
ATTEMPT = AttemptId(job=JobId("j1"), number=1)
RUNS = (instance(S.RUNNING),)
LONG_AGO = NOW - timedelta(hours=5)
STOP = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=LONG_AGO, deadline=NOW - timedelta(seconds=1))

WOULD_END = {
    "silent": (world_with(A.RUNNING, heartbeat_seen_at=NOW - timedelta(minutes=35)), RUNS),
    "never heard of": (world_with(A.STARTING, launched_at=LONG_AGO, heartbeat_seen_at=None), RUNS),
    "stopping for too long": (world_with(A.STOPPING, stop=STOP), RUNS),
    "outbid": (world_with(A.RUNNING, over_since=NOW - timedelta(minutes=1)), (instance(S.PAUSED, loss=Loss.OUTBID),)),
    "gone": (world_with(A.RUNNING, over_since=NOW - timedelta(minutes=1)), (instance(S.GONE, loss=Loss.PREEMPTED),)),
    "absent": (
        world_with(A.RUNNING, missing_since=NOW - timedelta(minutes=1), heartbeat_seen_at=NOW - timedelta(seconds=45)),
        (),
    ),
}


@every(("world", "shown"), WOULD_END.values(), ids=WOULD_END)
def test_whatever_ends_an_attempt_asks_for_a_complete_look_first(world: World, shown: tuple[Instance, ...]) -> None:
    glanced = reconcile(world, listing(*shown), report(liveness_check=True), NOW)
    assert glanced.full_reads == {ATTEMPT}
    assert all(item.state.counts for item in glanced.attempts.values())
    looked = reconcile(world, listing(*shown), report(), NOW)
    assert looked.full_reads == frozenset()
    assert not looked.attempts[ATTEMPT].state.counts


def test_a_beat_is_a_sign_of_life_though_its_heartbeat_was_not_read() -> None:
    world = world_with(A.RUNNING, heartbeat_seen_at=NOW - timedelta(seconds=50))
    plan = reconcile(world, listing(*RUNS), report(liveness_check=True, marker_at=NOW), NOW)
    assert plan.full_reads == frozenset()
    assert plan.attempts[ATTEMPT].heartbeat_seen_at == NOW
    assert plan.attempts[ATTEMPT].heartbeat_seq == world.attempts[ATTEMPT].heartbeat_seq


def test_hosts_that_only_beat_are_written_down_once_in_a_while_and_judged_by_their_newest_beat() -> None:
    world = world_with(A.RUNNING, heartbeat_seen_at=NOW - timedelta(seconds=40))
    beating = report(liveness_check=True, marker_at=NOW - timedelta(seconds=1))
    assert reconcile(world, listing(*RUNS), beating, NOW).is_empty
    later = NOW + timedelta(minutes=34, seconds=58)
    assert reconcile(world, listing(*RUNS), beating, later).full_reads == frozenset()
    silent = NOW + timedelta(minutes=34, seconds=59)
    assert reconcile(world, listing(*RUNS), beating, silent).full_reads == {ATTEMPT}
    looked = reconcile(world, listing(*RUNS), report(marker_at=NOW - timedelta(seconds=1)), silent)
    assert looked.attempts[ATTEMPT].end_detail == "no sign of life for 2100 s"


def test_an_old_beat_does_not_put_the_last_sign_of_life_back() -> None:
    world = world_with(A.RUNNING)
    plan = reconcile(world, listing(*RUNS), report(liveness_check=True, marker_at=NOW - timedelta(minutes=5)), NOW)
    assert plan.is_empty, "nothing has changed, so nothing is written"


def test_a_beat_is_no_first_sign_of_life() -> None:
    world = world_with(A.STARTING, heartbeat_seen_at=None)
    plan = reconcile(world, listing(*RUNS), report(liveness_check=True, marker_at=NOW), NOW)
    assert all(item.heartbeat_seen_at is None for item in plan.attempts.values())


def test_a_live_beat_does_not_hide_what_the_last_complete_look_found() -> None:
    found = HostStatus(attempt=ATTEMPT, read_at=NOW, liveness_check=True, marker_at=NOW, flood="too much")
    plan = reconcile(world_with(A.RUNNING), listing(*RUNS), {ATTEMPT: found}, NOW)
    assert plan.attempts[ATTEMPT].end_reason is EndReason.FLOODED
