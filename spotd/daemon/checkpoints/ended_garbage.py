"""The controller of checkpoint garbage collection: shortens the lists of jobs, then sweeps a few jobs at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.checkpoints.retention import open_numbers, trim
from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.daemon import object_keys
from spotd.daemon.checkpoints.sweep import own_manifests, sweep
from spotd.daemon.clock import real_seconds_at_least
from spotd.daemon.commits import Commits, cycle_points
from spotd.daemon.controllers import Controller, Outage, Pause
from spotd.daemon.database import Database
from spotd.daemon.threads import Threads
from spotd.store import Reads
from spotd.store import StateError as StateError
from spotd_jobs.objects.api import (
    ObjectStore,
    StoreError,
    StoreUnavailable,
)
from spotd_jobs.wire.client.manifest_text import WINDOW
from spotd_providers.contract.provider import Clock, Logger

PACE: Final = timedelta(minutes=1)
PACE_FLOOR_S: Final = 5.0
DEADLINE_S: Final = 1800.0
JOBS_PER_ROUND: Final = 8
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
    clean: set[AttemptId] = field(default_factory=set)


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
        self._over: deque[JobId] | None = None
        """Jobs that have ended, each swept again in its turn: its owner may unpin or remove a checkpoint."""
        self._turns: set[JobId] = set()
        """The same jobs."""
        self._rounds = 0
        self._interval_s = real_seconds_at_least(clock, PACE, real_s=PACE_FLOOR_S)
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
        due = [job for job in (*world.jobs.values(), *over) if self._is_due(job, world, lent)]
        due.sort(key=lambda job: self._of(job.id).tried)
        last_error = ""
        for job in due[:JOBS_PER_ROUND]:
            try:
                await self._sweep(job, open_numbers(world, job), lent.get(job.id, ()))
            except StoreError as exc:
                last_error = str(exc)
                if isinstance(exc, StoreUnavailable):
                    break
        return Pause(seconds=self._interval_s, error=last_error)

    async def _shorten(self) -> tuple[World, list[Job]]:
        """Return the world with short lists, and some jobs beside it that are over, theirs short too."""
        if self._over is None:
            self._over = deque(await self._database.read(lambda reads: reads.ended_ids()))
            self._turns = set(self._over)
        some = list(islice(self._over, JOBS_PER_ROUND))
        self._over.rotate(-len(some))
        found: list[Job] = []

        def shorten(reads: Reads, world: World, now: datetime) -> Plan:
            found[:] = reads.readable_jobs(some)
            return trim(world, found, now)

        committed = await self._commits.commit_with(shorten, cycle_points)
        world = committed.world
        ended = [job for job in self._jobs if job not in world.jobs and job not in self._turns]
        self._over.extend(ended)
        self._turns.update(ended)
        for job_id in world.jobs:
            self._of(job_id)
        for job_id in some:
            if job_id in world.jobs or all(job.id != job_id for job in found):
                self._over.remove(job_id)  # it was queued again, or there is no such job
                self._turns.discard(job_id)
        over = [committed.plan.jobs.get(job.id, job) for job in found if job.id not in world.jobs]
        return world, over

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
        done = await self._threads.run(lambda: sweep(self._objects, job, open_, frozenset(known.clean), lent=lent))
        known.clean |= done.clean
        if done.objects:
            self._log.info("retention.swept", job=job.id, objects=done.objects, bytes=done.bytes)
        if done.more:
            return
        known.swept_for = _signature(job, open_, lent)
        known.live_for = hash(own_manifests(job, open_))

    def _of(self, job: JobId) -> _Remembered:
        return self._jobs.setdefault(job, _Remembered())


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
