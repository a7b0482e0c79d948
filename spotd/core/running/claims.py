"""What came of healthy machines that were stopped so that a job gets another one.

Theory. A machine that is listed need not be sold. A claim is open from the order to stop until the job runs on what it
was to get; it has failed once its next launch came to nothing, or the job has a machine that is no better than the one
that was left. A claim that failed is remembered on the job and, by its provider, for the machine that refused.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.backoff import doubled
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.machine_verdicts import MachineVerdict
from spotd.core.domain.moves import Claim
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import span_words
from spotd.core.running.table import PATIENCE_FIRST, VERDICTS
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import Market, Offer, ProviderName

LASTS: Final = timedelta(minutes=30)
"""A claim whose job was offered no machine for so long, and for which no machine still saves, has failed."""
_MARKETS: Final = {MachineVerdict.GO_ON_DEMAND: Market.ON_DEMAND, MachineVerdict.BACK_TO_SPOT: Market.SPOT}


class ClaimOutcome(StrEnum):
    """What came of a claim."""

    OPEN = "open"
    MET = "met"
    FAILED = "failed"


def subject_of(offer: Offer) -> str:
    """Return what names the machine behind an offer; another market of the same host may not refuse."""
    return f"{offer.market.value} {offer.host_id or offer.offer_id}"


def claim_of(verdict: MachineVerdict, job: Job, target: Offer | None, rate: int, now: datetime) -> Claim:
    """Return the claim of the job that is to gain."""
    return Claim(
        verdict=verdict,
        at=now,
        attempt=job.attempts_made,
        provider="" if target is None else target.provider,
        subject="" if target is None else subject_of(target),
        market=_MARKETS.get(verdict),
        rate=MicroUsdPerHour(rate),
    )


def settle_claims(builder: PlanBuilder, world: World) -> None:
    """Settle each claim whose outcome is known by now."""
    claiming = [job for job in world.jobs.values() if job.moves.claim is not None]
    if not claiming:
        return
    counting: dict[JobId, Attempt] = {i.job: item for i, item in world.attempts.items() if item.state.counts}
    makes_room = any(item.stop is not None and item.stop.reason is EndReason.MADE_ROOM for item in counting.values())
    for job in claiming:
        claim = job.moves.claim
        if claim is None:
            continue
        if job.state.is_final:
            builder.put_job(replace(job, moves=replace(job.moves, claim=None)))
            continue
        saves = makes_room and claim.verdict is MachineVerdict.MAKE_ROOM
        outcome = outcome_of(claim, job, counting.get(job.id), builder.now, saves=saves)
        if outcome is ClaimOutcome.MET:
            builder.put_job(replace(job, moves=replace(job.moves, claim=None, refusals=0, not_before=None)))
        elif outcome is ClaimOutcome.FAILED:
            _remember(builder, job, claim)


def outcome_of(claim: Claim, job: Job, item: Attempt | None, now: datetime, *, saves: bool = False) -> ClaimOutcome:
    """Return what came of the claim by now.

    Args:
        item: the attempt of the job that counts.
        saves: machines that were stopped for it have not ended.
    """
    if item is not None and item.id.number <= claim.attempt:
        return ClaimOutcome.OPEN
    if item is None:
        if job.attempts_made > claim.attempt:
            return ClaimOutcome.FAILED
        since = max(claim.at, job.state_since)
        return ClaimOutcome.OPEN if saves or timedelta(0) <= now - since < LASTS else ClaimOutcome.FAILED
    if not _is_met(claim, item):
        return ClaimOutcome.FAILED
    return ClaimOutcome.MET if item.state is AttemptState.RUNNING else ClaimOutcome.OPEN


def _is_met(claim: Claim, item: Attempt) -> bool:
    offer = item.quote.offer
    if claim.market is not None:
        return offer.market is claim.market
    is_target = (offer.provider, subject_of(offer)) == (claim.provider, claim.subject)
    return is_target or claim.verdict is not MachineVerdict.MOVE or item.quote.price.total < claim.rate


def _remember(builder: PlanBuilder, job: Job, claim: Claim) -> None:
    refusals = job.moves.refusals + 1
    patience = doubled(PATIENCE_FIRST, refusals - 1, VERDICTS[claim.verdict].patience_max)
    moves = replace(job.moves, claim=None, refusals=refusals, not_before=builder.now + patience)
    builder.put_job(replace(job, moves=moves))
    what = f"{claim.provider} {claim.subject}" if claim.provider else "another machine"
    why = (
        f"a machine was stopped so that this job gets {what}, and it did not get it, {refusals} in a row:"
        f" no other one is stopped for it within {span_words(patience)}"
    )
    if claim.provider:
        builder.cool(
            ProviderName(claim.provider),
            CooldownScope.TARGET,
            claim.subject,
            PATIENCE_FIRST,
            "it could not be had when a machine was stopped for it",
            longest=VERDICTS[claim.verdict].patience_max,
        )
    builder.event("job.claim_failed", why, job=job.id, refusals=refusals)


def patience_left(job: Job, now: datetime) -> timedelta:
    """How long no healthy machine is stopped for this job; an instant further ahead is by another clock."""
    until = job.moves.not_before
    if until is None or until - now > max(row.patience_max for row in VERDICTS.values()):
        return timedelta(0)
    return max(timedelta(0), until - now)
