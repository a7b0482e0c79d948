"""Keeps what cannot be judged from everything else.

Theory. The daemon must go on whatever one row, one host or one plugin holds: a daemon that ends leaves every machine
alone, and one that ends at each start never ends any. So each attempt, each job and each listing is judged in a step
of its own (`PlanBuilder.attempted`). What raises leaves nothing behind, and its job is quarantined: its machine is
ended, the job has FAILED with the cause as its reason, and its owner decides. A provider's listing or offers that
cannot be read cost that reading and nothing else, since no job is to blame for them.

A quarantine asks nothing of the values that made it necessary, and it forgets no machine: what may exist under the
attempt's key is ended, or searched for, until the provider says that it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from spotd.core.budgets import committed
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan, applied, broken_rules, combine
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.metering import accrued, machines_of
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import MicroUsd

QUARANTINE_MARK: Final = "quarantined: "
"""How the reason of a quarantined job begins; `doctor` finds them by it."""
WORDS_MAX: Final = 500


def in_words(error: Exception) -> str:
    """Return the exception as a part of a sentence."""
    return f"{type(error).__name__}: {error}"[:WORDS_MAX]


def contain(builder: PlanBuilder, job: JobId, step: Callable[[], None], what: str) -> bool:
    """Whether the step ended well; if not, nothing of it remains and the job is quarantined."""
    error = builder.attempted(step)
    if error is not None:
        quarantine(builder, job, f"{what} ({in_words(error)})")
    return error is None


def quarantine(builder: PlanBuilder, job_id: JobId, why: str) -> None:
    """Owe the end of the job's machines, and fail the job for this reason."""
    builder.note_contained(f"job {job_id}", why)
    numbers = [0]
    for item in builder.attempts():
        if item.id.job == job_id:
            numbers.append(item.id.number)
            _end(builder, item, why)
    job = builder.find_job(job_id)
    if job is None:
        return
    job = replace(job, attempts_made=max(job.attempts_made, *numbers))
    builder.put_job(job if job.state.is_final else _failure_of(builder, job, why))
    builder.event("job.quarantined", f"spotd could not go on with this job safely: {why}", job=job_id)


def _failure_of(builder: PlanBuilder, job: Job, why: str) -> Job:
    reason = f"{QUARANTINE_MARK}{why}; spotctl retry {job.name} tries again, and please report it with the log"
    return replace(job, state=JobState.FAILED, reason=reason, state_since=builder.now, ended_at=builder.now)


def _end(builder: PlanBuilder, item: Attempt, why: str) -> None:
    if item.state.counts:
        state = AttemptState.ENDED if item.machine is MachineState.GONE else AttemptState.ENDING
        reason = EndReason.QUARANTINED
        builder.put_attempt(replace(item, state=state, ended_at=builder.now, end_reason=reason, end_detail=why))
        builder.event("attempt.quarantined", reason.sentence(why), attempt=item.id, reason=reason.value)
    if item.machine is not MachineState.GONE:
        builder.owe_end(item, f"its attempt is quarantined: {why}")


def guarded(think: Callable[[World], Plan], world: World, now: datetime) -> Plan:
    """Return the plan for everything that can be judged; what makes the judgement itself raise is quarantined.

    The steps inside catch nearly all. This is for what is added up over the whole world: if that raises, each job is
    tried alone, and the others go on without those that raise.
    """
    try:
        return think(world)
    except Exception as exc:  # noqa: BLE001 - one job's values must not end the judgement of all
        whole = in_words(exc)
    failures = _failures(think, world)
    builder = PlanBuilder(world, now)
    for job, why in failures.items():
        quarantine(builder, job, why)
    if not failures:
        builder.note_contained("the judgement of all jobs", whole)
        return builder.plan()
    try:
        return combine(builder.plan(), think(_with_their_costs(without(world, failures), world, failures, now)))
    except Exception as exc:  # noqa: BLE001 - as above; the quarantine at least is written
        builder.note_contained("the judgement of all other jobs", in_words(exc))
        return builder.plan()


def _failures(think: Callable[[World], Plan], world: World) -> dict[JobId, str]:
    """Jobs that raise although they are alone in the world."""
    found: dict[JobId, str] = {}
    for job in world.jobs:
        try:
            think(without(world, world.jobs.keys() - {job}))
        except Exception as exc:  # noqa: BLE001 - this is the question
            found[job] = in_words(exc)
    return found


