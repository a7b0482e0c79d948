"""What the answers of providers change: launches that took effect, failed or got lost, and machines being ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Final, assert_never

from spotd.core import bids
from spotd.core.billing import began
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.cooldowns import (
    EVERYWHERE,
    REFUSED_AT_ONCE,
    REFUSED_FIRST,
    REFUSED_IN_A_ROW,
    REFUSED_MAX,
    CooldownEnd,
    CooldownScope,
    pool_subject,
    refusal_subject,
)
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, launch_intent_id
from spotd.core.domain.jobs import span_within
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import EndReason, require_rows
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import (
    RESTARTED,
    begin_search,
    doubt_launch,
    finish_launch,
    not_sent,
    record_instance,
)
from spotd.core.kernel.quarantine import contain
from spotd.core.plan_builder import POOL_COOLDOWNS_MAX, PlanBuilder
from spotd.core.running import PATIENCE_FIRST, subject_of
from spotd_providers.contract.values import Instance, MicroUsdPerHour

OFFER_COOLDOWN: Final = timedelta(minutes=10)
"""At most: a newer list that shows the offer ends it."""
PRICE_COOLDOWN: Final = timedelta(seconds=30)
ACCOUNT_COOLDOWN_FIRST: Final = timedelta(minutes=1)
ACCOUNT_COOLDOWN: Final = timedelta(minutes=15)
OUTAGE_COOLDOWN: Final = timedelta(seconds=30)
OUTAGE_COOLDOWN_MAX: Final = timedelta(minutes=5)
RATE_LIMIT_MIN: Final = timedelta(seconds=5)
RATE_LIMIT_MAX: Final = timedelta(minutes=15)
"""However long a provider asks to be left alone, a launch is tried again after this."""
STORE_COOLDOWN: Final = timedelta(seconds=5)
STORE_COOLDOWN_MAX: Final = timedelta(minutes=2)
REJECTED_COOLDOWN: Final = timedelta(minutes=1)
BROKEN_COOLDOWN: Final = timedelta(hours=6)
TERMINATE_BACKOFF_FIRST: Final = timedelta(seconds=2)
TERMINATE_RETRY_MAX: Final = timedelta(minutes=2)
"""A machine that should be gone bills: its end is ordered again this often, whatever wait the provider asks for."""


class LaunchFailure(StrEnum):
    """Why a launch certainly did not take effect; one for each leaf of the providers' error tree that says so."""

    NO_CAPACITY = "no_capacity"
    OFFER_GONE = "offer_gone"
    PRICE_MOVED = "price_moved"
    QUOTA = "quota"
    REJECTED = "rejected"
    NOT_SUPPORTED = "not_supported"
    NO_BALANCE = "no_balance"
    AUTH = "auth"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    CONTRACT = "contract"
    NOT_PREPARED = "not_prepared"
    """Something of the job's own is missing or wrong, so the provider was never asked."""
    INPUT_AWAY = "input_away"
    """The bucket or hub that holds the job's data did not answer, so the provider was never asked."""
    STORE_AWAY = "store_away"
    """The checkpoint store took no grant, so the provider was never asked."""

    @property
    def traits(self) -> RefusalTraits:
        return _REFUSAL_TRAITS[self]


class Affects(StrEnum):
    """Which launches the same refusal stops: those of this job, which it then counts against, or those of every job."""

    THIS_JOB = "this job"
    EVERY_JOB = "every job"


class ReadAgain(StrEnum):
    """What the refusal makes out of date, and is read again at once."""

    NOTHING = "nothing"
    OFFERS = "offers"
    """Where one price or offer is old the others of that provider are, and each wrong try costs a call."""
    INSTANCES = "instances"
    """What broke the rule may exist all the same: the next listing shows it, and it is ended as a stray."""


@dataclass(frozen=True, slots=True)
class RefusalTraits:
    """What follows from a refusal, beside the cool-down (`_cool_down`). No fact has a default."""

    reason: EndReason
    affects: Affects
    read_again: ReadAgain


