"""grant.json: everything one attempt may do, until when, and what it is asked to do now.

The daemon builds a `Grant`, writes `grant.to_bytes()` to `jobs/<job>/attempts/<n>/grant.json` before the launch, and
writes it again to renew the lease, to renew URLs, and to give orders. The runner reads it again every `refresh_s`.

All durations are *real* seconds and all instants are the *real* wall clock's, also where the daemon itself lives in
accelerated time: a host knows no other. A grant renews the lease exactly when its `issued_at` is later than that of
every grant seen before, so writing the same grant again renews nothing.

A grant holds secrets (URLs, the upload form, the job's own secrets): its `repr` shows none of them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from spotd_jobs.wire.client.sinks import CHUNK_BYTES_MAX, is_plain, is_printable

# The field types that every document between daemon and hosts is made of, and the one error they fail with.
#
# What a host wrote is untrusted text. Each type here is bounded, so that a model built from them bounds the document.


KEY_BYTES_MAX: Final = 1024
NAME_BYTES_MAX: Final = 255
PATH_BYTES_MAX: Final = 4096
OBJECT_BYTES_MAX: Final = 5 * 1000**3
"""The largest single object that every S3-compatible store takes in one request."""
BYTES_MAX: Final = 10**15
"""No sum of bytes that a host states is larger: a thousand times the largest disk that is rented out."""
INSTANT_MIN: Final = datetime(2000, 1, 1, tzinfo=UTC)
INSTANT_MAX: Final = datetime(2200, 1, 1, tzinfo=UTC)
_MILLISECONDS: Final = 3

_JOB_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}")
_DRIVE: Final = re.compile(r"[A-Za-z]:")


class WireError(ValueError):
    """A document that does not hold what its kind must. The message holds no content that could be a secret."""


class WireModel(BaseModel):
    """Strict, frozen, and closed: an unknown key, a number as text, NaN or infinity is refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )


def _printable(text: str) -> str:
    if not is_printable(text):
        raise ValueError("holds a control or invisible character")
    return text


def _job_id(text: str) -> str:
    if _JOB_ID.fullmatch(text) is None or ".." in text:
        raise ValueError("is no job id: letters, digits, '.', '_' and '-', at most 64")
    return text


def _instant(instant: datetime) -> datetime:
    """Return the instant, held to a range in which sums of instants and spans cannot overflow.

    It is moved and not refused: the clock of a healthy host may be centuries off, and its reports still count.
    """
    if instant.utcoffset() != timedelta(0):
        raise ValueError("must be in UTC")
    return min(max(instant, INSTANT_MIN), INSTANT_MAX)


def _whole_milliseconds(seconds: float) -> float:
    """Differences of two spans are zero or at least a millisecond, so that a rate over them stays finite."""
    return round(seconds, _MILLISECONDS)


def relative_path(text: str) -> str:
    """Return the text itself, if it names something below a folder on every system.

    Raises:
        ValueError: it is empty, absolute, climbs, or holds a backslash, NUL or control character.
    """
    if not text or len(text.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        raise ValueError(f"must be 1 to {PATH_BYTES_MAX} bytes")
    if text.startswith("/") or "\\" in text or _DRIVE.match(text):
        raise ValueError("must be relative, with '/' between its parts")
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in text.split("/"))
    if not is_plain(text) or longest > NAME_BYTES_MAX:
        raise ValueError("must have no empty, '.' or '..' part, and none longer than 255 bytes")
    return _printable(text)


def _key(text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > KEY_BYTES_MAX:
        raise ValueError(f"must be at most {KEY_BYTES_MAX} bytes")
    return relative_path(text)


def _prefix(text: str) -> str:
    if not text.endswith("/"):
        raise ValueError("must end in '/'")
    _key(text[:-1])
    return text


def _entry_name(text: str) -> str:
    if "/" in text:
        raise ValueError("must be one name, not a path")
    return relative_path(text)


def _not_blank(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


JobId = Annotated[str, AfterValidator(_job_id)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, AfterValidator(relative_path)]
StoreKey = Annotated[str, AfterValidator(_key)]
StorePrefix = Annotated[str, AfterValidator(_prefix)]
EntryName = Annotated[str, AfterValidator(_entry_name)]
Instant = Annotated[datetime, AfterValidator(_instant)]
Size = Annotated[int, Field(ge=0, le=BYTES_MAX)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=10 * 366 * 86400), AfterValidator(_whole_milliseconds)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=8192), AfterValidator(_printable)]
Line = Annotated[str, StringConstraints(max_length=500), AfterValidator(_printable)]
"""One line for a person, safe to print on any terminal."""
Text = Annotated[str, AfterValidator(_not_blank)]
"""Text of the job's owner (commands, values); never from a host."""


