"""Machines that lower jobs give up: only if asked, only for what starts at once, and said on both sides."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spotd.core.budgets import BudgetGuard
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import Policy, attempt_key
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.enforcement import DWELL
from spotd_jobs.spec.model import Deadline, PolicyName, Schedule
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.core.builders import INSTALL, MINUTE, NOW, job, market, offer, shop_policy, world_with

URGENT = JobId("j9")
ASKS = Schedule(preempt=True)


def urgent(*, priority: int = 10, schedule: Schedule = ASKS, ceiling: int = 500_000) -> Job:
    return job(9, name="urgent", ceiling=ceiling, spec={"priority": priority, "schedule": schedule})


def running(number: int, *, priority: int = 0, minutes: float = 60, saved: float | None = None) -> tuple[Job, Attempt]:
    """A job that was launched so many minutes ago, and saved so many minutes ago."""
    [item] = world_with(AttemptState.RUNNING).attempts.values()
    launched = NOW - minutes * MINUTE
    kept: tuple[Checkpoint, ...] = ()
    if saved is not None:
        at = NOW - saved * MINUTE
        kept = (Checkpoint(name="c", attempt=1, step=None, bytes=1, at=at, manifest_key="k", sha256="0" * 64),)
    owner = job(number, attempts_made=1, state=JobState.RUNNING, checkpoints=kept, spec={"priority": priority})
    item = replace(
        item,
        id=AttemptId(job=owner.id, number=1),
        key=attempt_key(INSTALL, owner.id, 1),
        intended_at=launched,
        launched_at=launched,
        running_at=launched + MINUTE,
    )
    return owner, item


def world_of(*pairs: tuple[Job, Attempt], waiting: tuple[Job, ...], policy: Policy | None = None) -> World:
    jobs = {one.id: one for one in (*(owner for owner, _ in pairs), *waiting)}
    attempts = {item.id: item for _, item in pairs}
    return World(policy=policy or shop_policy(machines_max=len(pairs)), jobs=jobs, attempts=attempts, intents={})


def stopped(plan: Plan) -> list[str]:
    return [str(i.job) for i, item in plan.attempts.items() if item.stop is not None]


def decided(world: World) -> Plan:
    return decide(world, market(offer("a"), offer("b", price=410_000)), NOW)


def test_a_lower_job_saves_and_stops_where_all_machines_are_in_use_and_both_sides_say_it() -> None:
    world = world_of(running(1), running(2, priority=5), waiting=(urgent(),))
    plan = decided(world)
    assert stopped(plan) == ["j1"]
    order = plan.attempts[AttemptId(job=JobId("j1"), number=1)].stop
    assert order is not None
    assert (order.reason, order.flush) == (EndReason.MADE_ROOM, True)
    verdict = plan.verdicts[URGENT]
    assert verdict.kind is VerdictKind.MACHINES
    assert verdict.sentence == (
        "all 2 machines of [budget] machines are in use; job1 (priority 0) saves and stops to make room"
    )
    after = decided(applied(world, plan))
    assert stopped(after) == []
    assert after.verdicts[URGENT].sentence.endswith("; it waits for one of those that end")
    assert (
        "it saves and stops: it makes room for a job of higher priority: urgent, priority 10"
        in after.verdicts[JobId("j1")].sentence
    )


@every(
    "one",
    [
        pytest.param(urgent(schedule=Schedule()), id="it does not ask"),
        pytest.param(urgent(priority=0), id="the same priority"),
        pytest.param(urgent(ceiling=1), id="no offer is under its ceiling"),
        pytest.param(replace(urgent(), budget_set=MicroUsd(1_000)), id="its own budget carries no machine"),
    ],
)
def test_nothing_is_stopped_for_a_job_that(one: Job) -> None:
    assert stopped(decided(world_of(running(1), running(2), waiting=(one,)))) == []


def test_a_machine_is_left_alone_for_a_while_after_its_launch() -> None:
    young = DWELL / MINUTE - 1
    plan = decided(world_of(running(1, minutes=young), waiting=(urgent(),)))
    assert stopped(plan) == []
    assert plan.verdicts[URGENT].sentence.endswith(
        "; no job of lower priority and without a deadline had its machine for 15 min"
    )
    assert stopped(decided(world_of(running(1, minutes=young + 1), waiting=(urgent(),)))) == ["j1"]


def test_a_job_whose_secrets_could_not_be_given_to_another_machine_makes_no_room() -> None:
    policy = shop_policy(machines_max=2, locked={JobId("j1"): "no key for its secrets"})
    assert stopped(decided(world_of(running(1), running(2, priority=5), waiting=(urgent(),), policy=policy))) == ["j2"]


def test_a_job_with_a_deadline_makes_no_room() -> None:
    owner, item = running(1)
    due = Schedule(deadline=Deadline(span=timedelta(hours=36)), policy=PolicyName.CEILING)
    world = world_of((replace(owner, spec=replace(owner.spec, schedule=due)), item), waiting=(urgent(),))
    assert stopped(decided(world)) == []


def test_the_lowest_priority_comes_first_then_the_machine_that_loses_least_work() -> None:
    pairs = [running(1, saved=50), running(2, saved=5), running(3, priority=-1), running(4, priority=10)]
    assert stopped(decided(world_of(*pairs, waiting=(urgent(),)))) == ["j3"]
    assert stopped(decided(world_of(*pairs[:2], pairs[3], waiting=(urgent(),)))) == ["j2"]


def test_each_waiting_job_has_one_machine_stopped_and_no_more() -> None:
    other = replace(urgent(), id=JobId("j8"), name="second")
    world = world_of(*(running(number) for number in range(1, 6)), waiting=(urgent(), other))
    plan = decided(world)
    assert len(stopped(plan)) == 2
    assert stopped(decided(applied(world, plan))) == []


def test_the_job_that_was_made_room_for_is_served_before_the_one_that_made_it() -> None:
    owner, _ = running(1)
    back = replace(owner, state=JobState.QUEUED)
    plan = decided(world_of(waiting=(back, urgent()), policy=shop_policy(machines_max=1)))
    assert [i.job for i in plan.attempts] == [URGENT]


def test_what_a_budget_promised_to_a_lower_job_is_freed_only_where_that_is_enough() -> None:
    world = world_of(running(1, minutes=20), waiting=(urgent(),), policy=shop_policy())
    needed = 10**9
    for limit in range(60_000, 400_000, 2_000):
        policy = shop_policy(budget_day=MicroUsd(limit))
        plan = decided(replace(world, policy=policy))
        if any(a.stop is not None and a.stop.reason is EndReason.MADE_ROOM for a in plan.attempts.values()):
            needed = min(needed, limit)
            assert plan.verdicts[URGENT].kind is VerdictKind.BUDGET_DAY
            assert plan.verdicts[URGENT].sentence.endswith("; job1 (priority 0) saves and stops to make room")
        elif any(i.job == URGENT for i in plan.attempts):
            break
        (item,) = world.attempts.values()
        guard = BudgetGuard(replace(world, policy=policy), NOW)
        lacking = guard.lacking(world.jobs[URGENT], replace(item.quote, offer=offer("a")))
        is_freed = lacking is not None and lacking <= guard.freed_by(item)
        assert is_freed is (EndReason.MADE_ROOM in {a.stop and a.stop.reason for a in plan.attempts.values()}), limit
    assert needed < limit  # there is a span of budgets in which room is made, and above it none is needed


def test_a_stop_for_another_job_counts_as_no_failure_and_no_preemption() -> None:
    traits = EndReason.MADE_ROOM.traits
    assert (traits.next_state, traits.is_recovery, traits.is_failed_start) == (JobState.QUEUED, False, False)
    assert timedelta(0) < DWELL


def test_a_machine_that_counts_no_more_is_not_waited_for() -> None:
    """Its provider was away for so long that it is not among the machines in use: its end makes no room."""
    owner, item = running(1)
    over, old = running(2)
    until = NOW - 30 * 60 * MINUTE
    meter = replace(old.meter, since=until, until=until)
    old = replace(old, state=AttemptState.ENDING, ended_at=until, end_reason=EndReason.DONE, meter=meter)
    over = replace(over, state=JobState.SUCCEEDED, ended_at=until)
    plan = decided(world_of((owner, item), (over, old), waiting=(urgent(),), policy=shop_policy(machines_max=1)))
    assert stopped(plan) == ["j1"]


def test_no_machine_is_said_to_be_in_use_where_the_budget_allows_none() -> None:
    world = world_of(waiting=(urgent(),))
    world = replace(world, policy=replace(world.policy, machines_max=0))
    verdict = decided(world).verdicts[URGENT]
    assert verdict.kind is VerdictKind.MACHINES
    assert verdict.sentence.startswith("nothing is launched while [budget] machines is 0")
    assert "in use" not in verdict.sentence
