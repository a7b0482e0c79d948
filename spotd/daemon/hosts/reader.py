"""What one host wrote, read as untrusted input and remembered between reads.

Theory. The order of reading is the reverse of the order of writing: the runner publishes chunks, then the manifest,
then the event that names it. Heartbeat, events and manifests are read in this order, so that a read that shows the exit
also shows every checkpoint published before it. A read that had to leave manifests for the next one does not show the
exit yet, and is no more than a liveness check.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import ExitCause, HostStatus
from spotd.core.domain.jobs import Job
from spotd.core.domain.progress import HostSample
from spotd.daemon.hosts.events import read_events, read_heartbeat
from spotd.daemon.hosts.host_reader import HostReader, HostReading, RealToVirtual
from spotd.daemon.hosts.limits import HostShare
from spotd.daemon.hosts.manifests import read_manifests
from spotd.daemon.hosts.outputs import OutputsSeen, outputs_of, with_lost
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.reports import Exit, Heartbeat, Outcome

NOTICE_SPAN_MAX: Final = timedelta(days=30)
SHARES_OF_ONE_READ: Final = 20
"""A read of one host alone goes on for so many shares."""

_CAUSES: Final = {
    Outcome.SUCCEEDED: ExitCause.FINISHED,
    Outcome.FAILED: ExitCause.FINISHED,
    Outcome.SETUP_FAILED: ExitCause.SETUP_FAILED,
    Outcome.CODE_UNUSABLE: ExitCause.CODE_UNUSABLE,
    Outcome.INPUT_UNUSABLE: ExitCause.INPUT_UNUSABLE,
    Outcome.DISK_FULL: ExitCause.DISK_FULL,
    Outcome.PREEMPTED: ExitCause.NOTICE,
    Outcome.STOPPED: ExitCause.STOPPED,
    Outcome.LEASE_EXPIRED: ExitCause.LEASE,
    Outcome.NOT_CURRENT: ExitCause.RUNNER_FAILED,
    Outcome.RUNNER_ERROR: ExitCause.RUNNER_FAILED,
}


def read_host(
    objects: ObjectStore, view: HostReader, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual
) -> HostStatus:
    """Return everything that the host wrote until now.

    Raises:
        StoreError: the store does not answer, or refuses to, so nothing can be said.
    """
    reading = HostReading(
        objects=objects, view=view, attempt=attempt, job=job, share=HostShare(), at=at, virtual=virtual
    )
    read_news(reading)
    for _ in range(SHARES_OF_ONE_READ):
        read_published(replace(reading, share=HostShare()))
        if not view.behind:
            break
    return report_of(view, attempt, job, at=at, virtual=virtual)


def read_news(reading: HostReading) -> None:
    """Read the short part: that it lives, what happened, how it ended.

    Raises:
        StoreError
    """
    view = reading.view
    view.news_before = -1 if view.marker is None else view.marker.size
    # A read that is broken off has left everything, and what was published before an end is read after it.
    view.unfinished, view.behind, view.left = True, True, False
    if view.relearns is None:
        view.relearns = reading.attempt.read_at is not None
    read_heartbeat(reading)
    read_events(reading, is_new=not view.relearns)
    view.relearns = view.relearns and view.left


def read_published(reading: HostReading) -> None:
    """Read the long part: what it published, and its outputs once it has ended well.

    Raises:
        StoreError
    """
    read_manifests(reading)
    view, ended = reading.view, reading.view.exit
    if ended is not None and not view.behind and view.outputs is None and ended.outcome is Outcome.SUCCEEDED:
        found = outputs_of(reading.objects, reading.attempt, reading.job.spec.outputs)
        view.outputs = with_lost(found, ended.outputs_lost)
    view.notes += view.ration.folded(reading.at, is_end=ended is not None and not view.behind)
    view.unfinished = view.left or view.behind
    view.is_unread = False
    view.news_read = view.news_before


def report_of(
    view: HostReader, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual, liveness_check: bool = False
) -> HostStatus:
    """Return what is known of the host, without asking the store for anything."""
    known = {c.manifest_key for c in job.checkpoints} if view.accepted else frozenset()
    heartbeat, ended = view.heartbeat, None if view.behind or view.lacks_outputs else view.exit
    outputs = view.outputs or OutputsSeen()
    notice = heartbeat.notice if heartbeat is not None else None
    behind = timedelta(0) if heartbeat is None else clock_behind(virtual(heartbeat.at), view.written_after)
    return HostStatus(
        attempt=attempt.id,
        read_at=at,
        liveness_check=liveness_check or view.behind,
        marker_at=view.marker_at,
        flood=view.flood,
        upload_progress="" if heartbeat is None else _progress_of(heartbeat),
        seq=heartbeat.seq if heartbeat is not None else -1,
        phase=heartbeat.phase.value if heartbeat is not None else "",
        checkpoints=tuple(c for key, c in view.accepted.items() if key not in known),
        unannounced=frozenset(view.unannounced),
        resumed_from=view.resumed_from,
        exit_cause=_CAUSES[ended.outcome] if ended is not None else None,
        exit_code=_exit_code(ended),
        exit_detail=ended.reason if ended is not None else "",
        outputs_sha256=outputs.sha256,
        outputs_bytes=outputs.bytes,
        outputs_problem=outputs.problem,
        outputs_lost=outputs.lost,
        notice_at=None if notice is None else _near(virtual(notice.at), at) if notice.at is not None else at,
        notes=tuple(view.notes),
        fallbacks=tuple(view.fallbacks),
        alive_at=None if heartbeat is None else later(virtual(heartbeat.at), behind, at),
        exit_at=None if view.exit_at is None else later(virtual(view.exit_at), behind, at),
        script_began_at=None if heartbeat is None else _script_began(heartbeat, at=at, virtual=virtual),
        stored_bytes=view.stored_bytes,
        uploads={key: size for key, size in view.uploads.items() if key in view.accepted},
        save_time=None if view.save_s is None or heartbeat is None else _virtual_span(heartbeat, view.save_s, virtual),
        restored_bytes=heartbeat.restore.bytes_done if heartbeat is not None and heartbeat.restore is not None else 0,
        data_bytes=heartbeat.data.bytes_done if heartbeat is not None and heartbeat.data is not None else 0,
        up=None if heartbeat is None else _virtual_span(heartbeat, heartbeat.up_s, virtual),
        sample=None if heartbeat is None else _sample_of(heartbeat, virtual),
    )


def _virtual_span(heartbeat: Heartbeat, seconds: float, virtual: RealToVirtual) -> timedelta:
    """Return the daemon's span of so many seconds on the host."""
    return max(timedelta(0), virtual(heartbeat.at) - virtual(heartbeat.at - timedelta(seconds=seconds)))


