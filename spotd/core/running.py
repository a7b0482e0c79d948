"""The verdicts on a machine that runs, as one table: what each needs, what it yields to, what it costs, how often.

Theory. A machine gets one verdict in each decision. Rules of other modules propose; `author` alone gives a verdict, by
the row of it, and orders what follows. Verdicts are proposed in the order of this table, so an earlier one is given
first, and a later one that yields to it is not given in the same decision.

A stop that no limit of its owner demands is *voluntary*: the machine is healthy, and everything it needs to go on is
there. It is worth an interruption only when all of this holds:

* two readings of every list that it rests on say so: the prices of the provider of the other machine, and the list of
  our own machines at this one. A price that leaps is more likely a wrong row than a bargain;
* the other machine is not known to refuse, and every budget carries it in place of the one that is left, which the
  rules that propose ask (`BudgetGuard.carries_instead`). Every such stop is a *claim* of the job that is to gain; where
  the job does not get that machine, the claim has failed. Then no other job is stopped for the same machine for a
  while, and no healthy machine at all for this job, each time for twice as long (`PATIENCE_FIRST`, `patience_max`);
* the machine that follows has a place by `[budget] machines`, which may have been lowered below what runs, and no job
  that waits for a place gets it first;
* the checkpoint store takes the order, or nothing would be saved;
* the provider of the machine answers, or the machine could not be ended and another one not be begun.

An outbid machine that was waited for long enough is healthy if it woke, so its release needs the last two as well.
It is given up all the same where its provider does not answer for as long as a silent machine is kept (`lapses`).

A change of a bid and a stop exclude each other: while the answer to one is open, or waits for its second reading, the
other is not proposed, and no machine is left within `BID_SETTLES` of a change of its bid: it would wake at the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import CooldownScope, doubled
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Claim, Job, MachineVerdict
from spotd.core.domain.states import AttemptState, EndReason, InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import span_words
from spotd_providers.contract.values import Market, MicroUsdPerHour, Offer, ProviderName

BID_SETTLES: Final = timedelta(minutes=1)
"""For so long after a change of its bid was decided, whatever was answered, a machine is not left."""
PATIENCE_FIRST: Final = timedelta(minutes=75)
"""After a first claim that failed; doubled with each one in a row."""


class Need(StrEnum):
    """What must hold for a verdict."""

    READINGS = "two readings of each list"
    TARGET = "another machine that is not known to refuse, and that every budget carries"
    STORE = "a store that takes the order"
    PROVIDER = "a provider that can end the machine"
    PLACE = "a place by `[budget] machines` for what follows"
    ANSWER = "no other change of its bid without an answer"


VOLUNTARY: Final = frozenset({Need.READINGS, Need.TARGET, Need.PLACE, Need.STORE, Need.PROVIDER})


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """What is to be known of one verdict.

    Attributes:
        does: what follows, as a part of a sentence.
        seen: what must be seen before it.
        costs: what it costs the job.
        reason: with which the attempt ends; `None` where it does not end, or by what its owner limits.
        needs: what must hold; empty for what no rule may hold back.
        yields_to: it is not given in a decision that gives one of these, nor while one of them is open.
        every: least time since the machine began, or since the same was done to it.
        patience_max: how long at most the job waits after a claim that failed.
        lapses: after so long, the answer to a change of its bid is not waited for any longer: the higher bid counts.
            One that needs no readings waits as long for what else it needs of its provider, once it could be given.
    """

    does: str
    seen: str
    costs: str
    reason: EndReason | None = None
    needs: frozenset[Need] = frozenset()
    yields_to: frozenset[MachineVerdict] = frozenset()
    every: timedelta | None = None
    patience_max: timedelta = timedelta(hours=12)
    lapses: timedelta | None = None


_OVER: Final = frozenset({MachineVerdict.END, MachineVerdict.STOP})
_ENDED: Final = _OVER | {MachineVerdict.RELEASE}
_BIDS: Final = frozenset({MachineVerdict.RAISE, MachineVerdict.LOWER})
_LEAVES: Final = frozenset(
    {
        MachineVerdict.STALL,
        MachineVerdict.LEAVE,
        MachineVerdict.MAKE_ROOM,
        MachineVerdict.GO_ON_DEMAND,
        MachineVerdict.BACK_TO_SPOT,
        MachineVerdict.MOVE,
    }
)
_RESTART: Final = "a save, a start and a restore"

VERDICTS: Final[Mapping[MachineVerdict, VerdictRow]] = {
    MachineVerdict.END: VerdictRow(
        does="its attempt ends, and the machine is ended until its provider says that it is gone",
        seen="what is observed of it, as above",
        costs="what was not saved",
    ),
    MachineVerdict.STOP: VerdictRow(
        does="it saves and stops, for a limit that its owner set: budget, ceiling, window, deadline, cancel",
        seen="the limit is reached; a price that leaps, in two lists",
        costs="a save",
        yields_to=frozenset({MachineVerdict.END}),
    ),
    MachineVerdict.RELEASE: VerdictRow(
        does="an outbid machine was waited for as long as `[bids] hold` allows, and saves and stops if it runs",
        seen="that time is over",
        costs="a start and a restore",
        reason=EndReason.OUTBID,
        needs=frozenset({Need.STORE, Need.PROVIDER}),
        yields_to=_OVER | _BIDS,
        lapses=timedelta(minutes=35),
    ),
    MachineVerdict.STALL: VerdictRow(
        does="it saves and stops, since its job gets nowhere there",
        seen="the limit of `[watchdog]` in two heartbeats",
        costs=_RESTART,
        reason=EndReason.STALLED,
        needs=VOLUNTARY - {Need.TARGET, Need.PLACE},
        yields_to=_ENDED | _BIDS,
    ),
    MachineVerdict.LEAVE: VerdictRow(
        does="an outbid machine is not waited for any longer",
        seen="another machine as cheap, a bid out of reach, or that it woke and stays silent",
        costs=_RESTART,
        reason=EndReason.OUTBID,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL},
    ),
    MachineVerdict.RAISE: VerdictRow(
        does="more is bid for it, within every limit",
        seen="a lowest bid that uses up half of the headroom, and no cheaper machine",
        costs="the difference, per hour",
        needs=frozenset({Need.ANSWER}),
        yields_to=_ENDED | _LEAVES | _BIDS,
        every=timedelta(minutes=5),
    ),
    MachineVerdict.LOWER: VerdictRow(
        does="less is bid for it",
        seen="a saving that a preemption would not use up",
        costs="an earlier preemption",
        needs=frozenset({Need.ANSWER}),
        yields_to=_ENDED | _LEAVES | _BIDS,
        every=timedelta(hours=1),
    ),
    MachineVerdict.MAKE_ROOM: VerdictRow(
        does="it saves and stops for a job of higher priority that asks for it",
        seen="a machine that this job would get at once",
        costs="a save, and a wait",
        reason=EndReason.MADE_ROOM,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE},
        every=timedelta(minutes=15),
    ),
    MachineVerdict.GO_ON_DEMAND: VerdictRow(
        does="it saves and stops, and the job goes on on-demand",
        seen="no time is left to lose before the deadline",
        costs=f"{_RESTART}, and the price of on-demand",
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE, MachineVerdict.MAKE_ROOM},
        patience_max=timedelta(hours=5),
        lapses=timedelta(minutes=20),
    ),
    MachineVerdict.BACK_TO_SPOT: VerdictRow(
        does="it saves and stops, and the job goes on on a spot machine",
        seen="spot that costs less and seems to last",
        costs=_RESTART,
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | {MachineVerdict.STALL, MachineVerdict.LEAVE, MachineVerdict.MAKE_ROOM},
        every=timedelta(minutes=15),
    ),
    MachineVerdict.MOVE: VerdictRow(
        does="it saves and stops, and the job goes on on a cheaper machine",
        seen="a saving of 15 % over what is left, with all that the move costs",
        costs=_RESTART,
        reason=EndReason.MIGRATED,
        needs=VOLUNTARY,
        yields_to=_ENDED | _BIDS | (_LEAVES - {MachineVerdict.MOVE}),
        every=timedelta(hours=1),
    ),
    MachineVerdict.HOLD: VerdictRow(
        does="an outbid machine is waited for",
        seen="a list that shows it as outbid and paused, and a checkpoint",
        costs="its disk, per hour",
        yields_to=_ENDED | _LEAVES,
    ),
    MachineVerdict.KEEP: VerdictRow(
        does="nothing",
        seen="nothing of the above",
        costs="its price, per hour",
        yields_to=frozenset(MachineVerdict) - {MachineVerdict.KEEP},
    ),
}
RANK: Final[Mapping[MachineVerdict, int]] = {verdict: rank for rank, verdict in enumerate(VERDICTS)}
BID_CHANGES: Final = _BIDS
VOLUNTARY_STOPS: Final = _LEAVES


def turn_of(job: Job) -> tuple[int, bool, datetime, str]:
    """Return its place in the order in which jobs get machines, the first one least."""
    return -job.spec.priority, job.state is not JobState.RECOVERING, job.submitted_at, job.id


def pause_of(verdict: MachineVerdict) -> timedelta:
    """Return the least time between two of the same verdict on one machine."""
    every = VERDICTS[verdict].every
    if every is None:
        raise InvariantBroken(f"no pause is stated for {verdict.value}")
    return every


# What came of healthy machines that were stopped so that a job gets another one.
#
# Theory. A machine that is listed need not be sold. A claim is open from the order to stop until the job runs on what
# it was to get; it has failed once its next launch came to nothing, or the job has a machine that is no better than
# the one that was left. A claim that failed is remembered on the job and, by its provider, for the machine that
# refused.


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
        nodes=0 if target is None else target.nodes,
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
