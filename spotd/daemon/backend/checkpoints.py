"""The checkpoints of a job, as its owner handles them: list, verify, pin, remove."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from spotd.api.backend import NotFound, StateConflict, Unavailable
from spotd.api.shapes.checkpoints import KeptCheckpointShape, VerificationShape
from spotd.core import keeping
from spotd.core.model import OF_ANOTHER_JOB, Checkpoint, Job, JobId, Plan, World
from spotd.core.retention import best_of, in_reach, open_numbers
from spotd.daemon import layout
from spotd.daemon.backend.contents import checkpoint_manifest, piece_problem
from spotd.daemon.backend.parts import Parts
from spotd.daemon.backend.render import checkpoint_shape
from spotd.daemon.commits import Committed, DecideWith, cycle_points
from spotd.store import Reads, StoreError
from spotd_jobs.wire.manifest import Chunk, Entry

PROGRESS_BYTES: Final = 32 * 1024 * 1024
"""A word about how far it is comes after so many bytes."""


class Checkpoints:
    """The part of the backend that knows checkpoints."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def listed(self, ref: str) -> list[KeptCheckpointShape]:
        job = await self._job(ref)
        return [kept_shape(job, one) for one in job.checkpoints]

    async def pin(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointShape]:
        job_id = await self._parts.find(ref)
        numbers: set[str] = set()

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = _newest(reads, world, job_id)
            chosen = _chosen(job, names)
            numbers.update(c.manifest_key for c in chosen)
            return keeping.pin(world, job, chosen, now, pinned=pinned)

        await self._commit(decide)
        job = await self._job(job_id)
        return [kept_shape(job, one) for one in job.checkpoints if one.manifest_key in numbers]

    async def remove(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointShape]:
        job_id = await self._parts.find(ref)
        removed: list[KeptCheckpointShape] = []

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = _newest(reads, world, job_id)
            chosen = _chosen(job, names)
            _refuse_removal(job, chosen, open_numbers(world, job))
            removed[:] = [kept_shape(job, one) for one in chosen]
            return keeping.remove(world, job, chosen, now)

        await self._commit(decide)
        self._parts.log.info("checkpoint.removed", job=job_id, names=[row["name"] for row in removed])
        return removed

    async def verify(self, ref: str, names: Sequence[str], *, every: bool) -> AsyncIterator[VerificationShape]:
        job = await self._job(ref)
        chosen = job.checkpoints if every else _chosen(job, names or (keeping.NEWEST,))
        if not chosen:
            raise NotFound(f"{job.name} has no checkpoint yet", hint=f"spotctl show {job.id}")
        sound: set[str] = set()
        for checkpoint in chosen:
            async for record in self._verify(job, checkpoint, sound):
                yield record

    async def _verify(self, job: Job, checkpoint: Checkpoint, sound: set[str]) -> AsyncIterator[VerificationShape]:
        """One chunk is in memory at a time; `sound` are chunks that were found to be right in this very call."""
        record = VerificationShape(
            kind="progress",
            name=checkpoint.name,
            attempt=checkpoint.attempt,
            bytes_done=0,
            bytes_total=0,
            ok=None,
            damaged=0,
            problem="",
        )
        manifest, problem = await self._parts.stored(partial(checkpoint_manifest, self._parts.objects, checkpoint))
        places = {} if manifest is None else _places(manifest.files)
        record["bytes_total"] = sum(chunk.size for chunk, _ in places.values())
        told = 0
        yield record.copy()
        for key, (chunk, path) in places.items():
            wrong = "" if key in sound else await self._parts.stored(partial(piece_problem, self._parts.objects, chunk))
            if wrong:
                record["damaged"] += 1
                problem = problem or f"{path}: {wrong}"
            else:
                sound.add(key)
            record["bytes_done"] += chunk.size
            if record["bytes_done"] - told >= PROGRESS_BYTES:
                told = record["bytes_done"]
                yield record.copy()
        if problem:
            await self._tell_damage(job.id, checkpoint, problem)
        yield {**record, "kind": "verified", "ok": not problem, "problem": problem}

    async def _tell_damage(self, job_id: JobId, checkpoint: Checkpoint, problem: str) -> None:
        await self._commit(
            lambda reads, world, now: keeping.damaged(world, _newest(reads, world, job_id), checkpoint, problem, now)
        )
        self._parts.log.warning("checkpoint.damaged", job=job_id, name=checkpoint.name, problem=problem)

    async def _job(self, ref: str) -> Job:
        job_id = await self._parts.find(ref)
        job = await self._parts.read(lambda reads: reads.job(job_id))
        if job is None:
            raise Unavailable(f"job {job_id} is not there any more")
        return job

    async def _commit(self, decide: DecideWith) -> Committed:
        try:
            return await self._parts.commits.commit_with(decide, cycle_points)
        except StoreError as exc:
            raise Unavailable(exc.message, hint=exc.hint) from exc


def kept_shape(job: Job, checkpoint: Checkpoint) -> KeptCheckpointShape:
    """The checkpoint as `spotctl checkpoints` shows it."""
    return KeptCheckpointShape(
        **checkpoint_shape(checkpoint),
        job=layout.owner_of(checkpoint.manifest_key).job if checkpoint.attempt == OF_ANOTHER_JOB else job.id,
        metric=checkpoint.metric,
        best=checkpoint == best_of(job, job.checkpoints),
        pinned=checkpoint.pinned,
        manifest_sha256=checkpoint.sha256,
    )


def get_checkpoint(job: Job, name: str) -> Checkpoint:
    """The checkpoint a user means.

    Raises:
        NotFound: naming some that there are.
    """
    found = keeping.find_checkpoint(job, job.checkpoints, name)
    if found is None:
        known = ", ".join(one.name for one in job.checkpoints[:5])
        hint = f"it has {known}; spotctl checkpoints {job.id} lists them" if known else f"spotctl show {job.id}"
        raise NotFound(f"{job.name} has no checkpoint {name!r}", hint=hint)
    return found


def _chosen(job: Job, names: Sequence[str]) -> tuple[Checkpoint, ...]:
    """Each once, in the order of the names."""
    return tuple(dict.fromkeys(get_checkpoint(job, name) for name in names))


def _newest(reads: Reads, world: World, job_id: JobId) -> Job:
    """The job as it is in this transaction, also where it is over."""
    job = world.jobs.get(job_id) or reads.job(job_id)
    if job is None:
        raise Unavailable(f"job {job_id} is not there any more")
    return job


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
    """Every chunk once, with the first file that needs it."""
    found: dict[str, tuple[Chunk, str]] = {}
    for entry in files:
        for chunk in entry.chunks:
            found.setdefault(chunk.key, (chunk, entry.path))
    return found
