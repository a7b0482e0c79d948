"""Manifests, chunks and documents of datasets as the daemon reads them back: blocking calls, hashing included.

Theory. A part of a dataset is validated before it is stored, so a part in the store whose text has its hash needs no
second validation: that of a million files takes minutes on a busy machine, and requests have deadlines. What a part
says without its files is its summary. It is remembered while it is one of the newest, and otherwise read from the
store. Whether the store still has the part is another question, which is put to the store each time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from spotd.core.domain.jobs import Checkpoint
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.client import dataset as documents
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX, Unreadable, name_of, text_of
from spotd_jobs.wire.manifest import AcceptedManifest, BadManifest, verify_manifest
from spotd_jobs.wire.manifest_document import Chunk


class DamagedContent(StoreError):
    """A chunk that differs from its manifest."""


def checkpoint_manifest(objects: ObjectStore, checkpoint: Checkpoint) -> tuple[AcceptedManifest | None, str]:
    """Return the manifest as it was accepted, or why it is not there any more. Its chunks are not read.

    Raises:
        StoreUnavailable: nothing is known.
    """
    try:
        data = objects.get(checkpoint.manifest_key, bytes_max=MANIFEST_BYTES_MAX)
    except ObjectMissing:
        return None, "its manifest is gone from the store"
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return None, str(exc)
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        return None, "its manifest is not the one that was accepted"
    owner = object_keys.owner_of(checkpoint.manifest_key)
    verdict = verify_manifest(data, owner.job, owner.number, None)
    return (None, verdict.reason) if isinstance(verdict, BadManifest) else (verdict, "")


def piece_problem(objects: ObjectStore, chunk: Chunk) -> str:
    """Return what is wrong with one chunk in the store, in words; empty where nothing is.

    Raises:
        StoreUnavailable: nothing is known.
    """
    try:
        piece(objects, chunk)
    except ObjectMissing:
        return f"chunk {chunk.sha256[:12]} is gone from the store"
    except StoreUnavailable:
        raise
    except StoreError as exc:
        return str(exc)
    return ""


def piece(objects: ObjectStore, chunk: Chunk) -> bytes:
    """Return the chunk's content.

    Raises:
        ObjectMissing, StoreUnavailable
        Damaged: it differs from its manifest.
    """
    data = objects.get(chunk.key, bytes_max=chunk.size)
    if len(data) != chunk.size or hashlib.sha256(data).hexdigest() != chunk.sha256:
        raise DamagedContent(f"chunk {chunk.sha256[:12]} holds other content than was saved")
    return data


# Pieces of many files out of the store: each chunk once, several at a time, in a bounded amount of memory.


CONNECTIONS: Final = 8
BATCH_BYTES: Final = 32 * 1024 * 1024
BATCH_CHUNKS: Final = 64
BATCH_PIECES: Final = 10_000
JOINED_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """A part of a file, and which file that is, for the message where it is damaged."""

    path: str
    chunk: Chunk


def batches(pieces: Iterable[ContentPiece]) -> Iterator[list[ContentPiece]]:
    """Yield the pieces in their order, as many at once as may be in memory."""
    batch: list[ContentPiece] = []
    keys: set[str] = set()
    size = 0
    for one in pieces:
        more = one.chunk.size if one.chunk.key not in keys else 0
        full = size + more + one.chunk.length > BATCH_BYTES or len(keys) >= BATCH_CHUNKS or len(batch) >= BATCH_PIECES
        if batch and full:
            yield batch
            batch, keys, size, more = [], set(), 0, one.chunk.size
        batch.append(one)
        keys.add(one.chunk.key)
        size += more + one.chunk.length
    if batch:
        yield batch


def fetch(objects: ObjectStore, batch: Sequence[ContentPiece]) -> list[bytes]:
    """Return the content of each piece, verified.

    Raises:
        Damaged: a chunk differs from its manifest.
        StoreError: the store does not answer.
    """
    chunks = {one.chunk.key: one for one in batch}

    def read(one: ContentPiece) -> bytes:
        try:
            return piece(objects, one.chunk)
        except DamagedContent as exc:
            raise DamagedContent(f"{one.path} is damaged in the store") from exc

    with ThreadPoolExecutor(min(CONNECTIONS, len(chunks))) as pool:
        contents = dict(zip(chunks, pool.map(read, chunks.values()), strict=True))
    return [one.chunk.part_of(contents[one.chunk.key]) for one in batch]


def joined(contents: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in fewer, larger blocks: each block on the way to the reader has its own price."""
    block: list[bytes] = []
    size = 0
    for content in contents:
        block.append(content)
        size += len(content)
        if size >= JOINED_BYTES:
            yield b"".join(block)
            block, size = [], 0
    if block:
        yield b"".join(block)


