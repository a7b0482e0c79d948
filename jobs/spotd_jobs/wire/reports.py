"""heartbeat.json, events/<seq>.json: what a runner reports of itself, as the daemon parses it.

A host is an untrusted computer. These parsers take any bytes, of any length and content, and either return a bounded,
strictly typed value or raise `WireError`, nothing else. All instants are the host's own word, good for display only.
Every number and instant is in a range in which sums, rates and spans of them stay finite. Figures of the machine that
are out of range are unknown; any other value out of range makes the document unusable.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from spotd_jobs.wire.grant import Count, EntryName, Instant, JobId, Line, Seconds, Size, StoreKey, WireError, WireModel

HEARTBEAT_BYTES_MAX: Final = 64 * 1024
EVENT_BYTES_MAX: Final = 16 * 1024
LOG_OBJECT_BYTES_MAX: Final = 1024 * 1024
Attempt = Annotated[int, Field(ge=1, le=10**9)]


def _figure_or_none(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """`None` for what is no figure: drivers print odd ones, and the rest of the report still counts."""
    try:
        return handler(value)
    except ValidationError:
        return None


Percent = Annotated[Annotated[float, Field(ge=0, le=100)] | None, WrapValidator(_figure_or_none)]
Megabytes = Annotated[Annotated[float, Field(ge=0, le=1e9)] | None, WrapValidator(_figure_or_none)]
WholeMegabytes = Annotated[Annotated[int, Field(ge=0, le=10**12)] | None, WrapValidator(_figure_or_none)]
Watts = Annotated[Annotated[float, Field(ge=0, le=1e5)] | None, WrapValidator(_figure_or_none)]
Celsius = Annotated[Annotated[float, Field(ge=-273, le=1000)] | None, WrapValidator(_figure_or_none)]
Load = Annotated[Annotated[float, Field(ge=0, le=1e6)] | None, WrapValidator(_figure_or_none)]


class Phase(StrEnum):
    """What the runner does now."""

    BOOT = "boot"
    CANARY = "canary"
    """The machine is measured; nothing of the job is there yet."""
    CODE = "code"
    RESTORE = "restore"
    SETUP = "setup"
    RUN = "run"
    SAVE = "save"
    """The job was asked to stop and may be writing its last checkpoint."""
    UPLOAD = "upload"
    """The job's processes are gone; what is complete goes to the store."""
    DONE = "done"


class Outcome(StrEnum):
    """How the attempt ended, as the runner saw it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SETUP_FAILED = "setup_failed"
    CODE_UNUSABLE = "code_unusable"
    """The code archive could not be read, verified or unpacked."""
    INPUT_UNUSABLE = "input_unusable"
    """Outputs of another job, or data, could not be read or verified."""
    INPUT_AWAY = "input_away"
    """The server, bucket or hub that holds the data does not answer."""
    DISK_FULL = "disk_full"
    """The code, the checkpoint to resume from or what the job wrote does not fit on this disk."""
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    """An order of the daemon."""
    LEASE_EXPIRED = "lease_expired"
    NOT_CURRENT = "not_current"
    """The grant was gone, superseded or expired: nothing was run."""
    RUNNER_ERROR = "runner_error"
    MEMBER_LOST = "member_lost"
    """Another machine of the same attempt was lost, or never came."""
    UNFIT = "unfit"
    """The machine is less than what was sold, as its canary found: nothing was run."""


class SeenCheckpoint(WireModel):
    """The newest complete checkpoint on the host's disk."""

    name: EntryName
    step: Count | None
    at: Instant


class StoredCheckpoint(SeenCheckpoint):
    """The newest one whose manifest the runner has published."""

    bytes: Size
    key: StoreKey


class UploadProgress(WireModel):
    """The upload under way. `failing` states why it does not advance; `queued` counts those behind it."""

    name: EntryName | None
    bytes_done: Size
    bytes_total: Size
    bytes_per_s: Size
    queued: Annotated[int, Field(ge=0, le=10**6)]
    failing: Line | None


class RestoreProgress(WireModel):
    """The restore under way or done."""

    name: EntryName
    bytes_done: Size
    bytes_total: Size


class Gpu(WireModel):
    """One line of nvidia-smi; what it leaves out is `None`."""

    index: Annotated[int, Field(ge=0, le=1024)]
    name: Line
    util_pct: Percent
    mem_used_mb: Megabytes
    mem_total_mb: Megabytes
    power_w: Watts
    temp_c: Celsius


class HostFigures(WireModel):
    """The machine as the runner sees it."""

    cpus: Annotated[int, Field(ge=0, le=10**5)]
    load1: Load
    mem_total_mb: WholeMegabytes
    mem_available_mb: WholeMegabytes
    disk_total_mb: WholeMegabytes
    disk_free_mb: WholeMegabytes


class ProgressFigures(WireModel):
    """What shows whether the command gets on; each figure only rises while one runner runs.

    Attributes:
        printed: bytes of its output.
        writes: how many heartbeats found its checkpoint folder changed.
        gpu_s: for how long the use of a GPU was read while it ran; `None` where no figure was to be had.
        gpu_busy_s: the use of the busiest GPU, summed over that time: a minute at 50 % is 30 s.
    """

    printed: Count
    writes: Count
    gpu_s: Seconds | None
    gpu_busy_s: Seconds | None


