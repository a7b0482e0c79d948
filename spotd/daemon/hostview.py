"""What one host wrote, read with suspicion and remembered between looks.

Theory. The order of reading is the reverse of the order of writing: the runner publishes chunks, then the manifest,
then the event that speaks of it. Reading heartbeat, events and manifests in this order means that whoever sees the
exit also sees every checkpoint published before it.

Only manifests that are newer than the newest one known of the same attempt are news. The host numbers them by
`serial`; an old one that turns up late would put the job back and is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.lineage import host_name
from spotd.core.model import Attempt, Checkpoint, ExitCause, Fallback, HostReport, Job
from spotd.daemon import layout
from spotd.daemon.metrics import metric_of
from spotd.daemon.transfers import TransferMeter
from spotd.daemon.uploads import uploaded_bytes
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.fields import WireError
from spotd_jobs.wire.manifest import (
    MANIFEST_BYTES_MAX,
    AcceptedManifest,
    Manifest,
    ManifestKind,
    Refused,
    checkpoint_prefix,
    parse_manifest,
    verify_manifest,
)
from spotd_jobs.wire.reports import (
    EVENT_BYTES_MAX,
    HEARTBEAT_BYTES_MAX,
    Event,
    EventKind,
    Exit,
    Heartbeat,
    Outcome,
    parse_event,
    parse_heartbeat,
)

LISTED_MAX: Final = 10_000
EVENTS_PER_LOOK_MAX: Final = 500
MISSING_LOOKS_MAX: Final = 5
"""How often a manifest whose chunks are absent is looked at again before it is given up."""
HEADS_MAX: Final = 16
"""With more unknown chunks than this, one listing is cheaper than a question for each."""
NOTICE_SPAN_MAX: Final = timedelta(days=30)
_NAME: Final = re.compile(r"[0-9]{1,32}\.json")

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

_TOLD: Final = {
    EventKind.CHECKPOINT_REFUSED: "the host refused checkpoint {name}: {reason}",
    EventKind.CHECKPOINT_SKIPPED: "the host skipped checkpoint {name}: {reason}",
    EventKind.UPLOAD_FAILING: "uploads from the host fail: {reason}",
    EventKind.DISK_LOW: "the host's disk is nearly full: {free_mb} MB are free",
    EventKind.OUTPUTS_LOST: "{files} outputs could not be stored by the host: {reason}",
    EventKind.REBALANCE: "the provider may take the machine soon: {reason}",
    EventKind.LEASE_EXPIRED: "the host did not hear from spotd for {lease_s} s",
}
"""Events worth a line in the job's own history; the others show in its state."""

RealToVirtual = Callable[[datetime], datetime]


@dataclass(slots=True, kw_only=True)
class HostView:
    """What is remembered of one attempt's host between looks. Only one look at a time may use it."""

    first_look: bool = True
    heartbeat: Heartbeat | None = None
    transfers: TransferMeter = field(default_factory=TransferMeter)
    exit: Exit | None = None
    exit_at: datetime | None = None
    resumed_from: str | None = None
    events_read: str = ""
    serial_known: int | None = None
    accepted: dict[str, Checkpoint] = field(default_factory=dict)
    """By manifest key: a checkpoint that its framework writes anew under one name (`last.ckpt`) comes several times."""
    uploads: dict[str, int] = field(default_factory=dict)
    """Bytes that each of them added to the store."""
    settled: dict[str, str] = field(default_factory=dict)
    """Manifest keys that need no second reading, with the etag they had."""
    misses: dict[str, int] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)
    """Chunk keys that an accepted manifest already proved to be there."""
    complaints: set[str] = field(default_factory=set)
    audited_at: datetime | None = None
    """When all that it wrote was last counted, by the wall clock."""
    flood: str = ""
    notes: list[str] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    beat: ObjectInfo | None = None
    """As it was listed last."""
    beat_at: datetime | None = None
    """When a listing last showed that it had been written again."""
    news_read: int = -1
    """The size of the beat that was listed before the last complete look."""
    unfinished: bool = False
    """The last look left something for the next."""


def look(
    objects: ObjectStore, view: HostView, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual
) -> HostReport:
    """Everything the host wrote until now.

    Raises:
        StoreUnavailable: the store does not answer, so nothing can be said.
    """
    news = -1 if view.beat is None else view.beat.size
    view.unfinished = False
    _read_heartbeat(objects, view, attempt)
    _read_events(objects, view, attempt, first=view.first_look and attempt.looked_at is not None)
    _read_manifests(objects, view, attempt, job, at=at, virtual=virtual)
    view.first_look = False
    view.news_read = news
    return report_of(view, attempt, job, at=at, virtual=virtual)


