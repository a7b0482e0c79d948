"""Deletes what no checkpoint on a job's list needs any more, a little at a time.

Theory. `spotd.core.checkpoints.retention` says what stays on the list and why an attempt that has not ended can only
need what is on it. This module makes the list short, durably, and only then touches the store. Below attempts that had
ended when the list was made short it cannot race with a host: an open attempt writes below its own prefix, and refers
to nothing else than what it sent itself and chunks of the checkpoints that it was offered, which are on the list until
it has ended. What an open attempt itself has left behind for good is the theory of `live_garbage`. An attempt that is
intended later is offered what is on the list by then, which is no more than now. Nothing has to be locked, and a crash
between list and store leaves garbage that the next process finds.

A job that begins from another job's checkpoint has it on its own list. What lists of other jobs hold is
needed too: it is read after the lists were made short, and a list takes over only what is on the other one.

Logs, events and heartbeats are kept; so are the outputs that the job's are known to be, with every chunk they name.
What else is written as outputs is garbage once its attempt has ended. A key that a host made up and no store can
delete by is left alone, and keeps nothing else from being deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Job, Outputs
from spotd.core.domain.states import JobState
from spotd.daemon import object_keys
from spotd.daemon.checkpoints.live_garbage import SETTLED, live_garbage
from spotd.daemon.hosts.known_manifests import known_manifest
from spotd.daemon.hosts.outputs import NONE_STORED, pinned_manifest
from spotd_jobs.objects.api import (
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
)
from spotd_jobs.objects.keys import is_key, require_listed_key
from spotd_jobs.wire.client.manifest_text import MANIFEST_BYTES_MAX
from spotd_jobs.wire.fields import WireError
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_jobs.wire.manifest_document import Manifest, parse_manifest

LISTED_MAX: Final = 200_000
"""Of one attempt: how much a host wrote was its own choice."""
DELETED_PER_SWEEP_MAX: Final = 5_000
BATCH: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep of a job did.

    Attributes:
        clean: attempts that hold nothing that could ever become garbage.
        more: there is garbage left for the next time.
    """

    objects: int = 0
    bytes: int = 0
    clean: frozenset[AttemptId] = frozenset()
    more: bool = False


def sweep(
    objects: ObjectStore,
    job: Job,
    open_attempts: frozenset[int],
    clean: frozenset[AttemptId] = frozenset(),
    *,
    lent: Collection[Checkpoint] = (),
    deleted_max: int = DELETED_PER_SWEEP_MAX,
    settled: timedelta = SETTLED,
) -> Swept:
    """Delete what ended attempts wrote and neither the job's list nor any outputs need, up to a bound.

    What open attempts have left behind for good is deleted as well.

    Args:
        lent: checkpoints of this job that are on lists of other jobs.

    Raises:
        StoreError: it does not answer, or what is needed is unknown, and nothing more was deleted.
    """
    every = [AttemptId(job=job.id, number=number) for number in range(1, job.attempts_made + 1)]
    ended = [attempt for attempt in every if attempt.number not in open_attempts and attempt not in clean]
    if not ended and not own_manifests(job, open_attempts):
        return Swept()
    every_kept = (*job.checkpoints, *lent)
    needed = {c.manifest_key for c in every_kept}
    newest: dict[int, Manifest] = {}
    for checkpoint in every_kept:
        manifest = _manifest(objects, checkpoint)
        needed |= _chunks_of(manifest)
        newest.setdefault(checkpoint.attempt, manifest)
    needed |= _needed_by_outputs(objects, job, every, open_attempts)
    gone, freed = 0, 0
    now_clean: set[AttemptId] = set()
    for attempt in (attempt for attempt in ended if not _is_protected(job, attempt)):
        garbage: list[ObjectInfo] = []
        left, more = 0, False
        for info in _written(objects, attempt):
            if info.key in needed or not _can_be_deleted(info.key):
                left += 1
            elif len(garbage) < deleted_max - gone:
                garbage.append(info)
            else:
                more = True
                break
        # A daemon that died may have left its grant, which holds the job's secrets.
        objects.delete([object_keys.grant_key(attempt)])
        deleted = _deleted(objects, garbage)
        left += len(garbage) - len(deleted)
        gone += len(deleted)
        freed += sum(info.size for info in deleted)
        if more:
            return Swept(objects=gone, bytes=freed, clean=frozenset(now_clean), more=True)
        if not left:
            now_clean.add(attempt)
    for attempt in every:
        accepted = newest.get(attempt.number) if attempt.number in open_attempts else None
        if accepted is None:
            continue
        found = live_garbage(objects, attempt, needed, accepted, settled=settled)
        left_behind = [info for info in found if _can_be_deleted(info.key)]
        some = left_behind[: deleted_max - gone]
        deleted = _deleted(objects, some)
        gone += len(deleted)
        freed += sum(info.size for info in deleted)
        if len(some) < len(left_behind):
            return Swept(objects=gone, bytes=freed, clean=frozenset(now_clean), more=True)
    return Swept(objects=gone, bytes=freed, clean=frozenset(now_clean))


