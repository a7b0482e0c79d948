"""Azure for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.azure.plugin import PLUGIN, AzureProvider
from spotd_providers.azure.wire import AzureSettings, name_of
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import AttemptKey, Balance, Market, Offer
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.rest import RestRefusal, usd
from tests.unit.providers.azure.fake import AzureApi, AzureCloud, AzureQuirks, AzureVm, some_sizes
from tests.unit.providers.azure.fake_records import AzureResource
from tests.unit.providers.rest_harness import RestHarness

GPUS = {
    "Standard_NC40ads_H100_v5": ("H100_NVL", 1),
    "Standard_NC80adis_H100_v5": ("H100_NVL", 2),
    "Standard_ND96isr_H100_v5": ("H100_SXM", 8),
    "Standard_NC4as_T4_v3": ("T4", 1),
    "Standard_NC24ads_A100_v4": ("A100_PCIE_80", 1),
    "Standard_ND40rs_v2": ("V100_32", 8),
}
"""What the sizes of the fake are called here. Fractions, ARM, sizes unheard of and those without GPU are rejected."""
REGIONS = ("westeurope", "eastus")
NETWORK = "Microsoft.Network/virtualNetworks"


class AzureHarness(RestHarness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: AzureCloud
    who = "Azure"
    ends = "Deleting"

    @property
    def key_exchanges(self) -> frozenset[str]:  # type: ignore[override] # the tenant is the cloud's
        return frozenset({f"/{self.cloud.tenant}/oauth2/v2.0/token"})

    def settings(self) -> AzureSettings:
        url = self.served.url
        return AzureSettings(
            **{
                "base_url": url,
                "login_url": url,
                "prices_url": url,
                "tenant_id": self.cloud.tenant,
                "client_id": self.cloud.client_id,
                "subscription_id": self.cloud.subscription,
                "resource_group": "spotd",
                "regions": REGIONS,
                **self.more,
            }
        )

    def secrets(self) -> Sequence[str]:
        # A link to a console is a secret that its own URL has to hold: a test of its own looks for it elsewhere.
        return [*super().secrets(), *self.cloud.tokens]

    def vm(self, machine_id: str) -> AzureVm:
        """The newest machine of this name."""
        return next(one for one in reversed(self.cloud.rented.values()) if one.name.lower() == machine_id)

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        by_id = {one.machine_id: one for one in self.cloud.rented.values()}
        return [replace(one, machine_id=by_id[one.machine_id].name.lower()) for one in super().machines()]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=f"{size.name}:{region}:{market}",
                gpu=GPUS[size.name][0],
                gpu_count=GPUS[size.name][1],
                market=market,
                price=usd(price),
            )
            for size in self.cloud.sizes.values()
            if size.name in GPUS
            for region, prices in size.prices.items()
            if region not in size.restrictions
            for market, price in zip((Market.ON_DEMAND, Market.SPOT), prices, strict=True)
            if price is not None
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        size, region, market = offer_id.split(":")
        kind = "spot" if market == Market.SPOT else "ondemand"

        def place(answer: Any, mark: str) -> None:
            for row in answer.get("Items", ()):
                if row.get("skuId") == f"{size}:{region}:{kind}:linux":
                    row["retailPrice"] = mark

        self.edit_price(raw, place)

    def sell_nothing(self) -> None:
        for size in self.cloud.sizes.values():
            size.prices.clear()

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.sizes.pop(offer.extra["size"])

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        size, region = offer.extra["size"], offer.extra["region"]
        on_demand, spot = self.cloud.sizes[size].prices[region]
        self.cloud.set_price(size, region, on_demand=on_demand * factor, spot=None if spot is None else spot * factor)

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["size"], offer.extra["region"])

    def empty_balance(self) -> None:
        raise NotApplicable("Azure bills afterwards and has no balance that could be empty")

    def true_balance(self) -> Balance:
        raise NotApplicable("Azure bills afterwards and states no balance")

    def exhaust_quota(self) -> None:
        self.cloud.quirks.cores_spot = self.cloud.quirks.cores = 0

    def break_auth(self) -> None:
        self.cloud.client_secret = "another-secret"
        self.cloud.tokens.clear()

    def sell_on_demand_instead(self) -> None:
        self.cloud.quirks.sells_regular = True

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = RestRefusal(500, "Something went wrong", code="InternalServerError")

    def list_only_part(self) -> None:
        self.cloud.quirks.breaks_list = True

    def spoil_listed_row(self, machine_id: str) -> None:
        super().spoil_listed_row(self.vm(machine_id).machine_id)

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_foreign(name_of(key), {"spotd-key": key})

    def add_foreign(self, name: str) -> str:
        return self.cloud.add_foreign(name, {"spotd-key": name} if name.startswith("spotd-") else {}).name.lower()

    def preempt(self, machine_id: str) -> None:
        self.cloud.evict(self.vm(machine_id).machine_id)

    def set_state(self, machine_id: str, state: OddState) -> None:
        vm = self.vm(machine_id)
        if state is OddState.PROVISION_FAILED:
            vm.boot_no += 1
            self.cloud.rename(vm.machine_id, "Failed")
        else:
            super().set_state(vm.machine_id, state)

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(self.vm(machine_id).machine_id)


def add_network(cloud: AzureCloud) -> None:
    """What a person makes before spotd can rent: a group, and a network in each region."""
    cloud.groups["spotd"] = REGIONS[0]
    for region in REGIONS:
        for name in (f"spotd-{region}", f"spotd-{region}/subnets/default"):
            row = AzureResource(kind=NETWORK, name=name, region=region, body={})
            cloud.resources[f"{NETWORK}/{name}".lower()] = row


@contextmanager
def open_harness(folder: Path, *, quirks: AzureQuirks | None = None, **settings: Any) -> Iterator[AzureHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = AzureCloud(folder / "cloud", clock=clock, quirks=quirks)
    cloud.client_secret = CANARY
    cloud.stock(*some_sizes())
    add_network(cloud)
    faults = Faults(AzureApi(cloud), classify=AzureApi.classify)
    try:
        with serving(faults) as served:
            yield AzureHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[AzureHarness, AzureProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: AzureQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, AzureProvider)
                await story(h, provider)

        run_virtually(main)
