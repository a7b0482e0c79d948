"""gpuhunt's AWS provider, with boto3 below it, reads GPUs and spot prices of the fake EC2 as they are."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from spotd_providers.contract.values import MICRO
from tests.fakes.aws import ACCESS_KEY
from tests.unit.providers.aws.harness import REGIONS, AwsHarness, open_harness

hunt = pytest.importorskip("gpuhunt.providers.aws", reason="gpuhunt is not installed: pip install -e '.[dev]'")

pytestmark = pytest.mark.e2e

# It reads list prices from AWS's bulk file, which is no API: the file here holds what the fake sells.
COLUMNS = {
    "TermType": "OnDemand",
    "Tenancy": "Shared",
    "Operating System": "Linux",
    "CapacityStatus": "Used",
    "Unit": "Hrs",
    "Currency": "USD",
    "Pre Installed S/W": "NA",
    "MarketOption": "OnDemand",
}
KINDS = ("g5.xlarge", "g6e.xlarge", "g4dn.12xlarge", "p5.48xlarge")


def price_file(h: AwsHarness, path: Path) -> Path:
    with path.open("w", newline="") as file:
        file.write('"disclaimer"\n' * 5)
        names = [*COLUMNS, "Instance Type", "Region Code", "PricePerUnit", "vCPU", "Memory", "GPU"]
        rows = csv.DictWriter(file, names, quoting=csv.QUOTE_ALL)
        rows.writeheader()
        for region in REGIONS:
            for name in KINDS:
                kind = h.cloud.kinds[name]
                told = {
                    "Instance Type": name,
                    "Region Code": region,
                    "PricePerUnit": str(h.cloud.on_demand_usd(kind, region)),
                    "vCPU": kind.vcpus,
                    "Memory": f"{kind.ram_gib} GiB",
                    "GPU": kind.gpus,
                }
                rows.writerow({**COLUMNS, **told})
    return path


def test_gpuhunt_finds_the_gpus_and_the_spot_prices_of_the_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_harness(tmp_path) as h:
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", h.served.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        found = hunt.AWSProvider(cache_path=str(price_file(h, tmp_path / "index.csv"))).get(apply_filter=True)
        spot = {(item.instance_name, item.location): item.price for item in found if item.spot}
        # One price a region: the lowest of its zones.
        lowest: dict[tuple[str, str], float] = {}
        for pool in h.cloud.offered:
            name, _, zone = pool.partition(":")
            price = h.cloud.price_now(pool)
            if name in KINDS and price is not None:
                place = (name, h.cloud.zones[zone].region)
                lowest[place] = min(price / MICRO, lowest.get(place, float("inf")))
        kinds = {name: h.cloud.kinds[name] for name in KINDS}
    assert spot == {place: pytest.approx(price) for place, price in lowest.items()}
    assert len([item for item in found if not item.spot]) == len(KINDS) * len(REGIONS)
    for item in found:
        kind = kinds[item.instance_name]
        assert (item.gpu_name, item.gpu_count, item.gpu_memory) == (kind.gpu, kind.gpus, kind.mib / 1024)