def own_manifests(job: Job, open_: Collection[int]) -> tuple[str, ...]:
    """Return what attempts that have not ended have on the list themselves."""
    return tuple(c.manifest_key for c in job.checkpoints if c.attempt in open_)


def _written(objects: ObjectStore, attempt: AttemptId) -> Iterator[ObjectInfo]:
    """Yield what of an attempt's writing can be garbage."""
    yield from islice(objects.list(checkpoint_prefix(attempt.job, attempt.number)), LISTED_MAX)
    yield from islice(objects.list(object_keys.data_prefix(attempt)), LISTED_MAX)
    yield from islice(objects.list(object_keys.outputs_prefix(attempt)), LISTED_MAX)


def _manifest(objects: ObjectStore, checkpoint: Checkpoint) -> Manifest:
    """Return the manifest as it was accepted, also where a host wrote over it in a store that keeps versions.

    Raises:
        StoreError: it is not there or another one, so that the chunks it needs are unknown.
    """
    key = checkpoint.manifest_key
    data = known_manifest(objects, key, checkpoint.sha256)
    if data is None:
        raise StoreError(f"the manifest {key} is not the one that was accepted: nothing is deleted")
    try:
        return parse_manifest(data)
    except WireError as exc:
        raise StoreError(f"the manifest {key} cannot be read: nothing is deleted") from exc


def _chunks_of(manifest: Manifest) -> set[str]:
    return set(manifest.chunk_sizes())


def _is_protected(job: Job, attempt: AttemptId) -> bool:
    """Whether the attempt succeeded and its outputs could not be read: then what they need is unknown."""
    pinned = job.outputs
    if pinned is None or pinned.attempt != attempt.number or pinned.sha256 is not None:
        return False
    return pinned.problem not in {"", NONE_STORED}


def _needed_by_outputs(
    objects: ObjectStore, job: Job, every: Iterable[AttemptId], open_attempts: frozenset[int]
) -> set[str]:
    """Return what the job's outputs are made of, and what an attempt that has not ended may yet call its outputs.

    Raises:
        StoreError: the job's outputs cannot be read, so that what they need is unknown.
    """
    needed: set[str] = set()
    unpinned = job.outputs is None and job.state is JobState.SUCCEEDED
    for attempt in every:
        if attempt.number in open_attempts or unpinned:
            needed |= _chunks_of_outputs(objects, attempt)
    if job.outputs is not None and job.outputs.sha256 is not None:
        attempt = AttemptId(job=job.id, number=job.outputs.attempt)
        needed.add(object_keys.outputs_key(attempt))
        needed |= _chunks_of_pinned(objects, attempt, job.outputs)
    return needed


def _chunks_of_pinned(objects: ObjectStore, attempt: AttemptId, pinned: Outputs) -> set[str]:
    manifest = pinned_manifest(objects, attempt, pinned)
    if manifest is not None:
        return {*manifest.chunk_keys}
    if objects.head(object_keys.outputs_key(attempt)) is None:
        return set()  # they are gone, and what they were made of is of no use
    raise StoreError(f"the outputs of job {attempt.job} are not those it left: nothing is deleted")


def _chunks_of_outputs(objects: ObjectStore, attempt: AttemptId) -> set[str]:
    """Return what a manifest of outputs names that nothing has judged yet, and the manifest itself."""
    key = object_keys.outputs_key(attempt)
    try:
        data = objects.get(key, bytes_max=MANIFEST_BYTES_MAX)
    except (ObjectMissing, ObjectTooLarge):
        return set()
    try:
        return {key, *_chunks_of(parse_manifest(data))}
    except WireError:
        return set()  # it never was a manifest, so it needs nothing


def _can_be_deleted(key: str) -> bool:
    """Whether the key, which a host made up, means the same object to every store."""
    try:
        require_listed_key(key)
    except StoreError:
        return False
    return True


def _deleted(objects: ObjectStore, garbage: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Delete these and return what is gone; one that the store refuses to delete keeps no other.

    Raises:
        StoreUnavailable
    """
    gone: list[ObjectInfo] = []
    plain = [info for info in garbage if is_key(info.key)]
    for start in range(0, len(plain), BATCH):
        some = plain[start : start + BATCH]
        try:
            objects.delete([info.key for info in some])
        except StoreUnavailable:
            raise
        except StoreError:
            gone += [info for info in some if _is_gone(objects, info)]
        else:
            gone += some
    return gone + [info for info in garbage if not is_key(info.key) and _is_gone(objects, info)]


def _is_gone(objects: ObjectStore, info: ObjectInfo) -> bool:
    try:
        objects.delete_listed(info.key)
    except StoreUnavailable:
        raise
    except StoreError:
        return False
    return True
