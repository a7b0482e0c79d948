"""checkpoints/<name>.json and outputs/manifest.json: what a checkpoint consists of, and when the daemon believes it.

A manifest is published after its last chunk. It counts once `verify_manifest` accepted it: it speaks of this attempt,
names only chunks of this job (of this attempt or an earlier one, under the content hash that is their name), holds no
path that could leave the folder it is restored into or collide there, and the store has every chunk at its size.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal, Protocol

from pydantic import Field, ValidationError

from spotd_jobs.wire.fields import (
    Count,
    EntryName,
    Instant,
    JobId,
    RelativePath,
    Sha256,
    Size,
    StoreKey,
    Url,
    WireModel,
    attempt_prefix,
    relative_path,
)
from spotd_jobs.wire.grant import CHUNK_BYTES_MAX, ManifestBlob, Restore
from spotd_jobs.wire.reports import first_problem

MANIFEST_BYTES_MAX: Final = 16 * 1024 * 1024
FILES_MAX: Final = 100_000
CHUNKS_MAX: Final = 65_536
COMPANIONS_MAX: Final = 16
WINDOW: Final = 3
"""A runner counts on a chunk that its attempt sent only while one of so many newest manifests of the attempt names it,
or was published before it was sent. The rest may be deleted while the attempt lives."""


class ManifestKind(StrEnum):
    """What was saved."""

    CHECKPOINT = "checkpoint"
    OUTPUTS = "outputs"


class EntryType(StrEnum):
    """What a path of a manifest is. Folders are listed only where they are empty."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"


class Chunk(WireModel):
    """A piece of a file: the last part of `key` is its SHA-256, with the mark of the upload that sent it behind."""

    key: StoreKey
    sha256: Sha256
    size: Annotated[int, Field(ge=1, le=CHUNK_BYTES_MAX)]


class Entry(WireModel):
    """One path below the checkpoint folder. `target` is a symbolic link's, relative and inside."""

    path: RelativePath
    type: EntryType
    size: Size
    mode: Annotated[int, Field(ge=0, le=0o777)]
    mtime_ns: Annotated[int, Field(ge=0, lt=2**63)]
    target: Annotated[str, Field(max_length=4096)] | None
    chunks: list[Chunk]


class Manifest(WireModel):
    """One complete checkpoint, or the outputs of a job.

    Attributes:
        name: unique within the attempt: a file that is written over and over is a checkpoint of another name each time.
        entry: what it is called directly below the checkpoint path, where that is not `name`. Every path begins with
            it, except companions (a framework's own pointer files beside it, such as DeepSpeed's `latest`), which are
            single names.
        serial: rises in the order in which checkpoints of one attempt became complete.
        previous: SHA-256 of the manifest that this runner published or restored before.
        seal: SHA-256 of all bytes before this key, which is the last one. Without it only the schema protects what the
            chunks' hashes do not cover, until the daemon pins the whole.
    """

    schema_: Literal[1] = Field(alias="schema")
    kind: ManifestKind
    job: JobId
    attempt: Annotated[int, Field(ge=1, le=10**9)]
    name: EntryName
    entry: EntryName | None = None
    serial: Count
    step: Count | None
    created_at: Instant
    bytes: Size
    files: Annotated[list[Entry], Field(max_length=FILES_MAX)]
    previous: Sha256 | None
    seal: Sha256 | None = None