SUMMARIES_MAX: Final = 4 * documents.PARTS_MAX
SUMMARY_CHUNKS_MAX: Final = 2 * documents.CHUNKS_MAX
"""Of all parts that are remembered, together: some 30 MB."""


class PartSummary(NamedTuple):
    """What a part says, without its files.

    Attributes:
        packed_bytes: the size of its object in the store.
        content_bytes: the size of its files, together.
        first, last: its first and last path, as `order_of_path` writes them; `None` in a part without paths.
    """

    packed_bytes: int
    content_bytes: int
    files: int
    chunks: tuple[documents.DataChunk, ...]
    first: bytes | None
    last: bytes | None


class Parts:
    """The parts in one store. Synchronous: called from several threads."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._found: dict[str, PartSummary] = {}
        self._chunks = 0

    def put(self, sha256: str, text: bytes) -> None:
        """Store a part whose text was validated, and remember it.

        Raises:
            StoreError
        """
        packed = gzip.compress(text, 6, mtime=0)
        # Even where there is one: it may be damaged, and what mends a dataset is to put it again.
        self._objects.put(documents.data_part_key(sha256), packed)
        self._add(sha256, _summary(text, len(packed)))

    def summary(self, sha256: str, *, packed_bytes: int | None = None) -> PartSummary:
        """Return what the part says.

        Args:
            packed_bytes: the size that its object has now; where another one is remembered, the part is read again.

        Raises:
            ObjectMissing: it is not in the store.
            StoreError: what is there is another one.
        """
        with self._lock:
            known = self._found.get(sha256)
        if known is not None and packed_bytes in {None, known.packed_bytes}:
            return known
        key = documents.data_part_key(sha256)
        packed = self._objects.get(key, bytes_max=documents.DOCUMENT_BYTES_MAX)
        try:
            summary = _summary(unpacked(key, packed, sha256), len(packed))
        except (Unreadable, KeyError, TypeError, ValueError, AttributeError) as exc:
            raise StoreError(f"{key} in the store is no list of files: put the dataset again") from exc
        self._add(sha256, summary)
        return summary

    def _add(self, sha256: str, summary: PartSummary) -> None:
        with self._lock:
            self._drop(sha256)
            self._found[sha256] = summary
            self._chunks += len(summary.chunks)
            while len(self._found) > SUMMARIES_MAX or self._chunks > SUMMARY_CHUNKS_MAX:
                self._drop(next(iter(self._found)))

    def _drop(self, sha256: str) -> None:
        former = self._found.pop(sha256, None)
        if former is not None:
            self._chunks -= len(former.chunks)


def unpacked(key: str, packed: bytes, sha256: str) -> bytes:
    """Return the text of a document.

    Raises:
        StoreError: it is not the one of this hash.
    """
    try:
        text = text_of(packed)
    except Unreadable as exc:
        raise StoreError(f"{key} in the store is damaged: put the dataset again") from exc
    if documents.digest_of(text) != sha256:
        raise StoreError(f"{key} in the store is not what its hash says: put the dataset again")
    return text


def _summary(text: bytes, packed_bytes: int) -> PartSummary:
    """Return what a part says whose text was validated.

    Raises:
        Unreadable, KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    document = json.loads(text)
    rows = document["files"]
    return PartSummary(
        packed_bytes=packed_bytes,
        content_bytes=document["bytes"],
        files=sum(row["type"] == documents.FILE for row in rows),
        chunks=tuple(documents.DataChunk(*row) for row in document["chunks"]),
        first=documents.order_of_path(name_of(rows[0]["path"])) if rows else None,
        last=documents.order_of_path(name_of(rows[-1]["path"])) if rows else None,
    )
