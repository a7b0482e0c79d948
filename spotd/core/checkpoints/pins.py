"""What a user does with the checkpoints of a job: name one, pin it, remove it, begin another job from it.

A name alone means the newest checkpoint of that name, since a later attempt may write a name again; `NAME@ATTEMPT`
means that attempt's. `newest` and `best` mean what they say, unless a checkpoint is called so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.core.checkpoints.retention import best_of
from spotd.core.domain.checkpoints import OF_ANOTHER_JOB, Checkpoint
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder

NEWEST: Final = "newest"
BEST: Final = "best"


def find_checkpoint(job: Job, checkpoints: Sequence[Checkpoint], text: str) -> Checkpoint | None:
    """Return the one of these, newest first, that the text means."""
    name, sign, attempt = text.rpartition("@")
    for one in checkpoints:
        if text == one.name or (sign and name == one.name and attempt == str(one.attempt)):
            return one
    if text == NEWEST:
        return checkpoints[0] if checkpoints else None
    return best_of(job, checkpoints) if text == BEST else None


def borrowed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same content, as the list of another job names it."""
    return replace(checkpoint, attempt=OF_ANOTHER_JOB, pinned=False, proven_by=None, doubted_by=())


def pin(world: World, job: Job, chosen: Collection[Checkpoint], now: datetime, *, pinned: bool) -> Plan:
    """Keep these on the list until they are unpinned; or let nothing but the rules of the job keep them any more."""
    builder = PlanBuilder(world.with_job(job), now)
    changed = [c for c in chosen if c.pinned is not pinned]
    if not changed:
        return builder.plan()
    builder.put_job(
        replace(job, checkpoints=tuple(replace(c, pinned=pinned) if c in changed else c for c in job.checkpoints))
    )
    for one in changed:
        kind, words = (
            ("checkpoint.pinned", "is pinned") if pinned else ("checkpoint.unpinned", "is not pinned any more")
        )
        builder.event(kind, f"checkpoint {one.name} {words}", job=job.id, name=one.name, of_attempt=one.attempt)
    return builder.plan()


def remove(world: World, job: Job, chosen: Collection[Checkpoint], now: datetime) -> Plan:
    """Take these off the list: the job never resumes from them, and what only they need is deleted soon."""
    builder = PlanBuilder(world.with_job(job), now)
    builder.put_job(replace(job, checkpoints=tuple(c for c in job.checkpoints if c not in chosen)))
    for one in chosen:
        builder.event(
            "checkpoint.removed",
            f"checkpoint {one.name} was removed by the job's owner",
            job=job.id,
            name=one.name,
            step=one.step,
            bytes=one.bytes,
            of_attempt=one.attempt,
        )
    return builder.plan()


def damaged(world: World, job: Job, checkpoint: Checkpoint, problem: str, now: datetime) -> Plan:
    """Record in the job's history that a checkpoint was found damaged."""
    builder = PlanBuilder(world.with_job(job), now)
    builder.event(
        "checkpoint.damaged",
        f"checkpoint {checkpoint.name} is damaged in the store: {problem}",
        job=job.id,
        name=checkpoint.name,
        of_attempt=checkpoint.attempt,
    )
    return builder.plan()
