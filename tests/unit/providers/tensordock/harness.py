"""TensorDock for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import Balance, Market, Offer
from spotd_providers.tensordock.plugin import PLUGIN, TensorDockProvider, TensorDockSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, NotApplicable, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.rest import RestRefusal, usd
from tests.fakes.tensordock import TensorDockApi, TensorDockCloud, TensorDockQuirks, some_nodes
from tests.fakes.tensordock.cloud import RAM_GB_HOUR_USD, VCPU_HOUR_USD
from tests.unit.providers.rest_harness import RestHarness

GPUS = {
    "h100-sxm5-80gb": "H100_SXM",
    "geforcertx4090-pcie-24gb": "RTX_4090",
    "rtxa4000-pcie-16gb": "RTX_A4000",
    "quantum9000-pcie-1gb": "QUANTUM_9000",
}


class TensorDockHarness(RestHarness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: TensorDockCloud
    who = "TensorDock"

    def settings(self) -> TensorDockSettings:
        return TensorDockSettings(**{"base_url": self.served.url + TensorDockApi.base_path, **self.more})

    def machines(self) -> Sequence[WorldMachine]:
        found = super().machines()
        given = {one.machine_id: one.body.get("cloud_init") or {} for one in self.cloud.rented.values()}
        scripts = {name: [row["content"] for row in one.get("write_files", ())] for name, one in given.items()}
        return [replace(one, start_script=next(iter(scripts[one.machine_id]), None)) for one in found]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=f"{count}x{node.model}:{node.location_id}",
                gpu=GPUS[node.model],
                gpu_count=count,
                market=Market.ON_DEMAND,
                price=usd(count * (node.price + 8 * VCPU_HOUR_USD + 32 * RAM_GB_HOUR_USD)),
            )
            for node in self.cloud.nodes.values()
            for count in (1, 2, 4, 8)
            if count <= node.free
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        if raw == '"0.001"':
            raise NotApplicable("TensorDock may write its prices as texts, so this is one")
        model, location = offer_id.partition("x")[2].split(":")

        def place(answer: Any, mark: str) -> None:
            for row in answer["data"]["locations"]:
                for gpu in row["gpus"]:
                    if (gpu["v0Name"], row["id"]) == (model, location):
                        gpu["price_per_hr"] = mark

        self.edit_price(raw, place)

    def sell_nothing(self) -> None:
        self.cloud.quirks.lists_sold_out = True
        for node in self.cloud.nodes.values():
            node.free = 0

    def vanish_offer(self, offer: Offer) -> None:
        for node_id, node in list(self.cloud.nodes.items()):
            if (node.model, node.location_id) == (offer.extra["model"], offer.extra["location"]):
                del self.cloud.nodes[node_id]

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        node = next(one for one in self.cloud.nodes.values() if one.model == offer.extra["model"])
        # A part of the price is not the GPU's: this doubles the whole at least.
        self.cloud.set_price(node.model, (node.price + 0.2) * factor)

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["model"], offer.extra["location"])

    def empty_balance(self) -> None:
        self.cloud.deposit_usd = 0.0

    def exhaust_quota(self) -> None:
        self.cloud.quirks.quota_gpus = 0

    def break_auth(self) -> None:
        self.cloud.token = "another-token"

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("TensorDock sells on demand only")

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = RestRefusal(500, "Something went wrong")

    def add_foreign(self, name: str) -> str:
        return self.cloud.add_foreign(name).machine_id

    def preempt(self, machine_id: str) -> None:
        self.cloud.vanish(machine_id)

    def true_balance(self) -> Balance:
        raise NotApplicable("TensorDock's API states no balance")


@contextmanager
def open_harness(
    folder: Path, *, quirks: TensorDockQuirks | None = None, **settings: Any
) -> Iterator[TensorDockHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = TensorDockCloud(folder / "cloud", clock=clock, quirks=quirks or TensorDockQuirks(requests_per_minute=None))
    cloud.token = CANARY
    cloud.stock(*some_nodes())
    faults = Faults(TensorDockApi(cloud), classify=TensorDockApi.classify)
    try:
        with serving(faults) as served:
            yield TensorDockHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[TensorDockHarness, TensorDockProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: TensorDockQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, TensorDockProvider)
                await story(h, provider)

        run_virtually(main)
