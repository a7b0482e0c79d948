"""A manifest as bytes and as a value: the one reader of both schemas, bounded in bytes, text, files and chunks.

Schema 1 repeats the whole chunk with each file and holds paths as they are. Schema 2 lists the chunks once, since many
small files may share one, holds names as `name_of` reads them, and may be compressed. As a value there is only one
kind: paths are printable text, and each file is a sequence of parts of chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from spotd_jobs.wire import grant
from spotd_jobs.wire.client import sinks
from spotd_jobs.wire.reports import first_problem

FILES_MAX: Final = 100_000
DEPTH_MAX: Final = 256
_TEXT_OF_PATH_MAX: Final = 3 * grant.PATH_BYTES_MAX
_VALUES_MAX: Final = 4_000_000
"""More commas or brackets than any manifest within its limits has; each would cost memory before anything is known."""
_CHUNK_NAME: Final = r"^[0-9a-f]{64}(?:-[0-9a-f]{8})?$"


class ManifestKind(StrEnum):
    """What was saved."""

    CHECKPOINT = "checkpoint"
    OUTPUTS = "outputs"


class EntryType(StrEnum):
    """What a path of a manifest is. Folders are listed only where they are empty."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a chunk that is a piece of a file.

    Attributes:
        key: its last part is the SHA-256, with the mark of the upload that sent it behind.
        size: of the whole chunk.
        offset, length: what of it is meant.
    """

    key: str
    sha256: str
    size: int
    offset: int
    length: int

    def part_of(self, content: bytes) -> bytes:
        """Cut this part out of the content of the whole chunk."""
        return content if self.length == len(content) else content[self.offset : self.offset + self.length]


@dataclass(frozen=True, slots=True)
class Entry:
    """One path below the checkpoint folder, as printable text. `target` is a symbolic link's, relative and inside."""

    path: str
    type: EntryType
    size: int
    mode: int
    mtime_ns: int
    target: str | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One complete checkpoint, or the outputs of a job, as it was written.

    Attributes:
        name: unique within the attempt: a file that is written over and over is a checkpoint of another name each time.
        entry: what it is called directly below the checkpoint path, where that is not `name`. Every path begins with
            it, except companions (a framework's own pointer files beside it, such as DeepSpeed's `latest`), which are
            single names.
        serial: rises in the order in which checkpoints of one attempt became complete.
        previous: SHA-256 of the manifest that this runner published or restored before.
    """

    kind: ManifestKind
    job: str
    attempt: int
    name: str
    entry: str | None
    serial: int
    step: int | None
    created_at: datetime
    bytes: int
    files: tuple[Entry, ...]
    previous: str | None

    def chunk_sizes(self) -> dict[str, int]:
        """Return the size of every chunk that it names, by key."""
        return {chunk.key: chunk.size for entry in self.files for chunk in entry.chunks}


def parts_of(text: str) -> list[bytes]:
    """Return the very names along a path that was written as text.

    Raises:
        ValueError: it is empty, absolute or climbs, or no file system holds it.
    """
    raw = sinks.raw_of(text)
    parts = raw.split(b"/")
    if not raw or len(raw) > grant.PATH_BYTES_MAX or len(parts) > DEPTH_MAX:
        raise ValueError(f"must be 1 to {grant.PATH_BYTES_MAX} bytes and at most {DEPTH_MAX} folders deep")
    if any(part in {b"", b".", b".."} or len(part) > grant.NAME_BYTES_MAX or b"\0" in part for part in parts):
        raise ValueError("must have no empty, '.' or '..' part, no NUL, and no part longer than 255 bytes")
    return parts


def _path(text: str) -> str:
    return sinks.printable_text(b"/".join(parts_of(text)))


def _name(text: str) -> str:
    parts = parts_of(text)
    if len(parts) != 1:
        raise ValueError("must be one name, not a path")
    return sinks.printable_text(parts[0])


def _target(text: str) -> str:
    return sinks.printable_text(sinks.raw_of(text))


class _Chunk1(grant.WireModel):
    key: grant.StoreKey
    sha256: grant.Sha256
    size: Annotated[int, Field(ge=1, le=sinks.CHUNK_BYTES_MAX)]


Mode = Annotated[int, Field(ge=0, le=0o777)]
Nanoseconds = Annotated[int, Field(ge=0, lt=2**63)]
Target = Annotated[str, Field(max_length=_TEXT_OF_PATH_MAX)]


class _Entry1(grant.WireModel):
    path: grant.RelativePath
    type: EntryType
    size: grant.Size
    mode: Mode
    mtime_ns: Nanoseconds
    target: Annotated[str, Field(max_length=grant.PATH_BYTES_MAX)] | None
    chunks: list[_Chunk1]


class _Head(grant.WireModel):
    kind: ManifestKind
    job: grant.JobId
    attempt: Annotated[int, Field(ge=1, le=10**9)]
    name: grant.EntryName
    serial: grant.Count
    step: grant.Count | None
    created_at: grant.Instant
    bytes: grant.Size
    previous: grant.Sha256 | None
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    seal: grant.Sha256 | None = None


class _Manifest1(_Head):
    schema_: Literal[1] = Field(alias="schema")
    entry: grant.EntryName | None = None
    files: Annotated[list[_Entry1], Field(max_length=FILES_MAX + sinks.COMPANIONS_MAX)]


ChunkName = Annotated[str, Field(pattern=_CHUNK_NAME)]
ChunkSize = Annotated[int, Field(ge=1, le=sinks.CHUNK_BYTES_MAX)]
Place = Annotated[int, Field(ge=0, le=sinks.CHUNK_BYTES_MAX)]
Number = Annotated[int, Field(ge=1, le=10**9)]
_Piece = tuple[Place] | tuple[Place, Place, ChunkSize]


class _Entry2(grant.WireModel):
    path: Annotated[str, Field(max_length=_TEXT_OF_PATH_MAX), AfterValidator(_path)]
    type: EntryType
    size: grant.Size = 0
    mode: Mode
    mtime_ns: Nanoseconds = 0
    target: Annotated[Target, AfterValidator(_target)] | None = None
    pieces: list[_Piece] = Field(default_factory=list)


class _Manifest2(_Head):
    schema_: Literal[2] = Field(alias="schema")
    entry: Annotated[str, Field(max_length=_TEXT_OF_PATH_MAX), AfterValidator(_name)]
    chunks: Annotated[
        list[tuple[ChunkName, ChunkSize] | tuple[ChunkName, ChunkSize, Number]], Field(max_length=sinks.CHUNKS_MAX)
    ]
    files: Annotated[list[_Entry2], Field(max_length=FILES_MAX + sinks.COMPANIONS_MAX)]


_READER: Final[TypeAdapter[_Manifest1 | _Manifest2]] = TypeAdapter(
    Annotated[_Manifest1 | _Manifest2, Field(discriminator="schema_")]
)


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest that these bytes hold.

    Raises:
        WireError: they hold none within the limits, or do not match their own seal.
    """
    if len(data) > sinks.MANIFEST_BYTES_MAX:
        raise grant.WireError(f"manifest of {len(data)} bytes is larger than {sinks.MANIFEST_BYTES_MAX}")
    try:
        text = sinks.text_of(data)
    except sinks.Unreadable as error:
        raise grant.WireError(str(error)) from None
    if text.count(b",") + text.count(b"[") + text.count(b"{") > _VALUES_MAX:
        raise grant.WireError("not a manifest: it holds more values than any has")
    try:
        wire = _READER.validate_json(text)
    except ValidationError as error:
        # The message about a discriminator quotes what is there.
        known = "union_tag" not in str(error.errors(include_url=False, include_context=False)[0]["type"])
        raise grant.WireError(f"not a manifest: {first_problem(error) if known else 'its schema is unknown'}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise grant.WireError(f"not a manifest: {type(error).__name__}") from None
    if wire.seal is not None:
        _check_seal(text, wire.seal)
    files = _files_1(wire.files) if isinstance(wire, _Manifest1) else _files_2(wire)
    return Manifest(
        kind=wire.kind,
        job=wire.job,
        attempt=wire.attempt,
        name=wire.name,
        entry=sinks.printable_text(wire.entry.encode()) if isinstance(wire, _Manifest1) and wire.entry else wire.entry,
        serial=wire.serial,
        step=wire.step,
        created_at=wire.created_at,
        bytes=wire.bytes,
        files=files,
        previous=wire.previous,
    )


def _check_seal(text: bytes, seal: str) -> None:
    body, _, last = text.rpartition(b',"seal":')
    if last != b'"%s"}' % seal.encode() or hashlib.sha256(body).hexdigest() != seal:
        raise grant.WireError("it is not what its own seal says")


def _files_1(files: Iterable[_Entry1]) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            sinks.printable_text(one.path.encode()),
            one.type,
            one.size,
            one.mode,
            one.mtime_ns,
            None if one.target is None else sinks.printable_text(one.target.encode("utf-8", "surrogatepass")),
            tuple(Chunk(chunk.key, chunk.sha256, chunk.size, 0, chunk.size) for chunk in one.chunks),
        )
        for one in files
    )


def _files_2(wire: _Manifest2) -> tuple[Entry, ...]:
    chunks = []
    for name, size, *attempt in wire.chunks:
        key = sinks.chunk_key(wire.job, attempt[0] if attempt else wire.attempt, name)
        chunks.append(Chunk(key, name[:64], size, 0, size))
    return tuple(
        Entry(
            one.path,
            one.type,
            one.size,
            one.mode,
            one.mtime_ns,
            one.target,
            tuple(_part(chunks, piece) for piece in one.pieces),
        )
        for one in wire.files
    )


def _part(chunks: list[Chunk], piece: _Piece) -> Chunk:
    if piece[0] >= len(chunks):
        raise grant.WireError("a file names a chunk that is not listed")
    whole = chunks[piece[0]]
    return whole if len(piece) == 1 else Chunk(whole.key, whole.sha256, whole.size, piece[1], piece[2])
