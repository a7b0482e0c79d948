"""The daemon's own price history as a recorded market.

What was not polled is not known: nothing can be launched then, and what runs goes on. An offer that is not there when
polling resumes has gone meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from spotd.backtest.collecting import MarketCollector
from spotd.backtest.recorded import GONE, UNKNOWN
from spotd.backtest.refusals import BacktestRefused
from spotd.backtest.rows import BIDS, recorded_offer
from spotd.history.past import PastUnreadable, WholePast, read_past
from spotd.history.spans import Spell, Watch
from spotd_providers.contract.values import Market


def read_price_history(path: Path, found: MarketCollector) -> list[str]:
    """Read the file; return what is coarser than it was, in sentences.

    Raises:
        BacktestRefused: naming the file.
    """
    notes: list[str] = []

    def take(past: WholePast) -> None:
        for spans in past.watches.values():
            for since, until in spans:
                found.cover(since)
                found.cover(until)
        for gpu, count in past.kinds:
            found.seen.setdefault((gpu, count), 1)
        is_coarse = False
        for one in past.offers:
            is_spot = one.market is Market.SPOT
            number = found.number_of(
                recorded_offer(
                    provider=one.provider,
                    name=one.offer,
                    gpu=one.gpu,
                    count=one.gpu_count,
                    market=one.market,
                    pays_bid=is_spot and one.provider in BIDS,
                    storage=one.storage,
                    pool=one.pool,
                )
            )
            if number is None:
                continue
            is_coarse = is_coarse or any(since < past.exact_from for since, _, _ in one.spells)
            for at, price in changes_of(one.spells, past.watches.get(one.provider, ())):
                found.add(at, number, price)
        if is_coarse:
            exact = datetime.fromtimestamp(past.exact_from, UTC)
            notes.append(
                f"before {exact:%Y-%m-%d %H:%M} UTC {path.name} holds one price for each offer and quarter of a day"
            )

    try:
        read_past(path, found.is_wanted, take)
    except PastUnreadable as exc:
        raise BacktestRefused(f"{path}: {exc}", hint="spotctl doctor, or another --history") from exc
    return notes


def changes_of(spells: Sequence[Spell], watches: Sequence[Watch]) -> Iterator[tuple[int, int]]:
    """Yield instant and price of each change of an offer, where what was not watched is unknown."""
    starts = [since for since, _, _ in spells]
    for since, until in watches:
        place = bisect_left(starts, since)
        if place and spells[place - 1][1] > since:
            place -= 1
        at = since
        while place < len(spells) and spells[place][0] < until:
            begins, ends, price = spells[place]
            if begins > at:
                yield at, GONE
            yield max(begins, at), price
            at = min(ends, until)
            place += 1
        if at < until:
            yield at, GONE
        yield until, UNKNOWN
