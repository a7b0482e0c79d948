"""Two sources on a machine: its provider's list and its own heartbeat. It is lost only when both show it.

Theory. A list may lie: it may be empty, cut off, or late. A silence may be the checkpoint store's: hosts cannot write,
and the daemon can read. So neither ends a machine alone, unless for very long:

* A machine that a complete list lacks is kept as long as its heartbeats arrive. It is lost once it is silent, too. One
  that never gave a sign of life must be missing for as long as lists may lag, or from the list after the one that
  stated it as over. A machine that gave a sign of life once must be missing from two lists, however many others are; a
  list that lacks more than a third of a provider's machines is an event.
* One that is outbid and held cannot speak: two complete lists that lack it are enough, unless hosts cannot write.
* A machine that is silent is kept as long as its provider does not say that it is gone, up to `silence_limit`: its own
  lease ends it before, if it lives at all. Where the provider itself has lost sight of it, the time a list may lag is
  enough.
* Where most hosts fell silent at the same time, or the store takes no writes from the daemon either, the silence is the
  store's and no evidence: lists must lack the machine for as long as they may lag, and the limit is four times as long.

A silence counts only as far as it was watched: a clock that jumps, or a computer that slept, saw nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from spotd.core.billing import charge_unseen, last_lived, ran_until
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState, StopOrder
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, IntentState
from spotd.core.domain.states import EndReason
from spotd.core.handover import CONFIRMED_WITHIN
from spotd.core.host_reports import last_sign_of_life
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import AttemptKey, Instance, InstanceState, Listing, MicroUsdPerHour, ProviderName

SHARED_FACTOR: Final = 4
"""By how much longer a silence is borne that is the store's and not the host's."""
SHARED_MIN: Final = 2
SHARED_PARTS: Final = 3
"""A silence is the store's once it is that of more than one in so many hosts."""


class LossEvidence:
    """When each host lived last, by the newest reports. Made once for each judgement of the world."""

    def __init__(self, builder: PlanBuilder, reports: Mapping[AttemptId, HostStatus]) -> None:
        self._builder = builder
        self._reports = reports
        self._silence_max = builder.policy.silence_max
        self._signs: dict[AttemptId, datetime] = {}
        for item in builder.attempts():
            report = reports.get(item.id)
            if is_mute(item):
                continue
            if item.state.counts and report is not None and item.heartbeat_seen_at is not None:
                self._signs[item.id] = last_sign_of_life(item.heartbeat_seen_at, report)
        self._shared = self._silent_together(builder)

    def _silent_together(self, builder: PlanBuilder) -> frozenset[AttemptId]:
        """Return attempts that fell silent at the same time as most other hosts did; each physical host counts once."""
        if all(builder.now - sign < self._silence_max for sign in self._signs.values()):
            return frozenset()
        by_host: dict[str, datetime] = {}
        hosts: dict[AttemptId, str] = {}
        for identity, sign in self._signs.items():
            offer = builder.attempt(identity).quote.offer
            host = f"{offer.provider} {offer.host_id or identity}"
            hosts[identity] = host
            by_host[host] = max(sign, by_host.get(host, sign))
        silent = sorted(sign for sign in by_host.values() if builder.now - sign >= self._silence_max)
        found: set[AttemptId] = set()
        for identity, host in hosts.items():
            sign = by_host[host]
            if builder.now - sign < self._silence_max:
                continue
            first = bisect_left(silent, sign - self._silence_max)
            together = bisect_right(silent, sign + self._silence_max) - first
            if together >= SHARED_MIN and together * SHARED_PARTS > len(by_host):
                found.add(identity)
        return frozenset(found)

    def sign(self, item: Attempt) -> datetime | None:
        """When the host gave its last sign of life; `None` before the first, and where nothing was read of it."""
        return self._signs.get(item.id)

    def is_silent(self, item: Attempt) -> bool:
        """Whether the host gave no sign of life for long, while it was watched."""
        sign = self.sign(item)
        if sign is None or self._builder.now - sign < self._silence_max:
            return False
        watched = self._builder.read_before(item.id)
        return watched is None or watched - sign >= self._silence_max / 2

    def is_shared(self, item: Attempt) -> bool:
        """Whether its silence is the store's and not its own."""
        report = self._reports.get(item.id)
        return item.id in self._shared or (report is not None and report.store_takes_no_writes)

    @property
    def hosts_cannot_write(self) -> bool:
        """Whether the checkpoint store is known to take nothing that hosts write."""
        return bool(self._shared) or any(report.store_takes_no_writes for report in self._reports.values())

    def confirm_absence(self, item: Attempt, listing: Listing) -> bool:
        """Whether the machine that this complete list lacks is gone: of a silent host two lists lack it.

        One list may lack a row, and a host that lives may be unable to write for a while.
        """
        missing = listing.at - (item.missing_since or listing.at)
        sign = self.sign(item)
        if is_mute(item):
            return missing > (self._builder.policy.list_lag(item.provider) if self.hosts_cannot_write else timedelta(0))
        if sign is None:
            was_over = item.over_since is not None and listing.at > item.over_since
            is_believed = was_over or missing >= self._builder.policy.list_lag(item.provider)
            return item.heartbeat_seen_at is None and is_believed
        if not self.is_silent(item) or listing.at <= sign:
            return False
        if self.is_shared(item):
            return missing >= self._builder.policy.list_lag(item.provider)
        return missing > timedelta(0)

    def patience(self, item: Attempt, mine: Instance | None, listing: Listing | None) -> timedelta:
        """How long a silence is accepted while its provider does not report that the machine is gone."""
        limit = self._builder.policy.silence_limit
        if self.is_shared(item):
            return limit * SHARED_FACTOR
        sign = self.sign(item)
        blind = mine is not None and mine.state is InstanceState.UNKNOWN
        if blind and listing is not None and sign is not None and listing.at > sign:
            return min(limit, max(self._silence_max, self._builder.policy.list_lag(item.provider)))
        return limit

    def shared_silence(self) -> tuple[str, ...]:
        """Why silence is no evidence at the moment, in words."""
        if any(report.store_takes_no_writes for report in self._reports.values()):
            return ("the checkpoint store takes no writes, so that a silent host is not taken for lost",)
        if self._shared:
            silent = f"{len(self._shared)} of {len(self._signs)} machines fell silent at once"
            return (f"{silent}: that is taken for an outage of the checkpoint store, and none of them for lost",)
        return ()


