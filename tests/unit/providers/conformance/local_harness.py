"""The local market's own server, in process, with knobs: what the suite needs to put the local provider through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from spotd_providers.contract.values import AttemptKey, Balance, InstanceState, Loss, Market, MicroUsdPerHour, Offer
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.local.market.floor import Disturbance, Machine
from spotd_providers.local.market.market import LocalMarket
from spotd_providers.local.plugin import CAPABILITIES, PLUGIN
from spotd_providers.local.server.app import MarketApp
from spotd_providers.local.settings import FixedPrice, Flavour, HostSpec, LocalSettings
from spotd_providers.testkit import (
    CANARY,
    Call,
    Canned,
    FakeClock,
    Faults,
    Harness,
    NotApplicable,
    OddState,
    Served,
    WorldMachine,
    WorldOffer,
    serving,
)
from spotd_providers.testkit.serve import AsgiApp, Receive, RecordedRequest, Scope, Send
from tests.fakes.ledger_sums import total_by_machine

HOSTS = (
    HostSpec(name="bid-1", gpu="RTX_4090", gpu_count=1, vram_mb=24564, spot=FixedPrice(price=0.3), on_demand=0.6),
    HostSpec(name="bid-4", gpu="RTX_4090", gpu_count=4, vram_mb=24564, spot=FixedPrice(price=1.200001)),
    HostSpec(
        name="notice-8",
        gpu="A100_SXM_80",
        gpu_count=8,
        vram_mb=81920,
        flavour=Flavour.NOTICE,
        spot=FixedPrice(price=8),
        on_demand=16,
    ),
    HostSpec(name="farm", gpu="T4", vram_mb=15360, on_demand=0.9, slots=100),
)
FOREVER = timedelta(days=365)


class Gate:
    """Lets requests through with their key, or with a wrong one once the key is broken."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self.is_broken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_broken:
            kept = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
            scope = {**scope, "headers": [*kept, (b"authorization", b"Bearer revoked")]}
        await self._app(scope, receive, send)


def classify(request: RecordedRequest) -> Call:
    match request.method, request.path.split("/")[1:]:
        case "GET", ["v1", "offers"]:
            return Call.OFFERS
        case "POST", ["v1", "machines"]:
            return Call.LAUNCH
        case "GET", ["v1", "machines"]:
            return Call.LIST
        case "DELETE", ["v1", "machines", _]:
            return Call.TERMINATE
        case "GET", ["v1", "status" | "charges"]:
            return Call.ACCOUNT
        case _:
            return Call.OTHER


