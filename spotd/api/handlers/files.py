"""What `pull` fetches: the outputs of a job, or one of its checkpoints, every byte verified against its manifest."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from spotd.api.errors import ApiUnavailable, NotFound, StateConflict
from spotd.api.handlers.checkpoints import get_checkpoint
from spotd.api.handlers.context import ContextHandlers, get_job
from spotd.api.handlers.outputs import get_outputs
from spotd.api.schemas.files import FileResponse, FilesResponse
from spotd.core.checkpoints.outputs import outputs_warning
from spotd.core.domain.ids import JobId
from spotd.daemon.checkpoints.contents import DamagedContent, checkpoint_manifest
from spotd.daemon.checkpoints.fetching import ContentPiece, batches, fetch, joined
from spotd_jobs.wire.manifest import AcceptedManifest
from spotd_jobs.wire.manifest_document import Entry, EntryType


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A manifest that may be read from."""

    kind: Literal["outputs", "checkpoint"]
    attempt: int
    manifest: AcceptedManifest
    warning: str = ""


class FileHandlers(ContextHandlers):
    async def entries(self, ref: str, checkpoint: str | None) -> FilesResponse:
        """Return what `pull` can fetch: the outputs, or one checkpoint by name (`newest` is the newest).

        Raises:
            NotFound: there is no such checkpoint, or there are no outputs (yet).
        """
        job = await self._context.find(ref)
        source = await self._source(job, checkpoint)
        return FilesResponse(
            id=job,
            kind=source.kind,
            name=source.manifest.name,
            attempt=source.attempt,
            files=[_file_response(entry) for entry in source.manifest.files],
            bytes=source.manifest.bytes,
            manifest_sha256=source.manifest.sha256,
            warning=source.warning,
        )

    async def content(self, ref: str, checkpoint: str | None, path: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of one of these files, verified.

        Raises:
            NotFound: at the first step, before any byte.
        """
        job = await self._context.find(ref)
        source = await self._source(job, checkpoint)
        entry = next((e for e in source.manifest.files if e.path == path and e.type is EntryType.FILE), None)
        if entry is None:
            raise NotFound(f"there is no file {path!r} in {source.kind} {source.manifest.name}")
        async for content in self._contents([entry]):
            yield content

    async def contents(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of many of these files one behind the other, verified; what is no file has none.

        Args:
            manifest: the hash of the list that is meant.
            spans: places in the list, first and last.

        Raises:
            NotFound: at the first step: there is no such file.
            StateConflict: at the first step: there is another list by now.
        """
        job = await self._context.find(ref)
        source = await self._source(job, checkpoint)
        if source.manifest.sha256 != manifest:
            raise StateConflict(f"the files of {source.manifest.name} are others by now", hint="pull again")
        files = source.manifest.files
        if any(last >= len(files) for _, last in spans):
            raise NotFound(f"there are only {len(files)} files in {source.kind} {source.manifest.name}")
        async for content in self._contents(entry for first, last in spans for entry in files[first : last + 1]):
            yield content

    async def _contents(self, entries: Iterable[Entry]) -> AsyncGenerator[bytes, None]:
        wanted = (ContentPiece(entry.path, chunk) for entry in entries for chunk in entry.chunks)
        for batch in batches(wanted):
            for content in joined(await self._context.stored(partial(self._batch, batch))):
                yield content

    def _batch(self, batch: Sequence[ContentPiece]) -> list[bytes]:
        """Read and verify some chunks, in a worker thread: the hash is work, and others wait for the loop."""
        try:
            return fetch(self._context.objects, batch)
        except DamagedContent as exc:
            raise ApiUnavailable(str(exc), hint="pull an older checkpoint: spotctl checkpoints JOB") from exc

    async def _source(self, job: JobId, checkpoint: str | None) -> _Source:
        if checkpoint is not None:
            return await self._checkpoint(job, checkpoint)
        manifest = await get_outputs(self._context, job)
        view = await self._context.read(lambda reads: reads.job_view(job))
        warning = "" if view is None else outputs_warning(view.outputs)
        return _Source(kind="outputs", attempt=manifest.attempt, manifest=manifest, warning=warning)

    async def _checkpoint(self, job: JobId, name: str) -> _Source:
        chosen = get_checkpoint(await self._context.read(lambda reads: get_job(reads, job)), name)
        manifest, problem = await self._context.stored(partial(checkpoint_manifest, self._context.objects, chosen))
        if manifest is None:
            raise ApiUnavailable(
                f"checkpoint {chosen.name} cannot be read: {problem}",
                hint=f"choose another: spotctl checkpoints {job}",
            )
        return _Source(kind="checkpoint", attempt=chosen.attempt, manifest=manifest)


def _file_response(entry: Entry) -> FileResponse:
    kinds: dict[EntryType, Literal["file", "dir", "link"]] = {
        EntryType.FILE: "file",
        EntryType.DIR: "dir",
        EntryType.LINK: "link",
    }
    return FileResponse(path=entry.path, kind=kinds[entry.type], bytes=entry.size, mode=entry.mode, target=entry.target)