class NoticeSeen(WireModel):
    """An early warning that reached the host. `at` is when the machine goes, where that was announced."""

    source: Line
    reason: Line
    at: Instant | None


class Exit(WireModel):
    """How it ended. `oom` is `None` where nothing on the host shows it."""

    outcome: Outcome
    phase: Phase
    exit_code: Annotated[int, Field(ge=0, le=255)] | None
    signal: Annotated[int, Field(ge=1, le=128)] | None
    oom: bool | None
    reason: Line
    outputs_lost: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Outputs that there were and that could not be stored."""
    waits: bool = False
    """All that was the job's is removed, and the machine waits for its next attempt, as its grant permits."""


class GangSeen(WireModel):
    """Which round of several machines this is, and which of them are lost while the others wait, by their ranks."""

    round: Annotated[int, Field(ge=0, le=1_000_000)]
    lost: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(max_length=1024)]


class Heartbeat(WireModel):
    """heartbeat.json, written again and again; `seq` only rises, also over restarts of the runner on one machine."""

    schema_: Literal[1] = Field(alias="schema")
    job: JobId
    attempt: Attempt
    seq: Count
    boot: Count
    at: Instant
    phase: Phase
    pid: Annotated[int, Field(ge=1, le=2**31)] | None
    """Of the job's own process, while it runs."""
    up_s: Seconds
    """Since the start script began, which became the runner."""
    runner: Line
    grant_issued_at: Instant
    order_checkpoint: Annotated[int, Field(ge=0, le=2**31)]
    """The newest `orders.checkpoint` that was passed on."""
    seen: SeenCheckpoint | None
    stored: StoredCheckpoint | None
    upload: UploadProgress
    restore: RestoreProgress | None
    gpus: Annotated[list[Gpu], Field(max_length=64)]
    host: HostFigures
    notice: NoticeSeen | None
    exit: Exit | None
    progress: ProgressFigures | None = None
    """Only where the grant asks for it."""
    data: RestoreProgress | None = None
    """Of the job's datasets together; only where it has some."""
    gang: GangSeen | None = None
    """Only of several machines, once they run."""


class EventKind(StrEnum):
    """What happened. See docs/wire.md for the data that each carries."""

    BOOT = "boot"
    RESTORED = "restored"
    CHECKPOINT_FALLBACK = "checkpoint_fallback"
    STARTED = "started"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_REFUSED = "checkpoint_refused"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    CHECKPOINT_ORDER = "checkpoint_order"
    OUTPUTS = "outputs"
    OUTPUTS_LOST = "outputs_lost"
    REBALANCE = "rebalance"
    PREEMPT_NOTICE = "preempt_notice"
    STOP_ORDER = "stop_order"
    LEASE_EXPIRED = "lease_expired"
    UPLOAD_FAILING = "upload_failing"
    DISK_LOW = "disk_low"
    CANARY = "canary"
    EXIT = "exit"


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Real = Annotated[float, Field(ge=-1e18, le=1e18)]
Scalar = Line | bool | Whole | Real | None


class HostEvent(WireModel):
    """events/<seq>.json, written once. The exit event is the last, and comes after everything it speaks of."""

    schema_: Literal[1] = Field(alias="schema")
    job: JobId
    attempt: Attempt
    seq: Count
    at: Instant
    kind: EventKind
    data: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")], Scalar], Field(max_length=32)]

    def exit(self) -> Exit | None:
        """How the attempt ended, if this is the exit event and is complete."""
        if self.kind is not EventKind.EXIT:
            return None
        try:
            return Exit.model_validate_json(json.dumps(self.data))
        except (ValidationError, ValueError):
            return None


_Document = TypeVar("_Document", Heartbeat, HostEvent)


def parse_heartbeat(data: bytes, *, job_id: str, attempt: int) -> Heartbeat:
    """Return the newest report of this attempt's runner.

    Raises:
        WireError: the bytes are no heartbeat, or another attempt's.
    """
    return _parse(Heartbeat, data, HEARTBEAT_BYTES_MAX, job_id, attempt)


def parse_event(data: bytes, *, job_id: str, attempt: int) -> HostEvent:
    """One thing that happened to this attempt.

    Raises:
        WireError: the bytes are no event, or another attempt's.
    """
    return _parse(HostEvent, data, EVENT_BYTES_MAX, job_id, attempt)


def _parse(model: type[_Document], data: bytes, bytes_max: int, job_id: str, attempt: int) -> _Document:
    kind = model.__name__.lower()
    if len(data) > bytes_max:
        raise WireError(f"{kind} of {len(data)} bytes is larger than {bytes_max}")
    try:
        document = model.model_validate_json(data)
    except ValidationError as error:
        raise WireError(f"not a {kind}: {first_problem(error)}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"not a {kind}: {type(error).__name__}") from None
    if document.job != job_id or document.attempt != attempt:
        raise WireError(f"{kind} of another attempt")
    return document


def first_problem(error: ValidationError) -> str:
    """Where the first problem is and what it is, without the untrusted text that was there."""
    row = error.errors(include_url=False, include_context=False, include_input=False)[0]
    known = [str(part) for part in row["loc"] if isinstance(part, int) or str(part).isidentifier()]
    return f"{'.'.join(known)[:80] or 'document'}: {row['msg'][:120]}"
