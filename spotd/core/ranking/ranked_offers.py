"""The offers that fit what a job asks for, best first, found only as far as they are asked for."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from spotd.core.domain.policy import ProviderPolicy
from spotd.core.domain.quotes import Quote
from spotd.core.domain.verdicts import PassedOver
from spotd.core.pricing.effective_price import PPM, Needs, total_per_hour, usual_bid
from spotd.core.pricing.words import quote_words
from spotd.core.ranking.expected_cost import USUAL, Costing, CostTerms, Expectation, rank
from spotd.core.ranking.machine_speed import Kind
from spotd_jobs.spec.model import MarketChoice, Resources
from spotd_providers.contract.values import Interruption, Market, Offer, ProviderName

TOO_LITTLE_DISK: Final = "too little disk"
_INTERRUPTION_ORDER: Final[Mapping[Interruption, int]] = {
    Interruption.NEVER: 0,
    Interruption.NOTICE: 1,
    Interruption.SUDDEN: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementKey:
    """What of a job decides which offers fit, what they cost it and how they rank.

    Attributes:
        terms: `None` where offers rank by price.
    """

    resources: Resources
    needs: Needs
    terms: CostTerms | None = None


class RankedOffers:
    """The offers that fit one requirement key, best first, found only as far as they are asked for.

    Best is what costs least for an hour of the job's work (`expected_cost`), by what would be agreed, a bid with its
    headroom. Offers of one kind of machine are sorted by the price of the GPU part, which no total can undercut, and
    have one speed. So the best is certain as soon as it is at most the lowest GPU part not yet read, over its speed,
    and most of a market is never priced at all.

    Attributes:
        is_by_price: offers rank as their prices do, but for the little that their providers state of them.
        behind_ppm: how far behind its price, over its speed, an offer can rank at most, but for what it reads.
        speed_min: of the kinds of machine that may fit, in millionths.
    """

    def __init__(
        self,
        key: RequirementKey,
        groups: Sequence[tuple[ProviderPolicy, bool, Sequence[Offer]]],
        mismatches: Counter[str],
        headroom_ppm: int,
        costing: Costing,
    ) -> None:
        self.key = key
        self.is_by_price = key.terms is None
        self.terms = USUAL if key.terms is None else key.terms
        self._knows_speeds = self.terms.speeds.is_known
        self.costing = costing
        self._headroom_ppm = headroom_ppm
        self.entries: list[Offer] = []
        self.mismatches = mismatches
        self.quotes: dict[int, Quote] = {}
        self.summaries: dict[tuple[object, ...], PassedOver] = {}
        """Why all of them were passed over, by how far they were read and what was compared."""
        self._words: tuple[Quote | None, str] = (None, "")
        self.read = 0
        """How many offers were compared with the requirements so far."""
        self.walked = 0
        """Entries before this one were taken or cooling for every job of the key."""
        self.blocked: Counter[str] = Counter()
        """Why, and how many of them."""
        self._groups = groups
        self._speeds = [self.speed_of(group[0]) if group else PPM for _, _, group in groups]
        self.speed_min = min(self._speeds, default=PPM)
        premium = costing.premium_max_ppm(self.providers, key.needs, self.terms)
        self.behind_ppm = (PPM + premium) * (PPM + headroom_ppm) // PPM
        self._reads_store = costing.reads_store(key.needs)
        self._reads_max = costing.reads_max(key.needs)
        self._next: list[tuple[int, int, int]] = []
        self._priced: list[tuple[int, int, str, str, Offer]] = []
        for number, (rules, _, group) in enumerate(groups):
            self._await(number, rules, group, 0)

    @property
    def providers(self) -> frozenset[ProviderName]:
        """Those that have an offer which may fit."""
        return frozenset(rules.name for rules, _, _ in self._groups)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of machine that may fit."""
        return frozenset((group[0].gpu, group[0].gpu_count) for _, _, group in self._groups if group)

    def words_of(self, quote: Quote) -> str:
        """Return the quote in words; many jobs wait for the same one."""
        if self._words[0] is not quote:
            self._words = quote, quote_words(quote)
        return self._words[1]

    def speed_of(self, offer: Offer) -> int:
        return self.terms.speeds.of(offer.gpu, offer.gpu_count) if self._knows_speeds else PPM

    def least_rank(self, quote: Quote) -> int:
        """Return what the rank of an offer at this price is not below."""
        if not self._knows_speeds:
            return quote.price.total
        return quote.price.total * PPM // self.speed_of(quote.offer)

    def highest_rank(self, total: int, kinds: Iterable[tuple[Kind, int]] = ()) -> int:
        """Return what the rank of no offer is above that costs at most so much, or so much for each of these kinds."""
        if not self._knows_speeds:
            return total * self.behind_ppm // PPM + self._reads_max + (0 if self.is_by_price else 1)
        per_speed = [most * PPM // self.terms.speeds.of(*kind) + 1 for kind, most in kinds]
        highest = max(per_speed) if per_speed else total * PPM // self.speed_min
        return highest * self.behind_ppm // PPM + self._reads_max * PPM // self.speed_min + 1

    def lowest_total_from(self, quote: Quote) -> int:
        """Return what no offer that ranks at or behind this one costs less than."""
        return max(0, self.least_rank(quote) * self.speed_min - self._reads_max * PPM) // self.behind_ppm

    def expect(self, offer: Offer) -> Expectation:
        return self.costing.expect(offer, self.key.needs, self.terms)

    def ranked_total(self, offer: Offer, fee_ppm: int) -> int:
        """Return what an hour of work costs on the machine, at what would be agreed for it."""
        gpu_price = usual_bid(offer, self._headroom_ppm) if offer.pays_bid else offer.gpu_price
        total = total_per_hour(offer, self.key.needs, fee_ppm, gpu_price)
        if self.is_by_price and offer.capacity_score is None and offer.hazard_ppm is None and not self._reads_store:
            return total
        return rank(total, self.expect(offer))

    def _await(self, number: int, rules: ProviderPolicy, group: Sequence[Offer], position: int) -> None:
        if position < len(group):
            floor = group[position].gpu_price * min(rules.fee_ppm, PPM) // self._speeds[number]
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
            order = _INTERRUPTION_ORDER[offer.interruption]
            ranked = self.ranked_total(offer, rules.fee_ppm)
            heapq.heappush(self._priced, (ranked, order, offer.provider, offer.offer_id, offer))
        if not self._priced:
            return False
        self.entries.append(heapq.heappop(self._priced)[4])
        return True


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
