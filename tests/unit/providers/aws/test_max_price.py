"""Spot with a limit that AWS enforces, or without: then spotd looks before it buys, and stops what rises too far."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.decide import decide
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.errors import OfferGone, PriceMoved
from spotd_providers.contract.values import MICRO, InstanceState, Listing, MicroUsdPerHour, Offer
from spotd_providers.testkit.serve import Call
from tests.fakes.aws.wire import Params
from tests.unit.core.builders import SHOP, job, report, world_with
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import cheapest, play


def limit_sent(h: AwsHarness) -> str:
    (request,) = h.requests(Call.LAUNCH)
    said = Params(request.body)
    assert said.get("InstanceMarketOptions.MarketType") == "spot"
    return said.get("InstanceMarketOptions.SpotOptions.MaxPrice")


def rises(h: AwsHarness, offer: Offer, factor: float) -> None:
    h.cloud.set_price(str(offer.pool), f"{offer.gpu_price * factor / MICRO:.6f}")


@pytest.mark.parametrize(("max_price", "lives"), [("ceiling", False), ("none", True)])
def test_aws_takes_a_machine_whose_price_passes_the_limit_only_where_one_was_given(
    tmp_path: Path, max_price: str, lives: bool
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        limit = MicroUsdPerHour(offer.gpu_price + 1_000)
        await provider.launch(h.request(offer, price_max=limit))
        assert limit_sent(h) == ("" if lives else f"{limit / MICRO:.6f}")
        await h.settle()
        rises(h, offer, 2)
        await provider.offers(h.query())
        (seen,) = (await provider.instances()).instances
        assert (seen.state is InstanceState.RUNNING) is lives
        if lives:
            assert seen.price == 2 * offer.gpu_price, "the daemon sees what it costs now"

    play(tmp_path, story, max_price=max_price)


def test_a_list_states_what_a_machine_cost_unseen_and_shows_it_where_that_cannot_be_read(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        launched = await provider.launch(h.request(offer, price_max=MicroUsdPerHour(9 * offer.gpu_price)))
        await h.settle()
        for factor in (2, 3):
            await h.advance(timedelta(hours=1))
            rises(h, offer, factor)
        h.cloud.quirks.refusals["DescribeSpotPriceHistory"] = ("UnauthorizedOperation", 403, "You are not authorized.")
        refused = await provider.instances()
        assert refused.complete
        assert [one.ref for one in refused.instances] == [launched.instance.ref]
        assert refused.instances[0].past_prices == ()
        h.cloud.quirks.refusals.clear()
        await h.advance(timedelta(minutes=15))
        (seen,) = (await provider.instances()).instances
        assert [price for _, price in seen.past_prices] == [factor * offer.gpu_price for factor in (1, 2, 3)]
        assert seen.past_prices[2][0] - seen.past_prices[1][0] == timedelta(hours=1)
        assert seen.price == 3 * offer.gpu_price

    play(tmp_path, story)


def test_without_a_limit_nothing_is_bought_above_what_was_agreed(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        rises(h, offer, 1.5)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer, price_max=MicroUsdPerHour(int(offer.gpu_price * 1.4))))
        assert not h.requests(Call.LAUNCH)
        del h.cloud.prices[str(offer.pool)]
        with pytest.raises(OfferGone):
            await provider.launch(h.request(offer))
        assert not h.requests(Call.LAUNCH)

    play(tmp_path, story, max_price="none")


def test_a_machine_without_a_limit_is_stopped_in_order_when_its_price_passes_the_ceiling(tmp_path: Path) -> None:
    listings: list[Listing] = []
    offers: list[Offer] = []

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        offer = await cheapest(h, provider)
        offers.append(offer)
        await provider.launch(h.request(offer))
        await h.settle()
        for factor in (1.2, 2):
            rises(h, offer, factor)
            await provider.offers(h.query())
            listings.append(await provider.instances())

    play(tmp_path, story, max_price="none")
    (offer,) = offers
    dearer, too_expensive = listings
    world = _running(offer, dearer)
    assert not decide(world, MarketSnapshot(by_provider={}), dearer.at).attempts, "dearer, and within the ceiling"
    plan = decide(_running(offer, too_expensive), MarketSnapshot(by_provider={}), too_expensive.at)
    (item,) = plan.attempts.values()
    assert item.state is AttemptState.STOPPING
    assert item.stop is not None
    assert item.stop.reason is EndReason.PRICE_ROSE


def _running(offer: Offer, listing: Listing) -> World:
    """A job that accepts half more than it agreed to, on the machine that this listing shows."""
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    (machine,) = listing.instances
    price = replace(item.quote.price, gpu=offer.gpu_price, total=offer.gpu_price)
    sold = replace(offer, provider=SHOP)
    agreed = replace(item.quote, offer=sold, price=price)
    ceiling = offer.gpu_price * 3 // 2
    item = replace(item, quote=agreed, ceiling=ceiling)  # type: ignore[arg-type]  # one GPU: per machine and per GPU alike
    owner = job(attempts_made=1, state=world.jobs[item.id.job].state, ceiling=ceiling)
    world = replace(world, jobs={owner.id: owner}, attempts={item.id: item})
    assert item.ref is not None
    seen = replace(machine, ref=item.ref, key=item.key)
    looked = {i: replace(r, read_at=listing.at) for i, r in report(seq=6).items()}
    plan = reconcile(world, {SHOP: replace(listing, instances=(seen,))}, looked, listing.at)
    return applied(world, plan)