def report_of(
    view: HostView, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual, glance: bool = False
) -> HostReport:
    """What is known of the host, without asking the store for anything."""
    known = {c.manifest_key for c in job.checkpoints} if view.accepted else frozenset()
    beat, ended = view.heartbeat, view.exit
    notice = beat.notice if beat is not None else None
    return HostReport(
        attempt=attempt.id,
        looked_at=at,
        glance=glance,
        beat_at=view.beat_at,
        flood=view.flood,
        seq=beat.seq if beat is not None else -1,
        phase=beat.phase.value if beat is not None else "",
        checkpoints=tuple(c for key, c in view.accepted.items() if key not in known),
        resumed_from=view.resumed_from,
        exit_cause=_CAUSES[ended.outcome] if ended is not None else None,
        exit_code=_exit_code(ended),
        exit_detail=ended.reason if ended is not None else "",
        notice_at=None if notice is None else _near(virtual(notice.at), at) if notice.at is not None else at,
        notes=tuple(view.notes),
        fallbacks=tuple(view.fallbacks),
        alive_at=None if beat is None else virtual(beat.at),
        exit_at=None if view.exit_at is None else virtual(view.exit_at),
        uploads={key: size for key, size in view.uploads.items() if key in view.accepted},
        restored_bytes=beat.restore.bytes_done if beat is not None and beat.restore is not None else 0,
    )


def _near(stated: datetime, at: datetime) -> datetime:
    """When the machine goes, as its host states it, no further from now than any provider announces it."""
    return min(max(stated, at - NOTICE_SPAN_MAX), at + NOTICE_SPAN_MAX)


def _exit_code(ended: Exit | None) -> int | None:
    if ended is None:
        return None
    if ended.exit_code is None and ended.signal is not None:
        return 128 + ended.signal
    return ended.exit_code


def _read_heartbeat(objects: ObjectStore, view: HostView, attempt: Attempt) -> None:
    data = _get(objects, view, layout.heartbeat_key(attempt.id), HEARTBEAT_BYTES_MAX, "heartbeat")
    if data is None:
        return
    try:
        beat = parse_heartbeat(data, job_id=attempt.id.job, attempt=attempt.id.number)
    except WireError as exc:
        _complain(view, "heartbeat", f"the host's heartbeat is not usable: {exc}")
        return
    view.heartbeat = beat
    view.transfers.take(beat)
    if beat.exit is not None:
        view.exit, view.exit_at = beat.exit, view.exit_at or beat.at


def _read_events(objects: ObjectStore, view: HostView, attempt: Attempt, *, first: bool) -> None:
    """`first` after a restart: what was told before is learnt again, but not told again."""
    prefix = layout.events_prefix(attempt.id)
    fresh = [info.key for info in _listed(objects, prefix) if info.key > view.events_read and _is_name(info, prefix)]
    view.unfinished |= len(fresh) > EVENTS_PER_LOOK_MAX
    for key in fresh[:EVENTS_PER_LOOK_MAX]:
        data = _get(objects, view, key, EVENT_BYTES_MAX, "event")
        view.events_read = key
        if data is None:
            continue
        try:
            event = parse_event(data, job_id=attempt.id.job, attempt=attempt.id.number)
        except WireError as exc:
            _complain(view, "event", f"an event of the host is not usable: {exc}")
            continue
        _take_event(view, event, tell=not first)


def _take_event(view: HostView, event: Event, *, tell: bool) -> None:
    ended = event.exit()
    if ended is not None:
        view.exit, view.exit_at = ended, event.at
    if event.kind is EventKind.RESTORED and isinstance(event.data.get("name"), str):
        view.resumed_from = str(event.data["name"])
    if event.kind is EventKind.CHECKPOINT_FALLBACK and tell:
        view.fallbacks.append(_fallback(event))
    words = _TOLD.get(event.kind)
    if words is not None and tell:
        view.notes.append(words.format_map(_Blank(event.data)))


def _fallback(event: Event) -> Fallback:
    name, reason, after = (event.data.get(key) for key in ("name", "reason", "next"))
    return Fallback(name=str(name or "?"), reason=str(reason or "?"), next=None if after is None else str(after))


class _Blank(dict[str, object]):
    """A word the host left out is missing from the sentence, not a reason to lose it."""

    def __missing__(self, key: str) -> str:
        return "?"


def _read_manifests(
    objects: ObjectStore, view: HostView, attempt: Attempt, job: Job, *, at: datetime, virtual: RealToVirtual
) -> None:
    prefix = checkpoint_prefix(attempt.id.job, attempt.id.number)
    if view.serial_known is None:
        view.serial_known = _serial_of_newest_known(objects, view, attempt, job)
    found: list[tuple[AcceptedManifest, ObjectInfo]] = []
    for info in _listed(objects, prefix):
        if view.settled.get(info.key) == info.etag or not info.key.endswith(".json"):
            continue
        verdict = _judge(objects, view, attempt, info)
        if isinstance(verdict, Refused):
            _refuse(view, info, verdict)
            continue
        if verdict is None:
            view.settled[info.key] = info.etag
        else:
            found.append((verdict, info))
    metric = job.spec.checkpoint.metric
    for accepted, info in sorted(found, key=lambda pair: pair[0].serial):
        value = None if metric is None else metric_of(objects, accepted, metric)
        # Not before here: a store that goes away in the middle of a look must not make a checkpoint old news.
        view.settled[info.key] = info.etag
        view.serial_known = max(view.serial_known, accepted.serial)
        view.uploads[info.key] = uploaded_bytes(accepted, view.chunks, layout.data_prefix(attempt.id))
        view.chunks.update(accepted.chunk_keys)
        saved_at = min(at, max(attempt.intended_at, virtual(accepted.created_at)))
        view.accepted[info.key] = Checkpoint(
            name=accepted.name,
            attempt=accepted.attempt,
            step=accepted.step,
            bytes=accepted.bytes,
            at=saved_at,
            manifest_key=info.key,
            sha256=accepted.sha256,
            metric=value,
            host=host_name(attempt),
        )


