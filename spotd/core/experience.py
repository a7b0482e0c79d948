"""How many losses per machine hour are to be expected of an offer: gamma-Poisson, from coarse to fine.

Theory. Losses in so many machine hours are Poisson; a gamma prior of mean m and weight of K hours makes the mean after
n losses in H hours

    (m K + n) / (K + H)

which is m without evidence and n / H with much. The prior of each level is the estimate of the coarser one, made of
what was seen outside the finer one, so that nothing counts twice: the other providers in this market (spot or
on-demand), the provider elsewhere, and then the host, or the pool where hosts have no names. What the provider itself
states is the prior where it is higher. So one loss on a host says little where its provider has shown a hundred quiet
hours, and a provider without any record counts like the others. The provider's own hours of the week then raise or
lower the result: losses seen in the parts of the week that come next, against those that were to be expected there,
each with `TIME_PRIOR` events of weight, and by no more than `TIME_FACTOR_MAX`.

One host is one sample of its provider. Beyond `HOST_LOSSES_MAX` losses its evidence counts there with a lower weight
and at its own rate: as that many losses, in as much less time. So a host that loses every machine within minutes ranks
behind all others by what it did itself, and the rest of its provider by what two losses say.

Ends that are ours (done, cancelled, over budget, moved) add hours and no loss: they are censored. So do the machines
that run now, whose hours count up to this moment.

Rankings begin from a prior of 0: where nothing was ever lost, nothing is added, and offers rank by price alone. Advice
on checkpoints must not trust a machine because nothing is known of it, and begins from one loss in the usual stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.world import OF_HOSTS, ONE, Experience, Record, RecordId, RecordKind, faded, is_faded, kept_share
from spotd.core.metering import metered_until
from spotd_providers.contract.values import HostId, Market, Offer, ProviderName

PPM: Final = 1_000_000
PRIOR_WEIGHT: Final = timedelta(hours=24)
"""K: machine hours after which a level's own evidence counts as much as its prior."""
ROUNDED: Final = 4
"""What an estimate of an estimate may be rounded up by."""
HOST_LOSSES_MAX: Final = 2 * ONE
"""What of the losses of one host counts as evidence about other hosts of its provider, at the most."""
HAZARD_PPM_MAX: Final = 1_000_000
"""No machine counts as lost more often than every hour."""
STATED_PPM_MAX: Final = 100_000
"""No provider's own figure counts as more than a loss every ten hours."""
PROOF_LOSSES_MIN: Final = 3 * ONE
"""Fewer losses prove no hazard without a prior."""
PROVED_PPM_MAX: Final = 60 * PPM
"""No machine is proved to be lost more often than every minute."""
PROOF_QUANTILE: Final = 1.645
"""Of the normal distribution: the hazard is at least so high with 95 %."""
SLOT_HOURS: Final = 3
SLOTS: Final = 7 * 24 // SLOT_HOURS
AHEAD_SLOTS: Final = 2
"""The hazard of the next hours counts, those of a usual stay."""
TIME_PRIOR: Final = 3 * ONE
TIME_FACTOR_MAX: Final = 3
_TICK: Final = timedelta(microseconds=1)
_HOUR: Final = timedelta(hours=1)
_HOUR_TICKS: Final = _HOUR // _TICK
_WEIGHT_TICKS: Final = PRIOR_WEIGHT // _TICK

_Evidence = tuple[int, int]
"""Losses, in millionths, and machine time, in microseconds."""


def slot_of(at: datetime) -> int:
    """Return the part of the week, in UTC, that holds this instant."""
    local = at.astimezone(UTC)
    return (local.weekday() * 24 + local.hour) // SLOT_HOURS


def loss_records(offer: Offer) -> tuple[RecordId, ...]:
    """Return the records to which a loss of a machine of this offer is added: provider, pool and, if named, host."""
    return _loss_records(offer.provider, offer.market.value, str(offer.pool), offer.host_id)


