"""What precedes a job: its plan, its code, and its submission."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from spotd.api.handlers import plans
from spotd.api.handlers.context import (
    CALLER,
    DaemonAnswers,
    HandlerContext,
    get_job,
    require_budgets,
    require_callers_day,
    require_day,
    require_free_names,
    require_free_views,
)
from spotd.api.handlers.data import with_data
from spotd.api.handlers.jobs import JobHandlers
from spotd.api.requests import BudgetChange, JobDraft, Submission
from spotd.api.responses import ApiUnavailable, Forbidden, Invalid, NotFound, OverBudget, StateConflict
from spotd.api.schemas.answers import CodeResponse, PlanResponse
from spotd.api.schemas.jobs import ArrayResponse, ForgottenResponse, JobDetailResponse, JobResponse
from spotd.core import host_reports, requests
from spotd.core.checkpoints import HINT as UNPROTECTED_HINT
from spotd.core.checkpoints import unprotected_words
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId, Intent, JobId
from spotd.core.domain.jobs import ArrayTask, Job, new_job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Right
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.core.enforcement import used_up
from spotd.core.ranking.remaining_work import JOBS_READ, is_asked, learnt_speeds
from spotd.core.requests import AGENT, ALLOW_HINT, agents_day, submitter_problem, within_limits
from spotd.daemon import object_keys
from spotd.daemon.commits import CrashPoint
from spotd.daemon.hosts.reader import with_job
from spotd.store import JobView, Reads
from spotd_jobs.spec.model import GpuSpeed, JobSpec, PriceLimit
from spotd_jobs.spec.parse import ArrayIndexes, parse_array, task_names
from spotd_jobs.spec.problems import BadValue, Problem
from spotd_providers.contract.values import MicroUsd, ProviderName, as_usd

PLAN_ID: Final = JobId("0planned00")


class SubmissionHandlers(DaemonAnswers):
    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def plan(self, draft: JobDraft, resume_from: str = "", array: str = "") -> PlanResponse:
        """Show what submitting would do; change nothing.

        Raises:
            Invalid: with every problem found, not only the first.
            NotFound: there is no such job or checkpoint to resume from.
        """
        spec = await with_data(self._context, self._spec(draft), draft.folders, is_plan=True)
        plans.require_future(spec, self._context.clock.now())
        tasks = _tasks(spec, array)
        world = self._context.world()
        names = (spec.name,) if tasks is None else tasks.names
        chain = await self._context.read(lambda reads: plans.find_chain(reads, spec.schedule.after, names, spec.name))
        if chain is not None:
            over = await self._context.read(lambda reads: reads.past_jobs(chain.after))
            world = replace(world, past={**world.past, **over})
        source = await plans.find_resume_source(self._context, resume_from)
        taken = () if source is None else await self._context.read(lambda reads: source.checkpoints(reads, world))
        now, market = self._context.clock.now(), self._context.offer_cache.snapshot()
        learnt = await self._learnt(spec, market, source)
        job = replace(new_job(PLAN_ID, spec, now), checkpoints=taken, chain=chain, learnt=learnt)
        plans.require_feasible(job, world, market, now)
        plan = plans.outlook(job, world, market, now)
        if source is not None:
            plan["resume_from"] = plans.resume_source_response(source, taken[0])
        return plan

    async def _learnt(
        self, spec: JobSpec, market: MarketSnapshot, source: plans.ResumeSource | None
    ) -> tuple[GpuSpeed, ...] | None:
        """Return how fast GPUs are by what others measured, for a job that is ranked by that.

        A job that goes on with another's checkpoints has its speeds: they are the unit of the work that those hold.
        """
        if not is_asked(spec):
            return None
        if source is not None:
            world = self._context.world()
            return await self._context.read(lambda reads: get_job(reads, source.job, world).learnt)
        paces = await self._context.read(lambda reads: reads.newest_paces(limit=JOBS_READ))
        return learnt_speeds(spec, paces, market)

    def _spec(self, draft: JobDraft) -> JobSpec:
        known = frozenset(self._context.providers)
        return plans.read_spec(draft, self._context.offer_cache.snapshot(), known)

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
        spec = await with_data(context, self._spec(submission.draft), submission.draft.folders)
        _require_right(spec, submission)
        if submission.agent:
            limited = within_limits(spec, context.policy.current)
            if isinstance(limited, str):
                raise OverBudget(limited, hint=ALLOW_HINT)
            spec = limited
        plans.require_future(spec, context.clock.now())
        _require_secrets(spec, submission)
        code_bytes = await self._code_bytes(spec, submission)
        source = await plans.find_resume_source(context, submission.resume_from)
        world, market, now = context.world(), context.offer_cache.snapshot(), context.clock.now()
        taken = () if source is None else await context.read(lambda reads: source.checkpoints(reads, world))
        bare = replace(new_job(PLAN_ID, spec, now), learnt=await self._learnt(spec, market, source))
        planned = replace(bare, checkpoints=taken)
        plans.require_feasible(planned, world, market, now)
        problem = used_up(world, market, bare, now, unspent=True)
        if problem:
            raise OverBudget(problem, hint="raise [budget] job, or lower max_price")
        exposed = unprotected_words(planned, world, market, now)
        if exposed and (submission.agent or not submission.i_know):
            raise Invalid(exposed, hint=UNPROTECTED_HINT)
        tasks = _tasks(spec, submission.array)
        ids, array_id = await self._free_ids(spec, tasks)
        await context.require_secrets_kept(submission.secrets, jobs=len(ids))
        # Writing one for each of ten thousand jobs takes a while.
        beside = await context.stored(lambda: context.secrets.prepare(dict.fromkeys(ids, submission.secrets)))

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            names = [spec.name] if tasks is None else list(tasks.names)
            require_free_names(world, set(names), "" if tasks is None else spec.name)
            author = AGENT if submission.agent else CALLER.get().name
            only_of = author if submission.agent or CALLER.get().right < Right.OPERATE else None
            chain = plans.find_chain(reads, spec.schedule.after, tuple(names), spec.name, only_of=only_of)
            job = new_job(ids[0], spec, now, code_sha256=submission.code_sha256, code_bytes=code_bytes)
            job = replace(job, chain=chain, learnt=bare.learnt, submitted_by=author)
            if source is not None:
                job = replace(job, checkpoints=source.checkpoints(reads, world))
            jobs = [job] if tasks is None else tasks.of(job, ids, array_id)
            if submission.agent:
                require_day(agents_day(world.policy), reads, world, jobs, now)
            require_callers_day(reads, world, jobs, now)
            return requests.submit_all(world, jobs, now)

        try:
            await context.commit(decide, (CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT), beside)
        except Exception:
            # Nothing was written. A cancellation proves no such thing: it leaves the values for the job that may be.
            context.secrets.discard(ids)
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


def _require_right(spec: JobSpec, submission: Submission) -> None:
    """Check what the right of the caller allows a job.

    Raises:
        Forbidden: it allows less.
    """
    caller = CALLER.get()
    if submission.agent and caller.name:
        hint = "run spotctl mcp on the daemon's computer, without --url"
        raise Forbidden("agents queue jobs by the socket of the daemon only", hint=hint)
    if caller.right < Right.OPERATE and (problem := submitter_problem(spec)):
        raise Forbidden(problem, hint="leave both out")


def _require_secrets(spec: JobSpec, submission: Submission) -> None:
    missing = [name for name in spec.secrets if name not in submission.secrets]
    if missing:
        hint = "set it in the environment of spotctl, or give --secret-file"
        problems = tuple(Problem(key="secrets", message=f"{name} has no value", hint=hint) for name in missing)
        raise Invalid("a secret of the job is missing", problems=problems)
    extra = sorted(set(submission.secrets) - set(spec.secrets))
    if extra:
        raise Invalid(f"the job names no secret {', '.join(extra)}", hint="list it under secrets in the job file")


# What owners change about jobs and machines that exist: budgets, ceilings, and machines that are given up.


BUDGET_MAX = MicroUsd(10**13)


class AmendmentHandlers(DaemonAnswers):
    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        """Set what all attempts of the job together may cost; it may have ended, and go on after a retry.

        Raises:
            Invalid: there is no budget to add to.
            OverBudget: it is more than the caller's day bears.
        """
        job_id = await self._context.find(ref)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            amount = _budget_after(job, change)
            if amount > (job.budget or 0):  # of one that is over, too: an operator may retry it
                is_first = job.budget is None and not job.state.is_final
                changed = replace(job, budget_set=amount)
                require_callers_day(reads, world, [changed], now, is_first_budget=is_first)
            return requests.set_budget(world, job, amount, now)

        await self._context.commit(decide)
        self._context.log.info("job.budget_changed", job=job_id)
        return await self._jobs.line(job_id)

    async def set_ceiling(self, ref: str, limit: PriceLimit | None) -> JobResponse:
        """Set what a machine of the job may cost; `None` is what the config says.

        Raises:
            OverBudget: it has no budget, and a budget of the day limits the caller.
        """
        job_id = await self._context.find(ref)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = get_job(reads, job_id, world)
            require_budgets([job])
            return requests.set_ceiling(world.with_job(job), [job], limit, now)

        await self._context.commit(decide)
        self._context.log.info("job.ceiling_changed", job=job_id)
        return await self._jobs.line(job_id)

    async def forget(self, machine: str) -> ForgottenResponse:
        """Give up a machine, named by its id, its key or `JOB-NUMBER`, although its end was not seen.

        Raises:
            NotFound: no such machine is known.
            StateConflict: it can be seen, and therefore ended.
            ApiUnavailable: what its host saved last cannot be read now.
        """
        context = self._context
        report = await self._last_report(machine)
        names = set(context.policy.current.providers) & set(context.offer_cache.listings())
        errors: dict[ProviderName, str] = {name: context.offer_cache.machines(name).error for name in names}
        listings = {name: listing for name, listing in context.offer_cache.listings().items() if name in names}
        forgotten: list[ForgottenResponse] = []

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            found = host_reports.find_machine(world, machine)
            if found is None:
                raise NotFound(f"no machine {machine!r} is known", hint="spotctl show JOB lists the machines of a job")
            problem = host_reports.refusal(world, found, listings, errors)
            if problem:
                raise StateConflict(problem, hint="spotctl cancel JOB ends the machine of a job")
            forgotten.append(_response(world, found))
            last = None if report is None or report.attempt != found else with_job(report, world.jobs[found.job])
            return host_reports.forget(world, found, now, last)

        await self._context.commit(decide)
        context.log.warning("machine.forgotten", key=forgotten[-1]["key"], provider=forgotten[-1]["provider"])
        return forgotten[-1]

    async def _last_report(self, machine: str) -> HostStatus | None:
        """Return all that the host of this machine wrote until now; `None` where nothing more of it counts."""
        world = self._context.world()
        found = host_reports.find_machine(world, machine)
        item = None if found is None or isinstance(found, Intent) else world.attempts[found]
        if item is None or not item.state.counts:
            return None
        job, monitor = world.jobs[item.id.job], self._context.host_monitor
        return await self._context.stored(lambda: monitor.read_alone(item, job))


def _budget_after(job: Job, change: BudgetChange) -> MicroUsd:
    if not change.is_added:
        return MicroUsd(change.amount)
    if job.budget is None:
        raise Invalid(f"{job.name} has no budget to add to", hint=f"spotctl budget {job.name} =140 sets one")
    return min(BUDGET_MAX, MicroUsd(job.budget + change.amount))


def _response(world: World, found: AttemptId | Intent) -> ForgottenResponse:
    item = found if isinstance(found, Intent) else world.attempts[found]
    return ForgottenResponse(
        provider=item.provider,
        machine=None if item.ref is None else item.ref.instance_id,
        key=item.key,
        job=None if isinstance(found, Intent) else found.job,
        attempt=None if isinstance(found, Intent) else found.number,
    )


# Whole arrays: cancel and retry every job of one, and change their ceiling.


RETRIES_AT_ONCE: Final = 250
"""In one transaction."""
RETRIES_LAST_S: Final = 5.0
"""Each asks the store; after so long the client asks again with the index behind the last."""
REFUSALS_MAX: Final = 5


class ArrayHandlers(DaemonAnswers):
    """Changes the jobs of an array together. Each method returns `None` where the reference means no array."""

    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def cancel(self, ref: str) -> ArrayResponse | None:
        """Cancel all jobs of the array that have not ended, in one transaction."""
        array = await self._context.find_array(ref)
        if array is None:
            return None

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            mine = [job.id for job in world.jobs.values() if job.array is not None and job.array.id == array]
            return requests.cancel_all(world, mine, now)

        await self._context.commit(decide, (CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL))
        self._context.log.info("array.cancel_requested", array=array)
        return await self._response(array)

    async def set_ceiling(self, ref: str, limit: PriceLimit | None) -> ArrayResponse | None:
        """Set what a machine of each job of the array may cost, in one transaction; those that ended keep theirs.

        Raises:
            OverBudget: one has no budget, and a budget of the day limits the caller.
        """
        array = await self._context.find_array(ref)
        if array is None:
            return None

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            mine = [job for job in world.jobs.values() if job.array is not None and job.array.id == array]
            require_budgets(mine)
            return requests.set_ceiling(world, mine, limit, now)

        await self._context.commit(decide)
        self._context.log.info("array.ceiling_changed", array=array)
        return await self._response(array)

    async def retry(self, ref: str, *, start: int = 0) -> ArrayResponse | None:
        """Queue the jobs of the array that ended without success again, some of them, from this index on."""
        array = await self._context.find_array(ref)
        if array is None:
            return None
        views = await self._context.read(lambda reads: reads.array_jobs(array))
        ended = [view for view in views if view.state.is_final and view.state is not JobState.SUCCEEDED]
        due = [view for view in ended if _index(view) >= start]
        refusals: list[str] = []
        retried, until = 0, anyio.current_time() + RETRIES_LAST_S
        while due:
            some, due = due[:RETRIES_AT_ONCE], due[RETRIES_AT_ONCE:]
            queued, refused = await self._jobs.retry_all([view.id for view in some])
            retried += queued
            refusals += [refusal.message for refusal in refused]
            if anyio.current_time() >= until:
                break
        following = _index(due[0]) if due else None
        return await self._response(array, retried=retried, refusals=refusals[:REFUSALS_MAX], following=following)

    async def _response(
        self, array: JobId, *, retried: int = 0, refusals: list[str] | None = None, following: int | None = None
    ) -> ArrayResponse:
        views = await self._context.read(lambda reads: reads.array_jobs(array))
        now = self._context.clock.now()
        first = views[0].array
        return ArrayResponse(
            id=array,
            name="" if first is None else first.name,
            jobs=len(views),
            states=dict(Counter(view.state.value for view in views)),
            spent_usd=as_usd(sum(view.spent_at(now) for view in views)),
            estimated=any(view.is_estimated and view.spent_at(now) for view in views),
            retried=retried,
            refusals=refusals or [],
            next_index=following,
        )


def _index(view: JobView) -> int:
    return 0 if view.array is None else view.array.index
