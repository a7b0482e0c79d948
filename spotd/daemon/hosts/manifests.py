"""The manifests that one host published: which of them are checkpoints, each read once.

Theory. Only manifests that are newer than the newest one known of the same attempt are news. The host numbers them by
`serial`. An old one that turns up late would put the job back, so it stands behind the next newer one, as a fallback: a
folder is not listed at one moment, and a list may show a checkpoint before the one ahead of it. What is older than the
second newest that was known at the start is left alone. A manifest is fetched and parsed once:
what became of it is remembered with its etag, and of one that lacks a chunk only that chunk is asked for again. A read
takes a share of what is there (`limits.py`), oldest first. Where a host published more than could ever be of use, the
newest are read first, and once one of them is accepted the older ones are passed over, as their serials would be.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.lineage import host_name
from spotd.daemon import object_keys
from spotd.daemon.hosts.host_reader import MissingChunk, ReadMemory, ReadScope, digest
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge, StoreError, StoreUnavailable
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX
from spotd_jobs.wire.grant import WireError
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, checkpoint_prefix, verify_manifest
from spotd_jobs.wire.manifest_document import Entry, EntryType, Manifest, ManifestKind, parse_manifest

# The metric of a checkpoint, read from a file inside it.
#
# `metrics.json` is an object with the metric as one of its numbers. Where there is no such file, `trainer_state.json`
# is read, which the Hugging Face Trainer writes: the newest row of its `log_history` that has the metric. Hosts are
# untrusted: both files are bounded and verified like any chunk, and what is no finite number is no value.


FILE_BYTES_MAX: Final = 4 * 1024 * 1024


def metric_of(objects: ObjectStore, accepted: AcceptedManifest, metric: str) -> float | None:
    """Return the checkpoint's value of this metric.

    Raises:
        StoreUnavailable: the store does not answer, so nothing can be said.
    """
    for name, read in (("metrics.json", _in_metrics), ("trainer_state.json", _in_trainer_state)):
        path = f"{accepted.entry}/{name}"
        entry = next((e for e in accepted.files if e.path == path and e.type is EntryType.FILE), None)
        document = None if entry is None else _document(objects, entry)
        value = None if document is None else _number(read(document, metric))
        if value is not None:
            return value
    return None


def _document(objects: ObjectStore, entry: Entry) -> object:
    if entry.size > FILE_BYTES_MAX:
        return None
    pieces = []
    for chunk in entry.chunks:
        try:
            data = objects.get(chunk.key, bytes_max=chunk.size)
        except StoreUnavailable:
            raise
        except StoreError:
            return None
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            return None
        pieces.append(chunk.part_of(data))
    try:
        document: object = json.loads(b"".join(pieces))
    except (ValueError, RecursionError):
        return None
    return document


def _in_metrics(document: object, metric: str) -> object:
    return document.get(metric) if isinstance(document, dict) else None


def _in_trainer_state(document: object, metric: str) -> object:
    history = document.get("log_history") if isinstance(document, dict) else None
    rows: Iterable[object] = reversed(history) if isinstance(history, list) else ()
    return next((row[metric] for row in rows if isinstance(row, dict) and metric in row), None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


LISTED_MAX: Final = 10_000
CHUNKS_LISTED_MAX: Final = 200_000
MISSING_READS_MAX: Final = 5
"""How often a manifest whose chunks are absent is read again before it is given up."""
HEADS_MAX: Final = 16
"""With more unknown chunks than this, one listing is cheaper than a question for each."""
HEADS_PER_MANIFEST_MAX: Final = 1_000
SERIALS_KEPT: Final = 64
FLOOD: Final = 64
"""More unread manifests than this are read from the newest backwards."""
SAME_TIME: Final = timedelta(minutes=2)
"""So far apart the clocks of a store's own machines may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    serial: int
    info: ObjectInfo
    checkpoint: Checkpoint
    uploaded: int


