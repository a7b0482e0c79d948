"""What providers list and hosts wrote, turned into what is true now.

Theory. Every attempt that has not ended is compared with the newest listing of its provider and the newest read of
what its host wrote. The read is always newer than the listing it is judged with, so nothing a host published before
it died is missed. What a list shows of an instance is recorded first (`RECORDS`), then what its host reports of its
end; last, the attempt is judged by the row of its state and what was observed (`JUDGEMENTS`). `docs/states.md` shows
both tables, of `listed` and `judgements`. A machine that no attempt owns is ended (`end_orphans`).

How list and heartbeat are weighed against each other is the theory of `loss_evidence`, and of `is_doubted` where a row
contradicts a host that lives.

An incomplete listing proves what it shows and nothing else; with no listing and no read, everything is held. Most
reads are a liveness check of all hosts (`HostStatus.liveness_check`): it keeps an attempt alive, and what would end
one asks for a full read of that host first.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial

from spotd.core.bids import note_bid, note_sign_of_life
from spotd.core.billing import ENDING_TAKES, began_unseen, ended_there, has_booked_time, ran_until
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.handover import take_from_former
from spotd.core.host_reports import absorb, exited
from spotd.core.kernel.judgements import Case, as_unknown, is_doubted, judge
from spotd.core.kernel.launch_calls import follow_terms, record_instance
from spotd.core.kernel.listed import end_orphans, is_outdated, note_stray, record
from spotd.core.kernel.loss_evidence import InstancesByKey, LossEvidence, held_back, instances_by_key
from spotd.core.kernel.quarantine import contain, guarded, in_words, quarantine
from spotd.core.metering import STOPPED
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, Listing, MicroUsdPerHour, ProviderName


def reconcile(
    world: World,
    listings: Mapping[ProviderName, Listing],
    reports: Mapping[AttemptId, HostStatus],
    now: datetime,
) -> Plan:
    """Return what the newest readings change. Orders of the plan's rows are deterministic."""
    return guarded(lambda some: _Reconciliation(some, reports, now).run(listings), world, now)


class _Reconciliation:
    """One reconciliation; exists for the length of one call."""

    def __init__(self, world: World, reports: Mapping[AttemptId, HostStatus], now: datetime) -> None:
        self.builder = PlanBuilder(world, now)
        self.reports = reports

    def run(self, listings: Mapping[ProviderName, Listing]) -> Plan:
        builder = self.builder
        for item in builder.attempts():
            if item.state.counts:
                contain(builder, item.id.job, partial(follow_terms, builder, item.id), "its price cannot be stated")
            report = self.reports.get(item.id)
            if report is not None:
                what = f"what the host of attempt {item.id.number} wrote cannot be judged"
                contain(builder, item.id.job, partial(absorb, builder, item.id, report), what)
        self.evidence = LossEvidence(builder, self.reports)
        for why in self.evidence.shared_silence():
            builder.note_shared_silence(why)
        listings, self.held = self._usable(listings)
        builder.listed_at = {provider: listing.at for provider, listing in listings.items()}
        listed = instances_by_key(listings)
        self._owned = {a.ref: a.id for a in builder.attempts() if a.ref is not None and a.state.counts}
        for item in builder.attempts():
            self._judge_alone(item, listings.get(item.provider), listed)
        end_orphans(builder, listings)
        return builder.plan()

    def _usable(
        self, listings: Mapping[ProviderName, Listing]
    ) -> tuple[dict[ProviderName, Listing], frozenset[AttemptId]]:
        """Return the listings that can be read at all, and the attempts whose absence from them is not believed yet."""
        usable: dict[ProviderName, Listing] = {}
        held: set[AttemptId] = set()
        for provider in sorted(listings):
            listing = listings[provider]

            def read(provider: ProviderName = provider, listing: Listing = listing) -> None:
                held.update(held_back(self.builder, provider, listing, self.evidence))

            error = self.builder.attempted(read)
            if error is None:
                usable[provider] = listing
            else:
                self.builder.note_contained(f"the listing of {provider}", in_words(error))
        return usable, frozenset(held)

    def _judge_alone(self, item: Attempt, listing: Listing | None, listed: InstancesByKey) -> None:
        """Judge one attempt; a listing that makes this raise counts for it as none, and only then is it quarantined."""
        builder = self.builder
        error = builder.attempted(partial(self._judge, item.id, listing, listed))
        if error is None:
            return
        if listing is not None and builder.attempted(partial(self._judge, item.id, None, {})) is None:
            builder.note_contained(f"the listing of {item.provider} about {item.carried_key}", in_words(error))
            return
        quarantine(builder, item.id.job, f"attempt {item.id.number} cannot be judged ({in_words(error)})")

    def _judge(self, attempt_id: AttemptId, listing: Listing | None, listed: InstancesByKey) -> None:
        builder, report = self.builder, self.reports.get(attempt_id)
        item = builder.attempt(attempt_id)
        mine = _pick(builder, item, listed.get((item.provider, item.carried_key), ()), self._owned)
        if mine is not None and item.ref is None:
            mine = _adopt(builder, attempt_id, mine, report)
            self._owned |= {mine.ref: attempt_id} if item.state.counts else {}  # the next one may carry the same key
        if item.state.counts and report is not None:
            note_sign_of_life(builder, item, report, listing)
        item = builder.attempt(attempt_id)
        if mine is not None and listing is not None and is_doubted(builder, item, mine, listing, report, self.evidence):
            mine = as_unknown(mine)
        elif mine is not None and (mine.state is InstanceState.GONE or not is_outdated(builder, item, listing)):
            note_bid(builder, attempt_id, mine, listing)
            record(builder, attempt_id, mine)
        if builder.attempt(attempt_id).state.counts and report is not None and report.exit_reason is not None:
            exited(builder, attempt_id, report)
        if builder.attempt(attempt_id).state.counts and report is not None and report.flood:
            builder.end_attempt(attempt_id, EndReason.FLOODED, report.flood)
        judge(
            Case(
                builder=builder,
                attempt_id=attempt_id,
                listing=listing,
                mine=mine,
                report=report,
                is_held=attempt_id in self.held,
                evidence=self.evidence,
            )
        )


