"""What `spotctl prices` and `history` tell of three marketplaces at once, each through its own HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clouds import Clouds, three_clouds
from tests.e2e.ctl import spotctl
from tests.e2e.harness import assert_receipts_agree, until
from tests.fakes.aws import PLAIN_KIND, ZONES

THREE = {"vast", "aws", "runpod"}


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clouds]:
    with three_clouds(tmp_path_factory.mktemp("clouds")) as found:
        found.lab.start()
        yield found
        found.lab.stop()


def asked(clouds: Clouds, *arguments: str) -> dict[str, Any]:
    done = spotctl(clouds.lab, *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def all_three(clouds: Clouds) -> list[dict[str, Any]]:
    def look() -> list[dict[str, Any]] | None:
        quotes: list[dict[str, Any]] = asked(clouds, "prices")["quotes"]
        return quotes if {quote["provider"] for quote in quotes} == THREE else None

    return until(look, what="offers of all three marketplaces", within=120, every=0.3)


@pytest.mark.e2e
def test_every_term_of_every_marketplaces_price_is_shown_and_adds_up(clouds: Clouds) -> None:
    for quote in all_three(clouds):
        terms = quote["breakdown"]
        parts = ("gpu_usd_h", "storage_usd_h", "fee_usd_h", "upload_usd_h", "restore_usd_h")
        assert sum(terms[part] for part in parts) == pytest.approx(terms["total_usd_h"], abs=1e-9)
        assert terms["per_gpu_usd_h"] == quote["effective_usd_gpu_h"]
        with_fee = (terms["gpu_usd_h"] + terms["storage_usd_h"]) * (terms["fee_multiplier"] - 1)
        assert terms["fee_usd_h"] == pytest.approx(with_fee, abs=2e-6)
    shown = spotctl(clouds.lab, "prices", "--explain").stdout
    assert all(f"\n{name}" in shown for name in THREE)


@pytest.mark.e2e
def test_the_usual_spellings_of_a_gpu_find_the_same_offers(clouds: Clouds) -> None:
    sold = {quote["gpu"] for quote in all_three(clouds)}
    for gpu in sold:
        by_id = {quote["offer"] for quote in asked(clouds, "prices", "--gpu", gpu)["quotes"]}
        for spelling in (gpu.lower(), gpu.replace("_", " "), gpu.replace("_", "-").lower(), f"NVIDIA {gpu}"):
            found = {quote["offer"] for quote in asked(clouds, "prices", "--gpu", spelling)["quotes"]}
            assert found == by_id, spelling


@pytest.mark.e2e
def test_the_history_has_the_prices_of_all_three(clouds: Clouds) -> None:
    """On the clouds' own fast clock, by which a day of polls passes in seconds."""
    all_three(clouds)

    def kept() -> bool:
        found = [asked(clouds, "history", "--provider", name)["prices"] for name in sorted(THREE)]
        return all(found)

    until(kept, what="prices of all three in the history", within=120, every=0.3)
    for name in sorted(THREE):
        for prices in asked(clouds, "history", "--provider", name, "--since", "1d")["prices"]:
            for bucket in prices["buckets"]:
                assert 0 < bucket["low_usd_gpu_h"] <= bucket["median_usd_gpu_h"] <= bucket["high_usd_gpu_h"]


@pytest.mark.e2e
def test_a_job_without_a_gpu_runs_on_a_plain_type_of_aws(tmp_path: Path) -> None:
    """In clouds of its own, which sell the type from the start."""
    with three_clouds(tmp_path) as clouds:
        clouds.aws.stock(PLAIN_KIND, ZONES[0], PLAIN_KIND.spot, since=clouds.clock.now())
        clouds.lab.start()
        assert_prepared_at_aws(clouds)
        clouds.lab.stop()


def assert_prepared_at_aws(clouds: Clouds) -> None:
    needs = {"cpus": 4, "disk": "10GB"}
    job = clouds.lab.submit("prep", "nproc > $SPOTD_OUTPUT_DIR/cpus", resources=needs, price={"max_price": 0.1})
    clouds.lab.wait_final(job)
    answer = clouds.lab.job(job)
    assert answer["state"] == "SUCCEEDED", answer["reason"]
    assert [(one["provider"], one["gpu_count"]) for one in answer["attempts"]] == [("aws", 0)]
    assert answer["attempts"][0]["host"].startswith("m7i.xlarge:")
    until(lambda: not clouds.left(), what="its machine to be gone", within=60)
    assert_receipts_agree(clouds.lab)
