"""Verda does what every provider must do, against a fake that was written without its adapter."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerGbMonth,
    Offer,
    micro_usd,
)
from spotd_providers.kit.shapes import decode, row_or_none
from spotd_providers.kit.vm_market import label_in
from spotd_providers.testkit.suite import Behaviour, run
from spotd_providers.verda.plugin import SAME_STOCK, VerdaProvider
from spotd_providers.verda.wire import VerdaInstanceRow, VerdaSettings, as_instance, offers_of, stock_of, types_of
from tests.fakes.verda import VerdaQuirks
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.verda.harness import VerdaHarness, open_harness, play


@pytest.mark.parametrize("behaviour", stories())
def test_verda_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _cheapest(h: VerdaHarness, provider: VerdaProvider, market: Market = Market.SPOT) -> Offer:
    page = await provider.offers(h.query())
    return min((one for one in page.offers if one.gpu_count and one.market is market), key=lambda one: one.gpu_price)


def test_a_machine_that_starts_is_ended_as_soon_as_verda_lets_it(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        with pytest.raises(Unavailable, match="a provisioning instance"):
            await provider.terminate(made.instance.ref)
        assert h.live()
        await h.settle()
        await provider.terminate(made.instance.ref)
        await h.settle()
        assert not h.live()
        assert not h.cloud.volumes

    play(tmp_path, story, VerdaQuirks())


def test_a_wrong_purchase_that_cannot_end_yet_is_ended_by_a_later_list(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.raise_price(request.offer)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert [one.state for one in await provider.find(request.key)] == [InstanceState.PENDING]
        await h.settle()
        (shown,) = (await provider.instances()).instances
        assert shown.loss is Loss.PROVISION_FAILED
        assert not h.live()

    play(tmp_path, story, VerdaQuirks())


@pytest.mark.parametrize("results", ["bulk", "always", "never"])
def test_a_refusal_inside_an_accepted_answer_is_no_end(results: Any, tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        with pytest.raises(Unavailable):
            await provider.terminate(made.instance.ref)

    play(tmp_path, story, VerdaQuirks(results=results))


def test_disks_and_scripts_that_are_left_are_deleted_at_the_second_look(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        await h.settle()
        assert h.live()
        (volume,) = h.cloud.volumes.values()
        volume.instance_id = None  # as a machine leaves it that was taken away with its disk kept
        h.cloud.rented[made.instance.ref.instance_id].volume_ids.clear()
        h.cloud.vanish(made.instance.ref.instance_id)
        theirs = {"id": "s-1", "name": "my script", "script": "#!/bin/sh"}
        h.cloud.scripts["s-1"] = theirs
        for look in range(3):
            await provider.instances()
            assert len(h.cloud.volumes) == (1 if look == 0 else 0)
            assert len(h.cloud.scripts) == (2 if look == 0 else 1)
            await h.advance(timedelta(minutes=11))
        assert list(h.cloud.scripts.values()) == [theirs]

    play(tmp_path, story)


def test_the_script_of_a_machine_is_kept_until_it_runs(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        await provider.launch(h.request(await _cheapest(h, provider)))
        for _ in range(3):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        assert h.cloud.scripts
        await h.advance(timedelta(hours=1))
        for _ in range(2):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        assert not h.cloud.scripts
        assert len(h.live()) == len(h.cloud.volumes) == 1

    play(tmp_path, story, VerdaQuirks(boot=timedelta(hours=1)))


@pytest.mark.parametrize("says", [None, 0.0, -1.0, 1e9, 61.0])
def test_tokens_are_replaced_before_they_run_out_and_when_they_are_refused(says: float | None, tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        for _ in range(4):
            await provider.instances()
            await h.advance(timedelta(minutes=7))
        h.cloud.revoke_tokens()
        assert (await provider.instances()).complete
        assert len(h.cloud.access) <= 6

    play(tmp_path, story, VerdaQuirks(expires_in_says=says, one_token=True))


def test_an_ssh_key_that_verda_asks_for_is_registered_once(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        offer = await _cheapest(h, provider)
        with pytest.raises(Unavailable, match="without an ssh key"):
            await provider.launch(h.request(offer))
        assert not h.live()
        for _ in range(2):
            await provider.launch(h.request(offer))
        assert [row["name"] for row in h.cloud.ssh_keys.values()] == ["spotd-lab"]

    play(tmp_path, story, VerdaQuirks(needs_ssh_key=True, undeletable=frozenset()))


@pytest.mark.parametrize(
    "quirks",
    [
        VerdaQuirks(prices="number", older_volume_prices=True, spot_flag="isSpot", quoted_id=True, create_status=200),
        VerdaQuirks(prices="mixed", spot_flag="is_spot", takes_tags=False, spot_decided_by="contract"),
    ],
    ids=["numbers", "mixed"],
)
def test_both_ways_to_say_it_are_understood(quirks: VerdaQuirks, tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        page = await provider.offers(h.query())
        found = {str(one.offer_id): one for one in page.offers}
        sold = {str(one.offer_id): one.price for one in h.sold()}
        assert {name: one.gpu_price for name, one in found.items()} == sold
        assert {one.storage_price for one in page.offers} == {200_000}
        assert {one.offer_id for one in page.rejected} == {"1B300.30V", "1AMD7900XTX.10V"}
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        assert made.instance.market is Market.SPOT

    play(tmp_path, story, quirks)


def test_a_stock_that_ignores_the_question_for_spot_is_named(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        assert (await provider.offers(h.query())).note == SAME_STOCK
        assert SAME_STOCK in str(await provider.check())

    play(tmp_path, story, VerdaQuirks(spot_flag="none"))


@pytest.mark.parametrize(("shows", "loss"), [("discontinued", Loss.PREEMPTED), ("offline", None)])
def test_a_spot_machine_that_was_taken_is_told_from_one_that_was_ended(
    shows: Any, loss: Loss | None, tmp_path: Path
) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        offer = await _cheapest(h, provider)
        made = [await provider.launch(h.request(offer)) for _ in range(2)]
        await h.settle()
        h.cloud.preempt(made[0].instance.ref.instance_id)
        await provider.terminate(made[1].instance.ref)
        await h.settle()
        losses = {one.ref: one.loss for one in (await provider.instances()).instances}
        assert losses == {made[0].instance.ref: loss, made[1].instance.ref: None}

    play(tmp_path, story, VerdaQuirks(preempted_shows=shows, lists_ended=True))


def test_without_a_price_of_disks_nothing_is_offered(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        h.cloud.gb_month_usd = {}
        with pytest.raises(Unavailable):
            await provider.offers(h.query())

    play(tmp_path, story)


def test_a_machine_image_that_an_old_gpu_takes_is_chosen(tmp_path: Path) -> None:
    async def story(h: VerdaHarness, provider: VerdaProvider) -> None:
        page = await provider.offers(h.query())
        for kind in ("1V100.6V", "1H100.80S.30V"):
            await provider.launch(h.request(next(one for one in page.offers if one.extra["type"] == kind)))
        images = [one.body["image"] for one in h.cloud.rented.values()]
        assert images == ["ubuntu-22.04-cuda-12.4-docker", "ubuntu-24.04-cuda-12.8-open-docker"]

    play(tmp_path, story)


# Recorded answers, and damaged ones: no crash, no price that is not in the row, no machine lost.

TYPES: list[dict[str, Any]] = [
    {"instance_type": "1H100.80S.30V", "price_per_hour": "3.95", "spot_price": "1.70", "currency": "usd",
     "manufacturer": "NVIDIA", "gpu": {"description": "1x H100 SXM5 80GB", "number_of_gpus": 1},
     "gpu_memory": {"size_in_gigabytes": 80}, "memory": {"size_in_gigabytes": 120}, "cpu": {"number_of_cores": 30}},
    {"instance_type": "2A6000.20V", "price_per_hour": 1.98, "spot_price": "0.70", "currency": "usd", "p2p": "50GB/s",
     "manufacturer": "NVIDIA", "gpu": {"description": "2x RTX A6000 48GB", "number_of_gpus": 2},
     "gpu_memory": {"size_in_gigabytes": 96}, "memory": {"size_in_gigabytes": 120}, "cpu": {"number_of_cores": 20}},
    {"instance_type": "CPU.120V.480G", "price_per_hour": "3.00", "spot_price": "1.50", "currency": "usd", "gpu": None},
    {"instance_type": "1V100.6V", "price_per_hour": "0.89", "spot_price": "0.25", "currency": "usd",
     "gpu": {"description": "1x Tesla V100 16GB", "number_of_gpus": 1}, "gpu_memory": {"size_in_gigabytes": 16}},
]  # fmt: skip
STOCK = [{"location_code": "FIN-01", "availabilities": ["1H100.80S.30V", "2A6000.20V", "CPU.120V.480G", "1V100.6V"]}]
MACHINE: dict[str, Any] = {
    "id": "6c78851c-8471-4ec9-b812-4767d3a9fc1b", "hostname": "spotd-lab-j0b-1", "description": "spotd-lab-j0b-1",
    "status": "running", "price_per_hour": "1.70", "is_spot": True, "contract": "SPOT", "os_volume_id": "v-1",
}  # fmt: skip


def _offers(types: Any, stock: Any) -> list[Offer]:
    places = stock_of(stock)
    found = types_of(types)
    offers, _ = offers_of(found.rows, dict.fromkeys(Market, places or {}), MicroUsdPerGbMonth(1), VerdaSettings())
    return offers


def test_recorded_types_are_offered_whole() -> None:
    found = {(one.extra["type"], one.market): (one.gpu, one.gpu_count, one.gpu_price) for one in _offers(TYPES, STOCK)}
    assert found["2A6000.20V", Market.SPOT] == ("RTX_A6000", 2, 700_000)
    assert found["1V100.6V", Market.ON_DEMAND] == ("V100_16", 1, 890_000)
    assert found["CPU.120V.480G", Market.SPOT] == ("CPU", 0, 1_500_000)
    assert len(found) == 8


def judge_offers(types: Any, stock: Any) -> None:
    read = decode(json.dumps(types).encode(), who="Verda")
    for offer in _offers(read if isinstance(read, list) else [], stock if isinstance(stock, list) else []):
        assert type(offer.gpu_price) is int
        rows = [row for row in read if isinstance(row, dict) and row.get("instance_type") == offer.extra["type"]]
        said = [row["spot_price" if offer.market is Market.SPOT else "price_per_hour"] for row in rows]
        assert 0 < offer.gpu_price <= 10**13
        assert any(offer.gpu_price == micro_usd(one) for one in said if isinstance(one, str | int | float))


def judge_machine(raw: Any) -> None:
    read = decode(json.dumps(raw).encode(), who="Verda")
    label = label_in(read, InstallId("lab"), names=VerdaProvider.label_fields)
    row = row_or_none(VerdaInstanceRow, read)
    if isinstance(read, dict) and read.get("id") == MACHINE["id"]:
        assert row is not None
        instance = as_instance(row, AttemptKey("spotd-lab-j0b-1"), ended_by_us=False)
        assert instance.price is None or (type(instance.price) is int and 0 < instance.price <= 10**13)
        assert instance.state is not InstanceState.GONE or read["status"].strip().lower() in ("discontinued", "deleted")
        if MACHINE["description"] == read.get("description") and isinstance(read.get("hostname"), str | None):
            assert label == MACHINE["description"]


def judge(types: Any, stock: Any, raw: Any) -> None:
    judge_offers(types, stock)
    judge_machine(raw)


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, TYPES, STOCK, MACHINE, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, TYPES, STOCK, MACHINE, count=ALL)
