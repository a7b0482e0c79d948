"""A staged tree becomes chunks and then a manifest in the store: chunks first, the manifest last.

Each worker holds at most one chunk in memory, so memory is bounded by workers x chunk size, and a slow store slows the
reading and nothing else. Hashing and writing leave the interpreter's lock, so workers really run side by side.

Workers give way to the training as far as they are told. Once they must do so less, others take their place, and each
of the first ones ends with the chunk it is at.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any, Callable, NamedTuple

from spotd_jobs.runner import web
from spotd_jobs.runner.clocks import steady
from spotd_jobs.runner.known import KnownChunks, new_mark
from spotd_jobs.runner.lowkey import GivesWay, give_way
from spotd_jobs.runner.store import GivenUp, Store
from spotd_jobs.runner.tree import FILE, Node, Stage, Vanished, is_same

_CHUNKS_WISHED_MAX = 16_384
_CHUNK_BYTES_MAX = 64 * 1024 * 1024
_LOOK_S = 0.5


class Yielded(Exception):
    """The upload was put back because another one is more urgent. What was sent stays known."""


class Progress:
    """How far the upload under way is; read by the heartbeat without a lock."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.total = 0
        self.done = 0
        self.sent = 0
        self._began = 0.0
        self._ended = 0.0

    def begin(self, name: str, total: int) -> None:
        self.name, self.total, self.done, self.sent = name, total, 0, 0
        self._began, self._ended = steady(), 0.0

    def end(self) -> None:
        self.name, self._ended = None, steady()

    @property
    def seconds(self) -> float:
        return (self._ended or steady()) - self._began

    @property
    def rate(self) -> int:
        """Bytes per second that really went to the store, in this upload or the last."""
        return int(self.sent / max(self.seconds, 0.001)) if self._began else 0

    @property
    def pace(self) -> float:
        """Bytes per second that were dealt with, sent or not."""
        return self.done / max(self.seconds, 0.001)


class _Piece(NamedTuple):
    node: Node
    number: int
    offset: int
    size: int


def _not_at_all() -> GivesWay:
    return GivesWay.NOT


class TreeUpload:
    """One upload of one stage.

    Args:
        gives_way: how far it is to give way now; asked again and again, and believed only when it is less than before.
    """

    def __init__(
        self,
        stage: Stage,
        store: Store,
        known: KnownChunks,
        progress: Progress,
        chunk_bytes: int,
        must_yield: Callable[[], bool],
        gives_way: Callable[[], GivesWay] = _not_at_all,
    ) -> None:
        self._gives_way = gives_way
        self._way = gives_way()
        self._stage = stage
        self._store = store
        self._known = known
        self._progress = progress
        self._must_yield = must_yield
        self.mark = new_mark()
        total = stage.tree.size
        while total > chunk_bytes * _CHUNKS_WISHED_MAX and chunk_bytes < _CHUNK_BYTES_MAX:
            chunk_bytes *= 2  # a manifest has its limits too
        self._chunk_bytes = chunk_bytes
        self._pieces = iter(self._split())
        self._lock = threading.Lock()
        self._chunks: dict[str, dict[int, dict[str, Any]]] = {}
        self._error: BaseException | None = None

    def run(self, workers: int) -> list[dict[str, Any]]:
        """The manifest's `files`; every chunk they name is in the store.

        Raises:
            Vanished: the content changed while it was read; nothing of it counts.
            Yielded, GivenUp
        """
        threads = self._crew(workers)
        while threads:
            threads[0].join(_LOOK_S)
            threads = [thread for thread in threads if thread.is_alive()]
            way = self._gives_way()
            if threads and way < self._way:
                self._way = way
                threads += self._crew(workers)
        if self._error is not None:
            raise self._error
        return [self._entry(node) for node in self._stage.tree.nodes]

    def _crew(self, workers: int) -> list[threading.Thread]:
        crew = [
            threading.Thread(target=self._work, args=(self._way,), name="upload-%d" % number, daemon=True)
            for number in range(workers)
        ]
        for thread in crew:
            thread.start()
        return crew

    def _split(self) -> list[_Piece]:
        return [
            _Piece(node, number, offset, min(self._chunk_bytes, node.size - offset))
            for node in self._stage.tree.files
            for number, offset in enumerate(range(0, node.size, self._chunk_bytes))
        ]

    def _work(self, way: GivesWay) -> None:
        give_way(way)
        buffer = bytearray(0)
        try:
            while self._error is None and way is self._way:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                if self._must_yield():
                    raise Yielded(self._stage.tree.name)
                if len(buffer) < piece.size:
                    buffer = bytearray(piece.size)
                self._send(piece, memoryview(buffer)[: piece.size])
        except BaseException as error:  # noqa: BLE001 - carried to `run`, which raises it in its caller's thread
            self._error = self._error or error
        finally:
            web.drop_connections()

    def _send(self, piece: _Piece, view: memoryview) -> None:
        descriptor = self._stage.open(piece.node)
        try:
            _read_exactly(descriptor, view, piece)
            digest = hashlib.sha256(view).hexdigest()
            if not is_same(descriptor, piece.node):
                raise Vanished(piece.node.path)
        finally:
            os.close(descriptor)
        key = self._known.claim(digest)
        if key is None:
            name = "data/" + digest + self.mark
            key = self._store.prefix + name
            try:
                self._store.put(name, view, digest, self._must_yield)
            except BaseException as error:
                self._known.failed(digest)
                if isinstance(error, GivenUp) and self._must_yield():
                    raise Yielded(self._stage.tree.name) from None
                raise
            self._known.sent(digest, key)
            with self._lock:
                self._progress.sent += piece.size
        with self._lock:
            self._progress.done += piece.size
            self._chunks.setdefault(piece.node.path, {})[piece.number] = {
                "key": key,
                "sha256": digest,
                "size": piece.size,
            }

    def _entry(self, node: Node) -> dict[str, Any]:
        chunks = self._chunks.get(node.path, {})
        return {
            "path": node.path,
            "type": node.kind,
            "size": node.size,
            "mode": node.mode,
            "mtime_ns": max(0, node.mtime_ns) if node.kind == FILE else 0,
            "target": node.target,
            "chunks": [chunks[number] for number in range(len(chunks))],
        }


def _read_exactly(descriptor: int, view: memoryview, piece: _Piece) -> None:
    done = 0
    while done < piece.size:
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [view[done:]], piece.offset + done)
        else:
            block = os.pread(descriptor, piece.size - done, piece.offset + done)
            count = len(block)
            view[done : done + count] = block
        if count == 0:
            raise Vanished(piece.node.path)
        done += count
