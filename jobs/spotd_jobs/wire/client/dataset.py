"""The documents of a dataset: what lies where in which chunk, as its writer, the daemon and a host agree on it.

A dataset is a tree of files. Its content is stored in chunks, each named by the SHA-256 of its bytes; many small files
share a chunk. *Parts* list files and their chunks; the *root* lists the parts. All of them are canonical JSON, named by
the SHA-256 of their text, so that the hash of the root stands for every byte and every name of the dataset. Times and
owners of files are no part of it: the same tree gives the same hash wherever it was read.

Paths are written as `names.ascii_text` does. They come in the order of a walk that takes the names of each folder in
the order of their bytes, so that no path can come twice and none can lie below a file.

Of a dataset that lies elsewhere only the *listing* of its files is stored, under the SHA-256 of its text, so that a job
which keeps that hash reads the same files on every machine. How the content of a file is held to what was listed
depends on what its owner states of it: a SHA-256, the hash of a git object, or, of an object of a bucket, the `ETag`
that the server compares at each read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Iterable, NamedTuple

from spotd_jobs.wire.client import sinks

SCHEMA = 1
CHUNK_BYTES = 64 * 1024 * 1024
CHUNKS_MAX = 65_536
"""Of one dataset: 4.4 TB of large files."""
PARTS_MAX = 256
PART_FILES = 20_000
"""A part ends behind so many files, so that neither its writer nor a host holds all files of a large dataset."""
PART_CHUNKS = 4_096
BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES
DOCUMENT_BYTES_MAX = sinks.MANIFEST_BYTES_MAX
DOCUMENT_TEXT_MAX = sinks.MANIFEST_TEXT_MAX
PATH_BYTES_MAX = 4_096
NAME_BYTES_MAX = 255
MTIME_S = 946_684_800
"""Of every file of a dataset on a host: one that the job has written to shows it."""
PREFIX = "data/"
FILE, DIR, LINK = "file", "dir", "link"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Piece(NamedTuple):
    """A run of bytes of a chunk, which is named by its number in the part."""

    chunk: int
    offset: int
    length: int


class DataEntry(NamedTuple):
    """One path of a dataset. Folders are listed only where they are empty.

    Attributes:
        path: as the system's calls take it.
        target: of a link, relative, and inside the dataset.
    """

    path: str
    kind: str
    size: int = 0
    executable: bool = False
    target: str | None = None
    pieces: tuple[Piece, ...] = ()


class DataChunk(NamedTuple):
    """One object of content."""

    sha256: str
    size: int


class DataPart(NamedTuple):
    """Some files of a dataset, with all chunks they are made of."""

    chunks: tuple[DataChunk, ...]
    entries: tuple[DataEntry, ...]
    bytes: int

    @property
    def files(self) -> int:
        """How many of its paths are files."""
        return sum(entry.kind == FILE for entry in self.entries)


class PartRow(NamedTuple):
    """What the root states of one part."""

    sha256: str
    bytes: int
    files: int
    chunks: int


class DataRoot(NamedTuple):
    """A whole dataset."""

    parts: tuple[PartRow, ...]
    bytes: int
    files: int
    chunks: int


def is_dataset_name(text: str) -> bool:
    """Whether a dataset can have this name."""
    return _NAME.fullmatch(text) is not None


def is_digest(text: object) -> bool:
    """Whether this is a SHA-256 in lower-case hex."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def data_chunk_key(sha256: str) -> str:
    return PREFIX + "chunks/" + sha256


def data_part_key(sha256: str) -> str:
    return PREFIX + "parts/" + sha256


def data_root_key(sha256: str) -> str:
    return PREFIX + "roots/" + sha256


def digest_of(text: bytes) -> str:
    """Return the hash by which a document is named: that of its text, however it is packed."""
    return hashlib.sha256(text).hexdigest()


def part_text(chunks: Iterable[DataChunk], entries: Iterable[DataEntry]) -> bytes:
    """Return the canonical text of a part."""
    listed = list(entries)
    return _canonical(
        {
            "schema": SCHEMA,
            "bytes": sum(entry.size for entry in listed),
            "chunks": [[chunk.sha256, chunk.size] for chunk in chunks],
            "files": [_row(entry) for entry in listed],
        }
    )


