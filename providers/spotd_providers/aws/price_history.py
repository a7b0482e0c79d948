"""What EC2's spot machines cost in the past: AWS keeps it for ninety days, and sends it type by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from spotd_providers.aws.offers import GP3_PRICE, PROVIDER, offer_id
from spotd_providers.aws.region import LINUX_PRODUCTS, Pool, Region
from spotd_providers.aws.wire import Hardware, PriceRow, spot_price
from spotd_providers.contract.errors import RequestRejected
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import Market, MicroUsdPerHour, PoolId
from spotd_providers.kit.shapes import row_or_none

KEPT: Final = timedelta(days=90)


class AwsPriceHistory:
    """`Power.PRICE_HISTORY` for a provider with regions. A page is one type in one region; its name is the cursor."""

    _regions: Mapping[str, Region]
    _services: Services

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what one type has cost in each zone of a region.

        The newest change before `since` comes with the rows, and is the price that held then.
        """
        until = self._services.clock.now()
        since = max(since, until - KEPT)
        pages = [
            (f"{name}/{kind}", region, hardware)
            for name, region in sorted(self._regions.items())
            for kind, hardware in sorted((await region.kinds()).usable.items())
            if hardware.gpu_count
        ]
        if after and after not in {name for name, _, _ in pages}:
            raise RequestRejected(f"AWS has no page {after} of past prices", field="after", reason="unknown page")
        names = [name for name, _, _ in pages]
        place = names.index(after) if after else 0
        if not pages:
            return PriceHistoryPage(offers=(), since=since, until=until)
        _, region, hardware = pages[place]
        rows = await region.history_rows(hardware.instance_type, since)
        offers, rejected = offers_of_past(rows, hardware)
        return PriceHistoryPage(
            offers=offers,
            since=since,
            until=until,
            next="" if place + 1 == len(names) else names[place + 1],
            rejected=rejected,
            left=len(names) - place - 1,
        )


def offers_of_past(rows: Iterable[Any], hardware: Hardware) -> tuple[tuple[OfferPriceHistory, ...], int]:
    """Return the changes of each zone, and how many rows cannot be used."""
    found: dict[Pool, dict[datetime, MicroUsdPerHour]] = {}
    rejected = 0
    for raw in rows:
        row = row_or_none(PriceRow, raw)
        if row is None or row.Timestamp is None or row.Timestamp.tzinfo is None:
            rejected += 1
            continue
        if row.ProductDescription not in LINUX_PRODUCTS or row.InstanceType != hardware.instance_type:
            continue
        try:
            price = spot_price(row.SpotPrice)
        except ValueError:
            rejected += 1
            continue
        found.setdefault((row.InstanceType, row.AvailabilityZone), {})[row.Timestamp.astimezone(UTC)] = price
    offers = tuple(
        OfferPriceHistory(
            provider=PROVIDER,
            offer_id=offer_id(pool, Market.SPOT),
            pool=PoolId(":".join(pool)),
            market=Market.SPOT,
            gpu=hardware.gpu,
            gpu_count=hardware.gpu_count,
            storage_price=GP3_PRICE,
            changes=tuple(sorted(changes.items())),
        )
        for pool, changes in sorted(found.items())
    )
    return offers, rejected
