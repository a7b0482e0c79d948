"""Looks at what the hosts of all counting attempts wrote, and says nothing where the store says nothing.

Theory. No report means "not known", and the core then holds: a store that is down must not look like a thousand hosts
falling silent. One look serves all attempts with a few threads and one deadline. Threads cannot be stopped, so a late
one is told to end, and the one attempt that it is busy with stays reserved until it did.

What a host wrote costs time to read, and how much it writes is its own choice. So a look first reads the short part of
every host, which tells who lives and how it ended, and then a share of what each has published, beginning with those
that had their turn longest ago. A host whose writing cannot be read at all costs its own reading and no other's.

A look begins with one listing of all beats (`beats.py`). Only hosts with news, without a beat to rely on, or that the
core wants to know more of are looked at completely; of the others a glance tells what is known. However often a look
is asked for, the beats are listed no more often than `list_every_s`: in between everybody is glanced at.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio

from spotd.core.attempts import Attempt
from spotd.core.host_status import HostStatus
from spotd.core.ids import AttemptId, JobId
from spotd.core.jobs import Job
from spotd.core.world import World
from spotd.daemon import object_keys
from spotd.daemon.controllers import Outage
from spotd.daemon.hosts.flood import FloodLimits, count
from spotd.daemon.hosts.host_reader import HostReader
from spotd.daemon.hosts.limits import HostShare
from spotd.daemon.hosts.liveness import STILL_SHARE, STRAYS_KEPT, delete_strays, is_quiet, list_beats, note_beat
from spotd.daemon.hosts.outputs import unreadable
from spotd.daemon.hosts.reader import look_at_checkpoints, look_at_news, report_of, told, with_job
from spotd.daemon.hosts.transfers import HostTransfer
from spotd.daemon.threads import Threads
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.reports import Heartbeat
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import ProviderName

THREADS: Final = 8
LOOK_DEADLINE_S: Final = 15.0
ATTEMPTS_PER_THREAD_MIN: Final = 16
"""Below this a further thread costs more than it saves on a folder."""
FAILURES_MAX: Final = 5
"""After so many looks in a row that failed by what one host wrote, it is judged by what is known of it."""
PROBE_EVERY: Final = timedelta(seconds=30)
"""How often the store is asked to take a write while a host is silent."""
PROBE_KEY: Final = "doctor/writes"
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
EARLY_SHARE: Final = 0.9
"""A look that comes so early lists the beats all the same: the next might come much later."""


class HostMonitor:
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
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._may_delete = may_delete
        self._ticks = ticks
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
        self._views: dict[AttemptId, HostReader] = {}
        self._busy: set[AttemptId] = set()
        """Whose host a thread is reading at this moment."""
        self._auditing = False
        self._probed_at: datetime | None = None
        self._writes_failed_at: datetime | None = None
        self._busy_lock = threading.Lock()
        self._threads = Threads(THREADS)
        self._outage = Outage(log, "checkpoint_store.away", "checkpoint_store.back")

    @property
    def last_error(self) -> str:
        """Why the last pass was not complete, empty when it was."""
        return self._outage.error

    def heartbeat(self, attempt: AttemptId) -> Heartbeat | None:
        """The newest sign of life of a host, as it was written."""
        view = self._views.get(attempt)
        return view.heartbeat if view is not None else None

    def heartbeat_at(self, attempt: AttemptId) -> datetime | None:
        """When that heartbeat was read."""
        view = self._views.get(attempt)
        return view.heartbeat_at if view is not None else None

    def transfer(self, attempt: AttemptId) -> HostTransfer | None:
        """What a host is moving now, as far as its newest heartbeats tell."""
        view = self._views.get(attempt)
        return view.transfers.now if view is not None else None

    def next_listing_s(self) -> float:
        """Seconds until a look will list the beats again."""
        if self._listed_at is None:
            return 0.0
        return max(0.0, (self._listed_at + self._list_every - self._wall.now()).total_seconds())

    async def look(self, world: World, closely: frozenset[AttemptId] = frozenset()) -> dict[AttemptId, HostStatus]:
        """One report for each counting attempt that could be looked at, or needed but a glance.

        `read_at` is the instant before the first read, so everything written before it is in a complete report.

        Args:
            closely: a glance will not do for these.
        """
        counting = [a for a in world.attempts.values() if a.state.counts]
        self._forget({a.id for a in world.attempts.values()})
        if not counting:
            self._outage.update("")
            return {}
        pass_ = _Pass(self._clock.now(), self._wall.now(), _speed(self._clock))
        with self._busy_lock:
            free = [a for a in counting if a.id not in self._busy]
        for attempt in free:
            self._views.setdefault(attempt.id, HostReader())
        if self._inline:
            self._list(pass_, world)
            for batch in self._batches(pass_, free, world, closely):
                self._work(pass_, batch, world.jobs)
            self._audits(pass_, free)
        else:
            await self._in_threads(pass_, free, world, closely)
        self._judge_odd(pass_)
        pass_.over = True
        if not pass_.last_error and len(pass_.reports) + len(pass_.odd) < len(counting):
            pass_.last_error = f"the checkpoint store did not answer within {self._deadline_s:.0f} s"
        if pass_.last_error or pass_.asked:
            self._outage.update(pass_.last_error)
        if self._writes_failed_at is not None:
            return {i: replace(report, store_takes_no_writes=True) for i, report in pass_.reports.items()}
        return dict(pass_.reports)

    def committed(self, reports: Mapping[AttemptId, HostStatus]) -> None:
        """What these reports told is durable."""
        for attempt, report in reports.items():
            view = self._views.get(attempt)
            if view is not None:
                told(view, report)

    def fresh(self, reports: Mapping[AttemptId, HostStatus], world: World) -> dict[AttemptId, HostStatus]:
        """The reports, of attempts that this newer world still has and without what it knows by now."""
        return {
            attempt: with_job(report, world.jobs[attempt.job])
            for attempt, report in reports.items()
            if attempt in world.attempts and attempt.job in world.jobs
        }

    def _list(self, pass_: _Pass, world: World) -> None:
        """The pass knows the beats, if it is time for them."""
        self._probe_writes(pass_, world)
        early = self._listed_at is not None and pass_.real - self._listed_at < self._list_every * EARLY_SHARE
        if early:
            return
        try:
            beats = list_beats(self._objects)
        except StoreError as exc:
            pass_.last_error = str(exc)
            return
        pass_.beats, pass_.asked = beats, True
        if not self._may_delete():
            return
        if self._strays_at is None or pass_.real - self._strays_at >= STRAYS_KEPT:
            self._strays_at = pass_.real
            delete_strays(self._objects, beats, {object_keys.liveness_key(i) for i in world.attempts}, real=pass_.real)

    def _probe_writes(self, pass_: _Pass, world: World) -> None:
        """Learn whether the store takes writes at all, while a host is silent that may be unable to write."""
        late = pass_.at - world.policy.silence_max * STILL_SHARE
        started = {n: pass_.at - rules.provision_timeout / 2 for n, rules in world.policy.providers.items()}
        items = world.attempts.values()
        if not any(self._is_late(item, late) or _starts_long(item, started) for item in items):
            self._writes_failed_at = None
            return
        if self._probed_at is not None and pass_.real - self._probed_at < PROBE_EVERY:
            return
        self._probed_at = pass_.real
        try:
            self._objects.put(PROBE_KEY, b"spotd")
        except StoreError:
            self._writes_failed_at = pass_.at
        else:
            self._forget_failed_write(pass_, world)

    def _forget_failed_write(self, pass_: _Pass, world: World) -> None:
        """Hosts could not write either, and none has had its turn to beat just after the store takes writes again."""
        failed_at = self._writes_failed_at
        if failed_at is not None and pass_.at - failed_at >= world.policy.silence_max:
            self._writes_failed_at = None

    def _is_late(self, item: Attempt, late: datetime) -> bool:
        view = self._views.get(item.id)
        marker_at = None if view is None else view.marker_at
        signs = [at for at in (item.heartbeat_seen_at, marker_at) if at is not None]
        return item.state.counts and item.heartbeat_seen_at is not None and max(signs) < late

    def _batches(
        self, pass_: _Pass, free: Iterable[Attempt], world: World, closely: frozenset[AttemptId]
    ) -> list[list[Attempt]]:
        """Who must be looked at, in shares; the others are reported as they are known."""
        if pass_.last_error or pass_.over:
            return []
        if pass_.beats is not None:
            self._listed_at = pass_.real
        due: list[Attempt] = []
        for attempt in free:
            view = self._views[attempt.id]
            if pass_.beats is not None:
                note_beat(view, pass_.beats.get(object_keys.liveness_key(attempt.id)), at=pass_.at)
                quiet = is_quiet(view, at=pass_.at, silence_max=world.policy.silence_max)
            else:
                quiet = not view.first_look
            if not quiet or attempt.id in closely:
                due.append(attempt)
            else:
                self._report(pass_, attempt, world.jobs[attempt.id.job], liveness_check=True)
        pass_.asked = pass_.asked or bool(due)
        due.sort(key=lambda attempt: self._views[attempt.id].served_at or _NEVER)
        return _split(due)

    def _report(self, pass_: _Pass, attempt: Attempt, job: Job, *, liveness_check: bool) -> None:
        """What is known of the host now, unless it is too late to say so."""
        view = self._views[attempt.id]
        report = report_of(view, attempt, job, at=pass_.at, virtual=pass_.virtual, liveness_check=liveness_check)
        if not pass_.over:
            pass_.reports[attempt.id] = report

    async def _in_threads(
        self, pass_: _Pass, free: Sequence[Attempt], world: World, closely: frozenset[AttemptId]
    ) -> None:
        with anyio.move_on_after(self._deadline_s):
            await self._threads.run(partial(self._list, pass_, world))
            batches = self._batches(pass_, free, world, closely)
            async with anyio.create_task_group() as group:
                for number, batch in enumerate(batches):
                    work = partial(self._work, pass_, batch, world.jobs)
                    group.start_soon(self._threads.run, work, name=f"hosts-{number}")
                group.start_soon(self._threads.run, partial(self._audits, pass_, free), name="audits")

    def _work(self, pass_: _Pass, batch: Sequence[Attempt], jobs: Mapping[JobId, Job]) -> None:
        """One thread's part of the look: first what is short of every host, then a share of what each published."""
        readable: list[Attempt] = []
        for attempt in batch:
            share = HostShare(ticks=self._ticks, over=lambda: pass_.over)
            if self._one_host(pass_, attempt, jobs, partial(self._news, pass_, attempt, share)):
                readable.append(attempt)
        for attempt in readable:
            share = HostShare(ticks=self._ticks, over=lambda: pass_.over)
            self._one_host(
                pass_, attempt, jobs, partial(self._checkpoints, pass_, attempt, jobs[attempt.id.job], share)
            )

    def _one_host(self, pass_: _Pass, attempt: Attempt, jobs: Mapping[JobId, Job], work: Callable[[], None]) -> bool:
        """Whether the work was done for this host; what it raises costs this host's reading only.

        The first failure to reach the store ends the look: the rest would only fail more slowly.
        """
        with self._busy_lock:
            if pass_.over or pass_.last_error or attempt.id in self._busy or attempt.id not in self._views:
                return False
            self._busy.add(attempt.id)
        view = self._views[attempt.id]
        try:
            work()
        except StoreUnavailable as exc:
            pass_.last_error = str(exc)
            pass_.reports.pop(attempt.id, None)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever one host wrote, the others must go on being watched
            self._unreadable(pass_, view, attempt, jobs[attempt.id.job], exc)
            return False
        finally:
            with self._busy_lock:
                self._busy.discard(attempt.id)
        return True

    def _news(self, pass_: _Pass, attempt: Attempt, share: HostShare) -> None:
        look_at_news(self._objects, self._views[attempt.id], attempt, share, at=pass_.at)

    def _checkpoints(self, pass_: _Pass, attempt: Attempt, job: Job, share: HostShare) -> None:
        view = self._views[attempt.id]
        self._report(pass_, attempt, job, liveness_check=True)  # who lives is known, however long the rest takes
        view.served_at = pass_.real
        look_at_checkpoints(self._objects, view, attempt, job, share, at=pass_.at, virtual=pass_.virtual)
        view.failures = 0
        pass_.read = True
        self._report(pass_, attempt, job, liveness_check=False)

    def _unreadable(self, pass_: _Pass, view: HostReader, attempt: Attempt, job: Job, error: Exception) -> None:
        """The host goes without a report for a while; then it is judged by what is known of it."""
        view.failures += 1
        view.complain("all", f"what the host wrote cannot be read: {type(error).__name__}", pass_.at)
        if view.failures == 1:
            self._log.warning("host.not_readable", attempt=attempt.key, error=str(error)[:500], exc_info=error)
        pass_.odd[attempt.id] = (attempt, job, error)

    def _judge_odd(self, pass_: _Pass) -> None:
        """What a store refuses of every host is not the hosts' doing: then nothing is known of any."""
        refused = [error for _, _, error in pass_.odd.values() if isinstance(error, StoreError)]
        if refused and not pass_.read:
            pass_.last_error = pass_.last_error or str(refused[0])
            return
        for attempt, job, error in pass_.odd.values():
            view = self._views[attempt.id]
            if view.failures >= FAILURES_MAX:
                view.behind = False
                if view.lacks_outputs:
                    view.outputs = unreadable(error)
                self._report(pass_, attempt, job, liveness_check=False)

    def _audits(self, pass_: _Pass, free: Sequence[Attempt]) -> None:
        """Count what hosts wrote, where it is time; what a long count finds is told in the next look."""
        with self._busy_lock:
            if self._auditing:
                return
            self._auditing = True
        try:
            for attempt in free:
                view = self._views.get(attempt.id)
                if pass_.over or pass_.last_error or view is None or not self._audit_is_due(pass_, view, attempt):
                    continue
                try:
                    counted = count(self._objects, attempt, self._limits, at=pass_.at)
                    view.flood, view.stored_bytes = counted.flood, counted.bytes
                except StoreUnavailable as exc:
                    pass_.last_error = str(exc)
                    return
                except StoreError as exc:
                    self._log.warning("host.uncounted", attempt=attempt.key, error=str(exc))
                view.audited_at = pass_.real
                if view.flood and attempt.id in pass_.reports and not pass_.over:
                    pass_.reports[attempt.id] = replace(pass_.reports[attempt.id], flood=view.flood)
        finally:
            with self._busy_lock:
                self._auditing = False

    def _audit_is_due(self, pass_: _Pass, view: HostReader, attempt: Attempt) -> bool:
        view.audited_at = view.audited_at or (pass_.real - self._limits.audit_every * (1 - _share(attempt.id)))
        return not view.flood and pass_.real - view.audited_at >= self._limits.audit_every

    def _forget(self, known: set[AttemptId]) -> None:
        with self._busy_lock:
            gone = [i for i in self._views if i not in known and i not in self._busy]
        for attempt in gone:
            del self._views[attempt]


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
        self.reports: dict[AttemptId, HostStatus] = {}
        self.odd: dict[AttemptId, tuple[Attempt, Job, Exception]] = {}
        """Whose writing could not be read, and why."""
        self.read = False
        """Some host's writing could be."""
        self.last_error = ""
        self.over = False

    def virtual(self, real: datetime) -> datetime:
        """The daemon's instant of a moment on the wall clock; a host's word for it may be anything."""
        try:
            return self.at + (real - self.real) * self._speed
        except OverflowError:
            return self.at


def _starts_long(item: Attempt, since: Mapping[ProviderName, datetime]) -> bool:
    """Whether the machine has not spoken in half of the time that its provider has for a start."""
    if not item.state.counts or item.heartbeat_seen_at is not None or item.launched_at is None:
        return False
    return item.provider in since and item.launched_at < since[item.provider]


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
