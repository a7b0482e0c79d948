"""What precedes a job: its plan, its code, and its submission."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from spotd.api.errors import ApiUnavailable, Invalid, OverBudget
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.deadlines import require_future
from spotd.api.handlers.jobs import JobHandlers, require_free_name
from spotd.api.handlers.plans import budget_problem, new_job, outlook, read_spec
from spotd.api.handlers.resume_source import find_resume_source, resume_source_response
from spotd.api.requests import JobRequest, Submission
from spotd.api.schemas.jobs import JobDetailResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse
from spotd.core import requests
from spotd.core.checkpoints import Checkpoint
from spotd.core.ids import JobId
from spotd.core.plan import Plan
from spotd.core.world import World
from spotd.daemon import object_keys
from spotd.daemon.crash import CrashPoint
from spotd.store import Reads
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.problems import Problem


class SubmissionHandlers:
    """Plans jobs, stores their code, and queues them."""

    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        self._context = context
        self._jobs = jobs

    async def plan(self, draft: JobRequest, resume_from: str = "") -> PlanResponse:
        """Show what submitting would do; change nothing.

        Raises:
            Invalid: with every problem found, not only the first.
            NotFound: there is no such job or checkpoint to resume from.
        """
        spec = self._spec(draft)
        require_future(spec, self._context.clock.now())
        source = await find_resume_source(self._context, resume_from)
        if source is None:
            return self._outlook(spec)
        world = self._context.world()
        taken = await self._context.read(lambda reads: source.checkpoints(reads, world))
        plan = self._outlook(spec, taken)
        plan["resume_from"] = resume_source_response(source, taken[0])
        return plan

    def _spec(self, draft: JobRequest) -> JobSpec:
        known = frozenset(self._context.providers)
        return read_spec(draft, self._context.offer_cache.snapshot(), known)

    def _outlook(self, spec: JobSpec, checkpoints: tuple[Checkpoint, ...] = ()) -> PlanResponse:
        now, market = self._context.clock.now(), self._context.offer_cache.snapshot()
        return outlook(spec, self._context.world(), market, now, checkpoints)

    async def has_code(self, sha256: str) -> bool:
        """Return whether the object store holds this archive already."""
        found = await self._context.stored(lambda: self._context.objects.head(object_keys.code_key(sha256)))
        return found is not None

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeResponse:
        """Store the archive under its hash, once however often it comes.

        It is spooled to a file first: an archive is larger than memory should be, and is not stored before it is whole.

        Raises:
            Invalid: the bytes have another hash.
            ApiUnavailable: the object store does not answer or is full.
        """
        digest, size = hashlib.sha256(), 0
        handle, name = tempfile.mkstemp(prefix="code-", dir=self._context.spool)
        path = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                async for piece in stream:
                    digest.update(piece)
                    size += len(piece)
                    file.write(piece)
            if digest.hexdigest() != sha256:
                raise Invalid("the archive arrived with another content than announced", hint="submit it again")
            self._context.crash(CrashPoint.BEFORE_PUT_CODE)
            await self._context.stored(lambda: self._context.objects.put_file(object_keys.code_key(sha256), path))
            self._context.crash(CrashPoint.AFTER_PUT_CODE)
        except OSError as exc:
            raise ApiUnavailable(f"the archive cannot be kept: {exc.strerror}", hint="free some disk space") from exc
        finally:
            await self._context.stored(lambda: path.unlink(missing_ok=True))
        return CodeResponse(sha256=sha256, bytes=size)

    async def submit(self, submission: Submission) -> JobDetailResponse:
        """Queue the job, durably.

        Raises:
            Invalid: the draft is wrong, a secret is missing, or the code was not put before.
            NotFound: there is no such job or checkpoint to resume from.
            StateConflict: an unfinished job has this name.
            OverBudget: it can never run within the budgets.
        """
        context = self._context
        spec = self._spec(submission.draft)
        require_future(spec, context.clock.now())
        _require_secrets(spec, submission)
        code_bytes = await self._code_bytes(spec, submission)
        source = await find_resume_source(context, submission.resume_from)
        problem = budget_problem(spec, context.world(), context.offer_cache.snapshot(), context.clock.now())
        if problem:
            raise OverBudget(problem, hint="raise [budget] job, or lower max_price")
        job_id = await self._free_id(spec.name)
        context.secrets.write(job_id, submission.secrets)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            require_free_name([(j.id, j.state) for j in world.jobs.values() if j.name == spec.name], spec.name)
            job = new_job(job_id, spec, now, code_sha256=submission.code_sha256, code_bytes=code_bytes)
            if source is not None:
                job = replace(job, checkpoints=source.checkpoints(reads, world))
            return requests.submit(world, job, now)

        try:
            await context.commit(decide, (CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT))
        except Exception:
            # Nothing was written. A cancellation proves no such thing: it leaves the values for the job that may be.
            context.secrets.remove(job_id)
            raise
        context.log.info("job.submitted", job=job_id, name=spec.name)
        return await self._jobs.detail(job_id)

    async def _free_id(self, name: str) -> JobId:
        """Return an id that no job has, after a check that the name is free."""

        def work(reads: Reads) -> JobId:
            require_free_name([(view.id, view.state) for view in reads.active_named(name)], name)
            job_id = self._context.ids.new()
            while reads.job(job_id) is not None:
                job_id = self._context.ids.new()
            return job_id

        return await self._context.read(work)

    async def _code_bytes(self, spec: JobSpec, submission: Submission) -> int:
        if spec.workdir is not None and submission.code_sha256 is None:
            problem = Problem(
                key="workdir", message="its content was not sent", hint="submit with spotctl, which packs it"
            )
            raise Invalid("the job has a workdir but no code", problems=(problem,))
        if submission.code_sha256 is None:
            return 0
        key = object_keys.code_key(submission.code_sha256)
        found = await self._context.stored(lambda: self._context.objects.head(key))
        if found is None:
            raise Invalid("the code of this job was not sent before it was submitted", hint="submit it again")
        return found.size


def _require_secrets(spec: JobSpec, submission: Submission) -> None:
    missing = [name for name in spec.secrets if name not in submission.secrets]
    if missing:
        hint = "set it in the environment of spotctl, or give --secret-file"
        problems = tuple(Problem(key="secrets", message=f"{name} has no value", hint=hint) for name in missing)
        raise Invalid("a secret of the job is missing", problems=problems)
    extra = sorted(set(submission.secrets) - set(spec.secrets))
    if extra:
        raise Invalid(f"the job names no secret {', '.join(extra)}", hint="list it under secrets in the job file")
