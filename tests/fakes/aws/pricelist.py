"""The Price List API of the fake: every product that AWS would list for a type, of which one is the machine meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from tests.fakes.aws.catalog import Kind
from tests.fakes.aws.cloud import Ec2Cloud
from tests.fakes.aws.wire import Refusal

ENDPOINTS: Final = ("us-east-1", "eu-central-1", "ap-south-1")
_USUAL: Final[Mapping[str, str]] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "licenseModel": "No License required",
    "marketoption": "OnDemand",
}
# What else the list knows of each type: attributes that differ, and how its price does.
_OTHERS: Final[Sequence[tuple[Mapping[str, str], str]]] = (
    ({"operatingSystem": "Windows"}, "1.9"),
    ({"tenancy": "Dedicated"}, "1.1"),
    ({"preInstalledSw": "SQL Std"}, "2.4"),
    ({"capacitystatus": "AllocatedCapacityReservation"}, "0"),
    ({"capacitystatus": "UnusedCapacityReservation"}, "1.05"),
)


def get_products(cloud: Ec2Cloud, region: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """One page of the products that pass every filter."""
    if region not in ENDPOINTS:
        raise Refusal("UnknownEndpoint", f"there is no Price List endpoint in {region}", 400)
    if body.get("ServiceCode") != "AmazonEC2":
        raise Refusal("InvalidParameterException", "Service code is not valid")
    rows = [row for row in _products(cloud) if _passes(row["product"]["attributes"], body.get("Filters") or ())]
    token = str(body.get("NextToken") or "p-0")
    if not token.removeprefix("p-").isdecimal():
        raise Refusal("InvalidNextTokenException", "the token is not one of ours")
    start = int(token.removeprefix("p-"))
    end = start + min(int(body.get("MaxResults") or 100), cloud.quirks.page_rows_max)
    answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(row) for row in rows[start:end]]}
    return {**answer, "NextToken": f"p-{end}"} if end < len(rows) else answer


def _products(cloud: Ec2Cloud) -> Iterator[dict[str, Any]]:
    sold = sorted({(cloud.zones[pool.partition(":")[2]].region, pool.partition(":")[0]) for pool in cloud.offered})
    for region, name in sold:
        kind = cloud.kinds[name]
        price = cloud.on_demand_usd(kind, region)
        yield _product(kind, region, {}, price)
        for other, factor in _OTHERS:
            yield _product(kind, region, other, price * Decimal(factor))


def _product(kind: Kind, region: str, other: Mapping[str, str], usd: Decimal) -> dict[str, Any]:
    sku = f"{kind.name}.{region}.{'.'.join(other.values())}".replace(" ", "")
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd} per hour of {kind.name}",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": {"USD": f"{usd:.10f}"},
    }
    term = {
        "sku": sku,
        "offerTermCode": "JRTCKXETXF",
        "effectiveDate": "2026-03-01T00:00:00Z",
        "priceDimensions": {f"{sku}.JRTCKXETXF.6YS6EN2CT7": dimension},
        "termAttributes": {},
    }
    attributes = {"instanceType": kind.name, "regionCode": region, "vcpu": str(kind.vcpus), **_USUAL, **other}
    return {
        "product": {"productFamily": "Compute Instance", "sku": sku, "attributes": attributes},
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}},
        "version": "20260301000000",
        "publicationDate": "2026-03-01T00:00:00Z",
    }


def _passes(attributes: Mapping[str, str], filters: Sequence[Mapping[str, str]]) -> bool:
    return all(_one(attributes.get(f["Field"], ""), f["Type"], f["Value"]) for f in filters)


def _one(known: str, kind: str, wanted: str) -> bool:
    if len(wanted) > 1024:
        raise Refusal("InvalidParameterException", "a filter's value has at most 1024 characters")
    match kind:
        case "TERM_MATCH" | "EQUALS":
            return known == wanted
        case "ANY_OF":
            return known in wanted.split(",")
        case "NONE_OF":
            return known not in wanted.split(",")
        case "CONTAINS":
            return wanted in known
        case _:
            raise Refusal("InvalidParameterException", f"{kind} is no type of filter")
