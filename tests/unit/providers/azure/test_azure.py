"""Azure does what every provider must do, against a fake of another author, and what is special of it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.azure.market import RegionSales, disk_gb, offers_of, prices_of
from spotd_providers.azure.plugin import AzureProvider
from spotd_providers.azure.wire import AzureSettings, AzureVmRow, as_instance, flat, name_of
from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.gpus import azure_gpu
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferQuery,
)
from spotd_providers.kit.shapes import decode, row_or_none
from spotd_providers.testkit.serve import Call
from spotd_providers.testkit.suite import Behaviour, run
from tests.cases import every
from tests.fakes.rest import RestRefusal
from tests.unit.providers.azure.fake import BLOB_SECRET, AzureQuirks, some_sizes
from tests.unit.providers.azure.fake_cloud import ADDRESS, DISK, NIC
from tests.unit.providers.azure.fake_queries import price_rows
from tests.unit.providers.azure.fake_records import AzureResource
from tests.unit.providers.azure.fake_schema import sku_row
from tests.unit.providers.azure.harness import AzureHarness, open_harness, play
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.local.waiting import until

H100 = "Standard_NC40ads_H100_v5"


@pytest.mark.parametrize("behaviour", stories())
def test_azure_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


async def _cheapest(h: AzureHarness, provider: AzureProvider, market: Market = Market.SPOT) -> Offer:
    page = await provider.offers(h.query())
    return min((one for one in page.offers if one.market is market), key=lambda one: one.gpu_price)


def _purchases(h: AzureHarness) -> list[dict[str, Any]]:
    return [json.loads(one.body) for one in h.requests(Call.LAUNCH)]


# What is on sale.


def test_only_linux_rows_are_prices_and_every_other_size_is_rejected_with_the_reason(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        page = await provider.offers(h.query())
        found = {str(one.offer_id): one for one in page.offers}
        big = found["Standard_ND96isr_H100_v5:westeurope:spot"]
        assert (big.gpu, big.gpu_count, big.gpu_price, big.on_demand_price) == (
            "H100_SXM", 8, 21_260_000, 127_816_000,
        )  # fmt: skip
        assert (big.storage_fixed, big.upload_price, big.hazard_ppm) == (32_000, 87_000, 75_000)
        assert "Standard_ND40rs_v2:westeurope:spot" not in found, "it has no price there"
        reasons = {one.offer_id: one.reason for one in page.rejected}
        assert reasons == {
            "Standard_NV6ads_A10_v5:westeurope": "a part of a GPU, which is not sold as a whole one",
            "Standard_NV36ads_A10_v5:westeurope": "it needs NVIDIA's GRID driver, which the machine image lacks; "
            "name one that has it in image",
            "Standard_ND128isr_NDR_GB200_v6:westeurope": "an ARM machine",
            "Standard_NC99ads_Q9000_v9:westeurope": "Azure states the GPU of a size nowhere, and spotd knows none of "
            "this name",
            "Standard_NC24ads_A100_v4:eastus": "this subscription may not have it in this region "
            "(NotAvailableForSubscription)",
        }
        assert (page.complete, page.note) == (True, "")

    play(tmp_path, story, AzureQuirks(price_rows=7))


def test_what_azure_does_not_say_of_evictions_is_said_and_costs_no_offer(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        page = await provider.offers(h.query())
        assert page.note == "Azure does not say to this application how many spot machines it evicts"
        assert {one.hazard_ppm for one in page.offers} == {None}
        assert page.complete

    play(tmp_path, story, AzureQuirks(unpreviewed=403))


def test_an_image_with_the_driver_for_graphics_opens_the_sizes_that_need_it(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        page = await provider.offers(h.query())
        assert "A10" in {one.gpu for one in page.offers}

    play(tmp_path, story, image="me:gpu:grid:1.0")


def test_a_region_that_does_not_answer_makes_the_page_incomplete(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.sizes[H100].prices["eastus"] = (7.0, 2.0)
        h.cloud.quirks.refused_paths.add("/skus")
        with pytest.raises(ProviderError):
            await provider.offers(OfferQuery())
        h.cloud.quirks.refused_paths.clear()
        assert (await provider.offers(OfferQuery())).complete

    play(tmp_path, story)


@every(
    ("size", "gpu"),
    [
        ("Standard_NC24ads_A100_v4", "A100_PCIE_80"), ("Standard_ND96asr_v4", "A100_SXM_40"),
        ("Standard_ND96amsr_A100_v4", "A100_SXM_80"), ("Standard_ND96ams_A100_v4", "A100_SXM_80"),
        ("Standard_NC80adis_H100_v5", "H100_NVL"), ("Standard_ND96is_noIB_H100_v5", "H100_SXM"),
        ("Standard_ND96isr_H200_v5", "H200_SXM"), ("Standard_ND96is_MI300X_v5", "MI300X"),
        ("standard_nc64as_t4_v3", "T4"), ("Standard_NC24rs_v3", "V100_16"), ("Standard_ND40rs_v2", "V100_32"),
        ("Standard_NV72ads_A10_v5", "A10"), ("Standard_NP10s", None), ("Standard_NC24ads_A100_v5", None), ("", None),
    ],
)  # fmt: skip
def test_a_size_tells_its_gpu_by_its_name(size: str, gpu: str | None) -> None:
    known = azure_gpu(size)
    assert (known.name if known else None) == gpu


def test_a_disk_is_the_next_size_that_is_billed() -> None:
    assert [disk_gb(gb) for gb in (1, 64, 65, 500, 4031, 10**9)] == [128, 128, 256, 1024, 4095, 4095]


# Launches.


def test_a_machine_is_made_without_an_identity_and_everything_of_it_goes_with_it(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        made = await provider.launch(request)
        (body,) = _purchases(h)
        assert set(body) == {"location", "tags", "properties"}, "no identity, no plan"
        properties = body["properties"]
        assert properties["billingProfile"] == {"maxPrice": request.price_max / 10**6}
        assert properties["evictionPolicy"] == "Delete"
        assert properties["storageProfile"]["osDisk"]["deleteOption"] == "Delete"
        assert json.dumps(body).count('"deleteOption": "Delete"') == 3
        (sent,) = h.requests(Call.LAUNCH)
        assert sent.headers["if-none-match"] == "*"
        assert made.instance.ref.instance_id == name_of(request.key)
        assert {one.kind for one in h.cloud.resources.values() if one.vm_id} == {DISK, NIC, ADDRESS}
        await h.settle()
        await provider.terminate(made.instance.ref)
        await h.settle()
        assert not h.live()
        assert not [one for one in h.cloud.resources.values() if one.vm_id]

    play(tmp_path, story)


def test_a_second_launch_under_one_key_makes_no_second_machine(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        made = await provider.launch(request)
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert [one.ref for one in await provider.find(request.key)] == [made.instance.ref]
        assert len(h.live()) == 1

    play(tmp_path, story)


def test_a_key_with_the_identity_of_an_install_is_found_by_its_tag(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        key = AttemptKey("spotd-lab.7f3a-j0b-1")
        made = await provider.launch(h.request(await _cheapest(h, provider), key))
        assert made.instance.ref.instance_id == "spotd-lab-7f3a-j0b-1"
        assert [one.key for one in await provider.find(key)] == [key]
        assert [one.key for one in (await provider.instances()).instances] == [key]
        h.cloud.add_foreign("notebook", {"spotd-key": key})
        assert len((await provider.instances()).instances) == 1, "a copy of our tags makes no machine ours"
        h.vm("spotd-lab-7f3a-j0b-1").tags.clear()
        listing = await provider.instances()
        assert not listing.complete, "a machine of our name without a tag may be ours"

    play(tmp_path, story)


REFUSALS = {
    "SkuNotAvailable": NoCapacity,
    "AllocationFailed": NoCapacity,
    "OverconstrainedZonalAllocationRequest": NoCapacity,
    "SpotVMCapacityReached": NoCapacity,
    "QuotaExceeded": QuotaExceeded,
    "InvalidParameter": RequestRejected,
    "ImageNotFound": RequestRejected,
    "MarketplacePurchaseEligibilityFailed": RequestRejected,
    "AuthorizationFailed": AuthFailed,
    "Conflict": OutcomeUnknown,
    "AnotherOperationInProgress": OutcomeUnknown,
    "ResourceGroupNotFound": RequestRejected,
    "AWordOfNextYear": RequestRejected,
}


@pytest.mark.parametrize(("code", "leaf"), REFUSALS.items())
def test_the_code_of_a_refused_launch_decides(code: str, leaf: type[ProviderError], tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(404 if code.endswith("Found") else 409, "no", code=code)
        with pytest.raises(leaf):
            await provider.launch(request)
        assert not h.live()
        assert h.launch_calls() == 1

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("text", "leaf"),
    [
        ("exceeding approved standardNCFamily Cores quota", QuotaExceeded),
        ("The specified max price is lower than the current price", PriceMoved),
        ("not allowed here", RequestRejected),
    ],
)
def test_an_operation_that_is_not_allowed_is_judged_by_its_sentence(
    text: str, leaf: type[ProviderError], tmp_path: Path
) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        request = h.request(await _cheapest(h, provider))
        h.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(409, text, code="OperationNotAllowed")
        with pytest.raises(leaf):
            await provider.launch(request)

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("code", "leaf"),
    [
        ("AllocationFailed", NoCapacity),
        ("AWordOfNextYear", NoCapacity),
        ("ImageNotFound", RequestRejected),
        ("Conflict", Unavailable),
        ("AnotherOperationInProgress", Unavailable),
        ("TooManyRequests", RateLimited),
        ("AuthorizationFailed", AuthFailed),
    ],
)
def test_a_machine_that_failed_to_be_made_is_ended_before_the_launch_says_why(
    code: str, leaf: type[ProviderError], tmp_path: Path
) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        offer = await _cheapest(h, provider)
        h.cloud.fail_next_boot(offer.extra["size"], RestRefusal(409, "it did not work", code=code))
        with pytest.raises(leaf):
            await provider.launch(h.request(offer))
        await h.settle()
        assert not h.live()
        assert not [one for one in h.cloud.resources.values() if one.vm_id]
        assert h.cloud.spent_usd() == 0.0

    play(tmp_path, story)


def test_a_machine_that_fails_late_says_why_in_lists(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.quirks.allocates = timedelta(minutes=2)
        offer = await _cheapest(h, provider)
        h.cloud.sell_out(offer.extra["size"], offer.extra["region"])
        made = await provider.launch(h.request(offer))
        await h.settle()
        (one,) = (await provider.instances()).instances
        assert (one.state, one.loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        assert "sufficient capacity" in one.detail
        await provider.terminate(made.instance.ref)

    play(tmp_path, story)


@pytest.mark.parametrize("word", ["Failed", "Canceled", "Updating"])
def test_a_machine_that_runs_after_an_update_that_failed_is_not_ended(word: str, tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        made = [(await provider.launch(h.request(await _cheapest(h, provider)))).instance for _ in range(2)]
        await h.settle()
        for one in made:
            h.vm(one.ref.instance_id).provisioning = word
        h.cloud.quirks.refused_paths.add(f"virtualmachines/{made[1].ref.instance_id}")
        with pytest.raises(AuthFailed):
            await provider.instances()
        h.cloud.quirks.refused_paths.clear()
        listing = await provider.instances()
        assert {(one.state, one.loss) for one in listing.instances} == {(InstanceState.RUNNING, None)}

    play(tmp_path, story)


def test_a_reason_that_cannot_be_read_costs_no_list_and_no_later_machine(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.quirks.allocates = timedelta(minutes=2)
        offer = await _cheapest(h, provider)
        h.cloud.sell_out(offer.extra["size"], offer.extra["region"])
        failed = (await provider.launch(h.request(offer))).instance
        other = min((await provider.offers(h.query())).offers, key=lambda one: one.extra["size"] == offer.extra["size"])
        runs = (await provider.launch(h.request(other))).instance
        await h.settle()
        for refused in ({"/operations/"}, set[str]()):
            h.cloud.quirks.refused_paths = refused
            found = {one.ref: (one.state, one.loss) for one in (await provider.instances()).instances}
            assert found[runs.ref] == (InstanceState.RUNNING, None)
            assert found[failed.ref][0] is InstanceState.PAUSED
            h.cloud.operations.clear()  # they expire

    play(tmp_path, story)


def test_an_on_demand_machine_is_not_bought_at_a_price_that_rose(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        offer = await _cheapest(h, provider, Market.ON_DEMAND)
        h.raise_price(offer)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == 0

    play(tmp_path, story)


def test_a_spot_machine_that_runs_costs_what_the_newest_list_says(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        offer = await _cheapest(h, provider)
        await provider.launch(h.request(offer, price_max=MicroUsdPerHour(2 * offer.gpu_price)))
        [one] = (await provider.instances()).instances
        assert one.price == offer.gpu_price
        h.raise_price(offer, 1.5)
        await provider.offers(h.query())
        [one] = (await provider.instances()).instances
        assert one.price == pytest.approx(1.5 * offer.gpu_price, abs=2)

    play(tmp_path, story)


# Why machines went, what they leave, and what they say.


@pytest.mark.parametrize("may_read", [True, False])
def test_an_evicted_machine_is_shown_as_preempted_and_one_that_somebody_deleted_is_not(
    may_read: bool, tmp_path: Path
) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        spot, on_demand = await _cheapest(h, provider), await _cheapest(h, provider, Market.ON_DEMAND)
        evicted, deleted, ended, other = [
            (await provider.launch(h.request(one))).instance for one in (spot, spot, spot, on_demand)
        ]
        await h.settle()
        assert {one.state for one in (await provider.instances()).instances} == {InstanceState.RUNNING}
        h.preempt(evicted.ref.instance_id)
        for one in (deleted, other):
            h.cloud.end_by_itself(h.vm(one.ref.instance_id).machine_id)
        h.cloud.quirks.log_lag = timedelta(0)
        if not may_read:
            h.cloud.quirks.refused_paths.add("microsoft.insights")
        await provider.terminate(ended.ref)
        await h.settle()
        await provider.instances()
        listing = await provider.instances()
        shown = {one.ref: (one.state, one.loss) for one in listing.instances}
        assert shown == {
            evicted.ref: (InstanceState.GONE, Loss.PREEMPTED),
            deleted.ref: (InstanceState.GONE, None if may_read else Loss.PREEMPTED),
            other.ref: (InstanceState.GONE, None),
        }
        assert await provider.find(evicted.key) == ()
        await h.advance(timedelta(minutes=61))
        assert (await provider.instances()).instances == ()

    play(tmp_path, story)


def test_a_group_that_is_not_there_proves_no_machine_gone(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        del h.cloud.groups["spotd"]
        for ask in (provider.instances, lambda: provider.find(made.instance.key)):
            with pytest.raises(Unavailable):
                await ask()
        with pytest.raises(Unavailable):
            await provider.terminate(made.instance.ref)

    play(tmp_path, story)


def test_what_a_machine_leaves_is_deleted_after_two_sweeps_and_nothing_else(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.quirks.leaves = {DISK, NIC, ADDRESS}
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        await h.settle()
        await provider.terminate(made.instance.ref)
        await h.settle()
        assert not h.live()
        assert len([one for one in h.cloud.resources.values() if one.vm_id]) == 3
        h.cloud.add_foreign("notebook", {})
        for _ in range(3):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        owners = {h.cloud.rented[str(one.vm_id)].name for one in h.cloud.resources.values() if one.vm_id}
        assert owners == {"notebook"}
        assert h.cloud.resources, "the networks stay"

    play(tmp_path, story)


def test_a_leftover_that_refuses_its_deletion_keeps_no_other_one_billed(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.quirks.leaves = {DISK, NIC, ADDRESS}
        names = []
        for _ in range(7):
            made = await provider.launch(h.request(await _cheapest(h, provider)))
            await h.settle()
            await provider.terminate(made.instance.ref)
            await h.settle()
            names.append(made.instance.ref.instance_id)
        refusing = sorted(names)[:6]
        h.cloud.quirks.refused_paths |= {f"disks/{one}" for one in refusing}
        for _ in range(4):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        left = {one.name for one in h.cloud.resources.values() if one.vm_id}
        assert left == set(refusing)
        h.cloud.quirks.refused_paths.clear()
        await provider.instances()
        assert not [one for one in h.cloud.resources.values() if one.vm_id]

    play(tmp_path, story)


def test_a_disk_without_a_tag_is_known_by_its_name_and_swept_from_every_page(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        h.cloud.quirks.leaves = {DISK}
        offer = await _cheapest(h, provider)
        for key in ("spotd-lab.7f3a-j0b-1", "spotd-lab-j0b-2"):
            made = await provider.launch(h.request(offer, AttemptKey(key)))
            await h.settle()
            await provider.terminate(made.instance.ref)
            await h.settle()
        for one in h.cloud.resources.values():
            if one.vm_id:
                one.body["tags"] = {}
        h.cloud.quirks.resource_rows = 1
        for name in ("spotd-labor-j0b-1", "my-disk-j0b-1"):
            h.cloud.resources[f"{DISK}/{name}".lower()] = AzureResource(
                kind=DISK, name=name, region="westeurope", body={"tags": {}}
            )
        for _ in range(2):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        left = {one.name for one in h.cloud.resources.values() if one.kind == DISK}
        assert left == {"spotd-labor-j0b-1", "my-disk-j0b-1"}

    play(tmp_path, story)


def test_a_console_is_read_without_the_link_turning_up_anywhere(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        request = h.request(await _cheapest(h, provider), start_script="#!/bin/sh\necho begun\nexec sleep 600\n")
        made = await provider.launch(request)
        await h.settle()
        h.machines()
        name = h.vm(made.instance.ref.instance_id).machine_id
        until(lambda: bool(h.cloud.machines.console(name, lines=9)))
        assert await provider.logs(made.instance.ref, lines=9)
        blob = next(one for one in h.requests() if one.path.startswith("/blob/"))
        assert "authorization" not in blob.headers
        await provider.terminate(made.instance.ref)
        await h.settle()
        with pytest.raises(ProviderError) as refused:
            await provider.logs(made.instance.ref, lines=9)
        assert BLOB_SECRET not in f"{refused.value!r} {h.log}"

    play(tmp_path, story, container="none")


def test_a_link_to_another_server_gets_no_token_and_makes_a_list_incomplete(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        def elsewhere(true: Any) -> Any:
            body = {**json.loads(true.body), "nextLink": "https://evil.example/subscriptions/x?y"}
            return type(true)(status=200, body=json.dumps(body).encode(), headers=true.headers)

        h.faults.edit(Call.LIST, elsewhere)
        assert not (await provider.instances()).complete
        assert (await provider.instances()).complete

    play(tmp_path, story)


def test_an_eviction_that_is_announced_reaches_the_runner(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        made = await provider.launch(h.request(await _cheapest(h, provider)))
        await h.settle()
        h.machines()
        vm = h.vm(made.instance.ref.instance_id)
        assert vm.status == "running"
        h.cloud.give_notice(vm.machine_id, timedelta(hours=1))
        home = h.cloud.machines.home(vm.machine_id)
        home.mkdir(parents=True, exist_ok=True)
        until(lambda: (home / "notice").exists())
        notice = json.loads((home / "notice").read_text())
        assert vm.notice_at is not None
        assert notice == {"at": vm.notice_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "reason": "evicted by Azure"}

    play(tmp_path, story, container="none")


def test_the_doctor_names_a_network_that_lacks_and_a_quota_of_nothing(tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        assert all(line.ok for line in await provider.check())
        del h.cloud.resources["microsoft.network/virtualnetworks/spotd-eastus/subnets/default"]
        h.cloud.quirks.cores_spot = 0
        bad = {line.name: line for line in await provider.check() if not line.ok}
        assert set(bad) == {"network eastus", "quota westeurope", "quota eastus"}
        assert bad["network eastus"].hint == (
            "az network vnet create -g spotd -n spotd-eastus -l eastus --subnet-name default"
        )

    play(tmp_path, story)


@pytest.mark.parametrize("lacks", ["tenant_id", "client_id", "subscription_id", "resource_group", "regions"])
def test_a_setting_that_lacks_is_named_before_anything_is_asked(lacks: str, tmp_path: Path) -> None:
    async def story(h: AzureHarness, provider: AzureProvider) -> None:
        raise AssertionError("it opened")

    with pytest.raises(AuthFailed, match=lacks):
        play(tmp_path, story, None, **{lacks: () if lacks == "regions" else ""})


@every(
    ("provisioning", "power", "state", "billing"),
    [
        ("Creating", None, InstanceState.PENDING, Billing.UNKNOWN),
        ("Succeeded", "starting", InstanceState.PENDING, Billing.UNKNOWN),
        ("Succeeded", "running", InstanceState.RUNNING, Billing.FULL),
        ("Failed", "running", InstanceState.RUNNING, Billing.FULL),
        ("Succeeded", "stopped", InstanceState.PAUSED, Billing.FULL),
        ("Succeeded", "deallocated", InstanceState.PAUSED, Billing.DISK),
        ("Failed", None, InstanceState.PAUSED, Billing.UNKNOWN),
        ("Deleting", "running", InstanceState.ENDING, Billing.UNKNOWN),
        ("Succeeded", None, InstanceState.UNKNOWN, Billing.UNKNOWN),
        ("Succeeded", "meditating", InstanceState.UNKNOWN, Billing.UNKNOWN),
        ("Meditating", None, InstanceState.UNKNOWN, Billing.UNKNOWN),
    ],
)
def test_states_are_those_of_the_reference(
    provisioning: str, power: str | None, state: InstanceState, billing: Billing
) -> None:
    statuses = [{"code": f"ProvisioningState/{provisioning.lower()}"}]
    statuses += [{"code": f"PowerState/{power}"}] if power else []
    raw = {"id": "x", "properties": {"provisioningState": provisioning, "instanceView": {"statuses": statuses}}}
    row = row_or_none(AzureVmRow, raw)
    assert row is not None
    one = as_instance(row, AttemptKey("spotd-lab-j-1"))
    assert (one.state, one.billing) == (state, billing)


# Damaged payloads: no crash, no price that is not in the row, no machine lost.

REGION = "westeurope"
SOME = [size for size in some_sizes() if REGION in size.prices][:5]
PRICES = [row for row in price_rows(SOME) if row["armRegionName"] == REGION]
SIZES = [sku_row(size, REGION) for size in SOME]
MACHINE = {
    "id": "/subscriptions/s/resourceGroups/SPOTD/providers/Microsoft.Compute/virtualMachines/spotd-lab-j0b-1",
    "name": "spotd-lab-j0b-1", "location": REGION, "tags": {"spotd-install": "lab", "spotd-key": "spotd-lab-j0b-1"},
    "properties": {
        "priority": "Spot", "vmId": "v", "provisioningState": "Succeeded", "timeCreated": "2026-11-28T00:00:00Z",
        "instanceView": {"statuses": [{"code": "ProvisioningState/succeeded"}, {"code": "PowerState/running"}]},
    },
}  # fmt: skip


def judge_sales(prices: Any, sizes: Any) -> None:
    rows, known = decode(json.dumps(prices).encode(), who="Azure"), decode(json.dumps(sizes).encode(), who="Azure")
    read, bad = prices_of(rows if isinstance(rows, list) else [], REGION)
    sales = RegionSales(REGION, known if isinstance(known, list) else [], read, bad, is_whole=True)
    offers, _ = offers_of(sales, tuple(Market), AzureSettings(), {})
    stated = [row.get("retailPrice") for row in rows if isinstance(row, dict)]
    micros = [float(one) * 10**6 for one in stated if isinstance(one, int | float) and 0 < one < 10**7]
    for offer in offers:
        assert type(offer.gpu_price) is int
        assert any(abs(offer.gpu_price - micro) <= 1 for micro in micros), offer
        assert 1 <= offer.gpu_count <= 64


def judge_machine(raw: Any) -> None:
    read = flat(decode(json.dumps(raw).encode(), who="Azure"))
    if isinstance(read, dict) and read["id"] == MACHINE["name"]:
        row = row_or_none(AzureVmRow, read)
        assert row is not None, "a machine of ours whose row is damaged is lost"
        one = as_instance(row, AttemptKey("spotd-lab-j0b-1"))
        assert one.state is not InstanceState.GONE
        assert one.price is None


def judge(prices: Any, sizes: Any, raw: Any) -> None:
    judge_sales(prices, sizes)
    judge_machine(raw)


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, PRICES, SIZES, MACHINE, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, PRICES, SIZES, MACHINE, count=ALL)
