"""What a machine is expected to cost for an hour of a job's work: the one figure by which offers are ranked.

Theory. An hour of a machine costs its effective price P, and gives S hours of work at speed 1.0. Every hour a loss must
be expected with the hazard h, and a loss costs L hours again: the restart, and half of a checkpoint interval that is
repeated. So an hour of work costs, and whatever W hours of it are left cost W times as much,

    (P (1 + h L) + what restores cost beyond those in P) / S

P holds the host's price of one restore in each usual stay already; where more losses than that are to be expected, the
rest is added. What the store's owner asks for them (`domain.egress`) is in no P, and all of it is added.
Two more things count that have no place in the formula of the field: that a provider is not sure of its capacity, and
that a host let jobs down (`experience.hosts`), each as a bounded share of P.

Where nothing was ever lost or measured, h is what the provider states, mostly 0, and L is `USUAL_LOSS`; where the
speed of machines is not known for a job, S is 1. Then offers rank by price.

Bounds. Sorted by the price of the GPU part, most of a market need never be priced: no rank is below that price over S,
and none is above P (1 + `premium_max_ppm`) / S. `tests/unit/core/ranking/test_expected_cost.py` compares with brute
force.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import HOURLY_MAX, Job
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.world import Experience, PassedOver
from spotd.core.experience import Hazards, highest_malus_ppm, malus_ppm
from spotd.core.pricing import (
    DEFAULT_CHECKPOINT_INTERVAL,
    PPM,
    Needs,
    checkpoint_interval,
    egress_per_hour,
    quote_words,
    restore_per_hour,
    total_per_hour,
    transfer_time,
    usual_bid,
)
from spotd.core.ranking.remaining_work import UNKNOWN, Kind, Speeds, speeds_of
from spotd.core.starts import START_MAX, usual_start
from spotd_jobs.spec.model import MarketChoice, Resources
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, Interruption, Market, Offer, ProviderName

SCARCITY_PPM_PER_POINT: Final = 5_000
"""What a point of capacity is worth in price. A pool that refuses costs seconds, but one that is scarce is taken away
sooner: another loss every ten hours costs a quarter of an hour, some two or three percent of the price."""
SCARCITY_PPM_MAX: Final = SCARCITY_PPM_PER_POINT * (CAPACITY_SCORE_MAX - 1)
USUAL_LOSS: Final = timedelta(minutes=22)
"""What a loss costs in machine time where nothing was measured: starting again, and half of a usual interval."""
LOSS_MAX: Final = START_MAX + timedelta(hours=1)
HALF_INTERVAL_MAX: Final = timedelta(hours=1)
_HOUR: Final = timedelta(hours=1)
_TICK: Final = timedelta(microseconds=1)
_HOUR_TICKS: Final = _HOUR // _TICK


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """What of a job decides what machines are expected to cost it, beside what enters their price.

    Attributes:
        image, half_interval: of a loss; left at their defaults while nothing was ever lost or measured.
    """

    speeds: Speeds = UNKNOWN
    image: str = ""
    half_interval: timedelta = DEFAULT_CHECKPOINT_INTERVAL / 2


USUAL: Final = CostTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What is expected of one offer for one job.

    Attributes:
        hazard_ppm: losses in a million machine hours.
        loss: machine time that a loss costs.
        risk_ppm: what losses, and the time in which data is read, add to the price, in millionths of it.
        premium_ppm: the same with scarcity and the host's own faults.
        restores: what restores cost per hour beyond what is in the price.
        speed_ppm: hours of work at speed 1.0 in an hour of the machine, in millionths.
    """

    hazard_ppm: int
    loss: timedelta
    risk_ppm: int
    premium_ppm: int
    restores: int
    speed_ppm: int


def scarcity_ppm(offer: Offer) -> int:
    """How much worse this offer ranks because its provider is not sure that it can be had; 0 without a score."""
    if offer.capacity_score is None:
        return 0
    return SCARCITY_PPM_PER_POINT * max(0, min(CAPACITY_SCORE_MAX - offer.capacity_score, CAPACITY_SCORE_MAX - 1))


def rank(total: int, expected: Expectation) -> int:
    """Return what an hour of work at speed 1.0 costs on a machine of this effective price."""
    whole = total + total * expected.premium_ppm // PPM + expected.restores
    return whole if expected.speed_ppm == PPM else whole * PPM // expected.speed_ppm


def total_at(ranked: int, expected: Expectation) -> int:
    """Return the effective price up to which a machine ranks no worse than this."""
    whole = ranked if expected.speed_ppm == PPM else ranked * expected.speed_ppm // PPM
    return max(0, whole - expected.restores) * PPM // (PPM + expected.premium_ppm)


