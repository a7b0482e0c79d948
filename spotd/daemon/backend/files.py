"""What `pull` fetches: the outputs of a job, or one of its checkpoints, every byte verified against its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from pydantic import ValidationError

from spotd.api.backend import NotFound, Unavailable
from spotd.api.shapes import FileShape, FilesShape
from spotd.core.model import AttemptId, Checkpoint, JobId
from spotd.daemon import layout
from spotd.daemon.backend.parts import Parts
from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.wire.manifest import MANIFEST_BYTES_MAX, Entry, EntryType, Manifest, Refused, verify_manifest

NEWEST: Final = "newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A manifest that may be read from."""

    kind: Literal["outputs", "checkpoint"]
    manifest: Manifest


class Files:
    """The part of the backend that knows stored files."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def files(self, ref: str, checkpoint: str | None) -> FilesShape:
        job = await self._parts.find(ref)
        source = await self._source(job, checkpoint)
        return FilesShape(
            id=job,
            kind=source.kind,
            name=source.manifest.name,
            files=[_file_shape(entry) for entry in source.manifest.files],
            bytes=source.manifest.bytes,
        )

    async def read(self, ref: str, checkpoint: str | None, path: str) -> AsyncIterator[bytes]:
        job = await self._parts.find(ref)
        source = await self._source(job, checkpoint)
        entry = next((e for e in source.manifest.files if e.path == path and e.type is EntryType.FILE), None)
        if entry is None:
            raise NotFound(f"there is no file {path!r} in {source.kind} {source.manifest.name}")
        async for piece in self._pieces(entry):
            yield piece

    async def _pieces(self, entry: Entry) -> AsyncIterator[bytes]:
        for chunk in entry.chunks:
            size = chunk.size
            data = await self._parts.stored(partial(self._parts.objects.get, chunk.key, bytes_max=size))
            if len(data) != size or hashlib.sha256(data).hexdigest() != chunk.sha256:
                raise Unavailable(
                    f"{entry.path} is damaged in the store", hint="pull an older checkpoint: spotctl checkpoints JOB"
                )
            yield data

    async def _source(self, job: JobId, checkpoint: str | None) -> _Source:
        if checkpoint is not None:
            return _Source(kind="checkpoint", manifest=await self._checkpoint(job, checkpoint))
        return _Source(kind="outputs", manifest=await self._outputs(job))

    async def _checkpoint(self, job: JobId, name: str) -> Manifest:
        found = await self._parts.read(lambda reads: reads.checkpoints_of(job))
        chosen: Checkpoint | None = next((c for c in found if name in (NEWEST, c.name)), None)
        if chosen is None:
            raise NotFound(f"job {job} has no checkpoint {name!r}", hint=f"spotctl checkpoints {job}")
        key = chosen.manifest_key
        data = await self._parts.stored(lambda: self._parts.objects.get(key, bytes_max=MANIFEST_BYTES_MAX))
        if hashlib.sha256(data).hexdigest() != chosen.sha256:
            raise Unavailable(f"the manifest of checkpoint {chosen.name} is not the one that was accepted")
        return _parsed(data)

    async def _outputs(self, job: JobId) -> Manifest:
        """The newest attempt's that stored any."""
        attempts = await self._parts.read(lambda reads: reads.attempts_of(job))
        for attempt in reversed(attempts):
            manifest = await self._parts.stored(partial(self._outputs_of, attempt.id))
            if manifest is not None:
                return manifest
        raise NotFound(
            f"job {job} has no outputs (yet)", hint="outputs are stored on success, if the job file names any"
        )

    def _outputs_of(self, attempt: AttemptId) -> Manifest | None:
        objects = self._parts.objects
        try:
            data = objects.get(layout.outputs_key(attempt), bytes_max=MANIFEST_BYTES_MAX)
        except ObjectMissing:
            return None
        verdict = verify_manifest(data, attempt.job, attempt.number, objects.head)
        return None if isinstance(verdict, Refused) else Manifest.model_validate_json(data)


def _file_shape(entry: Entry) -> FileShape:
    kinds: dict[EntryType, Literal["file", "dir", "link"]] = {
        EntryType.FILE: "file",
        EntryType.DIR: "dir",
        EntryType.LINK: "link",
    }
    return FileShape(path=entry.path, kind=kinds[entry.type], bytes=entry.size, mode=entry.mode, target=entry.target)


def _parsed(data: bytes) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as exc:
        raise Unavailable("the manifest of this checkpoint cannot be read") from exc
