"""The official `azure-mgmt-compute` client reads what the adapter sends, and judges the fake that the adapter meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.azure.plugin import AzureProvider
from spotd_providers.contract.values import Market
from spotd_providers.testkit.serve import Call
from tests.fakes.official_clients import AZURE, told_by
from tests.unit.providers.azure.harness import GPUS, AzureHarness, play


@pytest.mark.e2e
@pytest.mark.lengthy  # 12 packages, installed at the first run
@pytest.mark.timeout(600)
def test_the_official_client_understands_a_launch_and_finds_its_machine(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        page = await provider.offers(h.query())
        offer = min((one for one in page.offers if one.market is Market.SPOT), key=lambda one: one.gpu_price)
        request = h.request(offer)
        await provider.launch(request)
        await h.settle()
        assert len(h.live()) == 1
        given = {
            "subscription": h.cloud.subscription,
            "token": h.cloud.issue_token(),
            "name": request.key,
            "body": json.loads(h.requests(Call.LAUNCH)[0].body),
        }
        file = Path(__file__).with_name("official_story.py")
        seen.update(told_by(AZURE, file, h.served.url, json.dumps(given), home=tmp_path / "home"))
        seen["offer"], seen["key"] = offer, request.key
        assert not h.live()

    play(tmp_path, story)
    offer, key = seen["offer"], seen["key"]
    assert seen["sent"] == {
        "identity": None,
        "place": [offer.region, None, key],
        "market": ["Spot", "Delete", offer.gpu_price / 1_000_000],
        "size": offer.extra["size"],
        "disk": [key, "FromImage", "Delete", 128],
        "storage": "Premium_LRS",
        "image": "ubuntu-hpc",
        "login": [True, "ssh-ed25519"],
        "script": True,
        "interface": [key, "Delete", True, key],
        "address": ["Delete", "Standard", key],
        "console": True,
    }
    assert seen["listed"] == [key]
    assert seen["state"] == ["Succeeded", ["ProvisioningState/succeeded", "PowerState/running"]]
    assert set(GPUS) <= set(seen["sizes"])
    assert seen["quota"] == [100_000]
    assert "/blob/" in seen["console"]
