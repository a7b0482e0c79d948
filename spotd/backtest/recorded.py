"""A recorded market: what was on sale, and every change of it, as columns that many processes can share.

An instant is a whole Unix second; a price is the GPU part of the whole machine before the marketplace's fee, in
micro-dollars per hour, as in `Offer.gpu_price`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import Market, Offer, ProviderName

GONE: Final = -1
"""In place of a price: the offer is not on sale from then on, and a spot machine of it is taken away."""
UNKNOWN: Final = -2
"""In place of a price: nothing was recorded from then on. Nothing can be launched there; what runs goes on."""

Change = tuple[int, int, int]
"""Instant, number of the series, price or one of the two above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMarket:
    """Changes in order of time.

    Attributes:
        series: what was on sale, each as an offer whose price is in the changes.
        begins_at, ends_at: from when until when the market is known.
    """

    series: tuple[Offer, ...]
    instants: array[int]
    numbers: array[int]
    prices: array[int]
    begins_at: int
    ends_at: int

    @property
    def providers(self) -> tuple[ProviderName, ...]:
        return tuple(sorted({offer.provider for offer in self.series}))

    def spot_providers(self) -> frozenset[ProviderName]:
        """Return the providers that sold spot at any time."""
        return frozenset(offer.provider for offer in self.series if offer.market is Market.SPOT)

    def bid_providers(self) -> frozenset[ProviderName]:
        """Return the providers of machines for which a bid is paid, and can be changed."""
        return frozenset(offer.provider for offer in self.series if offer.pays_bid)

    def lows(self) -> dict[tuple[str, int], MicroUsdPerHour]:
        """Return the lowest price of each GPU and count in the whole record."""
        found: dict[tuple[str, int], MicroUsdPerHour] = {}
        lowest: dict[int, int] = {}
        for number, price in zip(self.numbers, self.prices, strict=True):
            if 0 <= price < lowest.get(number, price + 1):
                lowest[number] = price
        for number, price in lowest.items():
            offer = self.series[number]
            kind = (offer.gpu, offer.gpu_count)
            found[kind] = MicroUsdPerHour(min(price, found.get(kind, price)))
        return found
