"""Jobs that exist: list, show, why, cancel, retry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from spotd.api.handlers import render
from spotd.api.handlers.context import (
    DaemonAnswers,
    HandlerContext,
    find_array,
    get_job,
    require_authors_days,
    require_callers_day,
    require_free_names,
)
from spotd.api.handlers.data import gone
from spotd.api.handlers.health import notes_of
from spotd.api.handlers.plans import require_due_later
from spotd.api.requests import JobQuery, instant, utc_text
from spotd.api.responses import ApiUnavailable, NotFound, OverBudget, StateConflict
from spotd.api.schemas import jobs as schemas
from spotd.api.schemas.answers import WhyResponse
from spotd.core import recovery, requests
from spotd.core.checkpoints import advice_words
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import NOTHING, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan, combine
from spotd.core.domain.states import JobState
from spotd.core.domain.world import RENTING, TAKING, UnreadableRow, World
from spotd.core.enforcement import used_up
from spotd.core.metering import compared_cost
from spotd.core.ranking.candidates import ceilings_of
from spotd.core.ranking.cost_words import cost_words
from spotd.core.schedule import readers
from spotd.daemon.commits import CrashPoint
from spotd.daemon.grants.inputs import InputsAway, JobSecrets, SecretsLocked
from spotd.daemon.recovery_survey import survey_one
from spotd.store import EventView, JobView, Reads
from spotd_jobs.spec.keys import job_file
from spotd_providers.contract.values import as_usd

EVENTS_WITH_WHY: Final = 10
CHECKPOINTS_WITH_WHY: Final = 30
"""Events of checkpoints, which take no place from those of other kinds."""
_NOT_OF_CHECKPOINTS: Final = ("job", "attempt", "machine", "bid", "launch", "outputs", "host")
PLACED_KIND: Final = "attempt.intended"
PLACED_MAX: Final = 5
"""Of so many attempts, the newest, `why` states why they ran where they did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A job in a list, and what it was made of."""

    view: JobView
    sentence: str | None
    response: schemas.JobResponse


class JobHandlers(DaemonAnswers):
    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self._failures = render.FailureHandlers(context)
        self._lines: dict[JobId, _Line] = {}
        """The list as it was shown last."""

    async def page(self, query: JobQuery) -> schemas.JobPageResponse:
        def work(reads: Reads) -> schemas.JobPageResponse:
            more = False
            active = () if query.array else reads.jobs(active=True)
            views = _jobs_of_array(reads, query) if query.array else list(active)
            if not query.active and not query.array:
                room = max(0, query.limit - len(active))
                ended = reads.ended_jobs(limit=room + 1)
                more = len(ended) > room
                views = sorted([*active, *ended[:room]], key=lambda v: (v.submitted_at, v.id), reverse=True)
            if query.state:
                views = [view for view in views if view.state in query.state]
            words = self._provider_words()
            lines = {view.id: self._line_of(reads, view, words) for view in views}
            self._lines = lines
            return schemas.JobPageResponse(
                jobs=[line.response for line in lines.values()],
                more=more,
                paused=self._context.why_paused,
                arrays=self._cut_arrays(reads, views) if more and not query.state else [],
            )

        page = await self._context.read(work)
        await self._failures.complete(page["jobs"])
        return page

    def _cut_arrays(self, reads: Reads, views: Iterable[JobView]) -> list[schemas.ArraySumResponse]:
        """Return the sums of the arrays of which a part is shown; whatever runs on a meter is in that part."""
        now = self._context.clock.now()
        shown: defaultdict[JobId, list[JobView]] = defaultdict(list)
        for view in views:
            if view.array is not None:
                shown[view.array.id].append(view)
        found = []
        for array, own in shown.items():
            if own[0].array is None or len(own) >= own[0].array.count:
                continue
            totals = reads.array_totals(array)
            running = [(view.state, item, item.spent_at(now)) for view in own for item in view.open]
            spent = totals.spent + sum(cost for _, _, cost in running)
            compared = totals.on_demand + sum(compared_cost(s, cost, i.on_demand_at(now)) for s, i, cost in running)
            unknown = totals.uncompared + sum(
                compared_cost(state, cost, NOTHING if item.on_demand is not None else cost)
                for state, item, cost in running
            )
            found.append(
                schemas.ArraySumResponse(
                    id=array,
                    states={state.value: count for state, count in totals.states.items()},
                    spent_usd=as_usd(spent),
                    estimated=totals.estimated > 0 or any(cost for _, _, cost in running),
                    on_demand_usd=as_usd(compared),
                    saved_usd=as_usd(compared - spent),
                    uncompared_usd=as_usd(unknown),
                    recoveries=totals.recoveries,
                )
            )
        return found

    def _line_of(self, reads: Reads, view: JobView, words: render.Words) -> _Line:
        """Return the line of a job; the one shown last where nothing in it has changed, as while a machine runs."""
        sentence = self._sentence(view.id)
        known = self._lines.get(view.id)
        if known is not None and known.view is view and known.sentence == sentence and not view.open:
            return known
        return _Line(view=view, sentence=sentence, response=self._response(reads, view.id, (), words, view))

    def _provider_words(self) -> render.Words:
        return render.provider_words(self._context.offer_cache.listings())

    def _sentence(self, job: JobId) -> str | None:
        verdict = self._context.verdict_of(job)
        return None if verdict is None else verdict.sentence

    def _response(
        self,
        reads: Reads,
        job: JobId,
        attempts: tuple[Attempt, ...],
        words: render.Words | None = None,
        view: JobView | None = None,
    ) -> schemas.JobResponse:
        line = view or reads.job_view(job)
        if line is None:
            raise ApiUnavailable(f"job {job} is not there any more")
        state, verdict = self._context.control_loop.state, self._context.verdict_of(job)
        shown = attempts
        if not attempts and state is not None:
            shown = tuple(state.world.attempts[a.id] for a in line.open if a.id in state.world.attempts)
        words = self._provider_words() if words is None else words
        intents = {} if state is None else state.world.intents
        return render.job_response(
            line, shown, verdict, self._context.clock.now(), self._context.host_monitor, words, intents
        )

    async def detail(self, ref: str) -> schemas.JobDetailResponse:
        job_id = await self._context.find(ref)

        def work(reads: Reads) -> schemas.JobDetailResponse:
            attempts, aside = reads.attempts_of(job_id), reads.set_aside(job_id)
            job = None if any(row.attempt is None for row in aside) else get_job(reads, job_id)
            return self._detail(reads, job_id, job, attempts, aside)

        detail = await self._context.read(work)
        await self._failures.complete([detail["job"]])
        return detail

    def _detail(
        self,
        reads: Reads,
        job_id: JobId,
        job: Job | None,
        attempts: tuple[Attempt, ...],
        aside: tuple[UnreadableRow, ...],
    ) -> schemas.JobDetailResponse:
        """Return everything about a job; `job` is `None` where its own row or a checkpoint's cannot be understood."""
        current = next((a for a in attempts if a.state.counts), None)
        ceilings = {} if job is None else ceilings_of(job.spec.resources, job.spec.price, self._context.policy.current)
        ceiling = current.ceiling_now if current is not None else max(ceilings.values(), default=None)
        phase = ""
        if current is not None:
            heartbeat = self._context.host_monitor.heartbeat(current.id)
            phase = heartbeat.phase.value if heartbeat is not None else current.phase
        return schemas.JobDetailResponse(
            job=self._response(reads, job_id, attempts),
            spec={} if job is None else job_file(job.spec),
            code_sha256=None if job is None else job.code_sha256,
            code_bytes=0 if job is None else job.code_bytes,
            priority=0 if job is None else job.spec.priority,
            lost_s=0.0 if job is None else job.lost.total_seconds(),
            ceiling_usd_gpu_h=render.usd(ceiling),
            ceilings={name: as_usd(most) for name, most in ceilings.items()},
            budget_usd=None if job is None else render.usd(job.budget),
            phase=phase,
            checkpoint_advice=self._checkpoint_advice(job, current),
            set_aside=[_aside_words(row) for row in aside],
        )

    def _checkpoint_advice(self, job: Job | None, current: Attempt | None) -> str:
        if job is None or job.state.is_final:
            return ""
        return advice_words(job, current, self._context.world(), self._context.clock.now())

    async def gpu_history(self, ref: str) -> schemas.GpuHistoryResponse:
        """Return the use of the GPUs of the machine that the job has now."""
        job_id = await self._context.find(ref)
        attempt = self._context.world().counting_attempt(job_id)
        if attempt is None:
            return schemas.GpuHistoryResponse(attempt=None, samples=[])
        samples = [
            schemas.GpuSampleResponse(
                at=utc_text(one.at), util_pct=one.util_pct, mem_used_mb=one.mem_used_mb, mem_total_mb=one.mem_total_mb
            )
            for one in self._context.host_monitor.gpu_samples(attempt.id)
        ]
        return schemas.GpuHistoryResponse(attempt=attempt.id.number, samples=samples)

    async def why(self, ref: str) -> WhyResponse:
        job_id = await self._context.find(ref)
        context = self._context

        def work(reads: Reads) -> WhyResponse:
            job = reads.job_view(job_id)
            if job is None:
                raise ApiUnavailable(f"job {job_id} is not there any more")
            verdict = None if job.state.is_final else context.verdict_of(job_id)
            best = None
            if verdict is not None and verdict.best is not None:
                best = render.quote_response(verdict.best, verdict.ceiling, "", context.policy.current.bid_headroom_ppm)
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
                ceiling_usd_gpu_h=render.usd(verdict.ceiling) if verdict is not None else None,
                best=best,
                costs=self._costs(job_id),
                passed_over=render.passed_over_responses(verdict.passed_over) if verdict is not None else [],
                offers=render.offers_responses(
                    context.offer_cache.snapshot(), notes_of(context.offer_cache, context.clock)
                ),
                stage=self._stage(job),
                placed=_placed_words(reads, job_id) if job.state.is_final else [],
                failure=render.failure_response(job),
                events=[render.event_response(item, job.name) for item in _lately(reads, job_id)],
            )

        answer = await context.read(work)
        if (failure := answer["failure"]) is not None:
            line = await self.line(job_id)
            answer["failure"] = line["failure"] or failure
        return answer

    def _stage(self, job: JobView) -> schemas.StageResponse | None:
        world = self._context.world()
        known = (world.attempts[one.id] for one in job.open if one.id in world.attempts)
        return render.stage_response(known, self._context.host_monitor, self._provider_words(), world.intents)

    def _costs(self, job_id: JobId) -> list[str]:
        """Return what finishing the job is expected to cost, in sentences."""
        context = self._context
        world = context.world()
        job = world.jobs.get(job_id)
        if job is None or job.state.is_final:
            return []
        return list(cost_words(job, world, context.offer_cache.snapshot(), context.clock.now()))

    async def cancel(self, ref: str) -> schemas.JobResponse:
        """Cancel the job; a second cancel changes nothing and succeeds.

        Raises:
            StateConflict: it ended otherwise already.
        """
        job_id = await self._context.find(ref)
        job = await self._context.read(lambda reads: get_job(reads, job_id))
        if job.state.is_final:
            if job.state is JobState.CANCELLED:
                return await self.line(job_id)
            raise StateConflict(f"{job.name} has ended already: {job.reason}", hint=f"spotctl retry {job.name}")

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            return requests.cancel(world, job_id, now) if job_id in world.jobs else Plan()

        await self._context.commit(decide, (CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL))
        self._context.log.info("job.cancel_requested", job=job_id)
        return await self.line(job_id)

    async def retry(self, ref: str, *, anyway: bool = False) -> schemas.JobResponse:
        """Queue a final job again; it will resume from its newest checkpoint.

        Args:
            anyway: also where it succeeded, or where its machine reported so.

        Raises:
            StateConflict: it is not final, or succeeded and `anyway` is not set, or its secrets are gone, or it was
                due at an instant that has passed, or data that it reads is not in the store any more.
            ApiUnavailable: the checkpoint store does not answer.
            OverBudget: what is left of its budget buys nothing of use.
        """
        job_id = await self._context.find(ref)
        await self._context.read(lambda reads: get_job(reads, job_id))
        for refusal in (await self.retry_all([job_id], anyway=anyway))[1]:
            raise refusal
        return await self.line(job_id)

    async def retry_all(
        self, ids: Sequence[JobId], *, anyway: bool = False
    ) -> tuple[int, list[StateConflict | OverBudget]]:
        """Queue final jobs again, in one transaction; return how many, and why the others are not.

        Raises:
            ApiUnavailable: the checkpoint store does not answer.
        """
        context, now = self._context, self._context.clock.now()
        refusals: list[StateConflict | OverBudget] = []
        due: list[Job] = []
        for job in await context.read(lambda reads: reads.readable_jobs(ids)):
            try:
                self._require_retriable(job, now, anyway=anyway)
            except StateConflict as refusal:
                refusals.append(refusal)
            else:
                due.append(job)
        without = await context.stored(lambda: _without_secrets(context.secrets, due))
        refusals += without.values()
        due = [job for job in due if job.id not in without]
        if not due:
            return 0, refusals
        policy = context.policy.current
        # The state may be older than the store, which is asked at a start only about jobs that were not over.
        # Here, and not in the transaction: from now on no garbage collection takes what they read.
        lacking = await context.stored(lambda: gone(context.datasets, due))
        surveys = await context.stored(lambda: [survey_one(context.objects, policy, job, now) for job in due])
        refused: list[StateConflict | OverBudget] = []

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            refused.clear()
            again: list[Job] = []
            plan = Plan()
            active = [job for job in world.jobs.values() if not job.state.is_final]
            names, chained = {job.name for job in active}, [job for job in active if job.chain is not None]
            world = replace(world, jobs={**{job.id: job for job in due}, **world.jobs})
            for job, survey in zip(due, surveys, strict=True):
                newest = world.jobs[job.id]
                try:
                    if job.name in names:
                        require_free_names(world, {job.name})
                    _require_no_readers(chained, job)
                    _require_data(job, lacking.get(job.id))
                    self._refuse_used_up(world, newest, now)
                    require_callers_day(reads, world, [*again, newest], now)
                    require_authors_days(context.users(), reads, world, [*again, newest], now)
                except (StateConflict, OverBudget) as refusal:
                    refused.append(refusal)
                else:
                    again.append(newest)
                    plan = combine(plan, recovery.retry(world, newest, survey, now))
            return plan

        await context.commit(decide)
        queued = len(due) - len(refused)
        if queued:
            context.log.info("job.retried", job=due[0].id, jobs=queued)
        return queued, [*refusals, *refused]

    def _require_retriable(self, job: Job, now: datetime, *, anyway: bool) -> None:
        if not job.state.is_final:
            raise StateConflict(f"{job.name} is {job.state.value} and needs no retry", hint=f"spotctl why {job.id}")
        if job.state is JobState.SUCCEEDED and not anyway:
            hint = f"spotctl retry --anyway {job.id} runs it again all the same, from its newest checkpoint"
            raise StateConflict(f"{job.name} succeeded", hint=hint)
        require_due_later(job, now)

    def _refuse_used_up(self, world: World, job: Job, now: datetime) -> None:
        """Refuse a job whose money buys nothing of use: it would expire at the next decision, as it may have before."""
        why = used_up(world, self._context.offer_cache.snapshot(), job, now)
        if why:
            raise OverBudget(
                f"{job.name} would expire at once: {why}; raise its budget first with spotctl budget {job.name} +USD",
                hint=f"spotctl budget {job.id} +USD, then spotctl retry {job.id}",
            )

    async def line(self, job_id: JobId) -> schemas.JobResponse:
        """Return the job object as it is now."""
        job = await self._context.read(lambda reads: self._response(reads, job_id, reads.attempts_of(job_id)))
        await self._failures.complete([job])
        return job


