"""checkpoints/<name>.json and outputs/manifest.json: what a checkpoint consists of, and when the daemon believes it.

A manifest is published after its last chunk. It counts once `verify_manifest` accepted it: it speaks of this attempt,
names only chunks that this attempt sent, under the content hash that is their name, holds no path that could leave the
folder it is restored into, and the store has every chunk at its size.

The host of an earlier attempt may be able to write for as long as the last permission lasts that was given to it, so
no checkpoint is accepted that consists of its objects. Manifests of an older spotd, which were accepted before, may
name chunks of earlier attempts, and are still read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Protocol

from spotd_jobs.wire.client.sinks import CHUNKS_MAX, COMPANIONS_MAX, climb
from spotd_jobs.wire.grant import ManifestBlob, Restore, Url, WireError, attempt_prefix
from spotd_jobs.wire.manifest_document import Entry, EntryType, Manifest, ManifestKind, parse_manifest, parts_of


class StoredObject(Protocol):
    """What a query of one object shows; `objects.api.ObjectInfo` is one."""

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
class BadManifest:
    """A manifest that does not count. `reason` is fit for an event.

    Attributes:
        missing: it names chunks that the store lacks or holds at another size; everything else about it is right.
    """

    reason: str
    missing: bool = False


class _Unfit(Exception):
    """Why a manifest is refused."""


def verify_manifest(
    manifest_bytes: bytes,
    job_id: str,
    attempt: int,
    head: Callable[[str], StoredObject | None] | None,
    *,
    parsed: Manifest | None = None,
) -> AcceptedManifest | BadManifest:
    """Accept the manifest exactly when everything the module's theory asks for holds. Raise only what `head` raises.

    Args:
        head: describes an object of the store; `None` where the manifest was accepted before, so that nothing is asked
            for again and chunks of earlier attempts are no reason to refuse it.
        parsed: what `parse_manifest` made of these very bytes before.
    """
    try:
        manifest = parse_manifest(manifest_bytes) if parsed is None else parsed
        sizes = _check(manifest, job_id, attempt)
    except WireError as error:
        return BadManifest(reason=str(error))
    except _Unfit as unfit:
        return BadManifest(reason=str(unfit))
    if head is not None:
        refused = _not_there(sizes, head, attempt_prefix(job_id, attempt))
        if refused is not None:
            return refused
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
        files=manifest.files,
        chunk_keys=tuple(sizes),
    )


def _not_there(
    sizes: Mapping[str, tuple[int, str]], head: Callable[[str], StoredObject | None], own: str
) -> BadManifest | None:
    """Why these chunks are no checkpoint of the attempt whose prefix is `own`, if they are none."""
    if not all(key.startswith(own) for key in sizes):
        return BadManifest(
            reason="it consists in part of what another attempt sent, and its host may still change that"
        )
    for key, (size, sha256) in sizes.items():
        stored = head(key)
        if stored is None:
            return BadManifest(reason=f"chunk {sha256[:12]} is not in the store", missing=True)
        if stored.size != size:
            return BadManifest(reason=f"chunk {sha256[:12]} has {stored.size} bytes, not {size}", missing=True)
        if stored.sha256 is not None and stored.sha256 != sha256:
            return BadManifest(reason=f"chunk {sha256[:12]} holds other content", missing=True)
    return None


def restore_of(
    accepted: AcceptedManifest,
    manifest_key: str,
    url_of: Callable[[str], Url],
    *,
    chunks_base: str | None = None,
) -> Restore:
    """Return the grant's permission to restore this checkpoint. With `chunks_base` no URL is made for any chunk."""
    return Restore(
        name=accepted.name,
        manifest=ManifestBlob(url=url_of(manifest_key), key=manifest_key, sha256=accepted.sha256, size=accepted.size),
        chunks={} if chunks_base is not None else {key: url_of(key) for key in accepted.chunk_keys},
        chunks_base=chunks_base,
    )


def _check(manifest: Manifest, job_id: str, attempt: int) -> Mapping[str, tuple[int, str]]:
    """Size and hash of every chunk key, once the manifest holds together by itself."""
    if manifest.job != job_id or manifest.attempt != attempt:
        raise _Unfit("it is of another attempt")
    _check_paths(manifest)
    sizes: dict[str, tuple[int, str]] = {}
    own_key = re.compile(
        re.escape(f"jobs/{job_id}/attempts/") + r"([1-9][0-9]{0,8})/data/([0-9a-f]{64})(?:-[0-9a-f]{8})?"
    )
    for entry in manifest.files:
        if entry.type is not EntryType.FILE:
            if entry.size or entry.chunks:
                raise _Unfit("something that is no file has content")
            continue
        if sum(chunk.length for chunk in entry.chunks) != entry.size:
            raise _Unfit("the chunks of a file do not add up to its size")
        for chunk in entry.chunks:
            if chunk.offset + chunk.length > chunk.size:
                raise _Unfit("a piece of a file lies outside its chunk")
            if sizes.get(chunk.key) == (chunk.size, chunk.sha256):
                continue
            match = own_key.fullmatch(chunk.key)
            if match is None or int(match[1]) > attempt:
                raise _Unfit("a chunk's key is not of this attempt or an earlier one of this job")
            if match[2] != chunk.sha256:
                raise _Unfit("a chunk's key is not its content hash")
            if chunk.key in sizes:
                raise _Unfit("one chunk has two sizes")
            sizes[chunk.key] = (chunk.size, chunk.sha256)
            if len(sizes) > CHUNKS_MAX:
                raise _Unfit(f"more than {CHUNKS_MAX} chunks")
    if sum(entry.size for entry in manifest.files) != manifest.bytes:
        raise _Unfit("the files do not add up to the total size")
    return sizes


def _check_paths(manifest: Manifest) -> None:
    if manifest.kind is ManifestKind.CHECKPOINT:
        own = manifest.entry or manifest.name
        beside = [entry for entry in manifest.files if entry.path.split("/", 1)[0] != own]
        if len(beside) > COMPANIONS_MAX or any("/" in entry.path for entry in beside):
            raise _Unfit("it holds paths outside its own entry")
        if len(beside) == len(manifest.files):
            raise _Unfit("it holds nothing of its own entry")
    for entry in manifest.files:
        if entry.type is EntryType.LINK:
            _check_link(entry.path, entry.target)
        elif entry.target is not None:
            raise _Unfit("something that is no link has a target")
    _check_places(manifest.files)


def _check_places(files: tuple[Entry, ...]) -> None:
    """No path is there twice, and nothing lies below a file or a link.

    Sorted by their parts, everything below a path comes right behind it, so comparing neighbours is enough.
    """
    placed = sorted(files, key=lambda entry: entry.path.replace("/", "\0"))
    for one, after in pairwise(placed):
        if one.path == after.path:
            raise _Unfit("one path is there twice")
        if one.type is not EntryType.DIR and after.path.startswith(one.path + "/"):
            raise _Unfit("a path lies below a file or a link")


def _check_link(path: str, target: str | None) -> None:
    """Check that the target stays inside, whatever other links there are: it may climb only at its beginning."""
    if target is None:
        raise _Unfit("a link has no target")
    climbs, rest = climb(target)
    if climbs > path.count("/"):
        raise _Unfit("a link leads outside")
    try:
        if rest or not climbs:
            parts_of("/".join(rest))
    except ValueError as error:
        raise _Unfit("a link leads outside or nowhere") from error


def checkpoint_prefix(job_id: str, attempt: int) -> str:
    """Where an attempt's manifests are; each object below it is one."""
    return attempt_prefix(job_id, attempt) + "checkpoints/"
