"""Recorded answers of AWS are understood, every row priced or rejected with a reason."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.aws.offers import current_prices, offers_of
from spotd_providers.aws.prices import AwsOnDemandPrices, read_advisor
from spotd_providers.aws.region import LINUX_PRODUCTS, kinds_of
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.gpus import gpu_info
from spotd_providers.contract.values import Market, micro_usd

FOLDER = Path(os.environ.get("SPOTD_SHARED_DATA", Path(__file__).parents[5] / "shared" / "data")) / "payloads" / "aws"
OWN_IMAGE = AwsSettings(ami={"us-east-1": "ami-1", "sa-east-1": "ami-1"})
HISTORIES = ("describe-spot-price-history-us-east-1-2021-05-30", "describe-spot-price-history-sa-east-1-2020-03-29")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded payloads are not beside this checkout")


def recorded(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())


def types() -> list[Any]:
    files = sorted((FOLDER / "describe-instance-types-2021").glob("*.json"))
    return [row for file in files for row in recorded(file)["InstanceTypes"]]


def history(name: str) -> list[Any]:
    rows = [row for file in sorted((FOLDER / name).iterdir()) for row in recorded(file)["SpotPriceHistory"]]
    # AWS's client hands times over as such; the recordings are its answers written as JSON.
    return [{**row, "Timestamp": datetime.fromisoformat(row["Timestamp"])} for row in rows]


def test_every_recorded_type_is_usable_or_rejected_with_a_reason() -> None:
    raw = types()
    own = kinds_of(raw, OWN_IMAGE, "us-east-1")
    usual = kinds_of(raw, AwsSettings(), "us-east-1")
    print(f"{len(raw)} types: {len(own.usable)} usable with an own image, {len(usual.usable)} with the usual one")
    assert len(own.usable) + len(own.rejected) == len(raw) == 9
    assert len(usual.usable) + len(usual.rejected) == len(raw)
    assert {row.offer_id for row in usual.rejected} >= {"p3.2xlarge", "g3.4xlarge", "p2.xlarge"}
    assert all(gpu_info(kind.gpu) is not None for kind in own.usable.values())
    assert own.usable["p3.16xlarge"].gpu_count == 8
    assert own.usable["g4dn.xlarge"].gpu == "T4"


@pytest.mark.parametrize("name", HISTORIES)
def test_every_recorded_price_is_in_force_replaced_or_of_another_product(name: str) -> None:
    rows = history(name)
    prices, rejected = current_prices(rows)
    products = Counter(row["ProductDescription"] for row in rows)
    linux = [row for row in rows if row["ProductDescription"] in LINUX_PRODUCTS]
    pools = {(row["InstanceType"], row["AvailabilityZone"]) for row in linux}
    print(f"{name}: {len(rows)} rows {dict(products)}, {len(pools)} pools, {len(prices)} priced")
    assert rows
    assert not rejected
    assert set(prices) == pools
    for pool, price in prices.items():
        own = [row for row in linux if (row["InstanceType"], row["AvailabilityZone"]) == pool]
        assert price == micro_usd(max(own, key=lambda row: row["Timestamp"])["SpotPrice"])


@pytest.mark.parametrize("name", HISTORIES)
def test_every_priced_pool_is_offered_or_rejected_with_a_reason(name: str) -> None:
    region = "us-east-1" if "us-east-1" in name else "sa-east-1"
    prices, _ = current_prices(history(name))
    kinds = kinds_of(types(), OWN_IMAGE, region).usable
    subnets = {zone: f"subnet-{zone}" for _, zone in prices}
    offers, rejected = offers_of(
        prices, Market.SPOT, kinds, subnets, AwsOnDemandPrices(region=region), OWN_IMAGE, scores={}, bands={}
    )
    print(f"{name}: {len(prices)} pools, {len(offers)} offers, {dict(Counter(row.reason for row in rejected))}")
    assert len(offers) + len(rejected) == len(prices)
    assert offers
    for offer in offers:
        assert offer.pool == f"{offer.extra['type']}:{offer.extra['zone']}"
        assert not offer.pays_bid


def test_an_empty_history_is_no_price() -> None:
    answer = recorded(FOLDER / HISTORIES[1] / "p3.2xlarge-empty.json")
    assert current_prices(answer["SpotPriceHistory"]) == ({}, [])


def test_the_recorded_spot_advisor_gives_every_type_of_every_region_a_band() -> None:
    file = FOLDER / "spot-advisor-gpu-2025-07.json.gz"
    bands = read_advisor(file.read_bytes())
    told = {(region, kind) for region, systems in recorded(file)["spot_advisor"].items() for kind in systems["Linux"]}
    counts = Counter(band.label for band in bands.values())
    print(f"{file.name}: {len({region for region, _ in bands})} regions, {len(bands)} types, {dict(counts)}")
    assert set(bands) == told
    assert set(counts) == {"<5%", "5-10%", "10-15%", "15-20%", ">20%"}
    by_label = {band.label: band.hazard_ppm for band in bands.values()}
    ordered = [by_label[label] for label in ("<5%", "5-10%", "10-15%", "15-20%", ">20%")]
    assert ordered == sorted(ordered)
    assert ordered[0] == 70, "five percent a month are seven in a hundred thousand hours"
    prices = {(kind, f"{region}a"): micro_usd("0.4") for region, kind in bands if region == "us-west-2"}
    kinds = {row["InstanceType"]: row for row in types()}
    usable = kinds_of(list(kinds.values()), OWN_IMAGE, "us-east-1").usable
    zones = {zone for _, zone in prices}
    on_demand = AwsOnDemandPrices(region="us-west-2")
    offers, _ = offers_of(prices, Market.SPOT, usable, zones, on_demand, OWN_IMAGE, scores={}, bands=bands)  # type: ignore[arg-type]  # whole micro-dollars of the test's own
    assert offers
    assert all(o.hazard_ppm == bands["us-west-2", o.extra["type"]].hazard_ppm for o in offers)
