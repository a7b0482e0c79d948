"""A staged tree becomes chunks and then a manifest in the store: chunks first, the manifest last.

A large file is cut into chunks; small files share one, since a request for each would take longer than their bytes.
Whether all of it fits into a manifest is known before the first byte goes out.

Each worker holds at most one chunk in memory, so memory is bounded by workers x chunk size, and a slow store slows the
reading and nothing else. Hashing and writing leave the interpreter's lock, so workers really run side by side.

Workers run at the priority they are given. Once that must be higher, others take their place, and each
of the first ones ends with the chunk it is at.
"""

from __future__ import annotations

import enum
import hashlib
import os
import sys
import threading
from typing import Any, Callable, Iterator, NamedTuple

from spotd_jobs.runner import manifest
from spotd_jobs.runner.store import GivenUp, RunnerStore
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import CHUNK_BYTES_MAX, CHUNKS_MAX, ascii_text
from spotd_jobs.wire.client.web import steady

# Threads that give way to the training they serve.
#
# No thread can be relied on to get back what it gave up (a container's root may not even leave `SCHED_IDLE` again):
# when an upload becomes more urgent, it is new threads that carry it on.


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_BEST_EFFORT_LAST = (2 << 13) | 7
_NICE = 10


class Priority(enum.IntEnum):
    """How far a thread gives way to all others of the machine."""

    NOT = 0
    MOSTLY = 1
    """It gets about a tenth of what a thread of the training gets on the same processor."""
    WHOLLY = 2
    """It gets what no other process uses, and three thousandths of a processor that is never idle."""


def lower_priority(how: Priority) -> None:
    """Let the calling thread yield processor and disk so far, where the system lets single threads do so."""
    if how is Priority.NOT or not hasattr(threading, "get_native_id") or not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)  # on Linux this is one thread's own
        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None:
            import ctypes

            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, thread, _BEST_EFFORT_LAST)
        if how is Priority.WHOLLY:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        return  # it is only a courtesy


_CHUNKS_PREFERRED_MAX = 16_384
_PACKED_BYTES_MAX = 1024 * 1024
_PACKED_SHARE = 8
_CHECK_S = 0.5


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


class _Part(NamedTuple):
    """Bytes of a file that go into a chunk: `size` of them, from `offset` on; the file's `number`-th part."""

    node: manifest.Node
    number: int
    offset: int
    size: int


class _Load(NamedTuple):
    """What one chunk is made of."""

    parts: tuple[_Part, ...]
    size: int


def loads_of(files: tuple[manifest.Node, ...], chunk_bytes: int, packed_below: int) -> list[_Load]:
    """Return the files cut into chunks of at most so many bytes, those below a size put together in their order."""
    loads: list[_Load] = []
    together: list[_Part] = []
    size = 0
    for node in files:
        if node.size >= packed_below:
            for number, offset in enumerate(range(0, node.size, chunk_bytes)):
                length = min(chunk_bytes, node.size - offset)
                loads.append(_Load((_Part(node, number, offset, length),), length))
        elif node.size:
            if size + node.size > chunk_bytes:
                loads.append(_Load(tuple(together), size))
                together, size = [], 0
            together.append(_Part(node, 0, 0, node.size))
            size += node.size
    if together:
        loads.append(_Load(tuple(together), size))
    return loads


