"""From AWS's price rows to offers: one per type, zone and market, lost together as the pool `type:zone`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from spotd_providers.aws.advisor import Band
from spotd_providers.aws.hardware import Hardware
from spotd_providers.aws.ondemand import AwsOnDemandPrices
from spotd_providers.aws.quotas import family_quota, region_quota
from spotd_providers.aws.region import IMAGE_GB, LINUX_PRODUCTS, Pool
from spotd_providers.aws.settings import AwsSettings
from spotd_providers.aws.wire import PriceRow, spot_price
from spotd_providers.contract.money import (
    HOURS_PER_STORAGE_MONTH,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    micro_usd,
)
from spotd_providers.contract.values import (
    Interruption,
    Market,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.shapes import row_or_none

PROVIDER: Final = ProviderName("aws")
GP3_PRICE: Final = MicroUsdPerGbMonth(80_000)
"""Of a general purpose disk in us-east-1; other regions cost up to half more, a cent per hour for 100 GB."""
GP3_MB_PER_S_FREE: Final = 125
THROUGHPUT_PRICE: Final = 40_000
"""Micro-dollars per MB/s and month beyond what is free."""
ADDRESS_PRICE: Final = 5_000
"""Micro-dollars per hour of a public IPv4 address, which each machine has."""
DISK_GB_MAX: Final = 16_000
_OLDEST: Final = datetime.min.replace(tzinfo=UTC)


def storage_fixed(image_gb: int, mb_per_s: int) -> MicroUsdPerHour:
    """Compute what AWS bills per hour for each machine besides the disk that its job asked for, rounded up."""
    monthly = GP3_PRICE * image_gb + THROUGHPUT_PRICE * max(0, mb_per_s - GP3_MB_PER_S_FREE)
    return MicroUsdPerHour(-(-monthly // HOURS_PER_STORAGE_MONTH) + ADDRESS_PRICE)


def current_prices(rows: Iterable[Any]) -> tuple[dict[Pool, MicroUsdPerHour], list[Rejected]]:
    """Return the price in force of each pool: that of its newest Linux row. If that is invalid, the pool has none."""
    newest: dict[Pool, PriceRow] = {}
    rejected: list[Rejected] = []
    for raw in rows:
        row = row_or_none(PriceRow, raw)
        if row is None:
            rejected.append(Rejected(offer_id="unreadable", reason="a price row lacks type, zone, product or price"))
            continue
        if row.ProductDescription not in LINUX_PRODUCTS:
            continue
        pool = (row.InstanceType, row.AvailabilityZone)
        known = newest.get(pool)
        if known is None or _began(known) <= _began(row):
            newest[pool] = row
    prices: dict[Pool, MicroUsdPerHour] = {}
    for pool, row in newest.items():
        try:
            prices[pool] = spot_price(row.SpotPrice)
        except ValueError as exc:
            rejected.append(Rejected(offer_id=offer_id(pool, Market.SPOT), reason=str(exc)))
    return prices, rejected


def on_demand_prices(
    pools: Iterable[Pool], on_demand: AwsOnDemandPrices
) -> tuple[dict[Pool, MicroUsdPerHour], list[Rejected]]:
    """Return the list price of each pool, and the pools of which none is known."""
    prices: dict[Pool, MicroUsdPerHour] = {}
    rejected: list[Rejected] = []
    for pool in pools:
        price = on_demand.price(pool[0])
        if price is None:
            rejected.append(Rejected(offer_id=offer_id(pool, Market.ON_DEMAND), reason=on_demand.absence()))
        else:
            prices[pool] = price
    return prices, rejected


def offer_id(pool: Pool, market: Market) -> OfferId:
    """Name an offer, the same as long as the type is sold in the zone."""
    return OfferId(f"{pool[0]}:{pool[1]}:{market.value}")


def offers_of(
    prices: Mapping[Pool, MicroUsdPerHour],
    market: Market,
    kinds: Mapping[str, Hardware],
    zones: Collection[str],
    on_demand: AwsOnDemandPrices,
    settings: AwsSettings,
    *,
    scores: Mapping[Pool, int],
    bands: Mapping[tuple[str, str], Band],
    image_gb: int = IMAGE_GB,
) -> tuple[list[Offer], list[Rejected]]:
    """Offer every priced pool, or reject it with a reason: `zones` are those that machines can be launched in.

    `scores` say how likely AWS gives a machine there, `bands` how often types are interrupted in their regions.
    """
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    egress = MicroUsdPerGb(micro_usd(settings.egress_usd_per_gb))
    for pool, price in prices.items():
        kind, zone = kinds.get(pool[0]), pool[1]
        identity = offer_id(pool, market)
        if kind is None:
            rejected.append(Rejected(offer_id=identity, reason="what this instance type holds is not known"))
            continue
        if market.value not in kind.sold_as:
            rejected.append(Rejected(offer_id=identity, reason=f"the type is not sold {market.value}"))
            continue
        if zone not in zones:
            reason = f"there is no subnet with free addresses in {zone}; see subnets"
            rejected.append(Rejected(offer_id=identity, reason=reason))
            continue
        band = bands.get((on_demand.region, pool[0]))
        offers.append(
            Offer(
                provider=PROVIDER,
                offer_id=identity,
                pool=PoolId(f"{pool[0]}:{zone}"),
                quotas=(family_quota(pool[0], on_demand.region, market), region_quota(on_demand.region)),
                market=market,
                interruption=Interruption.NOTICE if market is Market.SPOT else Interruption.NEVER,
                gpu=kind.gpu,
                gpu_count=kind.gpu_count,
                gpu_vram_mb=kind.gpu_vram_mb,
                gpu_price=price,
                pays_bid=False,
                on_demand_price=on_demand.price(pool[0]),
                storage_price=GP3_PRICE,
                storage_fixed=storage_fixed(image_gb, settings.volume_mb_per_s),
                upload_price=egress,
                region=on_demand.region,
                cpus=float(kind.cpus) if kind.cpus is not None else None,
                memory_mb=kind.memory_mb,
                disk_gb_max=DISK_GB_MAX,
                capacity_score=scores.get(pool),
                hazard_ppm=None if band is None else band.hazard_ppm,
                extra={"region": on_demand.region, "zone": zone, "type": pool[0]},
            )
        )
    return offers, rejected


def _began(row: PriceRow) -> datetime:
    at = row.Timestamp
    return _OLDEST if at is None or at.tzinfo is None else at