def _lately(reads: Reads, job_id: JobId) -> list[EventView]:
    """Return the newest events, oldest first, and the checkpoints since the first of them."""
    events = list(reads.newest_events(job_id=job_id, kinds=_NOT_OF_CHECKPOINTS, limit=EVENTS_WITH_WHY))
    saved = reads.newest_events(job_id=job_id, kinds=("checkpoint",), limit=CHECKPOINTS_WITH_WHY)
    first = events[0].seq if events else 0
    return sorted([*events, *(one for one in saved if one.seq > first)], key=lambda one: one.seq)


def _placed_words(reads: Reads, job: JobId) -> list[str]:
    """Return for each attempt why it ran where it did, the newest ones of many."""
    chosen = reads.events_of_jobs([PLACED_KIND], [job])[-PLACED_MAX:]
    return [
        f"attempt {item.event.attempt}: {item.event.message.removeprefix(RENTING).removeprefix(TAKING)}"
        for item in chosen
    ]


def _jobs_of_array(reads: Reads, query: JobQuery) -> list[JobView]:
    """Return the jobs of an array in the order of their indexes."""
    array = find_array(reads, query.array)
    if array is None:
        raise NotFound(f"there is no array {query.array}", hint="spotctl ls")
    return [view for view in reads.array_jobs(array) if not (query.active and view.state.is_final)]


