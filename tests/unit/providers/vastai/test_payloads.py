"""Recorded answers of vast.ai are understood, every offer priced or rejected with a reason."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from spotd_providers.contract.gpus import GPUS, canonical, gpu_info
from spotd_providers.contract.values import MICRO, InstallId, InstanceState, Market
from spotd_providers.kit.shapes import as_model, row_or_none
from spotd_providers.kit.text import key_of
from spotd_providers.vastai.listing import standing
from spotd_providers.vastai.offers import OnDemandPrices, offers_of
from spotd_providers.vastai.wire import CreateReply, InstanceRow, VastSettings, offer_rows, single_instance
from tests.cases import every
from tests.unit.providers.vastai.payloads import SEARCHES, as_answer, recorded, recorded_rows

EVERYBODY = VastSettings(verified=False, laptops=True, cpu_arch="any")
NOW = datetime(2025, 10, 22, tzinfo=UTC)


def up(usd: float) -> int:
    """The least whole micro-dollars that are not below the figure as it was written."""
    return math.ceil(Decimal(repr(usd)) * MICRO)


@every("name", SEARCHES)
@every("market", list(Market))
def test_every_recorded_offer_is_priced_or_rejected_with_a_reason(name: str, market: Market) -> None:
    rows = recorded_rows(name)
    understood = offer_rows(as_answer(rows))
    offers, rejected = offers_of(understood.rows, market, EVERYBODY, on_demand=OnDemandPrices())
    rejected = [*understood.rejected, *rejected]
    reasons = Counter(item.reason.partition(" (")[0] for item in rejected)
    print(f"{name} {market}: {len(rows)} rows, {len(offers)} priced, {len(rejected)} rejected {dict(reasons)}")
    assert not understood.rejected
    assert len(offers) + len(rejected) == len(rows)
    assert all(item.reason for item in rejected)
    by_id = {row["id"]: row for row in rows}
    for offer in offers:
        row = by_id[int(offer.extra["ask"])]
        listed = row["min_bid"] if market is Market.SPOT else row["dph_base"]
        assert offer.gpu_price == up(listed)
        assert offer.storage_price == up(row["storage_cost"])
        assert offer.upload_price == up(row["inet_up_cost"])
        assert offer.download_price == up(row["inet_down_cost"])
        assert (offer.host_id, offer.gpu_count) == (str(row["machine_id"]), row["num_gpus"])


@every("name", SEARCHES)
def test_no_recorded_offer_is_bid_on_above_its_own_on_demand_price(name: str) -> None:
    rows = recorded_rows(name)
    offers, rejected = offers_of(offer_rows(as_answer(rows)).rows, Market.SPOT, EVERYBODY, on_demand=OnDemandPrices())
    dearer = {str(row["id"]) for row in rows if row["min_bid"] > row["dph_base"]}
    assert {item.offer_id.removesuffix(":bid") for item in rejected} == dearer
    assert all(offer.on_demand_price is None or offer.gpu_price <= offer.on_demand_price for offer in offers)
    print(f"{name}: {len(dearer)} of {len(rows)} rows cost more by bid than on-demand")


def test_the_storage_price_explains_the_total_of_every_recorded_offer() -> None:
    for name in SEARCHES:
        for row in recorded_rows(name):
            # 5 GB in 2024, 8 GB in 2026: `dph_total` depends on the search's own disk, so it is never a price.
            per_gb = row["storage_cost"] / 720
            assert row["dph_total"] == pytest.approx(row["dph_base"] + row["storage_total_cost"], rel=1e-12)
            assert row["storage_total_cost"] == pytest.approx(per_gb * (5 if "2024" in name else 8), rel=1e-9)


def test_recorded_gpu_names_keep_an_id_and_most_are_known() -> None:
    names = recorded("gpu-names-cache.json")["gpu_names"]
    ids = {name: canonical("vast", name) for name in names}
    known = [name for name, gpu in ids.items() if gpu_info(gpu) is not None]
    print(f"{len(known)} of {len(names)} recorded GPU names are in the table of {len(GPUS)}")
    assert all(ids.values())
    assert len(known) >= len(names) // 2


@every("name", ["show-instance-running-2024-11-01.json", "get-instance-wrapped-2025-10.json"])
def test_recorded_instances_are_read(name: str) -> None:
    row = row_or_none(InstanceRow, single_instance(recorded(name)))
    assert row is not None
    assert row.machine_id is not None
    assert row.is_bid is False
    assert key_of(row.label, InstallId("lab")) is None


def test_the_recorded_running_instance_runs() -> None:
    row = row_or_none(InstanceRow, recorded("show-instance-running-2024-11-01.json"))
    assert row is not None
    assert standing(row, now=NOW).state is InstanceState.RUNNING


def test_the_recorded_instance_without_status_words_is_still_coming() -> None:
    row = row_or_none(InstanceRow, single_instance(recorded("get-instance-wrapped-2025-10.json")))
    assert row is not None
    assert standing(row, now=NOW).state is InstanceState.PENDING


def test_the_recorded_purchase_names_its_contract() -> None:
    reply: Any = as_model(CreateReply, recorded("create-instance-2024-11-01.json"), who="vast.ai", what="a purchase")
    assert reply.new_contract == 13445220
