"""The checkpoints of a job, as its owner handles them: list, verify, pin, remove."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from spotd.api.errors import NotFound, StateConflict
from spotd.api.handlers.context import ContextHandlers, get_job
from spotd.api.handlers.render import checkpoint_response
from spotd.api.schemas.checkpoints import KeptCheckpointResponse, VerificationResponse
from spotd.core.checkpoints import pins
from spotd.core.checkpoints.retention import best_of, in_reach, open_numbers
from spotd.core.domain.checkpoints import OF_ANOTHER_JOB, Checkpoint
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.daemon import object_keys
from spotd.daemon.checkpoints.contents import checkpoint_manifest, piece_problem
from spotd.daemon.commits import cycle_points
from spotd.store import Reads
from spotd_jobs.wire.manifest_document import Chunk, Entry

PROGRESS_BYTES: Final = 32 * 1024 * 1024
"""A word about how far it is comes after so many bytes."""


class CheckpointHandlers(ContextHandlers):
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
            return pins.pin(world, job, chosen, now, pinned=pinned)

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
            return pins.remove(world, job, chosen, now)

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
        chosen = job.checkpoints if every else _chosen(job, names or (pins.NEWEST,))
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
            return pins.damaged(world, get_job(reads, job_id, world), checkpoint, problem, now)

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
    found = pins.find_checkpoint(job, job.checkpoints, name)
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
