"""Reads a folder as a dataset, in one pass and with bounded memory, and gives its chunks and documents to a sink.

Small files share a chunk. A chunk ends where it is full, and behind some files that are chosen by their names alone, so
that a file that was added or changed moves few others into other chunks: what is stored already is not sent again.
A folder that changes while it is read is refused: its dataset would be one that never existed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from spotd_jobs.wire.client import dataset as documents
from spotd_jobs.wire.client.sinks import ascii_text

UPLOADS: Final = 3
"""Chunks on their way at once; each takes up to `CHUNK_BYTES` of memory."""
_CUT_BYTES: Final = documents.CHUNK_BYTES // 8
_CUT_MASK: Final = 0x3F


class DatasetError(Exception):
    """A folder that cannot be a dataset. `hint` is a way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class DatasetSink(Protocol):
    """Takes what a dataset consists of; called from several threads."""

    def put_chunk(self, sha256: str, data: bytes | bytearray) -> None:
        """Store the chunk, unless it is there."""
        ...

    def put_part(self, sha256: str, text: bytes) -> None:
        """Store the part, unless it is there."""
        ...


@dataclass(slots=True)
class _Open:
    """The part that is being filled."""

    entries: list[documents.DataEntry] = field(default_factory=list)
    chunks: list[Future[documents.DataChunk]] = field(default_factory=list)


def pack_dataset(
    folder: Path,
    sink: DatasetSink,
    *,
    follow: bool = False,
    chunk_bytes: int = documents.CHUNK_BYTES,
    part_files: int = documents.PART_FILES,
    progress: Callable[[int], None] | None = None,
) -> bytes:
    """Give everything that the folder holds to the sink; return the text of the root, which the caller stores last.

    Args:
        follow: what links that lead out of the folder mean is read in their place.

    Raises:
        DatasetError: the folder cannot be a dataset, or changed meanwhile.
    """
    with ThreadPoolExecutor(UPLOADS) as pool:
        packing = _Packing(sink, pool, chunk_bytes, part_files, progress or _ignore)
        try:
            for node in _walk(folder, follow=follow):
                packing.add(node)
            return documents.root_text(packing.finish())
        except OSError as exc:
            raise _unreadable(folder, exc) from exc


def measure_dataset(folder: Path, *, follow: bool = False) -> tuple[int, int]:
    """Return how many bytes and files the folder holds, without reading them.

    Raises:
        DatasetError: the folder cannot be a dataset.
    """
    size = files = 0
    try:
        for node in _walk(folder, follow=follow):
            if node.kind == documents.FILE:
                size += os.stat(node.place).st_size  # noqa: PTH116 - a Path for each of a million names costs
                files += 1
    except OSError as exc:
        raise _unreadable(folder, exc) from exc
    return size, files


def _unreadable(folder: Path, exc: OSError) -> DatasetError:
    name = ascii_text(os.fsdecode(exc.filename)) if isinstance(exc.filename, str | bytes) else str(folder)
    return DatasetError(f"{name} cannot be read: {exc.strerror or exc}", hint="check who may read it, or move it out")


