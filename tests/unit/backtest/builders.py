"""Recorded markets and jobs for tests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from datetime import timedelta
from random import Random

from spotd.backtest.recorded import GONE, UNKNOWN, Change, RecordedMarket
from spotd_jobs.spec.model import CheckpointPolicy, GpuAlternative, JobSpec, MarketChoice, PriceLimit, Resources
from spotd_providers.contract.values import (
    HostId,
    Interruption,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)

START = 1_790_000_040 // 60 * 60
VAST, CLOUD = ProviderName("vast"), ProviderName("cloud")
FEES = {VAST: 1_200_000, CLOUD: 1_000_000}


def recorded_market(
    series: Sequence[Offer], changes: Iterable[Change], *, begins_at: int, ends_at: int
) -> RecordedMarket:
    """Return the market of these changes, which may come in any order; of one instant the last one given holds."""
    instants, numbers, prices = array("q"), array("q"), array("q")
    for at, number, price in sorted(changes, key=lambda change: change[0]):
        instants.append(at)
        numbers.append(number)
        prices.append(price)
    return RecordedMarket(
        series=tuple(series),
        instants=instants,
        numbers=numbers,
        prices=prices,
        begins_at=begins_at,
        ends_at=ends_at,
    )


def offer(
    name: str = "a",
    *,
    provider: ProviderName = VAST,
    market: Market = Market.SPOT,
    pays_bid: bool = True,
    host: bool = True,
    gpu: str = "RTX_4090",
    count: int = 1,
    storage: int = 0,
    upload: int = 0,
) -> Offer:
    return Offer(
        provider=provider,
        offer_id=OfferId(name),
        host_id=HostId(name) if host else None,
        pool=PoolId(name),
        market=market,
        interruption=Interruption.NEVER if market is Market.ON_DEMAND else Interruption.SUDDEN,
        gpu=gpu,
        gpu_count=count,
        gpu_price=MicroUsdPerHour(0),
        pays_bid=pays_bid,
        storage_price=MicroUsdPerGbMonth(storage),
        upload_price=MicroUsdPerGb(upload),
        on_demand_price=MicroUsdPerHour(900_000),
    )


def job(
    ceiling: int = 400_000,
    *,
    every: timedelta = timedelta(minutes=15),
    market: MarketChoice | None = None,
    budget: int | None = None,
    whole: bool = False,
) -> JobSpec:
    return JobSpec(
        name="train",
        run=("true",),
        image="scratch",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), market=market),
        price=PriceLimit(machine_hour=ceiling) if whole else PriceLimit(per_gpu_hour=ceiling),
        job_budget=budget,
        checkpoint=CheckpointPolicy(every=every),
    )


def random_market(
    seed: int, *, hours: int = 8, offers: int = 5, kinds: Sequence[tuple[str, int]] = (("RTX_4090", 1),)
) -> RecordedMarket:
    """A market in which everything happens: bids and market prices, absences, unknown times, expensive hours."""
    rng = Random(seed)
    series: list[Offer] = []
    for number in range(offers):
        kind = rng.random()
        cloud = kind < 0.4
        gpu, count = kinds[number % len(kinds)]
        series.append(
            offer(
                f"{number}",
                provider=CLOUD if cloud else VAST,
                market=Market.ON_DEMAND if kind > 0.85 else Market.SPOT,
                pays_bid=not cloud and kind <= 0.85,
                host=not cloud,
                gpu=gpu,
                count=count,
                storage=rng.choice((0, 150_000)),
                upload=rng.choice((0, 0, 20_000)),
            )
        )
    changes: list[Change] = []
    for number in range(offers):
        at = START - rng.randrange(7200)
        while at < START + hours * 3600:
            roll = rng.random()
            price = rng.randrange(200_000, 480_000, 10_000) * series[number].gpu_count
            changes.append((at, number, GONE if roll < 0.2 else UNKNOWN if roll < 0.27 else price))
            at += int(rng.expovariate(1 / rng.choice((200, 1500, 5000)))) + 1
    return recorded_market(series, changes, begins_at=START, ends_at=START + hours * 3600)