class TreeUpload:
    """One upload of one stage.

    Args:
        gives_way: how far it is to give way now; asked again and again, and believed only when it is less than before.
        with_digests: each file that shares a chunk gets its own hash, as `digest`.
    """

    def __init__(
        self,
        stage: manifest.Stage,
        store: RunnerStore,
        known: manifest.ChunkIndex,
        progress: Progress,
        chunk_bytes: int,
        must_yield: Callable[[], bool],
        gives_way: Callable[[], Priority] = lambda: Priority.NOT,
        *,
        with_digests: bool = False,
    ) -> None:
        """Nothing was read yet.

        Raises:
            Unfit: it would not fit into a manifest.
        """
        self._gives_way = gives_way
        self._way = gives_way()
        self._stage = stage
        self._store = store
        self._known = known
        self._progress = progress
        self._must_yield = must_yield
        self.mark = manifest.new_mark()
        total = stage.tree.size
        while total > chunk_bytes * _CHUNKS_PREFERRED_MAX and chunk_bytes < CHUNK_BYTES_MAX:
            chunk_bytes *= 2  # a manifest has its limits too
        files = stage.tree.files
        loads = loads_of(files, chunk_bytes, min(_PACKED_BYTES_MAX, chunk_bytes // _PACKED_SHARE))
        if len(loads) > CHUNKS_MAX // 2:
            # Of files that are nearly large; fewer of their bytes are then known from the checkpoint before.
            loads = loads_of(files, chunk_bytes, chunk_bytes // 2)
        why = manifest.too_much(len(loads), manifest.text_bytes(stage.tree.nodes, len(loads)))
        if why:
            raise manifest.Unfit(why)
        self._loads: Iterator[_Load] = iter(loads)
        self._lock = threading.Lock()
        self._chunks: dict[str, dict[int, dict[str, Any]]] = {}
        self._digests: dict[str, str] | None = {} if with_digests else None
        self._error: BaseException | None = None

    def run(self, workers: int) -> list[dict[str, Any]]:
        """Send every chunk; return the manifest's `files`, which name only chunks that are in the store.

        Raises:
            Vanished: the content changed while it was read; nothing of it counts.
            Unfit: a part of it can not be read.
            Yielded, GivenUp
        """
        threads = self._crew(workers)
        while threads:
            threads[0].join(_CHECK_S)
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

    def _work(self, way: Priority) -> None:
        lower_priority(way)
        buffer = bytearray(0)
        try:
            while self._error is None and way is self._way:
                with self._lock:
                    load = next(self._loads, None)
                if load is None:
                    return
                if self._must_yield():
                    raise Yielded(self._stage.tree.name)
                if len(buffer) < load.size:
                    buffer = bytearray(load.size)
                self._send(load, memoryview(buffer)[: load.size])
        except BaseException as error:  # noqa: BLE001 - carried to `run`, which raises it in its caller's thread
            self._error = self._error or error
        finally:
            web.drop_connections()

    def _send(self, load: _Load, view: memoryview) -> None:
        place = 0
        for part in load.parts:
            descriptor = self._stage.open(part.node)
            try:
                _read_exactly(descriptor, view[place : place + part.size], part)
                if not manifest.is_same(descriptor, part.node):
                    raise manifest.Vanished(part.node.path)
            finally:
                os.close(descriptor)
            place += part.size
        digest = hashlib.sha256(view).hexdigest()
        if self._digests is not None and len(load.parts) > 1:
            place = 0
            for part in load.parts:
                self._digests[part.node.path] = hashlib.sha256(view[place : place + part.size]).hexdigest()
                place += part.size
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
            self._known.sent(digest, key, load.size)
            with self._lock:
                self._progress.sent += load.size
        with self._lock:
            self._progress.done += load.size
            place = 0
            for part in load.parts:
                row = {"key": key, "sha256": digest, "size": load.size, "offset": place, "length": part.size}
                self._chunks.setdefault(part.node.path, {})[part.number] = row
                place += part.size

    def _entry(self, node: manifest.Node) -> dict[str, Any]:
        chunks = self._chunks.get(node.path, {})
        more = {"digest": self._digests[node.path]} if self._digests and node.path in self._digests else {}
        return {
            "path": ascii_text(node.path),
            "type": node.kind,
            "size": node.size,
            "mode": node.mode,
            "mtime_ns": max(0, node.mtime_ns) if node.kind == manifest.FILE else 0,
            "target": None if node.target is None else ascii_text(node.target),
            "chunks": [chunks[number] for number in range(len(chunks))],
            **more,
        }


def _read_exactly(descriptor: int, view: memoryview, part: _Part) -> None:
    done = 0
    while done < part.size:
        if hasattr(os, "preadv"):
            count = os.preadv(descriptor, [view[done:]], part.offset + done)
        else:
            block = os.pread(descriptor, part.size - done, part.offset + done)
            count = len(block)
            view[done : done + count] = block
        if count == 0:
            raise manifest.Vanished(part.node.path)
        done += count
