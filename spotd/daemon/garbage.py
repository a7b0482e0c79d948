"""Deletes what no checkpoint on a job's list needs any more, a little at a time.

Theory. `spotd.core.checkpoints` says what stays on the list and why an attempt that has not ended can only
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

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, zip_longest
from typing import Final

from spotd.core.checkpoints import open_numbers, trim
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job, Outputs
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.commits import Commits, Database, Threads, cycle_points
from spotd.daemon.controllers import INTERVAL_MIN_S, Controller, Outage, Pause
from spotd.daemon.hosts.host_reader import NONE_STORED, known_manifest, pinned_manifest
from spotd.store import Reads, StateError
from spotd_jobs.objects.api import (
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
    is_key,
    require_listed_key,
)
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX, WINDOW
from spotd_jobs.wire.grant import WireError
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_jobs.wire.manifest_document import Manifest, parse_manifest
from spotd_providers.contract.provider import Clock, Logger

# What a *running* attempt has left behind for good.
#
# Theory. The runner counts on a chunk that its own attempt sent only while it is young: one of the `WINDOW` newest
# manifests of the attempt names it, or it was sent after the oldest of these was published. What is too old is
# forgotten before the next manifest goes out, and is sent again under another key when its content comes back
# (`spotd_jobs.runner.manifest`). So a chunk that no manifest on any list needs, none of the newest names, and that is
# older than the oldest of these, can be named by no manifest that is still to come, and its key is never written again.
# Ages are the store's own.
# A manifest that is not on the list goes only if a read of the host would pass over it: its serial is below that of one
# that was accepted. What it names is garbage with it; every other manifest that is there protects what it names.


SETTLED: Final = timedelta(minutes=2)
"""So far apart the clocks of a store's own machines may be."""
MANIFESTS_MAX: Final = 10_000
CHUNKS_MAX: Final = 200_000
PARSED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of manifests that are not on the list: how many and how large is the host's choice."""


