"""gpuhunt's RunPod provider reads the fake's prices, and finds there what ours finds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spotd_providers.contract.money import MICRO
from spotd_providers.contract.values import Market
from spotd_providers.runpod.provider import RunpodProvider
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.market import busy_market
from tests.unit.providers.runpod.stories import play

hunt = pytest.importorskip("gpuhunt.providers.runpod", reason="gpuhunt is not installed: pip install -e '.[dev]'")

pytestmark = pytest.mark.e2e


def test_gpuhunt_prices_what_our_provider_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with busy_market(tmp_path) as (cloud, url):
        monkeypatch.setattr(hunt, "API_URL", f"{url}/graphql")
        for gpu in cloud.gpus.values():
            gpu.max_count = 2  # it asks for every size in every place
        cloud.gpus["NVIDIA GeForce RTX 3090"].cuda = ("12.4",)
        with caplog.at_level(logging.WARNING):
            found = hunt.RunpodProvider().get()
    assert not caplog.records
    # A place of the secure cloud is a data center, one of the community cloud a country.
    theirs = {
        (item.instance_name, item.gpu_count, "SECURE" if "-" in item.location else "COMMUNITY", round(item.price, 6))
        for item in found
    }
    assert {item.location for item in found} == {"US-KS-2", "EU-RO-1", "US", "RO"}
    assert "NVIDIA GeForce RTX 3090" not in {name for name, *_ in theirs}, "it asks for CUDA 12.8"
    assert {(item.gpu_name, item.gpu_memory) for item in found} == {("RTX4090", 24), ("H100", 80), ("A100", 80)}

    ours: set[tuple[str, int, str, float]] = set()

    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        for gpu in h.cloud.gpus.values():
            gpu.max_count = 2
        h.cloud.gpus["NVIDIA GeForce RTX 3090"].cuda = ("12.4",)
        page = await provider.offers(h.query())
        ours.update(
            (offer.extra["gpu"], offer.gpu_count, offer.extra["cloud"], offer.gpu_price / MICRO)
            for offer in page.offers
            if offer.market is Market.ON_DEMAND
        )

    play(tmp_path / "ours", story, gpu_counts=(1, 2), cuda_min="12.8")
    assert theirs == ours
