"""Chains of jobs: who waits for whom, what is said of it, and which outputs are handed on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Chain, Job, JobInput, Outputs
from spotd.core.domain.plan import applied
from spotd.core.domain.states import JobState
from spotd.core.domain.world import PastJob, Verdict, VerdictKind, World, awaited, past_job
from spotd.core.requests import retry
from spotd.core.schedule import circular, readers
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy

STORED = Outputs(attempt=2, sha256="a" * 64, bytes=7_000)
PREP = job(1, name="prep", ceiling=1)


def following(number: int, *after: int) -> Job:
    return job(number, chain=Chain(after=tuple(JobId(f"j{before}") for before in after)))


def world_of(*jobs: Job, past: tuple[Job, ...] = ()) -> World:
    return World(
        policy=shop_policy(),
        jobs={one.id: one for one in jobs},
        attempts={},
        intents={},
        past={one.id: past_job(one) for one in past},
    )


def decided(world: World, number: int = 2) -> tuple[Verdict, Job]:
    plan = decide(world, market(offer("a"), offer("b")), NOW)
    name = JobId(f"j{number}")
    return plan.verdicts[name], plan.jobs.get(name, world.jobs[name])


def test_a_job_waits_queued_until_the_other_has_succeeded() -> None:
    verdict, after = decided(world_of(PREP, following(2, 1)))
    assert verdict.kind is VerdictKind.AFTER
    assert verdict.sentence == "waits for prep (j1), which is QUEUED"
    assert after.state is JobState.QUEUED
    done = replace(PREP, state=JobState.SUCCEEDED)
    assert decided(world_of(following(2, 1), past=(done,)))[1].state is JobState.PROVISIONING


def test_what_the_other_left_becomes_an_input_by_its_hash() -> None:
    done = replace(PREP, state=JobState.SUCCEEDED, outputs=STORED)
    bare = replace(job(3, name="bare"), state=JobState.SUCCEEDED)
    _, after = decided(world_of(following(2, 1, 3), past=(done, bare)))
    assert after.chain is not None
    assert after.chain.inputs == (JobInput(job=done.id, name="prep", attempt=2, sha256="a" * 64, bytes=7_000),)
    assert (after.input_bytes, after.delivered_bytes) == (7_000, 7_000)


def test_inputs_are_kept_whatever_becomes_of_the_other_later_until_a_retry() -> None:
    own = Chain(after=(JobId("j1"),), inputs=())
    again = replace(following(2, 1), chain=own)
    assert decided(world_of(PREP, again))[1].state is JobState.PROVISIONING
    failed = replace(again, state=JobState.FAILED)
    queued = retry(world_of(), failed, NOW).jobs[failed.id]
    assert queued.chain == Chain(after=(JobId("j1"),))


@every("state", [JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED])
def test_one_that_ended_otherwise_is_named_with_both_ways_out(state: JobState) -> None:
    ended = replace(PREP, state=state, reason="the disk was full")
    verdict, after = decided(world_of(following(2, 1), past=(ended,)))
    assert verdict.sentence == (
        f"waits for prep (j1), which is {state}: the disk was full;"
        " spotctl retry j1 lets both go on, spotctl cancel job2 ends the wait"
    )
    assert after.state is JobState.QUEUED
    revived = replace(ended, state=JobState.QUEUED)
    assert decided(world_of(revived, following(2, 1)))[0].sentence == "waits for prep (j1), which is QUEUED"


def test_missing_outputs_of_the_other_are_waited_for() -> None:
    done = replace(PREP, state=JobState.SUCCEEDED, outputs=Outputs(attempt=1, sha256=None, problem="none stored"))
    verdict, _ = decided(world_of(following(2, 1), past=(done,)))
    assert verdict.sentence == (
        "waits for the outputs of prep (j1): none of its outputs is stored: none stored; spotctl retry --anyway j1"
    )


def test_many_others_are_counted_and_one_that_the_state_lacks_is_said() -> None:
    others = tuple(job(number) for number in range(3, 9))
    verdict, _ = decided(world_of(*others, following(2, *range(3, 9))))
    assert verdict.sentence.endswith("job5 (j5), which is QUEUED and 3 more")
    verdict, _ = decided(world_of(following(2, 77)))
    assert verdict.sentence == "waits for j77, of which the state holds nothing; spotctl cancel job2 ends the wait"


def test_a_circle_in_a_damaged_state_is_said_and_holds_up_nothing_else() -> None:
    world = world_of(following(2, 3), following(3, 4), following(4, 2), following(5, 2), job(6))
    plan = decide(world, market(offer("a")), NOW)
    assert plan.jobs[JobId("j6")].state is JobState.PROVISIONING
    for number in (2, 3, 4, 5):
        assert "wait for it in turn" in plan.verdicts[JobId(f"j{number}")].sentence
    itself = decided(world_of(following(2, 2)))[0]
    assert itself.sentence.endswith("so none of them can begin: spotctl cancel job2")


@given(st.dictionaries(st.integers(1, 12), st.lists(st.integers(1, 12), max_size=4), max_size=12))
def test_the_jobs_of_circles_are_those_that_never_come_free(links: dict[int, list[int]]) -> None:
    jobs = {(one := following(number, *after)).id: one for number, after in links.items()}
    begun: set[JobId] = set()
    for _ in range(len(jobs) + 1):
        for one in jobs.values():
            assert one.chain is not None
            if all(before in begun or before not in jobs for before in one.chain.after):
                begun.add(one.id)
    assert circular(jobs) == jobs.keys() - begun


@pytest.mark.long
def test_a_chain_of_ten_thousand_jobs_is_followed_without_recursion() -> None:
    jobs = {(one := following(number, number - 1)).id: one for number in range(2, 10_002)}
    assert circular(jobs) == frozenset()


def test_a_success_of_this_very_pass_is_known_to_the_decision() -> None:
    world = world_of(PREP, following(2, 1))
    plan = decide(world, market(), NOW)
    won = replace(PREP, state=JobState.SUCCEEDED, outputs=STORED)
    after = applied(world, replace(plan, jobs={**plan.jobs, won.id: won}))
    assert after.past == {won.id: PastJob(id=won.id, name="prep", state=won.state, reason=won.reason, outputs=STORED)}
    assert decided(after)[1].state is JobState.PROVISIONING
    assert awaited([PREP, replace(following(2, 1), state=JobState.CANCELLED)]) == set()


def test_readers_are_the_jobs_that_go_on_with_outputs_of_another() -> None:
    one = JobInput(job=PREP.id, name="prep", attempt=1, sha256="b" * 64, bytes=1)
    reader = replace(following(2, 1), chain=Chain(after=(PREP.id,), inputs=(one,)))
    over = replace(reader, id=JobId("j9"), state=JobState.SUCCEEDED)
    assert readers([reader, over, following(3, 1)], PREP.id) == [reader]
