"""What one reading of an attempt's part of the store showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from spotd.core.domain.checkpoints import Checkpoint, FallbackRestore
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.progress import HostSample


class ExitCause(StrEnum):
    """Why the runner came to its end, in its own words."""

    FINISHED = "finished"
    STOPPED = "stopped"
    NOTICE = "notice"
    LEASE = "lease"
    SETUP_FAILED = "setup_failed"
    CODE_UNUSABLE = "code_unusable"
    INPUT_UNUSABLE = "input_unusable"
    DISK_FULL = "disk_full"
    RUNNER_FAILED = "runner_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """What one read of an attempt's part of the store showed; everything in it is already validated.

    Attributes:
        liveness_check: nothing of the attempt's own was read: this is what is known since the last full read. It can
            show that a host lives, never that it is lost.
        marker_at: when its liveness marker was last seen to have been written again, whatever `seq` is.
        seq: of the heartbeat, -1 before the first.
        checkpoints: newly accepted ones, oldest first.
        exit_cause: set once the runner reported its end.
        notes: sentences for the event log (a checkpoint refused, a disk nearly full).
        fallbacks: what could not be restored, newest first.
        alive_at: when the host gave its newest sign of life, by its own clock, never after the read.
        exit_at: when the runner reported its end, by the same clock.
        script_began_at: when the start script began, by the same clock, never after the read less its stated age.
        uploads: bytes that each of `checkpoints` added to the store, by manifest key; all of its bytes where absent.
        stored_bytes: all that the host wrote and the store still bills, when it was last counted.
        restored_bytes: what the host has downloaded of its checkpoint so far.
    """

    attempt: AttemptId
    read_at: datetime
    liveness_check: bool = False
    marker_at: datetime | None = None
    seq: int = -1
    phase: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_from: str | None = None
    exit_cause: ExitCause | None = None
    exit_code: int | None = None
    exit_detail: str = ""
    notice_at: datetime | None = None
    notes: tuple[str, ...] = ()
    upload_progress: str = ""
    """How far the upload under way has come; differs whenever it has advanced."""
    store_takes_no_writes: bool = False
    """The daemon itself cannot write to the store, so that no host's silence says anything."""
    flood: str = ""
    """What the host wrote too much of, in words; empty while it is within its limits."""
    fallbacks: tuple[FallbackRestore, ...] = ()
    unannounced: frozenset[str] = frozenset()
    """Keys of manifests among `checkpoints` that get no line of their own in the job's history."""
    outputs_sha256: str | None = None
    outputs_bytes: int = 0
    outputs_problem: str = ""
    """What of the outputs is not there, in words."""
    outputs_lost: int = 0
    """How many files of them the host could not store."""
    alive_at: datetime | None = None
    exit_at: datetime | None = None
    script_began_at: datetime | None = None
    uploads: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    restored_bytes: int = 0
    data_bytes: int = 0
    """What it has downloaded of its job's datasets so far, as it states."""
    save_time: timedelta | None = None
    """How long the upload of its newest checkpoint took, as it states."""
    up: timedelta | None = None
    """For how long the host has run when it wrote its newest heartbeat, by its own steady clock."""
    sample: HostSample | None = None
    """What that heartbeat states of progress; only where the job is watched."""
