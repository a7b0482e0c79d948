"""Reads what the hosts of all counting attempts wrote, and reports nothing where the store does not answer.

Theory. No report means "not known", and the core then holds: a store that is down must not be taken for a thousand
hosts falling silent. One read serves all attempts with a few threads and one deadline. Threads cannot be stopped, so a
late one is ordered to end, and the one attempt that it is busy with stays reserved until it did.

What a host wrote costs time to read, and how much it writes is its own choice. So the short part of every host is read
first, which shows that it lives and how it ended, and then a share of what each has published, beginning with those
that had their turn longest ago. A host whose writing cannot be read at all costs its own reading and no other's.

It begins with one listing of all liveness markers (`liveness.py`). Only hosts with news, without a marker to rely on,
or that the core wants to know more of are read in full; of the others a liveness check reports what is known. However
often hosts are to be read, the markers are listed no more often than `list_every_s`: in between all get a liveness
check.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio

from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.commits import Threads
from spotd.daemon.controllers import Outage
from spotd.daemon.hosts.host_reader import GpuSample, ReadMemory, ReadScope, unreadable
from spotd.daemon.hosts.limits import FloodLimits, HostShare, HostTransfer, count
from spotd.daemon.hosts.liveness import STRAYS_KEPT, WriteProbe, delete_strays, is_quiet, list_markers, note_marker
from spotd.daemon.hosts.reader import drop_committed, read_host, read_news, read_published, report_of, with_job
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.reports import Heartbeat
from spotd_providers.contract.provider import Clock, Logger

THREADS: Final = 8
READ_DEADLINE_S: Final = 15.0
ATTEMPTS_PER_THREAD_MIN: Final = 16
"""Below this a further thread costs more than it saves on a folder."""
COUNTED_OFTENER: Final = 5
"""What a machine uploads after its attempt is over is known by counting alone."""
FAILURES_MAX: Final = 5
"""After so many reads in a row that failed by what one host wrote, it is judged by what is known of it."""
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
EARLY_SHARE: Final = 0.9
"""Part of `list_every_s` after which the markers are listed again: the next read might come much later."""


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
        deadline_s: float = READ_DEADLINE_S,
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
        self._views: dict[AttemptId, ReadMemory] = {}
        self._busy: set[AttemptId] = set()
        """Whose host a thread is reading at this moment."""
        self._auditing = False
        self._write_probe = WriteProbe(objects, self._marker_at)
        self._busy_lock = threading.Lock()
        self._threads = Threads(THREADS)
        self._outage = Outage(log, "checkpoint_store.away", "checkpoint_store.back")

    @property
    def last_error(self) -> str:
        """Why the last pass was not complete, empty when it was."""
        return self._outage.error

    def heartbeat(self, attempt: AttemptId) -> Heartbeat | None:
        """Return the newest heartbeat of a host, as it was written."""
        view = self._views.get(attempt)
        return view.heartbeat if view is not None else None

    def heartbeat_at(self, attempt: AttemptId) -> datetime | None:
        """When that heartbeat was read."""
        view = self._views.get(attempt)
        return view.heartbeat_at if view is not None else None

    def gpu_samples(self, attempt: AttemptId) -> list[GpuSample]:
        """Return what the GPUs of a host did, oldest first, as far as this process has read it."""
        view = self._views.get(attempt)
        return [] if view is None else list(view.gpu_history.samples())

    def phase_at(self, attempt: AttemptId) -> datetime | None:
        """When the phase of that heartbeat was first read, if it was not read by a former process."""
        view = self._views.get(attempt)
        return view.phase_at if view is not None else None

    def transfer(self, attempt: AttemptId) -> HostTransfer | None:
        """Return what a host is moving now, as far as its newest heartbeats show it."""
        view = self._views.get(attempt)
        return view.transfers.now if view is not None else None

    def next_listing_s(self) -> float:
        """Return the seconds until the markers are listed again."""
        if self._listed_at is None:
            return 0.0
        return max(0.0, (self._listed_at + self._list_every - self._wall.now()).total_seconds())

    async def read_hosts(
        self, world: World, closely: frozenset[AttemptId] = frozenset()
    ) -> dict[AttemptId, HostStatus]:
        """Return a report for each counting attempt that could be read, or needed a liveness check only.

        `read_at` is the instant before the first read, so everything written before it is in a full report. Of an
        attempt that is over and whose machine may still upload, only the bytes are reported.

        Args:
            closely: these need a full read.
        """
        counting = [a for a in world.attempts.values() if a.state.counts]
        over = [a for a in world.attempts.values() if not a.state.counts and a.machine is not MachineState.GONE]
        self._forget({a.id for a in world.attempts.values()})
        if not counting and not over:
            self._outage.update("")
            return {}
        pass_ = _Pass(self._clock.now(), self._wall.now(), _speed(self._clock), world.policy)
        with self._busy_lock:
            free = [a for a in counting if a.id not in self._busy]
        for attempt in (*free, *over):
            self._views.setdefault(attempt.id, ReadMemory())
        if self._inline:
            self._list(pass_, world)
            for batch in self._batches(pass_, free, world, closely):
                self._work(pass_, batch, world.jobs)
            self._audits(pass_, [*free, *over])
        else:
            await self._in_threads(pass_, free, over, world, closely)
        self._judge_odd(pass_)
        pass_.over = True
        if not pass_.last_error and len(pass_.reports) + len(pass_.odd) < len(counting):
            pass_.last_error = f"the checkpoint store did not answer within {self._deadline_s:.0f} s"
        if pass_.last_error or pass_.asked:
            self._outage.update(pass_.last_error)
        for attempt in over:
            if stored := self._views[attempt.id].stored_bytes:
                status = HostStatus(attempt=attempt.id, read_at=pass_.at, liveness_check=True, stored_bytes=stored)
                pass_.reports[attempt.id] = status
        if self._write_probe.has_failed:
            return {i: replace(report, store_takes_no_writes=True) for i, report in pass_.reports.items()}
        return dict(pass_.reports)

    def read_alone(self, attempt: Attempt, job: Job) -> HostStatus | None:
        """Return all that one host wrote until now, apart from the reads of all; `None` if no read can understand it.

        Raises:
            StoreError: the store does not answer, or refuses to read what no host wrote, too.
        """
        pass_ = _Pass(self._clock.now(), self._wall.now(), _speed(self._clock))
        try:
            return read_host(self._objects, ReadMemory(), attempt, job, at=pass_.at, dated=pass_.dated)
        except StoreUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the host wrote, its owner must be able to give it up
            # Where the store refuses what no host can write, too, it is not this host's doing, and nothing is known.
            next(iter(self._objects.list(object_keys.launches_prefix(job.id))), None)
            self._objects.head(object_keys.launch_key(job.id, attempt.id.number))
            self._log.warning("host.not_readable", attempt=attempt.key, error=str(exc)[:500], exc_info=exc)
            return None

    def committed(self, reports: Mapping[AttemptId, HostStatus]) -> None:
        """Note that what these reports hold is durable."""
        for attempt, report in reports.items():
            view = self._views.get(attempt)
            if view is not None:
                drop_committed(view, report)

    def fresh(self, reports: Mapping[AttemptId, HostStatus], world: World) -> dict[AttemptId, HostStatus]:
        """Return the reports, of attempts that this newer world still has and without what it knows by now."""
        return {
            attempt: with_job(report, world.jobs[attempt.job])
            for attempt, report in reports.items()
            if attempt in world.attempts and attempt.job in world.jobs
        }

    def _list(self, pass_: _Pass, world: World) -> None:
        """List the markers, if it is time for that."""
        self._write_probe.update(world, at=pass_.at, real=pass_.real)
        early = self._listed_at is not None and pass_.real - self._listed_at < self._list_every * EARLY_SHARE
        if early:
            return
        try:
            markers = list_markers(self._objects)
        except StoreError as exc:
            pass_.last_error = str(exc)
            return
        pass_.markers, pass_.asked = markers, True
        if not self._may_delete():
            return
        if self._strays_at is None or pass_.real - self._strays_at >= STRAYS_KEPT:
            self._strays_at = pass_.real
            delete_strays(
                self._objects, markers, {object_keys.liveness_key(i) for i in world.attempts}, real=pass_.real
            )

    def _marker_at(self, attempt: AttemptId) -> datetime | None:
        view = self._views.get(attempt)
        return view.marker_at if view is not None else None

    def _batches(
        self, pass_: _Pass, free: Iterable[Attempt], world: World, closely: frozenset[AttemptId]
    ) -> list[list[Attempt]]:
        """Return the hosts that must be read in full, in shares; the others are reported as they are known."""
        if pass_.last_error or pass_.over:
            return []
        if pass_.markers is not None:
            self._listed_at = pass_.real
        due: list[Attempt] = []
        for attempt in free:
            view = self._views[attempt.id]
            if pass_.markers is not None:
                note_marker(view, pass_.markers.get(object_keys.liveness_key(attempt.id)), at=pass_.at)
                quiet = is_quiet(view, at=pass_.at, silence_max=world.policy.silence_max)
            else:
                quiet = not view.is_unread
            if not quiet or attempt.id in closely:
                due.append(attempt)
            else:
                self._report(pass_, attempt, world.jobs[attempt.id.job], liveness_check=True)
        pass_.asked = pass_.asked or bool(due)
        due.sort(key=lambda attempt: self._views[attempt.id].served_at or _NEVER)
        return _split(due)

    def _report(self, pass_: _Pass, attempt: Attempt, job: Job, *, liveness_check: bool) -> None:
        """Report what is known of the host now, unless it is too late for that."""
        view = self._views[attempt.id]
        report = report_of(view, attempt, job, at=pass_.at, dated=pass_.dated, liveness_check=liveness_check)
        if not pass_.over:
            pass_.reports[attempt.id] = report

    async def _in_threads(
        self,
        pass_: _Pass,
        free: Sequence[Attempt],
        over: Sequence[Attempt],
        world: World,
        closely: frozenset[AttemptId],
    ) -> None:
        with anyio.move_on_after(self._deadline_s):
            await self._threads.run(partial(self._list, pass_, world))
            batches = self._batches(pass_, free, world, closely)
            async with anyio.create_task_group() as group:
                for number, batch in enumerate(batches):
                    work = partial(self._work, pass_, batch, world.jobs)
                    group.start_soon(self._threads.run, work, name=f"hosts-{number}")
                group.start_soon(self._threads.run, partial(self._audits, pass_, [*free, *over]), name="audits")

    def _work(self, pass_: _Pass, batch: Sequence[Attempt], jobs: Mapping[JobId, Job]) -> None:
        """Do one thread's part: first the short part of every host, then a share of what each published."""
        readable = [a for a in batch if self._one_host(pass_, a, jobs[a.id.job], read_news)]
        for attempt in readable:
            self._one_host(pass_, attempt, jobs[attempt.id.job], partial(self._read_published, pass_))

    def _one_host(self, pass_: _Pass, attempt: Attempt, job: Job, read: Callable[[ReadScope], None]) -> bool:
        """Whether this host was read; what it raises costs this host's reading only.

        The first failure to reach the store ends the read of all hosts: the rest would only fail more slowly.
        """
        with self._busy_lock:
            if pass_.over or pass_.last_error or attempt.id in self._busy or attempt.id not in self._views:
                return False
            self._busy.add(attempt.id)
        view = self._views[attempt.id]
        share = HostShare(ticks=self._ticks, over=lambda: pass_.over)
        try:
            read(
                ReadScope(
                    objects=self._objects,
                    view=view,
                    attempt=attempt,
                    job=job,
                    share=share,
                    at=pass_.at,
                    dated=pass_.dated,
                    policy=pass_.policy,
                )
            )
        except StoreUnavailable as exc:
            pass_.last_error = str(exc)
            pass_.reports.pop(attempt.id, None)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever one host wrote, the others must go on being watched
            self._unreadable(pass_, view, attempt, job, exc)
            return False
        finally:
            with self._busy_lock:
                self._busy.discard(attempt.id)
        return True

    def _read_published(self, pass_: _Pass, reading: ReadScope) -> None:
        view, attempt, job = reading.view, reading.attempt, reading.job
        self._report(pass_, attempt, job, liveness_check=True)  # that it lives is known, however long the rest takes
        view.served_at = pass_.real
        read_published(reading)
        view.failures = 0
        pass_.read = True
        self._report(pass_, attempt, job, liveness_check=False)

    def _unreadable(self, pass_: _Pass, view: ReadMemory, attempt: Attempt, job: Job, error: Exception) -> None:
        """Leave the host without a report for a while; then it is judged by what is known of it."""
        view.failures += 1
        view.complain("all", f"what the host wrote cannot be read: {type(error).__name__}", pass_.at)
        if view.failures == 1:
            self._log.warning("host.not_readable", attempt=attempt.key, error=str(error)[:500], exc_info=error)
        pass_.odd[attempt.id] = (attempt, job, error)

    def _judge_odd(self, pass_: _Pass) -> None:
        """Report on hosts that cannot be read; if the store refuses all of them, nothing is known of any."""
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
        """Count what hosts wrote, where it is time; what a long count finds is reported by the next read."""
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

    def _audit_is_due(self, pass_: _Pass, view: ReadMemory, attempt: Attempt) -> bool:
        every = self._limits.audit_every if attempt.state.counts else self._limits.audit_every / COUNTED_OFTENER
        view.audited_at = view.audited_at or (pass_.real - every * (1 - _share(attempt.id)))
        return not view.flood and pass_.real - view.audited_at >= every

    def _forget(self, known: set[AttemptId]) -> None:
        with self._busy_lock:
            gone = [i for i in self._views if i not in known and i not in self._busy]
        for attempt in gone:
            del self._views[attempt]


