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

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.bounds import HOURLY_MAX
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.records import Experience
from spotd.core.experience.hazards import Hazards
from spotd.core.experience.hosts import highest_malus_ppm, malus_ppm
from spotd.core.experience.starts import START_MAX, usual_start
from spotd.core.pricing.effective_price import (
    DEFAULT_CHECKPOINT_INTERVAL,
    PPM,
    Needs,
    checkpoint_interval,
    egress_per_hour,
    restore_per_hour,
)
from spotd.core.ranking.machine_speed import UNKNOWN, Speeds, speeds_of
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, Offer, ProviderName

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
        risk_ppm: what losses add to the price, in millionths of it.
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
    def of(cls, policy: Policy, experience: Experience, attempts: Iterable[Attempt], now: datetime) -> Costing:
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
        risk = hazard * (loss // _TICK) // _HOUR_TICKS
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
        if not needs.restore_bytes_per_hour or not (offer.download_price or egress):
            return 0
        losses = self._in_a_stay(hazard_ppm)
        read = egress_per_hour(egress, needs) * max(PPM, losses) // PPM
        beyond = restore_per_hour(offer, needs) * max(0, losses - PPM) // PPM
        return min(HOURLY_MAX, read + beyond)

    def reads_store(self, needs: Needs) -> bool:
        """Whether what such a job reads of the store costs anything, at some host."""
        return bool(needs.restore_bytes_per_hour and self.policy.egress.highest)

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
        risk = hazard * (loss // _TICK) // _HOUR_TICKS
        return SCARCITY_PPM_MAX + risk + self._malus_max + beyond

    @cached_property
    def _malus_max(self) -> int:
        return highest_malus_ppm(self.experience)
