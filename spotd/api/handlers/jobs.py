"""Jobs as users handle them: plan, submit, list, look at, ask why, cancel, retry."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from spotd.api.backend import (
    ApiUnavailable,
    InputProblem,
    Invalid,
    JobQuery,
    JobRequest,
    OverBudget,
    StateConflict,
    Submission,
)
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.listing_anomalies import notes_of
from spotd.api.handlers.plans import Outlook, new_job, outlook, read_spec
from spotd.api.handlers.render import (
    event_response,
    instant,
    job_response,
    offers_responses,
    passed_over_responses,
    quote_response,
    spec_response,
    usd,
)
from spotd.api.handlers.resume_source import find_origin, origin_response
from spotd.api.schemas.jobs import JobDetailResponse, JobPageResponse, JobResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse, WhyResponse
from spotd.core import requests
from spotd.core.candidates import ceiling_for
from spotd.core.model import Attempt, Checkpoint, Job, JobId, Plan, UnreadableRow, World
from spotd.core.prospects import used_up
from spotd.core.states import JobState
from spotd.daemon import object_keys
from spotd.daemon.commits import Committed, Decide, DecideWith, Points
from spotd.daemon.crash import CrashPoint
from spotd.daemon.grants.secrets import SecretsMissing
from spotd.store import JobView, Reads, StateError
from spotd_jobs.spec.model import JobSpec

EVENTS_WITH_WHY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A job in a list, and what it was made of."""

    view: JobView
    sentence: str | None
    shape: JobResponse