def attempt_prefix(job_id: str, attempt: int) -> str:
    """Return the only place of the store where an attempt may write, apart from its liveness marker."""
    return f"jobs/{job_id}/attempts/{attempt}/"


LIVENESS_PREFIX: Final = "jobs/_liveness/"
"""Below `jobs/`, where the key that signs for hosts may write; no job's id begins so."""
MARKER_BYTES_MAX: Final = 4096


def liveness_marker_name(job_id: str, attempt: int) -> str:
    """Return the name of the attempt's liveness marker below `LIVENESS_PREFIX`: all of them are names in one folder."""
    return f"{job_id}.{attempt}"


def attempt_of_marker(key: str) -> tuple[str, int] | None:
    """Whose liveness marker this is; `None` for any other object."""
    job, _, number = key.removeprefix(LIVENESS_PREFIX).rpartition(".")
    if not key.startswith(LIVENESS_PREFIX) or _JOB_ID.fullmatch(job) is None or _NUMBER.fullmatch(number) is None:
        return None
    return job, int(number)


CHUNK_BYTES_DEFAULT: Final = 8 * 1024 * 1024
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
PositiveSeconds = Annotated[float, Field(gt=0, le=366 * 86400)]


class JobRef(WireModel):
    """Which job this is for."""

    id: JobId
    name: Line


class Blob(WireModel):
    """One object to read, and what it must be."""

    url: Url = Field(repr=False)
    sha256: Sha256
    size: Size


class UploadMethod(StrEnum):
    """How bytes get below the prefix."""

    FOLDER = "folder"
    POST = "post"
    SIGV4 = "sigv4"


_UPLOAD_FIELDS: Final[dict[UploadMethod, frozenset[str]]] = {
    UploadMethod.FOLDER: frozenset({"directory"}),
    UploadMethod.POST: frozenset({"url", "form", "key_prefix"}),
    UploadMethod.SIGV4: frozenset({"endpoint", "bucket", "region", "access_key", "secret_key", "key_prefix"}),
}


class _WritePermission(WireModel):
    """A way to write.

    Attributes:
        fields: by method.
            folder: `{"directory"}`, the absolute path of the folder that *is* the prefix.
            post: `{"url", "form", "key_prefix"}`: the policy's form fields, and what `prefix` is called in the bucket.
            sigv4: `{"endpoint", "bucket", "region", "path_style", "access_key", "secret_key", "session_token",
            "key_prefix"}`.
    """

    method: UploadMethod
    fields: dict[str, Any] = Field(repr=False)

    @model_validator(mode="after")
    def _has_its_fields(self) -> Self:
        missing = sorted(_UPLOAD_FIELDS[self.method] - self.fields.keys())
        if missing:
            raise ValueError(f"upload by {self.method} needs the fields {', '.join(missing)}")
        return self


class Upload(_WritePermission):
    """Permission to write below `prefix` and nowhere else. `size_max` is that of one object."""

    prefix: StorePrefix
    expires: Instant
    size_max: Annotated[int, Field(ge=1024, le=5 * 1000**3)]


class LivenessMarker(_WritePermission):
    """Permission to write one small object, whose place is listed together with those of all other attempts.

    Attributes:
        name: of the object, below what `fields` call its prefix or directory.
    """

    name: EntryName


class ManifestBlob(Blob):
    """A manifest and its own key, from which its attempt is known."""

    key: StoreKey


class Restore(WireModel):
    """One checkpoint that may be restored.

    Attributes:
        chunks: key to URL, for every key the manifest names.
        chunks_base: where set, a key that `chunks` lacks is read at `chunks_base` + the key, percent-encoded
            (a folder store's `file:///.../`, one short field in place of a thousand URLs).
    """

    name: EntryName
    manifest: ManifestBlob
    chunks: dict[StoreKey, Url] = Field(default_factory=dict, repr=False)
    chunks_base: Url | None = Field(default=None, repr=False)


class InputGrant(WireModel):
    """The outputs of another job, to be read in a folder of this name."""

    folder: EntryName
    restore: Restore


