"""OpenStack for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import AttemptKey, Balance, Instance, Market, Offer
from spotd_providers.openstack.plugin import PLUGIN, OpenstackProvider
from spotd_providers.openstack.wire import OpenstackSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Call, Faults, RecordedRequest, serving
from tests.fakes.openstack import (
    ADMIN_PASSWORD,
    OpenstackApi,
    OpenstackCloud,
    OpenstackQuirks,
    refusal,
    some_flavors,
)
from tests.fakes.rest import usd
from tests.unit.providers.rest_harness import RestHarness

PRICED: tuple[dict[str, Any], ...] = (
    {"name": "l4-90", "price": "0.75"},
    {"name": "l4-180", "price": "1.50"},
    {"name": "h100-380", "price": "2.80"},
    {"name": "gpu.a100.spot", "price": "0.90", "market": "spot"},
    {"name": "hm.v100s", "price": "0.60", "gpu": "V100S", "gpus": 1},
    {"name": "b3-8", "price": "0.05", "gpus": 0},
)
GPUS = {
    "l4-90": "L4",
    "l4-180": "L4",
    "h100-380": "H100_PCIE",
    "gpu.a100.spot": "A100_80",
    "hm.v100s": "V100S",
    "b3-8": "CPU",
}
_OWN: str = "the config states the prices, so no answer of the cloud's moves one"


class OpenstackHarness(RestHarness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN
    cloud: OpenstackCloud
    who = "OpenStack"
    runs = "ACTIVE"
    ends = "DELETED"
    key_exchanges = frozenset({"/identity/v3/auth/tokens"})

    def settings(self) -> OpenstackSettings:
        return OpenstackSettings(
            **{
                "base_url": self.served.url + "/identity/v3",
                "credential_id": self.cloud.credential_id,
                "region": "GRA11",
                "image": "Ubuntu 24.04",
                "disk_price": "0.10",
                "flavors": PRICED,
                **self.more,
            }
        )

    def secrets(self) -> Sequence[str]:
        return [*super().secrets(), ADMIN_PASSWORD, *self.cloud.tokens]

    def machines(self) -> Sequence[WorldMachine]:
        ending = {one.machine_id for one in self.cloud.rented.values() if one.task_state == "deleting"}
        return [replace(one, exists=one.exists and one.machine_id not in ending) for one in super().machines()]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=one.name,
                gpu=GPUS[one.name],
                gpu_count=one.gpus,
                market=Market.SPOT if one.is_spot else Market.ON_DEMAND,
                price=usd(one.price),
            )
            for one in self.cloud.flavors.values()
            if one.name in GPUS and not one.disabled
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        raise NotApplicable(_OWN)

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        raise NotApplicable(_OWN)

    def sell_nothing(self) -> None:
        self.cloud.flavors.clear()

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.flavors.pop(offer.extra["name"])

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["name"])
        self.cloud.quirks.schedules = timedelta(0)

    def empty_balance(self) -> None:
        raise NotApplicable("OpenStack knows no money")

    def true_balance(self) -> Balance:
        raise NotApplicable("OpenStack knows no money")

    def exhaust_quota(self) -> None:
        self.refuse_launches(
            refusal(403, "Quota exceeded for instances: Requested 1, but already used 10 of 10 instances")
        )

    def break_auth(self) -> None:
        self.cloud.break_auth()

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("which market a server is of is a matter of its flavour, which the launch names")

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = refusal(500, "Unexpected API Error.")

    def list_only_part(self) -> None:
        self.cloud.add_foreign("gpu9")
        self.cloud.quirks.page_rows, self.cloud.quirks.breaks_page = 1, True

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_foreign(key, {"spotd-key": key})

    def add_foreign(self, name: str) -> str:
        return self.cloud.add_foreign(name, {"spotd-key": name} if name.startswith("spotd-") else {}).machine_id

    def preempt(self, machine_id: str) -> None:
        self.cloud.preempt(machine_id)

    def set_state(self, machine_id: str, state: OddState) -> None:
        if state is OddState.PROVISION_FAILED:
            self.cloud.rented[machine_id].active_at = None
            self.cloud.fail(machine_id, "Build of instance aborted: Image is not acceptable")
        else:
            super().set_state(machine_id, state)


@contextmanager
def open_harness(folder: Path, *, quirks: OpenstackQuirks | None = None, **settings: Any) -> Iterator[OpenstackHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = OpenstackCloud(folder / "cloud", clock=clock, quirks=quirks)
    cloud.secret = CANARY
    cloud.stock(*some_flavors())

    def classify(request: RecordedRequest) -> Call:
        """What a request is for; the list before a project's first launch is no reading of what was bought."""
        call = OpenstackApi.classify(request)
        is_before = request.path.endswith("/servers/detail") and not cloud.rented
        return Call.OTHER if call is Call.LIST and is_before else call

    faults = Faults(OpenstackApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield OpenstackHarness(cloud, faults, served, folder, clock, **settings)
    finally:
        cloud.shut_down()


Story = Callable[[OpenstackHarness, OpenstackProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: OpenstackQuirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, OpenstackProvider)
                await story(h, provider)

        run_virtually(main)


async def an_offer(h: OpenstackHarness, provider: OpenstackProvider, name: str = "l4-90") -> Offer:
    return next(one for one in (await provider.offers(h.query())).offers if one.offer_id == name)


async def a_server(h: OpenstackHarness, provider: OpenstackProvider, name: str = "l4-90") -> Instance:
    """A server of this flavour that was bought and is up."""
    made = (await provider.launch(h.request(await an_offer(h, provider, name)))).instance
    await h.settle()
    return made