def is_mute(item: Attempt) -> bool:
    """Whether it is an outbid machine that is held: it cannot speak before it wakes."""
    since, spoke = item.bidding.held_since, item.heartbeat_seen_at
    return since is not None and (spoke is None or spoke <= since)


# Machines that a complete list lacks, and when their absence is believed.

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
    found = listed.get((item.provider, item.carried_key), ())
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
    believed_at = _first_missing(builder, item, listing) + builder.policy.list_lag(item.provider)
    if listing.at >= believed_at:
        return True
    if builder.now < believed_at:
        builder.wake(believed_at)
    else:
        builder.list_again(item.provider)
    return False


def is_missing_twice(builder: PlanBuilder, item: Attempt, listing: Listing) -> bool:
    """Whether two lists lack the machine of an unanswered launch since its last sign: one list may lack a row."""
    if listing.at > _first_missing(builder, item, listing):
        return True
    builder.list_again(item.provider)
    return False


def _first_missing(builder: PlanBuilder, item: Attempt, listing: Listing) -> datetime:
    """Return when the first list since its last sign of life lacked it, and write that down."""
    since, sign = item.missing_since, item.heartbeat_seen_at
    if since is None or (sign is not None and since <= sign):
        since = listing.at
        builder.put_attempt(replace(item, missing_since=since))
    return since


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


# How long a machine may start, and why it gets longer while nothing that it wrote could arrive.
#
# Theory. A machine that never gave a sign of life is given up after its provider's time for a start. Where the
# checkpoint store is known to take no writes from hosts, or was until a moment ago, its sign of life could not arrive:
# to give it up would only buy the next one, whose could not arrive either. So its time is prolonged in small steps for
# as long as the outage is known, and ends a little after it. Its budget, its provider's word and a limit end it all the
# same.

PARTS_MAX: Final = 4
"""However long the store is away, no machine starts for longer than so many times its provider's time for a start."""
GRACE: Final = 2
"""After the outage a host gives a sign of life within so many times the silence that is borne of a host that runs."""


def start_deadline(builder: PlanBuilder, item: Attempt, evidence: LossEvidence, launched_at: datetime) -> datetime:
    """When the machine is given up if it has not spoken since its launch; written down while that moves."""
    timeout = builder.policy.provision_timeout(item.provider)
    usual = launched_at + (CONFIRMED_WITHIN if item.speaks_at_once else timeout)
    limit = launched_at + PARTS_MAX * timeout
    known = usual if item.start_deadline is None else max(usual, item.start_deadline)
    grace = GRACE * builder.policy.silence_max
    if not evidence.hosts_cannot_write or known - builder.now > grace / 2:
        return known
    until = min(limit, builder.now + grace)
    if until <= known:
        return known
    if item.start_deadline is None:
        builder.event("attempt.unheard", "nothing that it writes can arrive: it is given more time", attempt=item.id)
    builder.put_attempt(replace(item, start_deadline=until))
    return until