def _sample_of(heartbeat: Heartbeat, virtual: RealToVirtual) -> HostSample | None:
    """Return what the heartbeat states of progress, if its job is watched."""
    stated, seen = heartbeat.progress, heartbeat.seen
    if stated is None:
        return None

    def span(seconds: float | None) -> timedelta | None:
        return None if seconds is None else _virtual_span(heartbeat, seconds, virtual)

    return HostSample(
        boot=heartbeat.boot,
        up=_virtual_span(heartbeat, heartbeat.up_s, virtual),
        phase=heartbeat.phase.value,
        printed=stated.printed,
        writes=stated.writes,
        seen="" if seen is None else f"{seen.name}:{seen.step}:{seen.at.isoformat()}",
        gpu_time=span(stated.gpu_s),
        gpu_busy=span(stated.gpu_busy_s),
    )


def clock_behind(stated: datetime, written_after: datetime | None) -> timedelta:
    """Return by how much at least the clock of a host is behind that dates its newest heartbeat so."""
    return timedelta(0) if written_after is None else max(timedelta(0), written_after - stated)


def later(stated: datetime, behind: timedelta, at: datetime) -> datetime:
    """Return the instant that a host whose clock is behind states, no later than the read where it is moved."""
    if not behind:
        return stated
    return at if stated > at - behind else stated + behind


def _near(stated: datetime, at: datetime) -> datetime:
    """Return when the machine goes, as its host states it, no further from now than any provider announces it."""
    return min(max(stated, at - NOTICE_SPAN_MAX), at + NOTICE_SPAN_MAX)


def _script_began(heartbeat: Heartbeat, *, at: datetime, virtual: RealToVirtual) -> datetime:
    """Return when its start script began, as the host states it; a clock that runs ahead makes it no later than now."""
    written = virtual(heartbeat.at)
    age = written - virtual(heartbeat.at - timedelta(seconds=heartbeat.up_s))
    return min(written, at) - age


def _progress_of(heartbeat: Heartbeat) -> str:
    up = heartbeat.upload
    return "" if up.name is None else f"{up.name}:{up.bytes_done}:{up.queued}"


def _exit_code(ended: Exit | None) -> int | None:
    if ended is None:
        return None
    if ended.exit_code is None and ended.signal is not None:
        return 128 + ended.signal
    return ended.exit_code


def drop_committed(view: HostReader, report: HostStatus) -> None:
    """Drop the report's notes and checkpoints, which are durable: they are not reported again."""
    view.notes = view.notes[len(report.notes) :]
    view.fallbacks = view.fallbacks[len(report.fallbacks) :]
    for checkpoint in report.checkpoints:
        view.accepted.pop(checkpoint.manifest_key, None)
        view.uploads.pop(checkpoint.manifest_key, None)
        view.unannounced.discard(checkpoint.manifest_key)


def with_job(report: HostStatus, job: Job) -> HostStatus:
    """Return the report without checkpoints that the job knows by now."""
    if not report.checkpoints:
        return report
    known = {(c.attempt, c.name) for c in job.checkpoints}
    fresh = tuple(c for c in report.checkpoints if (c.attempt, c.name) not in known)
    return replace(report, checkpoints=fresh)
