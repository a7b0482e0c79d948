"""Short stories with one provider and one fake RunPod, told in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from spotd_providers.contract.values import Offer
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.clock import run_virtually
from tests.fakes.runpod import Quirks
from tests.unit.providers.runpod.harness import RunpodHarness, open_harness

Story = Callable[[RunpodHarness, RunpodProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: Quirks | None = None, **settings: Any) -> None:
    """The story is told to its end; no process of its pods is left. Clusters are sold where the settings say so."""
    with open_harness(folder, quirks=quirks, **{"cluster_gpu_counts": (), **settings}) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, RunpodProvider)
                await story(h, provider)

        run_virtually(main)


async def cheapest(h: RunpodHarness, provider: RunpodProvider) -> Offer:
    """The offer that costs least now."""
    page = await provider.offers(h.query())
    return min(page.offers, key=lambda o: o.gpu_price)
