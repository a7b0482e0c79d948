"""TensorDock does what every provider must do, against a fake of its own, and what is special of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import AttemptKey, InstallId, InstanceState, MicroUsdPerGbMonth, Offer
from spotd_providers.kit.shapes import decode, row_or_none
from spotd_providers.kit.vm_market import label_in
from spotd_providers.tensordock.plugin import (
    EMPTY,
    TensorDockProvider,
    TensorDockRow,
    TensorDockSettings,
    as_instance,
    flat,
    offers_of,
)
from spotd_providers.testkit.suite import Behaviour, run
from tests.cases import every
from tests.fakes.tensordock import TensorDockQuirks
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.tensordock.harness import TensorDockHarness, open_harness, play


@pytest.mark.parametrize("behaviour", stories())
def test_tensordock_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _cheapest(h: TensorDockHarness, provider: TensorDockProvider) -> Offer:
    return min((await provider.offers(h.query())).offers, key=lambda one: (one.gpu_price, one.offer_id))


SHAPES: list[dict[str, Any]] = [
    {"prices": "text", "list_shape": "data", "show_shape": "data", "reply_shape": "attributes", "case": "upper"},
    {"create_says": "running", "create_status": 200, "row_gpus": "list", "case": "title", "errors_in_200": False},
]


@pytest.mark.parametrize("shape", SHAPES, ids=["nested", "flat"])
def test_every_documented_shape_is_understood(shape: dict[str, Any], tmp_path: Path) -> None:
    async def story(h: TensorDockHarness, provider: TensorDockProvider) -> None:
        page = await provider.offers(h.query())
        sold = {str(one.offer_id): one.price for one in h.sold()}
        assert {str(one.offer_id): one.gpu_price for one in page.offers} == sold
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        await h.settle()
        assert [one.state for one in (await provider.instances()).instances] == [InstanceState.RUNNING]
        await provider.terminate(made.instance.ref)
        assert not h.live()

    play(tmp_path, story, TensorDockQuirks(requests_per_minute=None, **shape))


def test_the_other_form_of_naming_gpus_is_taken_after_a_refusal(tmp_path: Path) -> None:
    async def story(h: TensorDockHarness, provider: TensorDockProvider) -> None:
        offer = await _cheapest(h, provider)
        with pytest.raises(Unavailable, match="the next launch"):
            await provider.launch(h.request(offer))
        await provider.launch(h.request(offer))
        assert len(h.live()) == 1

    play(tmp_path, story, TensorDockQuirks(requests_per_minute=None, gpus_shape="model"))


def test_no_location_at_all_is_no_empty_market(tmp_path: Path) -> None:
    async def story(h: TensorDockHarness, provider: TensorDockProvider) -> None:
        page = await provider.offers(h.query())
        assert (page.offers, page.complete, page.note) == ((), False, EMPTY)
        assert EMPTY in str(await provider.check())

    play(tmp_path, story, TensorDockQuirks(requests_per_minute=None, no_locations="always"))


def test_the_disk_of_a_machine_and_the_least_one_are_in_what_it_costs(tmp_path: Path) -> None:
    async def story(h: TensorDockHarness, provider: TensorDockProvider) -> None:
        offer = await _cheapest(h, provider)
        assert (offer.storage_fixed, offer.storage_price) == (7_450, 36_000)
        await provider.launch(h.request(offer, disk_gb=70))
        (vm,) = h.cloud.rented.values()
        assert vm.body["resources"]["storage_gb"] == 200
        assert 0 <= offer.storage_fixed + offer.storage_price * 70 // 720 - vm.storage <= 2_450

    play(tmp_path, story)


def test_the_disk_is_not_booked_twice_in_the_rate_of_a_machine_and_beside_it(tmp_path: Path) -> None:
    async def story(h: TensorDockHarness, provider: TensorDockProvider) -> None:
        offer = await _cheapest(h, provider)
        made = await provider.launch(h.request(offer, disk_gb=50))
        assert made.instance.price == offer.gpu_price
        await h.settle()
        assert [one.price for one in (await provider.instances()).instances] == [offer.gpu_price]
        async with h.opened() as anew:  # before it knows what a disk costs there, the whole rate counts
            (vm,) = h.cloud.rented.values()
            assert [one.price for one in (await anew.instances()).instances] == [offer.gpu_price + vm.storage]

    play(tmp_path, story)


@every("rate", [2.41, "2.41", 0.001])
def test_a_disk_that_would_cost_more_than_the_machine_takes_nothing_off(rate: Any) -> None:
    row = row_or_none(TensorDockRow, {"id": "a", "rateHourly": rate, "resources": {"storage_gb": 500}})
    assert row is not None
    without = row.gpu_price(MicroUsdPerGbMonth(36_000))
    assert without == (1_000 if rate == 0.001 else 2_385_000)


LOCATIONS: list[Any] = [
    {"id": "loc-1", "city": "Austin", "gpus": [
        {"v0Name": "h100-sxm5-80gb", "displayName": "H100 SXM5 80GB", "max_count": 8, "price_per_hr": 2.2,
         "resources": {"max_vcpus": 128, "max_ram_gb": 300, "max_storage_gb": 1000},
         "pricing": {"per_vcpu_hr": 0.003, "per_gb_ram_hr": 0.002, "per_gb_storage_hr": "0.00005"}}]},
]  # fmt: skip
MACHINE: dict[str, Any] = {
    "type": "virtualmachine", "id": "8c2f0e88-3b4a-4c2c-9d27-f5a1c2c2b7ab",
    "attributes": {"name": "spotd-lab-j0b-1", "status": "Running", "rateHourly": 2.41, "ipAddress": "203.0.113.42"},
}  # fmt: skip


def judge(locations: Any, raw: Any) -> None:
    read = decode(json.dumps(locations).encode(), who="TensorDock")
    offers, _ = offers_of(read if isinstance(read, list) else [], TensorDockSettings())
    for offer in offers:
        amounts = (offer.gpu_price, offer.storage_price, offer.storage_fixed)
        assert all(type(amount) is int and 0 < amount <= 10**16 for amount in amounts)
    machine = flat(decode(json.dumps(raw).encode(), who="TensorDock"))
    row = row_or_none(TensorDockRow, machine)
    if isinstance(machine, dict) and machine.get("id") == MACHINE["id"]:
        assert row is not None
        instance = as_instance(row, AttemptKey("spotd-lab-j0b-1"), MicroUsdPerGbMonth(36_000))
        assert instance.price is None or (type(instance.price) is int and 0 < instance.price <= 10**13)
        if machine.get("name") == "spotd-lab-j0b-1":
            assert label_in(machine, InstallId("lab"), names=("name",)) == "spotd-lab-j0b-1"


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, LOCATIONS, MACHINE, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, LOCATIONS, MACHINE, count=ALL)
