"""Everything that a decision is made from, but for the market."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.ids import AttemptId, IntentId, JobId
from spotd.core.domain.intents import Intent
from spotd.core.domain.jobs import Job, Outputs
from spotd.core.domain.policy import Policy
from spotd.core.domain.records import Experience
from spotd.core.domain.states import InvariantBroken, JobState
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import AttemptKey, InstanceRef


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRow:
    """A row of the state that holds a value nothing can be made of, with what of it can still be read.

    Attributes:
        attempt: the number of the attempt whose row it is, or whose job's row it is; `None` for the job's own row.
        ref: the machine, where the row names one.
    """

    job: JobId
    attempt: int | None
    error: str
    key: AttemptKey | None = None
    ref: InstanceRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """As much of a job that is over as others that wait for it have to know."""

    id: JobId
    name: str
    state: JobState
    reason: str
    outputs: Outputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything the core needs to decide.

    Attributes:
        jobs: those that are not final, and those with an attempt that has not ended.
        attempts: those that have not ended.
        intents: the open ones.
        spent_by_day: what is settled of this UTC month, over all jobs.
        unreadable: rows that are part of no other field, since they cannot be understood.
        past: jobs that are over and that others of the world wait for.
    """

    policy: Policy
    jobs: Mapping[JobId, Job]
    attempts: Mapping[AttemptId, Attempt]
    intents: Mapping[IntentId, Intent]
    cooldowns: tuple[Cooldown, ...] = ()
    experience: Experience = field(default_factory=dict)
    spent_by_day: Mapping[date, MicroUsd] = field(default_factory=dict)
    unreadable: tuple[UnreadableRow, ...] = ()
    past: Mapping[JobId, PastJob] = field(default_factory=dict)

    def with_job(self, job: Job) -> World:
        """Return the world with this job, which may be over and no part of it."""
        return replace(self, jobs={**self.jobs, job.id: job})

    def attempts_of(self, job: JobId) -> tuple[Attempt, ...]:
        return tuple(a for i, a in self.attempts.items() if i.job == job)

    def counting_attempt(self, job: JobId) -> Attempt | None:
        """Return the one attempt of the job whose machine may live and whose writing counts."""
        found = [a for a in self.attempts_of(job) if a.state.counts]
        if len(found) > 1:
            raise InvariantBroken(f"job {job} has {len(found)} attempts that count")
        return found[0] if found else None


def past_job(job: Job) -> PastJob:
    """Return what is to be known of a job that is over."""
    return PastJob(id=job.id, name=job.name, state=job.state, reason=job.reason, outputs=job.outputs)


def awaited(jobs: Iterable[Job]) -> set[JobId]:
    """Return which jobs these wait for."""
    return {
        before
        for job in jobs
        if job.chain is not None and job.chain.inputs is None and not job.state.is_final
        for before in job.chain.after
    }
