"""What users ask for, as plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.domain.states import EndReason, InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import dollar_words, limit_words
from spotd.core.ranking.ceilings import ceiling_for
from spotd.core.running.author import order_stop
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.money import MicroUsd


def submit(world: World, job: Job, now: datetime) -> Plan:
    """Queue the job."""
    return submit_all(world, [job], now)


def submit_all(world: World, jobs: Iterable[Job], now: datetime) -> Plan:
    """Queue all of these jobs, or none."""
    builder = PlanBuilder(world, now)
    for job in jobs:
        if job.id in world.jobs:
            raise InvariantBroken(f"job id {job.id} is taken")
        builder.put_job(job)
        begins = f", to begin from checkpoint {job.checkpoints[0].name} of another job" if job.checkpoints else ""
        builder.event("job.submitted", f"{job.name} is queued{begins}", job=job.id, name=job.name)
    return builder.plan()


def cancel(world: World, job_id: JobId, now: datetime) -> Plan:
    """End the job as soon as its machine has saved; at once where it has none. A final job stays as it is."""
    return cancel_all(world, [job_id], now)


def cancel_all(world: World, job_ids: Iterable[JobId], now: datetime) -> Plan:
    """Do the same for each of these jobs."""
    builder = PlanBuilder(world, now)
    counting = {item.id.job: item for item in world.attempts.values() if item.state.counts}
    for job_id in job_ids:
        _cancel(builder, builder.job(job_id), counting.get(job_id))
    return builder.plan()


def _cancel(builder: PlanBuilder, job: Job, counting: Attempt | None) -> None:
    if job.state.is_final or job.cancel_requested:
        return
    builder.put_job(replace(job, cancel_requested=True))
    if counting is None:
        builder.move_job(job.id, JobState.CANCELLED, EndReason.CANCELLED.traits.sentence)
        return
    builder.move_job(job.id, JobState.CANCELLING, "cancelled: the machine saves and stops")
    order_stop(builder, counting, EndReason.CANCELLED, "")


def set_budget(world: World, job: Job, amount: MicroUsd, now: datetime) -> Plan:
    """Let all attempts of the job together cost so much from now on; it may be over, and wait for a retry."""
    builder = PlanBuilder(world.with_job(job), now)
    if job.budget == amount:
        return builder.plan()
    before = "no limit" if job.budget is None else dollar_words(job.budget)
    builder.put_job(replace(job, budget_set=amount))
    builder.event(
        "job.budget",
        f"its owner changed the job's budget from {before} to {dollar_words(amount)}",
        job=job.id,
        budget_microusd=amount,
    )
    return builder.plan()


def set_ceiling(world: World, jobs: Iterable[Job], limit: PriceLimit | None, now: datetime) -> Plan:
    """Let each machine of these jobs cost no more than this from now on; `None` is what the config says.

    A machine that costs more than the new ceiling is judged as one whose price rose above it.
    """
    builder = PlanBuilder(world, now)
    counting = {item.id.job: item for item in world.attempts.values() if item.state.counts}
    for job in jobs:
        if job.spec.price == limit:
            continue
        before, after = limit_words(job.spec.price), limit_words(limit)
        builder.put_job(replace(job, spec=replace(job.spec, price=limit)))
        builder.event(
            "job.ceiling", f"its owner changed the job's ceiling from {before} to {after}", job=job.id, ceiling=after
        )
        if job.id in counting:
            _set_ceiling(builder, counting[job.id], limit)
    return builder.plan()


def _set_ceiling(builder: PlanBuilder, item: Attempt, limit: PriceLimit | None) -> None:
    offer = item.quote.offer
    ceiling = ceiling_for(offer.gpu, offer.gpu_count, limit, builder.policy)
    if ceiling is None:
        return  # no other machine is bought without one, and this one keeps what was agreed
    changed = replace(item, ceiling=max(item.ceiling, ceiling), ceiling_set=ceiling)
    if ceiling < item.ceiling_now and item.over_ceiling_at is None:
        changed = replace(changed, over_ceiling_at=builder.now)  # the next listing takes it back where that is not so
    builder.put_attempt(changed)


def retry(world: World, job: Job, now: datetime) -> Plan:
    """Queue a final job again, with its checkpoints, its spending and a fresh count of errors."""
    if not job.state.is_final:
        raise InvariantBroken(f"job {job.id} is {job.state}, only a final job can be retried")
    builder = PlanBuilder(world.with_job(job), now)
    builder.put_job(
        replace(
            job,
            errors=0,
            image_errors=0,
            idle_launches=0,
            failed_starts=0,
            stalls=0,
            not_before=None,
            cancel_requested=False,
            ended_at=None,
            exit_code=None,
            pacing=Pacing(counted_from=now, ran_before=job.totals.ran, losses=job.recoveries),
            chain=None if job.chain is None else replace(job.chain, inputs=None),
        )
    )
    although = ", although it had succeeded" if job.state is JobState.SUCCEEDED else ""
    builder.move_job(job.id, JobState.QUEUED, f"queued again by its owner{although}", kind="job.retried")
    return builder.plan()
