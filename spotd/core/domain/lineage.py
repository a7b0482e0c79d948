"""Which attempt's checkpoints are known to be good, and which are doubted.

Theory. That a checkpoint is complete says nothing about whether it is worth anything: a host with a broken GPU saves
numbers that are none, and says so in a manifest that fits. Only a later attempt can show it. One that resumed from a
checkpoint, on another host, and has saved something newer since, is a *proof* of the attempt that wrote the checkpoint.
One whose command failed before it had saved anything newer is a *doubt* of it. The checkpoints of one attempt are one
generation. Of every generation since the newest proven one something stays, because each of the later ones may be
worthless; and where a generation was doubted too often the next older one is offered first.

Proofs and doubts carry the number of the attempt that gave them, so that what an attempt was offered can be worked out
again for as long as its machine exists, whatever became known since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.states import EndReason

CHOICES: Final = 3
"""So many checkpoints an attempt may choose from: the newest may turn out to be damaged when it is fetched."""
DOUBTS: Final = 2
"""So many resumes in a row without progress, and an older generation comes first; one before the last try of all."""
DOUBTS_REMEMBERED: Final = 8
EARLIER_KEPT: Final = 2
"""At least so many checkpoints of earlier attempts stay until a newer generation is proven."""
UNPROVEN_KEPT: Final = 3
"""Of so many of the newest generations that are neither the newest nor proven the newest checkpoint stays."""
WORKED: Final = timedelta(minutes=5)
"""What a command has saved so long after it began is progress, where no step shows it."""

Generation = tuple[Checkpoint, ...]


def unsaved_time(job: Job, item: Attempt, until: datetime) -> timedelta:
    """Return the time of the attempt's command after its newest checkpoint, which a loss then would repeat."""
    began = max([item.running_at or until, *job.saved_by(item.id.number)])
    return max(timedelta(0), until - began)


def repeated_time(job: Job, item: Attempt, now: datetime, silence_max: timedelta) -> timedelta:
    """Return the unsaved work that a loss repeats: not the time in which its machine was outbid, waited, or was silent.

    It waits where it is one of several, of which one is lost.
    """
    kept_since = None if item.members is None else item.members.kept_since
    until, last = item.bidding.held_since or kept_since or now, item.heartbeat_seen_at
    if last is not None and now - last > 2 * silence_max:
        until = min(until, last)
    return unsaved_time(job, item, until)


def generations(checkpoints: Iterable[Checkpoint]) -> list[Generation]:
    """Return the checkpoints of each attempt, in the order of the list."""
    found: dict[int, list[Checkpoint]] = {}
    for one in checkpoints:
        found.setdefault(one.attempt, []).append(one)
    return [tuple(some) for some in found.values()]


def doubts_of(generation: Generation, before: int | None = None) -> int:
    """How many attempts in a row failed to get anywhere from this generation, of those below this number."""
    proofs = [c.proven_by for c in generation if c.proven_by is not None and (before is None or c.proven_by < before)]
    since = max(proofs, default=-1)
    doubts = {number for c in generation for number in c.doubted_by}
    return sum(number > since and (before is None or number < before) for number in doubts)


def doubts_allowed(job: Job) -> int:
    """How many doubts make the next older generation come first."""
    return 1 if job.errors >= job.spec.retry_errors else DOUBTS


def restore_order(checkpoints: Sequence[Checkpoint], allowed: int, *, before: int | None = None) -> list[Checkpoint]:
    """Return what may be resumed from, first choice first: newest first, but for generations that are doubted.

    Of the choices that an attempt gets the last is of another generation than the first, if there is one.

    Args:
        before: only what attempts below this number wrote, and only what was known before it.
    """
    every = generations(c for c in checkpoints if before is None or c.attempt < before)
    doubted = [g for g in every if doubts_of(g, before) >= allowed]
    if len(doubted) == len(every):
        doubted = []
    ordered = [c for g in (*(g for g in every if g not in doubted), *doubted) for c in g]
    if ordered and all(c.attempt == ordered[0].attempt for c in ordered[:CHOICES]):
        other = next((c for c in ordered if c.attempt != ordered[0].attempt), None)
        if other is not None:
            ordered.remove(other)
            ordered.insert(CHOICES - 1, other)
    return ordered


def earlier_kept(checkpoints: Iterable[Checkpoint]) -> frozenset[Checkpoint]:
    """Return what stays of earlier attempts because nothing has shown yet that what came after it is worth anything."""
    every = generations(checkpoints)
    proven = next((n for n, g in enumerate(every) if any(c.proven_by is not None for c in g)), len(every) - 1)
    if proven <= 0:
        return frozenset()
    unproven = {g[0] for g in every[1:proven][:UNPROVEN_KEPT]}
    older = [c for g in every[proven:] for c in sorted(g, key=lambda c: c.proven_by is None)]
    return frozenset({*unproven, *older[:EARLIER_KEPT]})


def host_name(attempt: Attempt) -> str:
    """Return the host, where the provider names it."""
    offer = attempt.quote.offer
    return "" if offer.host_id is None else f"{offer.provider}/{offer.host_id}"


def source_of(job: Job, attempt: Attempt) -> Checkpoint | None:
    """Return what the attempt resumed from, if it is still on the list; of two with one name the first."""
    if attempt.resumed_from is None:
        return None
    earlier = restore_order(job.checkpoints, doubts_allowed(job), before=attempt.id.number)
    return next((c for c in earlier if c.name == attempt.resumed_from), None)


def with_progress(job: Job, attempt: Attempt, now: datetime) -> Job:
    """Return the job, whose list shows what this attempt has proved by getting further than where it began."""
    source = source_of(job, attempt)
    if source is None or source.proven_by is not None or not has_progress(job, attempt, source, now):
        return job
    host = host_name(attempt)
    if host and host == source.host:
        return job  # the host that wrote it vouches for nothing that it wrote
    return _with(job, source, replace(source, proven_by=attempt.id.number))


def has_progress(job: Job, attempt: Attempt, source: Checkpoint, now: datetime) -> bool:
    """Whether the attempt has saved something beyond what it resumed from."""
    worked = attempt.command_time(now) >= WORKED
    for own in (c for c in job.checkpoints if c.attempt == attempt.id.number):
        further = own.step > source.step if own.step is not None and source.step is not None else worked
        if further:
            return True
    return False


def with_doubt(job: Job, source: Checkpoint | None, attempt: Attempt, reason: EndReason, now: datetime) -> Job:
    """Return the job, whose list shows that this attempt failed without getting further than where it began."""
    if source is None or reason is not EndReason.USER_ERROR or attempt.running_at is None:
        return job  # a machine that is taken away proves nothing
    if has_progress(job, attempt, source, now):
        return job
    doubts = (*source.doubted_by, attempt.id.number)[-DOUBTS_REMEMBERED:]
    return _with(job, source, replace(source, doubted_by=doubts))


def setback(job: Job) -> tuple[Checkpoint, Checkpoint] | None:
    """Return the newest checkpoint and the older one that comes before it now, where that is so."""
    if not job.checkpoints:
        return None
    first = restore_order(job.checkpoints, doubts_allowed(job))[0]
    newest = job.checkpoints[0]
    return None if first.attempt == newest.attempt else (newest, first)


def _with(job: Job, before: Checkpoint, after: Checkpoint) -> Job:
    return replace(job, checkpoints=tuple(after if c == before else c for c in job.checkpoints))
