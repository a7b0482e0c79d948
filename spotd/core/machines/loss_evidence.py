"""Two sources on a machine: its provider's list and its own heartbeat. It is lost only when both show it.

Theory. A list may lie: it may be empty, cut off, or late. A silence may be the checkpoint store's: hosts cannot write,
and the daemon can read. So neither ends a machine alone, unless for very long:

* A machine that a complete list lacks is kept as long as its heartbeats arrive. It is lost once it is silent, too. One
  that never gave a sign of life must be missing for as long as lists may lag, or from the list after the one that
  stated it as over. Where a list lacks more than a third of
  a provider's machines, the next list must lack them, too.
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
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.machines.host_reports import last_sign_of_life
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.values import Instance, InstanceState, Listing

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
