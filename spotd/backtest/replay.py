"""Many runs through one recording: from change to change, and each run only at instants that concern it.

Theory. The daemon decides at every step. A run that sleeps (`JobRun.due`) is woken at the end of the step in which its
machine's offer changes, in which an offer comes to or under its ceiling or so low that a move may be worth it, or which
it waits for itself. At any other step a decision would read the same things as the last one and find the same. A test
holds this to the plain replay that asks `decide` at every step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, overload

from spotd.backtest.recorded import UNKNOWN, RecordedMarket, instant
from spotd.backtest.run import JobRun
from spotd.core.domain.market import MarketSnapshot, OfferIndex, ProviderOffers
from spotd.core.pricing import PPM
from spotd_providers.contract.values import MicroUsdPerHour, Offer, ProviderName, shares

# The market at one instant of a recording, kept up to date change by change.
#
# Theory. A decision reads the offers of each GPU and count in order of price and stops early. So the order is kept as
# time passes, at the cost of one search per change, and an `Offer` is made only of what a decision reads. Every run
# of a back-test that decides at this instant reads the same lists.


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
            by_provider={
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


class PlannedRun:
    """A run, when it is submitted, and up to which price a change of the market can matter to it while it waits.

    Attributes:
        limit: the ceiling, of a GPU-hour or of the whole machine as `per_gpu` says.
    """

    def __init__(self, run: JobRun, start: int, limit: int) -> None:
        self.run: Final = run
        self.start: Final = start
        self.limit: Final = limit
        self.held: int | None = None
        self.waits: int | None = None
        self.due: int | None = start


class MarketReplay:
    """The recording and its runs, at one instant. `advance` plays it to its end."""

    def __init__(
        self,
        recorded: RecordedMarket,
        runs: Sequence[PlannedRun],
        *,
        step_s: int,
        fees: Mapping[ProviderName, int],
        per_gpu: bool,
    ) -> None:
        self._recorded = recorded
        self._runs = runs
        self._step_s = step_s
        self._market = LiveMarket(recorded)
        self._divisor = [PPM * (shares(offer.gpu_count) if per_gpu else 1) for offer in recorded.series]
        self._fees = [fees[offer.provider] for offer in recorded.series]
        self._holders: defaultdict[int, set[int]] = defaultdict(set)
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)
        self._queue: list[tuple[int, int]] = []

    def advance(self) -> Iterator[int]:
        """Play everything; yield the number of each run that is over."""
        runs, step = self._runs, self._step_s
        if not runs:
            return
        first = min(one.start for one in runs)
        position = self._begin(first)
        left = len(runs)
        for number, one in enumerate(runs):
            heapq.heappush(self._queue, (one.start, number))
        instants, count = self._recorded.instants, len(self._recorded.instants)
        while left:
            due = self._next_due()
            change = -(-instants[position] // step) * step if position < count else None
            if change is None and due is None:
                return
            now = min(at for at in (due, change) if at is not None)
            if now > self._recorded.ends_at:
                return
            position, lowest, touched = self._apply(position, now)
            concerned = self._runs_of(lowest, touched)
            woken = concerned | self._due(now)
            if not woken:
                continue
            snapshot = self._market.snapshot(instant(now))
            for number in sorted(woken):
                one = runs[number]
                if number in concerned or not one.run.needs_no_decision(now, snapshot):
                    one.run.step(now, snapshot)
                self._settle(number, now)
                if one.run.is_over:
                    left -= 1
                    yield number

    def _begin(self, at: int) -> int:
        """Set the market as it was at the first start; return the first change after it."""
        prices = [UNKNOWN] * len(self._recorded.series)
        count = bisect_right(self._recorded.instants, at)
        for number, price in zip(self._recorded.numbers[:count], self._recorded.prices[:count], strict=True):
            prices[number] = price
        self._market.fill(prices)
        return count

    def _next_due(self) -> int | None:
        queue, runs = self._queue, self._runs
        while queue:
            due, number = queue[0]
            if runs[number].due == due:
                return due
            heapq.heappop(queue)
        return None

    def _apply(self, position: int, now: int) -> tuple[int, int | None, set[int]]:
        """Make the changes up to now; return the next, the lowest price among them, and whose machine they concern."""
        instants, numbers, prices = self._recorded.instants, self._recorded.numbers, self._recorded.prices
        change, holders, divisors, fees = self._market.change, self._holders, self._divisor, self._fees
        lowest: int | None = None
        touched: set[int] = set()
        count = len(instants)
        while position < count and instants[position] <= now:
            number, price = numbers[position], prices[position]
            change(number, price)
            if price >= 0:
                effective = price * fees[number] // divisors[number]
                if lowest is None or effective < lowest:
                    lowest = effective
            if number in holders:
                for run in holders[number]:
                    machine = self._runs[run].run.machine
                    if machine is not None:
                        machine.observe(instants[position], price)
                touched |= holders[number]
            position += 1
        return position, lowest, touched

    def _runs_of(self, lowest: int | None, touched: set[int]) -> set[int]:
        """Return the runs to which a change of the market matters."""
        found = set(touched)
        if lowest is not None:
            for limit, some in self._waiting.items():
                if lowest <= limit:
                    found |= some
        return found

    def _due(self, now: int) -> set[int]:
        woken: set[int] = set()
        queue, runs = self._queue, self._runs
        while queue and queue[0][0] <= now:
            due, number = heapq.heappop(queue)
            if runs[number].due == due:
                woken.add(number)
        return woken

    def _settle(self, number: int, now: int) -> None:
        """Note what wakes the run next."""
        one = self._runs[number]
        due = one.run.due(now)
        if due is not None:
            due = max(now + 1, due)
            due = -(-due // self._step_s) * self._step_s
            heapq.heappush(self._queue, (due, number))
        one.due = due
        machine = one.run.machine
        held = None if machine is None else machine.series
        if held != one.held:
            if one.held is not None:
                self._holders[one.held].discard(number)
                if not self._holders[one.held]:
                    del self._holders[one.held]
            if held is not None:
                self._holders[held].add(number)
            one.held = held
        waits = one.limit if one.run.waits_for_price else one.run.moves_below
        if waits != one.waits:
            if one.waits is not None:
                self._waiting[one.waits].discard(number)
                if not self._waiting[one.waits]:
                    del self._waiting[one.waits]
            if waits is not None:
                self._waiting[waits].add(number)
            one.waits = waits
