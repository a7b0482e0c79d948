"""What providers list and hosts wrote, turned into what is true now.

Theory. Every attempt that has not ended is compared with the newest listing of its provider and the newest read of
what its host wrote. The read is always newer than the listing it is judged with, so nothing a host published before
it died is missed. What a list shows of an instance is recorded first (`RECORDS`), then what its host reports of its
end; last, the attempt is judged by the row of its state and what was observed (`JUDGEMENTS`). `docs/states.md` shows
both tables. A machine that no attempt owns is ended.

How list and heartbeat are weighed against each other is the theory of `loss_evidence`.

An incomplete listing proves what it shows and nothing else; with no listing and no read, everything is held. Most
reads are a liveness check of all hosts (`HostStatus.liveness_check`): it keeps an attempt alive, and what would end
one asks for a full read of that host first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Final

from spotd.core.attempts import Attempt, MachineState, StopOrder
from spotd.core.billing import (
    began_unseen,
    bill_until_ended,
    book_unseen,
    is_starting,
    last_lived,
    look_for_start,
    note_ceiling,
    note_listed,
    prove,
    set_rate,
    start_billing,
)
from spotd.core.host_reports import absorb, exited, last_sign_of_life, note_notice
from spotd.core.host_status import HostStatus
from spotd.core.ids import AttemptId
from spotd.core.intents import Intent, IntentKind, IntentState, launch_intent_id, terminate_intent_id
from spotd.core.interruption_credit import free_of
from spotd.core.keys import is_own_key
from spotd.core.launch_calls import record_instance
from spotd.core.loss_evidence import LossEvidence, list_lag
from spotd.core.orphans import note_stray, stray_cost
from spotd.core.plan import Plan
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import halted_rate, metered_rate, on_demand_rate, repriced
from spotd.core.quarantine import contain, guarded, in_words, quarantine
from spotd.core.starting import start_deadline
from spotd.core.states import AttemptState, EndReason
from spotd.core.world import World
from spotd_providers.contract.money import MicroUsdPerHour, as_usd
from spotd_providers.contract.values import (
    AttemptKey,
    Instance,
    InstanceRef,
    InstanceState,
    Listing,
    Loss,
    ProviderName,
)

TERMINATE_AGAIN_AFTER: Final = timedelta(minutes=1)
"""A machine still listed as running so long after its end was accepted is ended again: some providers forget."""

READ_WITHIN: Final = timedelta(hours=24)
"""For so long after its machine was ended an attempt waits until what it saved last can be read."""

LATE_PARTS: Final = 3
LATE_WHOLE: Final = 5
"""A host is late after this part of the silence that would end it: well before two heartbeats were missed."""
LATE_FOR: Final = timedelta(minutes=2)

_LOSS_REASONS: Final[Mapping[Loss, EndReason]] = {
    Loss.PREEMPTED: EndReason.PREEMPTED,
    Loss.OUTBID: EndReason.OUTBID,
    Loss.HOST_LOST: EndReason.HOST_LOST,
    Loss.PROVISION_FAILED: EndReason.HOST_LOST,
    Loss.IMAGE_ERROR: EndReason.IMAGE_ERROR,
    Loss.BALANCE: EndReason.PROVIDER_BALANCE,
    Loss.EXPIRED: EndReason.HOST_LOST,
    Loss.SELF: EndReason.HOST_LOST,
}


def reconcile(
    world: World,
    listings: Mapping[ProviderName, Listing],
    reports: Mapping[AttemptId, HostStatus],
    now: datetime,
) -> Plan:
    """Return what the newest readings change. Orders of the plan's rows are deterministic."""
    return guarded(lambda some: _reconcile(some, listings, reports, now), world, now)


def _reconcile(
    world: World,
    listings: Mapping[ProviderName, Listing],
    reports: Mapping[AttemptId, HostStatus],
    now: datetime,
) -> Plan:
    builder = PlanBuilder(world, now)
    for attempt in builder.attempts():
        report = reports.get(attempt.id)
        if report is not None:
            step = partial(absorb, builder, attempt.id, report)
            contain(
                builder, attempt.id.job, step, f"what the host of attempt {attempt.id.number} wrote cannot be judged"
            )
    witnesses = LossEvidence(builder, reports)
    for why in witnesses.shared_silence():
        builder.note_shared_silence(why)
    listings, held = _usable(builder, listings, witnesses)
    builder.listed_at = {provider: listing.at for provider, listing in listings.items()}
    sighted = _by_key(listings)
    for attempt in builder.attempts():
        _judge_alone(
            builder, attempt, listings.get(attempt.provider), sighted, reports.get(attempt.id), held, witnesses
        )
    _end_strays(builder, listings)
    return builder.plan()


