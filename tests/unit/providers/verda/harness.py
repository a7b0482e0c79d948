"""Verda for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import Balance, Market, MicroUsd, Offer
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, NotApplicable, WorldOffer
from spotd_providers.testkit.serve import Faults, serving
from spotd_providers.verda.plugin import PLUGIN, VerdaProvider
from spotd_providers.verda.wire import VerdaSettings
from tests.fakes.rest import usd
from tests.fakes.verda import JUPYTER_TOKEN, VerdaApi, VerdaCloud, VerdaQuirks, some_types
from tests.fakes.verda.records import refusal
from tests.unit.providers.rest_harness import RestHarness

GPUS = {
    "1x H100 SXM5 80GB": "H100_SXM",
    "8x H100 SXM5 80GB": "H100_SXM",
    "1x RTX6000 Ada 48GB": "RTX_6000_ADA",
    "2x RTX 6000 Ada 48GB": "RTX_6000_ADA",
    "1x Tesla V100 16GB": "V100_16",
    "1x B300 SXM6 268GB": "B300_SXM",
    "": "CPU",
}
"""What the types of the fake are called here. The one of AMD is not offered."""


class VerdaHarness(RestHarness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: VerdaCloud
    who = "Verda"
    key_exchanges = frozenset({"/v1/oauth2/token"})

    def settings(self) -> VerdaSettings:
        base_url = self.served.url + VerdaApi.base_path
        return VerdaSettings(**{"base_url": base_url, "client_id": self.cloud.client_id, **self.more})

    def secrets(self) -> Sequence[str]:
        return [*super().secrets(), JUPYTER_TOKEN, *self.cloud.access, *self.cloud.refresh]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=f"{kind.name}:{place}:{market}",
                gpu=GPUS[kind.gpu],
                gpu_count=kind.gpus,
                market=market,
                price=usd(kind.spot if is_spot else kind.price),
            )
            for kind in self.cloud.types.values()
            if kind.gpu in GPUS
            for (place, is_spot), left in kind.free.items()
            for market in (Market.SPOT if is_spot else Market.ON_DEMAND,)
            if left > 0
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        kind, _, market = offer_id.split(":")
        if raw == '"0.001"':
            raise NotApplicable("Verda writes its prices as texts, so this is one")

        def place(answer: Any, mark: str) -> None:
            for row in answer:
                if row.get("instance_type") == kind:
                    row["spot_price" if market == Market.SPOT else "price_per_hour"] = mark

        self.edit_price(raw, place)

    def sell_nothing(self) -> None:
        for kind in self.cloud.types:
            self.cloud.sell_out(kind)

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.types.pop(offer.extra["type"])

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        kind = self.cloud.types[offer.extra["type"]]
        self.cloud.set_price(kind.name, spot=kind.spot * factor, price=kind.price * factor)

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["type"], offer.extra["location"])

    def empty_balance(self) -> None:
        self.cloud.deposit_usd = 0.0

    def exhaust_quota(self) -> None:
        self.refuse_launches(refusal("forbidden_action", "GPU quota exceeded: the limit of your account is reached"))

    def break_auth(self) -> None:
        self.cloud.break_auth()

    def sell_on_demand_instead(self) -> None:
        self.cloud.quirks.spot_decided_by = "nothing"

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = refusal("server_error", "Something went wrong")

    def add_foreign(self, name: str) -> str:
        return self.cloud.add_foreign(name).machine_id

    def preempt(self, machine_id: str) -> None:
        self.cloud.preempt(machine_id)

    def true_balance(self) -> Balance:
        return Balance(available=MicroUsd(round(self.cloud.balance() * 1_000_000)))


@contextmanager
def open_harness(folder: Path, *, quirks: VerdaQuirks | None = None, **settings: Any) -> Iterator[VerdaHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    # An end that is refused while a machine starts has tests of its own.
    cloud = VerdaCloud(folder / "cloud", clock=clock, quirks=quirks or VerdaQuirks(undeletable=frozenset()))
    cloud.client_secret = CANARY
    cloud.stock(*(replace(kind, free=dict(kind.free)) for kind in some_types()))
    faults = Faults(VerdaApi(cloud), classify=VerdaApi.classify)
    try:
        with serving(faults) as served:
            yield VerdaHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[VerdaHarness, VerdaProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: VerdaQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, VerdaProvider)
                await story(h, provider)

        run_virtually(main)
