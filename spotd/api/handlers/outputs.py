"""The manifest of a job's outputs: the one that was pinned when the attempt that succeeded ended."""

from __future__ import annotations

from functools import partial

from spotd.api.errors import ApiUnavailable, NotFound
from spotd.api.handlers.context import HandlerContext, get_job
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason, JobState
from spotd.daemon import object_keys
from spotd.daemon.hosts.known_manifests import read_manifest
from spotd.daemon.hosts.outputs import pinned_manifest
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.manifest import AcceptedManifest, verify_manifest


async def get_outputs(context: HandlerContext, job_id: JobId) -> AcceptedManifest:
    """Return the outputs of the job; each chunk is verified by its content when it is read.

    Raises:
        NotFound: it has none, saying why.
        ApiUnavailable: what is in the store is not what the job left there.
    """
    job = await context.read(lambda reads: get_job(reads, job_id))
    if job.outputs is None and job.state is JobState.SUCCEEDED:
        return await _unpinned(context, job)
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


async def _unpinned(context: HandlerContext, job: Job) -> AcceptedManifest:
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