class Queue:
    """The part of the backend that knows jobs."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._lines: dict[JobId, _Line] = {}
        """The list as it was shown last."""

    # --- before a job exists ---

    async def plan(self, draft: JobRequest, resume_from: str) -> PlanResponse:
        spec = self._spec(draft)
        origin = await find_origin(self._context, resume_from)
        if origin is None:
            return self._outlook(spec).plan
        world = self._context.world()
        taken = await self._context.read(lambda reads: origin.taken(reads, world))
        plan = self._outlook(spec, taken).plan
        plan["resume_from"] = origin_response(origin, taken[0])
        return plan

    def _spec(self, draft: JobRequest) -> JobSpec:
        known = frozenset(self._context.providers)
        return read_spec(draft, self._context.offer_cache.snapshot(), known)

    def _outlook(self, spec: JobSpec, checkpoints: tuple[Checkpoint, ...] = ()) -> Outlook:
        now, market = self._context.clock.now(), self._context.offer_cache.snapshot()
        return outlook(spec, self._context.world(), market, now, checkpoints)

    async def has_code(self, sha256: str) -> bool:
        found = await self._context.stored(lambda: self._context.objects.head(object_keys.code_key(sha256)))
        return found is not None

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeResponse:
        """Spooled to a file first: an archive is larger than memory should be, and is not stored before it is whole."""
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
        context = self._context
        spec = self._spec(submission.draft)
        _check_secrets(spec, submission)
        code_bytes = await self._code_bytes(spec, submission)
        origin = await find_origin(context, submission.resume_from)
        too_poor = self._outlook(spec).too_poor
        if too_poor:
            raise OverBudget(too_poor, hint="raise [budget] job, or lower max_price")
        job_id = await self._free_id(spec.name)
        context.secrets.write(job_id, submission.secrets)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            _refuse_namesake([(j.id, j.state) for j in world.jobs.values() if j.name == spec.name], spec.name)
            job = new_job(job_id, spec, now, code_sha256=submission.code_sha256, code_bytes=code_bytes)
            if origin is not None:
                job = replace(job, checkpoints=origin.taken(reads, world))
            return requests.submit(world, job, now)

        try:
            await self._commit_with(decide, (CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT))
        except Exception:
            # Nothing was written. A cancellation proves no such thing: it leaves the values for the job that may be.
            context.secrets.remove(job_id)
            raise
        context.log.info("job.submitted", job=job_id, name=spec.name)
        return await self.job(job_id)

    async def _free_id(self, name: str) -> JobId:
        """An id that no job has, once it is clear that the name is free."""

        def work(reads: Reads) -> JobId:
            _refuse_namesake([(view.id, view.state) for view in reads.active_named(name)], name)
            job_id = self._context.ids.new()
            while reads.job(job_id) is not None:
                job_id = self._context.ids.new()
            return job_id

        return await self._context.read(work)

    async def _code_bytes(self, spec: JobSpec, submission: Submission) -> int:
        if spec.workdir is not None and submission.code_sha256 is None:
            problem = InputProblem(
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

    # --- jobs that exist ---

    async def jobs(self, query: JobQuery) -> JobPageResponse:
        def work(reads: Reads) -> JobPageResponse:
            active = reads.jobs(active=True)
            views = list(active)
            more = False
            if not query.active_only:
                room = max(0, query.limit - len(active))
                ended = reads.ended_jobs(limit=room + 1)
                more = len(ended) > room
                views = sorted([*active, *ended[:room]], key=lambda v: (v.submitted_at, v.id), reverse=True)
            if query.states:
                views = [view for view in views if view.state.value in query.states]
            lines = {view.id: self._listed(reads, view) for view in views}
            self._lines = lines
            return JobPageResponse(
                jobs=[line.shape for line in lines.values()], more=more, paused=self._context.why_paused
            )

        return await self._context.read(work)

    def _listed(self, reads: Reads, view: JobView) -> _Line:
        """The line of a job; the one shown last where nothing in it has changed, as it does while a machine runs."""
        sentence = self._sentence(view.id)
        known = self._lines.get(view.id)
        if known is not None and known.view is view and known.sentence == sentence and not view.open:
            return known
        return _Line(view=view, sentence=sentence, shape=self._shape(reads, view.id, (), view))

    def _sentence(self, job: JobId) -> str | None:
        state = self._context.control_loop.state
        verdict = None if state is None else state.verdicts.get(job)
        return None if verdict is None else verdict.sentence

    def _shape(
        self, reads: Reads, job: JobId, attempts: tuple[Attempt, ...], view: JobView | None = None
    ) -> JobResponse:
        line = view or reads.job_view(job)
        if line is None:
            raise ApiUnavailable(f"job {job} is not there any more")
        state = self._context.control_loop.state
        verdict = None if state is None else state.verdicts.get(job)
        shown = attempts
        if not attempts and state is not None:
            shown = tuple(state.world.attempts[a.id] for a in line.open if a.id in state.world.attempts)
        return job_response(line, shown, verdict, self._context.clock.now(), self._context.host_monitor.transfer)

    async def job(self, ref: str) -> JobDetailResponse:
        job_id = await self._context.find(ref)

        def work(reads: Reads) -> JobDetailResponse:
            attempts, aside = reads.attempts_of(job_id), reads.set_aside(job_id)
            job = None if any(row.attempt is None for row in aside) else _get(reads, job_id)
            return self._detail(reads, job_id, job, attempts, aside)

        return await self._context.read(work)

    def _detail(
        self,
        reads: Reads,
        job_id: JobId,
        job: Job | None,
        attempts: tuple[Attempt, ...],
        aside: tuple[UnreadableRow, ...],
    ) -> JobDetailResponse:
        """Everything about a job; `job` is `None` where its own row or a checkpoint's cannot be understood."""
        current = next((a for a in attempts if a.state.counts), None)
        ceiling = current.ceiling if current is not None else None
        if job is not None and ceiling is None and job.spec.resources.gpu:
            first = job.spec.resources.gpu[0]
            ceiling = ceiling_for(first.name, first.count, job.spec.price, self._context.policy.current)
        phase = ""
        if current is not None:
            beat = self._context.host_monitor.heartbeat(current.id)
            phase = beat.phase.value if beat is not None else current.phase
        return JobDetailResponse(
            job=self._shape(reads, job_id, attempts),
            spec={} if job is None else spec_response(job.spec),
            code_sha256=None if job is None else job.code_sha256,
            code_bytes=0 if job is None else job.code_bytes,
            priority=0 if job is None else job.spec.priority,
            lost_s=0.0 if job is None else job.lost.total_seconds(),
            ceiling_usd_gpu_h=usd(ceiling),
            budget_usd=None if job is None else usd(job.budget),
            phase=phase,
            set_aside=[_aside_words(row) for row in aside],
        )

    async def why(self, ref: str) -> WhyResponse:
        job_id = await self._context.find(ref)
        context = self._context

        def work(reads: Reads) -> WhyResponse:
            job = reads.job_view(job_id)
            if job is None:
                raise ApiUnavailable(f"job {job_id} is not there any more")
            state = context.control_loop.state
            verdict = None if state is None or job.state.is_final else state.verdicts.get(job_id)
            best = None
            if verdict is not None and verdict.best is not None:
                best = quote_response(verdict.best, verdict.ceiling, "", context.policy.current.bid_headroom_ppm)
            sentence = job.reason
            if verdict is not None:
                sentence = verdict.sentence
            elif not job.state.is_final:
                sentence = f"{job.reason}; the next decision is due at any moment"
            return WhyResponse(
                id=job.id,
                name=job.name,
                state=job.state.value,
                sentence=sentence,
                kind=None if verdict is None else verdict.kind.value,
                at=instant(verdict.at) if verdict is not None else None,
                until=instant(verdict.until) if verdict is not None else None,
                ceiling_usd_gpu_h=usd(verdict.ceiling) if verdict is not None else None,
                best=best,
                passed_over=passed_over_responses(verdict.passed_over) if verdict is not None else [],
                boards=offers_responses(context.offer_cache.snapshot(), notes_of(context.offer_cache, context.clock)),
                events=[
                    event_response(item, job.name) for item in reads.newest_events(job_id=job_id, limit=EVENTS_WITH_WHY)
                ],
            )

        return await context.read(work)

    async def cancel(self, ref: str) -> JobResponse:
        job_id = await self._context.find(ref)
        job = await self._context.read(lambda reads: _get(reads, job_id))
        if job.state.is_final:
            if job.state is JobState.CANCELLED:
                return await self.line(job_id)
            raise StateConflict(f"{job.name} has ended already: {job.reason}")

        def decide(world: World, now: datetime) -> Plan:
            return requests.cancel(world, job_id, now) if job_id in world.jobs else Plan()

        await self.commit(decide, (CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL))
        self._context.log.info("job.cancel_requested", job=job_id)
        return await self.line(job_id)

    async def retry(self, ref: str, *, anyway: bool = False) -> JobResponse:
        job_id = await self._context.find(ref)
        job = await self._context.read(lambda reads: _get(reads, job_id))
        if not job.state.is_final:
            raise StateConflict(f"{job.name} is {job.state.value} and needs no retry", hint=f"spotctl why {job_id}")
        if job.state is JobState.SUCCEEDED and not anyway:
            hint = f"spotctl retry --anyway {job_id} runs it again all the same, from its newest checkpoint"
            raise StateConflict(f"{job.name} succeeded", hint=hint)
        self._require_secrets(job)

        def decide(world: World, now: datetime) -> Plan:
            _refuse_namesake([(j.id, j.state) for j in world.jobs.values() if j.name == job.name], job.name)
            newest = world.jobs.get(job_id, job)
            self._refuse_used_up(world, newest, now)
            return requests.retry(replace(world, jobs={**world.jobs, job_id: newest}), newest, now)

        await self.commit(decide, (CrashPoint.BEFORE_COMMIT_RETRY, CrashPoint.AFTER_COMMIT_RETRY))
        self._context.log.info("job.retried", job=job_id)
        return await self.line(job_id)

    def _refuse_used_up(self, world: World, job: Job, now: datetime) -> None:
        """A job whose money buys nothing of use would expire at the next decision, as it may have before."""
        why = used_up(world, self._context.offer_cache.snapshot(), job, now)
        if why:
            raise OverBudget(
                f"{job.name} would expire at once: {why}; raise its budget first with spotctl budget {job.name} +USD",
                hint=f"spotctl budget {job.id} +USD, then spotctl retry {job.id}",
            )

    def _require_secrets(self, job: Job) -> None:
        """Without the values of its secrets the job could not be started on any machine."""
        try:
            self._context.secrets.read(job.id, job.spec.secrets)
        except SecretsMissing as exc:
            raise StateConflict(
                f"{job.name} cannot run again: {exc}", hint="they are deleted when a job has succeeded; submit it again"
            ) from exc

    async def line(self, job_id: JobId) -> JobResponse:
        """The job object as it is now."""
        return await self._context.read(lambda reads: self._shape(reads, job_id, reads.attempts_of(job_id)))

    async def commit(self, decide: Decide, points: Points) -> Committed:
        """The request is durable, and the loop looks at it at once.

        Raises:
            Unavailable: the state cannot be written now.
        """
        return await self._commit_with(lambda _reads, world, now: decide(world, now), points)

    async def _commit_with(self, decide: DecideWith, points: Points) -> Committed:
        """The wish is durable, and the brain looks at it at once."""
        try:
            committed = await self._context.commits.commit_with(decide, points)
        except StateError as exc:
            raise ApiUnavailable(exc.message, hint=exc.hint) from exc
        self._context.wake_event.notify()
        return committed


