"""What of a lost state is rebuilt of a job's record, as a table."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given

from spotd.core.domain.intents import AttemptId, IntentState
from spotd.core.domain.jobs import Job, Moves, Pacing
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.core.recovery import (
    JobRecord,
    LaunchRecord,
    LostJob,
    Survey,
    Unknown,
    adopt,
    content_of,
    is_ours,
    must_be_stored_at_once,
)
from spotd.daemon.job_records import from_document, to_document
from spotd_providers.contract.values import InstallId, MicroUsd
from tests.cases import every
from tests.unit.store import values as v

NOW = v.NOW + timedelta(hours=3)
EMPTY = World(policy=v.POLICY, jobs={}, attempts={}, intents={})


def record(job: Job, **changes: Any) -> JobRecord:
    return replace(JobRecord(install=v.INSTALL, identity="", saved_at=v.NOW, job=content_of(job)), **changes)


def launched(number: int) -> Unknown:
    item = v.attempt(number=number)
    agreed = LaunchRecord(
        key=item.key, quote=item.quote, ceiling=item.ceiling, price_max=item.price_max, intended_at=v.NOW
    )
    return Unknown(number=number, record=agreed)


def lost(job: Job, *numbers: int, spent_on: int = 0) -> LostJob:
    """The job, after whose attempts these numbers were used."""
    survey = Survey(job=job.id, unknown=[launched(n) for n in numbers]) if numbers else None
    return LostJob(record=record(job), survey=survey, spent_on=launched(spent_on) if spent_on else None)


def rebuilt(one: LostJob) -> tuple[Plan, World]:
    plan = adopt(EMPTY, [one], (), NOW)
    world = applied(EMPTY, plan)
    assert broken_rules(world) == ()
    return plan, world


def test_a_job_that_never_had_a_machine_is_queued() -> None:
    plan, world = rebuilt(lost(v.job(state=JobState.WAITING_PRICE)))
    assert world.jobs[v.job_id("j1")].state is JobState.QUEUED
    assert [e.kind for e in plan.events] == ["job.adopted"]
    assert world.jobs[v.job_id("j1")].not_before is None


def test_the_newest_attempt_is_one_whose_launch_has_an_unknown_outcome() -> None:
    plan, world = rebuilt(lost(v.job(state=JobState.RUNNING, attempts_made=2), 3))
    [item] = world.attempts.values()
    assert (item.id.number, item.state, item.outcome_unknown) == (3, AttemptState.INTENDED, True)
    assert [t.state for t in world.intents.values()] == [IntentState.UNKNOWN]
    assert world.jobs[v.job_id("j1")].state is JobState.PROVISIONING
    assert plan.list_again


def test_a_job_whose_numbers_left_no_record_waits_until_no_machine_of_it_can_live() -> None:
    _, world = rebuilt(lost(v.job(state=JobState.RUNNING, attempts_made=2)))
    held = world.jobs[v.job_id("j1")].not_before
    assert held is not None
    assert held >= NOW + v.POLICY.lease


@every("state", [s for s in JobState if s.is_final])
def test_a_job_that_had_ended_stays_ended(state: JobState) -> None:
    plan, world = rebuilt(lost(v.job(state=state, attempts_made=2, ended_at=v.NOW)))
    assert plan.jobs[v.job_id("j1")].state is state
    assert (world.attempts, world.intents) == ({}, {})


def test_a_cancelled_job_is_cancelled_again_and_its_machine_is_told_to_save() -> None:
    plan, _ = rebuilt(lost(v.job(state=JobState.CANCELLING, attempts_made=0, cancel_requested=True), 1))
    assert plan.jobs[v.job_id("j1")].state is JobState.CANCELLING
    assert plan.attempts[v.attempt_id()].stop is not None
    plan, _ = rebuilt(lost(v.job(state=JobState.CANCELLING, cancel_requested=True)))
    assert plan.jobs[v.job_id("j1")].state is JobState.CANCELLED


def test_what_a_job_has_cost_is_booked_once_and_counts_on_the_day_of_its_record() -> None:
    job = v.job(state=JobState.RUNNING, attempts_made=1, spent=MicroUsd(7_000_000))
    plan, world = rebuilt(lost(job, 2, spent_on=1))
    assert [(c.attempt.number, c.amount, c.day) for c in plan.charges] == [(1, 7_000_000, v.NOW.date())]
    assert world.spent_by_day == {v.NOW.date(): 7_000_000}
    assert plan.attempts[v.attempt_id()].state is AttemptState.ENDED
    first = v.job(state=JobState.RUNNING, attempts_made=0, spent=MicroUsd(7_000_000))
    plan, _ = rebuilt(lost(first, 1, spent_on=1))
    assert [(c.attempt, c.amount) for c in plan.charges] == [(AttemptId(job=first.id, number=1), 7_000_000)]
    assert plan.attempts[v.attempt_id()].state is AttemptState.INTENDED


def test_a_job_that_the_state_knows_is_left_as_it_is() -> None:
    one = lost(v.job(state=JobState.RUNNING), 1)
    assert adopt(EMPTY, [one], {one.record.job.id}, NOW).is_empty
    plan, world = rebuilt(one)
    assert not plan.is_empty
    assert adopt(world, [one], (), NOW).is_empty


def test_a_record_of_a_clock_that_was_ahead_dates_nothing_in_the_future() -> None:
    late = v.job(submitted_at=NOW + timedelta(days=400), state_since=NOW + timedelta(days=400))
    plan, _ = rebuilt(lost(late))
    assert plan.jobs[late.id].submitted_at == NOW


def test_another_identity_or_label_is_not_ours() -> None:
    policy = replace(v.POLICY, identity="aaaaaa", identities=frozenset({"bbbbbb"}))
    whose = [(v.INSTALL, "aaaaaa"), (v.INSTALL, "bbbbbb"), (v.INSTALL, ""), (InstallId("other"), "aaaaaa")]
    found = [is_ours(record(v.job(), install=label, identity=identity), policy) for label, identity in whose]
    assert found == [True, True, False, False]


PASSING = {
    "reason": {"reason": "waits for a price"},
    "state": {"state": JobState.WAITING_PRICE},
    "pause": {"not_before": v.NOW},
    "spot wait": {"pacing": Pacing(spot_wanted_since=v.NOW)},
    "a proposal": {"moves": Moves(refusals=3)},
}
AT_ONCE = {
    "cancelled": {"cancel_requested": True},
    "ended": {"state": JobState.SUCCEEDED},
    "a new number": {"attempts_made": 1},
    "a budget": {"budget_set": MicroUsd(1)},
    "another ceiling": {"spec": replace(v.spec(), priority=5)},
    "an error": {"errors": 1},
}
SOON = {"a checkpoint": {"checkpoints": (v.checkpoint(),)}, "cost": {"spent": MicroUsd(5)}}


@every(
    ("change", "is_written", "at_once"),
    [
        *((change, False, False) for change in PASSING.values()),
        *((change, True, True) for change in AT_ONCE.values()),
        *((change, True, False) for change in SOON.values()),
    ],
    ids=[*PASSING, *AT_ONCE, *SOON],
)
def test_a_record_follows_what_forbids_at_once_and_passing_figures_never(
    change: dict[str, Any], *, is_written: bool, at_once: bool
) -> None:
    before, after = content_of(v.job()), content_of(v.job(**change))
    assert (before != after, must_be_stored_at_once(before, after)) == (is_written, at_once)


@given(v.arbitrary(Job))
def test_a_record_is_read_as_it_was_written(job: Job) -> None:
    written = record(replace(job, spec=v.spec()))
    assert from_document(to_document(written)) == written


@every(
    "data",
    [b"", b"{}", b"[]", b"null", b'{"schema": 2}', b'{"schema": 1, "spec": {}, "record": {}}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_document(data)
