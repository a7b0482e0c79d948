"""What a GPU cost at vast.ai in the past: percentiles of its market, hour by hour, as its metrics state them.

vast.ai keeps no prices of single offers. Each percentile of what could be had is given as an offer of one GPU, of equal
weight, on demand: an approximation of the market that the figures are of. An account without a machine of its own to
rent out may be shown none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from spotd_providers.contract.errors import NotSupported, RequestRejected
from spotd_providers.contract.gpus import GPUS, canonical
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, micro_usd
from spotd_providers.kit.shapes import Lenient, Row, as_model
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.wire import METRICS, WHO

NAMES_AT_ONCE: Final = 8
STEP: Final = timedelta(hours=1)
KEPT: Final = timedelta(days=90)
POINTS_MAX: Final = 10_000
"""Of one GPU: an hourly figure for more than a year."""
PRICE_MAX: Final = 10_000.0
SHARES: Final = ("p10", "median", "p90")
NAMES: Final = tuple(sorted({name for row in GPUS for name in row.vast}))
_Price = Annotated[float | None, Lenient]
_Prices = Annotated[list[_Price], Field(max_length=POINTS_MAX)]


class _Pricing(Row):
    timestamps: Annotated[list[Annotated[int | None, Lenient]], Field(max_length=POINTS_MAX)]
    avail_p10: _Prices = Field(default_factory=list)
    avail_median: _Prices = Field(default_factory=list)
    avail_p90: _Prices = Field(default_factory=list)


class _Metrics(Row):
    pricing: _Pricing


class _HistoryReply(Row):
    needs_machine: bool = False
    gpus: dict[str, Any] | list[Any] = Field(default_factory=dict)


class VastPriceHistory:
    """`Power.PRICE_HISTORY`. A page is a few GPUs; the place of the first in the list of names is the cursor."""

    _client: VastClient
    _services: Services

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what some GPUs have cost.

        Raises:
            NotSupported: vast.ai shows it only to accounts with a machine.
        """
        until = self._services.clock.now()
        since = max(since, until - KEPT)
        if after and not (after.isdecimal() and len(after) <= 4 and int(after) < len(NAMES)):
            raise RequestRejected(f"vast.ai has no page {after} of past prices", field="after", reason="unknown page")
        place = int(after or 0)
        names = NAMES[place : place + NAMES_AT_ONCE]
        params: dict[str, str | int] = {
            "gpu_name": ",".join(names),
            "start": int(since.timestamp()),
            "end": int(until.timestamp()),
            "step": int(STEP.total_seconds()),
        }
        value = await self._client.ask("GET", "/api/v0/metrics/gpu/history/", what=METRICS, params=params)
        reply = as_model(_HistoryReply, value, who=WHO, what="past prices")
        if reply.needs_machine:
            raise NotSupported("vast.ai shows its price history only to accounts that have a machine to rent out")
        following = place + NAMES_AT_ONCE
        offers, rejected = offers_of_past(reply.gpus if isinstance(reply.gpus, dict) else {})
        return PriceHistoryPage(
            offers=offers,
            since=since,
            until=until,
            next="" if following >= len(NAMES) else str(following),
            rejected=rejected,
            left=-(-max(0, len(NAMES) - following) // NAMES_AT_ONCE),
        )


def offers_of_past(gpus: Mapping[str, Any]) -> tuple[tuple[OfferPriceHistory, ...], int]:
    """Return each percentile of each GPU as an offer, and how many GPUs cannot be used."""
    offers: list[OfferPriceHistory] = []
    rejected = 0
    for name, raw in list(gpus.items())[: len(NAMES)]:
        try:
            # Not row_or_none: three months of hours are more values than any row of an offer has.
            row = _Metrics.model_validate(raw)
        except ValidationError:
            rejected += 1
            continue
        gpu = canonical(PROVIDER, name)
        pricing = row.pricing
        for share, prices in zip(SHARES, (pricing.avail_p10, pricing.avail_median, pricing.avail_p90), strict=True):
            changes = _changes(pricing.timestamps, prices)
            if any(price is not None for _, price in changes):
                offers.append(
                    OfferPriceHistory(
                        provider=PROVIDER,
                        offer_id=OfferId(f"market {share} of {gpu}"),
                        pool=PoolId(f"market of {gpu}"),
                        market=Market.ON_DEMAND,
                        gpu=gpu,
                        gpu_count=1,
                        storage_price=MicroUsdPerGbMonth(0),
                        changes=changes,
                    )
                )
    return tuple(offers), rejected


def _changes(
    seconds: Sequence[int | None], prices: Sequence[float | None]
) -> tuple[tuple[datetime, MicroUsdPerHour | None], ...]:
    """Return the figures with their instants; where there is none, nothing is known to have been on offer."""
    found: dict[datetime, MicroUsdPerHour | None] = {}
    for second, price in zip(seconds, prices, strict=False):
        if second is not None and 0 <= second < 2**32:
            is_price = price is not None and 0 < price <= PRICE_MAX
            found[datetime.fromtimestamp(second, UTC)] = MicroUsdPerHour(micro_usd(price)) if is_price else None  # type: ignore[arg-type] # it is a price
    return tuple(sorted(found.items(), key=lambda change: change[0]))