def _pick(
    builder: PlanBuilder, item: Attempt, found: tuple[Instance, ...], owned: Mapping[InstanceRef, AttemptId]
) -> Instance | None:
    """Return the machine of this attempt among those that carry its key; the others are doubles and are ended.

    The machine of another attempt is none, whatever key a row gives it, but for the former one of a handover.
    """
    is_new = bool(found) and item.ref is None and item.machine_key is None
    others = {a.ref for a in builder.attempts() if a.id != item.id} if is_new else set()
    found = tuple(i for i in found if owned.get(i.ref, item.id) == item.id and i.ref not in others)
    if item.ref is not None:
        chosen = next((i for i in found if i.ref == item.ref), None)
    else:
        ranked = sorted(found, key=lambda i: (i.state is not InstanceState.RUNNING, i.state in STOPPED))
        chosen = ranked[0] if ranked else None
    for other in found:
        if other is not chosen and other.state is not InstanceState.GONE:
            builder.owe_termination(
                other.ref, other.key, None, why=f"a second machine carries the key of attempt {item.id.number}"
            )
            note_stray(builder, other)
    return chosen


def _adopt(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance, report: HostStatus | None) -> Instance:
    """Record that a launch (or handover) with an unknown outcome took effect; return its row, with any stated end."""
    item = builder.attempt(attempt_id)
    take_from_former(builder, item, mine.ref)
    since, proven_at = began_unseen(builder, item, mine.created_at), item.proven_at
    if has_booked_time(item):
        # What came before is booked by its host's word; a machine that still runs has billed ever since.
        since = builder.now if mine.state in STOPPED else min(builder.now, item.ended_at or builder.now)
    record_instance(builder, item, mine, launched_at=since, billed_since=since, found=True)
    if mine.state not in STOPPED:
        return mine
    item = replace(builder.attempt(attempt_id), proven_at=proven_at)
    builder.put_attempt(item)
    exit_at = None if report is None else ended_there(report)
    if exit_at is not None and mine.ended_at is None and item.meter.until is not None:
        mine = replace(mine, ended_at=exit_at + ENDING_TAKES)
    if exit_at is not None and mine.ended_at is not None and mine.state is InstanceState.GONE:
        # One list does not prove that it is gone, but its host says, too, that it computes no more.
        builder.set_rate(attempt_id, MicroUsdPerHour(0), None, at=ran_until(item, mine.ended_at, builder.now))
    return mine
