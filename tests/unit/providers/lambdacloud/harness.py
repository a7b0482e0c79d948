"""Lambda Cloud for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import AttemptKey, Balance, Market, MicroUsdPerHour, Offer
from spotd_providers.lambdacloud.plugin import PLUGIN, LambdaProvider, LambdaSettings
from spotd_providers.testkit.clock import FakeClock, run_virtually
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Call, Canned, Faults, Served, serving
from tests.fakes.lambdacloud import (
    BASE_PATH,
    JUPYTER_TOKEN,
    LambdaApi,
    LambdaCloud,
    Phase,
    Quirks,
    classify,
    some_kinds,
)

GPUS = {
    "A10 (24 GB PCIe)": "A10",
    "H100 (80 GB PCIe)": "H100_PCIE",
    "H100 (80 GB SXM5)": "H100_SXM",
    "A100 (80 GB SXM4)": "A100_SXM_80",
    "N/A": "CPU",
}
"""What the types of the fake are called here. An ARM type is not offered unless it is asked for."""


class LambdaHarness(Harness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(
        self, cloud: LambdaCloud, faults: Faults, served: Served, folder: Path, clock: FakeClock, more: dict[str, Any]
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=CANARY)
        self.cloud = cloud
        self.fake_clock = clock
        self._more = more

    def settings(self) -> LambdaSettings:
        return LambdaSettings(**{"base_url": self.served.url + BASE_PATH, **self._more})

    def secrets(self) -> Sequence[str]:
        return [*super().secrets(), JUPYTER_TOKEN]

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        return [
            WorldMachine(
                machine_id=one.instance_id,
                label=one.label,
                exists=one.phase.exists,
                running=one.phase is Phase.ACTIVE,
                market=Market.ON_DEMAND,
                price=one.price,
                start_script=one.body.get("user_data"),
            )
            for one in self.cloud.instances.values()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=f"{kind.name}:{region}",
                gpu=GPUS[kind.gpu],
                gpu_count=kind.gpus,
                market=Market.ON_DEMAND,
                price=MicroUsdPerHour(kind.cents * 10_000),
            )
            for kind in self.cloud.kinds.values()
            if kind.gpu in GPUS
            for region, left in kind.free.items()
            if left > 0
        ]

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        headers = {"content-type": "application/json"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        return Canned(status=429, body=b'{"error":{"code":"global/too-many-requests","message":"x"}}', headers=headers)

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        kind, mark = offer_id.partition(":")[0], "raw-price-goes-here"

        def write_price(true: Canned) -> Canned:
            answer = json.loads(true.body)
            answer["data"][kind]["instance_type"]["price_cents_per_hour"] = mark
            body = json.dumps(answer).encode().replace(json.dumps(mark).encode(), raw.encode())
            return Canned(status=true.status, body=body, headers=true.headers)

        self.faults.edit(Call.OFFERS, write_price, times=1000)

    def sell_nothing(self) -> None:
        for kind in self.cloud.kinds:
            self.cloud.sell_out(kind)

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.kinds.pop(offer.extra["type"])

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        kind = offer.extra["type"]
        self.cloud.set_price(kind, round(self.cloud.kinds[kind].cents * factor))

    def exhaust_capacity(self, offer: Offer) -> None:
        self.cloud.sell_out(offer.extra["type"], offer.extra["region"])

    def empty_balance(self) -> None:
        raise NotApplicable("Lambda bills a card each week and has no balance that could be empty")

    def exhaust_quota(self) -> None:
        self.cloud.quirks.refusals[Call.LAUNCH] = "global/quota-exceeded"

    def break_auth(self) -> None:
        self.cloud.api_key = "another-key"

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("Lambda sells on-demand only")

    def refuse_but_leave_machine(self) -> None:
        self.cloud.quirks.fail_after_launch = "provider/instance-not-ready"

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = self.cloud.quirks.show_lag = lag

    def list_only_part(self) -> None:
        raise NotApplicable("Lambda lists all machines in one answer, which is whole or is none")

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_instance[machine_id] = "not a row"

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self.cloud.add_foreign(key)

    def add_foreign_machines(self) -> Sequence[str]:
        names = (None, f"spotd-{self.install}2-j0b1-1", "my notebook")
        return [self.cloud.add_foreign(name).instance_id for name in names]

    def preempt(self, machine_id: str) -> None:
        self.cloud.preempt(machine_id)

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("a Lambda machine is never stopped, only ended")

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable("Lambda gives no notice")

    def set_state(self, machine_id: str, state: OddState) -> None:
        if state is OddState.UNHEARD_OF:
            self.cloud.quirks.edit_instance[machine_id] = {"status": "meditating"}
        elif state is OddState.PROVISION_FAILED:
            raise NotApplicable("Lambda has no word for a machine that never comes up: it boots on, or is unhealthy")
        else:
            self.cloud.end_by_itself(machine_id)

    def lose_contact(self, machine_id: str) -> None:
        self.cloud.advance()
        self.cloud.make_unhealthy(machine_id)

    def true_balance(self) -> Balance:
        raise NotApplicable("Lambda bills a card each week and states no balance")

    def billed(self, machine_id: str) -> int:
        return self.cloud.billed(machine_id)


@contextmanager
def open_harness(folder: Path, *, quirks: Quirks | None = None, **settings: Any) -> Iterator[LambdaHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    # Requests on their way at the same time reach the fake at one virtual instant; the pace has tests of its own.
    cloud = LambdaCloud(folder / "cloud", clock=clock, quirks=quirks or Quirks(rate_limits=False), api_key=CANARY)
    cloud.stock(*(replace(kind, free=dict(kind.free)) for kind in some_kinds()))
    faults = Faults(LambdaApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield LambdaHarness(cloud, faults, served, folder, clock, settings)
    finally:
        cloud.shut_down()


Story = Callable[[LambdaHarness, LambdaProvider], Awaitable[None]]


def play(folder: Path, story: Story, quirks: Quirks | None = None, **settings: Any) -> None:
    """Play the story to its end; no process of its machines is left."""
    with open_harness(folder, quirks=quirks, **settings) as h:

        async def main() -> None:
            async with h.opened() as provider:
                assert isinstance(provider, LambdaProvider)
                await story(h, provider)

        run_virtually(main)
