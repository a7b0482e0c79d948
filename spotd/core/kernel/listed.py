"""What a list shows of an instance, recorded on its attempt: what it costs, and whether it can compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from spotd.core.billing import (
    bill_listed,
    bill_past_prices,
    bill_until_ended,
    is_starting,
    list_again_for_start,
    note_listed,
    prove,
    ran_until,
    start_anew,
    start_billing,
)
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, terminate_intent_id
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import is_own_key
from spotd.core.domain.states import AttemptState, require_rows
from spotd.core.host_reports import note_notice
from spotd.core.kernel.quarantine import in_words
from spotd.core.metering import STOPPED, free_of, stray_cost, with_listed_price
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import halted_rate, listed_rate, metered_rate, on_demand_rate
from spotd.core.todays_terms import note_ceiling
from spotd_providers.contract.values import (
    Billing,
    Instance,
    InstanceRef,
    InstanceState,
    Listing,
    MicroUsdPerHour,
    ProviderName,
    as_usd,
)

TERMINATE_AGAIN_AFTER: Final = timedelta(minutes=1)
"""A machine still listed as running so long after its end was accepted is ended again: some providers forget."""

_UNBILLED: Final[Mapping[Billing, Callable[[Quote], MicroUsdPerHour]]] = {
    Billing.DISK: halted_rate,
    Billing.NOTHING: lambda _: MicroUsdPerHour(0),
}
"""What a machine costs of which not everything is billed, whatever its state."""


def _in_account(builder: PlanBuilder, item: Attempt, account: str) -> Attempt:
    """Record whose key lists the machine: one that is listed can be ended with that key, whatever was known before."""
    item = replace(item, account=account)
    builder.put_attempt(item)
    intent = None if item.ref is None else builder.intent(terminate_intent_id(item.ref))
    if intent is not None and intent.account != account:
        builder.put_intent(replace(intent, account=account))
    return item


def record(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Record what the listing shows of a machine we know: price, notice, whether it can still compute."""
    item = builder.attempt(attempt_id)
    rules = builder.policy.providers.get(item.provider)
    if rules is not None and rules.account and item.account != rules.account:
        item = _in_account(builder, item, rules.account)
    if not item.ever_listed or item.missing_since is not None:
        item = replace(item, ever_listed=True, missing_since=None)
        builder.put_attempt(item)
    if mine.notice_at is not None and item.state.counts and mine.state not in STOPPED:
        note_notice(builder, attempt_id, mine.notice_at)
        item = builder.attempt(attempt_id)
    RECORDS[mine.state](builder, item, mine)


def is_outdated(builder: PlanBuilder, item: Attempt, listing: Listing | None) -> bool:
    """Whether the list was begun before the machine's end was accepted, so that it proves nothing about its life.

    It may be the newest one for long: until the next poll, or as long as the provider is away.
    """
    intent = builder.end_order(item)
    if intent is None or intent.accepted_at is None:
        return False
    return listing is None or listing.at <= intent.accepted_at


