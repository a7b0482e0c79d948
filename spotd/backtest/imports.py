"""Recorded lists as statements that the price history takes over: what each offer cost in the span of the list.

The readers are those of a back-test, and so are their bounds and sentences. What is older than prices are kept, or
dated after now, is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spotd.backtest.recorded import BacktestRefused, instant
from spotd.backtest.rows import MarketCollector
from spotd.backtest.traces import TraceDefaults, read_into
from spotd_providers.contract.values import Offer

OFFERS_AT_ONCE: Final = 500
CHANGES_AT_ONCE: Final = 20_000
"""Of one request: half a megabyte of JSON."""


class _Recent(MarketCollector):
    """Collects the changes of a span; of those before it only the price that holds at its beginning.

    Attributes:
        too_old, ahead: lines that were left out, as they are before the span or after it.
        newest: the second of the last line that is not after it, -1 before there is one.
    """

    def __init__(self, since: int, now: int) -> None:
        super().__init__(lambda _gpu, count: count > 0)
        self._since = since
        self._now = now
        self._newest: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self.too_old = self.ahead = 0
        self.newest = -1

    def add(self, at: int, number: int, price: int) -> None:
        """Add a change; what changes nothing costs no memory."""
        if at >= self._now:
            self.ahead += 1
            return
        self.newest = max(self.newest, at)
        if at < self._since:
            self.too_old += 1
            self._held[number] = price
            return
        if number in self._held:
            self._put(self._since, number, self._held.pop(number))
        self._put(at, number, price)

    def _put(self, at: int, number: int, price: int) -> None:
        if self._newest.get(number) != price:
            self._newest[number] = price
            super().add(at, number, price)

    def finish(self) -> None:
        """Add what held from the beginning on and never changed after it."""
        for number, price in self._held.items():
            self._put(self._since, number, price)
        self._held.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrices:
    """What was read of recorded lists.

    Attributes:
        notes: what a reader of the result must know, in sentences.
        prices: how many changes the requests hold.
        requests: bodies for the daemon, each whole for its offers.
    """

    notes: tuple[str, ...]
    prices: int
    since: int
    until: int
    offers: tuple[Offer, ...]
    _changes: Mapping[int, list[tuple[int, int]]] = field(repr=False)

    def requests(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each body, and how many changes it holds."""
        rows: list[dict[str, Any]] = []
        size = 0
        for number, changes in self._changes.items():
            if rows and (len(rows) >= OFFERS_AT_ONCE or size + len(changes) > CHANGES_AT_ONCE):
                yield {"since_s": self.since, "until_s": self.until, "offers": rows}, size
                rows, size = [], 0
            if len(changes) > CHANGES_AT_ONCE:
                yield from self._parts(number, changes)
                continue
            rows.append(_row(self.offers[number], changes))
            size += len(changes)
        if rows:
            yield {"since_s": self.since, "until_s": self.until, "offers": rows}, size

    def _parts(self, number: int, changes: list[tuple[int, int]]) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield an offer with very many changes in spans, one after another."""
        for start in range(0, len(changes), CHANGES_AT_ONCE):
            some = changes[start : start + CHANGES_AT_ONCE]
            rest = changes[start + CHANGES_AT_ONCE : start + CHANGES_AT_ONCE + 1]
            since = self.since if start == 0 else some[0][0]
            until = rest[0][0] if rest else self.until
            yield {"since_s": since, "until_s": until, "offers": [_row(self.offers[number], some)]}, len(some)


def _row(offer: Offer, changes: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "provider": offer.provider,
        "offer": offer.offer_id,
        "pool": offer.pool,
        "gpu": offer.gpu,
        "count": offer.gpu_count,
        "market": offer.market.value,
        "storage_microusd_gb_month": offer.storage_price,
        "changes": [[at, price if price > 0 else None] for at, price in changes],
    }


def read_lists(place: Path, *, since: int, now: int, defaults: TraceDefaults) -> RecordedPrices:
    """Read a folder or a file of recorded prices, from an instant on.

    Raises:
        BacktestRefused: naming what is wrong, its place and a way out.
    """
    found = _Recent(since, now)
    notes = read_into(place, found, defaults)
    if found.too_old and found.newest < since:
        raise BacktestRefused(
            f"{place} ends on {instant(found.newest):%Y-%m-%d}, before the time to import, which begins on "
            f"{instant(since):%Y-%m-%d}",
            hint="prices are kept for 90 days; spotctl backtest --history reads older lists as they are",
        )
    found.finish()
    if found.too_old:
        notes.append(f"{found.too_old:,} changes are older than prices are kept, and left out")
    if found.ahead:
        notes.append(f"{found.ahead:,} changes are dated after now, and left out")
    if not found.has_changes:
        return RecordedPrices(notes=tuple(notes), prices=0, since=since, until=now, offers=(), _changes={})
    market = found.market()
    changes: dict[int, dict[int, int]] = {}
    for at, number, price in zip(market.instants, market.numbers, market.prices, strict=True):
        changes.setdefault(number, {})[at] = price  # of several in one second the last holds
    by_series = {number: list(own.items()) for number, own in changes.items()}
    return RecordedPrices(
        notes=tuple(notes),
        prices=sum(map(len, by_series.values())),
        since=max(market.begins_at, since),
        until=min(market.ends_at + 1, now),
        offers=market.series,
        _changes=by_series,
    )
