"""Which jobs a new one is to come after, by the names and ids that its owner wrote."""

from __future__ import annotations

from typing import Final

from spotd.api.errors import Invalid
from spotd.core.agents import AGENT
from spotd.core.domain.chain import Chain
from spotd.core.domain.ids import JobId
from spotd.core.domain.states import JobState
from spotd.store import JobView, Reads
from spotd_jobs.spec.problems import Problem

AFTER_MAX: Final = 1000
"""Jobs that one job comes after, the jobs of an array each counted."""
LINKS_MAX: Final = 200_000
"""The same of all jobs of one array together."""


def find_chain(
    reads: Reads, after: tuple[str, ...], names: tuple[str, ...], array_name: str = "", *, by_agent: bool = False
) -> Chain | None:
    """Return the jobs that new jobs of these names come after, `None` where they name none.

    They exist already, so no job can come after itself, through others or not.

    Args:
        by_agent: an agent submits them: it may not tie a job to one that a person queued.

    Raises:
        Invalid: one is unknown, or the job itself, or has ended without success, or there are too many.
    """
    found: dict[JobId, None] = {}
    problems: list[Problem] = []
    for position, ref in enumerate(after):
        views = _meant(reads, ref)
        problem = _refusal(ref, views, names, array_name) or (_of_a_person(ref, views) if by_agent else None)
        if problem is not None:
            problems.append(Problem(key=f"schedule.after[{position}]", message=problem[0], hint=problem[1]))
        found.update(dict.fromkeys(view.id for view in views))
    if len(found) > AFTER_MAX or len(found) * len(names) > LINKS_MAX:
        many = f"{len(found):,} jobs before each of {len(names):,}" if len(names) > 1 else f"{len(found):,} jobs"
        hint = f"at most {AFTER_MAX:,} for one job, and {LINKS_MAX:,} for an array; put a job between them"
        problems.append(Problem(key="schedule.after", message=f"names {many}", hint=hint))
    if problems:
        raise Invalid("the job cannot come after these", problems=tuple(problems))
    return Chain(after=tuple(found)) if found else None


def _meant(reads: Reads, ref: str) -> tuple[JobView, ...]:
    """Return the one job of this id or name, else the jobs of such an array; of several runs the unfinished, or newest.

    The beginning of an id is not enough: what comes first is written down for later.
    """
    views = [view for view in reads.jobs_meant_by(ref) if ref in {view.id, view.name}]
    exact = [view for view in views if view.id == ref] or [view for view in views if not view.state.is_final]
    if exact:
        return (exact[0],)
    array = reads.array_meant_by(ref)
    if array is not None and (not views or array.submitted_at >= views[0].submitted_at):
        return reads.array_jobs(array.id)
    return tuple(views[:1])


def _refusal(ref: str, views: tuple[JobView, ...], names: tuple[str, ...], array_name: str) -> tuple[str, str] | None:
    if not views and (ref in names or ref == array_name):
        return f'"{ref}" is the job itself', "a job comes after others only; leave it out"
    if not views:
        hint = "submit that one first: a job comes after jobs that exist, so no circle can arise; spotctl ls shows them"
        return f'there is no job "{ref}"', hint
    for view in views:
        if view.state.is_final and view.state is not JobState.SUCCEEDED:
            return (
                f'"{ref}" would never come: {view.name} ({view.id}) is {view.state.value}: {view.reason}',
                f"spotctl retry {view.id} queues it again; then submit this job",
            )
    return None


def _of_a_person(ref: str, views: tuple[JobView, ...]) -> tuple[str, str] | None:
    if all(view.submitted_by == AGENT for view in views):
        return None
    return (
        f'"{ref}" was queued by a person',
        "a job of an agent comes after jobs of agents only; a person may submit it",
    )
