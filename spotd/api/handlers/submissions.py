"""What precedes a job: its plan, its code, and its submission."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from spotd.api.errors import ApiUnavailable, Invalid, OverBudget
from spotd.api.handlers.chains import find_chain
from spotd.api.handlers.context import ContextHandlers, HandlerContext
from spotd.api.handlers.data import with_data
from spotd.api.handlers.deadlines import require_feasible, require_future
from spotd.api.handlers.jobs import JobHandlers, require_free_names, require_free_views
from spotd.api.handlers.plans import outlook, read_spec
from spotd.api.handlers.resume_source import find_resume_source, resume_source_response
from spotd.api.requests import JobRequest, Submission
from spotd.api.schemas.jobs import JobDetailResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse
from spotd.core import requests
from spotd.core.agents import AGENT, ALLOW_HINT, day_problem, within_limits
from spotd.core.checkpoints.unprotected import HINT as UNPROTECTED_HINT
from spotd.core.checkpoints.unprotected import unprotected_words
from spotd.core.decision.prospects import used_up
from spotd.core.domain.chain import ArrayTask
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job, new_job
from spotd.core.domain.world import World
from spotd.core.metering.metering import day_start
from spotd.core.plans.plan import Plan
from spotd.daemon import object_keys
from spotd.daemon.crash import CrashPoint
from spotd.store import Reads
from spotd_jobs.spec.arrays import ArrayIndexes, parse_array, task_names
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.problems import BadValue, Problem

PLAN_ID: Final = JobId("0planned00")


class SubmissionHandlers(ContextHandlers):
    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def plan(self, draft: JobRequest, resume_from: str = "", array: str = "") -> PlanResponse:
        """Show what submitting would do; change nothing.

        Raises:
            Invalid: with every problem found, not only the first.
            NotFound: there is no such job or checkpoint to resume from.
        """
        spec = await with_data(self._context, self._spec(draft))
        require_future(spec, self._context.clock.now())
        tasks = _tasks(spec, array)
        world = self._context.world()
        names = (spec.name,) if tasks is None else tasks.names
        chain = await self._context.read(lambda reads: find_chain(reads, spec.schedule.after, names, spec.name))
        if chain is not None:
            over = await self._context.read(lambda reads: reads.past_jobs(chain.after))
            world = replace(world, past={**world.past, **over})
        source = await find_resume_source(self._context, resume_from)
        taken = () if source is None else await self._context.read(lambda reads: source.checkpoints(reads, world))
        now, market = self._context.clock.now(), self._context.offer_cache.snapshot()
        job = replace(new_job(PLAN_ID, spec, now), checkpoints=taken, chain=chain)
        require_feasible(job, world, market, now)
        plan = outlook(job, world, market, now)
        if source is not None:
            plan["resume_from"] = resume_source_response(source, taken[0])
        return plan

    def _spec(self, draft: JobRequest) -> JobSpec:
        known = frozenset(self._context.providers)
        return read_spec(draft, self._context.offer_cache.snapshot(), known)

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
            Invalid: the draft is wrong, a secret is missing, the code was not put before, or a spot job that saves
                nothing is too long for one machine.
            NotFound: there is no such job or checkpoint to resume from.
            StateConflict: an unfinished job has this name.
            OverBudget: it can never run within the budgets.
        """
        context = self._context
        spec = await with_data(context, self._spec(submission.draft))
        if submission.agent:
            limited = within_limits(spec, context.policy.current)
            if isinstance(limited, str):
                raise OverBudget(limited, hint=ALLOW_HINT)
            spec = limited
        require_future(spec, context.clock.now())
        _require_secrets(spec, submission)
        code_bytes = await self._code_bytes(spec, submission)
        source = await find_resume_source(context, submission.resume_from)
        world, market, now = context.world(), context.offer_cache.snapshot(), context.clock.now()
        taken = () if source is None else await context.read(lambda reads: source.checkpoints(reads, world))
        bare = new_job(PLAN_ID, spec, now)
        planned = replace(bare, checkpoints=taken)
        require_feasible(planned, world, market, now)
        problem = used_up(world, market, bare, now, unspent=True)
        if problem:
            raise OverBudget(problem, hint="raise [budget] job, or lower max_price")
        exposed = unprotected_words(planned, world, market, now)
        if exposed and (submission.agent or not submission.i_know):
            raise Invalid(exposed, hint=UNPROTECTED_HINT)
        tasks = _tasks(spec, submission.array)
        ids, array_id = await self._free_ids(spec, tasks)
        # Writing one for each of ten thousand jobs takes a while.
        await context.stored(lambda: context.secrets.write_all(ids, submission.secrets))

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            names = [spec.name] if tasks is None else list(tasks.names)
            require_free_names(world, set(names), "" if tasks is None else spec.name)
            chain = find_chain(reads, spec.schedule.after, tuple(names), spec.name, by_agent=submission.agent)
            job = new_job(ids[0], spec, now, code_sha256=submission.code_sha256, code_bytes=code_bytes)
            job = replace(job, chain=chain, submitted_by=AGENT if submission.agent else "")
            if source is not None:
                job = replace(job, checkpoints=source.checkpoints(reads, world))
            jobs = [job] if tasks is None else tasks.of(job, ids, array_id)
            if submission.agent:
                today = reads.spent_by(AGENT, ended_since=day_start(now.astimezone(UTC).date()))
                if problem := day_problem(jobs, world, today, now):
                    raise OverBudget(problem, hint="jobs of agents that end free their budgets; a person may raise it")
            return requests.submit_all(world, jobs, now)

        try:
            await context.commit(decide, (CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT))
        except Exception:
            # Nothing was written. A cancellation proves no such thing: it leaves the values for the job that may be.
            for job_id in ids:
                context.secrets.remove(job_id)
            raise
        context.log.info("job.submitted", job=ids[0], name=spec.name, jobs=1 if tasks is None else len(tasks.names))
        return await self._jobs.detail(ids[0])

    async def _free_ids(self, spec: JobSpec, tasks: _Tasks | None) -> tuple[list[JobId], JobId]:
        """Return an id that no job has for each of the new ones, and one for their array."""
        names = {spec.name} if tasks is None else set(tasks.names)

        def work(reads: Reads) -> tuple[list[JobId], JobId]:
            require_free_names(self._context.world(), names, "" if tasks is None else spec.name)
            # A job whose row cannot be understood is in no world, and has its name all the same.
            require_free_views(reads.active_named(spec.name))
            ids = [self._context.ids.new() for _ in range(len(names) + (tasks is not None))]
            while taken := reads.names_of(ids):
                ids = [self._context.ids.new() if job_id in taken else job_id for job_id in ids]
            ids.sort()  # they are served in the order of their indexes
            return ids[: len(names)], ids[-1]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tasks:
    """The jobs that an array is to have."""

    array: ArrayIndexes
    names: tuple[str, ...]

    def of(self, first: Job, ids: Sequence[JobId], array_id: JobId) -> list[Job]:
        """Return the jobs, each as the first but for its name and place."""
        place = partial(ArrayTask, id=array_id, name=first.name, count=len(self.names), at_once=self.array.at_once)
        return [
            replace(first, id=job_id, name=name, array=place(index=index))
            for job_id, name, index in zip(ids, self.names, self.array.indexes, strict=True)
        ]


def _tasks(spec: JobSpec, text: str) -> _Tasks | None:
    """Return the jobs of an array, `None` for one job.

    Raises:
        Invalid: it is no array, or one that is too large.
    """
    if not text:
        return None
    try:
        array = parse_array(text)
        return _Tasks(array=array, names=task_names(spec.name, array))
    except BadValue as exc:
        raise Invalid(str(exc), hint=exc.hint) from exc


def _require_secrets(spec: JobSpec, submission: Submission) -> None:
    missing = [name for name in spec.secrets if name not in submission.secrets]
    if missing:
        hint = "set it in the environment of spotctl, or give --secret-file"
        problems = tuple(Problem(key="secrets", message=f"{name} has no value", hint=hint) for name in missing)
        raise Invalid("a secret of the job is missing", problems=problems)
    extra = sorted(set(submission.secrets) - set(spec.secrets))
    if extra:
        raise Invalid(f"the job names no secret {', '.join(extra)}", hint="list it under secrets in the job file")