def without(world: World, jobs: Mapping[JobId, object] | frozenset[JobId] | set[JobId]) -> World:
    """Return the world as if these jobs and their attempts were none of it."""
    return replace(
        world,
        jobs={i: job for i, job in world.jobs.items() if i not in jobs},
        attempts={i: item for i, item in world.attempts.items() if i.job not in jobs},
        intents={i: t for i, t in world.intents.items() if t.attempt is None or t.attempt.job not in jobs},
    )


def _with_their_costs(rest: World, world: World, jobs: Mapping[JobId, object], now: datetime) -> World:
    """Return the rest, which may use neither the money nor the machines that the jobs left out of it still take."""
    mine = [item for item in world.attempts.values() if item.id.job in jobs and item.machine is not MachineState.GONE]
    today = now.astimezone(UTC).date()
    by_day = dict(rest.spent_by_day)
    for item in mine:
        by_day[today] = MicroUsd(by_day.get(today, 0) + _costs(world, item, now))
    policy = replace(rest.policy, machines_max=max(0, rest.policy.machines_max - machines_of(mine)))
    return replace(rest, policy=policy, spent_by_day=by_day)


def _costs(world: World, item: Attempt, now: datetime) -> int:
    """Return what is not booked of this machine yet and is set aside for it, as far as its values allow."""
    try:
        return max(0, accrued(item.meter, now)) + max(0, committed(world, item, now))
    except Exception:  # noqa: BLE001 - its values are what is at fault
        return 0


def sealing(world: World, now: datetime) -> Plan:
    """Rows that cannot be understood are over, the jobs they belong to have failed, and their machines are ended."""
    builder = PlanBuilder(world, now)
    for row in world.unreadable:
        what = "its row" if row.attempt is None else f"the row of attempt {row.attempt}"
        why = f"{what} in the state cannot be understood ({row.error})"
        if row.ref is not None and row.key is not None:
            builder.owe_termination(row.ref, row.key, None, why=f"its attempt is quarantined: {why}")
        if row.job in world.jobs:
            quarantine(builder, row.job, why)
        else:
            builder.note_contained(f"job {row.job}", why)
            builder.event("job.quarantined", f"spotd could not go on with this job safely: {why}", job=row.job)
    return replace(builder.plan(), sealed=world.unreadable)


def sound(world: World, plan: Plan, now: datetime) -> tuple[Plan, World]:
    """Return the plan without what breaks a rule, and the world after it: what it would break is quarantined."""
    after = applied(world, plan)
    broken = broken_rules(after)
    if not broken:
        return plan, after
    why: dict[JobId, str] = {}
    for one in broken:
        why[one.job] = f"{why[one.job]}; {one.sentence}" if one.job in why else one.sentence
    plan = set_aside(world, plan, why, now)
    return plan, applied(world, plan)


def set_aside(world: World, plan: Plan, why: Mapping[JobId, str], now: datetime) -> Plan:
    """Return the plan without its parts for these jobs, which are quarantined as they stand in the world."""
    rest = _part(plan, lambda job: job not in why)
    builder = PlanBuilder(applied(world, rest), now)
    for job, cause in why.items():
        quarantine(builder, job, cause[:WORDS_MAX])
    return combine(rest, builder.plan())


def parts(plan: Plan) -> dict[JobId, Plan]:
    """Return what of the plan is of each job."""
    jobs = {
        *plan.jobs,
        *(i.job for i in plan.attempts),
        *(t.attempt.job for t in plan.intents.values() if t.attempt is not None),
        *(charge.attempt.job for charge in plan.charges),
    }
    return {job: _part(plan, lambda one, job=job: one == job) for job in sorted(jobs)}  # type: ignore[misc]  # mypy cannot infer a lambda with a default


def _part(plan: Plan, wanted: Callable[[JobId | None], bool]) -> Plan:
    return replace(
        plan,
        jobs={i: job for i, job in plan.jobs.items() if wanted(i)},
        attempts={i: item for i, item in plan.attempts.items() if wanted(i.job)},
        intents={i: t for i, t in plan.intents.items() if wanted(None if t.attempt is None else t.attempt.job)},
        cooldowns=plan.cooldowns if wanted(None) else (),
        experience=plan.experience if wanted(None) else {},
        charges=tuple(c for c in plan.charges if wanted(c.attempt.job)),
        events=tuple(e for e in plan.events if wanted(e.job)),
    )
