"""What one host wrote, read with suspicion and remembered between looks.

Theory. The order of reading is the reverse of the order of writing: the runner publishes chunks, then the manifest,
then the event that speaks of it. Reading heartbeat, events and manifests in this order means that whoever sees the
exit also sees every checkpoint published before it. A look that had to leave manifests for the next one does not tell
the exit yet, and is no more than a glance.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.host_status import ExitCause, HostStatus
from spotd.core.jobs import Job
from spotd.daemon.hosts.events import read_events, read_heartbeat
from spotd.daemon.hosts.host_reader import HostReader, RealToVirtual
from spotd.daemon.hosts.limits import HostShare
from spotd.daemon.hosts.manifests import read_manifests
from spotd.daemon.hosts.outputs import OutputsSeen, outputs_of, with_lost
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.reports import Exit, Heartbeat, Outcome

NOTICE_SPAN_MAX: Final = timedelta(days=30)
SHARES_OF_ONE_LOOK: Final = 20
"""A look at one host alone goes on for so many shares."""

_CAUSES: Final = {
    Outcome.SUCCEEDED: ExitCause.FINISHED,
    Outcome.FAILED: ExitCause.FINISHED,
    Outcome.SETUP_FAILED: ExitCause.SETUP_FAILED,
    Outcome.CODE_UNUSABLE: ExitCause.CODE_UNUSABLE,
    Outcome.DISK_FULL: ExitCause.DISK_FULL,
    Outcome.PREEMPTED: ExitCause.NOTICE,
    Outcome.STOPPED: ExitCause.STOPPED,
    Outcome.LEASE_EXPIRED: ExitCause.LEASE,
    Outcome.NOT_CURRENT: ExitCause.RUNNER_FAILED,
    Outcome.RUNNER_ERROR: ExitCause.RUNNER_FAILED,
}


def look(
    objects: ObjectStore, view: HostReader, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual
) -> HostStatus:
    """Everything the host wrote until now.

    Raises:
        StoreError: the store does not answer, or refuses to, so nothing can be said.
    """
    look_at_news(objects, view, attempt, HostShare(), at=at)
    for _ in range(SHARES_OF_ONE_LOOK):
        look_at_checkpoints(objects, view, attempt, job, HostShare(), at=at, virtual=virtual)
        if not view.behind:
            break
    return report_of(view, attempt, job, at=at, virtual=virtual)


def look_at_news(objects: ObjectStore, view: HostReader, attempt: Attempt, share: HostShare, *, at: datetime) -> None:
    """Read the short part: who lives, what happened, how it ended.

    Raises:
        StoreError
    """
    view.news_before = -1 if view.beat is None else view.beat.size
    # A look that is broken off has left everything, and what was published before an end is read after it.
    view.unfinished, view.behind, view.left = True, True, False
    if view.relearns is None:
        view.relearns = attempt.read_at is not None
    read_heartbeat(objects, view, attempt, at=at)
    read_events(objects, view, attempt, share, at=at, tell=not view.relearns)
    view.relearns = view.relearns and view.left


def look_at_checkpoints(
    objects: ObjectStore,
    view: HostReader,
    attempt: Attempt,
    job: Job,
    share: HostShare,
    *,
    at: datetime,
    virtual: RealToVirtual,
) -> None:
    """Read the long part: what it published, and its outputs once it has ended well.

    Raises:
        StoreError
    """
    read_manifests(objects, view, attempt, job, share, at=at, virtual=virtual)
    ended = view.exit
    if ended is not None and not view.behind and view.outputs is None and ended.outcome is Outcome.SUCCEEDED:
        view.outputs = with_lost(outputs_of(objects, attempt, job.spec.outputs), ended.outputs_lost)
    view.notes += view.ration.folded(at, is_end=ended is not None and not view.behind)
    view.unfinished = view.left or view.behind
    view.first_look = False
    view.news_read = view.news_before


def report_of(
    view: HostReader, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual, liveness_check: bool = False
) -> HostStatus:
    """What is known of the host, without asking the store for anything."""
    known = {c.manifest_key for c in job.checkpoints} if view.accepted else frozenset()
    beat, ended = view.heartbeat, None if view.behind or view.lacks_outputs else view.exit
    outputs = view.outputs or OutputsSeen()
    notice = beat.notice if beat is not None else None
    return HostStatus(
        attempt=attempt.id,
        read_at=at,
        liveness_check=liveness_check or view.behind,
        marker_at=view.marker_at,
        flood=view.flood,
        upload_progress="" if beat is None else _progress_of(beat),
        seq=beat.seq if beat is not None else -1,
        phase=beat.phase.value if beat is not None else "",
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
        alive_at=None if beat is None else virtual(beat.at),
        exit_at=None if view.exit_at is None else virtual(view.exit_at),
        script_began_at=None if beat is None else _script_began(beat, at=at, virtual=virtual),
        stored_bytes=view.stored_bytes,
        uploads={key: size for key, size in view.uploads.items() if key in view.accepted},
        restored_bytes=beat.restore.bytes_done if beat is not None and beat.restore is not None else 0,
    )


def _near(stated: datetime, at: datetime) -> datetime:
    """When the machine goes, as its host states it, no further from now than any provider announces it."""
    return min(max(stated, at - NOTICE_SPAN_MAX), at + NOTICE_SPAN_MAX)


def _script_began(beat: Heartbeat, *, at: datetime, virtual: RealToVirtual) -> datetime:
    """When the host says that its start script began; a clock that runs ahead makes it no later than our look."""
    written = virtual(beat.at)
    age = written - virtual(beat.at - timedelta(seconds=beat.up_s))
    return min(written, at) - age


def _progress_of(beat: Heartbeat) -> str:
    up = beat.upload
    return "" if up.name is None else f"{up.name}:{up.bytes_done}:{up.queued}"


def _exit_code(ended: Exit | None) -> int | None:
    if ended is None:
        return None
    if ended.exit_code is None and ended.signal is not None:
        return 128 + ended.signal
    return ended.exit_code


def told(view: HostReader, report: HostStatus) -> None:
    """The report's notes and checkpoints are durable and are not told again, even once a checkpoint is dropped."""
    view.notes = view.notes[len(report.notes) :]
    view.fallbacks = view.fallbacks[len(report.fallbacks) :]
    for checkpoint in report.checkpoints:
        view.accepted.pop(checkpoint.manifest_key, None)
        view.uploads.pop(checkpoint.manifest_key, None)
        view.unannounced.discard(checkpoint.manifest_key)


def with_job(report: HostStatus, job: Job) -> HostStatus:
    """The report without checkpoints that the job knows by now."""
    if not report.checkpoints:
        return report
    known = {(c.attempt, c.name) for c in job.checkpoints}
    fresh = tuple(c for c in report.checkpoints if (c.attempt, c.name) not in known)
    return replace(report, checkpoints=fresh)
