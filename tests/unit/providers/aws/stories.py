"""Short stories with one provider and one fake EC2, told in virtual time; and AWS's own client beside them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.values import Market, Offer
from spotd_providers.testkit.clock import run_virtually
from tests.fakes.aws import ACCESS_KEY, Quirks
from tests.unit.providers.aws.harness import AwsHarness, open_harness

Story = Callable[[AwsHarness, AwsProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: Quirks | None = None, **settings: Any) -> None:
    """The story is told to its end, with these settings of the provider; no process of its machines is left."""
    with open_harness(folder, quirks=quirks) as h:
        h.changes.update(settings)

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, AwsProvider)
                await story(h, provider)

        run_virtually(main)


async def cheapest(h: AwsHarness, provider: AwsProvider, market: Market = Market.SPOT) -> Offer:
    """What costs least on that market now."""
    page = await provider.offers(h.query())
    return min((o for o in page.offers if o.market is market), key=lambda o: (o.gpu_price, o.offer_id))


def official(url: str, service: str = "ec2", region: str = "us-east-1", **config: Any) -> Any:
    """AWS's own client as anybody would make it, pointed at the fake."""
    import boto3
    from botocore.config import Config

    # The stubs know clients by literal names only.
    session: Any = boto3.session.Session(
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key="secret", region_name=region
    )
    return session.client(service, endpoint_url=url, config=Config(**config))
