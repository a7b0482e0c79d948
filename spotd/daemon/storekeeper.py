"""Looks at what the hosts of all counting attempts wrote, and says nothing where the store says nothing.

Theory. No report means "not known", and the core then holds: a store that is down must not look like a thousand hosts
falling silent. One look serves all attempts with a few threads and one deadline; attempts it did not reach in time
are without a report this time. Threads cannot be stopped, so a late one is told to end and its attempts stay
reserved until it did.

A look begins with one listing of all beats (`beats.py`). Only hosts with news, without a beat to rely on, or that the
core wants to know more of are looked at completely; of the others a glance tells what is known. However often a look
is asked for, the beats are listed no more often than `list_every_s`: in between everybody is glanced at.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import anyio
import anyio.to_thread

from spotd.core.model import Attempt, AttemptId, HostReport, Job, JobId, World
from spotd.daemon import layout
from spotd.daemon.beats import STRAYS_KEPT, delete_strays, is_quiet, list_beats, note_beat
from spotd.daemon.flood import FloodLimits, audit
from spotd.daemon.hostview import HostView, look, report_of, told, with_job
from spotd.daemon.transfers import Transfer
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError
from spotd_jobs.wire.reports import Heartbeat
from spotd_providers.contract.provider import Clock, Logger

THREADS: Final = 8
LOOK_DEADLINE_S: Final = 15.0
ATTEMPTS_PER_THREAD_MIN: Final = 16
"""Below this a further thread costs more than it saves on a folder."""
EARLY_SHARE: Final = 0.9
"""A look that comes so early lists the beats all the same: the next might come much later."""


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
        list_every_s: float = 0.0,
        may_delete: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_delete = may_delete
        self._list_every = timedelta(seconds=list_every_s)
        self._listed_at: datetime | None = None
        self._strays_at: datetime | None = None
        self._limits = limits or FloodLimits()
        self._objects = objects
        self._clock = clock
        self._wall = wall
        self._log = log
        self._inline = inline
        self._deadline_s = deadline_s
        self._views: dict[AttemptId, HostView] = {}
        self._unread: dict[AttemptId, str] = {}
        """Why what a host wrote cannot be read at all."""
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

    def next_listing_s(self) -> float:
        """Seconds until a look will list the beats again."""
        if self._listed_at is None:
            return 0.0
        return max(0.0, (self._listed_at + self._list_every - self._wall.now()).total_seconds())

    async def look(self, world: World, closely: frozenset[AttemptId] = frozenset()) -> dict[AttemptId, HostReport]:
        """One report for each counting attempt that could be looked at, or needed but a glance.

        `looked_at` is the instant before the first read, so everything written before it is in a complete report.

        Args:
            closely: a glance will not do for these.
        """
        counting = [a for a in world.attempts.values() if a.state.counts]
        self._forget({a.id for a in world.attempts.values()})
        if not counting:
            self._note("")
            return {}
        pass_ = _Pass(self._clock.now(), self._wall.now(), _speed(self._clock))
        with self._busy_lock:
            free = [a for a in counting if a.id not in self._busy]
        for attempt in free:
            self._views.setdefault(attempt.id, HostView())
        if self._inline:
            self._list(pass_, world)
            for batch in self._batches(pass_, free, world, closely):
                self._work(pass_, batch, world.jobs)
        else:
            await self._in_threads(pass_, free, world, closely)
        pass_.over = True
        if not pass_.trouble and len(pass_.reports) < len(counting):
            pass_.trouble = f"the checkpoint store did not answer within {self._deadline_s:.0f} s"
        if pass_.trouble or pass_.asked:
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

    def _list(self, pass_: _Pass, world: World) -> None:
        """The pass knows the beats, if it is time for them."""
        early = self._listed_at is not None and pass_.real - self._listed_at < self._list_every * EARLY_SHARE
        if early:
            return
        try:
            beats = list_beats(self._objects)
        except StoreError as exc:
            pass_.trouble = str(exc)
            return
        pass_.beats, pass_.asked = beats, True
        if not self._may_delete():
            return
        if self._strays_at is None or pass_.real - self._strays_at >= STRAYS_KEPT:
            self._strays_at = pass_.real
            delete_strays(self._objects, beats, {layout.beat_key(i) for i in world.attempts}, real=pass_.real)

    def _batches(
        self, pass_: _Pass, free: Iterable[Attempt], world: World, closely: frozenset[AttemptId]
    ) -> list[list[Attempt]]:
        """Who must be looked at, in shares; the others are reported as they are known."""
        if pass_.trouble or pass_.over:
            return []
        if pass_.beats is not None:
            self._listed_at = pass_.real
        due: list[Attempt] = []
        for attempt in free:
            view = self._views[attempt.id]
            if pass_.beats is not None:
                note_beat(view, pass_.beats.get(layout.beat_key(attempt.id)), at=pass_.at)
                quiet = is_quiet(view, at=pass_.at, silence_max=world.policy.silence_max)
            else:
                quiet = not view.first_look
            if not quiet or attempt.id in closely:
                pass_.complete.add(attempt.id)
            elif not self._audit_is_due(pass_, attempt):
                pass_.reports[attempt.id] = self._glance(pass_, attempt, world.jobs[attempt.id.job])
                continue
            due.append(attempt)
        pass_.asked = pass_.asked or bool(due)
        with self._busy_lock:
            self._busy.update(a.id for a in due)
        return _split(due)

    def _glance(self, pass_: _Pass, attempt: Attempt, job: Job) -> HostReport:
        return report_of(self._views[attempt.id], attempt, job, at=pass_.at, virtual=pass_.virtual, glance=True)

    async def _in_threads(
        self, pass_: _Pass, free: Sequence[Attempt], world: World, closely: frozenset[AttemptId]
    ) -> None:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)
        with anyio.move_on_after(self._deadline_s):
            await anyio.to_thread.run_sync(self._list, pass_, world, abandon_on_cancel=True, limiter=self._limiter)
            batches = self._batches(pass_, free, world, closely)
            async with anyio.create_task_group() as group:
                for number, batch in enumerate(batches):
                    group.start_soon(self._one_thread, pass_, batch, world.jobs, name=f"look-{number}")

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
                view, job = self._views[attempt.id], jobs[attempt.id.job]
                try:
                    if attempt.id in pass_.complete:
                        report = look(self._objects, view, attempt, job, at=pass_.at, virtual=pass_.virtual)
                    else:
                        report = self._glance(pass_, attempt, job)
                    report = replace(report, flood=self._flood(pass_, attempt))
                except StoreError as exc:
                    pass_.trouble = str(exc)
                    return
                except Exception as exc:  # noqa: BLE001 - what one host wrote must not hide all other hosts
                    report = self._unreadable(pass_, attempt, exc)
                if not pass_.over:
                    pass_.reports[attempt.id] = report
        finally:
            with self._busy_lock:
                self._busy.difference_update(a.id for a in batch)

    def _unreadable(self, pass_: _Pass, attempt: Attempt, error: Exception) -> HostReport:
        """What is said of a host whose words cannot be read: that it was looked at, and gave no sign of life."""
        words = f"{type(error).__name__}: {error}"[:300]
        notes: tuple[str, ...] = ()
        if self._unread.get(attempt.id) != words:
            self._unread[attempt.id] = words
            self._log.error("host.not_readable", attempt=attempt.key, exc_info=error)
            notes = (f"what the host wrote cannot be read ({words})",)
        return HostReport(attempt=attempt.id, looked_at=pass_.at, notes=notes)

    def _flood(self, pass_: _Pass, attempt: Attempt) -> str:
        """What this host wrote too much of, as far as it has been looked at."""
        view = self._views[attempt.id]
        if self._audit_is_due(pass_, attempt):
            view.flood = audit(self._objects, attempt, self._limits, at=pass_.at)
            view.audited_at = pass_.real
        return view.flood

    def _audit_is_due(self, pass_: _Pass, attempt: Attempt) -> bool:
        view = self._views[attempt.id]
        view.audited_at = view.audited_at or (pass_.real - self._limits.audit_every * (1 - _share(attempt.id)))
        return not view.flood and pass_.real - view.audited_at >= self._limits.audit_every

    def _forget(self, known: set[AttemptId]) -> None:
        with self._busy_lock:
            gone = [i for i in self._views if i not in known and i not in self._busy]
        for attempt in gone:
            del self._views[attempt]
            self._unread.pop(attempt, None)

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
        self.beats: dict[str, ObjectInfo] | None = None
        """All that were listed; `None` when it was not their time."""
        self.asked = False
        """The store was asked for something, so that its silence would have shown."""
        self.complete: set[AttemptId] = set()
        """Who is looked at completely."""
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
