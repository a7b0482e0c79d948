"""What EC2's spot machines cost in the past: AWS keeps it for ninety days, and sends it type by type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.aws.doctor import WHO
from spotd_providers.aws.offers import GP3_PRICE, PROVIDER, offer_id, price_changes
from spotd_providers.aws.region import Region
from spotd_providers.aws.wire import Hardware
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import Market, PoolId
from spotd_providers.kit.calls import past_page

KEPT: Final = timedelta(days=90)


class AwsPriceHistory:
    """`Power.PRICE_HISTORY` for a provider with regions. A page is one type in one region; its name is the cursor."""

    _regions: Mapping[str, Region]
    _services: Services

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what one type has cost in each zone of a region.

        The newest change before `since` comes with the rows, and is the price that held then.
        """
        sold = {
            f"{name}/{kind}": (region, hardware)
            for name, region in sorted(self._regions.items())
            for kind, hardware in sorted((await region.kinds()).usable.items())
            if hardware.gpu_count
        }
        page = past_page(list(sold), since, self._services.clock.now(), after=after, kept=KEPT, who=WHO)
        if not page.names:
            return page.answer()
        region, hardware = sold[page.names[0]]
        rows = await region.history_rows(hardware.instance_type, page.since)
        return page.answer(*offers_of_past(rows, hardware))


def offers_of_past(rows: Iterable[Any], hardware: Hardware) -> tuple[tuple[OfferPriceHistory, ...], int]:
    """Return the changes of each zone, and how many rows cannot be used."""
    found, rejected = price_changes(rows, hardware.instance_type)
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
