"""Several machines are asked of a plugin only where it says that it starts so many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from spotd.core.domain.market import gang_of
from spotd.daemon.market.guarded import guarded, no_gangs, nodes_max
from spotd_providers.contract import errors
from spotd_providers.contract.values import AttemptKey, Capability, InstallId, LaunchRequest, MicroUsdPerHour, Power
from tests.unit.core.builders import offer
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Log
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio


class GangShop(Shop):
    """Declares that it starts gangs, of as many machines as it states."""

    most: Any = 3

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, Power.GANG: Capability(available=True)}

    @property
    def nodes_max(self) -> Any:
        if isinstance(self.most, Exception):
            raise self.most
        return self.most


def request_for(nodes: int) -> LaunchRequest:
    asked = gang_of(offer("o1"), nodes)
    return LaunchRequest(
        key=AttemptKey("spotd-lab-j1-1"),
        install=InstallId("lab"),
        offer=asked,
        price_max=MicroUsdPerHour(asked.gpu_price),
        image="image",
        disk_gb=10,
        start_script="true",
    )


async def test_a_launch_of_more_machines_than_the_plugin_starts_never_reaches_it() -> None:
    clock = VirtualClock()
    for shop, least in ((GangShop(clock), 4), (Shop(clock), 2)):
        guard = guarded(shop, clock=clock, log=Log())
        with pytest.raises(errors.NotSupported):
            await guard.launch(request_for(least))
        assert shop.requests == []
        await guard.launch(request_for(least - 1))
        assert [one.offer.nodes for one in shop.requests] == [least - 1]


@pytest.mark.parametrize("most", [0, 1, -1, True, "4", None, 2.0, float("nan"), RuntimeError("no")])
async def test_a_plugin_whose_number_makes_no_sense_starts_no_gangs(most: Any) -> None:
    clock = VirtualClock()
    shop = GangShop(clock)
    shop.most = most
    guard = guarded(shop, clock=clock, log=Log())
    assert nodes_max(guard) == 1
    assert no_gangs(guard)


async def test_an_offer_is_launched_in_no_other_number_than_it_is_sold_in() -> None:
    clock = VirtualClock()
    shop = GangShop(clock)
    guard = guarded(shop, clock=clock, log=Log())
    for nodes, least, most in ((1, 2, None), (2, 1, 1), (2, 3, 3)):
        asked = request_for(nodes)
        with pytest.raises(errors.NotSupported):
            await guard.launch(replace(asked, offer=replace(asked.offer, nodes_min=least, nodes_max=most)))
    assert shop.requests == []