class DataGrant(WireModel):
    """A dataset, to be read before the job's command begins.

    Attributes:
        source: as the job's owner named it. An https URL is read as the file `path`, and has neither `base` nor `urls`.
        path: where it belongs, relative to the job's folder.
        sha256: of its root's text, from which everything else is verified; of a URL, of the file.
        base: where set, a key of it is read at `base` + the key, percent-encoded.
        urls: where `base` is not set: documents that together have the URL of every key.
    """

    source: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_printable)]
    path: Text
    sha256: Sha256
    bytes: Size
    files: Size
    base: Url | None = Field(default=None, repr=False)
    urls: list[Url] = Field(default_factory=list, repr=False)


class ArrayPlace(WireModel):
    """Which job of an array this is."""

    index: Annotated[int, Field(ge=0, le=10**9)]
    count: Annotated[int, Field(ge=1, le=10**9)]


class GangGrant(WireModel):
    """Several machines that run the command together.

    Attributes:
        first_url: where the first of them leaves how the others reach it.
        wait_s: how long they wait for each other.
        silent_s: one that gives no sign for so long is lost.
        keep_s: how long the others are kept and wait where one beside the first is lost; 0: they end.
        round: it grows whenever other machines take part than before.
        since: by the rank that the provider gave, the round in which the machine of that rank came; `None` takes no
            part. Empty: all of the first round.
        next_url: where the others find their next attempt once the first of them is lost; `None`: they end then.
    """

    nodes: Annotated[int, Field(ge=1, le=1024)]
    first_url: Url = Field(repr=False)
    wait_s: PositiveSeconds
    silent_s: PositiveSeconds = 30.0
    keep_s: Annotated[float, Field(ge=0, le=864_000)] = 0.0
    round: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    since: Annotated[list[int | None], Field(max_length=1024)] = []
    next_url: Url | None = Field(default=None, repr=False)


class CheckpointSaving(WireModel):
    """The job's `[checkpoint]` section. A relative `path` is below the work directory; `None` is the runner's own.

    Attributes:
        saved_by: of several machines: `first` alone saves whole checkpoints, or `all` save parts of each.
    """

    path: Text | None = None
    every_s: PositiveSeconds | None = None
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    settle_s: Seconds = 10.0
    stop_signal: Annotated[str, Field(pattern=r"^SIG[A-Z0-9]{2,10}$")] = "SIGTERM"
    stop_grace_s: Seconds = 90.0
    saved_by: Literal["first", "all"] | None = None


class RunSpec(WireModel):
    """What to run. `run` is an argv; `setup` a shell text.

    Attributes:
        watch_s: how often the heartbeat's `progress` is news; `None`: it is not wanted.
    """

    run: Annotated[list[Text], Field(min_length=1)]
    setup: Text | None = None
    env: dict[EnvName, Text] = Field(default_factory=dict)
    outputs: list[Text] = Field(default_factory=list)
    checkpoint: CheckpointSaving = CheckpointSaving()
    watch_s: PositiveSeconds | None = None


class TransferRules(WireModel):
    """How bytes are moved. `log_bytes_per_h` bounds what a job's output may cost in the store."""

    chunk_bytes: Annotated[int, Field(ge=1024, le=CHUNK_BYTES_MAX)] = CHUNK_BYTES_DEFAULT
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    log_bytes_per_h: Annotated[int, Field(ge=1024)] = 16 * 1024 * 1024


class NoticeSources(WireModel):
    """Where early warnings come from, besides SIGTERM and orders.

    Attributes:
        imds: base URL of the machine's metadata service, asked every few seconds; `None`: nothing is asked. That of
            AWS has no path, that of Google ends in `/computeMetadata/v1`.
        file: `$SPOTD_HOME/notice` is watched.
    """

    imds: Url | None = None
    file: bool = True


class GrantStopOrder(WireModel):
    """Stop the job: `stop_signal`, wait, SIGKILL, upload what is complete, end the machine.

    Attributes:
        grace_s: how long the job may take to stop; `None` is the job's own `stop_grace_s`, 0 is SIGKILL at once.
        flush: whether checkpoints that are not yet stored are uploaded before the machine ends.
    """

    reason: Line
    grace_s: Seconds | None = None
    flush: bool = True


class Orders(WireModel):
    """What the daemon wants now.

    Attributes:
        checkpoint: raised by one to ask the job for a checkpoint (through its notice file).
    """

    checkpoint: Annotated[int, Field(ge=0, le=2**31)] = 0
    stop: GrantStopOrder | None = None


class EndMethod(StrEnum):
    """How a machine ends itself. All of them follow a durable last report."""

    FILE = "file"
    SHUTDOWN = "shutdown"
    VAST = "vast"
    RUNPOD = "runpod"