def _judge(
    objects: ObjectStore, view: HostView, attempt: Attempt, info: ObjectInfo
) -> AcceptedManifest | Refused | None:
    """`None` for one that is older than what is known, and therefore no news."""
    try:
        data = objects.get(info.key, bytes_max=MANIFEST_BYTES_MAX)
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return Refused(reason=str(exc))
    draft = _parsed(data)
    if draft is not None and view.serial_known is not None and draft.serial <= view.serial_known:
        return None
    heads = _Heads(objects, view, attempt, draft)
    verdict = verify_manifest(data, attempt.id.job, attempt.id.number, heads, parsed=draft)
    if isinstance(verdict, AcceptedManifest) and verdict.kind is not ManifestKind.CHECKPOINT:
        return Refused(reason="it is no manifest of a checkpoint")
    return verdict


def _refuse(view: HostView, info: ObjectInfo, verdict: Refused) -> None:
    """Told once; one that only lacks chunks is looked at again a few times, since a store may list late."""
    name = info.key.rpartition("/")[2].removesuffix(".json")
    _complain(view, info.key, f"checkpoint {name} is not accepted: {verdict.reason}")
    view.misses[info.key] = view.misses.get(info.key, 0) + 1
    if not verdict.missing or view.misses[info.key] >= MISSING_LOOKS_MAX:
        view.settled[info.key] = info.etag
    else:
        view.unfinished = True


def _serial_of_newest_known(objects: ObjectStore, view: HostView, attempt: Attempt, job: Job) -> int:
    """After a restart: below and at this, nothing is news, nor are the chunks of that checkpoint."""
    newest = next((c for c in job.checkpoints if c.attempt == attempt.id.number), None)
    if newest is None:
        return -1
    try:
        draft = _parsed(objects.get(newest.manifest_key, bytes_max=MANIFEST_BYTES_MAX))
    except ObjectMissing:
        draft = None
    if draft is None:
        return -1
    view.chunks.update(draft.chunk_sizes())
    return draft.serial


def _parsed(data: bytes) -> Manifest | None:
    try:
        return parse_manifest(data)
    except WireError:
        return None


class _Heads:
    """Looks at chunks: those proved before are not asked for again, and many new ones are listed at once."""

    def __init__(self, objects: ObjectStore, view: HostView, attempt: Attempt, draft: Manifest | None) -> None:
        self._objects = objects
        keys = draft.chunk_sizes() if draft is not None else {}
        self._proved = {key: size for key, size in keys.items() if key in view.chunks}
        own = layout.data_prefix(attempt.id)
        unknown = [key for key in keys if key not in view.chunks and key.startswith(own)]
        self._listed: dict[str, ObjectInfo] = {}
        if len(unknown) > HEADS_MAX:
            self._listed = {info.key: info for info in objects.list(own)}

    def __call__(self, key: str) -> _Size | ObjectInfo | None:
        if key in self._proved:
            return _Size(size=self._proved[key])
        return self._listed.get(key) or self._objects.head(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    size: int
    sha256: str | None = None


def _listed(objects: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """A bounded number of objects: how many there are is a stranger's choice."""
    return islice(objects.list(prefix), LISTED_MAX)


def _is_name(info: ObjectInfo, prefix: str) -> bool:
    return _NAME.fullmatch(info.key.removeprefix(prefix)) is not None


def _get(objects: ObjectStore, view: HostView, key: str, bytes_max: int, what: str) -> bytes | None:
    try:
        return objects.get(key, bytes_max=bytes_max)
    except ObjectMissing:
        return None
    except StoreUnavailable:
        raise
    except StoreError as exc:
        _complain(view, what, f"the host's {what} is not usable: {exc}")
        return None


def _complain(view: HostView, subject: str, sentence: str) -> None:
    if subject not in view.complaints:
        view.complaints.add(subject)
        view.notes.append(sentence)


def told(view: HostView, report: HostReport) -> None:
    """The report's notes and checkpoints are durable and are not told again, even once a checkpoint is dropped."""
    view.notes = view.notes[len(report.notes) :]
    view.fallbacks = view.fallbacks[len(report.fallbacks) :]
    for checkpoint in report.checkpoints:
        view.accepted.pop(checkpoint.manifest_key, None)
        view.uploads.pop(checkpoint.manifest_key, None)


def with_job(report: HostReport, job: Job) -> HostReport:
    """The report without checkpoints that the job knows by now."""
    if not report.checkpoints:
        return report
    known = {(c.attempt, c.name) for c in job.checkpoints}
    fresh = tuple(c for c in report.checkpoints if (c.attempt, c.name) not in known)
    return replace(report, checkpoints=fresh)
