"""Which deadlines are refused when a job is submitted or retried."""

from __future__ import annotations

from datetime import datetime

from spotd.api.errors import Invalid, StateConflict
from spotd.core.deadlines.due import due_words
from spotd.core.deadlines.feasible import infeasible
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.world import World
from spotd.core.pricing.words import age_words
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.problems import Problem

KEY = "schedule.deadline"


def require_future(spec: JobSpec, now: datetime) -> None:
    """Check that an instant by which the job is to be done has not passed.

    Raises:
        Invalid: it has.
    """
    deadline = spec.schedule.deadline
    if deadline is None or deadline.at is None or deadline.at > now:
        return
    passed = f"{due_words(deadline.at)} passed {age_words(now - deadline.at)} ago"
    problem = Problem(key=KEY, message=passed, hint='write a later instant, or a span from now: deadline = "36h"')
    raise Invalid("the deadline of the job has passed", problems=(problem,))


def require_feasible(job: Job, world: World, market: MarketSnapshot, now: datetime) -> None:
    """Check that nothing proves that the job cannot be done in time.

    Raises:
        Invalid: with the figures.
    """
    if job.spec.schedule.deadline is None and job.spec.schedule.max_duration is None:
        return
    catalogue = CandidateCatalogue(world, market, now)
    offers = catalogue.list_for(catalogue.key_of(job))
    while offers.at(len(offers.entries)) is not None:
        pass  # each call finds one more
    problem = infeasible(job, offers.entries, now)
    if problem is not None:
        row = Problem(key=problem.key, message=problem.why, hint=problem.hint)
        raise Invalid("the job cannot be done in time", problems=(row,))


def require_due_later(job: Job, now: datetime) -> None:
    """Check that a job which is to be tried again is not due at an instant that has passed.

    Raises:
        StateConflict: it is.
    """
    deadline = job.spec.schedule.deadline
    if deadline is None or deadline.at is None or deadline.at > now:
        return
    hint = f"submit it again with a later deadline and --resume-from {job.id}"
    raise StateConflict(f"{job.name} was due {due_words(deadline.at)}, which has passed", hint=hint)
