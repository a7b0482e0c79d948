"""Which offers a job could use, best first, and why the others were passed over.

Theory. Many jobs ask for the same thing. A *requirement key* is everything in a job that decides which offers fit and
what they cost it; offers are filtered, priced and sorted once per key and decision, and every job of that key walks the
same list. Cooldowns and offers already taken in this decision are checked during the walk, since they change.

A physical machine is sold once, and a marketplace may sell to one account only every few seconds. A job that chose
what another one is buying would be refused after its turn, and a queue of jobs would follow one another from refusal to
refusal, each a more expensive one. So a host is left alone while a launch there has no answer; once it has one, the
offer cache no longer holds the offer. Offers without a host are pools (a type in a zone) of more than one machine.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.cooldowns import EVERYWHERE, Cooldown, CooldownScope, cooling_until
from spotd.core.gpu_names import resolve_gpu
from spotd.core.jobs import Job
from spotd.core.market import MarketSnapshot
from spotd.core.policy import Policy, ProviderPolicy
from spotd.core.pricing import PPM, Needs, needs_of, quote, total_per_hour, usual_bid
from spotd.core.quotes import Quote
from spotd.core.states import AttemptState
from spotd.core.verdicts import PassedOver
from spotd_jobs.spec.model import MarketChoice, Resources
from spotd_providers.contract import gpus
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import (
    CAPACITY_SCORE_MAX,
    HostId,
    Interruption,
    Market,
    Offer,
    ProviderName,
)

SCARCITY_PPM_PER_POINT: Final = 5_000
"""What a point of capacity is worth in price. A pool that refuses costs seconds, but one that is scarce is taken away
sooner: another loss every ten hours costs a quarter of an hour, some two or three percent of the price."""
SCARCITY_PPM_MAX: Final = SCARCITY_PPM_PER_POINT * (CAPACITY_SCORE_MAX - 1)
TOO_LITTLE_DISK: Final = "too little disk"
MINUTES_LOST: Final = 22
"""What a loss costs in machine time: starting again, and half of a usual checkpoint interval."""
HAZARD_PPM_MAX: Final = 100_000
"""No prior counts as more than a loss every ten hours."""
RISK_PREMIUM_PPM_MAX: Final = SCARCITY_PPM_MAX + HAZARD_PPM_MAX * MINUTES_LOST // 60
_INTERRUPTION_ORDER: Final[Mapping[Interruption, int]] = {
    Interruption.NEVER: 0,
    Interruption.NOTICE: 1,
    Interruption.SUDDEN: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementKey:
    """What of a job decides which offers fit and what they cost it."""

    resources: Resources
    needs: Needs


def requirement_key(job: Job, policy: Policy) -> RequirementKey:
    return RequirementKey(resources=job.spec.resources, needs=needs_of(job, policy))


def scarcity_ppm(offer: Offer) -> int:
    """How much worse this offer ranks because its provider is not sure that it can be had; 0 without a score."""
    if offer.capacity_score is None:
        return 0
    return SCARCITY_PPM_PER_POINT * max(0, min(CAPACITY_SCORE_MAX - offer.capacity_score, CAPACITY_SCORE_MAX - 1))


def risk_premium_ppm(offer: Offer) -> int:
    """How much worse this offer ranks than its price, for what its provider says of it."""
    hazard = max(0, min(offer.hazard_ppm or 0, HAZARD_PPM_MAX))
    return scarcity_ppm(offer) + hazard * MINUTES_LOST // 60


def ranked_total(offer: Offer, needs: Needs, fee_ppm: int, headroom_ppm: int) -> int:
    """Return what the whole machine counts as per hour: what would be agreed for it, raised by its risk premium."""
    gpu_price = usual_bid(offer, headroom_ppm) if offer.pays_bid else offer.gpu_price
    total = total_per_hour(offer, needs, fee_ppm, gpu_price)
    if offer.capacity_score is None and offer.hazard_ppm is None:
        return total
    return total + total * risk_premium_ppm(offer) // PPM


class RankedOffers:
    """The offers that fit one requirement key, best first, found only as far as they are asked for.

    Best is cheapest by what would be agreed, a bid with its headroom, where one that is scarce or often lost counts as
    a little more than it is (`risk_premium_ppm`). Offers are sorted by the price of the GPU part, which no total can
    undercut. So the best is certain as soon as it is at most the lowest GPU part not yet read, and most of a
    market is never priced at all.
    """

    def __init__(
        self,
        key: RequirementKey,
        groups: Sequence[tuple[ProviderPolicy, bool, Sequence[Offer]]],
        mismatches: Counter[str],
        headroom_ppm: int,
    ) -> None:
        self.key = key
        self._headroom_ppm = headroom_ppm
        self.entries: list[Offer] = []
        self.mismatches = mismatches
        self.quotes: dict[int, Quote] = {}
        self.summaries: dict[tuple[object, ...], PassedOver] = {}
        """Why all of them were passed over, by how far they were read and what was compared."""
        self.read = 0
        """How many offers were compared with the requirements so far."""
        self.walked = 0
        """Entries before this one were taken or cooling for every job of the key."""
        self.blocked: Counter[str] = Counter()
        """Why, and how many of them."""
        self._groups = groups
        self._next: list[tuple[int, int, int]] = []
        self._priced: list[tuple[int, int, str, str, Offer]] = []
        for number, (rules, _, group) in enumerate(groups):
            self._await(number, rules, group, 0)

    @property
    def providers(self) -> frozenset[ProviderName]:
        """Those that have an offer which may fit."""
        return frozenset(rules.name for rules, _, _ in self._groups)

    def _await(self, number: int, rules: ProviderPolicy, group: Sequence[Offer], position: int) -> None:
        if position < len(group):
            floor = group[position].gpu_price * min(rules.fee_ppm, PPM) // PPM
            heapq.heappush(self._next, (floor, number, position))

    def at(self, index: int) -> Offer | None:
        """Return the offer of this rank, or `None` past the last that fits."""
        while len(self.entries) <= index:
            if not self._find_one():
                return None
        return self.entries[index]

    def _find_one(self) -> bool:
        while self._next and (not self._priced or self._priced[0][0] >= self._next[0][0]):
            _, number, position = heapq.heappop(self._next)
            rules, sells_spot, group = self._groups[number]
            self._await(number, rules, group, position + 1)
            offer = group[position]
            self.read += 1
            problem = mismatch(offer, self.key.resources, self.key.needs.disk_gb, sells_spot=sells_spot)
            if problem:
                self.mismatches[problem] += 1
                continue
            rank = _INTERRUPTION_ORDER[offer.interruption]
            ranked = ranked_total(offer, self.key.needs, rules.fee_ppm, self._headroom_ppm)
            heapq.heappush(self._priced, (ranked, rank, offer.provider, offer.offer_id, offer))
        if not self._priced:
            return False
        self.entries.append(heapq.heappop(self._priced)[4])
        return True


class CandidateCatalogue:
    """The market as one decision sees it: fresh offers only, ranked once per requirement key."""

    def __init__(
        self,
        market: MarketSnapshot,
        policy: Policy,
        cooldowns: Iterable[Cooldown],
        now: datetime,
        *,
        attempts: Iterable[Attempt],
    ) -> None:
        self._policy = policy
        self._now = now
        self._lists: dict[RequirementKey, RankedOffers] = {}
        self._gpu_sets: dict[str, frozenset[str]] = {}
        self._lows = market.lows
        self._cooling: dict[tuple[ProviderName, CooldownScope, str], tuple[str, datetime]] = {}
        self.waits: list[datetime] = []
        """When something that cools down may be tried again."""
        newest = {(c.provider, c.scope, c.subject): c for c in cooldowns}
        for subject, cooldown in newest.items():
            ends_at = cooling_until(cooldown, market.offer_cache.get(cooldown.provider))
            if ends_at > now:
                self._cooling[subject] = (cooldown.reason, ends_at)
                self.waits.append(ends_at)
        self._taken: set[tuple[ProviderName, HostId]] = set()
        self._buying = {
            (item.quote.offer.provider, item.quote.offer.host_id)
            for item in attempts
            if item.state is AttemptState.INTENDED and item.quote.offer.host_id is not None
        }
        self.silent: dict[ProviderName, str] = {}
        self.size = 0
        self._offer_indexes = []
        for name, known in policy.providers.items():
            if name not in market.offer_cache and known.unusable:
                self.silent[name] = known.unusable
        for name in sorted(market.offer_cache):
            provider_offers = market.offer_cache[name]
            rules = policy.providers.get(name)
            if rules is None:
                continue
            last_error = _last_error(rules, provider_offers.at, provider_offers.error, now)
            if last_error:
                self.silent[name] = last_error
                continue
            self._offer_indexes.append((rules, provider_offers))
            self.size += provider_offers.offer_index.size

    def list_for(self, key: RequirementKey) -> RankedOffers:
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = self._build(key)
        return found

    def _build(self, key: RequirementKey) -> RankedOffers:
        wanted = key.resources
        mismatches: Counter[str] = Counter()
        groups: list[tuple[ProviderPolicy, bool, Sequence[Offer]]] = []
        for rules, provider_offers in self._offer_indexes:
            if wanted.providers and rules.name not in wanted.providers:
                mismatches[f"provider {rules.name} not asked for"] += provider_offers.offer_index.size
                continue
            for (gpu, count), group in provider_offers.offer_index.by_gpu.items():
                if self._fits_gpu(wanted, gpu, count):
                    groups.append((rules, provider_offers.sells_spot, group))
                else:
                    mismatches["another GPU or count"] += len(group)
        return RankedOffers(key, groups, mismatches, self._policy.bid_headroom_ppm)

    def _fits_gpu(self, wanted: Resources, gpu: str, count: int) -> bool:
        if wanted.gpu:
            return any(count == a.count and gpu in self._gpu_set(a.name, gpu) for a in wanted.gpu)
        return count == wanted.gpu_count

    def _gpu_set(self, name: str, offered: str) -> frozenset[str]:
        found = self._gpu_sets.get(name)
        if found is None:
            found = self._gpu_sets[name] = resolve_gpu(name)
        if offered not in found and gpus.matches(found, offered):
            return found | {offered}
        return found

    def quote_at(self, offers: RankedOffers, index: int) -> Quote:
        """Return the full quote of one entry, built once."""
        made = offers.quotes.get(index)
        if made is None:
            offer = offers.entries[index]
            fee = self._policy.providers[offer.provider].fee_ppm
            made = offers.quotes[index] = quote(offer, offers.key.needs, fee, self._now)
        return made

    def ranked(self, offers: RankedOffers, passed_over: defaultdict[str, int] | None = None) -> Iterator[Quote]:
        """Every quote of the key that is neither cooling nor taken, best first; counts the others if asked to."""
        index = offers.walked
        while (offer := offers.at(index)) is not None:
            why = self.blocked(offer)
            if not why:
                yield self.quote_at(offers, index)
            elif passed_over is not None:
                passed_over[why] += 1
            index += 1

    def ranked_total(self, offers: RankedOffers, offer: Offer) -> int:
        """By how much this offer ranks among those of the key."""
        fee_ppm = self._policy.providers[offer.provider].fee_ppm
        return ranked_total(offer, offers.key.needs, fee_ppm, self._policy.bid_headroom_ppm)

    def first_free(self, offers: RankedOffers) -> Quote | None:
        """Return the best quote that is neither cooling nor taken; move the shared mark past what is blocked."""
        while (offer := offers.at(offers.walked)) is not None:
            why = self.blocked(offer)
            if not why:
                return self.quote_at(offers, offers.walked)
            offers.blocked[why] += 1
            offers.walked += 1
        return None

    def lows(self, wanted: Resources) -> Iterator[MicroUsdPerHour]:
        """Yield the lowest price of the GPU part of each kind of machine that this asks for, of the last days."""
        for (gpu, count), price in self._lows.items():
            if self._fits_gpu(wanted, gpu, count):
                yield price

    def pause(self) -> tuple[str, datetime] | None:
        """Why nothing can be launched anywhere for now, and until when."""
        return self._cooling.get((EVERYWHERE, CooldownScope.STORE, ""))

    def free_at(self, offers: RankedOffers) -> datetime | None:
        """When the first of these offers cools down no more, `None` where none of them cools down."""
        ends = (self._cooldown(offer) for offer in offers.entries)
        return min((end[1] for end in ends if end is not None), default=None)

    def blocked(self, offer: Offer) -> str:
        """Why this offer may not be bought in this decision, or an empty string."""
        if offer.host_id is not None and (offer.provider, offer.host_id) in self._taken:
            return "taken by another job in this decision"
        if (offer.provider, offer.host_id) in self._buying:
            return "a launch on this host has no answer yet"
        found = self._cooldown(offer)
        return "" if found is None else found[0]

    def _cooldown(self, offer: Offer) -> tuple[str, datetime] | None:
        """Return what keeps this offer from being used for a while, in words, and until when."""
        cooling = self._cooling
        if not cooling:
            return None
        provider = offer.provider
        if offer.host_id is not None and (found := cooling.get((provider, CooldownScope.HOST, offer.host_id))):
            return "host cools down after a loss", found[1]
        if found := cooling.get((provider, CooldownScope.POOL, offer.pool)):
            return "a machine was lost or refused there a moment ago", found[1]
        for quota in offer.quotas:
            if found := cooling.get((provider, CooldownScope.QUOTA, quota)):
                return "a quota of the account is used up", found[1]
        if found := cooling.get((provider, CooldownScope.OFFER, offer.offer_id)):
            return "offer was refused a moment ago", found[1]
        if found := cooling.get((provider, CooldownScope.PROVIDER, "")):
            return f"{provider} is left alone for a while: {found[0]}", found[1]
        return None

    def take(self, offer: Offer) -> None:
        """Take this offer, and everything else on its host. Where hosts have no names, there may be more."""
        if offer.host_id is not None:
            self._taken.add((offer.provider, offer.host_id))


def _last_error(rules: ProviderPolicy, at: datetime | None, error: str, now: datetime) -> str:
    if rules.unusable:
        return rules.unusable
    if at is None:
        return error or "no prices yet"
    if now - at > rules.quote_ttl:
        age = int((now - at).total_seconds())
        return f"prices are {age} s old" + (f": {error}" if error else "")
    return ""


def mismatch(offer: Offer, wanted: Resources, disk_gb: int, *, sells_spot: bool) -> str:
    """Why this offer cannot carry the job, apart from its GPU and price; empty if it can."""
    if offer.market is not Market.SPOT and (
        wanted.market is MarketChoice.SPOT or (wanted.market is None and sells_spot)
    ):
        return "not a spot offer"
    if wanted.market is MarketChoice.ON_DEMAND and offer.market is not Market.ON_DEMAND:
        return "not an on-demand offer"
    if wanted.min_vram_mb is not None and (offer.gpu_vram_mb or 0) < wanted.min_vram_mb:
        return "too little GPU memory"
    if offer.disk_gb_max is not None and offer.disk_gb_max < disk_gb:
        return TOO_LITTLE_DISK
    if wanted.cpus is not None and (offer.cpus or 0) < wanted.cpus:
        return "too few CPUs"
    if wanted.memory_mb is not None and (offer.memory_mb or 0) < wanted.memory_mb:
        return "too little memory"
    if (
        wanted.min_cuda is not None
        and offer.cuda_max is not None
        and _version(offer.cuda_max) < _version(wanted.min_cuda)
    ):
        return "CUDA too old"
    if wanted.min_reliability is not None and (offer.reliability or 1.0) < wanted.min_reliability:
        return "not reliable enough"
    if wanted.regions and not any(_in_region(offer.region, region) for region in wanted.regions):
        return "another region"
    return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in text.split("."))


def _in_region(offered: str, asked: str) -> bool:
    return asked.casefold() in offered.casefold()
