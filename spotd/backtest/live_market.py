"""The market at one instant of a recording, kept up to date change by change.

Theory. A decision reads the offers of each GPU and count in order of price and stops early. So the order is kept as
time passes, at the cost of one search per change, and an `Offer` is made only of what a decision reads. Every run of a
back-test that decides at this instant reads the same lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, overload

from spotd.backtest.recorded import UNKNOWN, RecordedMarket
from spotd.core.domain.market import MarketSnapshot, OfferIndex, ProviderOffers
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import Offer, ProviderName

_Kind = tuple[str, int]
_Entry = int
"""The price, and behind it the place of the series in the order of offers' ids, as one number that sorts like both."""


class LiveOffers(Sequence[Offer]):
    """The offers of one provider, GPU and count that are on sale, in order of price; valid until the next change."""

    def __init__(self, entries: list[_Entry], market: LiveMarket) -> None:
        self._entries = entries
        self._market = market

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Offer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Offer]: ...
    def __getitem__(self, index: int | slice) -> Offer | Sequence[Offer]:
        if isinstance(index, slice):
            return [self._market.offer(entry) for entry in self._entries[index]]
        return self._market.offer(self._entries[index])

    def __iter__(self) -> Iterator[Offer]:
        return (self._market.offer(entry) for entry in self._entries)


class LiveMarket:
    """What is on sale, by number of the series: a price, or `GONE`, or `UNKNOWN`."""

    def __init__(self, recorded: RecordedMarket) -> None:
        self._recorded = recorded
        self._count: Final = max(1, len(recorded.series))
        self._by_rank: Final = sorted(
            range(len(recorded.series)), key=lambda number: (recorded.series[number].offer_id, number)
        )
        self._ranks: Final = [0] * len(recorded.series)
        for rank, number in enumerate(self._by_rank):
            self._ranks[number] = rank
        self._made: dict[int, Offer] = {}
        self._kinds: dict[ProviderName, dict[_Kind, list[_Entry]]] = {name: {} for name in recorded.providers}
        for offer in sorted(recorded.series, key=lambda one: (one.gpu, one.gpu_count)):
            self._kinds[offer.provider].setdefault((offer.gpu, offer.gpu_count), [])
        self._entries: Final = [self._kinds[o.provider][o.gpu, o.gpu_count] for o in recorded.series]
        self._sells_spot = recorded.spot_providers()
        self._takes_bids = recorded.bid_providers()
        self._lows: Mapping[_Kind, MicroUsdPerHour] = recorded.lows()
        self.prices: Final = [UNKNOWN] * len(recorded.series)

    def change(self, number: int, price: int) -> None:
        """Set the price of a series, or take it off the market."""
        before = self.prices[number]
        if before == price:
            return
        self.prices[number] = price
        entries, rank, count = self._entries[number], self._ranks[number], self._count
        if before >= 0:
            del entries[bisect_left(entries, before * count + rank)]
        if price >= 0:
            insort(entries, price * count + rank)

    def fill(self, prices: Sequence[int]) -> None:
        """Set all prices at once."""
        for entries in {id(one): one for one in self._entries}.values():
            entries.clear()
        self.prices[:] = prices
        for number, price in enumerate(prices):
            if price >= 0:
                self._entries[number].append(price * self._count + self._ranks[number])
        for entries in {id(one): one for one in self._entries}.values():
            entries.sort()

    def offer(self, entry: _Entry) -> Offer:
        """Return the offer of an entry."""
        price, rank = divmod(entry, self._count)
        number = self._by_rank[rank]
        made = self._made.get(number)
        if made is None or made.gpu_price != price:
            made = replace(self._recorded.series[number], gpu_price=MicroUsdPerHour(price))
            self._made[number] = made
        return made

    def snapshot(self, now: datetime) -> MarketSnapshot:
        """Return the market for a decision that is made before the next change."""
        return MarketSnapshot(
            offer_cache={
                name: ProviderOffers(
                    provider=name,
                    offer_index=OfferIndex(
                        by_gpu={kind: LiveOffers(entries, self) for kind, entries in kinds.items() if entries},
                        size=sum(map(len, kinds.values())),
                    ),
                    at=now,
                    sells_spot=name in self._sells_spot,
                    changes_bids=name in self._takes_bids,
                )
                for name, kinds in self._kinds.items()
            },
            lows=self._lows,
        )