def _usable(
    builder: PlanBuilder, listings: Mapping[ProviderName, Listing], witnesses: LossEvidence
) -> tuple[dict[ProviderName, Listing], frozenset[AttemptId]]:
    """Return the listings that can be read at all, and the attempts whose absence from them is not believed yet."""
    usable: dict[ProviderName, Listing] = {}
    held: set[AttemptId] = set()
    for provider in sorted(listings):
        one = {provider: listings[provider]}

        def read(one: Mapping[ProviderName, Listing] = one) -> None:
            held.update(_held_back(builder, one, _by_key(one), witnesses))

        error = builder.attempted(read)
        if error is None:
            usable.update(one)
        else:
            builder.note_contained(f"the listing of {provider}", in_words(error))
    return usable, frozenset(held)


def _judge_alone(
    builder: PlanBuilder,
    item: Attempt,
    listing: Listing | None,
    sighted: Mapping[tuple[ProviderName, AttemptKey], tuple[Instance, ...]],
    report: HostStatus | None,
    held: frozenset[AttemptId],
    witnesses: LossEvidence,
) -> None:
    """Judge one attempt; a listing that makes this raise counts for it as none, and only then is it quarantined."""
    error = builder.attempted(partial(_judge, builder, item.id, listing, sighted, report, held, witnesses))
    if error is None:
        return
    blind = partial(_judge, builder, item.id, None, {}, report, held, witnesses)
    if listing is not None and builder.attempted(blind) is None:
        builder.note_contained(f"the listing of {item.provider} about {item.key}", in_words(error))
        return
    quarantine(builder, item.id.job, f"attempt {item.id.number} cannot be judged ({in_words(error)})")


def _by_key(listings: Mapping[ProviderName, Listing]) -> dict[tuple[ProviderName, AttemptKey], tuple[Instance, ...]]:
    found: defaultdict[tuple[ProviderName, AttemptKey], list[Instance]] = defaultdict(list)
    for provider in sorted(listings):
        for instance in listings[provider].instances:
            found[provider, instance.key].append(instance)
    return {
        key: tuple(group) if len(group) == 1 else tuple(sorted(group, key=lambda i: i.ref.instance_id))
        for key, group in found.items()
    }


# --- machines that a list lacks --------------------------------------------------------------------------------


def _held_back(
    builder: PlanBuilder,
    listings: Mapping[ProviderName, Listing],
    sighted: Mapping[tuple[ProviderName, AttemptKey], tuple[Instance, ...]],
    witnesses: LossEvidence,
) -> frozenset[AttemptId]:
    """Return attempts whose absence from a complete list is not believed yet."""
    held: set[AttemptId] = set()
    for provider in sorted(listings):
        listing = listings[provider]
        if not listing.complete:
            continue
        tracked = [
            a
            for a in builder.attempts()
            if a.provider == provider and a.machine is MachineState.LIVE and _listing_speaks(builder, a, listing)
        ]
        missing = [a for a in tracked if not _is_shown(a, sighted)]
        for item in tracked:
            if item.missing_since is not None and _is_shown(item, sighted):
                builder.put_attempt(replace(item, missing_since=None))
        for item in missing:
            if not item.state.counts:
                continue
            large = len(missing) * 3 > len(tracked)
            if item.missing_since is None:
                builder.put_attempt(replace(item, missing_since=listing.at))
                builder.list_again(item.provider)
                if large:  # one that a list lacks now and then is told by `why`, not by an event each time
                    _tell_missing(builder, item, f"{len(missing)} of {len(tracked)} machines")
            item = builder.attempt(item.id)
            if not witnesses.confirm_absence(item, listing, large=large):
                held.add(item.id)
                _ask_when_it_matters(builder, item, listing, witnesses)
    return frozenset(held)


def _is_shown(item: Attempt, sighted: Mapping[tuple[ProviderName, AttemptKey], tuple[Instance, ...]]) -> bool:
    """Whether a list has the very machine of this attempt; another one with its key proves nothing about it."""
    found = sighted.get((item.provider, item.key), ())
    return bool(found) if item.ref is None else any(i.ref == item.ref for i in found)


