"""Recorded answers of RunPod are understood, every offer priced or rejected with a reason.

What was recorded is GraphQL, the old API; the new catalogue tells the same figures under other names, so the recorded
rows are also told in its words here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import micro_usd
from spotd_providers.runpod.offers import offers_of
from spotd_providers.runpod.wire import RunpodSettings, gpu_rows
from tests.cases import every

EVERYTHING = RunpodSettings(amd=True)
RECORDED = {"gputypes-1gpu-2026-08-25.json": 1, "gputypes-8gpu-2026-07-18.json": 8, "gputypes-listprices-2026.json": 1}


def recorded(name: str) -> list[dict[str, Any]]:
    """The rows of one recorded answer; the test is skipped if they are not beside this checkout."""
    beside = Path(__file__).resolve().parents[4].parent / "shared" / "data"
    folder = Path(os.environ.get("SPOTD_SHARED_DATA", beside)) / "payloads" / "runpod"
    if not folder.is_dir():
        pytest.skip(f"no recorded answers in {folder}; set SPOTD_SHARED_DATA to the folder that holds payloads/")
    return list(json.loads((folder / name).read_text())["data"]["gpuTypes"])


def in_new_words(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the catalogue of v2 tells it."""
    quote = row.get("lowestPrice")
    stocked = quote is None or quote["uninterruptablePrice"] is not None
    return {
        "id": row["id"],
        "name": row["displayName"],
        "manufacturer": "AMD" if row["id"].startswith("AMD") else "NVIDIA",
        "memory": row["memoryInGb"],
        "secure": row.get("secureCloud", True),
        "community": row.get("communityCloud", True),
        "price": {"secure": row["securePrice"], "community": row["communityPrice"], "serverless": None},
        "maxCount": {"secure": 8, "community": 8},
        "availability": "LOW" if stocked else "NONE",
    }


@every(("name", "count"), RECORDED.items())
@every("cloud", ["SECURE", "COMMUNITY"])
def test_every_recorded_gpu_is_priced_or_rejected_with_a_reason(name: str, count: int, cloud: str) -> None:
    rows = recorded(name)
    understood = gpu_rows({"gpus": [in_new_words(row) for row in rows]})
    offers, rejected = offers_of(understood.rows, cloud, count, EVERYTHING)
    rejected = [*understood.rejected, *rejected]
    reasons = Counter(item.reason for item in rejected)
    print(f"{name} {cloud} x{count}: {len(rows)} rows, {len(offers)} priced, {len(rejected)} rejected {dict(reasons)}")
    assert len(offers) + len(rejected) == len(rows)
    assert all(item.reason for item in rejected)
    assert offers
    by_id = {row["id"]: row for row in rows}
    for offer in offers:
        listed = by_id[offer.extra["gpu"]][f"{cloud.lower()}Price"]
        assert offer.gpu_price == micro_usd(listed) * count
        assert offer.gpu_count == count


def test_a_recorded_quote_for_eight_gpus_is_eight_times_the_list_price() -> None:
    seen = 0
    for row in recorded("gputypes-8gpu-2026-07-18.json"):
        whole = row["lowestPrice"]["uninterruptablePrice"]
        if whole is None:
            continue
        listed = [row[f"{cloud}Price"] for cloud in ("secure", "community") if row[f"{cloud}Cloud"]]
        assert any(whole == pytest.approx(8 * price) for price in listed), row["id"]
        seen += 1
    assert seen


def test_a_zero_price_and_an_unknown_gpu_are_not_sold() -> None:
    row = in_new_words({"id": "unknown", "displayName": "?", "memoryInGb": 24, "securePrice": 0, "communityPrice": 0.2})
    understood = gpu_rows({"gpus": [row]}).rows
    for cloud in ("SECURE", "COMMUNITY"):
        offers, rejected = offers_of(understood, cloud, 1, EVERYTHING)
        assert not offers
        assert len(rejected) == 1