class SelfTerminate(WireModel):
    """The instance-scoped way to end this machine. Credentials are the host's own environment, never ours.

    Attributes:
        method: `file` writes `machine-done` into the directory the start script ran in (the local market);
            `shutdown` powers the machine off (EC2 with shutdown behaviour `terminate`);
            `vast` calls with `CONTAINER_ID` and `CONTAINER_API_KEY`; `runpod` with `RUNPOD_POD_ID`, `RUNPOD_API_KEY`.
        base_url: of the provider's API, for `vast` and `runpod`; `None` is the real one.
    """

    method: EndMethod
    base_url: Url | None = None


class ReuseRules(WireModel):
    """How the machine may go on to the next job once this one has succeeded.

    Attributes:
        url: where the runner finds its next attempt (`NextAttempt`), or nothing.
        wait_s: how long it asks for one, at most, after it has removed all that was the job's.
        alone: nothing but the job uses this machine, so that what it changed outside of its folders can be seen.
    """

    url: Url = Field(repr=False)
    wait_s: PositiveSeconds
    alone: bool


class CanaryRules(WireModel):
    """How long the machine is measured before its job begins, and the least below which it may refuse itself.

    `tflops` is of half precision by the data sheet of its GPU; `download_mbps`, as advertised, is only shown.
    """

    time_s: Annotated[float, Field(gt=0, le=3600)]
    may_refuse: bool
    gpus: Annotated[int, Field(ge=1, le=1024)]
    gpu_memory_mb_min: Size | None = None
    tflops: Annotated[float, Field(gt=0, le=1e6)] | None = None
    tflops_min: Annotated[float, Field(gt=0, le=1e6)] | None = None
    download_mbps: Annotated[float, Field(ge=0, le=1e9)] | None = None


class NextAttempt(WireModel):
    """The attempt to which the machine of another one belongs from now on; written once for each former attempt."""

    schema_: Literal[1] = Field(default=1, alias="schema")
    job: JobId
    attempt: Annotated[int, Field(ge=1, le=10**9)]
    grant_url: Url = Field(repr=False)

    def to_bytes(self) -> bytes:
        """Return the document as it is written to the store."""
        return self.model_dump_json(by_alias=True).encode()


class Grant(WireModel):
    """The whole of grant.json. See the module for when a grant renews the lease.

    Attributes:
        liveness_marker: `None` where the store cannot limit a host to its prefix and one name beside it.
        seen_running: the daemon has seen this attempt's command run. A runner that starts fresh under such a grant was
            started again by its provider, maybe on a wiped disk: unless `restore` is given too, it runs nothing, since
            starting over would put the job back.
    """

    schema_: Literal[1] = Field(default=1, alias="schema")
    job: JobRef
    attempt: Annotated[int, Field(ge=1, le=10**9)]
    issued_at: Instant
    expires: Instant
    lease_s: PositiveSeconds
    heartbeat_s: PositiveSeconds
    refresh_s: PositiveSeconds
    grant_url: Url = Field(repr=False)
    runner: Blob
    code: Blob | None
    upload: Upload
    liveness_marker: LivenessMarker | None = None
    restore: list[Restore] = Field(default_factory=list)
    inputs: list[InputGrant] = Field(default_factory=list)
    data: list[DataGrant] = Field(default_factory=list)
    array: ArrayPlace | None = None
    gang: GangGrant | None = None
    spec: RunSpec
    transfer: TransferRules = TransferRules()
    secrets: dict[EnvName, Text] = Field(default_factory=dict, repr=False)
    notice: NoticeSources = NoticeSources()
    orders: Orders = Orders()
    self_terminate: SelfTerminate | None = None
    seen_running: bool = False
    reuse: ReuseRules | None = None
    canary: CanaryRules | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Grant:
        if self.upload.prefix != attempt_prefix(self.job.id, self.attempt):
            raise ValueError("upload.prefix is not this attempt's own")
        if self.liveness_marker is not None and self.liveness_marker.name != liveness_marker_name(
            self.job.id, self.attempt
        ):
            raise ValueError("liveness_marker.name is not this attempt's own")
        if self.transfer.chunk_bytes > self.upload.size_max:
            raise ValueError("a chunk is larger than upload.size_max")
        if self.expires <= self.issued_at:
            raise ValueError("it expires before it begins")
        return self

    def to_bytes(self) -> bytes:
        """Return the document as it is written to the store."""
        return self.model_dump_json(by_alias=True).encode()