def _tell_missing(builder: PlanBuilder, item: Attempt, how_many: str) -> None:
    builder.event(
        "machine.missing",
        f"the list of {item.provider} lacks {how_many}, among them this one: it is kept until its heartbeats stop, too",
        attempt=item.id,
    )


def _ask_when_it_matters(builder: PlanBuilder, item: Attempt, listing: Listing, witnesses: LossEvidence) -> None:
    """Ask for another list as soon as one can decide."""
    sign, missing_since = witnesses.sign(item), item.missing_since
    if sign is None and missing_since is None:
        return
    due = (
        sign + builder.policy.silence_max
        if sign is not None
        else (missing_since or builder.now) + list_lag(builder, item)
    )
    if builder.now < due:
        builder.wake(due)
    elif listing.at < due or witnesses.is_silent(item):
        builder.list_again(item.provider)


# --- one attempt -----------------------------------------------------------------------------------------------


class Observed(StrEnum):
    """What was observed of the instance of one attempt."""

    LISTED = "listed, and may compute, or could not be read since"
    HALTED = "listed as paused, ending or gone, and read since"
    ABSENT = "missing from complete lists for long enough, and read since"
    UNREAD = "halted or missing, but only its liveness was checked since"
    OTHER_MARKET = "listed in another market than agreed"
    NOTHING = "no list says anything of it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One attempt beside everything that was observed of it."""

    builder: PlanBuilder
    attempt_id: AttemptId
    listing: Listing | None
    mine: Instance | None
    report: HostStatus | None
    is_held: bool
    """Its absence is not believed yet."""
    witnesses: LossEvidence

    @property
    def item(self) -> Attempt:
        return self.builder.attempt(self.attempt_id)

    @property
    def is_read(self) -> bool:
        """Whether all that its host wrote was read after it was listed.

        However little is known of it, it may have run and saved while the store did not answer.
        """
        report, listing = self.report, self.listing
        return report is not None and not report.liveness_check and (listing is None or report.read_at >= listing.at)

    def end(self, reason: EndReason, detail: str = "") -> None:
        self.builder.end_attempt(self.attempt_id, reason, detail)


def _judge(
    builder: PlanBuilder,
    attempt_id: AttemptId,
    listing: Listing | None,
    sighted: Mapping[tuple[ProviderName, AttemptKey], tuple[Instance, ...]],
    report: HostStatus | None,
    held: frozenset[AttemptId],
    witnesses: LossEvidence,
) -> None:
    item = builder.attempt(attempt_id)
    mine = _pick(builder, item, sighted.get((item.provider, item.key), ()))
    if mine is not None and item.ref is None:
        _adopt(builder, attempt_id, mine)
    if mine is not None and (mine.state is InstanceState.GONE or not _outdated(builder, item, listing)):
        _record(builder, attempt_id, mine)
    if builder.attempt(attempt_id).state.counts and report is not None and report.exit_cause is not None:
        exited(builder, attempt_id, report)
    if builder.attempt(attempt_id).state.counts and report is not None and report.flood:
        builder.end_attempt(attempt_id, EndReason.FLOODED, report.flood)
    case = _Case(
        builder=builder,
        attempt_id=attempt_id,
        listing=listing,
        mine=mine,
        report=report,
        is_held=attempt_id in held,
        witnesses=witnesses,
    )
    JUDGEMENTS[case.item.state][_observed(case)](case)


def _observed(case: _Case) -> Observed:
    item, listing, mine = case.item, case.listing, case.mine
    absent = listing is not None and listing.complete and mine is None and _listing_speaks(case.builder, item, listing)
    if not item.state.counts:
        return Observed.ABSENT if absent else Observed.NOTHING if mine is None else Observed.LISTED
    if mine is not None and mine.market not in {None, item.quote.offer.market}:
        return Observed.OTHER_MARKET
    if absent and item.ref is None and item.heartbeat_seen_at is not None and not case.witnesses.is_silent(item):
        absent = False  # its host lives, so the launch took effect, whatever the lists lack
    elif absent and listing is not None and item.ref is None and case.witnesses.hosts_cannot_write:
        absent = _is_missing_for_long(case.builder, item, listing)
    halted = mine is not None and mine.state in _STOPPED
    absent = absent and not case.is_held
    if (halted or absent) and case.report is not None and case.report.liveness_check:
        return Observed.UNREAD
    if case.is_read and (halted or absent):
        return Observed.HALTED if halted else Observed.ABSENT
    return Observed.NOTHING if mine is None else Observed.LISTED


