"""The shop with knobs: what the conformance suite needs to put this provider through everything."""

# ruff: noqa: ARG002 - a knob that does not apply needs no argument

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.values import AttemptKey, Balance, Market, MicroUsd, MicroUsdPerHour, Offer, micro_usd
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
from spotd_providers.testkit.serve import RecordedRequest
from spotd_shelf.plugin import PLUGIN, ShelfSettings
from spotd_shelf.shop import Rental, Shop, Slot, shop_app

STOCK: Final = (
    ("rack-1", "GeForce RTX 4090", "RTX_4090", 1, 24564, 0.31, True),
    ("rack-2", "GeForce RTX 4090", "RTX_4090", 4, 24564, 0.29, True),
    ("tower", "A100 SXM4", "A100_SXM_80", 8, 81920, 1.155, False),
    ("attic", "Foo 9000", "FOO_9000", 2, 65536, 0.2, False),
)
CANONICAL: Final = {gpu: name for _, gpu, name, *_ in STOCK}
ODD_WORDS: Final = {
    OddState.UNHEARD_OF: "levitating",
    OddState.PROVISION_FAILED: "broken",
    OddState.ENDED_BY_ITSELF: "ended",
}


class KnobbedShop(Shop):
    """A shop whose list may lag."""

    lag = timedelta(0)

    def listed(self, owner: str) -> list[Rental]:
        return [rental for rental in super().listed(owner) if self.now() - rental.since >= self.lag]


def classify(request: RecordedRequest) -> Call:
    """Which of the shop's routes is which call."""
    match request.method, request.path.split("/")[2]:
        case "GET", "slots":
            return Call.OFFERS
        case "POST", "rentals":
            return Call.LAUNCH
        case "GET", "rentals":
            return Call.LIST
        case "DELETE", "rentals":
            return Call.TERMINATE
        case _:
            return Call.ACCOUNT


