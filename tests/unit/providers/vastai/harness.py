"""vast.ai for the conformance suite: the provider opened against the fake, with every market knob."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    Balance,
    Market,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
    RegistryLogin,
    micro_usd,
)
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import CANARY, Harness, NotApplicable, OddState, WorldMachine, WorldOffer
from spotd_providers.testkit.serve import Call, Canned, Faults, Served, serving
from spotd_providers.vastai.plugin import PLUGIN
from spotd_providers.vastai.wire import VastSettings
from tests.fakes.ledger_sums import total_by_machine
from tests.fakes.vastai import Ask, Failure, Phase, Quirks, VastApi, VastCloud, classify, some_asks


class VastHarness(Harness):
    """The provider, its cloud and the wire between them."""

    plugin: ClassVar[ProviderPlugin] = PLUGIN

    def __init__(self, cloud: VastCloud, faults: Faults, served: Served, folder: Path, clock: FakeClock) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock, credential=CANARY)
        self.cloud = cloud
        self.fake_clock = clock
        self.base_url = served.url

    def later(self, duration: timedelta) -> None:
        """It is `duration` later for everybody."""
        self.fake_clock.advance(duration)

    def settings(self) -> VastSettings:
        return VastSettings(base_url=self.base_url)

    # --- the world ------------------------------------------------------------------------------------------------

    def machines(self) -> Sequence[WorldMachine]:
        self.cloud.advance()
        return [
            WorldMachine(
                machine_id=contract.machine,
                label=contract.label,
                exists=contract.phase is not Phase.GONE,
                running=contract.phase is Phase.RUNNING,
                market=Market.SPOT if contract.is_bid else Market.ON_DEMAND,
                price=contract.price,
                start_script=contract.args[1] if len(contract.args) > 1 else None,
                image=contract.image,
                disk_gb=int(contract.disk_gb),
            )
            for contract in self.cloud.contracts.values()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        found = []
        for ask in self.cloud.asks.values():
            if not self.cloud.is_for_sale(ask):
                continue
            gpu = canonical("vast", ask.gpu_name, ask.gpu_ram)
            found.append(_sold(ask, gpu, Market.ON_DEMAND, ask.dph_base, "od"))
            if ask.min_bid <= ask.dph_base:
                found.append(_sold(ask, gpu, Market.SPOT, ask.min_bid, "bid"))
        return found

    def rate_limit_answer(self, retry_after_s: int | None) -> Canned:
        headers = {"content-type": "text/plain; charset=utf-8"}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        return Canned(status=429, body=b"API requests too frequent: endpoint threshold=2.0", headers=headers)

    # --- the market's knobs ---------------------------------------------------------------------------------------

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        ask_id, _, market = offer_id.partition(":")
        field = "min_bid" if market == "bid" else "dph_base"
        mark = "raw-price-goes-here"

        def mark_price(rows: list[Any]) -> list[Any]:
            return [{**row, field: mark} if row["id"] == int(ask_id) else row for row in rows]

        def write_price(true: Canned) -> Canned:
            body = true.body.replace(json.dumps(mark).encode(), raw.encode())
            return Canned(status=true.status, body=body, headers=true.headers)

        self.cloud.quirks.edit_offers = mark_price
        self.faults.edit(Call.OFFERS, write_price, times=1000)

    def sell_nothing(self) -> None:
        self.cloud.asks.clear()

    def vanish_offer(self, offer: Offer) -> None:
        self.cloud.withdraw(_ask_id(offer))

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        ask = self.cloud.asks[_ask_id(offer)]
        self.cloud.set_min_bid(ask.ask_id, ask.min_bid * factor)
        self.cloud.set_on_demand(ask.ask_id, ask.dph_base * factor)

    def exhaust_capacity(self, offer: Offer) -> None:
        raise NotApplicable("vast.ai sells single machines: one that is taken is a vanished offer, not a lack of kind")

    def empty_balance(self) -> None:
        self.cloud.spend_everything()

    def exhaust_quota(self) -> None:
        self.cloud.quirks.spend_rate_limit = True

    def break_auth(self) -> None:
        self.cloud.api_key = "another-key"

    def sell_on_demand_instead(self) -> None:
        self.cloud.quirks.sells_on_demand = True

    def refuse_but_leave_machine(self) -> None:
        for ask in self.cloud.asks.values():
            ask.min_bid = ask.min_bid * 1.5

    def set_list_lag(self, lag: timedelta) -> None:
        self.cloud.quirks.list_lag = lag

    def list_only_part(self) -> None:
        # One row is missing from what is otherwise a perfect answer.
        def without_last(true: Canned) -> Canned:
            page = json.loads(true.body)
            page["instances"] = page["instances"][:-1]
            return Canned(status=true.status, body=json.dumps(page).encode(), headers=true.headers)

        self.faults.edit(Call.LIST, without_last)

    def spoil_listed_row(self, machine_id: str) -> None:
        self.cloud.quirks.edit_instance[int(machine_id)] = "not a row"

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for number, key in enumerate(keys):
            self.cloud.add_foreign(key, ask=Ask(ask_id=0, machine_id=50_000 + number))

    def add_foreign_machines(self) -> Sequence[str]:
        labels = (None, f"spotd-{self.install}2-j0b1-1", "my notebook")
        return [self.cloud.add_foreign(label, is_bid=True).machine for label in labels]

    def preempt(self, machine_id: str) -> None:
        self.cloud.outbid(int(machine_id))

    def pause(self, machine_id: str) -> None:
        self.cloud.outbid(int(machine_id))

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable("vast.ai stops an outbid machine without notice")

    def make_private(self, image: str, login: RegistryLogin) -> None:
        self.cloud.private[image] = (login.username, login.password.reveal())

    def set_state(self, machine_id: str, state: OddState) -> None:
        contract = self.cloud.contracts[int(machine_id)]
        if state is OddState.UNHEARD_OF:
            self.cloud.quirks.edit_instance[contract.contract_id] = {"actual_status": "meditating"}
        elif state is OddState.PROVISION_FAILED:
            contract.failure = Failure.OCI
            self.cloud.fail(contract.contract_id)
        else:
            self.cloud.exit_container(contract.contract_id)

    def lose_contact(self, machine_id: str) -> None:
        self.cloud.lose_contact(int(machine_id), "offline")

    def true_balance(self) -> Balance:
        return Balance(available=MicroUsd(max(0, round(self.cloud.credit_left() * MICRO))))

    def billed(self, machine_id: str) -> int:
        totals = total_by_machine(segments(read_ledger(self.cloud.ledger_path)), self.cloud.clock.now())
        return totals[machine_id]


@contextmanager
def open_harness(folder: Path, *, quirks: Quirks | None = None) -> Iterator[VastHarness]:
    """A fresh cloud with a small market, served, and nothing of it left afterwards."""
    clock = FakeClock()
    cloud = VastCloud(folder / "cloud", clock=clock, quirks=quirks, api_key=CANARY)
    cloud.stock(*some_asks())
    faults = Faults(VastApi(cloud), classify=classify)
    try:
        with serving(faults) as served:
            yield VastHarness(cloud, faults, served, folder, clock)
    finally:
        cloud.shut_down()


def _sold(ask: Ask, gpu: str, market: Market, usd: float, suffix: str) -> WorldOffer:
    return WorldOffer(
        offer_id=f"{ask.ask_id}:{suffix}",
        gpu=gpu,
        gpu_count=ask.num_gpus,
        market=market,
        price=MicroUsdPerHour(micro_usd(usd)),
    )


def _ask_id(offer: Offer) -> int:
    return int(offer.extra["ask"])
