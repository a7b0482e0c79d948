"""Machines that a complete list lacks, and when their absence is believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spotd.core.billing.billing import ran_until
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.intents import IntentState
from spotd.core.machines.loss_evidence import LossEvidence, is_mute
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import AttemptKey, Instance, Listing, ProviderName

InstancesByKey = Mapping[tuple[ProviderName, AttemptKey], tuple[Instance, ...]]


def instances_by_key(listings: Mapping[ProviderName, Listing]) -> InstancesByKey:
    """Return the listed instances of each key, in order of their ids."""
    found: defaultdict[tuple[ProviderName, AttemptKey], list[Instance]] = defaultdict(list)
    for provider in sorted(listings):
        for instance in listings[provider].instances:
            found[provider, instance.key].append(instance)
    return {
        key: tuple(group) if len(group) == 1 else tuple(sorted(group, key=lambda i: i.ref.instance_id))
        for key, group in found.items()
    }


def held_back(
    builder: PlanBuilder, provider: ProviderName, listing: Listing, evidence: LossEvidence
) -> frozenset[AttemptId]:
    """Return attempts whose absence from this list is not believed yet."""
    listed = instances_by_key({provider: listing})  # of every listing: one that cannot be read raises here
    if not listing.complete:
        return frozenset()
    tracked = [
        a
        for a in builder.attempts()
        if a.provider == provider and a.machine is MachineState.LIVE and proves_absence(builder, a, listing)
    ]
    missing = [a for a in tracked if not _is_listed(a, listed)]
    for item in tracked:
        if item.missing_since is not None and _is_listed(item, listed):
            builder.put_attempt(replace(item, missing_since=None))
    held: set[AttemptId] = set()
    large = len(missing) * 3 > len(tracked)
    for item in (a for a in missing if a.state.counts):
        if item.missing_since is None:
            builder.put_attempt(replace(item, missing_since=listing.at))
            builder.list_again(provider)
            if large:  # `why` shows one that a list lacks now and then: an event each time would be too many
                _note_missing(builder, item, f"{len(missing)} of {len(tracked)} machines")
        item = builder.attempt(item.id)
        if not evidence.confirm_absence(item, listing):
            held.add(item.id)
            _list_when_it_decides(builder, item, listing, evidence)
    return frozenset(held)


def _is_listed(item: Attempt, listed: InstancesByKey) -> bool:
    """Whether a list has the very machine of this attempt; another one with its key proves nothing about it."""
    found = listed.get((item.provider, item.key), ())
    return bool(found) if item.ref is None else any(i.ref == item.ref for i in found)


def _note_missing(builder: PlanBuilder, item: Attempt, how_many: str) -> None:
    builder.event(
        "machine.missing",
        f"the list of {item.provider} lacks {how_many}, among them this one: it is kept until its heartbeats stop, too",
        attempt=item.id,
    )


def _list_when_it_decides(builder: PlanBuilder, item: Attempt, listing: Listing, evidence: LossEvidence) -> None:
    """Ask for another list as soon as one can decide."""
    sign, missing_since = evidence.sign(item), item.missing_since
    if is_mute(item) and not evidence.hosts_cannot_write:
        builder.list_again(item.provider)
        return
    if sign is not None:
        due = sign + builder.policy.silence_max
    elif missing_since is not None:
        due = missing_since + builder.policy.list_lag(item.provider)
    else:
        return
    if builder.now < due:
        builder.wake(due)
    elif listing.at < due or evidence.is_silent(item):
        builder.list_again(item.provider)


def is_missing_for_long(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether lists lack the machine of an unanswered launch for as long as they may lag.

    If it exists, its host is out of reach at the moment, so that one wrong list is all that would speak against it.
    """
    if item.missing_since is None:
        item = replace(item, missing_since=listing.at)
        builder.put_attempt(item)
    believed_at = (item.missing_since or listing.at) + builder.policy.list_lag(item.provider)
    if listing.at >= believed_at:
        return True
    if builder.now < believed_at:
        builder.wake(believed_at)
    else:
        builder.list_again(item.provider)
    return False


def is_missing_twice(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether two lists lack the machine of an unanswered launch: one may lack a row, and its host may be mute."""
    if item.missing_since is None:
        builder.put_attempt(replace(item, missing_since=listing.at))
    elif listing.at > item.missing_since:
        return True
    builder.list_again(item.provider)
    return False


def proves_absence(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether absence from this listing says anything about the attempt's machine."""
    rules = builder.policy.providers.get(item.provider)
    if rules is not None and rules.is_other_account(item.account):
        return False  # the lists of the account in use never had it
    window = builder.policy.list_lag(item.provider)
    if item.ever_listed:
        return item.launched_at is None or listing.at > item.launched_at
    if item.ref is not None:
        return listing.at > (item.launched_at or item.intended_at) + window
    intent = builder.launch_order(item)
    if intent is not None and intent.state in {IntentState.OPEN, IntentState.SENT}:
        return False  # its call is under way in this process, however long it queued
    lost_until = None if intent is None else intent.not_before
    return listing.at > (lost_until or item.intended_at + window)


def settle_until_missing(builder: PlanBuilder, item: Attempt) -> None:
    """Settle what is gone up to the first of the lists that lack it, however late it could be believed.

    If that list came long after the newest proof of its life, up to that proof.
    """
    if item.missing_since is not None and item.meter.since is not None and item.meter.since <= item.missing_since:
        builder.set_rate(item.id, MicroUsdPerHour(0), None, at=ran_until(item, None, item.missing_since))
