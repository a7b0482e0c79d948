"""What is remembered of one host between two readings of what it wrote."""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint, FailedRestore, Job, Outputs
from spotd.core.domain.policy import Policy
from spotd.daemon import object_keys
from spotd.daemon.hosts.limits import HostRation, HostShare, TransferMeter
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge, StoreError, StoreUnavailable
from spotd_jobs.spec.model import unmatched_patterns
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX, WINDOW, raw_of
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, StoredObject, verify_manifest
from spotd_jobs.wire.manifest_document import ManifestKind
from spotd_jobs.wire.reports import Exit, Gpu, Heartbeat, Outcome

# Manifests whose hash is known, read back from a store that their hosts may still write to.


def known_manifest(
    objects: ObjectStore, key: str, sha256: str | None, first_version: Callable[[str], str | None] | None = None
) -> bytes | None:
    """Return the manifest of this very hash, also where it was written over in a store that keeps versions.

    Args:
        first_version: where the store was asked for the first versions of many keys already.

    Raises:
        StoreUnavailable
    """
    data = read_manifest(objects, key)
    if data is None or hashlib.sha256(data).hexdigest() != sha256:
        first = objects.first_versions(key).get(key) if first_version is None else first_version(key)
        data = None if first is None else read_manifest(objects, key, first)
    return data if data is not None and hashlib.sha256(data).hexdigest() == sha256 else None


def accepted_manifest(
    objects: ObjectStore,
    key: str,
    sha256: str | None,
    writer: AttemptId,
    first_version: Callable[[str], str | None] | None = None,
) -> AcceptedManifest | None:
    """Return the manifest of this very hash as it reads, where it is one of this attempt.

    Its chunks are not asked for one by one: they are verified by content whenever they are read.

    Raises:
        StoreUnavailable
    """
    data = known_manifest(objects, key, sha256, first_version)
    verdict = None if data is None else verify_manifest(data, writer.job, writer.number, None)
    return verdict if isinstance(verdict, AcceptedManifest) else None


def read_manifest(objects: ObjectStore, key: str, version: str | None = None) -> bytes | None:
    """Return the bytes of a manifest, `None` where there is none that can be read.

    Raises:
        StoreUnavailable
    """
    try:
        return objects.get(key, bytes_max=MANIFEST_BYTES_MAX, version=version)
    except StoreUnavailable:
        raise
    except StoreError:
        return None


# The outputs of an attempt that ended well: which manifest they are, pinned by its hash when the end is read.
#
# Whatever the host, or any other, writes there later is not what the job made.


LISTED_MAX: Final = 500_000
NONE_STORED: Final = "its machine stored none"
_NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsSeen:
    """What was there when the attempt's end was read."""

    sha256: str | None = None
    bytes: int = 0
    problem: str = ""
    lost: int = 0
    """Outputs that the host says there were and that it could not store."""


def outputs_of(objects: ObjectStore, attempt: Attempt, patterns: Sequence[str]) -> OutputsSeen:
    """Return the attempt's outputs as they are now, and which patterns of the job match none of them.

    Its chunks are not asked for one by one: they are verified by content whenever they are read.

    Raises:
        StoreError: the store does not answer, or refuses to, so nothing can be said.
    """
    try:
        data = objects.get(object_keys.outputs_key(attempt.id), bytes_max=MANIFEST_BYTES_MAX)
    except ObjectMissing:
        return OutputsSeen(problem=NONE_STORED)
    except ObjectTooLarge as exc:
        return unreadable(exc)
    verdict = verify_manifest(data, attempt.id.job, attempt.id.number, None)
    if isinstance(verdict, BadManifest):
        return unreadable(verdict.reason)
    seen = _outputs_of(objects, verdict)
    absent = unmatched_patterns(patterns, {_name(entry.path) for entry in verdict.files})
    return _with_problem(seen, f"nothing matches {_some(absent)}") if absent else seen


