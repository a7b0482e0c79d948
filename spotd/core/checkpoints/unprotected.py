"""Spot jobs that would lose everything: longer than a machine lasts in the mean, and without any checkpoint."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.checkpoints.checkpoint_advice import hazards_with_prior, states_checkpoints
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.world import World
from spotd.core.experience.hazards import PPM
from spotd.core.pricing.words import machine_words
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.ranking.ceilings import ceiling_for, is_admissible
from spotd.core.ranking.cost_words import evidence_words
from spotd.core.ranking.remaining_work import remaining_on
from spotd_jobs.spec.model import MarketChoice
from spotd_providers.contract.values import Interruption

_HOUR = timedelta(hours=1)


def unprotected_words(job: Job, world: World, market: MarketSnapshot, now: datetime) -> str:
    """Return why the job would hardly finish on what it would be given now; empty where it may.

    Nothing is said of a job whose length is not known, that saves, or that would get a machine that is not taken back.
    """
    if job.checkpoints or states_checkpoints(job.spec):
        return ""
    job, catalogue = _on_first_market(job), CandidateCatalogue(world, market, now)
    offers = catalogue.list_for(catalogue.key_of(job))
    for quote in catalogue.ranked(offers):
        offer = quote.offer
        kind = (offer.gpu, offer.gpu_count)
        ceiling = ceiling_for(*kind, job.spec.price, world.policy)
        if not is_admissible(quote, ceiling, job.spec.price):
            continue
        length = remaining_on(job, *kind)
        if length is None or offer.interruption is Interruption.NEVER:
            return ""
        hazards = hazards_with_prior(world, now)
        hazard = hazards.of(offer)
        if hazard <= 0 or length <= _HOUR * PPM / hazard:
            return ""
        count, span = hazards.evidence_of(offer)
        return (
            f"{job.name} would run {length / _HOUR:.1f} h on {machine_words(*kind)} at {offer.provider}, where"
            f" a spot machine is preempted every {PPM / hazard:.1f} h in the mean"
            f"{evidence_words(count, span, 'preemptions')}, and nothing in the job says that it saves: each preemption"
            " would begin it anew"
        )
    return ""


def _on_first_market(job: Job) -> Job:
    """Return the job as it is placed at first: on spot alone where it waits for that before it takes on-demand."""
    resources = job.spec.resources
    if resources.on_demand_after is None:
        return job
    return replace(job, spec=replace(job.spec, resources=replace(resources, market=MarketChoice.SPOT)))


HINT = (
    'let it save to $SPOTD_CHECKPOINT_DIR and state [checkpoint] every = "15m", or give --market on-demand,'
    " or --i-know to submit it all the same"
)