_REFUSAL_TRAITS: Final[Mapping[LaunchFailure, RefusalTraits]] = {
    LaunchFailure.NO_CAPACITY: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.OFFER_GONE: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.OFFERS),
    LaunchFailure.PRICE_MOVED: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.OFFERS),
    LaunchFailure.QUOTA: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.REJECTED: RefusalTraits(EndReason.IMAGE_ERROR, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.NOT_SUPPORTED: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.NO_BALANCE: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.EVERY_JOB, ReadAgain.NOTHING),
    LaunchFailure.AUTH: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.EVERY_JOB, ReadAgain.NOTHING),
    LaunchFailure.RATE_LIMITED: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.EVERY_JOB, ReadAgain.NOTHING),
    LaunchFailure.UNAVAILABLE: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.EVERY_JOB, ReadAgain.NOTHING),
    LaunchFailure.CONTRACT: RefusalTraits(EndReason.CONTRACT_BROKEN, Affects.THIS_JOB, ReadAgain.INSTANCES),
    LaunchFailure.NOT_PREPARED: RefusalTraits(EndReason.NOT_PREPARED, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.INPUT_AWAY: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.THIS_JOB, ReadAgain.NOTHING),
    LaunchFailure.STORE_AWAY: RefusalTraits(EndReason.LAUNCH_FAILED, Affects.EVERY_JOB, ReadAgain.NOTHING),
}
require_rows(LaunchFailure, _REFUSAL_TRAITS)


_NOT_FOR_SALE: Final = frozenset({LaunchFailure.NO_CAPACITY, LaunchFailure.OFFER_GONE, LaunchFailure.PRICE_MOVED})
_OF_ITS_OFFERS: Final = _NOT_FOR_SALE | {LaunchFailure.QUOTA, LaunchFailure.CONTRACT}


def launched(world: World, attempt_id: AttemptId, instance: Instance, now: datetime) -> Plan:
    """Record that the provider reports the machine as existing."""
    builder = PlanBuilder(world, now)
    if attempt_id not in world.attempts:
        builder.owe_termination(instance.ref, instance.key, None, why="its attempt has ended meanwhile")
        return builder.plan()
    item = builder.attempt(attempt_id)
    of_that_name = (a for a in world.attempts.values() if a.ref and a.ref.instance_id == instance.ref.instance_id)
    if any(other.ref == instance.ref and other.id != attempt_id for other in of_that_name):
        return launch_unknown(world, attempt_id, "its provider named the machine of another attempt", now)
    if item.ref is None:
        since = began(item, instance.created_at, now, now)
        record_instance(builder, item, instance, launched_at=now, billed_since=since, found=False)
        return builder.plan()
    finish_launch(builder, item, instance)
    if item.ref != instance.ref:
        builder.owe_termination(instance.ref, instance.key, None, why="its attempt has another machine already")
    return builder.plan()


def launch_refused(
    world: World,
    attempt_id: AttemptId,
    failure: LaunchFailure,
    detail: str,
    now: datetime,
    retry_after: timedelta | None = None,
    quota: str = "",
) -> Plan:
    """Record that no machine was made, as the provider reports; the job goes to the next quote.

    `quota` names the limit of the account that is used up, where the provider named it.
    """
    builder = PlanBuilder(world, now)
    if attempt_id not in world.attempts or world.attempts[attempt_id].ref is not None:
        return builder.plan()
    item = builder.attempt(attempt_id)
    intent = builder.intent(launch_intent_id(item.key))
    builder.machine_gone(attempt_id)
    if intent is not None:
        builder.put_intent(replace(intent, state=IntentState.FAILED, error=detail))
    _cool_down(builder, item, failure, detail, retry_after, quota)
    before = builder.job(attempt_id.job)
    builder.end_attempt(attempt_id, failure.traits.reason, detail)
    if failure.traits.affects is Affects.EVERY_JOB:
        # What cools down bounds these launches, and the job goes on as soon as that ends.
        job = builder.job(attempt_id.job)
        builder.put_job(replace(job, idle_launches=before.idle_launches, not_before=before.not_before))
    return builder.plan()


REFUSES_FIRST: Final = timedelta(minutes=15)
"""So long no healthy machine is stopped for one that was not sold; doubled each time in a row, to `PATIENCE_FIRST`."""


