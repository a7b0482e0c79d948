"""No recorded answer lies unread: each file is parsed by the provider that would get it, and the counts are printed."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.aws.offers import current_prices
from spotd_providers.aws.prices import read_advisor
from spotd_providers.aws.region import kinds_of
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import Market
from spotd_providers.kit.shapes import as_model, row_or_none
from spotd_providers.vastai.offers import OnDemandPrices, offers_of
from spotd_providers.vastai.wire import CreateReply, InstanceRow, VastSettings, offer_rows, single_instance

FOLDER = Path(os.environ.get("SPOTD_SHARED_DATA", Path(__file__).parents[5] / "shared" / "data")) / "payloads"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded payloads are not beside this checkout")

Counts = tuple[int, int, int]
"""Rows, those that were understood, those that were rejected with a reason."""


def vast_offers(content: Any) -> Counts:
    rows = content["offers"] if isinstance(content, dict) else content
    understood = offer_rows(json.dumps({"offers": rows}).encode())
    good, bad = offers_of(
        understood.rows, Market.SPOT, VastSettings(verified=False, cpu_arch="any"), on_demand=OnDemandPrices()
    )
    rejected = [*understood.rejected, *bad]
    assert all(row.reason for row in rejected)
    return len(rows), len(good), len(rejected)


def vast_instance(content: Any) -> Counts:
    row = single_instance(content) if "instances" in content else content
    assert row_or_none(InstanceRow, row) is not None
    return 1, 1, 0


def vast_purchase(content: Any) -> Counts:
    assert as_model(CreateReply, content, who="vast.ai", what="a purchase").new_contract
    return 1, 1, 0


def vast_names(content: Any) -> Counts:
    names = content["gpu_names"]
    assert all(canonical("vast", name) for name in names)
    return len(names), len(names), 0


def aws_types(content: Any) -> Counts:
    found = kinds_of(content["InstanceTypes"], AwsSettings(ami={"us-east-1": "ami-1"}), "us-east-1")
    assert all(row.reason for row in found.rejected)
    return len(content["InstanceTypes"]), len(found.usable), len(found.rejected)


def aws_prices(content: Any) -> Counts:
    rows = [{**r, "Timestamp": datetime.fromisoformat(r["Timestamp"])} for r in content["SpotPriceHistory"]]
    prices, rejected = current_prices(rows)
    assert not rejected
    linux = [row for row in rows if row["ProductDescription"].startswith("Linux/UNIX")]
    assert len(prices) == len({(row["InstanceType"], row["AvailabilityZone"]) for row in linux})
    return len(rows), len(linux), len(rows) - len(linux)  # the others are prices of other systems


def aws_advice(content: Any) -> Counts:
    told = sum(len(systems["Linux"]) for systems in content["spot_advisor"].values())
    return told, len(read_advisor(json.dumps(content).encode())), 0


READERS: dict[str, Callable[[Any], Counts]] = {
    "vast/search-offers-*": vast_offers,
    "vast/bundles-*": vast_offers,
    "vast/show-instance-*": vast_instance,
    "vast/get-instance-*": vast_instance,
    "vast/create-instance-*": vast_purchase,
    "vast/gpu-names-*": vast_names,
    "aws/describe-instance-types-*/*": aws_types,
    "aws/describe-spot-price-history-*/*": aws_prices,
    "aws/spot-advisor-*": aws_advice,
}


def test_every_recorded_answer_is_parsed_whole() -> None:
    ours = {pattern.partition("/")[0] for pattern in READERS}  # the folder holds answers of other clouds, too
    files = sorted(file for name in ours for file in (FOLDER / name).rglob("*") if file.is_file())
    seen: Counter[str] = Counter()
    for file in files:
        name = str(file.relative_to(FOLDER))
        (pattern,) = [pattern for pattern in READERS if fnmatchcase(name, pattern)]
        raw = file.read_bytes()
        rows, good, bad = READERS[pattern](json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw))
        assert good + bad == rows, name
        seen[pattern] += 1
        print(f"{name}: {rows} rows, {good} understood, {bad} rejected or of another product")
    print(f"{len(files)} recorded answers, {dict(seen)}")
    assert set(seen) == set(READERS)
