"""RunPod's dying spot market: used while it answers, closed with one message when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotd_providers.contract.errors import ContractViolation, NoCapacity, NotSupported, OutcomeUnknown, PriceMoved
from spotd_providers.contract.money import MICRO, MicroUsdPerHour
from spotd_providers.contract.values import InstanceState, Loss, Market, Power
from spotd_providers.runpod.provider import RunpodProvider
from spotd_providers.runpod.spot import MISSES_MAX
from spotd_providers.testkit.faults import Call, Canned
from tests.fakes.runpod import Quirks
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

INTERNAL = b'{"errors":[{"message":"Something went wrong","extensions":{"code":"INTERNAL_SERVER_ERROR"}}],"data":null}'


def test_spot_is_off_unless_asked_for(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        assert {offer.market for offer in page.offers} == {Market.ON_DEMAND}
        assert not [request for request in h.requests() if request.path == "/graphql"]
        assert "closing" in provider.capabilities[Power.SPOT].reason

    play(tmp_path, story)


def test_a_bid_is_sent_for_one_gpu_and_offered_for_the_machine(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        offer = next(o for o in page.offers if o.market is Market.SPOT and o.gpu_count == 2)
        per_gpu = h.cloud.gpus[offer.extra["gpu"]].spot_price
        assert per_gpu is not None
        assert offer.gpu_price == round(2 * per_gpu * MICRO)
        request = h.request(offer, price_max=MicroUsdPerHour(offer.gpu_price + 20_001))
        launched = await provider.launch(request)
        values = json.loads(h.requests(Call.LAUNCH)[0].body)["variables"]["input"]
        assert values["bidPerGpu"] == (offer.gpu_price + 20_000) / 2 / MICRO
        assert launched.instance.market is Market.SPOT
        await h.settle()
        h.cloud.lose_host(launched.instance.ref.instance_id)
        (seen,) = await provider.find(request.key)
        assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.OUTBID)

    play(tmp_path, story, spot=True)


def test_a_gpu_whose_lowest_bid_is_the_on_demand_price_is_not_bid_on(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        assert "H100_SXM" not in {offer.gpu for offer in page.offers if offer.market is Market.SPOT}
        assert any("not below the on-demand price" in row.reason for row in page.rejected)

    play(tmp_path, story, spot=True)


def closings(h: RunpodHarness) -> int:
    return [line.event for line in h.log.lines].count("runpod.spot_closed")


def test_a_removed_mutation_closes_the_market_with_one_message(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider, Market.SPOT)
        h.cloud.quirks.spot = "removed"
        for expected in (NoCapacity, NotSupported, NotSupported):
            with pytest.raises(expected):
                await provider.launch(h.request(offer))
        assert h.launch_calls() == 1
        assert closings(h) == 1
        assert "no longer sells spot pods" in provider.capabilities[Power.SPOT].reason
        asked = len(h.requests())
        page = await provider.offers(h.query())
        assert {o.market for o in page.offers} == {Market.ON_DEMAND}
        assert page.complete
        assert not [request for request in h.requests()[asked:] if request.path == "/graphql"]

    play(tmp_path, story, spot=True)


def test_a_market_that_never_has_anything_is_not_asked_for_ever(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider, Market.SPOT)
        for _ in range(MISSES_MAX):
            with pytest.raises(NoCapacity):
                await provider.launch(h.request(offer))
        with pytest.raises(NotSupported):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == MISSES_MAX
        assert closings(h) == 1

    play(tmp_path, story, Quirks(spot="empty"), spot=True)


def test_graphql_that_is_gone_takes_spot_with_it_and_leaves_on_demand(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        assert {offer.market for offer in page.offers} == {Market.ON_DEMAND}
        assert page.complete
        assert closings(h) == 1
        await provider.launch(h.request(page.offers[0]))

    play(tmp_path, story, Quirks(graphql="gone"), spot=True)


def test_graphql_that_is_down_makes_the_page_incomplete_and_closes_nothing(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        page = await provider.offers(h.query())
        assert page.offers
        assert not page.complete
        h.cloud.quirks.graphql = "on"
        assert Market.SPOT in {offer.market for offer in (await provider.offers(h.query())).offers}

    play(tmp_path, story, Quirks(graphql="down"), spot=True)


def test_a_bid_that_was_sold_on_demand_is_ended(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await cheapest(h, provider, Market.SPOT))
        with pytest.raises((ContractViolation, PriceMoved)):
            await provider.launch(request)
        assert not h.live(request.key)

    play(tmp_path, story, Quirks(spot="on-demand"), spot=True)


def test_an_internal_error_of_a_purchase_proves_nothing(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        request = h.request(await cheapest(h, provider, Market.SPOT))
        h.faults.answer(Call.LAUNCH, Canned(status=200, body=INTERNAL), after_effect=True)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (seen,) = await provider.find(request.key)
        assert seen.market is Market.SPOT

    play(tmp_path, story, spot=True)


def test_a_stopped_spot_pod_runs_again_at_a_bid_that_wins(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider, Market.SPOT)
        launched = await provider.launch(h.request(offer))
        await h.settle()
        h.cloud.lose_host(launched.instance.ref.instance_id)
        await provider.change_bid(launched.instance.ref, MicroUsdPerHour(offer.gpu_price * 2))
        await h.settle()
        (seen,) = await provider.find(launched.instance.key)
        assert seen.state is InstanceState.RUNNING
        assert seen.price == offer.gpu_price * 2

    play(tmp_path, story, spot=True)
