"""A market whose prices behave as recorded ones do, so that what a history of them costs is true of real ones.

What the recordings show: the price of an EC2 pool changes one to three times a day (1.0 to 2.8 over 90 days of nine
GPU types); of the offers that vast.ai shows, nearly all have other ids two or three days later, because a host that was
rented comes back as a new offer. Hosts set round prices. A day of one offer is therefore some changes of its price,
some short absences, and now and then its end and a newcomer; `busy` multiplies all three.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Final

from spotd_providers.contract.values import (
    Interruption,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)

VAST: Final = ProviderName("vast")
DAY_S: Final = 86_400
GPUS: Final = {
    "RTX_4090": (280_000, 30), "RTX_3090": (160_000, 22), "RTX_5090": (450_000, 14), "H100_SXM": (1_900_000, 10),
    "A100_SXM_80": (900_000, 8), "L40S": (600_000, 6), "RTX_A6000": (400_000, 6), "H200": (2_400_000, 4),
}  # fmt: skip
"""A usual price of one GPU-hour, and how many of a hundred offers it makes."""
CHANGES_A_DAY, ABSENCES_A_DAY, ENDS_A_DAY = 5.0, 2.0, 0.4
ABSENT_S: Final = 3 * 3600


class Bazaar:
    """So many offers, changing as time passes."""

    def __init__(self, offers: int, *, seed: int = 1, busy: float = 1.0) -> None:
        self._rng = Random(seed)
        self._busy = busy
        self._number = 11_000_000
        self._shelf = [self._newcomer() for _ in range(offers)]
        self._back_at = [0] * offers
        self.now = 0

    def _newcomer(self) -> Offer:
        rng = self._rng
        gpu = rng.choices(list(GPUS), weights=[share for _, share in GPUS.values()])[0]
        count = rng.choices((1, 2, 4, 8), weights=(55, 15, 15, 15))[0]
        self._number += rng.randrange(1, 90)
        return Offer(
            provider=VAST,
            offer_id=OfferId(f"{self._number}:spot"),
            pool=PoolId(str(rng.randrange(1_000, 60_000))),
            market=Market.SPOT,
            interruption=Interruption.SUDDEN,
            gpu=gpu,
            gpu_count=count,
            gpu_price=self._price(gpu, count),
            storage_price=MicroUsdPerGbMonth(rng.choice((100_000, 150_000, 200_000, 267_000))),
        )

    def _price(self, gpu: str, count: int) -> MicroUsdPerHour:
        usual = GPUS[gpu][0]
        return MicroUsdPerHour(round(usual * self._rng.lognormvariate(0, 0.35) / 10_000 + 1) * 10_000 * count)

    def pass_time(self, seconds: int) -> None:
        """Prices change, offers come and go."""
        self.now += seconds
        share = self._busy * seconds / DAY_S
        for _ in range(self._times(CHANGES_A_DAY * share)):
            place = self._rng.randrange(len(self._shelf))
            item = self._shelf[place]
            self._shelf[place] = replace(item, gpu_price=self._price(item.gpu, item.gpu_count))
        for _ in range(self._times(ABSENCES_A_DAY * share)):
            place = self._rng.randrange(len(self._shelf))
            self._back_at[place] = self.now + self._rng.randrange(ABSENT_S)
        for _ in range(self._times(ENDS_A_DAY * share)):
            self._shelf[self._rng.randrange(len(self._shelf))] = self._newcomer()

    def _times(self, for_each: float) -> int:
        mean = for_each * len(self._shelf)
        return int(mean) + (self._rng.random() < mean % 1)

    def offers(self) -> list[Offer]:
        """What is on sale now."""
        return [item for item, back in zip(self._shelf, self._back_at, strict=True) if back <= self.now]
