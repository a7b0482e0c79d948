"""A job ends when it is due, or has run for as long as it may: saved, expired, and with a sentence that says why."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from spotd.core.decide import decide
from spotd.core.domain.jobs import Pacing, RunTotals
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.requests import retry
from spotd.core.timeline import redated
from spotd_jobs.spec.model import Deadline, Schedule
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, market, offer, shop_policy, world_with

_HOUR = timedelta(hours=1)


def _running(schedule: Schedule, **changes: Any) -> World:
    world = world_with(AttemptState.RUNNING, **changes)
    [owner] = world.jobs.values()
    return replace(world, jobs={owner.id: replace(owner, spec=replace(owner.spec, schedule=schedule))})


def _stop(world: World, now: datetime = NOW) -> EndReason | None:
    after = applied(world, decide(world, market(offer(), at=now), now))
    [item] = after.attempts.values()
    return None if item.stop is None else item.stop.reason


@every(
    ("schedule", "expected"),
    [
        (Schedule(deadline=Deadline(at=NOW)), EndReason.DEADLINE_PASSED),
        (Schedule(deadline=Deadline(at=NOW + timedelta(seconds=1))), None),
        (Schedule(deadline=Deadline(span=_HOUR)), None),  # submitted a second more than an hour ago
        (Schedule(deadline=Deadline(span=_HOUR - timedelta(seconds=1))), EndReason.DEADLINE_PASSED),
        (Schedule(max_duration=9 * MINUTE), EndReason.MAX_DURATION),
        (Schedule(max_duration=9 * MINUTE + timedelta(seconds=1)), None),
    ],
)
def test_a_machine_saves_and_stops_when_its_job_is_over_and_not_a_second_earlier(
    schedule: Schedule, expected: EndReason | None
) -> None:
    assert _stop(_running(schedule)) is expected


def test_a_machine_that_only_uploads_is_left_to_finish_for_as_long_as_a_save() -> None:
    world = _running(Schedule(deadline=Deadline(at=NOW), max_duration=9 * MINUTE), phase="upload")
    limit = world.policy.save_limit
    assert _stop(world) is None
    assert _stop(world, NOW + limit - timedelta(seconds=1)) is None
    assert _stop(world, NOW + limit) is EndReason.DEADLINE_PASSED


@every("state", [JobState.QUEUED, JobState.WAITING_PRICE, JobState.RECOVERING])
@every(
    ("changes", "words"),
    [
        ({"spec": {"schedule": Schedule(deadline=Deadline(at=NOW))}}, "it was due 2026-03-02 12:00 UTC"),
        (
            {"spec": {"schedule": Schedule(max_duration=_HOUR)}, "totals": RunTotals(ran=_HOUR)},
            "max_duration is 1 h 0 min",
        ),
    ],
)
def test_a_job_without_a_machine_expires_and_is_not_placed(state: JobState, changes: Any, words: str) -> None:
    owner = job(state=state, **changes)
    world = World(policy=shop_policy(), jobs={owner.id: owner}, attempts={}, intents={})
    plan = decide(world, market(offer()), NOW)
    assert not plan.intents
    after = plan.jobs[owner.id]
    assert after.state is JobState.EXPIRED
    assert words in after.reason
    assert f"spotctl retry {owner.name}" in after.reason
    assert plan.verdicts[owner.id].kind is VerdictKind.DEADLINE


def test_a_retry_begins_both_spans_anew() -> None:
    schedule = Schedule(deadline=Deadline(span=_HOUR), max_duration=_HOUR)
    owner = job(state=JobState.EXPIRED, spec={"schedule": schedule}, totals=RunTotals(ran=_HOUR), recoveries=2)
    world = World(policy=shop_policy(), jobs={owner.id: owner}, attempts={}, intents={})
    world = applied(world, retry(world, owner, NOW))
    assert world.jobs[owner.id].pacing == Pacing(counted_from=NOW, ran_before=_HOUR, losses=2)
    assert decide(world, market(offer()), NOW).jobs[owner.id].state is JobState.PROVISIONING
    later = NOW + _HOUR
    assert decide(world, market(offer(), at=later), later).jobs[owner.id].state is JobState.EXPIRED


def test_a_clock_that_is_set_moves_a_span_and_no_instant() -> None:
    span = job(1, spec={"schedule": Schedule(deadline=Deadline(span=2 * _HOUR))})
    instant = job(2, spec={"schedule": Schedule(deadline=Deadline(at=NOW + _HOUR))})
    world = World(policy=shop_policy(), jobs={span.id: span, instant.id: instant}, attempts={}, intents={})
    ahead = timedelta(hours=9)
    world = applied(world, redated(world, ahead, NOW))
    now = NOW + ahead
    states = {i: j.state for i, j in decide(world, market(offer(), offer("o2"), at=now), now).jobs.items()}
    assert states == {span.id: JobState.PROVISIONING, instant.id: JobState.EXPIRED}


def test_without_the_keys_nothing_ends_a_job() -> None:
    assert _stop(_running(Schedule()), NOW + timedelta(days=9999)) is None
