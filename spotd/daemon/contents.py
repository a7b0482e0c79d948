"""Manifests and chunks as the daemon reads them back: blocking calls for a worker thread, hashing included."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from spotd.core.domain.jobs import Checkpoint
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX
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
