"""Google Cloud for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import Balance, Market, Offer
from spotd_providers.googlecloud.catalogue import PRICES_KEPT
from spotd_providers.googlecloud.plugin import PLUGIN, GoogleProvider
from spotd_providers.googlecloud.wire import GoogleSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Faults, serving
from tests.fakes.rest import RestRefusal
from tests.unit.providers.googlecloud.catalog import SPOT_ONLY, ZONES
from tests.unit.providers.googlecloud.fake import GoogleApi, GoogleCloud, GoogleQuirks, some_kinds
from tests.unit.providers.rest_harness import RestHarness

GPUS = {
    "nvidia-tesla-a100": "A100_SXM_40",
    "nvidia-a100-80gb": "A100_SXM_80",
    "nvidia-h100-80gb": "H100_SXM",
    "nvidia-h100-mega-80gb": "H100_SXM",
    "nvidia-b200": "B200_SXM",
    "nvidia-l4": "L4",
    "": "CPU",
}


class GoogleHarness(RestHarness):
    """The provider, its cloud and the wire between them. A machine is known by its name here."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: GoogleCloud
    runs = "RUNNING"
    ends = "STOPPING"
    who = "Google Cloud"

    def settings(self) -> GoogleSettings:
        usual = {"project": self.cloud.project, "regions": tuple(ZONES), "cpu_types": ("n1-standard-8",)}
        urls = {"base_url": self.served.url, "billing_url": self.served.url}
        return GoogleSettings(**{**urls, **usual, **self.more})

    def machines(self) -> Sequence[WorldMachine]:
        names = {number: one.name for number, one in self.cloud.rented.items()}
        labels = {number: str(one.label).replace("_", ".") for number, one in self.cloud.rented.items()}
        return [
            replace(one, machine_id=names[one.machine_id], label=labels[one.machine_id]) for one in super().machines()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=f"{kind.name}:{zone}:{market}",
                gpu=GPUS[self.cloud.families[kind.family].gpu_type],
                gpu_count=kind.gpus,
                market=market,
                price=self.cloud.price(kind, zone, is_spot=market is Market.SPOT),
            )
            for kind in self.cloud.kinds.values()
            for zone in {place for place, _ in kind.free}
            for market in Market
            if not kind.is_deprecated and (market is Market.SPOT or not kind.name.startswith(SPOT_ONLY))
        ]

    def id_of(self, name: str) -> str:
        return self.cloud.named(name).machine_id

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        """Spoil the price of the GPU, or of the cores where there is none, once the prices of before are old."""
        family = self.cloud.families[self.cloud.kinds[offer_id.partition(":")[0]].family]
        words = family.gpu_words or f"{family.words} Core"

        def place(answer: Any, mark: str) -> None:
            for row in answer.get("skus", ()):
                if words in row["description"]:
                    price = row["pricingInfo"][0]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
                    price.update(units=mark, nanos=0)

        self.edit_price(raw, place)
        self.fake_clock.advance(PRICES_KEPT)

    def sell_nothing(self) -> None:
        self.cloud.kinds.clear()

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.kinds.pop(offer.extra["type"])

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        """Google's list prices change at most daily, and are taken for true for so long after they were read."""
        self.cloud.raise_price(offer.extra["type"], factor)
        self.fake_clock.advance(PRICES_KEPT)

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["type"], offer.extra["zone"])

    def empty_balance(self) -> None:
        raise NotApplicable("a Google Cloud account has no balance, it is billed each month")

    def exhaust_quota(self) -> None:
        text = "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region us-central1."
        self.refuse_launches(RestRefusal(403, text, code="quotaExceeded"))

    def break_auth(self) -> None:
        self.cloud.break_auth()

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("a launch states its provisioningModel, and Google makes that machine or none")

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = RestRefusal(500, "Internal error", code="backendError")

    def list_only_part(self) -> None:
        self.cloud.quirks.unreachable = {zone for zones in ZONES.values() for zone in zones}

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_row[self.id_of(machine_id)] = {"name": 7}

    def add_foreign(self, name: str) -> str:
        is_key = name.startswith("spotd-")
        labels = {"spotd-install": name.split("-")[1], "spotd-key": name} if is_key else {}
        return self.cloud.add_foreign(name, labels=labels).name

    def preempt(self, machine_id: str) -> None:
        self.cloud.preempt(self.id_of(machine_id))

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("a preempted machine is deleted: its launch says so")

    def give_notice(self, machine_id: str) -> None:
        """The machine itself is warned by its metadata; the API shows only that it stops."""
        self.cloud.preempt(self.id_of(machine_id))

    def lose_contact(self, machine_id: str) -> None:
        self.cloud.rename(self.id_of(machine_id), "REPAIRING")

    def set_state(self, machine_id: str, state: OddState) -> None:
        if state is OddState.PROVISION_FAILED:
            raise NotApplicable("a launch that fails is said to by its operation, and no machine is left")
        super().set_state(self.id_of(machine_id), state)

    def true_balance(self) -> Balance:
        raise NotApplicable("a Google Cloud account has no balance")

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(self.id_of(machine_id))


@contextmanager
def open_harness(folder: Path, *, quirks: GoogleQuirks | None = None, **settings: Any) -> Iterator[GoogleHarness]:
    """A fresh project with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = GoogleCloud(folder / "cloud", clock=clock, quirks=quirks or GoogleQuirks())
    cloud.access[CANARY] = clock.now() + timedelta(days=9999)
    cloud.stock(*some_kinds())
    faults = Faults(GoogleApi(cloud), classify=GoogleApi.classify)
    try:
        with serving(faults) as served:
            yield GoogleHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[GoogleHarness, GoogleProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: GoogleQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, GoogleProvider)
                await story(h, provider)

        run_virtually(main)
