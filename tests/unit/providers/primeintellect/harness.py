"""Prime Intellect for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import Balance, Market, MicroUsd, Offer
from spotd_providers.primeintellect.plugin import PLUGIN, START, START_COMMAND, PrimeProvider
from spotd_providers.primeintellect.wire import PrimeSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.primeintellect import (
    JUPYTER_PASSWORD,
    PrimeApi,
    PrimeCloud,
    PrimeConfiguration,
    PrimePod,
    PrimeQuirks,
    some_configurations,
)
from tests.fakes.rest import RestRefusal, usd
from tests.unit.providers.rest_harness import RestHarness

GPUS = {
    ("A100_80GB", "PCIe"): "A100_PCIE_80",
    ("A100_80GB", "SXM4"): "A100_SXM_80",
    ("H100_80GB", "PCIe"): "H100_PCIE",
    ("RTX4090_24GB", "PCIe"): "RTX_4090",
}
"""What the configurations of the fake are called here that are for sale."""
UNSOLD = ("ahead", "euros", "gone")


class PrimeHarness(RestHarness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: PrimeCloud
    runs = "ACTIVE"
    ends = "DELETING"
    who = "Prime Intellect"

    def settings(self) -> PrimeSettings:
        base_url = self.served.url + PrimeApi.base_path
        return PrimeSettings(**{"base_url": base_url, "templates": {"*": "template-1"}, **self.more})

    def secrets(self) -> Sequence[str]:
        return [*super().secrets(), JUPYTER_PASSWORD]

    def machines(self) -> Sequence[WorldMachine]:
        pods = self.cloud.rented
        return [
            replace(one, start_script=_script_of(pods[one.machine_id]), price=usd(pods[one.machine_id].base))
            for one in super().machines()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=name_of(one),
                gpu=GPUS[one.gpu, one.socket],
                gpu_count=one.gpus,
                market=Market.SPOT if one.is_spot else Market.ON_DEMAND,
                price=usd(one.price),
            )
            for one in self.cloud.configurations
            if one.free > 0 and one.cloud_id not in UNSOLD
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        def place(answer: Any, mark: str) -> None:
            for row in answer.get("items", ()):
                if offer_id.startswith(f"{row['provider']}:{row['dataCenter']}:{row['gpuCount']}x{row['gpuType']}:"):
                    row["prices"]["onDemand" if row["security"] == "secure_cloud" else "communityPrice"] = mark

        self.edit_price(raw, place)

    def sell_nothing(self) -> None:
        for one in self.cloud.configurations:
            one.free = 0

    def vanish_offer(self, offer: Offer) -> None:
        kept = [one for one in self.cloud.configurations if name_of(one) != offer.offer_id]
        self.cloud.configurations[:] = kept

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        one = self._configuration(offer)
        self.cloud.set_price(one.cloud_id, one.price * factor)

    def exhaust_capacity(self, offer: Offer) -> None:
        self._configuration(offer).free = 0

    def empty_balance(self) -> None:
        self.cloud.deposit_usd = 0.0

    def exhaust_quota(self) -> None:
        self.cloud.quirks.quota_gpus = 0

    def break_auth(self) -> None:
        self.cloud.api_key = "pit_another"

    def sell_on_demand_instead(self) -> None:
        for one in self.cloud.configurations:
            self.cloud.quirks.edit_offer[one.cloud_id] = {"isSpot": one.is_spot}
            one.is_spot = False

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = RestRefusal(500, "Internal Server Error")

    def list_only_part(self) -> None:
        self.cloud.quirks.total_lies = 5

    def add_foreign(self, name: str) -> str:
        return self.cloud.add_foreign(name).machine_id

    def preempt(self, machine_id: str) -> None:
        self.cloud.preempt(machine_id)

    def set_state(self, machine_id: str, state: OddState) -> None:
        if state is OddState.PROVISION_FAILED:
            pod = self.cloud.rented[machine_id]
            pod.boot_no += 1
            pod.status, pod.progress = "ERROR", 40
        else:
            super().set_state(machine_id, state)

    def true_balance(self) -> Balance:
        return Balance(available=MicroUsd(round(self.cloud.balance() * 1_000_000)))

    def _configuration(self, offer: Offer) -> PrimeConfiguration:
        return next(one for one in self.cloud.configurations if name_of(one) == offer.offer_id)


def name_of(one: PrimeConfiguration) -> str:
    """What the adapter calls the offer of a configuration."""
    security = "community_cloud" if one.community else "secure_cloud"
    market = Market.SPOT if one.is_spot else Market.ON_DEMAND
    return f"{one.provider}:{one.data_center}:{one.gpus}x{one.gpu}:{one.socket}:{security}:{market}"


def _script_of(pod: PrimePod) -> str | None:
    given = {row["key"]: row["value"] for row in pod.body.get("envVars") or ()}
    return base64.b64decode(given[START]).decode() if START in given else None


@contextmanager
def open_harness(folder: Path, *, quirks: PrimeQuirks | None = None, **settings: Any) -> Iterator[PrimeHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    # Prices without the disk, as the flag of each row says; those with it have tests of their own.
    cloud = PrimeCloud(folder / "cloud", clock=clock, quirks=quirks or PrimeQuirks(disk_in_price=False))
    cloud.api_key = CANARY
    cloud.templates = {"template-1": START_COMMAND}
    cloud.stock(*some_configurations())
    faults = Faults(PrimeApi(cloud), classify=PrimeApi.classify)
    try:
        with serving(faults) as served:
            yield PrimeHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[PrimeHarness, PrimeProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: PrimeQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, PrimeProvider)
                await story(h, provider)

        run_virtually(main)
