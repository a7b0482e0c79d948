"""What agents' jobs hold of their day: the larger of what each may cost and what it has cost."""

from __future__ import annotations

from dataclasses import replace

from spotd.core.budgets import committed
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import AttemptState
from spotd.core.metering import spent
from spotd.core.requests import AGENT, agents_day
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.core.builders import NOW, world_with

USD = 1_000_000


@every(
    ("budget", "cost", "free"),
    [(10, 0, 15), (10, 9, 15), (10, 20, 5), (1, 20, 5)],
    ids=["new", "in", "over", "lowered"],
)
def test_a_job_that_has_cost_more_than_its_budget_holds_what_it_cost(budget: int, cost: int, free: int) -> None:
    world = world_with(AttemptState.RUNNING)
    (job,) = world.jobs.values()
    live = replace(job, submitted_by=AGENT, budget_set=MicroUsd(budget * USD), spent=MicroUsd(cost * USD))
    policy = replace(world.policy, agent_day_budget=MicroUsd(25 * USD))
    world = replace(world, jobs={job.id: live}, attempts={}, policy=policy)
    more = replace(job, id=JobId("other00000"), budget_set=MicroUsd(free * USD))
    gate = agents_day(policy)
    assert gate.problem([more], world, MicroUsd(0), NOW) == ""
    assert "hold" in gate.problem([replace(more, budget_set=MicroUsd(free * USD + 1))], world, MicroUsd(0), NOW)


def test_a_lowered_budget_frees_nothing_that_is_set_aside_for_a_machine() -> None:
    world = world_with(AttemptState.RUNNING)
    (job,) = world.jobs.values()
    (item,) = world.attempts.values()
    lowered = replace(job, submitted_by=AGENT, budget_set=MicroUsd(1))
    policy = replace(world.policy, agent_day_budget=MicroUsd(25 * USD))
    world = replace(world, jobs={job.id: lowered}, policy=policy)
    held = spent(item, NOW) + committed(world, item, NOW)
    assert committed(world, item, NOW) > 0
    rest = MicroUsd(25 * USD - held)
    more = replace(job, id=JobId("other00000"), budget_set=rest)
    gate = agents_day(policy)
    assert gate.problem([more], world, MicroUsd(0), NOW) == ""
    assert "hold" in gate.problem([replace(more, budget_set=MicroUsd(rest + 1))], world, MicroUsd(0), NOW)