def read_manifests(reading: ReadScope) -> None:
    """Take in what is new, as far as the share goes.

    Raises:
        StoreError: it does not answer, or refuses to.
    """
    view, attempt, at = reading.view, reading.attempt, reading.at
    if view.serial_known is None:
        _learn_serials(reading)
    prefix = checkpoint_prefix(attempt.id.job, attempt.id.number)
    listed = [i for i in islice(reading.objects.list(prefix), LISTED_MAX) if i.key.endswith(".json")]
    names = {info.key for info in listed}
    view.settled = {key: etag for key, etag in view.settled.items() if key in names}
    view.lacking = {key: one for key, one in view.lacking.items() if key in names}
    unread = [info for info in listed if view.settled.get(info.key) != info.etag]
    is_flood = len(unread) > FLOOD
    unread.sort(key=lambda info: (info.modified, info.key), reverse=is_flood)
    found: list[_Found] = []
    lookup = _Chunks(reading.objects, view, attempt)
    for info in unread:
        if not _still_lacks(reading.objects, view, info) and not _read_one(reading, info, lookup, found):
            break
    for one in sorted(found, key=lambda one: one.serial):
        # Not before here: a store that goes away in the middle of a read must not make a checkpoint old news.
        view.settled[one.info.key] = one.info.etag
        view.uploads[one.info.key] = one.uploaded
        if view.serial_known is None or one.serial > view.serial_known:
            view.serial_known = one.serial
            view.accepted[one.info.key] = one.checkpoint
        elif newer := [serial for serial in view.serials if serial > one.serial]:
            view.older[one.info.key] = (one.checkpoint, view.serials[min(newer)])
        view.serials[one.serial] = one.info.key
        while len(view.serials) > SERIALS_KEPT:
            view.serial_floor = max(view.serial_floor, min(view.serials))
            del view.serials[min(view.serials)]
        if not view.ration.take("checkpoints that were accepted", at):
            view.unannounced.add(one.info.key)
    if is_flood and found:
        _pass_over(view, unread, max(one.info.modified for one in found), at=at)
    view.behind = reading.share.is_spent and any(
        view.settled.get(i.key) != i.etag and i.key not in view.lacking for i in unread
    )


def _read_one(reading: ReadScope, info: ObjectInfo, lookup: _Chunks, found: list[_Found]) -> bool:
    """Read one manifest; return whether the share allowed it."""
    view, attempt, at = reading.view, reading.attempt, reading.at
    if not reading.share.take(info.size):
        return False
    verdict = _judge(reading, info, lookup)
    if isinstance(verdict, BadManifest):
        _refuse(view, info, verdict, lookup.lacked, at=at)
        return True
    if verdict is None:
        view.settled[info.key] = info.etag
        return True
    metric = reading.job.spec.checkpoint.metric
    value = None if metric is None else metric_of(reading.objects, verdict, metric)
    sizes = {chunk.key: chunk.size for entry in verdict.files for chunk in entry.chunks}
    own = object_keys.data_prefix(attempt.id)
    # What its own chunks added to the store, by what is there and not by what the host states.
    uploaded = sum(size for key, size in sizes.items() if key.startswith(own) and key not in view.chunks)
    view.chunks.add(sizes)
    saved_at = min(at, max(attempt.intended_at, reading.dated(verdict.created_at)))
    checkpoint = Checkpoint(
        name=verdict.name,
        attempt=verdict.attempt,
        step=verdict.step,
        bytes=verdict.bytes,
        at=saved_at,
        manifest_key=info.key,
        sha256=verdict.sha256,
        metric=value,
        host=host_name(attempt),
    )
    found.append(_Found(serial=verdict.serial, info=info, checkpoint=checkpoint, uploaded=uploaded))
    return True


def _judge(reading: ReadScope, info: ObjectInfo, lookup: _Chunks) -> AcceptedManifest | BadManifest | None:
    """Return what a manifest is; `None` for one that is known, or so old that it is of no use any more."""
    view, attempt = reading.view, reading.attempt.id
    try:
        data = reading.objects.get(info.key, bytes_max=MANIFEST_BYTES_MAX)
    except ObjectMissing:
        return None  # deleted since it was listed
    except ObjectTooLarge as exc:
        return BadManifest(reason=str(exc))
    draft = _parse(data)
    if draft is not None and (draft.serial <= view.serial_floor or draft.serial in view.serials):
        return None
    lookup.prepare(draft)
    verdict = verify_manifest(data, attempt.job, attempt.number, lookup, parsed=draft)
    if isinstance(verdict, AcceptedManifest) and verdict.kind is not ManifestKind.CHECKPOINT:
        return BadManifest(reason="it is no manifest of a checkpoint")
    return verdict


