"""Plans joined, and the world once a plan is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.records import with_records
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import PastJob, World, awaited, past_job
from spotd.core.plans.plan import Plan
from spotd_providers.contract.money import MicroUsd


def combine(first: Plan, second: Plan) -> Plan:
    """One plan that does both, the second on top of the first."""
    wakes = [wake for wake in (first.wake_at, second.wake_at) if wake is not None]
    return Plan(
        jobs={**first.jobs, **second.jobs},
        attempts={**first.attempts, **second.attempts},
        intents={**first.intents, **second.intents},
        cooldowns=first.cooldowns + second.cooldowns,
        experience={**first.experience, **second.experience},
        charges=first.charges + second.charges,
        events=first.events + second.events,
        verdicts={**first.verdicts, **second.verdicts},
        wake_at=min(wakes, default=None),
        list_again=first.list_again | second.list_again,
        full_reads=first.full_reads | second.full_reads,
        shared_silence=first.shared_silence + second.shared_silence,
        sealed=first.sealed + second.sealed,
        contained=first.contained + second.contained,
    )


def applied(world: World, plan: Plan) -> World:
    """Return the world after the plan's commit, as a fresh load would show it."""
    if plan.is_empty:
        return world
    merged = {**world.attempts, **plan.attempts}
    attempts = {i: a for i, a in merged.items() if a.state is not AttemptState.ENDED}
    with_attempts = {i.job for i in attempts}
    by_day = dict(world.spent_by_day)
    for charge in plan.charges:
        by_day[charge.day] = MicroUsd(by_day.get(charge.day, 0) + charge.amount)
    merged_jobs = {**world.jobs, **plan.jobs}
    jobs = {i: j for i, j in merged_jobs.items() if not j.state.is_final or i in with_attempts}
    return replace(
        world,
        jobs=jobs,
        attempts=attempts,
        intents={i: t for i, t in {**world.intents, **plan.intents}.items() if t.is_open},
        cooldowns=world.cooldowns + plan.cooldowns,
        experience=with_records(world.experience, plan.experience),
        spent_by_day=by_day,
        unreadable=tuple(row for row in world.unreadable if row not in plan.sealed),
        past=_past(world, plan, jobs),
    )


def _past(world: World, plan: Plan, jobs: Mapping[JobId, Job]) -> dict[JobId, PastJob]:
    over = {**world.past, **{i: past_job(job) for i, job in plan.jobs.items() if job.state.is_final}}
    return {i: over[i] for i in awaited(jobs.values()) if i in over and i not in jobs}