@dataclass
class Costing:
    """What machines are expected to cost, in one decision."""

    policy: Policy
    experience: Experience
    now: datetime
    hazards: Hazards
    _losses: dict[tuple[ProviderName, CostTerms], timedelta] = field(default_factory=dict)
    _terms: dict[tuple[object, ...], CostTerms] = field(default_factory=dict)
    """Of jobs with the same, one value, which is found by its identity wherever it is part of a key."""

    @classmethod
    def of(cls, policy: Policy, experience: Experience, attempts: Collection[Attempt], now: datetime) -> Costing:
        hazards = Hazards(experience, now, attempts)
        return cls(policy=policy, experience=experience, now=now, hazards=hazards)

    def terms_of(self, job: Job) -> CostTerms | None:
        """Return what of the job enters the expectation; `None` where offers rank by price."""
        speeds = speeds_of(job)
        if self.experience:
            own = (speeds if speeds.is_known else None, job.spec.image, checkpoint_interval(job))
            found = self._terms.get(own)
            if found is None:
                half = min(own[2] / 2, HALF_INTERVAL_MAX)
                found = self._terms[own] = CostTerms(speeds=speeds, image=job.spec.image, half_interval=half)
            return found
        return CostTerms(speeds=speeds) if speeds.is_known else None

    def expect(self, offer: Offer, needs: Needs, terms: CostTerms) -> Expectation:
        """Return what is expected of the offer for a job of these needs and terms."""
        hazard, loss = self.hazards.of(offer), self.loss(offer.provider, terms)
        risk = hazard * (loss // _TICK) // _HOUR_TICKS + self._waits_ppm(needs, offer.download_mbps, hazard)
        malus = malus_ppm(self.experience, offer.provider, offer.host_id, self.now)
        return Expectation(
            hazard_ppm=hazard,
            loss=loss,
            risk_ppm=risk,
            premium_ppm=scarcity_ppm(offer) + risk + malus,
            restores=self._restores(offer, needs, hazard),
            speed_ppm=terms.speeds.of(offer.gpu, offer.gpu_count),
        )

    def loss(self, provider: ProviderName, terms: CostTerms) -> timedelta:
        """Return the machine time that a loss costs: starting again, and half a checkpoint interval."""
        if not self.experience:
            return USUAL_LOSS
        found = self._losses.get((provider, terms))
        if found is None:
            start = usual_start(self.experience, provider, terms.image)
            found = self._losses[provider, terms] = min(LOSS_MAX, start + terms.half_interval)
        return found

    def _restores(self, offer: Offer, needs: Needs, hazard_ppm: int) -> int:
        """Return what restores cost per hour: of the host's traffic what the price lacks, and of the store all."""
        egress = self.policy.egress.price_for(offer)
        if not needs.restore_bytes_per_hour or not (offer.download_price or egress or needs.elsewhere):
            return 0
        losses = self._in_a_stay(hazard_ppm)
        read = egress_per_hour(egress, needs, offer) * max(PPM, losses) // PPM
        beyond = restore_per_hour(offer, needs) * max(0, losses - PPM) // PPM
        return min(HOURLY_MAX, read + beyond)

    def _waits_ppm(self, needs: Needs, download_mbps: float | None, hazard_ppm: int) -> int:
        """Return how much of the time that is paid for goes by while data is read, against the work of a stay."""
        if not needs.data_bytes:
            return 0
        took = transfer_time(needs.data_bytes, download_mbps)
        stay = max(self.policy.expected_stay, timedelta(minutes=1))
        return (took // _TICK) * max(PPM, self._in_a_stay(hazard_ppm)) // (stay // _TICK)

    def reads_store(self, needs: Needs) -> bool:
        """Whether what such a job reads of the store costs anything, at some host."""
        return bool(needs.restore_bytes_per_hour and (self.policy.egress.highest or needs.elsewhere))

    def reads_max(self, needs: Needs) -> int:
        """Return what reading the store costs per hour on no machine more than."""
        if not self.reads_store(needs):
            return 0
        losses = max(PPM, self._in_a_stay(self.hazards.highest))
        return egress_per_hour(self.policy.egress.highest, needs) * losses // PPM + 1

    def _in_a_stay(self, hazard_ppm: int) -> int:
        """Return how many losses are to be expected in a usual stay, in millionths."""
        stay = max(self.policy.expected_stay, timedelta(minutes=1))
        return hazard_ppm * (stay // _TICK) // _HOUR_TICKS

    def premium_max_ppm(self, providers: Collection[ProviderName], needs: Needs, terms: CostTerms) -> int:
        """Return what no offer of these providers ranks further behind its effective price, in millionths."""
        hazard = self.hazards.highest
        loss = max((self.loss(provider, terms) for provider in providers), default=USUAL_LOSS)
        beyond = max(0, self._in_a_stay(hazard) - PPM) if needs.restore_bytes_per_hour else 0
        risk = hazard * (loss // _TICK) // _HOUR_TICKS + self._waits_ppm(needs, None, hazard)
        return SCARCITY_PPM_MAX + risk + self._malus_max + beyond

    @cached_property
    def _malus_max(self) -> int:
        return highest_malus_ppm(self.experience)


# The offers that fit what a job asks for, best first, found only as far as they are asked for.


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
        image: the job's image, where its registry has a login that not every provider takes; else empty.
    """

    resources: Resources
    needs: Needs
    image: str = ""
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
        self.is_by_price = key.terms is None and not key.needs.data_bytes
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
            wanted, disk_gb = self.key.resources, self.key.needs.disk_gb
            problem = mismatch(offer, wanted, disk_gb, sells_spot=sells_spot, is_own=rules.is_own)
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


def mismatch(offer: Offer, wanted: Resources, disk_gb: int, *, sells_spot: bool, is_own: bool = False) -> str:
    """Why this offer cannot carry the job, apart from its GPU and price; empty if it can.

    Args:
        is_own: it is an own machine, which is neither spot nor on-demand: a job takes it whatever market it asks for.
    """
    if (
        not is_own
        and offer.market is not Market.SPOT
        and (wanted.market is MarketChoice.SPOT or (wanted.market is None and sells_spot))
    ):
        return "not a spot offer"
    if not is_own and wanted.market is MarketChoice.ON_DEMAND and offer.market is not Market.ON_DEMAND:
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