def _aside_words(row: UnreadableRow) -> str:
    whose = "this job" if row.attempt is None else f"attempt {row.attempt}"
    return f"{whose}: its row in the state cannot be understood ({row.error})"


def _require_data(job: Job, lacking: str | None) -> None:
    """Check that the store lacks nothing that the job reads.

    Raises:
        StateConflict: it lacks this.
    """
    if lacking is not None:
        hint = "store the same content again with spotctl data put NAME DIR, or submit the job again"
        raise StateConflict(f"the data {lacking} is not in the store any more, and {job.name} reads it", hint=hint)


def _without_secrets(secrets: JobSecrets, jobs: Sequence[Job]) -> dict[JobId, StateConflict]:
    """Return a refusal for each job whose secrets have no values, so that it could be started on no machine.

    Raises:
        ApiUnavailable: that is not known now.
    """
    found: dict[JobId, StateConflict] = {}
    try:
        missing = secrets.missing({job.id: job.spec.secrets for job in jobs})
    except InputsAway as exc:
        raise ApiUnavailable(str(exc), hint="spotctl doctor") from exc
    for job in (job for job in jobs if job.id in missing):
        hint = "they are deleted when a job has succeeded; submit it again"
        if isinstance(missing[job.id], SecretsLocked):
            hint = "give this spotd the same key as secrets_key in [daemon]; or submit it again"
        found[job.id] = StateConflict(f"{job.name} cannot run again: {missing[job.id]}", hint=hint)
    return found


def _require_no_readers(others: Iterable[Job], job: Job) -> None:
    """Check that no job that goes on reads outputs that a new run of this one would replace.

    Raises:
        StateConflict: one does.
    """
    for reader in readers(others, job.id):
        raise StateConflict(
            f"{reader.name} ({reader.id}) is {reader.state.value} and reads the outputs of {job.name}",
            hint=f"wait for it, or spotctl cancel {reader.id}",
        )