def _cool_down(
    builder: PlanBuilder, item: Attempt, failure: LaunchFailure, detail: str, retry_after: timedelta | None, quota: str
) -> None:
    offer = item.quote.offer
    provider, scope, subject, ends = offer.provider, CooldownScope.OFFER, str(offer.offer_id), CooldownEnd.TIME
    longest: timedelta | None = None
    match failure:
        case LaunchFailure.NOT_PREPARED | LaunchFailure.INPUT_AWAY:
            return  # a matter of this job, which cools down the job alone
        case LaunchFailure.NO_CAPACITY:
            scope, subject, span = CooldownScope.POOL, pool_subject(offer), builder.policy.pool_cooldown
            longest = POOL_COOLDOWNS_MAX * span
        case LaunchFailure.OFFER_GONE if retry_after is not None:
            span, longest = retry_after, max(retry_after, OFFER_COOLDOWN)
        case LaunchFailure.OFFER_GONE:
            span, ends = OFFER_COOLDOWN, CooldownEnd.SHOWN
        case LaunchFailure.PRICE_MOVED:
            span, longest, ends = PRICE_COOLDOWN, OFFER_COOLDOWN, CooldownEnd.SHOWN
        case LaunchFailure.QUOTA:
            scope, subject = CooldownScope.POOL, pool_subject(offer)
            if offer.quotas and offer.nodes == 1:
                scope, subject = CooldownScope.QUOTA, quota or str(offer.quotas[0])
            span, longest = ACCOUNT_COOLDOWN_FIRST, ACCOUNT_COOLDOWN
        case LaunchFailure.NO_BALANCE | LaunchFailure.AUTH:
            scope, subject, span, longest = CooldownScope.PROVIDER, "", ACCOUNT_COOLDOWN_FIRST, ACCOUNT_COOLDOWN
            ends = CooldownEnd.CREDIT if failure is LaunchFailure.NO_BALANCE else CooldownEnd.KEY
        case LaunchFailure.RATE_LIMITED | LaunchFailure.UNAVAILABLE:
            scope, subject, longest = CooldownScope.PROVIDER, "", OUTAGE_COOLDOWN_MAX
            span = OUTAGE_COOLDOWN if retry_after is None else min(max(retry_after, RATE_LIMIT_MIN), RATE_LIMIT_MAX)
        case LaunchFailure.STORE_AWAY:
            provider, scope, subject = EVERYWHERE, CooldownScope.STORE, ""
            span, longest = STORE_COOLDOWN, STORE_COOLDOWN_MAX
        case LaunchFailure.REJECTED:
            span, longest = REJECTED_COOLDOWN, BROKEN_COOLDOWN
        case LaunchFailure.NOT_SUPPORTED:
            builder.cool_unable(item, detail)
            return
        case LaunchFailure.CONTRACT:
            span = BROKEN_COOLDOWN
        case _:
            assert_never(failure)
    builder.cool(provider, scope, subject, span, detail, longest=longest, ends=ends, asked_at=item.intended_at)
    if failure in _OF_ITS_OFFERS:
        # Each may be another offer, which none of the pauses above has met before.
        subject, market = refusal_subject(item.id.job, offer.market), offer.market.value
        why = f"{offer.provider} has refused {REFUSED_AT_ONCE} launches of it in a row or more ({market}): {detail}"
        builder.cool(
            offer.provider,
            CooldownScope.JOB,
            subject,
            REFUSED_FIRST,
            why,
            longest=REFUSED_MAX,
            at_once=REFUSED_AT_ONCE - 1,
            memory=REFUSED_IN_A_ROW,
        )
    if failure in _NOT_FOR_SALE:
        # A launch may try it again soon, which costs nothing; a machine that runs is not stopped for it.
        why = f"it was not sold: {detail}"
        subject = subject_of(offer)
        builder.cool(offer.provider, CooldownScope.TARGET, subject, REFUSES_FIRST, why, longest=PATIENCE_FIRST)


def launch_unknown(world: World, attempt_id: AttemptId, detail: str, now: datetime) -> Plan:
    """Search for the machine by its key until the window has passed: nothing else can show whether it exists."""
    builder = PlanBuilder(world, now)
    if attempt_id not in world.attempts or world.attempts[attempt_id].ref is not None:
        return builder.plan()
    item = builder.attempt(attempt_id)
    builder.put_attempt(replace(item, outcome_unknown=True))
    intent = builder.intent(launch_intent_id(item.key))
    if intent is not None:
        builder.put_intent(
            replace(intent, state=IntentState.UNKNOWN, error=detail, not_before=builder.window_end(item.provider))
        )
    begin_search(builder, item, f"the answer to the launch was lost ({detail})")
    return builder.plan()


