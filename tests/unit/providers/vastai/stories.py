"""Short stories with one provider and one fake vast.ai, told in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from spotd_providers.contract.values import Market, Offer
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.vastai import Quirks
from tests.unit.providers.vastai.harness import VastHarness, open_harness

Story = Callable[[VastHarness, VastProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: Quirks | None = None) -> None:
    """The story is told to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, VastProvider)
                await story(h, provider)

        run_virtually(main)


async def cheapest(h: VastHarness, provider: VastProvider, market: Market = Market.SPOT) -> Offer:
    """What costs least on that market now."""
    page = await provider.offers(h.query())
    return min((o for o in page.offers if o.market is market), key=lambda o: o.gpu_price)