@lru_cache(maxsize=8192)  # the same offers are ranked in every cycle
def _loss_records(provider: ProviderName, market: str, pool: str, host: str | None) -> tuple[RecordId, ...]:
    found = (
        RecordId(kind=RecordKind.LOSSES_PROVIDER, provider=provider, subject=market),
        RecordId(kind=RecordKind.LOSSES_POOL, provider=provider, subject=f"{market} {pool}"),
    )
    if host is None:
        return found
    return (*found, RecordId(kind=RecordKind.LOSSES_HOST, provider=provider, subject=f"{market} {host}"))


def time_subject(market: Market, slot: int) -> str:
    return f"{market.value} {slot}"


def exposure(item: Attempt, now: datetime) -> tuple[datetime, datetime] | None:
    """Return from when to when the attempt had a machine, as far as that is proved; `None` where it had none."""
    if item.launched_at is None:
        return None
    until = metered_until(item.meter, min(now, item.ended_at or now))
    return (item.launched_at, until) if until > item.launched_at else None


class Hazards:
    """The losses per machine hour that are to be expected of offers, in one decision.

    Args:
        prior_ppm: losses in a million machine hours where nothing is known, on the spot market.
    """

    def __init__(
        self, experience: Experience, now: datetime, attempts: Collection[Attempt] = (), *, prior_ppm: int = 0
    ) -> None:
        self._experience = experience
        self._now = now
        self._prior_ppm = prior_ppm
        self._attempts = attempts if experience else ()
        self._evidence: dict[RecordId, _Evidence] = {}
        self._others: dict[RecordId, int] = {}
        self._factors: dict[tuple[ProviderName, Market], int] = {}
        self._offers: dict[tuple[ProviderName, Market, str, str | None, int], int] = {}

    @cached_property
    def _running(self) -> Mapping[RecordId, int]:
        """The machine time of what runs now, by record. Added up only where an offer is judged: mostly none is."""
        found: dict[RecordId, int] = {}
        for item in self._attempts:
            span = exposure(item, self._now) if item.state.counts else None
            if span is not None:
                for identity in loss_records(item.quote.offer):
                    found[identity] = found.get(identity, 0) + (span[1] - span[0]) // _TICK
        return found

    def of(self, offer: Offer) -> int:
        """Return the losses in a million hours of a machine of this offer."""
        stated = max(0, min(offer.hazard_ppm or 0, STATED_PPM_MAX))
        if not self._experience and not self._prior_ppm:
            return stated
        key = (offer.provider, offer.market, str(offer.pool), offer.host_id, stated)
        found = self._offers.get(key)
        if found is None:
            found = self._offers[key] = self._estimate(offer, stated)
        return found

    def _estimate(self, offer: Offer, stated: int) -> int:
        """Return the estimate of the offer's host, or of its pool where hosts have no names."""
        of_provider, *_, finest = loss_records(offer)
        prior, own = max(stated, self._of_others(of_provider)), self._losses_and_ticks(finest)
        rest = self._rest_of_provider(of_provider, finest, own)
        estimate = _posterior(_posterior(prior, rest), own)
        return min(HAZARD_PPM_MAX, estimate * self._time_factor(offer.provider, offer.market) // PPM)

    def proved_of(self, offer: Offer) -> int:
        """Return the losses in a million hours that what was seen proves by itself, whatever was expected before.

        A prior that weighs a day needs hours of evidence; four losses in some minutes are evidence enough. Each level
        counts from `PROOF_LOSSES_MIN` losses on, so that one bad host proves nothing of its provider.
        """
        of_provider, *_, finest = loss_records(offer)
        return max(_hazard_bound(self._evidence_of(of_provider)), _hazard_bound(self._losses_and_ticks(finest)))

    def _rest_of_provider(self, of_provider: RecordId, finest: RecordId, own: _Evidence) -> _Evidence:
        """Return what was seen of this provider and market outside the finest record.

        What a pool counts of its bad hosts is not known, so that a pool is compared with all that was seen.
        """
        if finest.kind is RecordKind.LOSSES_HOST:
            return _without(self._evidence_of(of_provider), _held_to(own, HOST_LOSSES_MAX))
        return _without(self._losses_and_ticks(of_provider), own)

    def _evidence_of(self, of_provider: RecordId) -> _Evidence:
        """Return what was seen of this provider and market, each host with no more than its weight."""
        beyond = self._beyond.get((of_provider.provider, of_provider.subject))
        seen = self._losses_and_ticks(of_provider)
        return seen if beyond is None else _without(seen, beyond)

    @cached_property
    def _beyond(self) -> dict[tuple[ProviderName, str], _Evidence]:
        """What of the evidence about each provider and market is beyond the weight of one host."""
        found: dict[tuple[ProviderName, str], _Evidence] = {}
        for identity, record in self._experience.items():
            if identity.kind is not RecordKind.LOSSES_HOST or record.count <= HOST_LOSSES_MAX:
                continue
            own = self._losses_and_ticks(identity)
            count, ticks = _without(own, _held_to(own, HOST_LOSSES_MAX))
            level = identity.provider, identity.subject.partition(" ")[0]
            before = found.get(level, (0, 0))
            found[level] = before[0] + count, before[1] + ticks
        return found

    def evidence_of(self, offer: Offer) -> tuple[int, timedelta]:
        """Return the losses, in millionths, and machine time at this offer's provider in its market."""
        count, ticks = self._losses_and_ticks(loss_records(offer)[0])
        return count, ticks * _TICK

    def _of_others(self, of_provider: RecordId) -> int:
        """Return the estimate of the other providers in the same market."""
        found = self._others.get(of_provider)
        if found is None:
            same_market = (i for i in self._providers if i.subject == of_provider.subject)
            others = [self._evidence_of(i) for i in same_market if i != of_provider]
            total = (sum(count for count, _ in others), sum(ticks for _, ticks in others))
            prior = self._prior_ppm if of_provider.subject == Market.SPOT.value else 0
            found = self._others[of_provider] = _posterior(prior, total)
        return found

    @cached_property
    def _providers(self) -> list[RecordId]:
        known = {i for i in (*self._experience, *self._running) if i.kind is RecordKind.LOSSES_PROVIDER}
        return sorted(known, key=str)

    def _time_factor(self, provider: ProviderName, market: Market) -> int:
        """Return by how much the coming hours of the week differ from this provider's others, in millionths."""
        found = self._factors.get((provider, market))
        if found is None:
            found = self._factors[provider, market] = self._factor(provider, market)
        return found

    def _factor(self, provider: ProviderName, market: Market) -> int:
        own = RecordId(kind=RecordKind.LOSSES_PROVIDER, provider=provider, subject=market.value)
        count, span = self._losses_and_ticks(own)
        if not count or not span:
            return PPM
        weighed, first = self._evidence_of(own)[0], slot_of(self._now)
        losses, expected = 0, 0
        for slot in {(first + n) % SLOTS for n in range(AHEAD_SLOTS)}:
            subject = time_subject(market, slot)
            seen = self._losses_and_ticks(RecordId(kind=RecordKind.LOSSES_TIME, provider=provider, subject=subject))
            losses += seen[0] * weighed // count
            expected += weighed * seen[1] // span
        factor = (TIME_PRIOR + losses) * PPM // (TIME_PRIOR + expected)
        return max(PPM // TIME_FACTOR_MAX, min(factor, TIME_FACTOR_MAX * PPM))

    def _losses_and_ticks(self, identity: RecordId) -> _Evidence:
        """Return losses and ticks of this record as of now, with those of machines that run."""
        found = self._evidence.get(identity)
        if found is None:
            found = self._evidence[identity] = self._as_of_now(identity, self._experience.get(identity))
        return found

    def _as_of_now(self, identity: RecordId, record: Record | None) -> _Evidence:
        running = self._running.get(identity, 0) if self._running else 0
        if record is None:
            return 0, running
        kept = kept_share(record, self._now)
        return int(record.count * kept), int(record.span // _TICK * kept) + running

    @cached_property
    def highest(self) -> int:
        """What the hazard of no offer exceeds, whatever its provider states."""
        if not self._experience and not self._prior_ppm:
            return STATED_PPM_MAX
        names = {i.provider for i in self._experience} | {i.provider for i in self._running} | {ProviderName("")}
        levels: dict[tuple[ProviderName, str], tuple[int, _Evidence, _Evidence]] = {
            (one.provider, one.subject): (
                max(STATED_PPM_MAX, self._of_others(one)),
                self._losses_and_ticks(one),
                self._evidence_of(one),
            )
            for one in (
                RecordId(kind=RecordKind.LOSSES_PROVIDER, provider=name, subject=market.value)
                for name in names
                for market in Market
            )
        }
        highest = max(
            max(_posterior(prior, seen), _posterior(prior, weighed)) for prior, seen, weighed in levels.values()
        )
        highest = max(highest, self._highest_of_hosts(levels))
        factors = [self._time_factor(name, market) for name in names for market in Market]
        return min(HAZARD_PPM_MAX, (highest + ROUNDED) * max([PPM, *factors]) // PPM + 1)

    def _highest_of_hosts(self, levels: Mapping[tuple[ProviderName, str], tuple[int, _Evidence, _Evidence]]) -> int:
        """Return what the estimate of no host and no pool exceeds, but for roundings; there may be thousands.

        Quiet hours of its own leave a host at or below its provider's estimate.
        """
        highest = 0.0
        weight, running = PRIOR_WEIGHT / _HOUR, self._running
        for one, record in self._experience.items():
            if not record.count or not (one.kind is RecordKind.LOSSES_HOST or one.kind is RecordKind.LOSSES_POOL):
                continue
            level = levels.get((one.provider, one.subject.partition(" ")[0]))
            if level is None:
                continue
            is_host = one.kind is RecordKind.LOSSES_HOST
            prior, seen, weighed = level
            count, ticks = weighed if is_host else seen
            kept = kept_share(record, self._now)
            hours = record.span / _HOUR * kept + (running.get(one, 0) / _HOUR_TICKS if running else 0)
            lost = record.count * kept
            share = HOST_LOSSES_MAX / lost if is_host and lost > HOST_LOSSES_MAX else 1
            elsewhere = max(0, count - lost * share), max(0, ticks / _HOUR_TICKS - hours * share)
            rest = (prior * weight + elsewhere[0]) / (weight + elsewhere[1])
            highest = max(highest, (rest * weight + lost) / (weight + hours))
        return int(highest)


def _without(whole: _Evidence, part: _Evidence) -> _Evidence:
    """Return what was seen elsewhere; the parts of a sum fade alike, but for roundings."""
    return max(0, whole[0] - part[0]), max(0, whole[1] - part[1])


def _hazard_bound(evidence: _Evidence) -> int:
    """Return the hazard that was exceeded with 95 %, by the gamma quantile of Wilson and Hilferty."""
    count, ticks = evidence
    if count < PROOF_LOSSES_MIN:
        return 0
    losses = count / ONE
    quantile = losses * (1 - 1 / (9 * losses) - PROOF_QUANTILE / (3 * math.sqrt(losses))) ** 3
    return int(min(PROVED_PPM_MAX, quantile * PPM * _HOUR_TICKS / max(1, ticks)))


def _held_to(own: _Evidence, losses_max: int) -> _Evidence:
    """Return the evidence with no more losses than this, at its own rate."""
    count, ticks = own
    return own if count <= losses_max else (losses_max, ticks * losses_max // count)


def _posterior(prior_ppm: int, evidence: _Evidence) -> int:
    """Return the mean of the gamma distribution after this evidence, in losses in a million hours, rounded up."""
    count, ticks = evidence
    # count is in millionths of a loss, so that count per hour is losses in a million hours.
    return -(-(prior_ppm * _WEIGHT_TICKS + count * _HOUR_TICKS) // (_WEIGHT_TICKS + ticks))


# What is remembered of a host: starts that failed or were slow, and machines that were lost soon after their launch.
#
# Theory. A host that let a job down once may do so again, and one that did so thrice is likely broken. It ranks behind
# by
# a share of its price for each fault, which fades by half in three days, and never by more than `MALUS_PPM_MAX`: where
# nothing else is sold, it is taken all the same. What is counted is what a fault costs a job of a usual stay of six
# hours: a failed start 20 minutes of it, an early loss 20, a slow start 10. Its owner may forget a host's faults
# (`spotctl providers --forget HOST`).


MALUS_PPM: Final[Mapping[RecordKind, int]] = {
    RecordKind.FAILED_STARTS: 55_000,
    RecordKind.EARLY_LOSSES: 55_000,
    RecordKind.SLOW_STARTS: 28_000,
}
"""How far behind its price a host ranks for one fault of each kind."""
MALUS_PPM_MAX: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What is remembered of one host, as of now.

    Attributes:
        failed_starts, slow_starts, early_losses, losses: in millionths of one, faded.
        hours: machine time of attempts that are over.
        malus_ppm: by how much it ranks behind its price.
        at: when the newest of it happened.
    """

    provider: ProviderName
    host: str
    failed_starts: int = 0
    slow_starts: int = 0
    early_losses: int = 0
    losses: int = 0
    hours: timedelta = timedelta(0)
    malus_ppm: int = 0
    at: datetime


@lru_cache(maxsize=8192)
def fault_record(kind: RecordKind, provider: ProviderName, host: str) -> RecordId:
    return RecordId(kind=kind, provider=provider, subject=host)


def malus_ppm(experience: Experience, provider: ProviderName, host: HostId | None, now: datetime) -> int:
    """Return how far behind its price a host ranks, in millionths."""
    if host is None or not experience:
        return 0
    total = 0
    for kind, each in MALUS_PPM.items():
        record = experience.get(fault_record(kind, provider, host))
        if record is not None:
            total += faded(record, now).count * each // ONE
    return min(total, MALUS_PPM_MAX)


def highest_malus_ppm(experience: Experience) -> int:
    """Return what the malus of no host exceeds."""
    return MALUS_PPM_MAX if any(identity.kind in MALUS_PPM for identity in experience) else 0


def host_memories(experience: Experience, now: datetime) -> tuple[HostMemory, ...]:
    """Return what is remembered of each host, the worst first."""
    records: dict[tuple[ProviderName, str], dict[RecordKind, list[Record]]] = {}
    for identity, record in experience.items():
        if identity.kind in OF_HOSTS and not is_faded(record, now):
            host = host_of(identity)
            records.setdefault((identity.provider, host), {}).setdefault(identity.kind, []).append(faded(record, now))
    found = [_memory(experience, key, kinds, now) for key, kinds in records.items()]
    return tuple(sorted(found, key=lambda one: (-one.malus_ppm, -one.losses, one.provider, one.host)))


def host_of(identity: RecordId) -> str:
    """Return the host of one of its records."""
    if identity.kind is RecordKind.LOSSES_HOST:
        return identity.subject.partition(" ")[2]  # a market stands before it
    return identity.subject


def records_of_host(experience: Experience, text: str) -> tuple[RecordId, ...]:
    """Return the records of the hosts that a user means by `HOST` or `PROVIDER/HOST`."""
    return tuple(
        identity
        for identity in sorted(experience, key=lambda i: (i.kind, i.provider, i.subject))
        if identity.kind in OF_HOSTS and text in {host_of(identity), f"{identity.provider}/{host_of(identity)}"}
    )


def _memory(
    experience: Experience, key: tuple[ProviderName, str], kinds: Mapping[RecordKind, list[Record]], now: datetime
) -> HostMemory:
    provider, host = key
    counts = {kind: sum(record.count for record in some) for kind, some in kinds.items()}
    losses = kinds.get(RecordKind.LOSSES_HOST, [])
    return HostMemory(
        provider=provider,
        host=host,
        failed_starts=counts.get(RecordKind.FAILED_STARTS, 0),
        slow_starts=counts.get(RecordKind.SLOW_STARTS, 0),
        early_losses=counts.get(RecordKind.EARLY_LOSSES, 0),
        losses=counts.get(RecordKind.LOSSES_HOST, 0),
        hours=sum((record.span for record in losses), timedelta(0)),
        malus_ppm=malus_ppm(experience, provider, HostId(host), now),
        at=max(experience[identity].at for identity in records_of_host(experience, f"{provider}/{host}")),
    )
