"""Pieces of many files out of the store: each chunk once, several at a time, in a bounded amount of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from spotd.daemon.checkpoints.contents import DamagedContent, piece
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.manifest_document import Chunk

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
