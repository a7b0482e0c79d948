"""Prime Intellect does what every provider must do, against a fake that was written without its adapter."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import AttemptKey, Billing, InstallId, InstanceState, Loss, Market, Offer
from spotd_providers.kit.rest import fastapi_problem
from spotd_providers.kit.shapes import ROWS_MAX, decode, row_or_none
from spotd_providers.kit.vm_market import label_in
from spotd_providers.primeintellect.plugin import EMPTY, NO_TEMPLATE, PLUGIN, PrimeProvider
from spotd_providers.primeintellect.wire import HistoryRow, PrimePodRow, PrimeSettings, as_instance, offer_of, sales_of
from spotd_providers.testkit.serve import Call
from spotd_providers.testkit.suite import Behaviour, run
from tests.cases import every
from tests.fakes.primeintellect import PrimeQuirks
from tests.fakes.rest import RestRefusal
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.primeintellect.harness import PrimeHarness, open_harness, play

FOLDER = Path(os.environ.get("SPOTD_SHARED_DATA", Path(__file__).parents[5] / "shared" / "data")) / "payloads" / "prime"
ROW: dict[str, Any] = {
    "cloudId": "NVIDIA H100 PCIe", "gpuType": "H100_80GB", "socket": "PCIe", "provider": "runpod",
    "region": "united_states", "dataCenter": "US-KS-2", "country": "US", "gpuCount": 1, "gpuMemory": 80,
    "disk": {"minCount": 80, "defaultCount": 80, "maxCount": 1000, "pricePerUnit": 0.00014, "step": 1,
             "defaultIncludedInPrice": False, "additionalInfo": None},
    "sharedDisk": None, "vcpu": {"defaultCount": 16}, "memory": {"defaultCount": 251}, "stockStatus": "Low",
    "security": "secure_cloud",
    "prices": {"onDemand": 2.69, "communityPrice": None, "isVariable": False, "currency": "USD"},
    "images": ["ubuntu_22_cuda_12", "custom_template"], "isSpot": False, "prepaidTime": None,
}  # fmt: skip


@pytest.mark.parametrize("behaviour", stories())
def test_prime_intellect_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _cheapest(h: PrimeHarness, provider: PrimeProvider, market: Market = Market.ON_DEMAND) -> Offer:
    page = await provider.offers(h.query())
    return min((one for one in page.offers if one.market is market), key=lambda one: one.gpu_price)


def _cost(offer: Offer, disk_gb: int) -> int:
    return offer.gpu_price + offer.storage_fixed + -(-offer.storage_price * disk_gb // 720)


# Prices.


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded payloads are not beside this checkout")
def test_recorded_rows_become_offers_without_the_disk_that_their_prices_hold() -> None:
    raw = decode((FOLDER / "availability-response.json").read_bytes(), who="Prime Intellect")
    found = sales_of(raw["items"])
    assert not found.rejected
    offers = [offer_of(row) for row in found.rows]
    assert {(one.gpu, one.gpu_price) for one in offers} == {
        ("A100_PCIE_80", 1_640_000), ("A100_SXM_80", 1_740_000), ("H100_SXM", 2_690_000), ("H100_PCIE", 2_390_000),
    }  # fmt: skip
    assert {(one.storage_fixed, one.storage_price, one.disk_gb_max) for one in offers} == {(16_800, 100_800, 2880)}


def _with(**changes: Any) -> Offer:
    (row,) = sales_of([{**ROW, **changes}]).rows
    return offer_of(row)


def test_a_price_without_the_disk_has_it_added() -> None:
    """The example of the documentation: 2.69 and 80 GB at 0.00014."""
    assert (_with().gpu_price, _with().storage_fixed) == (2_690_000, 11_200)


def test_a_flag_that_the_disk_is_included_is_believed() -> None:
    offer = _with(disk={**ROW["disk"], "defaultIncludedInPrice": True})
    assert offer.gpu_price + offer.storage_fixed == 2_690_000


def test_processors_and_memory_with_a_price_are_added() -> None:
    part = {"defaultCount": 16, "pricePerUnit": 0.01, "defaultIncludedInPrice": False}
    assert _with(vcpu=part, memory={**part, "defaultIncludedInPrice": True}).gpu_price == 2_850_000
    # 2.69 and 0.16 and 0.0112 of disk are in this one.
    held = {**ROW["prices"], "onDemand": 2.8612}
    assert _with(vcpu=part, prices=held).gpu_price == 2_850_000


@every(
    ("changes", "reason"),
    [
        ({"stockStatus": "Unavailable"}, "sold out"),
        ({"stockStatus": "maybe"}, "sold out"),
        ({"prepaidTime": 24}, "paid hours ahead"),
        ({"images": ["ubuntu_22_cuda_12"]}, "template"),
        ({"prices": {**ROW["prices"], "currency": "EUR"}}, "currency"),
        ({"prices": {**ROW["prices"], "onDemand": None}}, "price"),
        ({"prices": {**ROW["prices"], "onDemand": 1e308}}, "price"),
        ({"prices": {**ROW["prices"], "onDemand": float("nan")}}, "price"),
        ({"disk": None}, "disk"),
        ({"disk": dict.fromkeys(ROW["disk"])}, "disk"),
        ({"disk": {**ROW["disk"], "maxCount": 80}}, "disk"),
        ({"disk": {**ROW["disk"], "pricePerUnit": -1}}, "disk"),
        ({"gpuCount": -1}, "gpuCount"),
    ],
    ids=str,
)
def test_what_cannot_be_bought_by_the_hour_is_rejected_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    found = sales_of([{**ROW, **changes}])
    assert not found.rows
    assert reason in found.rejected[0].reason


def test_of_two_rows_of_one_name_the_cheaper_is_sold() -> None:
    dear = {**ROW, "cloudId": "dear", "prices": {**ROW["prices"], "onDemand": 3.0}}
    (row,) = sales_of([dear, ROW]).rows
    assert row.cloud_id == ROW["cloudId"]


@pytest.mark.parametrize("holds", [True, False])
def test_a_pod_costs_what_its_offer_said(holds: bool, tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = next(one for one in (await provider.offers(h.query())).offers if one.gpu == "H100_PCIE")
        made = await provider.launch(h.request(offer, disk_gb=70))
        (pod,) = h.cloud.rented.values()
        assert pod.disk_gb == 190
        assert 0 <= _cost(offer, 70) - pod.price <= 3
        assert made.instance.price == offer.gpu_price

    play(tmp_path, story, PrimeQuirks(disk_in_price=holds))


def test_a_price_that_moves_while_it_runs_is_what_the_next_list_shows(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = next(one for one in (await provider.offers(h.query())).offers if one.offer_id.startswith("dc_roan"))
        await provider.launch(h.request(offer))
        await h.settle()
        h.cloud.set_price("moving", 0.9)
        (shown,) = (await provider.instances()).instances
        assert shown.price == (900_000 if "spot" in offer.offer_id else offer.gpu_price)

    play(tmp_path, story)


# The market.


def test_an_empty_answer_is_asked_again_and_a_sick_one_is_no_empty_market(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        true = await provider.offers(h.query())
        h.cloud.quirks.sick_answers = 1
        again = await provider.offers(h.query())
        assert (again.offers, again.complete) == (true.offers, True)
        h.cloud.quirks.sick_answers = 100
        sick = await provider.offers(h.query())
        assert (sick.offers, sick.complete, sick.note) == ((), False, EMPTY)

    play(tmp_path, story)


def test_a_market_that_breaks_off_is_not_whole(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        h.cloud.quirks.total_lies = 1
        page = await provider.offers(h.query())
        assert page.offers
        assert not page.complete

    play(tmp_path, story)


def test_a_launch_finds_its_configuration_under_another_cloud_id(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = await _cheapest(h, provider)
        h.cloud.rename_cloud_ids()
        await provider.launch(h.request(offer))
        assert len(h.live()) == 1

    play(tmp_path, story)


# Launches.


@pytest.mark.parametrize("status", [409, 503])
def test_no_capacity_of_the_cloud_behind_it_is_no_capacity(status: int, tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = await _cheapest(h, provider)
        h.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(status, "No capacity for this GPU")
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        h.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(503, "Service Unavailable")
        with pytest.raises(OutcomeUnknown):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


def test_what_is_sold_out_or_dearer_by_now_is_not_even_asked_for(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = await _cheapest(h, provider, Market.SPOT)
        h.raise_price(offer)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        h.exhaust_capacity(offer)
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        h.vanish_offer(offer)
        with pytest.raises(OfferGone):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == 0

    play(tmp_path, story)


@pytest.mark.parametrize("enforced", [True, False])
def test_a_price_that_rises_with_the_launch_leaves_no_pod(enforced: bool, tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = next(one for one in (await provider.offers(h.query())).offers if one.gpu == "H100_PCIE")
        h.cloud.quirks.price_at_launch["H100_80GB"] = 2.9
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert not h.live()

    play(tmp_path, story, PrimeQuirks(disk_in_price=False, enforces_max_price=enforced))


def test_only_images_that_have_a_template_are_started(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        offer = await _cheapest(h, provider)
        with pytest.raises(RequestRejected, match="no template"):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == 0
        await provider.launch(h.request(offer, image="lab/train:1"))
        (pod,) = h.cloud.rented.values()
        assert (pod.body["image"], pod.body["customTemplateId"]) == ("custom_template", "template-1")
        assert pod.body["autoRestart"] is False

    play(tmp_path, story, templates={"lab/train:1": "template-1"})
    assert PLUGIN.traits(PrimeSettings()).no_launches == NO_TEMPLATE


def test_the_template_runs_the_start_script(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        script = f"#!/bin/sh\n# it's \"quoted\" and ${{odd}}: \\n\nprintf 'it ran' >{mark}\nsleep 600\n"
        await provider.launch(h.request(await _cheapest(h, provider), start_script=script))
        await h.settle()
        h.machines()
        for _ in range(200):
            if mark.exists() and mark.read_text() == "it ran":
                return
            await h.advance(timedelta(seconds=1))
            _real_pause()
        raise AssertionError("the start script did not run")

    play(tmp_path / "world", story)


def _real_pause() -> None:
    """Let a process of the fake go on; there is no event that says when it has written."""
    import subprocess

    subprocess.run(["sleep", "0.02"], check=True)


# Lists and states.


@pytest.mark.parametrize("says", ["status", "progress", "both"])
def test_a_pod_that_is_not_installed_is_pending(says: Any, tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        await provider.launch(h.request(await _cheapest(h, provider)))
        await h.advance(timedelta(minutes=3, seconds=5))
        assert [one.state for one in (await provider.instances()).instances] == [InstanceState.PENDING]
        await h.advance(timedelta(minutes=1))
        assert [one.state for one in (await provider.instances()).instances] == [InstanceState.RUNNING]

    play(tmp_path, story, PrimeQuirks(disk_in_price=False, installation=says))


@pytest.mark.parametrize(
    ("shows", "market"), [("TERMINATED", Market.SPOT), ("ERROR", Market.SPOT), ("ERROR", Market.ON_DEMAND)]
)
def test_a_pod_that_is_taken_away_is_a_loss_with_its_reason(shows: Any, market: Market, tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider, market)))
        await h.settle()
        assert any(one.running for one in h.machines())
        h.preempt(str(made.instance.ref.instance_id))
        (shown,) = (await provider.instances()).instances
        assert shown.loss is (Loss.PREEMPTED if market is Market.SPOT else Loss.HOST_LOST)
        assert shown.state is (InstanceState.PAUSED if shows == "ERROR" else InstanceState.GONE)
        assert shown.billing is (Billing.FULL if shows == "ERROR" else Billing.UNKNOWN)

    play(
        tmp_path,
        story,
        PrimeQuirks(disk_in_price=False, preempted_shows=shows, lists_ended=True, lingers=timedelta(minutes=5)),
    )


def test_many_pods_are_listed_over_all_pages(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        keys = [h.key() for _ in range(230)]
        h.add_machines(keys)
        listing = await provider.instances()
        assert listing.complete
        assert [one.key for one in listing.instances] == keys

    play(tmp_path, story)


def test_a_list_that_changes_between_two_pages_is_not_whole(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        h.add_machines([h.key() for _ in range(150)])
        first = next(iter(h.cloud.rented))
        page = provider._offset_page

        async def then_one_ends(path: str, what: str, token: str | None) -> Any:
            found = await page(path, what, token)
            h.cloud.vanish(first)
            return found

        provider._offset_page = then_one_ends  # type: ignore[method-assign] # between two pages nothing else can act
        assert not (await provider.instances()).complete

    play(tmp_path, story)


# Money.


def test_the_bill_of_a_pod_that_has_ended_is_its_own(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        begun = h.clock.now()
        made = await provider.launch(request)
        h.add_foreign_machines()
        await h.advance(timedelta(hours=2))
        await provider.terminate(made.instance.ref)
        await h.settle()
        (charge,) = await provider.charges(begun, h.clock.now())
        assert (charge.key, charge.amount) == (request.key, h.billed(str(made.instance.ref.instance_id)))
        assert charge.end - charge.start >= timedelta(hours=2)
        assert not await provider.charges(h.clock.now() + timedelta(hours=1), h.clock.now() + timedelta(hours=2))

    play(tmp_path, story)


def test_a_key_that_may_not_read_the_wallet_is_no_refused_key(tmp_path: Path) -> None:
    async def story(h: PrimeHarness, provider: PrimeProvider) -> None:
        h.cloud.quirks.scopes.discard("wallet")
        with pytest.raises(Unavailable, match="may not read the wallet"):
            await provider.balance()
        await provider.launch(h.request(await _cheapest(h, provider)))
        assert [(one.name, one.ok) for one in await provider.check() if not one.ok] == [("balance", False)]

    play(tmp_path, story)


# Damaged answers: no crash, no price that is not in the row, no machine lost.

POD: dict[str, Any] = {
    "id": "91d217f006914a879d3c0646bce0a37c", "name": "spotd-lab-j0b-1", "providerType": "runpod", "status": "ACTIVE",
    "gpuName": "H100_80GB", "gpuCount": 1, "socket": "PCIe", "priceHr": 2.7012, "basePriceHr": 2.69,
    "stoppedPriceHr": 0.0112, "baseCurrency": "USD", "installationStatus": "FINISHED", "installationProgress": 100,
    "installationFailure": None, "createdAt": "2026-03-02T12:00:00.000000Z", "terminatedAt": None, "isSpot": True,
    "totalBilledPrice": 1.25, "sshConnection": [None], "autoRestart": False,
}  # fmt: skip
SPOT = {
    **ROW,
    "cloudId": "1A100.22V",
    "gpuType": "A100_80GB",
    "socket": "SXM4",
    "isSpot": True,
    "provider": "datacrunch",
}


def judge(rows: Any, raw: Any) -> None:
    read = decode(json.dumps({"items": rows}).encode(), who="Prime Intellect")["items"]
    found = sales_of(read)
    assert len(found.rows) + len(found.rejected) == len(read)
    for row in found.rows:
        offer = offer_of(row)
        for amount in (offer.gpu_price, offer.storage_price, offer.storage_fixed):
            assert type(amount) is int
            assert 0 <= amount <= 10**15
        stated = row.listed
        assert stated is not None
        assert offer.gpu_price > 0
        assert offer.gpu_price + offer.storage_fixed >= stated
        assert offer.gpu_count >= 0
    pod = decode(json.dumps(raw).encode(), who="Prime Intellect")
    machine = row_or_none(PrimePodRow, pod)
    if pod.get("id") == POD["id"]:
        assert machine is not None
        shown = as_instance(machine, AttemptKey("spotd-lab-j0b-1"), ended_by_us=False)
        assert shown.price is None or (type(shown.price) is int and 0 < shown.price <= 10**13)
        assert shown.state is not InstanceState.GONE or pod["status"].strip().lower() == "terminated"
        if pod.get("name") == POD["name"]:
            assert label_in(pod, InstallId("lab"), names=("name",)) == POD["name"]
    row_or_none(HistoryRow, pod)
    fastapi_problem(pod)
    fastapi_problem({"detail": read})


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, [ROW, SPOT], POD, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, [ROW, SPOT], POD, count=ALL)


def test_a_market_of_a_hundred_thousand_rows_is_cut_and_says_so() -> None:
    found = sales_of([ROW, *[None] * 100_000])
    assert (len(found.rows), found.is_cut, found.judged) == (1, True, ROWS_MAX)