def _still_lacks(objects: ObjectStore, view: ReadMemory, info: ObjectInfo) -> bool:
    """Whether the chunk that it lacked at the last read is absent still, so that it need not be read again."""
    known = view.lacking.get(info.key)
    if known is None or known.etag != info.etag:
        return False
    if objects.head(known.key) is not None:
        return False
    known.reads += 1
    if known.reads >= MISSING_READS_MAX:
        del view.lacking[info.key]
        view.settled[info.key] = info.etag
    else:
        view.left = True
    return True


def _refuse(view: ReadMemory, info: ObjectInfo, verdict: BadManifest, lacked: str, *, at: datetime) -> None:
    """Report it once; one that only lacks chunks is read again a few times, since a store may list late."""
    name = info.key.rpartition("/")[2].removesuffix(".json")
    view.complain(info.key, f"checkpoint {name} is not accepted: {verdict.reason}", at)
    before = view.lacking.get(info.key)
    reads = before.reads + 1 if before is not None else 1
    if not verdict.missing or reads >= MISSING_READS_MAX:
        view.settled[info.key] = info.etag
        view.lacking.pop(info.key, None)
    else:
        view.lacking[info.key] = MissingChunk(info.etag, lacked, reads)
        view.left = True


def _pass_over(view: ReadMemory, unread: list[ObjectInfo], newest: datetime, *, at: datetime) -> None:
    """Pass over what is older than what was accepted: it is no news, and need not be read to know it."""
    older = [i for i in unread if view.settled.get(i.key) != i.etag and i.modified < newest - SAME_TIME]
    for info in older:
        view.settled[info.key] = info.etag
        view.lacking.pop(info.key, None)
    if older:
        view.note(
            "checkpoints that were passed over", f"{len(older)} older checkpoints of the host are passed over", at
        )


def _learn_serials(reading: ReadScope) -> None:
    """Learn which serials are no news after a restart, and the chunks of the newest checkpoint.

    Between the two newest none was ever known, so one that is found there was missed. Of what was older than both it is
    not known whether it was on the list and has left it.
    """
    view = reading.view
    own = [c for c in reading.job.checkpoints if c.attempt == reading.attempt.id.number]
    view.serial_known = -1
    for one in own[:2]:
        try:
            draft = _parse(reading.objects.get(one.manifest_key, bytes_max=MANIFEST_BYTES_MAX))
        except ObjectMissing:
            draft = None
        if draft is None:
            continue
        view.serials[draft.serial] = one.manifest_key
        view.serial_floor = draft.serial
        if one is own[0]:
            view.chunks.add(draft.chunk_sizes())
            view.serial_known = draft.serial


def _parse(data: bytes) -> Manifest | None:
    try:
        return parse_manifest(data)
    except WireError:
        return None


class _Chunks:
    """Sizes of chunks in the store; those proved before are not asked for again, many new ones are listed at once."""

    def __init__(self, objects: ObjectStore, view: ReadMemory, attempt: Attempt) -> None:
        self._objects = objects
        self._view = view
        self._ours = re.compile(re.escape(f"jobs/{attempt.id.job}/attempts/") + "[1-9][0-9]{0,8}/data/")
        self._listed: dict[str, dict[int, int]] = {}
        """By folder of chunks, listed at most once in a read: by digest of the key, the size."""
        self._heads = 0
        self.lacked = ""
        """The chunk that was asked for last."""

    def prepare(self, draft: Manifest | None) -> None:
        """Prepare for the chunks of this manifest."""
        self._heads, self.lacked = 0, ""
        keys = draft.chunk_sizes() if draft is not None else {}
        unknown = Counter(_folder_of(key) for key in keys if key not in self._view.chunks)
        for folder, count in unknown.items():
            if count > HEADS_MAX and self._ours.fullmatch(folder) and folder not in self._listed:
                self._listed[folder] = dict(self._list(folder))

    def _list(self, folder: str) -> Iterator[tuple[int, int]]:
        return ((digest(info.key), info.size) for info in islice(self._objects.list(folder), CHUNKS_LISTED_MAX))

    def __call__(self, key: str) -> _Size | ObjectInfo | None:
        self.lacked = key
        size = self._view.chunks.size_of(key)
        if size is None:
            size = self._listed.get(_folder_of(key), {}).get(digest(key))
        if size is not None:
            return _Size(size=size)
        self._heads += 1
        return self._objects.head(key) if self._heads <= HEADS_PER_MANIFEST_MAX else None


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0] + "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    size: int
    sha256: str | None = None
