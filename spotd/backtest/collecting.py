"""A recorded market in the making: what every format of a history is read into."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from spotd.backtest.recorded import RecordedMarket
from spotd.backtest.refusals import BacktestRefused
from spotd.backtest.run import SeriesKey, series_key
from spotd_providers.contract.values import Offer

CHANGES_MAX: Final = 20_000_000
"""About half a gigabyte of memory, shared by all processes."""
INSTANT_MAX: Final = 4_102_444_800
"""The year 2100: an instant after it is a mistake, or of another unit."""


class MarketCollector:
    """Collects the series and changes that matter to one job, and from when until when the market was recorded.

    Attributes:
        seen: how many series there were of each GPU and count, wanted or not.
    """

    def __init__(self, is_wanted: Callable[[str, int], bool]) -> None:
        self.is_wanted = is_wanted
        self._series: list[Offer] = []
        self._numbers: dict[SeriesKey, int | None] = {}
        self._instants, self._known, self._prices = array("q"), array("q"), array("q")
        self._first: int | None = None
        self._last: int | None = None
        self.seen: dict[tuple[str, int], int] = {}

    def number_of(self, offer: Offer) -> int | None:
        """Return the number of the series of this offer, `None` where the job can do nothing with it."""
        key = series_key(offer)
        if key not in self._numbers:
            kind = (offer.gpu, offer.gpu_count)
            self.seen[kind] = self.seen.get(kind, 0) + 1
            wanted = self.is_wanted(*kind)
            self._numbers[key] = len(self._series) if wanted else None
            if wanted:
                self._series.append(offer)
        return self._numbers[key]

    def add(self, at: int, number: int, price: int) -> None:
        """Add a change of a series."""
        if len(self._instants) >= CHANGES_MAX:
            raise BacktestRefused(
                f"the history holds more than {CHANGES_MAX:,} changes of this job's GPUs",
                hint="give a folder with fewer files, or a job that asks for fewer kinds of GPU",
            )
        self._instants.append(at)
        self._known.append(number)
        self._prices.append(price)

    def cover(self, at: int) -> None:
        """Note that the market was recorded at this instant."""
        if self._first is None or at < self._first:
            self._first = at
        if self._last is None or at > self._last:
            self._last = at

    def market(self) -> RecordedMarket:
        """Return everything that was collected, in order of time.

        Raises:
            BacktestRefused: there is nothing to play, or nothing that the job can use.
        """
        if self._first is None or self._last is None:
            raise BacktestRefused("the history is empty", hint="spotctl backtest --help names the formats of a history")
        if self._first == self._last:
            raise BacktestRefused(
                "the history holds one instant only, in which nothing can run",
                hint="record for longer than the job runs, or name another history",
            )
        if not self._series:
            sold = ", ".join(f"{gpu}:{count}" for gpu, count in sorted(self.seen)[:8]) or "nothing"
            raise BacktestRefused(
                "nothing in the history has the GPU that the job asks for",
                hint=f"the history holds {sold}; change gpu in the job, or name another history",
            )
        instants, known, prices = self._instants, self._known, self._prices
        order = range(len(instants))
        if any(instants[place] > instants[place + 1] for place in range(len(instants) - 1)):
            by_time = sorted(order, key=instants.__getitem__)
            instants = array("q", (instants[place] for place in by_time))
            known = array("q", (known[place] for place in by_time))
            prices = array("q", (prices[place] for place in by_time))
        return RecordedMarket(
            series=tuple(self._series),
            instants=instants,
            numbers=known,
            prices=prices,
            begins_at=self._first,
            ends_at=self._last,
        )
