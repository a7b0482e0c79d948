"""A state that is lost: jobs are rebuilt from what the checkpoint store keeps of them, their machines are taken back.

Theory. Every job has a *job record* in the store, where no host can write: the job as the state held it a moment ago.
It is there before the first machine of the job is bought. So a job that has a record and no row was lost with a state,
and two things are certain of it: what its owner asked for, and by its launch records which numbers were used. The
newest number may have a machine. It is taken in as `recovery` takes in a launch whose answer was lost: found by its
key, or given up after the provider's lists lack it; nothing else is launched for the job before that. What the job had
cost by its record is booked on one attempt that is over, on the day of the record, the latest that it can be of: so
the budgets of this day and month do not forget it. A job that had ended is taken back as that: nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from spotd.core import requests
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import Charge, JobId, Meter
from spotd.core.domain.jobs import Job, Moves, Pacing
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.metering import lease_and_save
from spotd.core.plan_builder import PlanBuilder
from spotd.core.recovery import Survey, Unknown, attempt_of, recover
from spotd_providers.contract.values import InstallId, as_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the store keeps it.

    Attributes:
        identity: of the install whose job it is; machines carry it in their keys.
        saved_at: by the clock of the daemon.
    """

    install: InstallId
    identity: str
    saved_at: datetime
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class LostJob:
    """What the store knows of a job that the state does not.

    Attributes:
        survey: numbers whose fate no record shows, and what they saved; `None` for a job that was over, or that never
            had a machine. The job of the record has the attempts before them.
        spent_on: an attempt that is over, and on which what the job has cost is booked.
    """

    record: JobRecord
    survey: Survey | None = None
    spent_on: Unknown | None = None


def content_of(job: Job) -> Job:
    """Return of a job what its record holds: all but what passes, or is found again by looking."""
    state = job.state if job.state.is_final else JobState.QUEUED
    pacing = Pacing(counted_from=job.pacing.counted_from, ran_before=job.pacing.ran_before, losses=job.pacing.losses)
    return replace(
        job,
        state=state,
        reason=job.reason if state.is_final else "",
        state_since=job.state_since if state.is_final else job.submitted_at,
        not_before=None,
        pacing=pacing,
        moves=Moves(count=job.moves.count),
    )


def must_be_stored_at_once(before: Job | None, after: Job) -> bool:
    """Whether a job that is rebuilt without this would do what its owner forbade, or lose track of a machine."""
    if before is None:
        return True
    return _orders(before) != _orders(after)


def _orders(job: Job) -> tuple[object, ...]:
    return job.state, job.spec, job.attempts_made, job.cancel_requested, job.budget_set, job.errors


def job_of(one: LostJob, policy: Policy, now: datetime) -> Job:
    """Return the job as it is queued again, or as it ended. No instant of it is later than now."""
    job = one.record.job
    # A machine of it may run, and no record says where: none other may compute before its lease is over.
    may_run = job.attempts_made > 0 and one.survey is None and not job.state.is_final
    return replace(
        job,
        reason=job.reason or "its state was lost, and it was rebuilt from its record in the store",
        submitted_at=min(job.submitted_at, now),
        state_since=min(job.state_since, now),
        started_at=None if job.started_at is None else min(job.started_at, now),
        ended_at=None if job.ended_at is None else min(job.ended_at, now),
        not_before=now + lease_and_save(job, policy) if may_run else None,
        cancel_requested=job.cancel_requested and job.state.is_final,
    )


def adopt(world: World, lost: Sequence[LostJob], known: Collection[JobId], now: datetime) -> Plan:
    """Take back every job that the state does not know, with its machine if it has one.

    Args:
        known: jobs of these that the state knows, those that are over too.
    """
    taken = [one for one in lost if one.record.job.id not in known and one.record.job.id not in world.jobs]
    builder = PlanBuilder(world, now)
    for one in taken:
        _rebuild(builder, one)
    plan = builder.plan()
    surveys = [one.survey for one in taken if one.survey is not None]
    plan = combine(plan, recover(applied(world, plan), surveys, now))
    cancelled = [
        one.record.job.id for one in taken if one.record.job.cancel_requested and not one.record.job.state.is_final
    ]
    return combine(plan, requests.cancel_all(applied(world, plan), cancelled, now)) if cancelled else plan


def _rebuild(builder: PlanBuilder, one: LostJob) -> None:
    job = job_of(one, builder.policy, builder.now)
    builder.put_job(job)
    ended = f"it had ended as {job.state}" if job.state.is_final else "it goes on"
    builder.event(
        "job.adopted",
        "the state was lost; the job is rebuilt from its record in the store of"
        f" {one.record.saved_at:%Y-%m-%d %H:%M} UTC, and {ended}",
        job=job.id,
        attempts_made=job.attempts_made,
        checkpoints=len(job.checkpoints),
    )
    _charge(builder, job, one)


def _charge(builder: PlanBuilder, job: Job, one: LostJob) -> None:
    """Charge what the job has cost by its record: budgets of days and months are made of charges, which are lost."""
    item = None if one.spent_on is None else attempt_of(builder.policy, job.id, one.spent_on)
    if item is None:
        return
    at = min(one.record.saved_at, builder.now).astimezone(UTC)
    if item.id.number <= job.attempts_made:
        builder.put_attempt(_over(item, job, at))
        builder.event(
            f"attempt.{EndReason.HOST_LOST.value}",
            f"it was over when the state was lost; what the job has cost until then, ${as_usd(job.spent):.4f}, is"
            " booked on it",
            attempt=item.id,
        )
    elif one.survey is None:
        return
    builder.add_charge(
        Charge(
            attempt=item.id,
            provider=item.provider,
            day=at.date(),
            start=at,
            end=at,
            amount=job.spent,
            on_demand=job.on_demand or None,
        )
    )


def _over(item: Attempt, job: Job, at: datetime) -> Attempt:
    return replace(
        item,
        state=AttemptState.ENDED,
        machine=MachineState.GONE,
        outcome_unknown=False,
        ended_at=at,
        end_reason=EndReason.HOST_LOST,
        end_detail="rebuilt from the store",
        meter=Meter(settled=job.spent),
        on_demand_settled=job.on_demand,
    )


def is_ours(record: JobRecord, policy: Policy) -> bool:
    """Whether the job was queued with this install, and not with another that has the same store, or the same label."""
    return record.install == policy.install and record.identity in {policy.identity, *policy.identities}