def record_paused(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill its disk until its end is accepted: it may wake up, so it counts as able to compute."""
    if mine.billing is Billing.FULL:
        _rate(builder, item.id, metered_rate(item.quote), on_demand_rate(item.quote))
    else:
        _rate(builder, item.id, _UNBILLED.get(mine.billing, halted_rate)(item.quote), None, mine)
    bill_until_ended(builder, item.id)
    if _is_over(builder, item):
        _end_again_if_forgotten(builder, item, "its disk is still kept after its end was accepted")


def record_ending(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill nothing more, and take back what its provider does not bill."""
    builder.put_attempt(replace(item, machine=MachineState.HALTED))
    _rate(builder, item.id, MicroUsdPerHour(0), None, mine)
    _take_back(builder, item.id, mine)


def record_gone(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill nothing more, take back what its provider does not bill, and count on the machine no more."""
    _rate(builder, item.id, MicroUsdPerHour(0), None, mine)
    _take_back(builder, item.id, mine)
    builder.machine_gone(item.id)


def record_live(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill it at the listed price, unless less of it is billed now, and hold that price against the ceiling.

    One that should be ended is ended again.
    """
    at = builder.listed_at.get(item.provider, builder.now)
    unbilled = _UNBILLED.get(mine.billing)
    starts_by_disk = mine.billing is Billing.DISK and is_starting(item, builder.policy)
    if unbilled is not None and not starts_by_disk:
        _rate(builder, item.id, unbilled(item.quote), None, mine)
    if unbilled is not None and _is_over(builder, item):
        _end_unbilled(builder, builder.attempt(item.id))
        return
    if _is_over(builder, item):
        prove(builder, item.id, at)
        _end_again(builder, builder.attempt(item.id))
        _meter_until_ended(builder, item.id, mine)
        return
    if item.machine is not MachineState.LIVE:
        builder.put_attempt(replace(item, machine=MachineState.LIVE))
    rate, per_gpu = listed_rate(item.quote, item.quote.price.gpu if mine.price is None else mine.price)
    is_over = per_gpu > item.ceiling_now
    if mine.state is InstanceState.RUNNING and unbilled is None:
        start_billing(builder, item.id)
    note_listed(builder, item.id, at, exactly=is_over or item.running_at is None)
    note_ceiling(builder, item.id, at, is_over=is_over)
    item = builder.attempt(item.id)
    if mine.state is InstanceState.PENDING and mine.billing is not Billing.FULL:
        start_anew(builder, item.id)
        item = builder.attempt(item.id)
    if is_starting(item, builder.policy):
        list_again_for_start(builder, item)
    elif unbilled is None:
        bill_past_prices(builder, item.id, mine, builder.now)
        bill_listed(builder, item.id, at, rate)


def _is_over(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether its machine is being ended, be it that its last words are still to be read."""
    intent = builder.end_order(item)
    return item.state is AttemptState.ENDING or (intent is not None and intent.is_open)


def _meter_until_ended(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Bill a machine whose end its provider has not accepted yet, at the price that it states."""
    item = builder.attempt(attempt_id)
    if item.meter.since is None or item.meter.rate <= halted_rate(item.quote):
        return
    rate = metered_rate(item.quote) if mine.price is None else listed_rate(item.quote, mine.price)[0]
    bill_past_prices(builder, attempt_id, mine, builder.now)
    bill_listed(builder, attempt_id, builder.listed_at.get(item.provider, builder.now), rate)


def _take_back(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Credit what the provider does not bill, because it took the machine so soon."""
    item = builder.attempt(attempt_id)
    free = free_of(item, mine, builder.policy, builder.now)
    if free > 0:
        minutes = int(builder.policy.providers[item.provider].free_if_taken_within.total_seconds() // 60)
        why = f"{item.provider} took the machine within {minutes} minutes, which makes its time free"
        builder.credit(attempt_id, free, f"{why}: ${as_usd(free):.4f}")


def _rate(
    builder: PlanBuilder,
    attempt_id: AttemptId,
    rate: MicroUsdPerHour,
    compared: MicroUsdPerHour | None,
    stopped: Instance | None = None,
) -> None:
    """Bill at this rate from now on, or from when a machine that does not run any more ran last."""
    item = builder.attempt(attempt_id)
    meter = item.meter
    if meter.rate != rate or (meter.since is None) != (rate == 0):
        over_since = _over_since(item, builder.now)
        at = over_since if stopped is None else ran_until(item, stopped.ended_at, over_since or builder.now)
        if stopped is not None:
            bill_past_prices(builder, attempt_id, stopped, at or builder.now)
        builder.set_rate(attempt_id, rate, compared, at=at)


def _over_since(item: Attempt, now: datetime) -> datetime | None:
    """When the first of the lists was begun that state what is believed now, or a later sign of life; `None`: now."""
    since, began = item.over_since, item.meter.since
    if since is None or began is None:
        return None
    return min(now, max(since, began, item.heartbeat_seen_at or since))


def _end_unbilled(builder: PlanBuilder, item: Attempt) -> None:
    """End a machine that is still there and bills its disk or nothing: it has not woken, and may."""
    intent = builder.end_order(item)
    if intent is None or not intent.is_open:
        builder.owe_end(item, "it is still listed although its attempt has ended")
    else:
        _end_again_if_forgotten(builder, item, "it is still listed after its end was accepted")


def _end_again(builder: PlanBuilder, item: Attempt) -> None:
    """End a machine that should be gone and runs: it woke up, or the provider forgot our order."""
    intent = builder.end_order(item)
    was_halted = item.meter.rate <= halted_rate(item.quote) < metered_rate(item.quote)  # not known of a free machine
    if was_halted and intent is not None and intent.state is IntentState.OPEN:
        # It bills in full again, so an order that waits for its turn to be repeated waits no longer.
        builder.put_intent(replace(intent, not_before=None, accepted_at=None))
        _bill_again(builder, item.id, intent.accepted_at)
        builder.event("machine.woke", "it woke up although its attempt has ended: ending it at once", attempt=item.id)
    elif intent is None or not intent.is_open:
        builder.owe_end(item, "it runs although its attempt has ended")
    elif _end_again_if_forgotten(builder, item, "it still runs after its end was accepted"):
        builder.put_attempt(replace(builder.attempt(item.id), machine=MachineState.LIVE))
        _bill_again(builder, item.id, intent.accepted_at)


def _bill_again(builder: PlanBuilder, attempt_id: AttemptId, accepted_at: datetime | None) -> None:
    """Bill a machine that runs although it should be gone.

    Where an order that was accepted stopped its meter, nothing has ended it since; one that was paused has woken.
    """
    item = builder.attempt(attempt_id)
    rate, compared = metered_rate(item.quote), on_demand_rate(item.quote)
    if item.meter.since is None:
        builder.set_rate(attempt_id, rate, compared, at=accepted_at)
        prove(builder, attempt_id, builder.listed_at.get(item.provider, builder.now))
    else:
        _rate(builder, attempt_id, rate, compared)


def _end_again_if_forgotten(builder: PlanBuilder, item: Attempt, seen: str) -> bool:
    """Whether the provider had time enough for an order that it accepted: then it is given again."""
    intent = builder.end_order(item)
    if intent is None or intent.state is not IntentState.ACCEPTED or intent.accepted_at is None:
        return False
    if builder.now - intent.accepted_at < TERMINATE_AGAIN_AFTER:
        return False
    builder.put_intent(replace(intent, state=IntentState.OPEN, accepted_at=None, not_before=None))
    builder.event("machine.ending", f"{seen}: ending it again", attempt=item.id)
    return True


RECORDS: Final[Mapping[InstanceState, Callable[[PlanBuilder, Attempt, Instance], None]]] = {
    InstanceState.PENDING: record_live,
    InstanceState.RUNNING: record_live,
    InstanceState.UNKNOWN: record_live,
    InstanceState.PAUSED: record_paused,
    InstanceState.ENDING: record_ending,
    InstanceState.GONE: record_gone,
}
require_rows(InstanceState, RECORDS)


# Machines of this install that no attempt owns: they are ended, and what they cost is estimated by their listing.

UNSEEN_MAX: Final = timedelta(days=7)
"""A machine is taken to be no older than this when it is seen first, whatever its provider states."""


def end_orphans(builder: PlanBuilder, listings: Mapping[ProviderName, Listing]) -> None:
    """End machines under our install label that no open attempt owns: a former state bought them, which is lost."""
    owned = {(a.provider, a.carried_key) for a in builder.attempts()}
    kept = {a.ref for a in builder.attempts() if a.ref is not None and a.state.counts}
    counting = {(a.key, a.ref and a.ref.instance_id) for a in builder.attempts() if a.state.counts}
    for provider, row in ((name, row) for name in sorted(listings) for row in listings[name].instances):
        if (provider, row.key) in owned or counting & {(row.key, row.ref.instance_id), (row.key, None)}:
            continue  # a second provider of one account lists what the first has, too; both end what is left of it
        if (error := builder.attempted(partial(_end_if_orphan, builder, row, kept))) is not None:
            builder.note_contained(f"a machine in the listing of {provider}", in_words(error))
    for intent in builder.intents():
        if (error := builder.attempted(partial(_settle, builder, intent, listings.get(intent.provider)))) is not None:
            builder.note_contained(f"the end of the machine {intent.key}", in_words(error))


def _end_if_orphan(builder: PlanBuilder, instance: Instance, kept: Collection[InstanceRef]) -> None:
    if instance.state is InstanceState.GONE or not is_own_key(builder.policy, instance.key) or instance.ref in kept:
        return  # however its label reads now, the machine of an attempt that counts is no stray
    if builder.policy.identity_sure:
        builder.owe_termination(instance.ref, instance.key, None, why="no open attempt owns this machine")
        note_stray(builder, instance)


def _settle(builder: PlanBuilder, intent: Intent, seen: Listing | None) -> None:
    if intent.kind is not IntentKind.TERMINATE or intent.attempt is not None or intent.ref is None:
        return
    if seen is None or not seen.complete or intent.accepted_at is None or seen.at <= intent.accepted_at:
        return
    rules = builder.policy.providers.get(intent.provider)
    if rules is not None and rules.is_other_account(intent.account):
        return
    if not any(i.ref == intent.ref and i.state is not InstanceState.GONE for i in seen.instances):
        builder.put_intent(replace(intent, state=IntentState.DONE))
        total = stray_cost(intent, intent.accepted_at)
        builder.event(
            "machine.gone",
            f"a machine without an attempt is gone; it cost about ${as_usd(total):.4f}, which no job pays",
            key=intent.key,
            provider=intent.provider,
            cost_microusd=total,
        )
    elif builder.now - intent.accepted_at >= TERMINATE_AGAIN_AFTER:
        builder.put_intent(replace(intent, state=IntentState.OPEN, accepted_at=None, not_before=None))


def note_stray(builder: PlanBuilder, instance: Instance) -> None:
    """Keep what the listing shows of a machine whose end is owed: its account, its price, and since when it exists."""
    intent = builder.intent(terminate_intent_id(instance.ref))
    if intent is None or not intent.is_open or intent.attempt is not None:
        return
    since = intent.stray_since or min(max(instance.created_at or builder.now, builder.now - UNSEEN_MAX), builder.now)
    rules = builder.policy.providers.get(intent.provider)
    account = intent.account if rules is None else rules.account or intent.account
    at = builder.listed_at.get(intent.provider, builder.now)
    noted = with_listed_price(replace(intent, stray_since=since, account=account), instance, at)
    if noted != intent:
        builder.put_intent(noted)
