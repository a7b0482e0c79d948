"""From what a user wrote to a job, and what the daemon would do with it, by the code that will do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

from spotd.api.errors import Invalid
from spotd.api.handlers.render import (
    offers_responses,
    passed_over_responses,
    quote_response,
    run_words,
    usd,
)
from spotd.api.requests import JobRequest
from spotd.api.schemas.plans import PlanResponse
from spotd.core.checkpoints.unprotected import unprotected_words
from spotd.core.deadlines.feasible import deadline_warnings
from spotd.core.decide import decide
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.quotes import Quote
from spotd.core.domain.verdicts import RENTING, VerdictKind
from spotd.core.domain.world import World
from spotd.core.plans.applied import applied
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.ranking.ceilings import ceiling_for, ceilings_of, is_admissible
from spotd.core.ranking.cost_words import cost_words, data_words
from spotd.core.requests import submit
from spotd.words import count
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.spec.parse import merge, parse_job
from spotd_jobs.spec.problems import Problem, SpecError, require_few_values
from spotd_providers.contract import gpus
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import ProviderName

CANDIDATES_MAX: Final = 20


def read_spec(draft: JobRequest, market: MarketSnapshot, known: frozenset[ProviderName]) -> JobSpec:
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
    sold = {gpu for provider_offers in market.offer_cache.values() for gpu, _ in provider_offers.offer_index.by_gpu}
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
        data=[
            {
                "source": one.source,
                "path": one.path,
                "sha256": one.sha256 or "",
                "bytes": one.bytes,
                "files": one.files,
            }
            for one in spec.data
        ],
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
    rest = sentence.removeprefix(RENTING)
    return sentence if rest == sentence else f"would rent {rest}"


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
