"""Asks the store, once at each start, what of the jobs in the state was done by a life that the state does not know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import islice
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from spotd.core.model import Attempt, Checkpoint, Job, JobId, World
from spotd.core.recovery import LaunchRecord, Survey, Unknown, attempt_of, recover
from spotd.daemon import layout
from spotd.daemon.commits import Commits
from spotd.daemon.crash import CrashPoint
from spotd.daemon.hostview import HostView, look
from spotd.store import StoreError as StateError
from spotd.store.codec import Codec
from spotd_jobs.objects.api import ObjectStore, StoreError, StoreUnavailable
from spotd_providers.contract.provider import Clock, Logger

T = TypeVar("T")

RECORD_BYTES_MAX: Final = 65_536
RECORDS_MAX: Final = 10_000
READ_MAX: Final = 10
"""Of how many unknown attempts of one job the checkpoints are read: the newest."""
RETRY_S: Final = 10.0
DEADLINE_S: Final = 300.0
NOT_DONE: Final = "spotd has just started and first asks the checkpoint store which attempts were made"

_CODEC: Final = Codec(LaunchRecord)


def record_bytes(record: LaunchRecord) -> bytes:
    """The launch record as it is stored."""
    return _CODEC.dumps(record).encode()


class Surveyor:
    """`done` once the state is known to be no older than the store."""

    def __init__(
        self, objects: ObjectStore, *, commits: Commits, clock: Clock, log: Logger, inline: bool = False
    ) -> None:
        self._objects = objects
        self._commits = commits
        self._clock = clock
        self._log = log
        self._inline = inline
        self._trouble = ""
        self.done = False

    @property
    def hold(self) -> str:
        """Why nothing may be bought yet, in a sentence."""
        if self.done:
            return ""
        return f"{NOT_DONE}: {self._trouble}" if self._trouble else NOT_DONE

    async def run(self) -> None:
        """Ask until the store has answered.

        Raises:
            InvariantBroken: as every commit.
        """
        while not self.done:
            try:
                await self._once()
            except (StoreError, StateError) as exc:
                if not self._trouble:
                    self._log.warning("survey.waits", error=str(exc))
                self._trouble = str(exc)
                await anyio.sleep(RETRY_S)

    async def _once(self) -> None:
        world = await self._commits.world()
        now = self._clock.now()
        found = await self._call(lambda: survey_all(self._objects, world, now))
        if found:
            committed = await self._commits.commit(
                lambda newest, at: recover(newest, found, at),
                (CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT),
            )
            self._log.warning("survey.recovered", jobs=sorted(committed.plan.jobs))
        self.done = True

    async def _call(self, work: Callable[[], T]) -> T:
        if self._inline:
            return work()
        try:
            with anyio.fail_after(DEADLINE_S):
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        except TimeoutError as exc:
            raise StoreError(f"the checkpoint store did not answer within {DEADLINE_S:.0f} s") from exc


def survey_all(objects: ObjectStore, world: World, now: datetime) -> list[Survey]:
    """What the store knows of each job that is not over, beyond the state; jobs without news are left out.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    found = []
    for job in world.jobs.values():
        if job.state.is_final:
            continue
        unknown = _unknown(objects, job)
        if unknown:
            checkpoints = _checkpoints(objects, world, job, unknown, now)
            found.append(Survey(job=job.id, unknown=unknown, checkpoints=checkpoints))
    return found


def _unknown(objects: ObjectStore, job: Job) -> list[Unknown]:
    numbers = set()
    for info in islice(objects.list(layout.launches_prefix(job.id)), RECORDS_MAX):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        if name.isascii() and name.isdecimal() and int(name) > job.attempts_made:
            numbers.add(int(name))
    return [Unknown(number=number, record=_record(objects, job.id, number)) for number in sorted(numbers)]


def _record(objects: ObjectStore, job: JobId, number: int) -> LaunchRecord | None:
    try:
        return _CODEC.loads(objects.get(layout.launch_key(job, number), bytes_max=RECORD_BYTES_MAX).decode())
    except StoreUnavailable:
        raise
    except (StoreError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # the number is used all the same


def _checkpoints(
    objects: ObjectStore, world: World, job: Job, unknown: list[Unknown], now: datetime
) -> tuple[Checkpoint, ...]:
    """Accepted checkpoints that the state lacks, oldest first for each attempt."""
    attempts: list[Attempt] = [a for a in world.attempts_of(job.id) if a.state.counts]
    for one in unknown[-READ_MAX:]:
        attempt = attempt_of(world.policy, job.id, one)
        if attempt is not None:
            attempts.append(attempt)
    found: list[Checkpoint] = []
    for attempt in attempts:
        report = look(objects, HostView(), attempt, job, at=now, virtual=lambda real: real)
        found.extend(report.checkpoints)
    return tuple(found)