def _ignore(count: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One path as the walk found it; `place` is where it is read."""

    path: str
    kind: str
    place: str = ""
    target: str | None = None


class _Packing:
    def __init__(
        self,
        sink: DatasetSink,
        pool: ThreadPoolExecutor,
        chunk_bytes: int,
        part_files: int,
        progress: Callable[[int], None],
    ) -> None:
        self._sink = sink
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._part_files = part_files
        self._progress = progress
        self._open = _Open()
        self._buffer = bytearray()
        self._on_the_way: list[Future[documents.DataChunk]] = []
        self._rows: list[documents.PartRow] = []
        self._chunks = 0

    def add(self, node: _Node) -> None:
        """Take the path into the dataset."""
        if node.kind == documents.FILE:
            self._add_file(node)
        else:
            self._open.entries.append(documents.DataEntry(node.path, node.kind, target=node.target))
        if len(self._open.entries) >= self._part_files or len(self._open.chunks) >= documents.PART_CHUNKS:
            self._close_part()

    def finish(self) -> list[documents.PartRow]:
        """Return the rows of all parts; every one is stored."""
        self._close_part()
        return self._rows

    def _add_file(self, node: _Node) -> None:
        with _opened(node) as file:
            before = os.fstat(file.fileno())
            size = before.st_size
            if size > self._chunk_bytes - len(self._buffer):
                self._flush()
            pieces: list[documents.Piece] = []
            left = size
            while left:
                start = len(self._buffer)
                count = min(left, self._chunk_bytes - start)
                self._take(file.fileno(), count, node)
                pieces.append(documents.Piece(len(self._open.chunks), start, count))
                left -= count
                if len(self._buffer) == self._chunk_bytes:
                    self._flush()
            after = os.fstat(file.fileno())
            if os.read(file.fileno(), 1) or _differs(before, after):
                raise _changed_error(node.path)
        executable = bool(before.st_mode & stat.S_IXUSR)
        self._open.entries.append(documents.DataEntry(node.path, documents.FILE, size, executable, None, tuple(pieces)))
        cut = len(self._buffer) >= min(_CUT_BYTES, self._chunk_bytes // 8)
        if cut and not zlib.crc32(os.fsencode(node.path)) & _CUT_MASK:
            self._flush()

    def _take(self, descriptor: int, count: int, node: _Node) -> None:
        start = len(self._buffer)
        self._buffer += bytes(count)
        with memoryview(self._buffer)[start:] as view:
            done = 0
            while done < count:
                got = os.readv(descriptor, [view[done : done + 8 * 1024 * 1024]])
                if not got:
                    raise _changed_error(node.path)
                done += got
                self._progress(got)

    def _flush(self) -> None:
        """Send the chunk that is being filled, once fewer than `UPLOADS` are on their way."""
        if not self._buffer:
            return
        self._chunks += 1
        if self._chunks > documents.CHUNKS_MAX:
            most = documents.CHUNKS_MAX * self._chunk_bytes / 1e12
            raise DatasetError(f"it is larger than {most:.1f} TB", hint="split it into several datasets")
        while len(self._on_the_way) >= UPLOADS:
            self._on_the_way.pop(0).result()
        sent = self._pool.submit(_send, self._sink, self._buffer)
        self._on_the_way.append(sent)
        self._open.chunks.append(sent)
        self._buffer = bytearray()

    def _close_part(self) -> None:
        self._flush()
        if not self._open.entries:
            return
        self._on_the_way.clear()
        entries, chunks = _without_doubles(self._open.entries, [sent.result() for sent in self._open.chunks])
        text = documents.part_text(chunks, entries)
        self._sink.put_part(sha256 := documents.digest_of(text), text)
        size = sum(entry.size for entry in entries)
        self._rows.append(
            documents.PartRow(sha256, size, sum(entry.kind == documents.FILE for entry in entries), len(chunks))
        )
        if len(self._rows) > documents.PARTS_MAX:
            raise DatasetError(
                f"it has more than {documents.PARTS_MAX * self._part_files:,} files",
                hint="pack them into fewer, larger files",
            )
        self._open = _Open()


def _without_doubles(
    entries: list[documents.DataEntry], chunks: list[documents.DataChunk]
) -> tuple[list[documents.DataEntry], tuple[documents.DataChunk, ...]]:
    """Return the same with each chunk listed once: many files of zeros are one chunk."""
    numbers: dict[documents.DataChunk, int] = {}
    for chunk in chunks:
        numbers.setdefault(chunk, len(numbers))
    if len(numbers) == len(chunks):
        return entries, tuple(chunks)
    renumbered = [
        entry._replace(pieces=tuple(piece._replace(chunk=numbers[chunks[piece.chunk]]) for piece in entry.pieces))
        for entry in entries
    ]
    return renumbered, tuple(numbers)


def _send(sink: DatasetSink, data: bytearray) -> documents.DataChunk:
    chunk = documents.DataChunk(hashlib.sha256(data).hexdigest(), len(data))
    sink.put_chunk(chunk.sha256, data)
    return chunk


class _opened:  # noqa: N801 - a context manager that is used as a function
    """The file, opened without following a link that took its place."""

    def __init__(self, node: _Node) -> None:
        self._descriptor = os.open(node.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise _changed_error(node.path)

    def __enter__(self) -> _opened:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor


def _differs(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino)


def _changed_error(path: str) -> DatasetError:
    return DatasetError(
        f"{ascii_text(path) or 'the folder'} changed while it was read",
        hint="wait until nothing writes to the folder, and run this again: only what is missing is sent",
    )


def _walk(top: Path, *, follow: bool) -> Iterator[_Node]:
    """Yield every path below the folder in the order of a dataset; one folder's names are held for each level."""
    if not top.is_dir():
        raise DatasetError(f"{top} is no folder", hint="name the folder whose files are the dataset")
    start = os.fspath(top.resolve())
    found = False
    # For each level: the folder, its state when its names were read, and the names that are left.
    levels = [(start, os.stat(start), iter(_names(start)))]  # noqa: PTH116 - a Path for each of a million names costs
    read: list[tuple[str, int]] = []
    while levels:
        folder, before, names = levels[-1]
        name = next(names, None)
        if name is None:
            levels.pop()
            read.append((folder, before.st_mtime_ns))
            continue
        found = True
        place = f"{folder}/{name}"
        path = place[len(start) + 1 :]
        if len(os.fsencode(path)) > documents.PATH_BYTES_MAX:
            raise DatasetError(f"{ascii_text(path)[:80]}... is too long", hint="use shorter names")
        info = os.lstat(place)
        if stat.S_ISDIR(info.st_mode):
            inner = _names(place)
            if inner:
                levels.append((place, info, iter(inner)))
            else:
                yield _Node(path, documents.DIR)
        elif stat.S_ISREG(info.st_mode):
            yield _Node(path, documents.FILE, place)
        elif stat.S_ISLNK(info.st_mode):
            yield _link(path, place, follow=follow)
        else:
            raise DatasetError(f"{ascii_text(path)} is neither file, folder nor link", hint="move it out of the folder")
    for folder, changed_ns in read:
        # Only now: what was moved from a folder that was not read yet to one that was is in neither.
        if os.stat(folder).st_mtime_ns != changed_ns:  # noqa: PTH116 - as in `_names`
            raise _changed_error(os.path.relpath(folder, start))
    if not found:
        raise DatasetError(f"{top} is empty", hint="name the folder whose files are the dataset")


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder), key=os.fsencode)  # noqa: PTH208 - a Path for each of a million names costs


def _link(path: str, place: str, *, follow: bool) -> _Node:
    target = os.readlink(place)  # noqa: PTH115 - as in `_names`
    if not documents.link_problem(path, target):
        return _Node(path, documents.LINK, target=target)
    real = os.path.realpath(place)
    if not follow:
        raise DatasetError(
            f"the link {ascii_text(path)} leads out of the folder",
            hint="spotctl data put NAME DIR --follow stores what it leads to; or move it out of the folder",
        )
    if not os.path.isfile(real):  # noqa: PTH113 - as in `_names`
        raise DatasetError(f"the link {ascii_text(path)} leads to no file", hint="move it out of the folder")
    return _Node(path, documents.FILE, real)
