"""What a GPU-hour cost in the last week, by the markets' own records: what a ceiling can be chosen by before any poll.

Theory. A market that keeps its past states it in pages (`Power.PRICE_HISTORY`). They are laid into a price history of
their own, in a folder that goes away, and are asked as the daemon's history is, in effective prices: with the fee that
the configuration states. A figure needs a day of prices at least; less is said, and nothing proposed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import anyio

from spotd.history import HISTORY_FILE, IMPORTED_FILE, History, HistoryUnavailable, PriceTerms, SeriesQuery
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import KnowsPastPrices, PriceHistoryPage, Provider
from spotd_providers.contract.values import MICRO, Market, Power, ProviderName

WEEK: Final = timedelta(days=7)
DEADLINE_S: Final = 45.0
"""For one market: a person waits for it."""
PAGES_MAX: Final = 500
KNOWN_MIN: Final = timedelta(days=1)
GPUS_SHOWN: Final = 12
_MIDDLE: Final = 2
"""The median among the shares of a `Bucket`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWeek:
    """What is known of the last week.

    Attributes:
        lines: one sentence for each GPU, the one with most offers first.
        notes: why there is nothing, or not all.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...]


async def past_week(
    markets: Mapping[ProviderName, tuple[AbstractAsyncContextManager[Provider], int]], folder: Path, now: datetime
) -> PastWeek:
    """Ask each market for its last week.

    Args:
        markets: how to open each one, and its fee in parts per million.
        folder: for files that are of no use afterwards.
    """
    notes: list[str] = []
    prices = 0
    history = History(folder / HISTORY_FILE, imports=folder / IMPORTED_FILE)
    try:
        for name, (opened, _) in markets.items():
            taken, note = await _take_over(history, name, opened, now)
            prices += taken
            notes += [note] if note else []
        fees = PriceTerms(fee_ppm={name: fee for name, (_, fee) in markets.items()})
        lines = _sentences(history, fees, now) if prices else []
    except HistoryUnavailable as exc:
        return PastWeek(lines=(), notes=(*notes, str(exc)))
    finally:
        history.close()
    if prices and not lines:
        notes.append("the records of the last week cover less than a day")
    return PastWeek(lines=tuple(lines), notes=tuple(notes))


async def _take_over(
    history: History, name: ProviderName, opened: AbstractAsyncContextManager[Provider], now: datetime
) -> tuple[int, str]:
    """Lay the market's week into the history; return how many prices came, and what is to be said of it."""
    prices = 0
    try:
        with anyio.fail_after(DEADLINE_S):
            async with opened as provider:
                power = provider.capabilities.get(Power.PRICE_HISTORY)
                if not isinstance(provider, KnowsPastPrices) or power is None or not power.available:
                    return 0, ""
                async for page in _pages(provider, now - WEEK):
                    prices += history.take_over(page, now=int(now.timestamp()))
    except TimeoutError:
        return prices, f"not all past prices of {name} came within {DEADLINE_S:.0f} s"
    except ProviderError as exc:
        return prices, f"{name} states no past prices now: {str(exc) or type(exc).__name__}"
    return prices, ""


async def _pages(provider: KnowsPastPrices, since: datetime) -> AsyncIterator[PriceHistoryPage]:
    after = ""
    for _ in range(PAGES_MAX):
        page = await provider.price_history(since, after=after)
        yield page
        if not page.next or page.next == after:
            return
        after = page.next


def _sentences(history: History, fees: PriceTerms, now: datetime) -> list[str]:
    until = int(now.timestamp())
    since = until - int(WEEK.total_seconds())
    found = history.ask(SeriesQuery(since=since, until=until), fees)
    rows = [
        (bucket.offers, group.gpu, group.market, bucket.quantiles[_MIDDLE], until - bucket.begins)
        for group in found.groups
        for bucket in group.buckets
        if until - bucket.begins >= KNOWN_MIN.total_seconds()
    ]
    rows.sort(key=lambda row: (-row[0], row[1], row[2].value))
    return [
        f"{gpu}: half of the last {_span(known_s)} was under ${median / MICRO:.4g}"
        f" ({'spot' if market is Market.SPOT else 'on demand'})"
        for _, gpu, market, median, known_s in rows[:GPUS_SHOWN]
    ]


def _span(seconds: int) -> str:
    days = round(seconds / 86_400)
    return "week" if days >= WEEK.days else "day" if days == 1 else f"{days} days"
