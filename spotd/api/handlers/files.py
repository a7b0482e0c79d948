"""What `pull` fetches: the outputs of a job, or one of its checkpoints, every byte verified against its manifest."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal

from spotd.api.handlers.context import DaemonAnswers, HandlerContext, get_job
from spotd.api.handlers.render import checkpoint_response
from spotd.api.responses import ApiUnavailable, NotFound, StateConflict
from spotd.api.schemas.jobs import FileResponse, FilesResponse, KeptCheckpointResponse, VerificationResponse
from spotd.core import checkpoints
from spotd.core.checkpoints import best_of, in_reach, open_numbers, outputs_warning
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import OF_ANOTHER_JOB, Checkpoint, Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import EndReason, JobState
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.commits import cycle_points
from spotd.daemon.contents import (
    ContentPiece,
    DamagedContent,
    batches,
    checkpoint_manifest,
    fetch,
    joined,
    piece_problem,
)
from spotd.daemon.hosts.host_reader import pinned_manifest, read_manifest
from spotd.store import Reads
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.manifest import AcceptedManifest, verify_manifest
from spotd_jobs.wire.manifest_document import Chunk, Entry, EntryType

# The checkpoints of a job, as its owner handles them: list, verify, pin, remove.


PROGRESS_BYTES: Final = 32 * 1024 * 1024
"""A word about how far it is comes after so many bytes."""


class CheckpointHandlers(DaemonAnswers):
    async def entries(self, ref: str) -> list[KeptCheckpointResponse]:
        """Return the accepted checkpoints, newest first."""
        job = await self._job(ref)
        return [kept_response(job, one) for one in job.checkpoints]

    async def pin(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointResponse]:
        """Pin or unpin these, whatever `keep` is; return them as they are now.

        Raises:
            NotFound: no such checkpoint, and nothing was changed.
        """
        job_id = await self._context.find(ref)
        numbers: set[str] = set()

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            chosen = _chosen(job, names)
            numbers.update(c.manifest_key for c in chosen)
            return checkpoints.pin(world, job, chosen, now, pinned=pinned)

        await self._context.commit(decide, cycle_points)
        job = await self._job(job_id)
        return [kept_response(job, one) for one in job.checkpoints if one.manifest_key in numbers]

    async def remove(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointResponse]:
        """Remove these from what the job may resume from; return what they were.

        What only they need is deleted soon.

        Raises:
            NotFound: no such checkpoint, and nothing was changed.
            StateConflict: one is pinned, or a machine may still read it.
        """
        job_id = await self._context.find(ref)
        removed: list[KeptCheckpointResponse] = []

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            chosen = _chosen(job, names)
            _refuse_removal(job, chosen, open_numbers(world, job))
            removed[:] = [kept_response(job, one) for one in chosen]
            return checkpoints.remove(world, job, chosen, now)

        await self._context.commit(decide, cycle_points)
        self._context.log.info("checkpoint.removed", job=job_id, names=[row["name"] for row in removed])
        return removed

    async def verify(
        self, ref: str, names: Sequence[str], *, every: bool
    ) -> AsyncGenerator[VerificationResponse, None]:
        """Read and compare every byte of these, or of the newest without names.

        Raises:
            NotFound: at the first step.
        """
        job = await self._job(ref)
        chosen = job.checkpoints if every else _chosen(job, names or (checkpoints.NEWEST,))
        if not chosen:
            raise NotFound(f"{job.name} has no checkpoint yet", hint=f"spotctl show {job.id}")
        sound: set[str] = set()
        for checkpoint in chosen:
            async for record in self._verify(job, checkpoint, sound):
                yield record

    async def _verify(
        self, job: Job, checkpoint: Checkpoint, sound: set[str]
    ) -> AsyncGenerator[VerificationResponse, None]:
        """Verify with one chunk in memory at a time; `sound` are chunks that this very call found to be right."""
        record = VerificationResponse(
            kind="progress",
            name=checkpoint.name,
            attempt=checkpoint.attempt,
            bytes_done=0,
            bytes_total=0,
            ok=None,
            damaged=0,
            problem="",
        )
        manifest, problem = await self._context.stored(partial(checkpoint_manifest, self._context.objects, checkpoint))
        places = {} if manifest is None else _places(manifest.files)
        record["bytes_total"] = sum(chunk.size for chunk, _ in places.values())
        reported = 0
        yield record.copy()
        for key, (chunk, path) in places.items():
            wrong = (
                "" if key in sound else await self._context.stored(partial(piece_problem, self._context.objects, chunk))
            )
            if wrong:
                record["damaged"] += 1
                problem = problem or f"{path}: {wrong}"
            else:
                sound.add(key)
            record["bytes_done"] += chunk.size
            if record["bytes_done"] - reported >= PROGRESS_BYTES:
                reported = record["bytes_done"]
                yield record.copy()
        if problem:
            await self._tell_damage(job.id, checkpoint, problem)
        yield {**record, "kind": "verified", "ok": not problem, "problem": problem}

    async def _tell_damage(self, job_id: JobId, checkpoint: Checkpoint, problem: str) -> None:
        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            return checkpoints.damaged(world, get_job(reads, job_id, world), checkpoint, problem, now)

        await self._context.commit(decide, cycle_points)
        self._context.log.warning("checkpoint.damaged", job=job_id, name=checkpoint.name, problem=problem)

    async def _job(self, ref: str) -> Job:
        job_id = await self._context.find(ref)
        return await self._context.read(lambda reads: get_job(reads, job_id))


def kept_response(job: Job, checkpoint: Checkpoint) -> KeptCheckpointResponse:
    """Return the checkpoint as `spotctl checkpoints` shows it."""
    return KeptCheckpointResponse(
        **checkpoint_response(checkpoint),
        job=object_keys.owner_of(checkpoint.manifest_key).job if checkpoint.attempt == OF_ANOTHER_JOB else job.id,
        metric=checkpoint.metric,
        best=checkpoint == best_of(job, job.checkpoints),
        pinned=checkpoint.pinned,
        manifest_sha256=checkpoint.sha256,
    )


def get_checkpoint(job: Job, name: str) -> Checkpoint:
    """Return the checkpoint a user means.

    Raises:
        NotFound: naming some that there are.
    """
    found = checkpoints.find_checkpoint(job, job.checkpoints, name)
    if found is None:
        known = ", ".join(one.name for one in job.checkpoints[:5])
        hint = f"it has {known}; spotctl checkpoints {job.id} lists them" if known else f"spotctl show {job.id}"
        raise NotFound(f"{job.name} has no checkpoint {name!r}", hint=hint)
    return found


def _chosen(job: Job, names: Sequence[str]) -> tuple[Checkpoint, ...]:
    """Return each once, in the order of the names."""
    return tuple(dict.fromkeys(get_checkpoint(job, name) for name in names))


def _refuse_removal(job: Job, chosen: Sequence[Checkpoint], open_attempts: frozenset[int]) -> None:
    for one in chosen:
        if one.pinned:
            raise StateConflict(
                f"checkpoint {one.name} of {job.name} is pinned", hint=f"spotctl checkpoints {job.id} unpin {one.name}"
            )
        if one in in_reach(job, open_attempts):
            raise StateConflict(
                f"checkpoint {one.name} of {job.name} may still be read by a machine of attempt {max(open_attempts)}",
                hint=f"wait until it is gone, or spotctl cancel {job.id}",
            )


def _places(files: Sequence[Entry]) -> dict[str, tuple[Chunk, str]]:
    """Return every chunk once, with the first file that needs it."""
    found: dict[str, tuple[Chunk, str]] = {}
    for entry in files:
        for chunk in entry.chunks:
            found.setdefault(chunk.key, (chunk, entry.path))
    return found


# The manifest of a job's outputs: the one that was pinned when the attempt that succeeded ended.


async def get_outputs(context: HandlerContext, job_id: JobId) -> AcceptedManifest:
    """Return the outputs of the job; each chunk is verified by its content when it is read.

    Raises:
        NotFound: it has none, saying why.
        ApiUnavailable: what is in the store is not what the job left there.
    """
    job = await context.read(lambda reads: get_job(reads, job_id))
    if job.outputs is None and job.state is JobState.SUCCEEDED:
        return await _outputs_before_pins(context, job)
    if job.outputs is None or job.outputs.sha256 is None:
        raise _none(job)
    pinned = job.outputs
    attempt = AttemptId(job=job.id, number=pinned.attempt)
    manifest = await context.stored(lambda: pinned_manifest(context.objects, attempt, pinned))
    if manifest is None:
        raise ApiUnavailable(
            f"the outputs of {job.name} are not in the store any more as its machine left them",
            hint=f"spotctl retry --anyway {job.id} runs it again from its newest checkpoint",
        )
    return manifest


def _none(job: Job) -> NotFound:
    if job.outputs is not None and job.outputs.problem:
        return NotFound(
            f"job {job.name} has no outputs: {job.outputs.problem}",
            hint=f"spotctl retry --anyway {job.id} runs it again; spotctl why {job.id}",
        )
    return NotFound(f"job {job.name} has no outputs (yet)", hint="outputs are stored on success, if the job names any")


async def _outputs_before_pins(context: HandlerContext, job: Job) -> AcceptedManifest:
    """Return those of a job that ended before outputs were pinned: of the attempt that ended well, and of no other."""
    attempts = await context.read(lambda reads: reads.attempts_of(job.id))
    done: list[Attempt] = [a for a in attempts if a.end_reason is EndReason.DONE]
    for attempt in reversed(done):
        found = await context.stored(partial(_unpinned_manifest, context.objects, attempt.id))
        if found is not None:
            return found
    raise _none(job)


def _unpinned_manifest(objects: ObjectStore, attempt: AttemptId) -> AcceptedManifest | None:
    data = read_manifest(objects, object_keys.outputs_key(attempt))
    verdict = None if data is None else verify_manifest(data, attempt.job, attempt.number, None)
    return verdict if isinstance(verdict, AcceptedManifest) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A manifest that may be read from."""

    kind: Literal["outputs", "checkpoint"]
    attempt: int
    manifest: AcceptedManifest
    warning: str = ""


class FileHandlers(DaemonAnswers):
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
