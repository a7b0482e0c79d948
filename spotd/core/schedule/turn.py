"""Why it is not a job's turn yet, whatever machines cost."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from functools import cached_property
from typing import Final

from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.verdicts import VerdictKind
from spotd.core.domain.world import World
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.schedule.after import Predecessors
from spotd.core.schedule.opening import window_wait
from spotd_jobs.spec.model import PriceLimit

TurnWait = tuple[VerdictKind, str, datetime | None]
WAITS_FOR_ITS_TURN: Final = frozenset({VerdictKind.WINDOW, VerdictKind.AFTER, VerdictKind.ARRAY})
"""It wants no machine now, whether or not it had one."""


class Turns:
    """What jobs wait for apart from the market, in one decision.

    Theory. The jobs of an array differ in nothing that a decision depends on until they have had a machine. So once one
    of them waits, whatever for, those behind it would wait for the same: they wait for it, and ten thousand of them
    cost a decision and the history no more than one.
    """

    def __init__(self, builder: PlanBuilder, world: World) -> None:
        self._builder = builder
        self._world = world
        self._predecessors = Predecessors(world)
        self._first_waiting: dict[tuple[JobId, PriceLimit | None], tuple[str, str]] = {}
        """Of each array and each ceiling in it, the name of the first job that waits, and what for."""

    def with_inputs(self, job: Job) -> Job:
        """Return the job, which is changed once all others that it waits for have succeeded."""
        after = job if job.chain is None else self._predecessors.with_inputs(job)
        if after is not job:
            self._builder.put_job(after)
        return after

    def wait(self, job: Job) -> TurnWait | None:
        """Return why it is not this job's turn, and until when; `None` when it is."""
        if job.chain is not None and (words := self._predecessors.wait(job)):
            return VerdictKind.AFTER, words, None
        if job.array is not None and (words := self._array_wait(job)):
            return VerdictKind.ARRAY, words, None
        if not job.spec.schedule.windows:
            return None
        shut = window_wait(job, self._world.policy, self._builder.now)
        if shut is None:
            return None
        if shut[1] is not None:
            self._builder.wake(shut[1])
        return VerdictKind.WINDOW, *shut

    def _array_wait(self, job: Job) -> str:
        task = job.array
        if task is None:
            return ""
        if is_untried(job) and (first := self._first_waiting.get((task.id, job.spec.price))):
            return f"comes after {first[0]} of its array ({first[1]})"
        if task.at_once is None:
            return ""
        at_work = self._at_work[task.id]
        return (
            f"waits for its turn: {at_work} jobs of {task.name} run, the most at once"
            if at_work >= task.at_once
            else ""
        )

    @cached_property
    def _at_work(self) -> Counter[JobId]:
        """How many jobs of each array have a machine."""
        counting = (i.job for i, item in self._world.attempts.items() if item.state.counts)
        tasks = (self._world.jobs[job].array for job in counting)
        return Counter(task.id for task in tasks if task is not None)

    def note_wait(self, job: Job, sentence: str) -> None:
        """Let the jobs of its array that come later wait for this one."""
        if job.array is not None and is_untried(job):
            self._first_waiting.setdefault((job.array.id, job.spec.price), (job.name, sentence))

    def note_launch(self, job: Job) -> None:
        """Count a machine for the array of this job."""
        if job.array is not None:
            self._at_work[job.array.id] += 1


def is_untried(job: Job) -> bool:
    """Whether nothing distinguishes the job from another one of its array."""
    return job.attempts_made == 0 and job.budget_set is None
