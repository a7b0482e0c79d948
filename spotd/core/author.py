"""The one place that orders a machine which runs to stop, or changes its bid: it gives verdicts by their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import cached_property
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt, StopOrder, with_bid
from spotd.core.domain.cooldowns import Cooldown, CooldownScope, pool_subject
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, bid_intent_id
from spotd.core.domain.jobs import Job, MachineVerdict, Proposal
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.states import AttemptState, EndKind, EndReason, InvariantBroken, JobState
from spotd.core.domain.world import World
from spotd.core.metering import machines_in_use, machines_of
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import repriced, span_words
from spotd.core.running import (
    BID_CHANGES,
    BID_SETTLES,
    RANK,
    VERDICTS,
    Need,
    VerdictRow,
    claim_of,
    patience_left,
    settle_claims,
    subject_of,
    turn_of,
)
from spotd_providers.contract.values import MicroUsdPerHour, Offer, ProviderName, as_usd

READ_IS_FRESH: Final = timedelta(minutes=1)
"""A machine that had not spoken so long ago has saved nothing yet."""
SAVES_NO_MORE: Final = "stop at once, since what it would upload costs more than is left of a budget"
CLAIM_HOLDS: Final = timedelta(hours=1)
"""For so long at most a machine is kept for the job that another one was stopped for."""
LIST_IS_RECENT: Final = timedelta(minutes=5)
"""A provider answers while its newest list of our machines is younger, however often it is asked."""
_OF_OFFERS: Final = frozenset(
    {CooldownScope.OFFER, CooldownScope.HOST, CooldownScope.POOL, CooldownScope.QUOTA, CooldownScope.PROVIDER}
)
_STILL_THERE: Final = "a machine is still there after its end was accepted"
_AWAITED: Final = "it waits for a second reading of what is sold and of its machine"


def has_ended_nothing(intent: Intent) -> bool:
    """Whether this end failed, or was given again because it had no effect, for however long that lasts.

    A provider that does not end one machine may end none, and what is stopped then bills on beside what follows.
    """
    if intent.kind is not IntentKind.TERMINATE:
        return False
    return intent.is_open and intent.tries > (intent.state is IntentState.ACCEPTED)


def order_stop(builder: PlanBuilder, item: Attempt, reason: EndReason, detail: str, *, flush: bool = True) -> None:
    """Order the machine to save and stop, for a limit that its owner set: nothing holds that back.

    Without `flush` it stops at once and uploads nothing more.
    """
    if any(row.reason is reason for row in VERDICTS.values()):
        raise InvariantBroken(f"{reason.value} is no limit of an owner")
    _order(builder, item, reason, detail, flush=flush)


def _order(builder: PlanBuilder, item: Attempt, reason: EndReason, detail: str, *, flush: bool = True) -> None:
    """Order the runner to save and stop; a machine that is not known yet is let go as soon as it is."""
    if item.stop is not None:
        return
    grace = builder.job(item.id.job).spec.checkpoint.stop_grace
    order = StopOrder(
        reason=reason,
        detail=detail,
        ordered_at=builder.now,
        deadline=builder.now + grace + builder.policy.save_allowance,
        limit=None if reason.traits.kind is EndKind.FOR_MONEY else builder.now + grace + builder.policy.save_limit,
    )
    order = order if flush else without_save(builder, order)
    if item.running_at is None and not _may_have_run(item, builder.now):
        builder.put_attempt(replace(item, stop=order))
        builder.end_attempt(item.id, reason, detail)
        return
    state = item.state if item.state is AttemptState.INTENDED else AttemptState.STOPPING
    builder.put_attempt(replace(item, stop=order, state=state))
    builder.event(
        "attempt.stopping",
        f"ordered to {'save and stop' if flush else SAVES_NO_MORE}: {reason.sentence(detail)}",
        attempt=item.id,
        reason=reason.value,
    )
    builder.wake(order.deadline)


def without_save(builder: PlanBuilder, order: StopOrder) -> StopOrder:
    """Return the same order for a machine that stops at once and uploads nothing more."""
    return replace(order, flush=False, deadline=builder.now + builder.policy.save_allowance, limit=None)


def _may_have_run(item: Attempt, now: datetime) -> bool:
    """Whether its machine may have run and saved since it was read last: the daemon or the store may have been away.

    A host that speaks before its launch is settled runs, though the attempt does not say so yet.
    """
    if item.ref is None and item.heartbeat_seen_at is not None:
        return True
    known = item.read_at or item.launched_at or item.intended_at
    return (item.ref is not None or item.outcome_unknown) and now - known > READ_IS_FRESH


class MachineVerdicts:
    """The verdicts of one decision. Each is given or held back by the row of it."""

    def __init__(self, builder: PlanBuilder, world: World, market: MarketSnapshot) -> None:
        self._builder = builder
        self._world = world
        self._market = market
        self._given: dict[AttemptId, MachineVerdict] = {}
        self._proposed: set[JobId] = set()
        self._words: dict[JobId, str] = {}
        self._waiting: list[tuple[Job, Callable[[], bool]]] = []
        settle_claims(builder, world)
        cooling = [c for c in world.cooldowns if c.until > builder.now]
        self._refusing = {(c.provider, c.subject) for c in cooling if c.scope is CooldownScope.TARGET}
        self._cooling = {(c.provider, c.scope, c.subject): c for c in cooling if c.scope in _OF_OFFERS}
        vain = filter(has_ended_nothing, world.intents.values())
        self._ends_nothing = {i.provider: i.error or _STILL_THERE for i in vain}

    @cached_property
    def machines_in_use(self) -> int:
        """How many machines count against the limit before this decision."""
        return machines_in_use(self._world, self._builder.now)

    def note_waiting(self, job: Job, would_start: Callable[[], bool]) -> None:
        """Note that this job waits for a place by `[budget] machines` alone, if it would start where it had one."""
        self._waiting.append((job, would_start))

    def words(self, job: Job) -> str:
        """Return why a stop that would gain this job another machine is held back; empty where none is proposed."""
        return self._words.get(job.id, "")

    # --- what is held back ---

    def refuses(self, offer: Offer) -> bool:
        """Whether the machine behind this offer is known to refuse, so that no healthy one is stopped for it."""
        if (offer.provider, subject_of(offer)) in self._refusing:
            return True
        return bool(self._cooling) and self._cooldown(offer) is not None

    def is_claimed(self, offer: Offer, job: Job) -> bool:
        """Whether a healthy machine was stopped a while ago, or in this decision, so that another job gets this one.

        Where hosts have no names there may be more of them.
        """
        owner = None if offer.host_id is None else self._claimed.get((offer.provider, subject_of(offer)))
        return owner is not None and owner != job.id

    @cached_property
    def _claimed(self) -> dict[tuple[str, str], JobId]:
        found = [(identity, self._builder.job(identity).moves.claim) for identity in self._world.jobs]
        return {
            (claim.provider, claim.subject): identity
            for identity, claim in found
            if claim is not None and claim.provider and timedelta(0) <= self._builder.now - claim.at < CLAIM_HOLDS
        }

    def _cooldown(self, offer: Offer) -> Cooldown | None:
        """Return the refusal of this offer that is remembered, even where a launch may try it again at once."""
        subjects = [
            (CooldownScope.OFFER, str(offer.offer_id)),
            (CooldownScope.POOL, str(offer.pool)),
            (CooldownScope.POOL, pool_subject(offer)),
            (CooldownScope.PROVIDER, ""),
            *((CooldownScope.QUOTA, str(quota)) for quota in offer.quotas),
        ]
        if offer.host_id is not None:
            subjects.append((CooldownScope.HOST, str(offer.host_id)))
        found = (self._cooling.get((offer.provider, scope, subject)) for scope, subject in subjects)
        return next((one for one in found if one is not None), None)

    def held_back(self, item: Attempt, verdict: MachineVerdict) -> str:
        """Why this machine cannot have this verdict in this decision, whatever speaks for it; empty where it can."""
        row, item = VERDICTS[verdict], self._builder.attempt(item.id)
        if item.stop is not None or not item.state.counts:
            return "its end is decided"
        given = self._given.get(item.id)
        if given is not None and (given in row.yields_to or RANK[given] <= RANK[verdict]):
            return f"this decision gives another verdict: {given.value}"
        if verdict not in BID_CHANGES and BID_CHANGES & row.yields_to:
            if self._is_bid_open(item, row.lapses):
                return "a change of its bid has no answer yet"
            changed_at = item.bidding.changed_at
            if changed_at is not None and timedelta(0) <= self._builder.now - changed_at < BID_SETTLES:
                self._builder.wake(changed_at + BID_SETTLES)
                return "its bid was changed a moment ago"
        if verdict in BID_CHANGES and self._is_bid_open(item, None):
            return "a change of its bid has no answer yet"
        proposed = self._builder.job(item.id.job).moves.proposed
        if proposed is not None and verdict in BID_CHANGES and proposed.verdict in row.yields_to:
            return f"its stop is proposed: {proposed.verdict.value}"
        return ""

    def _is_bid_open(self, item: Attempt, lapses: timedelta | None) -> bool:
        known = self._builder.intent(bid_intent_id(item.key))
        if known is None or not known.is_open:
            return False
        return lapses is None or self._builder.now - known.created_at < lapses

    def may_stop_for(
        self, job: Job, verdict: MachineVerdict, target: Offer | None, machines: Iterable[Attempt], *, reading: str = ""
    ) -> bool:
        """Whether healthy machines may be stopped so that this job gets another one; a proposal waits to be seen twice.

        Args:
            target: the machine that the job is to get, where one is known.
            machines: that would be stopped.
            reading: what else the proposal rests on, where that is no list; empty for nothing.
        """
        why = self._refusal(self._builder.job(job.id), verdict, target, list(machines), reading)
        if why:
            self._words[job.id] = f"{verdict.value} is held back: {why}"
        return not why

    def _refusal(
        self, job: Job, verdict: MachineVerdict, target: Offer | None, machines: list[Attempt], reading: str
    ) -> str:
        needs, now = VERDICTS[verdict].needs, self._builder.now
        if not needs:
            return ""
        if Need.READINGS in needs and self._world.policy.launches_paused:
            return self._world.policy.launches_paused
        if Need.TARGET in needs:
            locked = next((one.id.job for one in machines if one.id.job in self._world.policy.locked), None)
            if locked is not None:
                return self._world.policy.locked[locked]
        if Need.TARGET in needs and target is not None:
            if job.moves.claim is not None:
                return "it waits for the machine that another one was stopped for"
            left = patience_left(job, now)
            if left:
                return f"it did not get the last one; asked again in {span_words(left)}"
            if self.refuses(target):
                return f"{target.provider} refused {subject_of(target)} a while ago"
            if self.is_claimed(target, job):
                return f"another machine was stopped so that another job gets {subject_of(target)}"
        if Need.PLACE in needs and (why := self._words_against_place(job, machines)):
            return why
        readings = self._market.readings
        if readings is None:
            return ""
        if readings.store_away:
            away = f"the checkpoint store does not take the order: {readings.store_away}"
        else:
            awaited = (item for item in machines if not self._is_given_up(item, VERDICTS[verdict]))
            away = next((words for item in awaited if (words := self._provider_away(item.provider))), "")
        if away or Need.READINGS not in needs:
            return away
        current = self._readings(target, machines, reading)
        first = dict(self._with_lists(job, verdict, current).readings)
        return "" if all(at > first[name] for name, at in current.items()) else _AWAITED

    def _words_against_place(self, job: Job, machines: list[Attempt]) -> str:
        """Why the job gets no place by `[budget] machines` when these machines have ended; empty if it does."""
        most = self._world.policy.machines_max
        if self.machines_in_use - machines_of(machines) >= most:
            return f"more machines are in use than the {most} of [budget] machines"
        if not self._waiting:
            return ""
        pairs = self._builder.before_and_now()
        go_on = machines_of(now for before, now in pairs if before.state.counts and now.stop is None)
        left = most - (go_on - machines_of(machines))
        if any(item.id.job == job.id for item in machines):
            job = replace(job, state=JobState.RECOVERING)
        first = (other for other, would_start in self._waiting if turn_of(other) < turn_of(job) and would_start())
        others = list(islice(first, left))
        wanted = sum(other.spec.resources.nodes for other in others)
        return f"{others[0].spec.name} waits for its place of [budget] machines" if others and wanted >= left else ""

    def _is_given_up(self, item: Attempt, row: VerdictRow) -> bool:
        """Whether a held machine was waited for longer than its provider may take to answer, and does not.

        One that is not in the config any more is not asked.
        """
        held_since, readings, name = item.bidding.held_since, self._market.readings, item.provider
        if row.lapses is None or Need.READINGS in row.needs or held_since is None or readings is None:
            return False
        due = held_since + self._world.policy.hold_max + row.lapses
        if self._builder.now < due:
            self._builder.wake(due)
            return False
        return bool(readings.away.get(name)) or name in self._ends_nothing or name not in self._world.policy.providers

    def _provider_away(self, provider: ProviderName) -> str:
        readings = self._market.readings
        if readings is not None and readings.away.get(provider):
            return f"{provider} does not list its machines: {readings.away[provider]}"
        listed_at = None if readings is None else readings.listed_at.get(provider)
        if listed_at is None and readings is not None:
            self._builder.list_again(provider)
            return f"{provider} has not listed its machines since spotd began"
        if listed_at is not None and self._builder.now - listed_at >= LIST_IS_RECENT:
            self._builder.list_again(provider)
            return f"{provider} has listed its machines {span_words(self._builder.now - listed_at)} ago only"
        if provider in self._ends_nothing:
            return f"{provider} does not end machines: {self._ends_nothing[provider]}"
        return ""

    def _readings(self, target: Offer | None, machines: Iterable[Attempt], reading: str) -> dict[str, datetime]:
        """Return the instant of every list that a proposal rests on, and of the newest write to the store.

        One that is only read from may take none, so a grant is written while a proposal waits (`GrantWriter`).
        """
        known, found = self._market.readings, {}
        sold = None if target is None else self._market.by_provider.get(target.provider)
        if target is not None and sold is not None and sold.at is not None:
            found[f"offers of {target.provider}"] = sold.at
        for item in machines:
            at = None if known is None else known.listed_at.get(item.provider)
            if at is not None:
                found[f"machines of {item.provider}"] = at
            if reading and item.heartbeat_seen_at is not None:
                found[reading] = item.heartbeat_seen_at
        if known is not None and known.stored_at is not None:
            found["grants of the store"] = known.stored_at
        return found

    def _with_lists(self, job: Job, verdict: MachineVerdict, current: dict[str, datetime]) -> Proposal:
        """Return the proposal as it is known, with the lists that it rests on for the first time now."""
        known = job.moves.proposed
        if known is None or known.verdict is not verdict or known.attempt != job.attempts_made:
            known = Proposal(verdict=verdict, attempt=job.attempts_made, since=self._builder.now)
        first = dict(known.readings)
        known = replace(known, readings=tuple(sorted({**current, **first}.items())))
        if known != job.moves.proposed:
            self._builder.put_job(replace(job, moves=replace(job.moves, proposed=known)))
        self._proposed.add(job.id)
        return known

    # --- what is given ---

    def stop(
        self,
        item: Attempt,
        verdict: MachineVerdict,
        detail: str,
        *,
        target: Offer | None = None,
        reading: str = "",
    ) -> bool:
        """Stop a healthy machine so that its own job goes on elsewhere, where the table allows it now."""
        job = self._builder.job(item.id.job)
        why = self.held_back(item, verdict)
        if why:
            self._words[job.id] = f"{verdict.value} is held back: {why}"
            return False
        if not self.may_stop_for(job, verdict, target, (item,), reading=reading):
            return False
        self.give(item, verdict, detail, gains=job, target=target)
        return True

    def give(
        self,
        item: Attempt,
        verdict: MachineVerdict,
        detail: str,
        *,
        gains: Job,
        target: Offer | None = None,
    ) -> None:
        """Stop one machine for a job, which may be its own; what holds it back was asked before."""
        row, builder = VERDICTS[verdict], self._builder
        if row.reason is None or self.held_back(item, verdict):
            raise InvariantBroken(f"{verdict.value} was not to be given")
        self._given[item.id] = verdict
        change = builder.intent(bid_intent_id(item.key))
        if change is not None and change.is_open:
            builder.put_intent(replace(change, state=IntentState.FAILED, error="its machine is left"))
        if Need.TARGET in row.needs and target is not None:
            job = builder.job(gains.id)
            rate = item.quote.price.total if gains.id == item.id.job else 0
            claim = claim_of(verdict, job, target, rate, builder.now)
            builder.put_job(replace(job, moves=replace(job.moves, claim=claim, proposed=None)))
            self._claimed[target.provider, subject_of(target)] = gains.id
        self._words.pop(gains.id, None)
        _order(builder, builder.attempt(item.id), row.reason, detail)

    def change_bid(self, item: Attempt, bid: MicroUsdPerHour, why: str) -> bool:
        """Owe the change of the bid. From here on ceilings and budgets count the new one, if it is the higher one."""
        verdict = MachineVerdict.RAISE if bid > item.quote.price.gpu else MachineVerdict.LOWER
        if self.held_back(item, verdict):
            return False
        self._given[item.id] = verdict
        _owe_bid(self._builder, item, bid, why)
        return True

    def finish(self) -> None:
        """Forget what was proposed before and is not any more."""
        for identity, job in self._world.jobs.items():
            if job.moves.proposed is not None and identity not in self._proposed:
                current = self._builder.job(identity)
                self._builder.put_job(replace(current, moves=replace(current.moves, proposed=None)))


def _owe_bid(builder: PlanBuilder, item: Attempt, bid: MicroUsdPerHour, why: str) -> None:
    before = item.quote.price.gpu
    floor = item.bidding.floor
    known = with_bid(item.bidding, before, bid, builder.now)
    if bid > before:
        offer = item.quote.offer if floor is None else replace(item.quote.offer, gpu_price=floor)
        item = replace(item, quote=repriced(replace(item.quote, offer=offer), bid), price_max=bid, bidding=known)
    else:
        item = replace(item, bidding=replace(known, before=None))
    builder.put_attempt(item)
    builder.put_intent(
        Intent(
            id=bid_intent_id(item.key),
            account=item.account,
            kind=IntentKind.CHANGE_BID,
            provider=item.provider,
            key=item.key,
            state=IntentState.OPEN,
            created_at=builder.now,
            attempt=item.id,
            ref=item.ref,
        )
    )
    builder.event(
        "bid.raising" if bid > before else "bid.lowering",
        f"its bid goes from ${as_usd(before):.4f} to ${as_usd(bid):.4f} per hour: {why}",
        attempt=item.id,
        before_microusd_h=before,
        bid_microusd_h=bid,
    )