class _Pass:
    """One read of all hosts: its instant, on both clocks, and what it has found so far."""

    def __init__(self, at: datetime, real: datetime, speed: float, policy: Policy | None = None) -> None:
        self.at = at
        self.policy = policy
        self.real = real
        self._speed = speed
        self.markers: dict[str, ObjectInfo] | None = None
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

    def dated(self, real: datetime) -> datetime:
        """Return the daemon's instant of a moment on the wall clock, for which a host may state anything."""
        try:
            return self.at + (real - self.real) * self._speed
        except OverflowError:
            return self.at


def _share(attempt: AttemptId) -> float:
    """Return a number from 0 to 1, so that a restarted daemon does not count everything at once."""
    return (zlib.crc32(f"{attempt.job}/{attempt.number}".encode()) % 1000) / 1000


def _speed(clock: Clock) -> float:
    return 1 / clock.real_seconds(timedelta(seconds=1))


def _split(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Return as many shares as threads are worth it."""
    everything = list(attempts)
    count = max(1, min(THREADS, len(everything) // ATTEMPTS_PER_THREAD_MIN))
    return [everything[start::count] for start in range(count)]


# How much the GPUs of a machine are used, as its heartbeat states it.


FRESH_FOR: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The mean over the GPUs of one machine, each from 0 to 1; `None` where unknown."""

    gpu: float | None = None
    memory: float | None = None


def use_of(hosts: HostMonitor, attempt: AttemptId, now: datetime) -> HostUse:
    """Return what the newest heartbeat states, as far as it does; nothing where it is old."""
    heartbeat, at = hosts.heartbeat(attempt), hosts.heartbeat_at(attempt)
    gpus = () if heartbeat is None or at is None or now - at > FRESH_FOR else heartbeat.gpus
    memory = [
        min(1.0, gpu.mem_used_mb / gpu.mem_total_mb) for gpu in gpus if gpu.mem_used_mb is not None and gpu.mem_total_mb
    ]
    return HostUse(gpu=_mean(gpu.util_pct / 100 for gpu in gpus if gpu.util_pct is not None), memory=_mean(memory))


def _mean(figures: Iterable[float]) -> float | None:
    found = list(figures)
    return sum(found) / len(found) if found else None
