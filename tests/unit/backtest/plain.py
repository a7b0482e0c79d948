"""The plain replay: every run alone, the whole market anew at every step, and the core asked each time."""

from __future__ import annotations

from dataclasses import replace

from spotd.backtest.recorded import UNKNOWN, RecordedMarket, instant
from spotd.backtest.run import JobRun
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd_providers.contract.values import MicroUsdPerHour


def played(run: JobRun, recorded: RecordedMarket, start: int, step_s: int, until: int | None = None) -> int:
    """Bring the run to its end or that of the record; return how many steps that took."""
    prices = [UNKNOWN] * len(recorded.series)
    position, now, steps = 0, start, 0
    while now <= (recorded.ends_at if until is None else until) and not run.is_over:
        while position < len(recorded.instants) and recorded.instants[position] <= now:
            number, price = recorded.numbers[position], recorded.prices[position]
            prices[number] = price
            if run.machine is not None and run.machine.series == number:
                run.machine.observe(recorded.instants[position], price)
            position += 1
        run.step(now, snapshot(recorded, prices, now))
        now += step_s
        steps += 1
    return steps


def snapshot(recorded: RecordedMarket, prices: list[int], now: int) -> MarketSnapshot:
    """The market at this instant, built of nothing but the prices."""
    cache = {}
    for name in recorded.providers:
        offers = tuple(
            replace(offer, gpu_price=MicroUsdPerHour(price))
            for offer, price in zip(recorded.series, prices, strict=True)
            if offer.provider == name and price >= 0
        )
        cache[name] = ProviderOffers(
            provider=name,
            offer_index=build_offer_index(offers),
            at=instant(now),
            sells_spot=name in recorded.spot_providers(),
            changes_bids=name in recorded.bid_providers(),
        )
    return MarketSnapshot(by_provider=cache, lows=recorded.lows())
