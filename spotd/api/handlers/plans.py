"""From what a user wrote to a job, and what the daemon would do with it, by the code that will do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from spotd.api.handlers.context import HandlerContext, get_job
from spotd.api.handlers.files import get_checkpoint
from spotd.api.handlers.render import offers_responses, passed_over_responses, quote_response, run_words, usd
from spotd.api.requests import JobDraft, utc_text
from spotd.api.responses import Invalid, NotFound, StateConflict
from spotd.api.schemas.answers import PlannedDataResponse, PlanResponse, ResumeSourceResponse
from spotd.core.checkpoints import FALLBACKS, borrowed, unprotected_words
from spotd.core.deadlines import due_words
from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Chain, Checkpoint, Job, sized
from spotd.core.domain.market import MarketSnapshot, Quote
from spotd.core.domain.plan import applied
from spotd.core.domain.states import JobState
from spotd.core.domain.world import RENTING, TAKING, VerdictKind, World
from spotd.core.pacer import deadline_warnings, infeasible
from spotd.core.pricing import age_words
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, ceilings_of, is_admissible
from spotd.core.ranking.cost_words import cost_words, data_words
from spotd.core.requests import AGENT, submit
from spotd.daemon.contents import checkpoint_manifest
from spotd.store import JobView, Reads
from spotd.words import count
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import DataSource, JobSpec
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import Problem, SpecError, require_few_values
from spotd_providers.contract import gpus
from spotd_providers.contract.values import ProviderName, as_usd

CANDIDATES_MAX: Final = 20


def read_spec(draft: JobDraft, market: MarketSnapshot, known: frozenset[ProviderName]) -> JobSpec:
    """Return the job the draft describes.

    Raises:
        Invalid: with every problem found.
    """
    try:
        for part in (draft.data, draft.flags):
            require_few_values(part, draft.source or "the job", refusal=SpecError)
        merged = merge(draft.data, draft.flags)
        spec = parse_job(merged, draft.source or "the job", base=Path(draft.base_dir) if draft.base_dir else None)
    except SpecError as exc:
        problems = tuple(exc.problems)
        where = draft.source or "the job"
        raise Invalid(f"{where} cannot be used: {count(len(problems), 'problem')}", problems=problems) from exc
    problems = (*_unknown_gpus(spec, market), *_unknown_providers(spec, known))
    if problems:
        raise Invalid(f"{draft.source or 'the job'} asks for what does not exist", problems=problems)
    return _with_standard_names(spec)


def _with_standard_names(spec: JobSpec) -> JobSpec:
    """Return the job with one spelling of each GPU, whatever its owner wrote."""
    gpu = tuple(replace(one, name=gpus.standard_name(one.name)) for one in spec.resources.gpu)
    speed = tuple(replace(one, name=gpus.standard_name(one.name)) for one in spec.speed)
    return replace(spec, resources=replace(spec.resources, gpu=gpu), speed=speed)


def _unknown_gpus(spec: JobSpec, market: MarketSnapshot) -> list[Problem]:
    sold = {gpu for provider_offers in market.by_provider.values() for gpu, _ in provider_offers.offer_index.by_gpu}
    found = []
    for index, one in enumerate(spec.resources.gpu):
        try:
            gpus.resolve(one.name, sold=sold)
        except gpus.UnknownGpu as exc:
            nearest = ", ".join(exc.nearest)
            hint = f"did you mean {nearest}?" if nearest else "spotctl prices shows what is sold"
            found.append(Problem(key=f"resources.gpu[{index}]", message=f"no GPU is known as {one.name!r}", hint=hint))
    return found


def _unknown_providers(spec: JobSpec, known: frozenset[ProviderName]) -> list[Problem]:
    hint = f"known here: {', '.join(sorted(known))}" if known else "no provider is configured"
    return [
        Problem(key="resources.providers", message=f"there is no provider {name!r}", hint=hint)
        for name in spec.resources.providers
        if name not in known
    ]


def outlook(job: Job, world: World, market: MarketSnapshot, now: datetime) -> PlanResponse:
    """Return the decision that would follow if this job were queued now."""
    spec = job.spec
    with_job = applied(world, submit(world, job, now))
    verdict = decide(with_job, market, now).verdicts.get(job.id)
    catalogue = CandidateCatalogue(world, market, now)
    chosen = None if verdict is None or verdict.best is None else verdict.best.offer.nodes
    job = sized(job, chosen or spec.resources.nodes)
    offers = catalogue.list_for(catalogue.key_of(job))
    request_counts: Counter[str] = Counter(offers.mismatches)
    fitting: list[tuple[Quote, str]] = []
    others: list[tuple[Quote, str]] = []
    index = -1
    while (offer := offers.at(index + 1)) is not None:
        index += 1
        blocked = catalogue.blocked(offer)
        quote = catalogue.quote_at(offers, index) if len(fitting) + len(others) < 2 * CANDIDATES_MAX else None
        ceiling = ceiling_for(offer.gpu, offer.gpu_count, spec.price, world.policy)
        if blocked:
            request_counts[blocked] += 1
        if quote is None:
            continue
        fits = not blocked and is_admissible(quote, ceiling, spec.price)
        (fitting if fits else others).append((quote, blocked))
    shown = (fitting + list(islice(others, max(3, CANDIDATES_MAX - len(fitting)))))[:CANDIDATES_MAX]
    named = ceilings_of(spec.resources, spec.price, world.policy)
    kind = verdict.kind if verdict is not None else VerdictKind.NO_OFFERS
    return PlanResponse(
        name=spec.name,
        spec=job_file(spec),
        run=run_words(spec),
        image=spec.image,
        workdir=spec.workdir,
        secrets=list(spec.secrets),
        ceilings={name: as_usd(most) for name, most in named.items()},
        budget_usd=usd(spec.job_budget),
        resume_from=None,
        data=[_source_response(one) for one in spec.data],
        data_cost=data_words(job, next((q for q, _ in shown), None)),
        candidates=[
            quote_response(
                q,
                ceiling_for(q.offer.gpu, q.offer.gpu_count, spec.price, world.policy),
                blocked,
                world.policy.bid_headroom_ppm,
            )
            for q, blocked in shown
        ],
        costs=list(cost_words(job, with_job, market, now)),
        passed_over=passed_over_responses(request_counts.items()),
        offers=offers_responses(market),
        fits=bool(fitting),
        verdict_kind=kind.value,
        verdict="no provider shows offers now" if verdict is None else _conditional(verdict.sentence),
        unprotected=unprotected_words(job, world, market, now),
        warnings=[
            *_warnings(spec, fitting, others),
            *_image_warnings(spec, (quote for quote, _ in shown), world),
            *deadline_warnings(job),
        ],
    )


def _conditional(sentence: str) -> str:
    """Return what would happen: a plan rents nothing."""
    for begins, would in ((RENTING, "would rent "), (TAKING, "would take ")):
        if sentence.startswith(begins):
            return would + sentence.removeprefix(begins)
    return sentence


def _image_warnings(spec: JobSpec, quotes: Iterable[Quote], world: World) -> list[str]:
    """Say where the job would run without its image."""
    names = sorted({quote.offer.provider for quote in quotes})
    without = [
        name for name in names if name in world.policy.providers and not world.policy.providers[name].runs_images
    ]
    if not without or not spec.image:
        return []
    setup = ", and `setup` installs into a Python environment of the machine's own" if spec.setup else ""
    where = f"a machine of {' or '.join(without)} is a process of this computer"
    return [f"{where}: it does not run the image {spec.image}, it uses the programs that are installed here{setup}"]


def _warnings(spec: JobSpec, fitting: list[tuple[Quote, str]], others: list[tuple[Quote, str]]) -> list[str]:
    warnings = []
    if not fitting and others and spec.price is not None and spec.price.per_gpu_hour is not None:
        lowest = min(q.price.per_gpu for q, _ in others)
        if spec.price.per_gpu_hour * 10 < lowest:
            warnings.append(
                f"max_price is less than a tenth of the lowest price now (${as_usd(lowest):.4f}/GPU-h):"
                " it may never be met"
            )
    return warnings


# Which deadlines are refused when a job is submitted or retried.


KEY = "schedule.deadline"


def require_future(spec: JobSpec, now: datetime) -> None:
    """Check that an instant by which the job is to be done has not passed.

    Raises:
        Invalid: it has.
    """
    deadline = spec.schedule.deadline
    if deadline is None or deadline.at is None or deadline.at > now:
        return
    passed = f"{due_words(deadline.at)} passed {age_words(now - deadline.at)} ago"
    problem = Problem(key=KEY, message=passed, hint='write a later instant, or a span from now: deadline = "36h"')
    raise Invalid("the deadline of the job has passed", problems=(problem,))


def require_feasible(job: Job, world: World, market: MarketSnapshot, now: datetime) -> None:
    """Check that nothing proves that the job cannot be done in time.

    Raises:
        Invalid: with the figures.
    """
    if job.spec.schedule.deadline is None and job.spec.schedule.max_duration is None:
        return
    catalogue = CandidateCatalogue(world, market, now)
    offers = catalogue.list_for(catalogue.key_of(job))
    while offers.at(len(offers.entries)) is not None:
        pass  # each call finds one more
    problem = infeasible(job, offers.entries, now)
    if problem is not None:
        row = Problem(key=problem.key, message=problem.why, hint=problem.hint)
        raise Invalid("the job cannot be done in time", problems=(row,))


def require_due_later(job: Job, now: datetime) -> None:
    """Check that a job which is to be tried again is not due at an instant that has passed.

    Raises:
        StateConflict: it is.
    """
    deadline = job.spec.schedule.deadline
    if deadline is None or deadline.at is None or deadline.at > now:
        return
    hint = f"submit it again with a later deadline and --resume-from {job.id}"
    raise StateConflict(f"{job.name} was due {due_words(deadline.at)}, which has passed", hint=hint)


# Which jobs a new one is to come after, by the names and ids that its owner wrote.


AFTER_MAX: Final = 1000
"""Jobs that one job comes after, the jobs of an array each counted."""
LINKS_MAX: Final = 200_000
"""The same of all jobs of one array together."""


def find_chain(
    reads: Reads, after: tuple[str, ...], names: tuple[str, ...], array_name: str = "", *, only_of: str | None = None
) -> Chain | None:
    """Return the jobs that new jobs of these names come after, `None` where they name none.

    They exist already, so no job can come after itself, through others or not.

    Args:
        only_of: the author of all that may be named: who may not change a job ties none to it.

    Raises:
        Invalid: one is unknown, or the job itself, or has ended without success, or there are too many.
    """
    found: dict[JobId, None] = {}
    problems: list[Problem] = []
    for position, ref in enumerate(after):
        views = _meant(reads, ref)
        problem = _refusal(ref, views, names, array_name) or _of_another(ref, views, only_of)
        if problem is not None:
            problems.append(Problem(key=f"schedule.after[{position}]", message=problem[0], hint=problem[1]))
        found.update(dict.fromkeys(view.id for view in views))
    if len(found) > AFTER_MAX or len(found) * len(names) > LINKS_MAX:
        many = f"{len(found):,} jobs before each of {len(names):,}" if len(names) > 1 else f"{len(found):,} jobs"
        hint = f"at most {AFTER_MAX:,} for one job, and {LINKS_MAX:,} for an array; put a job between them"
        problems.append(Problem(key="schedule.after", message=f"names {many}", hint=hint))
    if problems:
        raise Invalid("the job cannot come after these", problems=tuple(problems))
    return Chain(after=tuple(found)) if found else None


def _meant(reads: Reads, ref: str) -> tuple[JobView, ...]:
    """Return the one job of this id or name, else the jobs of such an array; of several runs the unfinished, or newest.

    The beginning of an id is not enough: what comes first is written down for later.
    """
    views = [view for view in reads.jobs_meant_by(ref) if ref in {view.id, view.name}]
    exact = [view for view in views if view.id == ref] or [view for view in views if not view.state.is_final]
    if exact:
        return (exact[0],)
    array = reads.array_meant_by(ref)
    if array is not None and (not views or array.submitted_at >= views[0].submitted_at):
        return reads.array_jobs(array.id)
    return tuple(views[:1])


def _refusal(ref: str, views: tuple[JobView, ...], names: tuple[str, ...], array_name: str) -> tuple[str, str] | None:
    if not views and (ref in names or ref == array_name):
        return f'"{ref}" is the job itself', "a job comes after others only; leave it out"
    if not views:
        hint = "submit that one first: a job comes after jobs that exist, so no circle can arise; spotctl ls shows them"
        return f'there is no job "{ref}"', hint
    for view in views:
        if view.state.is_final and view.state is not JobState.SUCCEEDED:
            return (
                f'"{ref}" would never come: {view.name} ({view.id}) is {view.state.value}: {view.reason}',
                f"spotctl retry {view.id} queues it again; then submit this job",
            )
    return None


def _of_another(ref: str, views: tuple[JobView, ...], only_of: str | None) -> tuple[str, str] | None:
    if only_of is None or all(view.submitted_by == only_of for view in views):
        return None
    if only_of == AGENT:
        return (
            f'"{ref}" was queued by a person',
            "a job of an agent comes after jobs of agents only; a person may submit it",
        )
    return f'"{ref}" was not queued by {only_of}', "who may operate may submit it"


# Which checkpoints of another job a new one begins from.


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSource:
    """The job, and what of it was chosen: one checkpoint by name, or the newest with a few older ones to fall back to.

    Attributes:
        checkpoint: the name as the user wrote it, empty for the newest.
    """

    job: JobId
    checkpoint: str

    def checkpoints(self, reads: Reads, world: World) -> tuple[Checkpoint, ...]:
        """Return what the new job's list begins with, as far as it is on the other list in this very transaction.

        Raises:
            NotFound: it is not, or not any more.
        """
        return tuple(borrowed(one) for one in self._chosen(get_job(reads, self.job, world)))

    def _chosen(self, job: Job) -> tuple[Checkpoint, ...]:
        if self.checkpoint:
            return (get_checkpoint(job, self.checkpoint),)
        if not job.checkpoints:
            raise NotFound(f"{job.name} has no checkpoint to resume from", hint=f"spotctl show {job.id}")
        return job.checkpoints[:FALLBACKS]


async def find_resume_source(context: HandlerContext, text: str) -> ResumeSource | None:
    """Return the source that a user means by `JOB` or `JOB:CHECKPOINT`; `None` for an empty text.

    Raises:
        NotFound, Ambiguous: no such job or checkpoint.
        Invalid: the first choice is damaged.
    """
    if not text:
        return None
    ref, _, name = text.partition(":")
    source = ResumeSource(job=await context.find(ref), checkpoint=name)
    world = context.world()
    first = (await context.read(lambda reads: source.checkpoints(reads, world)))[0]
    _, problem = await context.stored(partial(checkpoint_manifest, context.objects, first))
    if problem:
        raise Invalid(
            f"checkpoint {first.name} of {ref} cannot be resumed from: {problem}",
            hint=f"choose another: spotctl checkpoints {source.job}",
        )
    return source


def resume_source_response(source: ResumeSource, first: Checkpoint) -> ResumeSourceResponse:
    """Return the source as a plan shows it."""
    return ResumeSourceResponse(
        job=source.job, name=first.name, step=first.step, bytes=first.bytes, at=utc_text(first.at)
    )


def _source_response(one: DataSource) -> PlannedDataResponse:
    planned = PlannedDataResponse(
        source=one.source, path=one.path, sha256=one.sha256 or "", bytes=one.bytes, files=one.files
    )
    if one.revision:
        planned["revision"] = one.revision
    return planned
