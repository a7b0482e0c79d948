"""gpuhunt's vast.ai provider reads the fake's offers, and finds there what ours finds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spotd_providers.contract.values import MICRO, Market
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import serving
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import VastApi, VastCloud, some_asks
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import play

hunt = pytest.importorskip("gpuhunt.providers.vastai", reason="gpuhunt is not installed: pip install -e '.[dev]'")
models = pytest.importorskip("gpuhunt", reason="gpuhunt is not installed: pip install -e '.[dev]'")

pytestmark = pytest.mark.e2e

DISK_GB = 64


def test_gpuhunt_prices_what_our_provider_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours: dict[tuple[str, bool], float] = {}
    theirs: dict[tuple[str, bool], float] = {}

    async def story(h: VastHarness, provider: VastProvider) -> None:
        page = await provider.offers(h.query())
        for offer in page.offers:
            machine = offer.gpu_price + DISK_GB * offer.storage_price / 720
            ours[offer.extra["ask"], offer.market is Market.SPOT] = machine / MICRO
        # It sends no key, no `type` and no limit unless it must.
        monkeypatch.setattr(hunt, "bundles_url", f"{h.served.url}/api/v0/bundles/")
        asked = models.QueryFilter(min_disk_size=DISK_GB, min_gpu_count=1)
        with caplog.at_level(logging.WARNING):
            found = hunt.VastAIProvider(extra_filters={"verified": {"eq": True}}).get(asked)
        assert [record.getMessage() for record in caplog.records if "gpuhunt" in record.name] == []
        theirs.update({(item.instance_name, item.spot): item.price for item in found})

    play(tmp_path, story)
    assert len(theirs) == 2 * len(some_asks())
    assert theirs == {offer: pytest.approx(price, abs=2e-5) for offer, price in ours.items()}


def test_gpuhunt_narrows_its_search_on_the_fakes_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = VastCloud(tmp_path / "cloud", clock=FakeClock())
    cloud.stock(*some_asks())
    with serving(VastApi(cloud)) as served:
        monkeypatch.setattr(hunt, "bundles_url", f"{served.url}/api/v0/bundles/")
        asked = models.QueryFilter(gpu_name=["H100"], min_gpu_memory=75, max_gpu_memory=85, max_price=3.0)
        found = hunt.VastAIProvider(community_cloud=True, order=[("dph_base", "asc")]).get(asked)
        secure = hunt.VastAIProvider(community_cloud=False).get(models.QueryFilter())
    cloud.shut_down()
    assert [(i.gpu_name, i.gpu_count, i.gpu_memory, i.spot) for i in found] == [
        ("H100", 1, 80.0, True),
        ("H100", 1, 80.0, False),
    ]
    data_centers = {str(ask.ask_id) for ask in some_asks() if ask.hosting_type >= 1}
    assert {item.instance_name for item in secure} == data_centers
