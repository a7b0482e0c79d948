"""What users ask for, as plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spotd.core.author import order_stop
from spotd.core.budgets import committed
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.domain.market import resolve_gpu
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason, InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.core.metering import spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import dollar_words, limit_words, per_gpu_words
from spotd.core.ranking.candidates import ceiling_for
from spotd.core.todays_terms import at_todays_ceiling
from spotd_jobs.spec.model import JobSpec, PriceLimit
from spotd_providers.contract.values import MicroUsd


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
        f"the job's budget was changed from {before} to {dollar_words(amount)}",
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
            "job.ceiling", f"the job's ceiling was changed from {before} to {after}", job=job.id, ceiling=after
        )
        if job.id in counting:
            _set_ceiling(builder, counting[job.id], limit)
    return builder.plan()


def _set_ceiling(builder: PlanBuilder, item: Attempt, limit: PriceLimit | None) -> None:
    offer = item.quote.offer
    ceiling = ceiling_for(offer.gpu, offer.gpu_count, limit, builder.policy)
    builder.put_attempt(at_todays_ceiling(item, ceiling, builder.now))


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
            mute_starts=None,
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
    builder.move_job(job.id, JobState.QUEUED, f"queued again{although}", kind="job.retried")
    return builder.plan()


# What agents and users may queue: within figures that a person set, and agents for no higher price than one accepts.
#
# The job of an agent, or of a user who may only submit, has a budget always. All that one of them has queued counts
# against a day: the whole budget of each job that has not ended, since a machine may spend it today, or what it has
# cost with what is set aside where that is more, as where its budget was lowered or a bill was higher; and what those
# have cost that ended today, with what is set aside for their machines whose end is not proved.


AGENT: Final = "agent"
"""What `Job.submitted_by` says of an agent's job."""
JOBS_MAX: Final = 100
"""More jobs of agents than this may not wait or run: a tiny budget bounds no number."""
USER_JOBS_MAX: Final = 1_000
"""The same for one user."""
ALLOW_HINT: Final = "a person sets job_budget and day_budget in [mcp] of the config, and sends SIGHUP or restarts spotd"


def within_limits(spec: JobSpec, policy: Policy) -> JobSpec | str:
    """Return the job with the budget that it may have, or why an agent may not queue it."""
    most = policy.agent_job_budget
    if most is None or policy.agent_day_budget is None:
        return "agents may not queue jobs here: [mcp] job_budget and day_budget are not both set"
    if spec.job_budget is not None and spec.job_budget > most:
        asked = dollar_words(MicroUsd(spec.job_budget))
        return f"a budget of {asked} is more than the {dollar_words(most)} that [mcp] job_budget allows an agent's job"
    if spec.secrets:
        return "an agent's job takes no secrets"
    if spec.priority > 0 or spec.schedule.preempt:
        return "an agent's job neither goes before other jobs (priority above 0) nor stops them (preempt)"
    return _price_problem(spec, policy) or replace(spec, job_budget=spec.job_budget or most)


def _price_problem(spec: JobSpec, policy: Policy) -> str:
    """Return why its ceiling is none that a person accepts: that of the config is the highest."""
    if spec.price is None:
        return ""
    if not spec.resources.gpu:
        return "an agent's job that names no GPU takes the ceilings of the config: leave max_price out"
    # By canonical names, as offers have them: a spelling of its own would leave the GPU under the default ceiling.
    meant = sorted({(name, one.count) for one in spec.resources.gpu for name in resolve_gpu(one.name)})
    for name, count in meant:
        wanted = ceiling_for(name, count, spec.price, policy)
        known = ceiling_for(name, count, None, policy)
        if known is None:
            return f"a person must set a ceiling for {name} in [ceilings] before an agent may rent one"
        if wanted is not None and wanted > known:
            return f"{per_gpu_words(wanted)} is above the {per_gpu_words(known)} that [ceilings] accepts for {name}"
    return ""


def submitter_problem(spec: JobSpec) -> str:
    """Return why a user who may submit only may not queue this job; empty where that is allowed."""
    if spec.priority > 0 or spec.schedule.preempt:
        return "only a user who may operate puts a job before others (priority above 0) or stops them (preempt)"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayLimit:
    """What all jobs of one author may hold together in a day.

    Attributes:
        author: what `Job.submitted_by` says of them.
        key: of the config, for messages.
    """

    author: str
    limit: MicroUsd
    jobs_max: int
    key: str

    def problem(self, jobs: Sequence[Job], world: World, ended_today: MicroUsd, now: datetime) -> str:
        """Return why these jobs, which are new or to be changed, hold too much; empty where they do not.

        Args:
            ended_today: what is booked for others of the author that ended today.
        """
        who, verb = ("agents", "have") if self.author == AGENT else (self.author, "has")
        mine = {job.id for job in jobs}
        own = [j for j in world.jobs.values() if j.submitted_by == self.author]
        live, over = [j for j in own if not j.state.is_final], [j for j in own if j.state.is_final and j.id not in mine]
        others = [job for job in live if job.id not in mine]
        if len(others) + len(jobs) > self.jobs_max:
            return f"{who} {verb} {len(live)} jobs that have not ended, and may have {self.jobs_max}"
        held = MicroUsd(
            ended_today
            + sum(_share_of(job, world, now) for job in others)
            + sum(_unproven_cost(job, world, now) for job in over)
        )
        wanted = MicroUsd(sum(_share_of(job, world, now) for job in jobs))
        if held + wanted <= self.limit:
            return ""
        whose = "agents' jobs" if self.author == AGENT else f"jobs of {who}"
        return (
            f"{dollar_words(wanted)} more is beyond {self.key}: of {dollar_words(self.limit)}, {whose} hold "
            f"{dollar_words(held)} already"
        )


def _share_of(job: Job, world: World, now: datetime) -> MicroUsd:
    return MicroUsd(max(job.budget or 0, job.spent + _unproven_cost(job, world, now)))


def _unproven_cost(job: Job, world: World, now: datetime) -> MicroUsd:
    """Return what machines of the job cost and may cost: booked, of a job that is over, once their end is proved."""
    items = world.attempts_of(job.id)
    return MicroUsd(sum(spent(item, now) + committed(world, item, now) for item in items))


def agents_day(policy: Policy) -> DayLimit:
    """Return what all jobs of agents may hold together in a day."""
    limit = policy.agent_day_budget or MicroUsd(0)
    return DayLimit(author=AGENT, limit=limit, jobs_max=JOBS_MAX, key="[mcp] day_budget")


def users_day(name: str, limit: MicroUsd) -> DayLimit:
    """Return what all jobs of a user may hold together in a day."""
    return DayLimit(author=name, limit=limit, jobs_max=USER_JOBS_MAX, key=f"[users.{name}] budget_per_day")
