"""Waiting for other jobs, and what becomes of their outputs.

Theory. A job names others by ids that existed when it was submitted, so no chain can lead back to itself; where a state
says otherwise all the same, the jobs of the circle wait, and say so. A job waits until each of the others has
succeeded. One that ended otherwise ends nothing else: what follows it waits, which costs nothing, and goes on when it
was retried and succeeds. From then on the job has inputs of its own: exactly those outputs, by their hash, on each of
its machines, whatever becomes of the others later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final

from spotd.core.checkpoints.outputs import outputs_warning
from spotd.core.domain.chain import JobInput
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd.core.domain.world import PastJob, World

NAMED_MAX: Final = 3
"""How many of the jobs that are waited for a sentence names."""


class Predecessors:
    """The jobs that others wait for, as one decision sees them."""

    def __init__(self, world: World) -> None:
        self._world = world

    @cached_property
    def _circular(self) -> frozenset[JobId]:
        return circular(self._world.jobs)

    def _find(self, job: JobId) -> Job | PastJob | None:
        return self._world.jobs.get(job) or self._world.past.get(job)

    def wait(self, job: Job) -> str:
        """Return what the job waits for, in a sentence; empty where nothing keeps it."""
        if job.chain is None or job.chain.inputs is not None:
            return ""
        if job.id in self._circular:
            return f"waits for jobs that wait for it in turn, so none of them can begin: spotctl cancel {job.name}"
        missing = [before for before in job.chain.after if not _has_succeeded(self._find(before))]
        if missing:
            return self._waiting_words(job, missing)
        lacking = ((before, self._find(before)) for before in job.chain.after)
        for before, found in lacking:
            if found is not None and (problem := outputs_warning(found.outputs)):
                return f"waits for the outputs of {found.name} ({before}): {problem}; spotctl retry --anyway {before}"
        return ""

    def _waiting_words(self, job: Job, missing: list[JobId]) -> str:
        """Name what stands still first: the user has to do something about it."""
        found = [(before, self._find(before)) for before in missing]
        stuck = [(before, one) for before, one in found if one is None or one.state.is_final]
        for before, one in stuck[:1]:
            if one is None:
                return f"waits for {before}, of which the state holds nothing; spotctl cancel {job.name} ends the wait"
            way_out = f"spotctl retry {before} lets both go on, spotctl cancel {job.name} ends the wait"
            return f"waits for {one.name} ({before}), which is {one.state.value}: {one.reason}; {way_out}"
        named = [f"{one.name} ({before}), which is {one.state.value}" for before, one in found[:NAMED_MAX] if one]
        more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        return f"waits for {'; '.join(named)}{more}"

    def with_inputs(self, job: Job) -> Job:
        """Return the job with what the others left for it, once all of them have succeeded."""
        if job.chain is None or job.chain.inputs is not None or self.wait(job):
            return job
        found = [(before, self._find(before)) for before in job.chain.after]
        names = Counter(one.name for _, one in found if one is not None)
        inputs = tuple(
            JobInput(
                job=before,
                name=one.name if names[one.name] == 1 else f"{one.name}.{before}",
                attempt=one.outputs.attempt,
                sha256=one.outputs.sha256,
                bytes=one.outputs.bytes,
            )
            for before, one in found
            if one is not None and one.outputs is not None and one.outputs.sha256 is not None
        )
        return replace(job, chain=replace(job.chain, inputs=inputs))


def _has_succeeded(one: Job | PastJob | None) -> bool:
    return one is not None and one.state is JobState.SUCCEEDED


def circular(jobs: Mapping[JobId, Job]) -> frozenset[JobId]:
    """Return the jobs that wait for themselves, through others or not, and those that wait for one of these.

    Jobs that wait for none of the rest are taken away until nothing changes: what is left can never begin.
    """
    waiting = {
        job.id: {before for before in job.chain.after if _waits(jobs.get(before))}
        for job in jobs.values()
        if _waits(job) and job.chain is not None
    }
    followers: dict[JobId, list[JobId]] = {}
    for job, befores in waiting.items():
        for before in befores:
            followers.setdefault(before, []).append(job)
    free = [job for job, befores in waiting.items() if not befores]
    while free:
        begun = free.pop()
        del waiting[begun]
        for follower in followers.get(begun, ()):
            waiting[follower].discard(begun)
            if not waiting[follower]:
                free.append(follower)
    return frozenset(waiting)


def _waits(job: Job | None) -> bool:
    return job is not None and job.chain is not None and job.chain.inputs is None and not job.state.is_final


def readers(jobs: Iterable[Job], job: JobId) -> list[Job]:
    """Return the jobs that have not ended and read the outputs of this one."""
    return [
        one
        for one in jobs
        if not one.state.is_final and one.chain is not None and any(i.job == job for i in one.chain.inputs or ())
    ]