def _is_missing_for_long(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether lists lack the machine of an unanswered launch for as long as they may lag.

    If it exists, its host is out of reach at the moment, so that one wrong list is all that would speak against it.
    """
    if item.missing_since is None:
        item = replace(item, missing_since=listing.at)
        builder.put_attempt(item)
    believed_at = (item.missing_since or listing.at) + list_lag(builder, item)
    if listing.at >= believed_at:
        return True
    if builder.now < believed_at:
        builder.wake(believed_at)
    else:
        builder.list_again(item.provider)
    return False


def _is_unanswerable(builder: PlanBuilder, item: Attempt, listing: Listing | None, *, looked: bool) -> bool:
    """Whether a machine that may have been launched could by now neither be heard nor go on without being heard.

    Its provider, or the part of it that was asked to sell it, has been away since its answer was lost. A machine that
    lives would have given a sign of life; one that does not starts no more, once the grant that it would read is
    superseded.
    """
    intent = builder.intent(launch_intent_id(item.key))
    if item.ref is not None or intent is None or intent.state is not IntentState.UNKNOWN or intent.not_before is None:
        return False
    if listing is not None and listing.complete and listing.at > intent.not_before:
        return False
    grace = builder.job(item.id.job).spec.checkpoint.stop_grace
    given_up_at = intent.not_before + builder.policy.lease + grace + builder.policy.save_allowance
    if builder.now < given_up_at:
        builder.wake(given_up_at)
        return False
    return looked and item.heartbeat_seen_at is None


def _end_accepted(builder: PlanBuilder, item: Attempt, listing: Listing | None) -> bool:
    """Whether a list begun after the provider accepted the end shows it; one list may be wrong."""
    if item.ref is None:
        return True
    intent = builder.intent(terminate_intent_id(item.ref))
    accepted_at = None if intent is None else intent.accepted_at
    return listing is not None and accepted_at is not None and listing.at > accepted_at


def _outdated(builder: PlanBuilder, item: Attempt, listing: Listing | None) -> bool:
    """Whether the list was begun before the machine's end was accepted, so that it proves nothing about its life.

    It may be the newest one for long: until the next poll, or as long as the provider is away.
    """
    intent = None if item.ref is None else builder.intent(terminate_intent_id(item.ref))
    if intent is None or intent.accepted_at is None:
        return False
    return listing is None or listing.at <= intent.accepted_at


_STOPPED: Final = frozenset({InstanceState.PAUSED, InstanceState.ENDING, InstanceState.GONE})


def _pick(builder: PlanBuilder, item: Attempt, found: tuple[Instance, ...]) -> Instance | None:
    """Return the machine of this attempt among those that carry its key; the others are doubles and are ended."""
    if item.ref is not None:
        chosen = next((i for i in found if i.ref == item.ref), None)
    else:
        ranked = sorted(found, key=lambda i: (i.state is not InstanceState.RUNNING, i.state in _STOPPED))
        chosen = ranked[0] if ranked else None
    for other in found:
        if other is not chosen and other.state is not InstanceState.GONE:
            builder.owe_termination(
                other.ref, other.key, None, why=f"a second machine carries the key of attempt {item.id.number}"
            )
    return chosen


def _adopt(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Record that a launch whose answer was lost did happen."""
    item = builder.attempt(attempt_id)
    since = began_unseen(builder, item, mine.created_at)
    if item.meter.settled:
        # What came before is booked by its host's word; a machine that still runs has billed ever since.
        since = builder.now if mine.state in _STOPPED else min(builder.now, item.ended_at or builder.now)
    record_instance(builder, item, mine, launched_at=since, billed_since=since, found=True)


def _record(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Record what the listing shows of a machine we know: price, notice, whether it can still compute."""
    item = builder.attempt(attempt_id)
    rules = builder.policy.providers.get(item.provider)
    if rules is not None and rules.account and not item.account:
        item = replace(item, account=rules.account)
        builder.put_attempt(item)
    if not item.ever_listed or item.missing_since is not None:
        item = replace(item, ever_listed=True, missing_since=None)
        builder.put_attempt(item)
    if mine.notice_at is not None and item.state.counts and mine.state not in _STOPPED:
        note_notice(builder, attempt_id, mine.notice_at)
        item = builder.attempt(attempt_id)
    RECORDS[mine.state](builder, item, mine)


def record_paused(builder: PlanBuilder, item: Attempt, _mine: Instance) -> None:
    """Bill its disk until its end is accepted: it may wake up, so it counts as able to compute."""
    _rate(builder, item.id, halted_rate(item.quote), None)
    bill_until_ended(builder, item.id)
    if _is_over(builder, item):
        _end_again_if_forgotten(builder, item, "its disk is still kept after its end was accepted")


def record_ending(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill nothing more, and take back what its provider does not bill."""
    builder.put_attempt(replace(item, machine=MachineState.HALTED))
    _rate(builder, item.id, MicroUsdPerHour(0), None)
    _take_back(builder, item.id, mine)


def record_gone(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill nothing more, take back what its provider does not bill, and count on the machine no more."""
    _rate(builder, item.id, MicroUsdPerHour(0), None)
    _take_back(builder, item.id, mine)
    builder.machine_gone(item.id)


def record_live(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Bill it at the listed price and hold that against the ceiling; end it again if it should be ended."""
    at = builder.listed_at.get(item.provider, builder.now)
    if _is_over(builder, item):
        prove(builder, item.id, at)
        _end_again(builder, builder.attempt(item.id))
        _meter_until_ended(builder, item.id, mine)
        return
    if item.machine is not MachineState.LIVE:
        builder.put_attempt(replace(item, machine=MachineState.LIVE))
    quote = item.quote
    if mine.price is not None and mine.price != quote.price.gpu:
        quote = repriced(quote, mine.price)
    is_over = quote.price.per_gpu > item.ceiling
    if mine.state is InstanceState.RUNNING:
        start_billing(builder, item.id)
    note_listed(builder, item.id, at, exactly=is_over or item.running_at is None)
    note_ceiling(builder, item.id, at, is_over=is_over)
    item = builder.attempt(item.id)
    if is_starting(item, builder.policy):
        look_for_start(builder, item)
    else:
        set_rate(builder, item.id, metered_rate(quote), on_demand_rate(quote))


def _is_over(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether its machine is being ended, be it that its last words are still to be read."""
    intent = None if item.ref is None else builder.intent(terminate_intent_id(item.ref))
    return item.state is AttemptState.ENDING or (intent is not None and intent.is_open)


def _meter_until_ended(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Bill a machine whose end its provider has not accepted yet, at the price that it states."""
    item = builder.attempt(attempt_id)
    if item.meter.since is None or item.meter.rate <= halted_rate(item.quote):
        return
    quote = item.quote if mine.price is None else repriced(item.quote, mine.price)
    set_rate(builder, attempt_id, metered_rate(quote), on_demand_rate(quote))


def _take_back(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance) -> None:
    """Book back what the provider does not bill, because it took the machine so soon."""
    item = builder.attempt(attempt_id)
    free = free_of(item, mine, builder.policy, builder.now)
    if free > 0:
        span = builder.policy.providers[item.provider].free_if_taken_within
        minutes = int(span.total_seconds() // 60)
        why = (
            f"{item.provider} took the machine within {minutes} minutes, which makes its time free: ${as_usd(free):.4f}"
        )
        builder.credit(attempt_id, free, why)


def _rate(builder: PlanBuilder, attempt_id: AttemptId, rate: MicroUsdPerHour, compared: MicroUsdPerHour | None) -> None:
    meter = builder.attempt(attempt_id).meter
    if meter.rate != rate or (meter.since is None) != (rate == 0):
        builder.set_rate(attempt_id, rate, compared)


def _end_again(builder: PlanBuilder, item: Attempt) -> None:
    """End a machine that should be gone and runs: it woke up, or the provider forgot our order."""
    if item.ref is None:
        return
    intent = builder.intent(terminate_intent_id(item.ref))
    if intent is not None and intent.state is IntentState.OPEN and item.meter.rate <= halted_rate(item.quote):
        # It was halted and bills in full again, so an order that waits for its turn to be repeated waits no longer.
        builder.put_intent(replace(intent, not_before=None))
        _bill_again(builder, item.id, intent.accepted_at)
        builder.event("machine.woke", "it woke up although its attempt has ended: ending it at once", attempt=item.id)
    elif intent is None or not intent.is_open:
        builder.owe_termination(item.ref, item.key, item.id, why="it runs although its attempt has ended")
    elif _end_again_if_forgotten(builder, item, "it still runs after its end was accepted"):
        builder.put_attempt(replace(builder.attempt(item.id), machine=MachineState.LIVE))
        _bill_again(builder, item.id, intent.accepted_at)


def _bill_again(builder: PlanBuilder, attempt_id: AttemptId, accepted_at: datetime | None) -> None:
    """Bill a machine that runs although it should be gone.

    Where its meter was stopped by an order that its provider accepted, nothing has ended it since, however long no list
    could be read; one that was paused has billed its disk and was woken.
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
    intent = None if item.ref is None else builder.intent(terminate_intent_id(item.ref))
    if intent is None or intent.state is not IntentState.ACCEPTED or intent.accepted_at is None:
        return False
    if builder.now - intent.accepted_at < TERMINATE_AGAIN_AFTER:
        return False
    builder.put_intent(replace(intent, state=IntentState.OPEN, accepted_at=None, not_before=None))
    builder.event("machine.ending", f"{seen}: ending it again", attempt=item.id)
    return True


def _listing_speaks(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether absence from this listing says anything about the attempt's machine."""
    rules = builder.policy.providers.get(item.provider)
    if rules is not None and rules.is_other_account(item.account):
        return False  # the key in use belongs to somebody else, whose lists never had it
    window = rules.reconcile_window if rules is not None else timedelta(minutes=3)
    if item.ever_listed:
        return item.launched_at is None or listing.at > item.launched_at
    if item.ref is not None:
        return listing.at > (item.launched_at or item.intended_at) + window
    intent = builder.intent(launch_intent_id(item.key))
    if intent is not None and intent.state in {IntentState.OPEN, IntentState.SENT}:
        return False  # its call is under way in this process, however long it queued
    lost_until = None if intent is None else intent.not_before
    return listing.at > (lost_until or item.intended_at + window)


def wait(case: _Case) -> None:
    """Change nothing."""


def end_gone(case: _Case) -> None:
    """Take the machine as gone, once its provider had accepted its end before the list was begun."""
    if _end_accepted(case.builder, case.item, case.listing):
        case.builder.machine_gone(case.attempt_id)


def end_other_market(case: _Case) -> None:
    """End the attempt: the provider broke the contract."""
    market = None if case.mine is None else case.mine.market
    case.end(EndReason.CONTRACT_BROKEN, f"the machine is {market}, which was not agreed")


def read_in_full(case: _Case) -> None:
    """Ask for a full read of what its host wrote, before a loss is believed."""
    case.builder.read_in_full(case.attempt_id)


def end_halted(case: _Case) -> None:
    """End the attempt by the order to stop, by the reason that its provider gives, or as lost."""
    item, mine = case.item, case.mine
    if mine is None:
        return
    if item.stop is not None:
        case.end(item.stop.reason, item.stop.detail)
        return
    reason = EndReason.HOST_LOST if mine.loss is None else _LOSS_REASONS[mine.loss]
    if mine.loss is None and item.notice_at is not None:
        reason = EndReason.PREEMPTED
    case.end(reason, mine.detail or f"the provider says {mine.state.value}")


def end_unlaunched(case: _Case) -> None:
    """End the attempt: its launch never took effect, or its machine is gone although its host gave a sign of life."""
    heard_at = case.item.heartbeat_seen_at
    if heard_at is not None:
        book_unseen(case.builder, case.attempt_id, last_lived(heard_at, case.report))
    case.builder.machine_gone(case.attempt_id)
    if heard_at is not None:
        case.end(EndReason.HOST_LOST, "its host was heard, and the provider lists no machine")
    else:
        case.end(EndReason.NEVER_LAUNCHED, "the provider has no machine with its key")


def end_absent(case: _Case) -> None:
    """End the attempt by the order to stop, by its interruption notice, or as lost; book it while it was listed."""
    item = case.item
    if item.ref is None:
        end_unlaunched(case)
        return
    _book_until_missing(case.builder, item)
    if item.stop is not None:
        case.end(item.stop.reason, item.stop.detail)
    elif item.notice_at is not None:
        case.end(EndReason.PREEMPTED)
    else:
        case.end(EndReason.HOST_LOST, "the provider lists it no more")


def watch_unlisted(case: _Case) -> None:
    """Give up a launch that stays without an answer for too long; else watch its time-outs."""
    item = case.item
    if _is_unanswerable(case.builder, item, case.listing, looked=case.is_read):
        why = f"{item.provider} does not answer; the job goes on elsewhere, and the machine is ended when it is found"
        case.end(EndReason.LAUNCH_UNKNOWN, why)
    else:
        watch_clocks(case)


def watch_clocks(case: _Case) -> None:
    """End the attempt at the deadline of its order to stop, after too long a silence, or at its start's time-out."""
    patience = case.witnesses.patience(case.item, case.mine, case.listing)
    _watch_clocks(case.builder, case.attempt_id, case.report, patience, case.witnesses)


def _book_until_missing(builder: PlanBuilder, item: Attempt) -> None:
    """Book what is gone up to the first of the lists that lack it, however late it could be believed."""
    if item.missing_since is not None and item.meter.since is not None and item.meter.since < item.missing_since:
        builder.set_rate(item.id, MicroUsdPerHour(0), None, at=item.missing_since)


def _watch_clocks(
    builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus | None, patience: timedelta, witnesses: LossEvidence
) -> None:
    """Time-outs of a machine that seems to exist.

    Without a fresh look, silence is ours and not the host's, and a checkpoint may lie unseen in the store. Where there
    was only a glance, the look is asked for.
    """
    item = builder.attempt(attempt_id)
    rules = builder.policy.providers.get(item.provider)
    glanced = report is not None and report.liveness_check

    def end(reason: EndReason, detail: str = "") -> None:
        if glanced:
            builder.read_in_full(attempt_id)
        else:
            _book_until_missing(builder, item)
            builder.end_attempt(attempt_id, reason, detail)

    if item.stop is not None and (builder.now >= item.stop.deadline or _never_spoke(item, item.stop, report)):
        if report is None and builder.now < item.stop.deadline + READ_WITHIN:
            _end_unread(builder, item, item.stop)
        else:
            end(item.stop.reason, item.stop.detail)
        return
    if item.stop is not None:
        builder.wake(item.stop.deadline)
    if report is None or item.launched_at is None:
        return
    if item.heartbeat_seen_at is not None:
        seen_at = last_sign_of_life(item.heartbeat_seen_at, report)
        lost_at = seen_at + patience
        if builder.now >= lost_at and witnesses.is_silent(item):
            silence = int((builder.now - seen_at).total_seconds())
            end(EndReason.HOST_LOST, f"no sign of life for {silence} s")
        else:
            builder.wake(
                next((at for at in (seen_at + builder.policy.silence_max, lost_at) if at > builder.now), lost_at)
            )
        _look_when_late(builder, item, seen_at)
    elif rules is not None:
        late_at = start_deadline(builder, item, rules, witnesses, item.launched_at)
        if builder.now >= late_at:
            end(EndReason.PROVISION_TIMEOUT)
        else:
            builder.wake(late_at)


def _never_spoke(item: Attempt, stop: StopOrder, report: HostStatus | None) -> bool:
    """Whether a look since the order found that there is nothing to wait for."""
    if report is None or report.liveness_check or report.read_at < stop.ordered_at:
        return False
    return item.running_at is None and item.heartbeat_seen_at is None


def _end_unread(builder: PlanBuilder, item: Attempt, stop: StopOrder) -> None:
    """End the machine now, which needs the provider only, and the attempt once what it saved last can be read.

    Nothing else can begin for its job meanwhile: a launch needs the store, too.
    """
    if item.ref is None or item.machine is MachineState.GONE:
        return
    reason = stop.reason.traits.sentence.format(detail=stop.detail or "no details")
    intent = builder.intent(terminate_intent_id(item.ref))
    if intent is None or not intent.is_open:
        why = f"its time to save is over ({reason}); what it saved last is read once the checkpoint store answers"
        builder.owe_termination(item.ref, item.key, item.id, why=why)
        job = builder.job(item.id.job)
        builder.move_job(job.id, job.state, why)


def _look_when_late(builder: PlanBuilder, item: Attempt, seen_at: datetime) -> None:
    """Ask the provider of a late heartbeat, now and for a while: it may know that the machine is gone.

    The poller bounds the requests; later its usual pace is enough.
    """
    late_at = seen_at + builder.policy.silence_max * LATE_PARTS // LATE_WHOLE
    if builder.now < late_at:
        builder.wake(late_at)
    elif builder.now < late_at + LATE_FOR:
        builder.list_again(item.provider)


# --- the tables ------------------------------------------------------------------------------------------------

RECORDS: Final[Mapping[InstanceState, Callable[[PlanBuilder, Attempt, Instance], None]]] = {
    InstanceState.PENDING: record_live,
    InstanceState.RUNNING: record_live,
    InstanceState.UNKNOWN: record_live,
    InstanceState.PAUSED: record_paused,
    InstanceState.ENDING: record_ending,
    InstanceState.GONE: record_gone,
}

_COUNTS: Final[Mapping[Observed, Callable[[_Case], None]]] = {
    Observed.LISTED: watch_clocks,
    Observed.HALTED: end_halted,
    Observed.ABSENT: end_absent,
    Observed.UNREAD: read_in_full,
    Observed.OTHER_MARKET: end_other_market,
    Observed.NOTHING: watch_unlisted,
}

JUDGEMENTS: Final[Mapping[AttemptState, Mapping[Observed, Callable[[_Case], None]]]] = {
    AttemptState.INTENDED: {**_COUNTS, Observed.ABSENT: end_unlaunched},
    AttemptState.STARTING: _COUNTS,
    AttemptState.RUNNING: _COUNTS,
    AttemptState.STOPPING: _COUNTS,
    AttemptState.ENDING: {**dict.fromkeys(Observed, wait), Observed.ABSENT: end_gone},
    AttemptState.ENDED: dict.fromkeys(Observed, wait),
}


# --- machines without an attempt -------------------------------------------------------------------------------


def _end_strays(builder: PlanBuilder, listings: Mapping[ProviderName, Listing]) -> None:
    """Machines under our install label that no open attempt owns: bought by a life we do not remember."""
    owned = {(a.provider, a.key) for a in builder.attempts()}
    kept = {a.ref for a in builder.attempts() if a.ref is not None and a.state.counts}
    for provider in sorted(listings):
        for instance in listings[provider].instances:
            error = builder.attempted(partial(_end_if_stray, builder, provider, instance, owned, kept))
            if error is not None:
                builder.note_contained(f"a machine in the listing of {provider}", in_words(error))
    for intent in builder.intents():
        error = builder.attempted(partial(_settle_stray, builder, intent, listings.get(intent.provider)))
        if error is not None:
            builder.note_contained(f"the end of the machine {intent.key}", in_words(error))


def _end_if_stray(
    builder: PlanBuilder,
    provider: ProviderName,
    instance: Instance,
    owned: Collection[tuple[ProviderName, AttemptKey]],
    kept: Collection[InstanceRef],
) -> None:
    if (provider, instance.key) in owned or instance.state is InstanceState.GONE:
        return
    if not is_own_key(builder.policy, instance.key) or instance.ref in kept:
        return  # however its label reads now, the machine of an attempt that counts is no stray
    if builder.policy.identity_sure:
        builder.owe_termination(instance.ref, instance.key, None, why="no open attempt owns this machine")
        note_stray(builder, instance)


def _settle_stray(builder: PlanBuilder, intent: Intent, seen: Listing | None) -> None:
    if intent.kind is not IntentKind.TERMINATE or intent.attempt is not None or intent.ref is None:
        return
    if seen is None or not seen.complete or intent.accepted_at is None or seen.at <= intent.accepted_at:
        return
    rules = builder.policy.providers.get(intent.provider)
    if rules is not None and rules.is_other_account(intent.account):
        return
    if not any(i.ref == intent.ref and i.state is not InstanceState.GONE for i in seen.instances):
        builder.put_intent(replace(intent, state=IntentState.DONE))
        cost = stray_cost(intent, intent.accepted_at)
        builder.event(
            "machine.gone",
            f"a machine without an attempt is gone; it cost about ${as_usd(cost):.4f}, which no job pays",
            key=intent.key,
            provider=intent.provider,
            cost_microusd=cost,
        )
    elif builder.now - intent.accepted_at >= TERMINATE_AGAIN_AFTER:
        builder.put_intent(replace(intent, state=IntentState.OPEN, accepted_at=None, not_before=None))
