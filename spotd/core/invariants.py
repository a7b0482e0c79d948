"""The rules that must hold after every commit, checked on the world alone.

Those that need the providers' side (every billed machine has an owner, liveness) are checked by the simulator and the
tests, against the providers' own ledgers.
"""

from __future__ import annotations

from collections import Counter

from spotd.core.keys import key_parts
from spotd.core.model import IntentKind, World, launch_intent_id
from spotd.core.states import AttemptState


def check(world: World) -> tuple[str, ...]:
    """The broken rules, in words; empty when all hold."""
    broken: list[str] = []
    counting = Counter(a.id.job for a in world.attempts.values() if a.state.counts)
    broken.extend(f"job {job} has {n} attempts that count" for job, n in sorted(counting.items()) if n > 1)
    for identity, item in sorted(world.attempts.items(), key=lambda kv: (kv[0].job, kv[0].number)):
        name = f"attempt {identity.number} of job {identity.job}"
        job = world.jobs.get(identity.job)
        if job is None:
            broken.append(f"{name} has no job")
            continue
        parts = key_parts(world.policy.install, item.key)
        if parts is None or (parts.job, parts.number) != (identity.job, identity.number):
            broken.append(f"{name} carries the key {item.key}")
        if job.state.is_final and item.state.counts:
            broken.append(f"{name} counts although its job is {job.state}")
        if item.quote.price.per_gpu > item.ceiling:
            broken.append(f"{name} was agreed above its ceiling")
        if item.state is AttemptState.INTENDED and item.ref is None and launch_intent_id(item.key) not in world.intents:
            broken.append(f"{name} is intended without an open intent")
        if item.state is AttemptState.ENDING and item.ref is not None and not _is_being_ended(world, item.key):
            broken.append(f"{name} is over but nobody ends its machine")
        if job.attempts_made < identity.number:
            broken.append(f"{name} is not counted by its job")
    return tuple(broken)


def _is_being_ended(world: World, key: str) -> bool:
    return any(t.kind is IntentKind.TERMINATE and t.key == key for t in world.intents.values())