def root_text(rows: Iterable[PartRow]) -> bytes:
    """Return the canonical text of a root."""
    parts = list(rows)
    return _canonical(
        {
            "schema": SCHEMA,
            "bytes": sum(row.bytes for row in parts),
            "files": sum(row.files for row in parts),
            "chunks": sum(row.chunks for row in parts),
            "parts": [list(row) for row in parts],
        }
    )


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _row(entry: DataEntry) -> dict[str, Any]:
    row: dict[str, Any] = {"path": sinks.ascii_text(entry.path), "type": entry.kind}
    if entry.kind == FILE:
        row.update(size=entry.size, pieces=[list(piece) for piece in entry.pieces])
    if entry.executable:
        row["executable"] = True
    if entry.target is not None:
        row["target"] = sinks.ascii_text(entry.target)
    return row


def read_root(text: bytes) -> DataRoot:
    """Return the root that the text holds.

    Raises:
        Unreadable: it holds none.
    """
    document = _document(text)
    try:
        rows = tuple(_part_row(row) for row in document["parts"])
    except (KeyError, TypeError, ValueError):
        raise sinks.Unreadable("the list of its parts can not be read") from None
    if len(rows) > PARTS_MAX or len({row.sha256 for row in rows}) < len(rows):
        raise sinks.Unreadable("it has more than %d parts, or one twice" % PARTS_MAX)
    root = DataRoot(
        rows, sum(row.bytes for row in rows), sum(row.files for row in rows), sum(row.chunks for row in rows)
    )
    if root.chunks > CHUNKS_MAX or root.bytes > BYTES_MAX:
        raise sinks.Unreadable("it is larger than a dataset can be")
    if text != root_text(rows):
        raise sinks.Unreadable("its text is not the canonical one")
    return root


def _part_row(row: Any) -> PartRow:
    sha256, size, files, chunks = row
    if not is_digest(sha256):
        raise ValueError(sha256)
    return PartRow(sha256, _whole(size), _whole(files), _whole(chunks))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= BYTES_MAX:
        raise ValueError(value)
    return value


def _document(text: bytes) -> dict[str, Any]:
    if len(text) > DOCUMENT_TEXT_MAX:
        raise sinks.Unreadable("a document of it is larger than %d bytes" % DOCUMENT_TEXT_MAX)
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise sinks.Unreadable("a document of it is of another version of spotd")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise sinks.Unreadable("a document of it can not be read") from None
    result: dict[str, Any] = document
    return result