# Time-outs of a machine that seems to exist: of its order to stop, of its silence, of its start.
#
# Without a read of its host since, silence is the daemon's and not the host's, and a checkpoint may lie unseen in the
# store. Where only the host's liveness was checked, a full read is asked for first.

READ_WITHIN: Final = timedelta(hours=24)
"""For so long after its machine was ended an attempt waits until what it saved last can be read."""

LATE_PARTS: Final = 3
LATE_WHOLE: Final = 5
"""A host is late after this part of the silence that would end it: well before two heartbeats were missed."""
LATE_FOR: Final = timedelta(minutes=2)


def watch_timeouts(
    builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus | None, patience: timedelta, evidence: LossEvidence
) -> None:
    """End the attempt once one of its time-outs has passed, or wake for the next of them."""
    item = builder.attempt(attempt_id)

    def end(reason: EndReason, detail: str = "") -> None:
        if report is not None and report.liveness_check:
            builder.read_in_full(attempt_id)
        else:
            if item.ref is None and item.heartbeat_seen_at is not None:
                charge_unseen(builder, attempt_id, last_lived(item, item.heartbeat_seen_at, report))
            settle_until_missing(builder, item)
            builder.end_attempt(attempt_id, reason, detail)

    if item.stop is not None and (builder.now >= item.stop.deadline or _never_spoke(item, item.stop, report)):
        if report is None and builder.now < item.stop.deadline + READ_WITHIN:
            _end_unread(builder, item, item.stop)
        else:
            end(item.stop.reason, item.stop.detail)
        return
    if item.stop is not None:
        builder.wake(item.stop.deadline)
    if report is None or (item.launched_at is None and item.heartbeat_seen_at is None):
        return
    if item.heartbeat_seen_at is not None:
        seen_at = last_sign_of_life(item.heartbeat_seen_at, report)
        lost_at = seen_at + patience
        if builder.now >= lost_at and evidence.is_silent(item):
            end(EndReason.HOST_LOST, f"no sign of life for {int((builder.now - seen_at).total_seconds())} s")
        else:
            silent_at = seen_at + builder.policy.silence_max
            builder.wake(next((at for at in (silent_at, lost_at) if at > builder.now), lost_at))
        _list_when_late(builder, item, seen_at)
    elif item.launched_at is not None:
        within = builder.job(attempt_id.job).spec.replace_within
        late_at = start_deadline(builder, item, evidence, item.comes_since(item.launched_at, within, builder.now))
        if builder.now >= late_at:
            end(EndReason.PROVISION_TIMEOUT)
        else:
            builder.wake(late_at)


def _never_spoke(item: Attempt, stop: StopOrder, report: HostStatus | None) -> bool:
    """Whether a full read since the order found that there is nothing to wait for."""
    if report is None or report.liveness_check or report.read_at < stop.ordered_at:
        return False
    return item.running_at is None and item.heartbeat_seen_at is None


def _end_unread(builder: PlanBuilder, item: Attempt, stop: StopOrder) -> None:
    """End the machine now, which needs the provider only, and the attempt once what it saved last can be read.

    Nothing else can begin for its job meanwhile: a launch needs the store, too.
    """
    if item.ref is None or item.machine is MachineState.GONE:
        return
    intent = builder.end_order(item)
    if intent is None or not intent.is_open:
        reason = stop.reason.sentence(stop.detail)
        why = f"its time to save is over ({reason}); what it saved last is read once the checkpoint store answers"
        builder.owe_end(item, why)
        job = builder.job(item.id.job)
        builder.move_job(job.id, job.state, why)


def _list_when_late(builder: PlanBuilder, item: Attempt, seen_at: datetime) -> None:
    """Ask the provider about a late heartbeat, now and for a while: it may know that the machine is gone.

    The poller bounds the requests; later its usual pace is enough.
    """
    late_at = seen_at + builder.policy.silence_max * LATE_PARTS // LATE_WHOLE
    if builder.now < late_at:
        builder.wake(late_at)
    elif builder.now < late_at + LATE_FOR:
        builder.list_again(item.provider)
