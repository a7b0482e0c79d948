"""The price rows of the fake Azure, and the small part of two query languages that selects from them and the graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from tests.fakes.rest import RestRefusal
from tests.unit.providers.azure.fake_records import AzureSize

WINDOWS_CORE_HOUR_USD: Final = 0.046
REGIONS_MAX: Final = 8
SIZES_MAX: Final = 5
"""Of one question for scores."""
EVICTIONS: Final = "microsoft.compute/skuspotevictionrate/location"
HISTORY: Final = "microsoft.compute/skuspotpricehistory/ostype/location"
_TERM: Final = re.compile(
    r"(?P<field>\w+) eq (?P<value>'[^']*'|true|false)|contains\((?P<in>\w+), ?'(?P<text>[^']*)'\)"
)
_WHERE: Final = re.compile(r"where (?P<field>[\w.]+) (?P<op>=~|==|in~|in) ?(?P<value>'[^']*'|\([^)]*\))")
_PROJECT: Final = re.compile(r"(?:(?P<as>\w+) ?= ?)?(?:to\w+\()?(?P<field>[\w.]+)\)?")


def price_rows(sizes: Iterable[AzureSize]) -> list[dict[str, Any]]:
    """Every row about these sizes: of each a Linux and a Windows one per market, and kinds that are no hour of a VM."""
    rows = []
    for size in sizes:
        for region, (on_demand, spot) in size.prices.items():
            licence = size.vcpus * WINDOWS_CORE_HOUR_USD
            windows = f"{size.product.removesuffix(' Linux')} Windows"
            for name, product, more in (("linux", size.product, 0.0), ("windows", windows, licence)):
                rows.append(_row(size, region, f"ondemand:{name}", "", product, on_demand + more))
                if spot is not None:
                    rows.append(_row(size, region, f"spot:{name}", " Spot", product, spot + more))
            low = _row(size, region, "low", " Low Priority", size.product, on_demand * 0.2)
            gone = _row(size, region, "expired", " Expired", size.product, on_demand * 0.1)
            free = _row(size, region, "free", "", size.product, 0.0)
            reserved = {**_row(size, region, "reserved", "", size.product, on_demand * 5000), "type": "Reservation"}
            develops = {**_row(size, region, "devtest", "", windows, on_demand), "type": "DevTestConsumption"}
            rows += [low, gone, free, {**reserved, "reservationTerm": "1 Year"}, develops]
    return rows


def _row(size: AzureSize, region: str, kind: str, suffix: str, product: str, price: float) -> dict[str, Any]:
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": round(price, 6),
        "unitPrice": round(price, 6),
        "armRegionName": region,
        "location": {"westeurope": "EU West", "eastus": "US East"}.get(region, region),
        "effectiveStartDate": "2026-02-01T00:00:00Z",
        "meterId": f"meter-{size.name}-{region}-{kind}",
        "meterName": f"{size.sku}{suffix}",
        "productId": "DZH318Z0",
        "skuId": f"{size.name}:{region}:{kind}",
        "productName": product,
        "skuName": f"{size.sku}{suffix}",
        "serviceName": "Virtual Machines",
        "serviceId": "DZH313Z7MMC8",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "isPrimaryMeterRegion": True,
        "armSkuName": size.name,
    }


def row_filter(text: str) -> Callable[[dict[str, Any]], bool]:
    """Return what a `$filter` keeps: terms with `eq` and `contains`, joined by `and`; in brackets by `or`.

    Raises:
        RestRefusal: it is anything else.
    """
    if not text.strip():
        return lambda _: True
    terms = [_alternatives(group) for group in _parts(text.strip(), " and ")]
    return lambda row: all(any(one(row) for one in group) for group in terms)


def _parts(text: str, word: str) -> list[str]:
    """The text cut at a word that is outside of brackets."""
    found, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0 and text.startswith(word, at):
            found.append(text[start:at].strip())
            start = at + len(word)
    return [*found, text[start:].strip()]


def _alternatives(group: str) -> list[Callable[[dict[str, Any]], bool]]:
    inner = group[1:-1] if group.startswith("(") and group.endswith(")") else group
    return [_term(part) for part in _parts(inner, " or ")]


def _term(text: str) -> Callable[[dict[str, Any]], bool]:
    found = _TERM.fullmatch(text)
    if found is None:
        raise RestRefusal(400, f"Invalid OData filter: {text[:80]}", code="BadRequest")
    if found["in"] is not None:
        name, part = _field(found["in"]), found["text"]
        return lambda row: part in str(row.get(name, ""))
    name, value = _field(found["field"]), found["value"].strip("'")
    return lambda row: str(row.get(name, "")).lower() == value if value in ("true", "false") else row.get(name) == value


def _field(name: str) -> str:
    return "type" if name == "priceType" else name


def graph_rows(query: str, sizes: Iterable[AzureSize], now: datetime) -> list[dict[str, Any]]:
    """The rows of `SpotResources` that a query selects by `where` and shapes by `project`.

    Raises:
        RestRefusal: it asks another table, or in another way.
    """
    table, *steps = [part.strip() for part in query.split("|")]
    if table.lower() != "spotresources":
        raise RestRefusal(400, "The table is unknown", code="BadRequest")
    rows = [row for size in sizes for region in size.prices for row in _graph_of(size, region, now)]
    for step in steps:
        word = step.partition(" ")[0]
        if word == "where":
            for part in re.split(r" and ", step.removeprefix("where ")):
                rows = _selected(rows, f"where {part.strip()}")
        elif word == "project":
            names = [_PROJECT.fullmatch(part.strip()) for part in step.removeprefix("project").split(",")]
            if not all(names):
                raise RestRefusal(400, f"Invalid: {step[:80]}", code="BadRequest")
            rows = [{one["as"] or one["field"]: _at(row, one["field"]) for one in names if one} for row in rows]
        elif word not in ("order", "sort", "limit", "take"):
            raise RestRefusal(400, f"Invalid: {step[:80]}", code="BadRequest")
    return rows


def _selected(rows: list[dict[str, Any]], step: str) -> list[dict[str, Any]]:
    found = _WHERE.fullmatch(step)
    if found is None:
        raise RestRefusal(400, f"Invalid: {step[:80]}", code="BadRequest")
    values = {one.lower() for one in re.findall(r"'([^']*)'", found["value"])}
    return [row for row in rows if str(_at(row, found["field"])).lower() in values]


def _at(row: dict[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _graph_of(size: AzureSize, region: str, now: datetime) -> list[dict[str, Any]]:
    spot = size.prices[region][1]
    if spot is None:
        return []
    common = {"location": region, "sku": {"name": size.name.lower()}}
    days = [now - timedelta(days=back) for back in (0, 30, 60)]
    prices = [
        {"priceUSD": f"{spot * (1 + number / 10):.5f}", "effectiveDate": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        for number, at in enumerate(days)
    ]
    return [
        {**common, "type": EVICTIONS, "properties": {"evictionRate": size.eviction_rate}},
        {**common, "type": HISTORY, "properties": {"osType": "Linux", "spotPrices": prices}},
        {**common, "type": HISTORY, "properties": {"osType": "Windows", "spotPrices": [dict(one) for one in prices]}},
    ]


def score_rows(sizes: Mapping[str, AzureSize], body: Mapping[str, Any], *, has_quota: bool) -> list[dict[str, Any]]:
    """The placement scores that a request asks for.

    Raises:
        RestRefusal: it is outside of the schema, or asks too much.
    """
    regions, wanted = body.get("desiredLocations"), body.get("desiredSizes")
    if not isinstance(regions, list) or not isinstance(wanted, list) or not isinstance(body.get("desiredCount"), int):
        raise RestRefusal(400, "desiredLocations, desiredSizes and desiredCount", code="InvalidParameter")
    if not 0 < len(regions) <= REGIONS_MAX or not 0 < len(wanted) <= SIZES_MAX:
        raise RestRefusal(400, "Too many locations or sizes", code="InvalidParameter")
    rows = []
    for name in [one["sku"] for one in wanted]:
        for region in regions:
            size = sizes.get(name)
            sold = size if size is not None and region in size.prices else None
            score = "DataNotFoundOrStale" if sold is None else sold.score
            row = {"sku": name, "region": region, "score": score, "isQuotaAvailable": has_quota}
            if body.get("availabilityZones"):
                rows += [{**row, "availabilityZone": zone} for zone in (sold.zones if sold else ())]
            else:
                rows.append(row)
    return rows