def with_lost(seen: OutputsSeen, lost: int) -> OutputsSeen:
    """Return the same, with what the host itself says that it could not store."""
    if not lost:
        return seen
    sentence = f"{lost} file{'s' if lost > 1 else ''} could not be stored by the machine"
    known = replace(seen, problem="") if seen.problem == NONE_STORED else seen
    return replace(_with_problem(known, sentence), lost=lost)


def _with_problem(seen: OutputsSeen, problem: str) -> OutputsSeen:
    return replace(seen, problem=f"{seen.problem}; {problem}" if seen.problem else problem)


def _name(path: str) -> str:
    """Return the path as the job's file spells it."""
    return raw_of(path).decode("utf-8", "surrogateescape")


def _some(patterns: Sequence[str]) -> str:
    more = len(patterns) - _NAMED_MAX
    return ", ".join(patterns[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def unreadable(why: object) -> OutputsSeen:
    """Return that there is a manifest, and that it cannot be read."""
    return OutputsSeen(problem=f"their manifest cannot be read: {why}")


def _outputs_of(objects: ObjectStore, found: AcceptedManifest) -> OutputsSeen:
    if found.kind is not ManifestKind.OUTPUTS:
        return unreadable("it is no manifest of outputs")
    lacking = _lacking(objects, found)
    absent = f"{lacking} of {len(found.chunk_keys)} pieces of them are not in the store" if lacking else ""
    return OutputsSeen(sha256=found.sha256, bytes=found.bytes, problem=absent)


def _lacking(objects: ObjectStore, found: AcceptedManifest) -> int:
    """Return how many of the chunks are not in the store at their size."""
    wanted = {chunk.key: chunk.size for entry in found.files for chunk in entry.chunks}
    there: set[str] = set()
    for folder in {key.rpartition("/")[0] + "/" for key in wanted}:
        there.update(
            info.key for info in islice(objects.list(folder), LISTED_MAX) if _is_it(info, wanted.get(info.key))
        )
    return len(wanted.keys() - there)


def _is_it(info: StoredObject, size: int | None) -> bool:
    return size is not None and info.size == size


def pinned_manifest(objects: ObjectStore, attempt: AttemptId, pinned: Outputs) -> AcceptedManifest | None:
    """Return the manifest of this very hash, also where it was written over in a store that keeps versions.

    Raises:
        StoreUnavailable
    """
    return accepted_manifest(objects, object_keys.outputs_key(attempt), pinned.sha256, attempt)


# Which chunks an accepted manifest has already shown to be in the store, in a bounded amount of memory.
#
# A runner counts on a chunk that its attempt sent only while one of the `WINDOW` newest manifests names it, so nothing
# older has to be remembered; and sixteen bytes are enough to know a chunk and its size again.


_MASK = 2**64 - 1


def digest(key: str) -> int:
    """Return sixty-four bits that cannot be foreseen outside this process."""
    return hash(key) & _MASK


class ProvedChunks:
    """The chunks of the newest accepted manifests, with their sizes."""

    def __init__(self) -> None:
        self._known: deque[tuple[array[int], array[int]]] = deque(maxlen=WINDOW)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.size_of(key) is not None

    def size_of(self, key: str) -> int | None:
        """Return the size that was found of this chunk, `None` where it is not among the newest."""
        wanted = digest(key)
        for digests, sizes in self._known:
            place = bisect_left(digests, wanted)
            if place < len(digests) and digests[place] == wanted:
                return sizes[place]
        return None

    def add(self, sizes: Mapping[str, int]) -> None:
        """Remember the chunks of one more accepted manifest; those of the oldest are forgotten."""
        pairs = sorted((digest(key), size) for key, size in sizes.items())
        self._known.append((array("Q", [key for key, _ in pairs]), array("Q", [size for _, size in pairs])))

    @property
    def bytes(self) -> int:
        """Return how much memory it takes."""
        return sum(2 * digests.itemsize * len(digests) for digests, _ in self._known)


# The use of one host's GPUs over time, as its heartbeats stated it. It is only shown, and lost with the process.


SAMPLES_MAX: Final = 120
"""When so many are kept, every second is dropped and half as many are taken: four kilobytes a host, however long."""
_WIDTH: Final = 4
_NOTHING: Final = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """All GPUs of a host at one instant: their mean use and the sum of their memory; `None` where nothing is stated."""

    at: datetime
    util_pct: float | None
    mem_used_mb: float | None
    mem_total_mb: float | None


@dataclass(slots=True)
class GpuHistory:
    """Samples from the first heartbeat to the newest, at about equal distances."""

    _values: array[float] = field(default_factory=lambda: array("d"))
    _every_s: float = 0.0

    def take(self, gpus: Sequence[Gpu], at: datetime) -> None:
        """Take in what the newest heartbeat states, unless it comes too soon after the last sample."""
        now = at.timestamp()
        if not gpus or (self._values and now - self._values[-_WIDTH] < self._every_s):
            return
        used = [gpu.util_pct for gpu in gpus if gpu.util_pct is not None]
        row = (now, sum(used) / len(used) if used else _NOTHING, _sum(g.mem_used_mb for g in gpus))
        self._values.extend((*row, _sum(g.mem_total_mb for g in gpus)))
        if len(self._values) >= SAMPLES_MAX * _WIDTH:
            rows = [self._values[i : i + _WIDTH] for i in range(0, len(self._values), 2 * _WIDTH)]
            self._every_s = (now - self._values[0]) / len(rows)
            self._values = array("d", [value for kept in rows for value in kept])

    def samples(self) -> Iterator[GpuSample]:
        """Yield them, oldest first."""
        for i in range(0, len(self._values), _WIDTH):
            at, util, used, total = self._values[i : i + _WIDTH]
            yield GpuSample(
                at=datetime.fromtimestamp(at, tz=UTC),
                util_pct=_known(util),
                mem_used_mb=_known(used),
                mem_total_mb=_known(total),
            )


def _sum(values: Iterator[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) if known else _NOTHING


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


COMPLAINTS_MAX: Final = 1_000

Dating = Callable[[datetime], datetime]
"""Returns the instant on the daemon's own clock of a moment that a host states by the wall clock."""


@dataclass(slots=True)
class MissingChunk:
    """A manifest that is right but for a chunk; how often that chunk was not there."""

    etag: str
    key: str
    reads: int = 1


@dataclass(slots=True, kw_only=True)
class ReadMemory:
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
    serials: dict[int, str] = field(default_factory=dict)
    """Serials of the newest checkpoints that are known, with their manifest keys."""
    serial_floor: int = -1
    """At and below this serial nothing is taken in, not even as a fallback."""
    older: dict[str, tuple[Checkpoint, str]] = field(default_factory=dict)
    """By manifest key: what was found after a newer one, with the key of the next newer one."""
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
    fallbacks: list[FailedRestore] = field(default_factory=list)
    marker: ObjectInfo | None = None
    """The liveness marker, as it was listed last."""
    marker_at: datetime | None = None
    """When a listing last showed that it had been written again."""
    words: dict[tuple[int, int], tuple[datetime, str, int]] = field(default_factory=dict)
    """Of several machines that wait without the first one, by round and rank: what was listed of each one's word."""
    words_at: dict[tuple[int, int], tuple[datetime, datetime]] = field(default_factory=dict)
    """When a listing first showed that it had been written again, and when the last one did."""
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
    def first_at(self) -> datetime | None:
        """When the newest sign of life was read that its first machine gave."""
        return max((at for at in (self.heartbeat_at, self.marker_at) if at is not None), default=None)

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
class ReadScope:
    """One reading of what one host wrote: where, of which attempt, at which instant, and what it may cost."""

    objects: ObjectStore
    view: ReadMemory
    attempt: Attempt
    job: Job
    share: HostShare
    at: datetime
    dated: Dating
    policy: Policy | None = None
    """By which the host was to measure itself; without it nothing of that is taken."""
