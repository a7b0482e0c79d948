"""Which checkpoints of a job are kept, decided on the world alone.

Theory. The list of a job's accepted checkpoints is what may be restored, and the only promise about what the store
still holds: objects are deleted only after they were taken off the list, durably, and only if nothing on the list needs
them. An attempt may restore what the list held before it was intended, and then refers to chunks of that checkpoint
for as long as its machine exists. What it may have been offered therefore stays on the list until it has ended:
the newest few of the attempts before it, which no later event can change, since only one attempt counts at a time.

Beside the newest, the list keeps what its owner pinned, where the job names a metric the checkpoint that is best by it,
and of earlier attempts what no later one has made needless (`spotd.core.domain.lineage`). All of it follows from the
list itself, so that every rule here stays a function of the job and its open attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.core.domain import lineage
from spotd.core.domain.checkpoints import Checkpoint, FallbackRestore
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_jobs.spec.model import MetricBest

FALLBACKS: Final = lineage.CHOICES
DROPPED_SAID_MAX: Final = 10
"""More than so many that go at once are reported in one line."""
REMEMBERED: Final = 50
"""How many checkpoints one attempt can have on the list: how many a host publishes is its own choice."""


def offered(job: Job) -> tuple[Checkpoint, ...]:
    """Return what a grant that is written now may offer, first choice first."""
    order = lineage.restore_order(job.checkpoints, lineage.doubts_allowed(job))
    return tuple(order[: _depth(job)])


def with_fresh(job: Job, attempt: int, fresh: Collection[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the list with what this attempt, the newest, has published since, oldest of the fresh ones first."""
    own = [c for c in job.checkpoints if c.attempt == attempt]
    others = [c for c in job.checkpoints if c.attempt != attempt]
    newest = [*reversed([*fresh]), *own]
    bound = max(REMEMBERED, job.spec.checkpoint.keep)
    best = best_of(job, (*newest, *others))
    return (*newest[:bound], *(c for c in newest[bound:] if c.pinned or c == best), *others)


def kept(job: Job, open_attempts: Collection[int]) -> tuple[Checkpoint, ...]:
    """Return what stays on the list while these attempts of the job have not ended."""
    best = best_of(job, job.checkpoints)
    newest = job.checkpoints[: job.spec.checkpoint.keep]
    chosen = {*newest, *in_reach(job, open_attempts), *lineage.earlier_kept(job.checkpoints)}
    return tuple(c for c in job.checkpoints if c in chosen or c.pinned or c == best)


def in_reach(job: Job, open_attempts: Collection[int]) -> frozenset[Checkpoint]:
    """Return what a machine of one of these attempts may read: not even its owner may take it away."""
    depth = _depth(job)
    reach = set(job.checkpoints[:depth] if open_attempts else ())
    # How many doubts were allowed when a grant was written is not known any more: it was one of these.
    for allowed in (1, lineage.DOUBTS):
        for number in open_attempts:
            order = lineage.restore_order(job.checkpoints, allowed, before=number)
            reach.update(order[:depth])
        if open_attempts:
            reach.update(lineage.restore_order(job.checkpoints, allowed)[:depth])
    return frozenset(reach)


def best_of(job: Job, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the one with the best value of the job's metric, the newest of several; `None` where none has one."""
    rules = job.spec.checkpoint
    measured = [] if rules.metric is None else [(c.metric, c) for c in checkpoints if c.metric is not None]
    if not measured:
        return None
    pick = min if rules.best is MetricBest.LOWEST else max
    return pick(measured, key=lambda pair: pair[0])[1]


def trim(world: World, others: Iterable[Job], now: datetime) -> Plan:
    """No job's list holds more than is kept.

    Args:
        others: jobs that are over and may no longer be part of the world; one that is, is taken from there.
    """
    jobs = {job.id: job for job in others} | dict(world.jobs)
    builder = PlanBuilder(replace(world, jobs=jobs), now)
    for job in jobs.values():
        stay = kept(job, open_numbers(world, job))
        if len(stay) == len(job.checkpoints):
            continue
        builder.put_job(replace(job, checkpoints=stay))
        dropped = [checkpoint for checkpoint in job.checkpoints if checkpoint not in stay]
        if len(dropped) > DROPPED_SAID_MAX:
            builder.event(
                "checkpoint.dropped",
                f"deleted {len(dropped)} old checkpoints (keeping {len(stay)})",
                job=job.id,
                count=len(dropped),
                bytes=sum(checkpoint.bytes for checkpoint in dropped),
            )
            continue
        for checkpoint in dropped:
            builder.event(
                "checkpoint.dropped",
                f"deleted old checkpoint {checkpoint.name} (keeping {len(stay)})",
                job=job.id,
                name=checkpoint.name,
                step=checkpoint.step,
                bytes=checkpoint.bytes,
                of_attempt=checkpoint.attempt,
            )
    return builder.plan()


def note_fallbacks(builder: PlanBuilder, attempt: AttemptId, fallbacks: Iterable[FallbackRestore]) -> None:
    """Record in the job's history, and by it in the receipt, what could not be resumed from, and why."""
    for one in fallbacks:
        after = "starting afresh" if one.next is None else f"falling back to {one.next}"
        builder.event(
            "checkpoint.fallback",
            f"checkpoint {one.name} could not be restored ({one.reason}): {after}",
            attempt=attempt,
            name=one.name,
            reason=one.reason,
            next=one.next,
        )


def passed_over(world: World, attempt: AttemptId, fallbacks: Iterable[FallbackRestore], now: datetime) -> Plan:
    """Record what could not even be offered to the attempt's host."""
    builder = PlanBuilder(world, now)
    note_fallbacks(builder, attempt, fallbacks)
    return builder.plan()


def open_numbers(world: World, job: Job) -> frozenset[int]:
    """Return the attempts of this job that have not ended, so that a machine of theirs may still read and write."""
    return frozenset(attempt.id.number for attempt in world.attempts_of(job.id))


def _depth(job: Job) -> int:
    return max(FALLBACKS, job.spec.checkpoint.keep)
