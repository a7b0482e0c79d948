"""Arrays in a decision: how many at once, and that ten thousand waiting jobs cost no more than one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import ArrayTask, Job
from spotd.core.domain.plan import applied
from spotd.core.domain.states import JobState
from spotd.core.domain.world import VerdictKind, World
from tests.unit.core.builders import MINUTE, NOW, job, market, offer, shop_policy

OFFERS = [offer(f"o{number}") for number in range(9)]


def tasks(count: int, *, at_once: int | None = None, ceiling: int = 500_000) -> dict[JobId, Job]:
    made = {}
    for index in range(count):
        place = ArrayTask(id=JobId("array"), name="sweep", index=index, count=count, at_once=at_once)
        one = job(index + 1, ceiling=ceiling, name=f"sweep-{index}", array=place)
        made[one.id] = one
    return made


def world_of(jobs: dict[JobId, Job], **policy: int) -> World:
    return World(policy=shop_policy(**policy), jobs=jobs, attempts={}, intents={})


def test_so_many_jobs_of_an_array_run_at_once_as_was_asked_for() -> None:
    world = world_of(tasks(6, at_once=2))
    plan = decide(world, market(*OFFERS), NOW)
    assert sorted(i.job for i in plan.attempts) == ["j1", "j2"]
    assert plan.verdicts[JobId("j3")].sentence == "waits for its turn: 2 jobs of sweep run, the most at once"
    later = decide(applied(world, plan), market(*OFFERS), NOW + MINUTE)
    assert not [a for a in later.attempts.values() if a.id.job not in {"j1", "j2"}]
    assert later.verdicts[JobId("j5")].kind is VerdictKind.ARRAY


def test_without_a_limit_all_run_that_the_machines_allow_and_the_rest_waits_for_the_first_that_waits() -> None:
    plan = decide(world_of(tasks(6), machines_max=4), market(*OFFERS), NOW)
    assert len(plan.attempts) == 4
    assert plan.verdicts[JobId("j5")].kind is VerdictKind.MACHINES
    assert plan.verdicts[JobId("j6")].sentence == (
        "comes after sweep-4 of its array (all 4 machines of [budget] machines are in use)"
    )


@pytest.mark.long
def test_only_the_first_job_of_an_array_moves_to_and_fro_with_prices() -> None:
    world = world_of(tasks(10_000, ceiling=1))
    plan = decide(world, market(*OFFERS), NOW)
    assert [one.state for one in plan.jobs.values()] == [JobState.WAITING_PRICE]
    assert len(plan.events) == 1
    assert "above the ceiling" in plan.verdicts[JobId("j9999")].sentence


def test_a_job_of_an_array_that_had_a_machine_waits_for_no_other() -> None:
    jobs = tasks(3, ceiling=1)
    tried = replace(jobs[JobId("j3")], attempts_made=1, state=JobState.RECOVERING)
    plan = decide(world_of({**jobs, tried.id: tried}), market(*OFFERS), NOW)
    assert plan.verdicts[tried.id].kind is VerdictKind.ABOVE_CEILING
    assert plan.verdicts[JobId("j1")].kind is VerdictKind.ABOVE_CEILING
    assert plan.verdicts[JobId("j2")].kind is VerdictKind.ARRAY