def read_part(text: bytes) -> DataPart:
    """Return the part that the text holds, whose paths and links all stay inside.

    Raises:
        Unreadable: it holds none, or one that does not add up.
    """
    document = _document(text)
    try:
        chunks = tuple(_chunk(row) for row in document["chunks"])
        entries = tuple(_entry(row, chunks) for row in document["files"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise sinks.Unreadable("the list of its files can not be read") from None
    if len({chunk.sha256 for chunk in chunks}) < len(chunks):
        raise sinks.Unreadable("a part lists a chunk twice")
    require_order(entry.path for entry in entries)
    if text != part_text(chunks, entries):
        raise sinks.Unreadable("the text of a part is not the canonical one")
    return DataPart(chunks, entries, sum(entry.size for entry in entries))


def order_of_path(path: str) -> bytes:
    """Return by what the paths of a dataset are sorted."""
    return os.fsencode(path).replace(b"/", b"\0")


def require_order(paths: Iterable[str]) -> None:
    """Require that no path comes twice and none lies below another.

    Raises:
        Unreadable
    """
    before = b""
    for path in paths:
        order = order_of_path(path)
        if order <= before or (before and order.startswith(before + b"\0")):
            raise sinks.Unreadable("its paths are not in order, or one lies below another")
        before = order


def _chunk(row: Any) -> DataChunk:
    sha256, size = row
    if not is_digest(sha256) or not 0 < _whole(size) <= CHUNK_BYTES:
        raise ValueError(row)
    return DataChunk(sha256, size)


def _entry(row: Any, chunks: tuple[DataChunk, ...]) -> DataEntry:
    path, kind = sinks.name_of(row["path"]), row["type"]
    target = row.get("target")
    require_path(path)
    if kind == LINK:
        return DataEntry(path, LINK, target=_target(path, sinks.name_of(target)))
    if target is not None or kind not in (FILE, DIR):
        raise ValueError(kind)
    if kind == DIR:
        return DataEntry(path, DIR)
    pieces = tuple(_piece(piece, chunks) for piece in row["pieces"])
    size = _whole(row["size"])
    if sum(piece.length for piece in pieces) != size:
        raise sinks.Unreadable("the pieces of a file do not add up to its size")
    return DataEntry(path, FILE, size, bool(row.get("executable")), None, pieces)


def require_path(path: str) -> None:
    """Require that the path stays inside and every disk takes it.

    Raises:
        Unreadable
    """
    raw = os.fsencode(path)
    names = raw.split(b"/")
    if not sinks.is_plain(path) or b"\0" in raw or len(raw) > PATH_BYTES_MAX:
        raise sinks.Unreadable("it holds a path that leads outside, or is too long")
    if any(len(name) > NAME_BYTES_MAX for name in names):
        raise sinks.Unreadable("it holds a name that no disk takes")


def _target(path: str, target: str) -> str:
    problem = link_problem(path, target)
    if problem:
        raise sinks.Unreadable(problem)
    return target


def link_problem(path: str, target: str) -> str:
    """Why a link of a dataset can not lead there; empty if it can."""
    climbs, rest = sinks.climb(target)
    if not target or target.startswith("/") or climbs > path.count("/") or not sinks.is_plain("/".join(rest) or "-"):
        return "a link leads outside or nowhere"
    if "\0" in target or len(sinks.raw_of(sinks.ascii_text(target))) > PATH_BYTES_MAX:
        return "the target of a link is no path"
    return ""


def _piece(row: Any, chunks: tuple[DataChunk, ...]) -> Piece:
    number, offset, length = (_whole(value) for value in row)
    if length < 1 or offset + length > chunks[_number(number, chunks)].size:
        raise sinks.Unreadable("a piece of a file lies outside its chunk")
    return Piece(number, offset, length)


def _number(number: int, chunks: tuple[DataChunk, ...]) -> int:
    if number >= len(chunks):
        raise sinks.Unreadable("a file names a chunk that is not listed")
    return number


# The files of a dataset that lies elsewhere than in the store, in a bucket or a hub, as they were at a submission.


LISTING_SCHEMA = 1
FILES_MAX = CHUNKS_MAX
SHA256, GIT, ETAG, STORED = "sha256", "git", "etag", "stored"
_CHECKS = {
    SHA256: re.compile(r"[0-9a-f]{64}"),
    GIT: re.compile(r"[0-9a-f]{40}"),
    ETAG: re.compile(r"[!#-~]{1,200}"),
    STORED: re.compile(r"[0-9a-f]{64}"),
}


class ListedFile(NamedTuple):
    """One file.

    Attributes:
        path: below the dataset's folder, as the system's calls take it.
        kind: what `check` is. `STORED` is a SHA-256, too, of a file that the store has as a chunk.
    """

    path: str
    size: int
    kind: str
    check: str


def data_listing_key(sha256: str) -> str:
    return PREFIX + "listings/" + sha256


def file_url_key(number: int) -> str:
    """Return by what a grant names the URL of a file, which is known by its place in the list."""
    return "file/%d" % number


def listing_text(files: Iterable[ListedFile]) -> bytes:
    """Return the canonical text of a listing."""
    rows = [[sinks.ascii_text(one.path), one.size, one.kind, one.check] for one in files]
    document = {"schema": LISTING_SCHEMA, "files": rows}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def read_listing(text: bytes) -> tuple[ListedFile, ...]:
    """Return the files that the text lists, whose paths all stay inside.

    Raises:
        Unreadable: it lists none, or not as a writer of ours does.
    """
    if len(text) > DOCUMENT_TEXT_MAX:
        raise sinks.Unreadable("the list of its files is larger than %d bytes" % DOCUMENT_TEXT_MAX)
    try:
        document = json.loads(text)
        if document["schema"] != LISTING_SCHEMA:
            raise sinks.Unreadable("the list of its files is of another version of spotd")
        files = tuple(_file(row) for row in document["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise sinks.Unreadable("the list of its files can not be read") from None
    if not 0 < len(files) <= FILES_MAX or sum(one.size for one in files) > BYTES_MAX:
        raise sinks.Unreadable("it lists no file, or more than %d" % FILES_MAX)
    require_order(one.path for one in files)
    if text != listing_text(files):
        raise sinks.Unreadable("its text is not the canonical one")
    return files


def _file(row: Any) -> ListedFile:
    path, size, kind, check = sinks.name_of(row[0]), row[1], row[2], row[3]
    require_path(path)
    if type(size) is not int or not 0 <= size <= BYTES_MAX or _CHECKS[kind].fullmatch(check) is None:
        raise ValueError(row)
    if kind == STORED and not 0 < size <= CHUNK_BYTES:
        raise ValueError(row)
    return ListedFile(path, size, kind, check)
