"""What the daemon reads of the documents of datasets, and remembers of their parts.

Theory. A part is validated before it is stored, so a part in the store whose text has its hash needs no second
validation: that of a million files takes minutes on a busy machine, and requests have deadlines. What a part says
without its files is its summary. It is remembered while it is one of the newest, and otherwise read from the store.
Whether the store still has the part is another question, which is put to the store each time.
"""

from __future__ import annotations

import gzip
import json
import threading
from typing import Final, NamedTuple

from spotd_jobs.objects.api import ObjectStore, StoreError
from spotd_jobs.wire.client.dataset import (
    CHUNKS_MAX,
    DOCUMENT_BYTES_MAX,
    FILE,
    PARTS_MAX,
    DataChunk,
    data_part_key,
    digest_of,
    order_of_path,
)
from spotd_jobs.wire.client.sinks import Unreadable, name_of, text_of

SUMMARIES_MAX: Final = 4 * PARTS_MAX
SUMMARY_CHUNKS_MAX: Final = 2 * CHUNKS_MAX
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
    chunks: tuple[DataChunk, ...]
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
        self._objects.put(data_part_key(sha256), packed)
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
        key = data_part_key(sha256)
        packed = self._objects.get(key, bytes_max=DOCUMENT_BYTES_MAX)
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
    if digest_of(text) != sha256:
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
        files=sum(row["type"] == FILE for row in rows),
        chunks=tuple(DataChunk(*row) for row in document["chunks"]),
        first=order_of_path(name_of(rows[0]["path"])) if rows else None,
        last=order_of_path(name_of(rows[-1]["path"])) if rows else None,
    )
