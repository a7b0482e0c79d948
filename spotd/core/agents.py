"""What agents may queue: within figures that a person set, for no higher price than a person accepts.

An agent's job has a budget always. All that agents have queued counts against their day: the whole budget of each job
that has not ended, since a machine may spend it today, or what it has cost where that is more, as where its budget was
lowered or a bill was higher; and what those have cost that ended today.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.core.domain.gpu_names import resolve_gpu
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.metering.metering import job_spent
from spotd.core.pricing.words import dollar_words, per_gpu_words
from spotd.core.ranking.ceilings import ceiling_for
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.money import MicroUsd

AGENT: Final = "agent"
"""What `Job.submitted_by` says of an agent's job."""
JOBS_MAX: Final = 100
"""More jobs of agents than this may not wait or run: a tiny budget bounds no number."""
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


def day_problem(jobs: Sequence[Job], world: World, ended_today: MicroUsd, now: datetime) -> str:
    """Return why these jobs of an agent are too many for a day; empty where they are not."""
    live = [job for job in world.jobs.values() if job.submitted_by == AGENT and not job.state.is_final]
    if len(live) + len(jobs) > JOBS_MAX:
        return f"agents have {len(live)} jobs that have not ended, and may have {JOBS_MAX}"
    limit = world.policy.agent_day_budget or MicroUsd(0)
    held = MicroUsd(ended_today + sum(max(job.budget or 0, job_spent(world, job, now)) for job in live))
    wanted = MicroUsd(sum(job.budget or 0 for job in jobs))
    if held + wanted <= limit:
        return ""
    return (
        f"{dollar_words(wanted)} more is beyond [mcp] day_budget: of {dollar_words(limit)}, agents' jobs hold "
        f"{dollar_words(held)} already"
    )