class ShelfHarness(Harness):
    """The provider against its own shop."""

    plugin = PLUGIN

    def __init__(self, shop: KnobbedShop, faults: Faults, served: Served, folder: Path, clock: FakeClock) -> None:
        super().__init__(faults=faults, served=served, folder=folder, clock=clock)
        self.shop = shop

    def settings(self) -> ShelfSettings:
        return ShelfSettings(base_url=self.served.url)

    def machines(self) -> Sequence[WorldMachine]:
        return [
            WorldMachine(
                machine_id=rental.number,
                label=rental.name or None,
                exists=rental.exists,
                running=rental.state == "up",
                market=Market.SPOT if rental.interruptible else Market.ON_DEMAND,
                price=MicroUsdPerHour(micro_usd(rental.usd_per_hour)),
                start_script=rental.start,
                image=rental.image,
                disk_gb=rental.disk_gb,
            )
            for rental in self.shop.rentals.values()
        ]

    def sold(self) -> Sequence[WorldOffer]:
        return [
            WorldOffer(
                offer_id=slot.name,
                gpu=CANONICAL[slot.gpu],
                gpu_count=slot.gpus,
                market=Market.SPOT if slot.interruptible else Market.ON_DEMAND,
                price=MicroUsdPerHour(round(slot.usd_per_gpu_hour * slot.gpus * 1_000_000)),
            )
            for slot in self.shop.free()
        ]

    def set_raw_price(self, offer_id: str, raw: str) -> None:
        def spoil(true: Canned) -> Canned:
            body = json.loads(true.body)
            for row in body["slots"]:
                if row["slot"] == offer_id:
                    row["usd_per_gpu_hour"] = "SPOILED"
            text = json.dumps(body).replace('"SPOILED"', raw)
            return Canned(status=true.status, body=text.encode(), headers=true.headers)

        self.faults.edit(Call.OFFERS, spoil, times=100)

    def sell_nothing(self) -> None:
        self.shop.slots = []

    def vanish_offer(self, offer: Offer) -> None:
        self.shop.slots = [slot for slot in self.shop.slots if slot.name != offer.offer_id]

    def raise_price(self, offer: Offer, factor: float = 2.0) -> None:
        for slot in self.shop.slots:
            if slot.name == offer.offer_id:
                slot.usd_per_gpu_hour *= factor

    def exhaust_capacity(self, offer: Offer) -> None:
        raise NotApplicable("a slot is one machine: it is there or it is gone")

    def empty_balance(self) -> None:
        self.shop.balance_usd = 0.0

    def exhaust_quota(self) -> None:
        self.shop.rentals_max = 0

    def break_auth(self) -> None:
        self.shop.keys = {}

    def sell_on_demand_instead(self) -> None:
        raise NotApplicable("a slot is sold on one market only")

    def refuse_but_leave_machine(self) -> None:
        raise NotApplicable("the shop rents a slot or refuses it, never both")

    def set_list_lag(self, lag: timedelta) -> None:
        self.shop.lag = lag

    def list_only_part(self) -> None:
        self.add_machines([self.key() for _ in range(40)])
        first_page_then_error = iter([True])

        def fail(true: Canned) -> Canned:
            return true if next(first_page_then_error, False) else Canned(status=502)

        self.faults.edit(Call.LIST, fail, times=100)

    def spoil_listed_row(self, machine_id: str) -> None:
        def spoil(true: Canned) -> Canned:
            body = json.loads(true.body)
            for row in body.get("rentals", []):
                if row["number"] == machine_id:
                    row.update(name=17, state=None, usd_per_hour="free")
            return Canned(status=true.status, body=json.dumps(body).encode(), headers=true.headers)

        self.faults.edit(Call.LIST, spoil, times=100)

    def add_machines(self, keys: Sequence[AttemptKey]) -> None:
        for key in keys:
            self._add_rental("me", key)

    def add_foreign_machines(self) -> Sequence[str]:
        names = ("", f"spotd-{self.install}2-j0b-1", f"spotd-{self.install}", "my own machine")
        return [self._add_rental("me", name).number for name in names]

    def preempt(self, machine_id: str) -> None:
        self.shop.end(self.shop.rentals[machine_id], "reclaimed")

    def pause(self, machine_id: str) -> None:
        raise NotApplicable("the shop reclaims machines for good; it does not pause them")

    def give_notice(self, machine_id: str) -> None:
        raise NotApplicable("the shop reclaims machines without notice")

    def set_state(self, machine_id: str, state: OddState) -> None:
        self.shop.rentals[machine_id].state = ODD_WORDS[state]

    def lose_contact(self, machine_id: str) -> None:
        raise NotApplicable("the shop shows no machine whose host it cannot reach")

    def true_balance(self) -> Balance:
        return Balance(available=MicroUsd(micro_usd(self.shop.balance_usd)))

    def billed(self, machine_id: str) -> int:
        return micro_usd(self.shop.bill_usd(self.shop.rentals[machine_id]))

    def _add_rental(self, owner: str, name: str) -> Rental:
        slot = Slot(name="cellar", gpu="T4", gpus=1, vram_mb=15360, usd_per_gpu_hour=0.1, interruptible=False)
        order: dict[str, Any] = {"name": name, "image": "", "disk_gb": 10, "start": ""}
        return self.shop.add_rental(owner=owner, slot=slot, price=0.1, order=order)


@contextmanager
def open_harness(folder: Path) -> Iterator[ShelfHarness]:
    """A fresh shop on loopback, and the provider's harness around it."""
    clock = FakeClock()
    slots = [
        Slot(name=name, gpu=gpu, gpus=gpus, vram_mb=vram_mb, usd_per_gpu_hour=price, interruptible=interruptible)
        for name, gpu, _, gpus, vram_mb, price, interruptible in STOCK
    ]
    shop = KnobbedShop(slots=slots, keys={CANARY: "me"}, now=clock.now)
    faults = Faults(shop_app(shop), classify=classify)
    with serving(faults) as served:
        yield ShelfHarness(shop, faults, served, folder, clock)
