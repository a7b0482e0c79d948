"""What is on sale at Azure: its price list, which needs no key, and what the Resource Manager says of sizes.

The price list names sizes and no hardware; the list of sizes names hardware and no GPU. Which GPU a size has is known
here by the size's name alone, so a size that no pattern knows is rejected. Every size has a row for Linux and one for
Windows, which cost more and differ in the product's name only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote

from pydantic import AliasPath, Field

from spotd_providers.azure.wire import COMPUTE_API, PROVIDER, SIZES_API, WHO, AzureSettings
from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.gpus import GpuInfo, azure_gpu
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    Interruption,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    OfferPage,
    OfferQuery,
    PoolId,
    QuotaId,
    Rejected,
    micro_usd,
)
from spotd_providers.kit.calls import Page, Rest, all_pages, ask_each, judge_apart, own_path
from spotd_providers.kit.rest import RestClient
from spotd_providers.kit.shapes import ROWS_MAX, Lenient, Row, listed_reasons, row_or_none, row_or_reason
from spotd_providers.kit.vm_market import GB_TO_MB, NAME_CHARS_MAX

OF_INTEREST: Final = "Standard_N"
"""All sizes with a GPU begin so."""
DISK_GB_STEPS: Final = (128, 256, 512, 1024, 2048, 4095)
"""A Premium SSD is billed as the next larger of these, and an OS disk has no more."""
IMAGE_GB: Final = 64
DISK_PRICE: Final = MicroUsdPerGbMonth(304_000)
"""Twice what a GB of a disk of 128 GB costs: one that a step leaves half empty costs that for each GB in use."""
FIXED_PRICE: Final = MicroUsdPerHour(32_000)
"""Of the first 128 GB, which hold the machine image, and of the public address."""
UPLOAD_PRICE: Final = MicroUsdPerGb(87_000)
KEPT: Final = timedelta(hours=1)
PRICE_ROWS_MAX: Final = 50_000
SizeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Prices = Mapping[tuple[str, Market], MicroUsdPerHour]
Rates = dict[tuple[str, str], int]


def disk_gb(wanted: int) -> int:
    """Return the size of the disk that holds the machine image and so much more."""
    return next((step for step in DISK_GB_STEPS if step >= wanted + IMAGE_GB), DISK_GB_STEPS[-1])


_WHOLE: Final = ("Standard_NV36ads_A10_v5", "Standard_NV72ads_A10_v5")
"""Of the sizes for graphics (NV), which have parts of a GPU."""


def _name_in(raw: Any, field: str) -> str | None:
    """Return what to call a row: `unreadable` without a name, `None` for one that is of no interest."""
    name = raw.get(field) if isinstance(raw, dict) else None
    if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
        return "unreadable"
    return name if name.startswith(OF_INTEREST) else None


class RetailPriceRow(Row):
    """One row of the retail price list; its price is judged apart, since only that of a wanted row matters."""

    size: Annotated[SizeName, Field(validation_alias="armSkuName")]
    region: Annotated[str, Field(validation_alias="armRegionName")]
    price: Annotated[Any, Field(validation_alias="retailPrice")] = None
    currency: Annotated[str, Field(validation_alias="currencyCode")]
    unit: Annotated[str, Field(validation_alias="unitOfMeasure")]
    kind: Annotated[str, Field(validation_alias="type")]
    product: Annotated[str, Field(validation_alias="productName")]
    sku: Annotated[str, Field(validation_alias="skuName")]
    meter: Annotated[str | None, Lenient, Field(validation_alias="meterName")] = None

    @property
    def market(self) -> Market | None:
        """On which market this is sold; `None` for kinds that spotd does not buy, Windows among them."""
        said = f"{self.sku} {self.meter or ''}".lower()
        is_hour = (self.kind, self.unit) == ("Consumption", "1 Hour")
        is_linux = self.product.endswith(("Series", "Series Linux"))
        if not is_hour or not is_linux or re.search(r"low priority|expired|spot ?plus", said):
            return None
        return Market.SPOT if re.search(r"\bspot\b", said) else Market.ON_DEMAND


def _dollars(value: Any) -> MicroUsdPerHour | None:
    """Read a price, which Azure writes as a number; `None` if it is none, or nothing."""
    try:
        return MicroUsdPerHour(micro_usd(value)) or None if type(value) in (int, float) else None
    except ValueError:
        return None


def prices_of(rows: Iterable[Any], region: str) -> tuple[Prices, list[Rejected]]:
    """Return the price of each size with a GPU on each market: the highest, should there be several."""
    found: dict[tuple[str, Market], MicroUsdPerHour] = {}
    odd: list[tuple[str, Market]] = []
    bad: list[Rejected] = []
    for raw in rows:
        if (name := _name_in(raw, "armSkuName")) is None:
            continue
        row = row_or_reason(RetailPriceRow, raw, offer_id=name)
        if isinstance(row, Rejected):
            bad.append(row)
        elif (market := row.market) is not None and row.region == region:
            price = _dollars(row.price) if row.currency == "USD" else None
            if price is None:
                odd.append((row.size, market))
            else:
                found[row.size, market] = max(price, found.get((row.size, market), price))
    names = [f"{size}:{region}:{market}" for size, market in dict.fromkeys(odd) if (size, market) not in found]
    return found, [*bad, *(Rejected(offer_id=one, reason="retailPrice: no price in US dollars") for one in names)]


class SizeRow(Row):
    """A size of machine, with its capabilities as texts."""

    name: SizeName
    family: Annotated[SizeName | None, Lenient] = None
    capabilities: list[Any] = Field(default_factory=list, max_length=200)
    restrictions: list[Any] = Field(default_factory=list, max_length=200)

    def says(self, name: str) -> str:
        rows = (one for one in self.capabilities if isinstance(one, dict) and one.get("name") == name)
        return next((value for one in rows if isinstance(value := one.get("value"), str)), "")

    def number(self, name: str) -> float | None:
        said = self.says(name)
        return float(said) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", said, re.ASCII) else None

    @property
    def refusal(self) -> str:
        """Why this subscription can not have it in this region; a row that can not be read counts as one."""
        for one in self.restrictions:
            kind, reason = (one.get("type"), one.get("reasonCode")) if isinstance(one, dict) else (None, None)
            if kind != "Zone":
                known = reason if reason in ("NotAvailableForSubscription", "QuotaId") else "restricted"
                return f"this subscription may not have it in this region ({known})"
        return ""


class _Eviction(Row):
    size: Annotated[SizeName, Field(validation_alias=AliasPath("sku", "name"))]
    region: Annotated[str, Field(validation_alias="location")]
    said: Annotated[str, Field(validation_alias=AliasPath("properties", "evictionRate"))]


class _Usage(Row):
    name: Annotated[str, Field(validation_alias=AliasPath("name", "value"))]
    used: Annotated[int, Field(validation_alias="currentValue")]
    limit: int


_EVICTED_PPM: Final = {"0-5": 25_000, "5-10": 75_000, "10-15": 125_000, "15-20": 175_000, "20+": 250_000}
"""Machines in a million hours: the middle of each band of percent per hour; the last band has no end."""


def rates_of(rows: Any) -> Rates:
    """Return how many machines of each size are evicted in a million hours, by size and region in small letters."""
    known = (row_or_none(_Eviction, raw) for raw in (rows if isinstance(rows, list) else ()))
    said = ((row, _EVICTED_PPM.get(row.said)) for row in known if row is not None)
    return {(row.size.lower(), row.region.lower()): rate for row, rate in said if rate is not None}


class RegionSales(NamedTuple):
    """What one region sells: its sizes and their prices; `is_whole` is false where a list broke off."""

    region: str
    sizes: Sequence[Any]
    prices: Prices
    rejected: Sequence[Rejected]
    is_whole: bool


def offers_of(
    sales: RegionSales, markets: Sequence[Market], settings: AzureSettings, rates: Rates
) -> tuple[list[Offer], list[Rejected]]:
    """Translate the sizes of a region to one offer for each market that has a price, or reject them."""
    offers: list[Offer] = []
    bad = list(sales.rejected)
    seen: set[str] = set()
    for raw in sales.sizes:
        if (name := _name_in(raw, "name")) is None:
            continue
        row = row_or_reason(SizeRow, raw, offer_id=name)
        if isinstance(row, Rejected):
            bad.append(row)
            continue
        judged = "the same size twice in one answer" if row.name in seen else _gpu_or_reason(row, settings)
        seen.add(row.name)
        sold = {market: price for market in Market if (price := sales.prices.get((row.name, market))) is not None}
        if row.says("LowPriorityCapable").lower() != "true":
            sold.pop(Market.SPOT, None)
        if isinstance(judged, str) or not sold:
            reason = judged if isinstance(judged, str) else "no price for Linux"
            bad.append(Rejected(offer_id=f"{row.name}:{sales.region}", reason=reason))
            continue
        rate = {Market.SPOT: rates.get((row.name.lower(), sales.region))}
        found = {market: _offer(row, judged, sales.region, market, sold) for market in sold if market in markets}
        offers.extend(replace(offer, hazard_ppm=rate.get(market)) for market, offer in found.items())
    return offers, bad


def _gpu_or_reason(row: SizeRow, settings: AzureSettings) -> tuple[GpuInfo, int] | str:
    """Return the GPU of a size and how many it has, or why it is not offered."""
    gpu, count, is_graphics = azure_gpu(row.name), row.number("GPUs"), row.name.startswith("Standard_NV")
    if row.says("CpuArchitectureType").lower().startswith("arm"):
        return "an ARM machine"
    if is_graphics and row.name not in _WHOLE:
        return "a part of a GPU, which is not sold as a whole one"
    if gpu is None:
        return "Azure states the GPU of a size nowhere, and spotd knows none of this name"
    if gpu.compute_capability is None:
        return "an AMD GPU, for which the machine image has no driver"
    if count is None or not 1 <= count <= 64 or count != int(count):
        return "capabilities: it does not say how many GPUs it has"
    if is_graphics and settings.image.startswith("microsoft-dsvm:"):
        return "it needs NVIDIA's GRID driver, which the machine image lacks; name one that has it in image"
    return row.refusal or (gpu, int(count))


def _offer(
    row: SizeRow, judged: tuple[GpuInfo, int], region: str, market: Market, sold: Mapping[Market, MicroUsdPerHour]
) -> Offer:
    gpu, count = judged
    is_spot, name, memory = market is Market.SPOT, f"{row.name}:{region}:{market}", row.number("MemoryGB")
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(name),
        pool=PoolId(name),
        quotas=(QuotaId(f"{region}:spot cores" if is_spot else f"{region}:{row.family or row.name}"),),
        market=market,
        interruption=Interruption.NOTICE if is_spot else Interruption.NEVER,
        gpu=gpu.name,
        gpu_count=count,
        gpu_vram_mb=gpu.vram_gb[0] * GB_TO_MB,
        gpu_price=sold[market],
        on_demand_price=sold.get(Market.ON_DEMAND),
        storage_price=DISK_PRICE,
        storage_fixed=FIXED_PRICE,
        upload_price=UPLOAD_PRICE,
        region=region,
        cpus=row.number("vCPUs"),
        memory_mb=None if memory is None else round(memory * GB_TO_MB),
        disk_gb_max=DISK_GB_STEPS[-1] - IMAGE_GB,
        extra={"size": row.name, "region": region},
    )


class AzureMarket:
    """The lists of one subscription, those that change slowly kept for a while."""

    def __init__(self, client: RestClient, prices: RestClient, settings: AzureSettings, services: Services) -> None:
        self._client, self._prices, self._settings, self._clock = client, prices, settings, services.clock
        self._sizes: dict[str, tuple[Rest, list[Any]]] = {}
        self._rates: Rates | None = {}
        self._rates_kept = Rest(services.clock)

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every size with a GPU in the regions of the settings, for each market that is asked about."""
        at = self._clock.now()
        answers, errors = await ask_each(self._settings.regions, str, self._region)
        if Market.SPOT in query.markets:
            await self._learn_rates(answers.values())
        found = [offers_of(sales, query.markets, self._settings, self._rates or {}) for sales in answers.values()]
        silent = [Rejected(offer_id=region, reason=f"the region was not read: {exc}") for region, exc in errors.items()]
        return OfferPage(
            offers=tuple(offer for offers, _ in found for offer in offers),
            rejected=listed_reasons([*silent, *(one for _, bad in found for one in bad)]),
            complete=not errors and all(sales.is_whole for sales in answers.values()),
            note="Azure does not say to this application how many spot machines it evicts"
            if self._rates is None
            else "",
            at=at,
        )

    async def _region(self, region: str) -> RegionSales:
        rows, is_whole = await self.price_rows(region)
        prices, bad = await judge_apart(lambda: prices_of(rows, region), rows=len(rows))
        sizes, has_all = await self._sizes_of(region)
        return RegionSales(region, sizes, prices, bad, is_whole and has_all and bool(sizes))

    async def price_rows(self, region: str, size: str = "") -> tuple[list[Any], bool]:
        """Read the price list of a region, or of one size there, and whether it is whole."""
        words = ["serviceName eq 'Virtual Machines'", "priceType eq 'Consumption'", f"armRegionName eq '{region}'"]
        query = quote(" and ".join([*words, *([f"armSkuName eq '{size}'"] if size else [])]), safe="")
        base = f"/api/retail/prices?api-version=2023-01-01-preview&$filter={query}"

        async def page(token: str | None) -> Page:
            path = base if token is None else f"{base}&$skip={token}"
            answer = await self._prices.ask("GET", path, what="the price list")
            rows = answer.get("Items")
            if not isinstance(rows, list):
                raise Unavailable("Azure's price list is no list")
            more = answer.get("NextPageLink")
            return rows, None if not more else str(int(token or 0) + len(rows)) if rows else ""

        return await all_pages(page, rows_max=PRICE_ROWS_MAX)

    async def _sizes_of(self, region: str) -> tuple[list[Any], bool]:
        kept = self._sizes.get(region)
        if kept is not None and kept[0].left() > timedelta(0):
            return kept[1], True
        query = quote(f"location eq '{region}'", safe="")
        path = f"{self._settings.subscription}/providers/Microsoft.Compute/skus?api-version={SIZES_API}&$filter={query}"
        rows, is_whole = await all_pages(lambda token: self.list_page(token or path, "the list of sizes"))
        if rows and is_whole:
            self._sizes[region] = (rest := Rest(self._clock), rows)
            rest.take(KEPT)
        return rows, is_whole

    async def list_page(self, path: str, what: str) -> Page:
        """Read one page of a list; the token is the path of the next one, which must be of the same server."""
        answer = await self._client.ask("GET", path, what=what)
        rows = answer.get("rows")
        if not isinstance(rows, list) or len(rows) > ROWS_MAX:
            raise Unavailable(f"{WHO}'s answer to {what} is no list")
        return rows, None if not answer.get("next") else own_path(answer["next"], self._settings.base_url)

    async def spot_cores(self, region: str) -> tuple[int, int]:
        """Return how many cores of spot machines are used and allowed.

        Raises:
            Unavailable: no row says so.
        """
        path = f"{self._settings.subscription}/providers/Microsoft.Compute/locations/{region}/usages"
        rows, _ = await self.list_page(f"{path}?api-version={COMPUTE_API}", "the quotas")
        for row in (row_or_none(_Usage, raw) for raw in rows):
            if row is not None and row.name == "lowPriorityCores":
                return row.used, row.limit
        raise Unavailable("Azure states no quota of lowPriorityCores; it may count spot cores by family")

    async def _learn_rates(self, sales: Iterable[RegionSales]) -> None:
        """Ask how many machines of the sizes on sale are evicted; the right to ask is optional."""
        if self._rates_kept.left() > timedelta(0):
            return
        self._rates_kept.take(KEPT)
        names = {size for one in sales for size, market in one.prices if market is Market.SPOT}
        known = sorted(size for size in names if azure_gpu(size) is not None)
        places, sizes = (", ".join(f"'{one.lower()}'" for one in some) for some in (self._settings.regions, known))
        query = (
            "SpotResources | where type =~ 'microsoft.compute/skuspotevictionrate/location'"
            f" | where sku.name in~ ({sizes}) | where location in~ ({places})"
        )
        body = {"subscriptions": [self._settings.subscription_id], "query": query}
        path = "/providers/Microsoft.ResourceGraph/resources?api-version=2021-03-01"
        try:
            answer = await self._client.ask("POST", path, what="eviction rates", attempts=1, json_body=body)
            self._rates = rates_of(answer.get("data"))
        except ProviderError:
            self._rates = None
