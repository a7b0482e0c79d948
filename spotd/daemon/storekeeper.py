"""Looks at what the hosts of all counting attempts wrote, and says nothing where the store says nothing.

Theory. No report means "not known", and the core then holds: a store that is down must not look like a thousand hosts
falling silent. One look serves all attempts with a few threads and one deadline; attempts it did not reach in time
are without a report this time. Threads cannot be stopped, so a late one is told to end and its attempts stay
reserved until it did.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import anyio
import anyio.to_thread

from spotd.core.model import Attempt, AttemptId, HostReport, Job, JobId, World
from spotd.daemon.flood import FloodLimits, audit
from spotd.daemon.hostview import HostView, look, told, with_job
from spotd.daemon.transfers import Transfer
from spotd_jobs.objects.api import ObjectStore, StoreError
from spotd_jobs.wire.reports import Heartbeat
from spotd_providers.contract.provider import Clock, Logger

THREADS: Final = 8
LOOK_DEADLINE_S: Final = 15.0
ATTEMPTS_PER_THREAD_MIN: Final = 16
"""Below this a further thread costs more than it saves on a folder."""


class Storekeeper:
    """Reports on hosts, and the newest heartbeat of each for the API."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        clock: Clock,
        wall: Clock,
        log: Logger,
        inline: bool = False,
        deadline_s: float = LOOK_DEADLINE_S,
        limits: FloodLimits | None = None,
    ) -> None:
        self._limits = limits or FloodLimits()
        self._objects = objects
        self._clock = clock
        self._wall = wall
        self._log = log
        self._inline = inline
        self._deadline_s = deadline_s
        self._views: dict[AttemptId, HostView] = {}
        self._busy: set[AttemptId] = set()
        self._busy_lock = threading.Lock()
        self._limiter: anyio.CapacityLimiter | None = None
        self.trouble = ""
        """Why the last look was not complete, empty when it was."""

    def heartbeat(self, attempt: AttemptId) -> Heartbeat | None:
        """The newest sign of life of a host, as it was written."""
        view = self._views.get(attempt)
        return view.heartbeat if view is not None else None

    def transfer(self, attempt: AttemptId) -> Transfer | None:
        """What a host is moving now, as far as its newest heartbeats tell."""
        view = self._views.get(attempt)
        return view.transfers.now if view is not None else None

    async def look(self, world: World) -> dict[AttemptId, HostReport]:
        """One report for each counting attempt that could be looked at completely.

        `looked_at` is the instant before the first read, so everything written before it is in the report.
        """
        counting = [a for a in world.attempts.values() if a.state.counts]
        self._forget({a.id for a in world.attempts.values()})
        if not counting:
            self._note("")
            return {}
        pass_ = _Pass(self._clock.now(), self._wall.now(), _speed(self._clock))
        with self._busy_lock:
            free = [a for a in counting if a.id not in self._busy]
            self._busy.update(a.id for a in free)
        for attempt in free:
            self._views.setdefault(attempt.id, HostView())
        batches = _split(free)
        if self._inline:
            for batch in batches:
                self._work(pass_, batch, world.jobs)
        else:
            await self._in_threads(pass_, batches, world.jobs)
        pass_.over = True
        if not pass_.trouble and len(pass_.reports) < len(counting):
            pass_.trouble = f"the checkpoint store did not answer within {self._deadline_s:.0f} s"
        self._note(pass_.trouble)
        return dict(pass_.reports)

    def committed(self, reports: Mapping[AttemptId, HostReport]) -> None:
        """What these reports told is durable."""
        for attempt, report in reports.items():
            view = self._views.get(attempt)
            if view is not None:
                told(view, report)

    def fresh(self, reports: Mapping[AttemptId, HostReport], world: World) -> dict[AttemptId, HostReport]:
        """The reports, of attempts that this newer world still has and without what it knows by now."""
        return {
            attempt: with_job(report, world.jobs[attempt.job])
            for attempt, report in reports.items()
            if attempt in world.attempts and attempt.job in world.jobs
        }

    async def _in_threads(self, pass_: _Pass, batches: Sequence[Sequence[Attempt]], jobs: Mapping[JobId, Job]) -> None:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)
        with anyio.move_on_after(self._deadline_s):
            async with anyio.create_task_group() as group:
                for number, batch in enumerate(batches):
                    group.start_soon(self._one_thread, pass_, batch, jobs, name=f"look-{number}")

    async def _one_thread(self, pass_: _Pass, batch: Sequence[Attempt], jobs: Mapping[JobId, Job]) -> None:
        started = False

        def work() -> None:
            nonlocal started
            started = True
            self._work(pass_, batch, jobs)

        try:
            await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        finally:
            if not started:
                with self._busy_lock:
                    self._busy.difference_update(a.id for a in batch)

    def _work(self, pass_: _Pass, batch: Sequence[Attempt], jobs: Mapping[JobId, Job]) -> None:
        """One thread's share. The first failure of the store ends it: the rest would only fail more slowly."""
        try:
            for attempt in batch:
                if pass_.over or pass_.trouble:
                    return
                try:
                    report = look(
                        self._objects,
                        self._views[attempt.id],
                        attempt,
                        jobs[attempt.id.job],
                        at=pass_.at,
                        virtual=pass_.virtual,
                    )
                    report = replace(report, flood=self._flood(pass_, attempt))
                except StoreError as exc:
                    pass_.trouble = str(exc)
                    return
                if not pass_.over:
                    pass_.reports[attempt.id] = report
        finally:
            with self._busy_lock:
                self._busy.difference_update(a.id for a in batch)

    def _flood(self, pass_: _Pass, attempt: Attempt) -> str:
        """What this host wrote too much of, as far as it has been looked at."""
        view = self._views[attempt.id]
        view.audited_at = view.audited_at or (pass_.real - self._limits.audit_every * (1 - _share(attempt.id)))
        if not view.flood and pass_.real - view.audited_at >= self._limits.audit_every:
            view.flood = audit(self._objects, attempt, self._limits, at=pass_.at)
            view.audited_at = pass_.real
        return view.flood

    def _forget(self, known: set[AttemptId]) -> None:
        with self._busy_lock:
            gone = [i for i in self._views if i not in known and i not in self._busy]
        for attempt in gone:
            del self._views[attempt]

    def _note(self, trouble: str) -> None:
        """One log line when the store goes away and one when it returns."""
        if trouble and not self.trouble:
            self._log.warning("checkpoint_store.away", error=trouble)
        elif self.trouble and not trouble:
            self._log.info("checkpoint_store.back")
        self.trouble = trouble


class _Pass:
    """One look: its instant, on both clocks, and what it has found so far."""

    def __init__(self, at: datetime, real: datetime, speed: float) -> None:
        self.at = at
        self.real = real
        self._speed = speed
        self.reports: dict[AttemptId, HostReport] = {}
        self.trouble = ""
        self.over = False

    def virtual(self, real: datetime) -> datetime:
        """The daemon's instant of a moment on the wall clock; a host's word for it may be anything."""
        try:
            return self.at + (real - self.real) * self._speed
        except OverflowError:
            return self.at


def _share(attempt: AttemptId) -> float:
    """Between 0 and 1: so that a restarted daemon does not look through everything at once."""
    return (zlib.crc32(f"{attempt.job}/{attempt.number}".encode()) % 1000) / 1000


def _speed(clock: Clock) -> float:
    return 1 / clock.real_seconds(timedelta(seconds=1))


def _split(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """As many shares as threads are worth it."""
    everything = list(attempts)
    count = max(1, min(THREADS, len(everything) // ATTEMPTS_PER_THREAD_MIN))
    return [everything[start::count] for start in range(count)]