def _aside_words(row: UnreadableRow) -> str:
    whose = "this job" if row.attempt is None else f"attempt {row.attempt}"
    return f"{whose}: its row in the state cannot be understood ({row.error})"


def _get(reads: Reads, job_id: JobId) -> Job:
    job = reads.job(job_id)
    if job is None:
        raise ApiUnavailable(f"job {job_id} is not there any more")
    return job


def _check_secrets(spec: JobSpec, submission: Submission) -> None:
    missing = [name for name in spec.secrets if name not in submission.secrets]
    if missing:
        hint = "set it in the environment of spotctl, or give --secret-file"
        problems = tuple(InputProblem(key="secrets", message=f"{name} has no value", hint=hint) for name in missing)
        raise Invalid("a secret of the job is missing", problems=problems)
    extra = sorted(set(submission.secrets) - set(spec.secrets))
    if extra:
        raise Invalid(f"the job names no secret {', '.join(extra)}", hint="list it under secrets in the job file")


def _refuse_namesake(known: list[tuple[JobId, JobState]], name: str) -> None:
    for job_id, state in known:
        if not state.is_final:
            raise StateConflict(
                f"a job named {name} is {state.value} already ({job_id})",
                hint=f"wait for it, cancel it (spotctl cancel {job_id}), or give this one another name",
            )