class StoredObject(Protocol):
    """What a look at one object tells; `objects.api.ObjectInfo` is one."""

    @property
    def size(self) -> int: ...

    @property
    def sha256(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedManifest:
    """A manifest that may be resumed from.

    Attributes:
        sha256: of the manifest's bytes: what a grant pins.
        chunk_keys: each once, in order of first use.
    """

    kind: ManifestKind
    name: str
    entry: str
    attempt: int
    serial: int
    step: int | None
    bytes: int
    created_at: datetime
    previous: str | None
    sha256: str
    size: int
    files: tuple[Entry, ...]
    chunk_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A manifest that does not count. `reason` is fit for an event.

    Attributes:
        missing: it names chunks that the store lacks or holds at another size; everything else about it is right.
    """

    reason: str
    missing: bool = False


class _Unfit(Exception):
    """Why a manifest is refused."""


def verify_manifest(
    manifest_bytes: bytes, job_id: str, attempt: int, head: Callable[[str], StoredObject | None]
) -> AcceptedManifest | Refused:
    """Accepted exactly when everything the module's theory asks for holds. Raises only what `head` raises."""
    if len(manifest_bytes) > MANIFEST_BYTES_MAX:
        return Refused(reason=f"manifest of {len(manifest_bytes)} bytes is larger than {MANIFEST_BYTES_MAX}")
    try:
        manifest = Manifest.model_validate_json(manifest_bytes)
        _check_seal(manifest_bytes, manifest.seal)
        sizes = _check(manifest, job_id, attempt)
    except ValidationError as error:
        return Refused(reason=f"not a manifest: {first_problem(error)}")
    except _Unfit as unfit:
        return Refused(reason=str(unfit))
    for key, (size, sha256) in sizes.items():
        stored = head(key)
        if stored is None:
            return Refused(reason=f"chunk {sha256[:12]} is not in the store", missing=True)
        if stored.size != size:
            return Refused(reason=f"chunk {sha256[:12]} has {stored.size} bytes, not {size}", missing=True)
        if stored.sha256 is not None and stored.sha256 != sha256:
            return Refused(reason=f"chunk {sha256[:12]} holds other content", missing=True)
    return AcceptedManifest(
        kind=manifest.kind,
        name=manifest.name,
        entry=manifest.entry or manifest.name,
        attempt=manifest.attempt,
        serial=manifest.serial,
        step=manifest.step,
        bytes=manifest.bytes,
        created_at=manifest.created_at,
        previous=manifest.previous,
        sha256=hashlib.sha256(manifest_bytes).hexdigest(),
        size=len(manifest_bytes),
        files=tuple(manifest.files),
        chunk_keys=tuple(sizes),
    )


def restore_of(
    accepted: AcceptedManifest,
    manifest_key: str,
    url_of: Callable[[str], Url],
    *,
    chunks_base: str | None = None,
) -> Restore:
    """The grant's leave to restore this checkpoint. With `chunks_base` no URL is made for any chunk."""
    return Restore(
        name=accepted.name,
        manifest=ManifestBlob(url=url_of(manifest_key), key=manifest_key, sha256=accepted.sha256, size=accepted.size),
        chunks={} if chunks_base is not None else {key: url_of(key) for key in accepted.chunk_keys},
        chunks_base=chunks_base,
    )


def _check_seal(manifest_bytes: bytes, seal: str | None) -> None:
    if seal is None:
        return
    body, _, last = manifest_bytes.rpartition(b',"seal":')
    if last != b'"%s"}' % seal.encode() or hashlib.sha256(body).hexdigest() != seal:
        raise _Unfit("it is not what its own seal says")


def _check(manifest: Manifest, job_id: str, attempt: int) -> dict[str, tuple[int, str]]:
    """Size and hash of every chunk key, once the manifest holds together by itself."""
    if manifest.job != job_id or manifest.attempt != attempt:
        raise _Unfit("it is of another attempt")
    _check_paths(manifest)
    sizes: dict[str, tuple[int, str]] = {}
    own_key = re.compile(
        re.escape(f"jobs/{job_id}/attempts/") + r"([1-9][0-9]{0,8})/data/([0-9a-f]{64})(?:-[0-9a-f]{8})?"
    )
    pieces = 0
    for entry in manifest.files:
        if entry.type is not EntryType.FILE:
            if entry.size or entry.chunks:
                raise _Unfit("something that is no file has content")
            continue
        if sum(chunk.size for chunk in entry.chunks) != entry.size:
            raise _Unfit("the chunks of a file do not add up to its size")
        pieces += len(entry.chunks)
        if pieces > CHUNKS_MAX:
            raise _Unfit(f"more than {CHUNKS_MAX} chunks")
        for chunk in entry.chunks:
            match = own_key.fullmatch(chunk.key)
            if match is None or int(match[1]) > attempt:
                raise _Unfit("a chunk's key is not of this attempt or an earlier one of this job")
            if match[2] != chunk.sha256:
                raise _Unfit("a chunk's key is not its content hash")
            if sizes.setdefault(chunk.key, (chunk.size, chunk.sha256)) != (chunk.size, chunk.sha256):
                raise _Unfit("one chunk has two sizes")
    if sum(entry.size for entry in manifest.files) != manifest.bytes:
        raise _Unfit("the files do not add up to the total size")
    return sizes


def _check_paths(manifest: Manifest) -> None:
    if manifest.kind is ManifestKind.CHECKPOINT:
        own = manifest.entry or manifest.name
        beside = [entry for entry in manifest.files if entry.path.split("/")[0] != own]
        if len(beside) > COMPANIONS_MAX or any("/" in entry.path for entry in beside):
            raise _Unfit("it holds paths outside its own entry")
        if len(beside) == len(manifest.files):
            raise _Unfit("it holds nothing of its own entry")
    types: dict[str, EntryType] = {}
    for entry in manifest.files:
        if entry.path in types:
            raise _Unfit("one path is there twice")
        types[entry.path] = entry.type
        if entry.type is EntryType.LINK:
            _check_link(entry.path, entry.target)
        elif entry.target is not None:
            raise _Unfit("something that is no link has a target")
    _check_spellings(types)


def _check_spellings(types: dict[str, EntryType]) -> None:
    """No two paths, or folders above them, differ only in case or normal form; nothing lies below a file or link."""
    spelled: dict[str, str] = {}
    for path in types:
        for place in (path, *_folders_above(path)):
            if place != path and types.get(place, EntryType.DIR) is not EntryType.DIR:
                raise _Unfit("a path lies below a file or a link")
            if spelled.setdefault(unicodedata.normalize("NFC", place).casefold(), place) != place:
                raise _Unfit("two paths differ only in case")


def _folders_above(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:length]) for length in range(1, len(parts)))


def _check_link(path: str, target: str | None) -> None:
    """The target stays inside, whatever other links there are: it may climb only at its beginning."""
    if target is None:
        raise _Unfit("a link has no target")
    parts = target.split("/")
    climbs = 0
    while parts and parts[0] == "..":
        parts.pop(0)
        climbs += 1
    if climbs > path.count("/"):
        raise _Unfit("a link leads outside")
    try:
        if parts or not climbs:
            relative_path("/".join(parts))
    except ValueError as error:
        raise _Unfit("a link leads outside or nowhere") from error


def checkpoint_prefix(job_id: str, attempt: int) -> str:
    """Where an attempt's manifests are; each object below it is one."""
    return attempt_prefix(job_id, attempt) + "checkpoints/"
