"""What is remembered of one host between two readings of what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.checkpoints import Checkpoint, FallbackRestore
from spotd.core.domain.jobs import Job
from spotd.daemon.hosts.gpu_history import GpuHistory
from spotd.daemon.hosts.limits import HostRation, HostShare
from spotd.daemon.hosts.outputs import OutputsSeen
from spotd.daemon.hosts.proved_chunks import ProvedChunks
from spotd.daemon.hosts.transfers import TransferMeter
from spotd_jobs.objects.api import ObjectInfo, ObjectStore
from spotd_jobs.wire.reports import Exit, Heartbeat, Outcome

COMPLAINTS_MAX: Final = 1_000

RealToVirtual = Callable[[datetime], datetime]


@dataclass(slots=True)
class MissingChunk:
    """A manifest that is right but for a chunk; how often that chunk was not there."""

    etag: str
    key: str
    reads: int = 1


@dataclass(slots=True, kw_only=True)
class HostReader:
    """What is remembered of one attempt's host between reads. Only one read at a time may use it."""

    is_unread: bool = True
    relearns: bool | None = None
    """Events are read that a former process has put into the history already."""
    heartbeat: Heartbeat | None = None
    heartbeat_at: datetime | None = None
    """When it was read for the first time."""
    phase_at: datetime | None = None
    """When its phase was first read; `None` where that was before this process."""
    heartbeat_read_at: datetime | None = None
    """When the newest heartbeat was last asked for."""
    written_after: datetime | None = None
    """A read at this instant did not find the newest heartbeat yet."""
    transfers: TransferMeter = field(default_factory=TransferMeter)
    gpu_history: GpuHistory = field(default_factory=GpuHistory)
    exit: Exit | None = None
    exit_at: datetime | None = None
    stored_bytes: int = 0
    """Of all that it wrote, when it was last counted."""
    resumed_from: str | None = None
    save_s: float | None = None
    """How long the newest upload of a checkpoint took on the host."""
    events_read: str = ""
    serial_known: int | None = None
    accepted: dict[str, Checkpoint] = field(default_factory=dict)
    """By manifest key: a checkpoint that its framework writes anew under one name (`last.ckpt`) comes several times."""
    uploads: dict[str, int] = field(default_factory=dict)
    """Bytes that each of them added to the store."""
    unannounced: set[str] = field(default_factory=set)
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
    marker: ObjectInfo | None = None
    """The liveness marker, as it was listed last."""
    marker_at: datetime | None = None
    """When a listing last showed that it had been written again."""
    news_before: int = -1
    """The size of the marker that was listed before the read under way."""
    news_read: int = -1
    """The size of the marker that was listed before the last full read."""
    unfinished: bool = False
    """The last read left something for the next."""
    left: bool = False
    """The same of the read under way."""
    behind: bool = False
    """It left manifests that it has not read."""
    served_at: datetime | None = None
    """When what it published was read last."""
    failures: int = 0
    """How many reads in a row failed by what this host wrote."""

    @property
    def lacks_outputs(self) -> bool:
        """Whether it ended well, and what it left has not been read yet."""
        return self.exit is not None and self.exit.outcome is Outcome.SUCCEEDED and self.outputs is None

    def note(self, kind: str, sentence: str, at: datetime) -> None:
        """Add a line to the job's history, or count it where this host has added too many of this kind."""
        if self.ration.take(kind, at):
            self.notes.append(sentence)

    def complain(self, subject: str, sentence: str, at: datetime) -> None:
        """Add a line to the job's history, once for each subject."""
        if subject not in self.complaints and len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.add(subject)
            self.note("things that cannot be used", sentence, at)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One reading of what one host wrote: where, of which attempt, at which instant, and what it may cost."""

    objects: ObjectStore
    view: HostReader
    attempt: Attempt
    job: Job
    share: HostShare
    at: datetime
    virtual: RealToVirtual
