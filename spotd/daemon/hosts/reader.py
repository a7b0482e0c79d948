"""What one host wrote, read with suspicion and remembered between looks.

Theory. The order of reading is the reverse of the order of writing: the runner publishes chunks, then the manifest,
then the event that speaks of it. Reading heartbeat, events and manifests in this order means that whoever sees the
exit also sees every checkpoint published before it. A look that had to leave manifests for the next one does not tell
the exit yet, and is no more than a glance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.checkpoints import Checkpoint, FallbackRestore
from spotd.core.host_status import ExitCause, HostStatus
from spotd.core.jobs import Job
from spotd.daemon.hosts.events import read_events, read_heartbeat
from spotd.daemon.hosts.limits import HostRation, HostShare
from spotd.daemon.hosts.manifests import MISSING_LOOKS_MAX, MissingChunk, read_manifests
from spotd.daemon.hosts.outputs import OutputsSeen, outputs_of, with_lost
from spotd.daemon.hosts.proved_chunks import ProvedChunks
from spotd.daemon.hosts.transfers import TransferMeter
from spotd_jobs.objects.api import ObjectInfo, ObjectStore
from spotd_jobs.wire.reports import Exit, Heartbeat, Outcome

__all__ = [
    "MISSING_LOOKS_MAX",
    "HostReader",
    "RealToVirtual",
    "look",
    "look_at_checkpoints",
    "look_at_news",
    "report_of",
]

NOTICE_SPAN_MAX: Final = timedelta(days=30)
COMPLAINTS_MAX: Final = 1_000
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

RealToVirtual = Callable[[datetime], datetime]


@dataclass(slots=True, kw_only=True)
class HostReader:
    """What is remembered of one attempt's host between looks. Only one look at a time may use it."""

    first_look: bool = True
    relearns: bool | None = None
    """Events are read that a former process has told already."""
    heartbeat: Heartbeat | None = None
    transfers: TransferMeter = field(default_factory=TransferMeter)
    exit: Exit | None = None
    exit_at: datetime | None = None
    stored_bytes: int = 0
    """Of all that it wrote, when it was last counted."""
    resumed_from: str | None = None
    events_read: str = ""
    serial_known: int | None = None
    accepted: dict[str, Checkpoint] = field(default_factory=dict)
    """By manifest key: a checkpoint that its framework writes anew under one name (`last.ckpt`) comes several times."""
    uploads: dict[str, int] = field(default_factory=dict)
    """Bytes that each of them added to the store."""
    untold: set[str] = field(default_factory=set)
    """Those of them that get no line of their own in the job's history."""
    settled: dict[str, str] = field(default_factory=dict)
    """Manifest keys that need no second reading, with the etag they had."""
    lacking: dict[str, MissingChunk] = field(default_factory=dict)
    """Manifests that lacked a chunk when they were read."""
    chunks: ProvedChunks = field(default_factory=ProvedChunks)
    """Chunks that an accepted manifest already proved to be there."""
    outputs: OutputsSeen | None = None
    """What was stored of the outputs when a good end was read."""
    ration: HostRation = field(default_factory=HostRation)
    complaints: set[str] = field(default_factory=set)
    audited_at: datetime | None = None
    """When all that it wrote was last counted, by the wall clock."""
    flood: str = ""
    notes: list[str] = field(default_factory=list)
    fallbacks: list[FallbackRestore] = field(default_factory=list)
    beat: ObjectInfo | None = None
    """As it was listed last."""
    beat_at: datetime | None = None
    """When a listing last showed that it had been written again."""
    news_before: int = -1
    """The size of the beat that was listed before the look under way."""
    news_read: int = -1
    """The size of the beat that was listed before the last complete look."""
    unfinished: bool = False
    """The last look left something for the next."""
    left: bool = False
    """The same of the look under way."""
    behind: bool = False
    """It left manifests that it has not read."""
    served_at: datetime | None = None
    """When a look last read what it published."""
    failures: int = 0
    """How many looks in a row failed by what this host wrote."""

    @property
    def lacks_outputs(self) -> bool:
        """It ended well, and what it left has not been read yet."""
        return self.exit is not None and self.exit.outcome is Outcome.SUCCEEDED and self.outputs is None

    def note(self, kind: str, sentence: str, at: datetime) -> None:
        """Tell it in the job's history, or count it where this host has told too much of this kind."""
        if self.ration.take(kind, at):
            self.notes.append(sentence)

    def complain(self, subject: str, sentence: str, at: datetime) -> None:
        """Tell it unless it was told of this subject before."""
        if subject not in self.complaints and len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.add(subject)
            self.note("things that cannot be used", sentence, at)


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
        view.relearns = attempt.looked_at is not None
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
        looked_at=at,
        liveness_check=liveness_check or view.behind,
        beat_at=view.beat_at,
        flood=view.flood,
        upload_progress="" if beat is None else _progress_of(beat),
        seq=beat.seq if beat is not None else -1,
        phase=beat.phase.value if beat is not None else "",
        checkpoints=tuple(c for key, c in view.accepted.items() if key not in known),
        untold=frozenset(view.untold),
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
        view.untold.discard(checkpoint.manifest_key)


def with_job(report: HostStatus, job: Job) -> HostStatus:
    """The report without checkpoints that the job knows by now."""
    if not report.checkpoints:
        return report
    known = {(c.attempt, c.name) for c in job.checkpoints}
    fresh = tuple(c for c in report.checkpoints if (c.attempt, c.name) not in known)
    return replace(report, checkpoints=fresh)
