"""The rules that must hold after every commit, checked on the world alone.

Those that need the providers' side (every billed machine has an owner, liveness) are checked by the simulator and the
tests, against the providers' own ledgers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import JobId
from spotd.core.domain.intents import IntentKind, launch_intent_id
from spotd.core.domain.keys import key_parts
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd_providers.contract.values import AttemptKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that does not hold, and the one job that breaks it."""

    job: JobId
    sentence: str


def broken_rules(world: World) -> tuple[BrokenRule, ...]:
    """Return the broken rules, each with its job; empty when all hold."""
    counting = Counter(a.id.job for a in world.attempts.values() if a.state.counts)
    doubled = [
        BrokenRule(job=job, sentence=f"job {job} has {n} attempts that count")
        for job, n in sorted(counting.items())
        if n > 1
    ]
    ended = {t.key for t in world.intents.values() if t.kind is IntentKind.TERMINATE}
    others = [
        BrokenRule(job=identity.job, sentence=f"attempt {identity.number} of job {identity.job} {problem}")
        for identity, problem in sorted(
            ((i, problem) for i, item in world.attempts.items() for problem in _problems(world, item, ended)),
            key=lambda found: (found[0].job, found[0].number),
        )
    ]
    return (*doubled, *others)


def _problems(world: World, item: Attempt, ended: set[AttemptKey]) -> Iterator[str]:
    job = world.jobs.get(item.id.job)
    if job is None:
        yield "has no job"
        return
    if item.state is AttemptState.ENDING and item.ref is not None and item.key not in ended:
        yield "is over but no order ends its machine"
    if job.attempts_made < item.id.number:
        yield "is not counted by its job"
    if job.state.is_final and item.state.counts:
        yield f"counts although its job is {job.state}"
    if item.end_reason is EndReason.QUARANTINED:
        return  # it is ended because one of the others did not hold
    parts = key_parts(world.policy.install, item.key)
    if parts is None or (parts.job, parts.number) != (item.id.job, item.id.number):
        yield f"carries the key {item.key}"
    if item.quote.price.per_gpu > item.ceiling:
        yield "was agreed above its ceiling"
    if item.state is AttemptState.INTENDED and item.ref is None and launch_intent_id(item.key) not in world.intents:
        yield "is intended without an open intent"