def after_restart(world: World, now: datetime, *, asks_store: bool = False) -> Plan:
    """Mark launches that a former process sent as unknown; those that waited for their turn were never made.

    Terminate orders are simply given again.

    Args:
        asks_store: the state may be older than the store, which is asked which launches were never made.
    """
    builder = PlanBuilder(world, now)
    for intent in builder.intents():
        attempt = None if intent.attempt is None else world.attempts.get(intent.attempt)
        if intent.kind is IntentKind.LAUNCH and intent.state is IntentState.OPEN and attempt is not None:
            if not asks_store:
                not_sent(builder, attempt, intent, RESTARTED)
        elif intent.kind is IntentKind.LAUNCH and intent.state is IntentState.SENT:
            doubt_launch(builder, attempt, intent)
        elif intent.kind is IntentKind.CHANGE_BID:
            bids.after_restart(builder, attempt, intent)
        elif intent.kind is IntentKind.TERMINATE:
            # An order that was never tried only waits for a provider to take the machine itself.
            due = intent.not_before if intent.tries == 0 else None
            builder.put_intent(replace(intent, state=IntentState.OPEN, not_before=due))
    return builder.plan()


def terminate_accepted(world: World, intent_id: IntentId, now: datetime) -> Plan:
    """Record that the provider accepted the end; the machine costs nothing from here and counts until it is gone."""
    builder = PlanBuilder(world, now)
    intent = world.intents.get(intent_id)
    if intent is None or intent.state is not IntentState.OPEN:
        return builder.plan()
    _accept(builder, intent, None if intent.attempt is None else world.attempts.get(intent.attempt), now)
    return builder.plan()


def record_unsaved_ends(world: World, ends: Sequence[Intent], now: datetime) -> Plan:
    """Record which machines were ended while the state could not be written, and when their providers accepted it.

    Each attempt goes on to count until it is judged by what its host wrote, which may hold its newest checkpoint.
    """
    builder = PlanBuilder(world, now)
    for end in ends:
        item = None if end.attempt is None else world.attempts.get(end.attempt)
        if item is not None and item.ref == end.ref:
            what = f"the end of attempt {item.id.number} cannot be recorded"
            contain(builder, item.id.job, partial(_record_unsaved_end, builder, end, item), what)
    return builder.plan()


def _record_unsaved_end(builder: PlanBuilder, end: Intent, item: Attempt) -> None:
    if end.ref is None or end.accepted_at is None or item.machine is MachineState.GONE:
        return
    builder.owe_termination(end.ref, end.key, item.id, why="it was ended while the state could not be written")
    intent = builder.intent(end.id)
    if intent is not None and _is_pending(intent):
        _accept(builder, intent, item, end.accepted_at)


def _accept(builder: PlanBuilder, intent: Intent, item: Attempt | None, at: datetime) -> None:
    first = intent.accepted_at or at  # a process that starts repeats the order, whose machine no list has shown since
    builder.put_intent(replace(intent, state=IntentState.ACCEPTED, accepted_at=first, tries=intent.tries + 1, error=""))
    if item is not None and item.ref == intent.ref and item.machine is not MachineState.GONE:
        builder.set_rate(item.id, MicroUsdPerHour(0), None, at=at)
        builder.put_attempt(replace(builder.attempt(item.id), machine=MachineState.HALTED))
    builder.list_again(intent.provider)


def terminate_failed(
    world: World, intent_id: IntentId, detail: str, now: datetime, retry_after: timedelta | None = None
) -> Plan:
    """Give the order again later, for as long as it takes."""
    builder = PlanBuilder(world, now)
    intent = world.intents.get(intent_id)
    if intent is None or not _is_pending(intent):
        return builder.plan()
    backoff = TERMINATE_BACKOFF_FIRST * 2 ** min(max(intent.tries, 0), 10)
    not_before = now + span_within(max(backoff, retry_after or timedelta(0)), TERMINATE_RETRY_MAX)
    builder.put_intent(replace(intent, tries=intent.tries + 1, not_before=not_before, error=detail))
    if intent.tries == 0:
        builder.event(
            "machine.ending_failed",
            f"{intent.provider} did not end the machine ({detail}); trying until it does",
            attempt=intent.attempt if intent.attempt in world.attempts else None,
            key=intent.key,
        )
    builder.wake(not_before)
    return builder.plan()


def _is_pending(intent: Intent) -> bool:
    return intent.kind is IntentKind.TERMINATE and intent.state is IntentState.OPEN