class LocalHarness(Harness):
    """The provider against the market it ships with. Machines are real processes."""

    plugin = PLUGIN

    def __init__(
        self, market: LocalMarket, gate: Gate, faults: Faults, served: Served, folder: Path, clock: FakeClock
    ) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock)
        self.market = market
        self.gate = gate

    def settings(self) -> LocalSettings:
        return LocalSettings(base_url=self.served.url, hosts=HOSTS, list_lag=self.market.spec.list_lag)

    def machines(self) -> Sequence[WorldMachine]:
        return [
            WorldMachine(
                machine_id=machine.machine_id,
                label=machine.key,
                exists=machine.exists,
                running=machine.state is InstanceState.RUNNING,
                market=machine.market,
                price=machine.price,
                start_script=machine.start_script,
                image=machine.image,
                disk_gb=machine.disk_gb,
            )
            for machine in self.market.memory.machines.values()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=item.offer_id,
                gpu=item.host.gpu,
                gpu_count=item.host.gpu_count,
                market=item.kind,
                price=item.price,
            )
            for item in self.market.sold()
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        def spoil(body: dict[str, Any]) -> None:
            for row in body["offers"]:
                if row["offer_id"] == offer_id:
                    row["gpu_price"] = "SPOILED"

        self._edit(Call.OFFERS, spoil, lambda text: text.replace('"SPOILED"', raw))

    def sell_nothing(self) -> None:
        self.market.hosts.clear()

    def vanish_offer(self, offer: Offer) -> None:
        del self.market.hosts[offer.pool]

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        price = MicroUsdPerHour(int(offer.gpu_price * factor))
        if offer.market is Market.SPOT:
            self._disturb(offer, price)
        else:
            host = self.market.hosts[offer.pool]
            self.market.hosts[offer.pool] = host.model_copy(update={"on_demand": price})

    def exhaust_capacity(self, offer: Offer) -> None:
        self._disturb(offer, None)

    def empty_balance(self) -> None:
        raise NotApplicable("the local market has no account: its machines cost nothing")

    def exhaust_quota(self) -> None:
        self._change_rules(machines_max=0)

    def break_auth(self) -> None:
        self.gate.is_broken = True

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("an offer of the local market names the market it is sold on")

    def refuse_but_leave_machine(self) -> None:
        raise NotApplicable("the local market makes a machine or refuses it, never both")

    def set_list_lag(self, lag: timedelta) -> None:
        self._change_rules(list_lag=lag)

    def list_only_part(self) -> None:
        self._edit(Call.LIST, lambda body: body["machines"].clear())

    def spoil_listed_row(self, machine_id: str) -> None:
        def spoil(body: dict[str, Any]) -> None:
            for row in body["machines"]:
                if row["ref"]["instance_id"] == machine_id:
                    row.update(key=17, price="free")

        self._edit(Call.LIST, spoil)

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self._add(self.install, key)

    def add_foreign_machines(self) -> Sequence[str]:
        owners = ((f"{self.install}2", f"spotd-{self.install}2-j0b-1"), ("me", "my own"), (self.install, "unlabelled"))
        return [self._add(install, key).machine_id for install, key in owners]

    def preempt(self, machine_id: str) -> None:
        self.market.preempt(self._machine(machine_id), notice=False, lasting=FOREVER)

    def pause(self, machine_id: str) -> None:
        machine = self._machine(machine_id)
        if self.market.hosts[machine.host].flavour is not Flavour.SUDDEN or machine.market is not Market.SPOT:
            raise NotApplicable("only spot machines of a bid market are paused")
        self.preempt(machine_id)

    def give_notice(self, machine_id: str) -> None:
        self.market.preempt(self._machine(machine_id), notice=True, lasting=FOREVER)

    def set_state(self, machine_id: str, state: OddState) -> None:
        machine = self._machine(machine_id)
        if state is OddState.PROVISION_FAILED:
            now = self.market.memory.reached
            self.market.floor.end(machine, now, Loss.PROVISION_FAILED, "could not be started")
        elif state is OddState.ENDED_BY_ITSELF:
            (self.market.machines.home(machine_id) / "machine-done").touch()
        else:

            def odd(body: dict[str, Any]) -> None:
                for row in body["machines"]:
                    row["state"] = "levitating"

            self._edit(Call.LIST, odd)

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable("the hosts are on this computer")

    def true_balance(self) -> Balance:
        raise NotApplicable(CAPABILITIES["balance"].reason)  # type: ignore[index] # a StrEnum is its text

    def billed(self, machine_id: str) -> int:
        spans = segments(read_ledger(self.market.ledger.path))
        return total_by_machine(spans, self.clock.now())[machine_id]

    def _edit(
        self, call: Call, change: Callable[[dict[str, Any]], object], text: Callable[[str], str] = lambda same: same
    ) -> None:
        def edited(true: Canned) -> Canned:
            body = json.loads(true.body)
            change(body)
            return Canned(status=true.status, body=text(json.dumps(body)).encode(), headers=true.headers)

        self.faults.edit(call, edited, times=1000)

    def _disturb(self, offer: Offer, price: MicroUsdPerHour | None) -> None:
        now = self.market.memory.reached
        self.market.disturb(Disturbance(host=offer.pool, start=now, end=now + FOREVER, price=price, exact=True))

    def _change_rules(self, **changes: Any) -> None:
        self.market.floor.spec = self.market.spec.model_copy(update=changes)

    def _machine(self, machine_id: str) -> Machine:
        self.market.advance()
        return self.market.memory.machines[machine_id]

    def _add(self, install: str, key: str) -> Machine:
        # They never boot: sixty machines would be sixty processes.
        self._change_rules(provisioning=FOREVER)
        machine = self.market.launch(
            key=key,
            install=install,
            offer_id="farm:on-demand",
            price_max=MicroUsdPerHour(900_000),
            image="",
            disk_gb=1,
            start_script="true\n",
        )
        self._change_rules(provisioning=timedelta(0))
        return machine


@contextmanager
def open_harness(folder: Path) -> Iterator[LocalHarness]:
    """A fresh market on loopback and in this process."""
    clock = FakeClock()
    market = LocalMarket(LocalSettings(hosts=HOSTS).market(), folder / "market", clock=clock)
    gate = Gate(MarketApp(market, token=CANARY).app)
    faults = Faults(gate, classify=classify)
    try:
        with serving(faults) as served:
            yield LocalHarness(market, gate, faults, served, folder, clock)
    finally:
        market.shut_down()
        market.close()