def live_garbage(
    objects: ObjectStore,
    attempt: AttemptId,
    needed: Collection[str],
    accepted: Manifest,
    *,
    settled: timedelta = SETTLED,
) -> list[ObjectInfo]:
    """Return objects of a running attempt that cannot be needed any more, manifests first.

    Args:
        needed: manifests on any list, and every chunk that one of them or any outputs name.
        accepted: the newest manifest of this attempt that is on the list.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    prefix = checkpoint_prefix(attempt.job, attempt.number)
    found = [info for info in islice(objects.list(prefix), MANIFESTS_MAX) if info.key.endswith(".json")]
    if not WINDOW < len(found) < MANIFESTS_MAX:
        return []
    found.sort(key=lambda info: info.modified, reverse=True)
    horizon = found[WINDOW - 1].modified - settled
    needed = set(needed)
    garbage: list[ObjectInfo] = []
    unread, left = False, PARSED_BYTES_MAX
    for place, info in enumerate(found):
        if info.key in needed:
            continue
        left -= info.size
        manifest = _parse(objects, info.key) if left >= 0 else None
        is_news = manifest is not None and manifest.serial > accepted.serial
        if place >= WINDOW and info.modified < horizon and not is_news and left >= 0:
            garbage.append(info)
        elif manifest is not None:
            needed |= set(manifest.chunk_sizes())
        else:
            unread = True
    if unread:
        return garbage  # what cannot be read may need any chunk of its attempt
    written = islice(objects.list(object_keys.data_prefix(attempt)), CHUNKS_MAX)
    return [*garbage, *(info for info in written if info.key not in needed and info.modified < horizon)]


def _parse(objects: ObjectStore, key: str) -> Manifest | None:
    try:
        return parse_manifest(objects.get(key, bytes_max=MANIFEST_BYTES_MAX))
    except StoreUnavailable:
        raise
    except (StoreError, WireError):
        return None


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
        deleted = _delete(objects, garbage)
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
        deleted = _delete(objects, some)
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


def _delete(objects: ObjectStore, garbage: Sequence[ObjectInfo]) -> list[ObjectInfo]:
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


# The controller of checkpoint garbage collection: shortens the lists of jobs, then sweeps a few jobs at a time.


PACE: Final = timedelta(minutes=1)
DEADLINE_S: Final = 1800.0
JOBS_PER_ROUND: Final = 8
REVISITED: Final = 2
"""Of these so many at least are jobs that ended long ago."""
REMEMBERED_MAX: Final = 10_000
"""Jobs that have ended. One that is not remembered costs one listing of its objects when it has its turn."""
LIVE_ROUNDS: Final = 5
"""What a running attempt leaves behind is searched for only after so many rounds: each time lists all of it."""


@dataclass(slots=True, kw_only=True)
class _Remembered:
    """Of one job in this process: for which list it was swept, and which attempts need no sweep any more."""

    swept_for: int | None = None
    live_for: int | None = None
    """The same of what its open attempts have on the list."""
    tried: int = 0
    """In which round; the job without a turn for longest comes first, so that one failing job holds up no other."""
    clean: tuple[int, ...] = ()
    """Numbers of attempts. It is kept for many jobs that have ended: a set for each would be half of what all take."""
    is_over: bool = False


class EndedGarbage:
    """Garbage collection. `reconcile_once` is one pass over a few jobs."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        commits: Commits,
        database: Database,
        clock: Clock,
        log: Logger,
        inline: bool = False,
        may_delete: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_delete = may_delete
        self._objects = objects
        self._commits = commits
        self._database = database
        self._clock = clock
        self._log = log
        self._threads = Threads(inline=inline)
        self._jobs: dict[JobId, _Remembered] = {}
        self._over: deque[JobId] = deque(maxlen=REMEMBERED_MAX)
        """Jobs that have ended and are not swept yet, the first to be swept in front."""
        self._seen: JobId | None = None
        """Which ended job had its turn last: each has one again, since its owner may unpin or remove a checkpoint."""
        self._rounds = 0
        self._interval_s = max(INTERVAL_MIN_S, clock.real_seconds(PACE))
        self.controller = Controller(
            "checkpoint-garbage",
            self.reconcile_once,
            interval_s=self._interval_s,
            expected=(StateError,),
            outage=Outage(log, "retention.held", "retention.back", each_error=True),
            deadline_s=DEADLINE_S,
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> Pause | None:
        """Make every list as short as it may be, and delete garbage of a few jobs.

        Raises:
            StateError: the state cannot be read or written.
            InvariantBroken: as every commit.
        """
        if not self._may_delete():
            return None
        self._rounds += 1
        world, over = await self._shorten()
        lent = _by_owner(await self._database.read(lambda reads: reads.borrowed_checkpoints()))
        live, ended = ([job for job in some if self._is_due(job, world, lent)] for some in (world.jobs.values(), over))
        live.sort(key=lambda job: self._of(job.id).tried)
        last_error = ""
        for job in _in_turn(ended, live)[:JOBS_PER_ROUND]:
            try:
                await self._sweep(job, open_numbers(world, job), lent.get(job.id, ()))
            except StoreError as exc:
                last_error = str(exc)
                if isinstance(exc, StoreUnavailable):
                    break
        self._over.extend(job.id for job in ended if self._is_due(job, world, lent))
        self._forget(len(self._jobs) - len(world.jobs) - REMEMBERED_MAX)
        return Pause(seconds=self._interval_s, error=last_error)

    async def _shorten(self) -> tuple[World, list[Job]]:
        """Return the world with short lists, and some jobs beside it that are over, theirs short too."""
        some = [self._over.popleft() for _ in range(min(len(self._over), JOBS_PER_ROUND - REVISITED))]
        some = list(dict.fromkeys([*some, *await self._next_page(JOBS_PER_ROUND - len(some))]))
        found: list[Job] = []

        def shorten(reads: Reads, world: World, now: datetime) -> Plan:
            found[:] = reads.readable_jobs(some)
            return trim(world, found, now)

        committed = await self._commits.commit_with(shorten, cycle_points)
        world = committed.world
        for job_id in world.jobs:
            self._of(job_id).is_over = False  # it is new, or was queued again
        for job_id, known in self._jobs.items():
            if not known.is_over and job_id not in world.jobs:
                known.is_over = True
                self._over.append(job_id)
        over = [committed.plan.jobs.get(job.id, job) for job in found if job.id not in world.jobs]
        for job in over:
            self._of(job.id).is_over = True
        return world, over

    async def _next_page(self, limit: int) -> tuple[JobId, ...]:
        """Return the ended jobs whose turn it is, newest first and then from the beginning again."""
        before = self._seen
        page = await self._database.read(lambda reads: reads.ended_page(before=before, limit=limit))
        self._seen = page[-1] if len(page) == limit else None
        return page

    def _forget(self, count: int) -> None:
        """Drop what is remembered of so many ended jobs: each is swept once more in its turn."""
        for job in list(islice((job for job, known in self._jobs.items() if known.is_over), max(0, count))):
            del self._jobs[job]

    def _is_due(self, job: Job, world: World, lent: Mapping[JobId, tuple[Checkpoint, ...]]) -> bool:
        open_ = open_numbers(world, job)
        known = self._of(job.id)
        if job.attempts_made > len(open_) and known.swept_for != _signature(job, open_, lent.get(job.id, ())):
            return True
        own = own_manifests(job, open_)
        return len(own) >= WINDOW and known.live_for != hash(own) and self._rounds - known.tried >= LIVE_ROUNDS

    async def _sweep(self, job: Job, open_: frozenset[int], lent: tuple[Checkpoint, ...]) -> None:
        known = self._of(job.id)
        known.tried = self._rounds
        clean = frozenset(AttemptId(job=job.id, number=number) for number in known.clean)
        done = await self._threads.run(lambda: sweep(self._objects, job, open_, clean, lent=lent))
        known.clean = tuple(sorted({*known.clean, *(attempt.number for attempt in done.clean)}))
        if done.objects:
            self._log.info("retention.swept", job=job.id, objects=done.objects, bytes=done.bytes)
        if done.more:
            return
        known.swept_for = _signature(job, open_, lent)
        known.live_for = hash(own_manifests(job, open_))

    def _of(self, job: JobId) -> _Remembered:
        return self._jobs.setdefault(job, _Remembered())


def _in_turn(first: Sequence[Job], second: Sequence[Job]) -> list[Job]:
    """Return all of both, one of each in turn, so that neither waits for the end of the other."""
    return [job for pair in zip_longest(first, second) for job in pair if job is not None]


def _signature(job: Job, open_: frozenset[int], lent: tuple[Checkpoint, ...]) -> int:
    """Return what of a job decides about its garbage: an open attempt's own checkpoints do not."""
    listed = tuple(c.manifest_key for c in job.checkpoints if c.attempt not in open_)
    return hash((open_, job.attempts_made, listed, job.outputs, frozenset(c.manifest_key for c in lent)))


def _by_owner(borrowed: Iterable[Checkpoint]) -> dict[JobId, tuple[Checkpoint, ...]]:
    """Return what was lent, by the job that wrote it."""
    found: dict[JobId, tuple[Checkpoint, ...]] = {}
    for checkpoint in borrowed:
        owner = object_keys.owner_of(checkpoint.manifest_key).job
        found[owner] = (*found.get(owner, ()), checkpoint)
    return found
