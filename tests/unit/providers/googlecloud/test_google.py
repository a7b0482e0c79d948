"""What is special of Google Cloud: operations, twins, stockouts, silent zones, causes, advice, past prices."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    NotSupported,
    OfferGone,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    Power,
)
from spotd_providers.googlecloud.catalogue import (
    LAUNCH_PRICES_WITHIN,
    TYPES_KEPT,
    hazard_of,
    past_prices,
    score_of,
)
from spotd_providers.googlecloud.offers import kinds_of, offers_of, price_table, zones_of
from spotd_providers.googlecloud.plugin import GoogleProvider
from spotd_providers.googlecloud.wire import GoogleSettings, as_instance, key_in
from spotd_providers.kit import template, vm_causes
from spotd_providers.kit.shapes import decode
from spotd_providers.testkit.serve import Call, Canned
from tests.cases import every
from tests.fakes.rest import RestRefusal
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.googlecloud.catalog import GoogleQuirks, families, sku_rows
from tests.unit.providers.googlecloud.harness import GoogleHarness, play

REGIONS = frozenset({"us-central1", "europe-west4"})


async def _an_offer(h: GoogleHarness, provider: GoogleProvider, market: Market = Market.SPOT) -> Offer:
    page = await provider.offers(h.query())
    return min((one for one in page.offers if one.gpu == "L4" and one.market is market), key=lambda one: one.offer_id)


async def _wait_for(h: GoogleHarness, seconds: float) -> None:
    await h.advance(timedelta(seconds=seconds))


# Launching.


def test_a_launch_gives_the_machine_no_account_and_asks_for_its_deletion_and_a_notice(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        key = AttemptKey(f"spotd-{h.install}.ab12-j1-1")
        await provider.launch(h.request(offer, key))
        body = h.cloud.named(key.replace(".", "-")).body
        assert body["serviceAccounts"] == []
        assert body["labels"] == {"spotd-install": h.install, "spotd-key": key.replace(".", "_")}
        assert body["scheduling"] == {
            "provisioningModel": "SPOT",
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
            "instanceTerminationAction": "DELETE",
            "preemptionNoticeDuration": {"seconds": "120"},
        }
        assert body["disks"][0]["autoDelete"] is True
        assert body["disks"][0]["initializeParams"]["diskSizeGb"] == "70"
        assert [one.key for one in await provider.find(key)] == [key]

    play(tmp_path, story)


def test_a_second_launch_of_one_key_makes_no_second_machine(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        first = await provider.launch(request)
        again = await provider.launch(request)
        await _wait_for(h, 3700)  # the request id is forgotten, so that the name alone refuses
        twin = await provider.launch(request)
        assert first.instance.ref == again.instance.ref == twin.instance.ref
        assert len(h.live(request.key)) == 1

    play(tmp_path, story)


def test_a_name_that_another_owner_has_is_no_launch_of_ours(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        key = h.key()
        other = h.cloud.add_foreign(key, labels={"spotd-key": "spotd-other-j1-1"})
        page = await provider.offers(h.query())
        offer = next(one for one in page.offers if one.extra["zone"] == other.zone)
        with pytest.raises(RequestRejected, match="another owner"):
            await provider.launch(h.request(offer, key))
        assert other.exists

    play(tmp_path, story)


def test_a_copy_of_our_labels_is_no_machine_of_ours_and_a_lost_label_makes_the_list_incomplete(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        key = AttemptKey(f"spotd-{h.install}.ab12-j1-1")
        made = (await provider.launch(h.request(await _an_offer(h, provider), key))).instance
        labels = {"spotd-install": h.install, "spotd-key": key.replace(".", "_")}
        h.cloud.add_foreign("my-copy", labels=labels)
        listing = await provider.instances()
        assert [one.ref for one in listing.instances] == [made.ref]
        assert listing.complete
        own = h.cloud.named(key.replace(".", "-")).body["labels"]
        del own["spotd-key"]
        listing = await provider.instances()
        assert (listing.instances, listing.complete) == ((), False)
        with pytest.raises(Unavailable):
            await provider.find(key)

    play(tmp_path, story)


def test_one_name_in_two_zones_is_two_machines(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        key = h.key()
        labels = {"spotd-install": h.install, "spotd-key": key}
        zone = h.cloud.add_foreign(key, labels=labels).zone
        page = await provider.offers(h.query())
        other = next(one for one in page.offers if one.gpu == "L4" and one.extra["zone"] != zone)
        made = (await provider.launch(h.request(other, key))).instance
        assert {one.ref.scope for one in (await provider.instances()).instances} == {zone, made.ref.scope}
        assert len(await provider.find(key)) == 2

    play(tmp_path, story)


OPERATIONS = {
    "INTERNAL_ERROR": Unavailable,
    "RESOURCE_NOT_READY": Unavailable,
    "RATE_LIMIT_EXCEEDED": RateLimited,
    "PERMISSIONS_ERROR": AuthFailed,
    "QUOTA_EXCEEDED": QuotaExceeded,
    "INVALID_FIELD_VALUE": RequestRejected,
    "A_WORD_OF_NEXT_YEAR": NoCapacity,
}


@pytest.mark.parametrize(("code", "leaf"), OPERATIONS.items())
def test_the_code_of_an_operation_that_failed_decides(code: str, leaf: type[ProviderError], tmp_path: Path) -> None:
    def place(answer: Canned) -> Canned:
        body = json.loads(answer.body)
        body["error"]["errors"] = [{"code": code, "message": "it did not work"}]
        return replace(answer, body=json.dumps(body).encode())

    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.cloud.sell_out(offer.extra["type"])
        h.faults.edit(Call.OTHER, place)
        with pytest.raises(leaf):
            await provider.launch(h.request(offer))
        assert not h.live()

    play(tmp_path, story)


@pytest.mark.parametrize("waits_cut", [0, 3])
def test_an_operation_that_fails_seconds_later_is_the_launchs_refusal(waits_cut: int, tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.cloud.sell_out(offer.extra["type"])
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        assert not h.live()
        assert h.launch_calls() == 1

    play(tmp_path, story, GoogleQuirks(waits_cut=waits_cut, insert_takes=timedelta(seconds=5)))


def test_a_wait_that_is_lost_is_no_launch_that_failed(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.faults.answer(Call.OTHER, Canned(status=503), times=1)
        launched = await provider.launch(h.request(offer))
        assert launched.instance.state is InstanceState.PENDING
        assert len(h.live()) == 1

    play(tmp_path, story)


def test_an_operation_that_is_not_done_in_time_leaves_the_machine_to_the_list(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        await provider.launch(request)
        assert len(await provider.find(request.key)) == 1

    play(tmp_path, story, GoogleQuirks(waits_cut=1000, insert_takes=timedelta(minutes=5)))


REFUSALS: dict[str, tuple[RestRefusal, type[ProviderError]]] = {
    "stockout": (
        RestRefusal(503, "The zone does not have enough resources available", code="UNSUPPORTED_OPERATION"),
        NoCapacity,
    ),
    "pool": (RestRefusal(400, "exhausted", code="ZONE_RESOURCE_POOL_EXHAUSTED"), NoCapacity),
    "quota": (RestRefusal(403, "Quota exceeded", code="quotaExceeded"), QuotaExceeded),
    "permission": (RestRefusal(403, "Required 'compute.instances.create' permission", code="forbidden"), AuthFailed),
    "rate": (RestRefusal(403, "Rate limit", code="rateLimitExceeded"), RateLimited),
    "user rate": (RestRefusal(403, "Rate limit", code="userRateLimitExceeded"), RateLimited),
    "type": (RestRefusal(404, "The resource 'zones/z/machineTypes/g9' was not found", code="notFound"), OfferGone),
    "network": (
        RestRefusal(404, "The resource 'global/networks/x' was not found", code="notFound"),
        RequestRejected,
    ),
    "invalid": (RestRefusal(400, "Invalid value for field 'x'", code="invalid"), RequestRejected),
    "backend": (RestRefusal(503, "Backend error", code="backendError"), OutcomeUnknown),
    "internal": (RestRefusal(500, "Internal", code="internalError"), OutcomeUnknown),
}


@pytest.mark.parametrize("cause", REFUSALS)
def test_a_refusal_is_told_by_its_cause(cause: str, tmp_path: Path) -> None:
    refusal, leaf = REFUSALS[cause]

    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        h.refuse_launches(refusal)
        with pytest.raises(leaf):
            await provider.launch(request)
        assert not h.live()
        assert h.launch_calls() == 1

    play(tmp_path, story)


def test_a_notice_that_is_not_taken_is_left_out_from_then_on(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.refuse_launches(RestRefusal(400, "Unknown field 'preemptionNoticeDuration'", code="invalid"))
        with pytest.raises(Unavailable, match="asks for none"):
            await provider.launch(h.request(offer))
        del h.cloud.quirks.refusals[Call.LAUNCH]
        request = h.request(offer)
        await provider.launch(request)
        assert "preemptionNoticeDuration" not in h.cloud.named(request.key).body["scheduling"]

    play(tmp_path, story)


def test_the_price_list_is_read_again_before_a_launch(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        for market in Market:
            offer = await _an_offer(h, provider, market)
            h.raise_price(offer, 1.01)
            with pytest.raises(PriceMoved):
                await provider.launch(h.request(offer))
        assert h.launch_calls() == 0

    play(tmp_path, story)


def test_a_launch_is_judged_by_prices_of_the_last_minutes(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.cloud.raise_price(offer.extra["type"], 1.01)
        await h.advance(LAUNCH_PRICES_WITHIN)
        with pytest.raises(PriceMoved):
            await provider.launch(h.request(offer))
        assert h.launch_calls() == 0

    play(tmp_path, story)


def test_a_spot_machine_that_runs_costs_what_the_newest_list_says(tmp_path: Path) -> None:
    """Else a price that doubles is booked at half, and no ceiling sees it."""

    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offers = [await _an_offer(h, provider, market) for market in (Market.SPOT, Market.ON_DEMAND)]
        keys = [(await provider.launch(h.request(one))).instance.key for one in offers]
        h.raise_price(offers[0])
        prices = {one.key: one.price for one in (await provider.instances()).instances}
        assert prices == {keys[0]: offers[0].gpu_price, keys[1]: None}
        await provider.offers(h.query())
        prices = {one.key: one.price for one in (await provider.instances()).instances}
        assert prices[keys[0]] == pytest.approx(2 * offers[0].gpu_price, abs=2)
        row = {"name": "n", "machineType": "zones/z/machineTypes/n1-standard-4", "zone": "zones/z", "status": "RUNNING",
               "scheduling": {"provisioningModel": "SPOT"}}  # fmt: skip
        provider._spot_prices["n1-standard-4", "z"] = MicroUsdPerHour(1)
        attached = provider._machine(row, AttemptKey(keys[0]))
        assert attached is not None
        assert attached.price is None, "its GPUs are attached to it, and are no part of the price of its type"

    play(tmp_path, story)


def test_a_zone_that_does_not_answer_says_nothing_of_what_it_sells(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        h.fake_clock.advance(TYPES_KEPT)
        h.cloud.quirks.silent_paths = {f"/zones/{offer.extra['zone']}/machineTypes"}
        with pytest.raises(Unavailable, match="does not say whether"):
            await provider.launch(h.request(offer))
        h.cloud.quirks.silent_paths = set()
        h.cloud.kinds.pop(offer.extra["type"])
        h.fake_clock.advance(TYPES_KEPT)
        with pytest.raises(OfferGone):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


def test_accelerators_that_are_not_listed_once_are_not_missing_for_hours(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        h.cloud.quirks.silent_paths = {"/zones/us-central1-a/acceleratorTypes"}
        page = await provider.offers(h.query())
        assert not page.complete
        assert not [one for one in page.offers if one.extra["zone"] == "us-central1-a"]
        h.cloud.quirks.silent_paths = set()
        page = await provider.offers(h.query())
        assert page.complete
        assert [one for one in page.offers if one.extra["zone"] == "us-central1-a"]

    play(tmp_path, story, machine_types=("n1-*", "g2-*"))


@every(
    ("zones", "found", "whole"),
    [
        (["https://x/zones/us-central1-a"], ["us-central1-a"], True),
        (["https://x/zones/us-central1-a", 7], ["us-central1-a"], False),
        ("us-central1-a", [], False),
        (None, [], False),
        ([], [], False),
        ([f"us-central1-{n}" for n in range(21)], 20, False),
    ],
)
def test_odd_zones_of_a_region_are_not_all_that_there_are(zones: Any, found: Any, whole: bool) -> None:
    name, read, is_whole = zones_of({"name": "us-central1", "zones": zones}, GoogleSettings())
    assert (name, is_whole) == ("us-central1", whole)
    assert read == found or len(read) == found
    assert zones_of({"name": "mars-east1", "zones": zones}, GoogleSettings()) == ("", [], True)
    assert zones_of({"name": 7, "zones": zones}, GoogleSettings()) == ("", [], False)


def test_the_script_of_a_second_boot_ends_the_machine(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        await provider.launch(request)
        script = h.cloud.named(request.key).script
        assert script is not None
        head = script[: script.index("#!/bin/sh", 1)] if script.count("#!/bin/sh") > 1 else script
        assert head.startswith('#!/bin/sh\nbegun=${SPOTD_HOME:-/opt/spotd}/begun\n[ -e "$begun" ] && { shutdown -h now')

    play(tmp_path, story)


# Lists and ends.


@pytest.mark.parametrize("zone", ["us-central1-b", "europe-west4-a"])
def test_a_zone_that_is_silent_makes_the_list_incomplete(zone: str, tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        offer = await _an_offer(h, provider)
        request = h.request(offer)
        await provider.launch(request)
        assert (await provider.instances()).complete
        h.cloud.quirks.unreachable = {zone}
        listing = await provider.instances()
        assert not listing.complete
        assert f"zones/{zone}" in {one.offer_id for one in listing.rejected}
        assert [one.key for one in listing.instances] == ([] if zone == offer.extra["zone"] else [request.key])
        with pytest.raises(Unavailable):
            await provider.find(h.key())

    play(tmp_path, story)


def test_an_end_is_proved_by_absence_and_asks_again_with_another_id(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        launched = await provider.launch(request)
        await h.settle()
        await provider.terminate(launched.instance.ref)
        await h.settle()
        assert not h.live(request.key)
        assert await provider.find(request.key) == ()
        ids = [one.query.partition("requestId=")[2].partition("&")[0] for one in h.requests(Call.TERMINATE)]
        assert len(ids) == len(set(ids)) == 2, "the first end is survived"
        await provider.terminate(launched.instance.ref)

    play(tmp_path, story, GoogleQuirks(undead=1))


@pytest.mark.parametrize(
    ("way", "loss"),
    [("preempted", Loss.PREEMPTED), ("host", Loss.HOST_LOST), ("self", Loss.SELF), ("vanished", None)],
)
def test_why_a_machine_went_is_told_by_the_log_of_operations(way: str, loss: Loss | None, tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        await provider.launch(request)
        await h.settle()
        assert [one.state for one in (await provider.instances()).instances] == [InstanceState.RUNNING]
        number = h.id_of(request.key)
        {
            "preempted": lambda: h.cloud.preempt(number),
            "host": lambda: h.cloud.fail_host(number),
            "self": lambda: h.cloud._power_off(h.cloud.rented[number], h.clock.now()),
            "vanished": lambda: h.cloud.vanish(number),
        }[way]()
        await h.settle()
        listing = await provider.instances()
        assert listing.complete
        (found,) = listing.instances
        gone = InstanceState.GONE if way in ("preempted", "vanished") else InstanceState.PAUSED
        assert (found.state, found.loss) == (gone, loss)
        assert all(one.state is not InstanceState.GONE for one in await provider.find(request.key))
        await h.advance(timedelta(hours=2))
        assert gone is InstanceState.PAUSED or (await provider.instances()).instances == ()

    play(tmp_path, story)


def test_a_cause_that_is_late_in_the_log_is_told_when_it_is_there(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        request = h.request(await _an_offer(h, provider))
        await provider.launch(request)
        await h.settle()
        await provider.instances()
        h.cloud.preempt(h.id_of(request.key))
        await _wait_for(h, 60)
        assert [one.loss for one in (await provider.instances()).instances] == [None]
        await _wait_for(h, 300)
        assert [one.loss for one in (await provider.instances()).instances] == [Loss.PREEMPTED]

    play(tmp_path, story, GoogleQuirks(logs_late=timedelta(minutes=4)))


def test_a_log_that_does_not_answer_holds_no_list_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        requests = [h.request(await _an_offer(h, provider)) for _ in range(7)]
        for request in requests:
            await provider.launch(request)
        await h.settle()
        await provider.instances()
        for request in requests[:-1]:
            h.cloud.vanish(h.id_of(request.key))
        h.cloud.preempt(h.id_of(requests[-1].key))
        await h.settle()
        assert len((await provider.instances()).instances) == vm_causes.ASKED_MAX
        h.faults.hang(Call.OTHER, times=1000)
        monkeypatch.setattr(vm_causes, "ASKED_WITHIN_S", 0.05)
        with anyio.fail_after(10):
            listing = await provider.instances()
        assert listing.complete
        assert [(one.state, one.loss) for one in listing.instances] == [(InstanceState.GONE, None)] * 7
        h.faults.clear()
        monkeypatch.undo()
        known = [[one.loss for one in (await provider.instances()).instances] for _ in range(2)]
        assert [losses.count(Loss.PREEMPTED) for losses in known][-1] == 1, "those asked for least often are the next"

    play(tmp_path, story)


def test_a_console_that_does_not_answer_keeps_no_cause_from_being_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "CONSOLE_WITHIN_S", 0.05)

    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        requests = [h.request(await _an_offer(h, provider)) for _ in range(4)]
        for request in requests:
            await provider.launch(request)
        await h.settle()
        await provider.instances()
        for request in requests:
            machine = h.cloud.rented[h.id_of(request.key)]
            h.cloud._power_off(machine, h.clock.now())
        await h.settle()

        async def silent(_: InstanceRef) -> tuple[str, ...]:
            await anyio.sleep(60)
            return ()

        monkeypatch.setattr(provider, "_console", silent)
        with anyio.fail_after(20):
            shown = [[one.loss for one in (await provider.instances()).instances] for _ in range(2)]
        assert [losses.count(Loss.SELF) for losses in shown] == [3, 4]

    play(tmp_path, story)


def test_our_order_to_end_a_machine_that_goes_does_not_keep_its_cause_from_being_known(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        launched = await provider.launch(h.request(await _an_offer(h, provider)))
        await h.settle()
        await provider.instances()
        h.cloud.preempt(h.id_of(launched.instance.key))
        (going,) = (await provider.instances()).instances
        assert (going.state, going.loss) == (InstanceState.ENDING, None)
        await provider.terminate(launched.instance.ref)
        shown = []
        for seconds in (60, 100, 200):
            await _wait_for(h, seconds)
            shown.append([(one.state, one.loss) for one in (await provider.instances()).instances])
        gone = InstanceState.GONE
        assert shown == [[(gone, None)], [(gone, None)], [(gone, Loss.PREEMPTED)]]

    play(tmp_path, story, GoogleQuirks(logs_late=timedelta(minutes=4)))


def test_a_machine_that_we_end_is_neither_announced_nor_lost(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        launched = await provider.launch(h.request(await _an_offer(h, provider)))
        await h.settle()
        await provider.terminate(launched.instance.ref)
        (ending,) = (await provider.instances()).instances
        assert (ending.state, ending.notice_at, ending.loss) == (InstanceState.ENDING, None, None)
        await h.settle()
        assert (await provider.instances()).instances == ()

    play(tmp_path, story)


# Offers.


def test_offers_carry_disk_address_and_traffic_and_say_why_others_are_missing(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        page = await provider.offers(h.query())
        offer = next(one for one in page.offers if one.offer_id == "g2-standard-4:europe-west4-a:spot")
        assert (offer.storage_price, offer.upload_price) == (130_000, 120_000)
        assert offer.storage_fixed == 5_000 + -(-130_000 * 50 // 720)
        assert offer.on_demand_price is not None
        assert offer.on_demand_price > 3 * offer.gpu_price
        assert (offer.capacity_score, offer.hazard_ppm) == (8, 250_000)
        reasons = {one.offer_id: one.reason for one in page.rejected}
        assert reasons["a4-highgpu-8g:us-central1-a:on-demand"] == "Google sells this type as Spot or reserved only"
        assert reasons["n1-standard-4:us-central1-a"] == "Google calls the type deprecated"
        assert "a4-highgpu-8g:us-central1-a:spot" in {one.offer_id for one in page.offers}

    play(tmp_path, story)


@pytest.mark.parametrize("status", [403, 404])
def test_advice_that_is_not_allowed_costs_the_score_and_nothing_else(status: int, tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        page = await provider.offers(h.query())
        assert page.complete
        assert {(one.capacity_score, one.hazard_ppm) for one in page.offers} == {(None, None)}
        assert not provider.capabilities[Power.CAPACITY_SCORES].available
        with pytest.raises(NotSupported):
            await provider.price_history(h.clock.now() - timedelta(days=90), after="")

    play(tmp_path, story, GoogleQuirks(advice_refused=status))


@pytest.mark.parametrize("odd", [2, -1, "NaN", None, [], True, 1e308])
def test_an_odd_score_is_none(odd: Any, tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        assert {one.capacity_score for one in (await provider.offers(h.query())).offers} == {None}

    play(tmp_path, story, GoogleQuirks(obtainability=odd))


def test_scores_and_uptimes_are_mapped_within_their_bounds() -> None:
    assert [score_of(one) for one in (0.0, 0.01, 0.72, 1.0)] == [1, 1, 8, 10]
    assert [hazard_of(one) for one in ("14400s", "0s", "999999999s", "9e9s", "-1s", "1h", None, "1.5s")] == [
        250_000, 1_000_000, 3, None, None, None, None, 1_000_000,
    ]  # fmt: skip


def test_past_prices_are_in_order_and_odd_ones_are_counted(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        now = h.clock.now()

        def row(hours: float, units: Any = "2") -> dict[str, Any]:
            at = (now - timedelta(hours=hours)).isoformat()
            return {"interval": {"startTime": at, "endTime": at}, "listPrice": {"currencyCode": "USD", "units": units}}

        rows = [row(1), row(9, "3"), row(5, "4"), row(7, "5"), row(-1), row(2, "x"), row(3, -1), {}, None]
        changes, rejected = past_prices(rows, now - timedelta(hours=6), now)
        assert [price for _, price in changes] == [5_000_000, 4_000_000, 2_000_000]
        assert rejected == 4

    play(tmp_path, story)


TYPE = {"name": "n1-standard-8", "guestCpus": 8, "memoryMb": 30_720}


def test_gpus_are_attached_to_n1_where_google_lists_them() -> None:
    settings, table = GoogleSettings(), price_table(sku_rows(families(), {"nvidia-tesla-t4": 350_000_000}), REGIONS)
    kinds, _ = kinds_of([TYPE], "us-central1-a", frozenset({"nvidia-tesla-t4"}), settings)
    offers, _ = offers_of(kinds, table, settings, markets=[Market.ON_DEMAND], image_gb=50, scores={})
    assert {(one.gpu, one.gpu_count): one.gpu_price for one in offers} == {
        ("T4", 1): MicroUsdPerHour(729_998),
        ("T4", 2): MicroUsdPerHour(1_079_998),
    }
    assert {one.extra["accelerator"] for one in offers} == {"nvidia-tesla-t4"}
    assert kinds_of([TYPE], "us-central1-a", frozenset(), settings) == ([], [])


@every(
    ("name", "accelerator", "stated", "ssd_gb"),
    [
        ("a4-highgpu-8g", "nvidia-b200", {"partitionCount": 32}, 12_000),
        ("a4-highgpu-8g", "nvidia-b200", {"partitionCount": 0}, 0),
        ("a4-highgpu-8g", "nvidia-b200", None, None),
        ("a4-highgpu-8g", "nvidia-b200", {"partitionCount": "32 of them"}, None),
        ("a3-ultragpu-8g", "nvidia-h200-141gb", None, None),
        ("a3-ultragpu-8g", "nvidia-h200-141gb", {"partitionCount": 32}, 12_000),
        ("a3-highgpu-8g", "nvidia-h100-80gb", None, 6_000),
        ("g2-standard-96", "nvidia-l4", None, 0),
    ],
)
def test_a_type_whose_local_ssd_is_not_known_is_not_offered_without_it(
    name: str, accelerator: str, stated: Any, ssd_gb: int | None
) -> None:
    row: dict[str, Any] = {
        "name": name, "guestCpus": 8, "memoryMb": 8_192,
        "accelerators": [{"guestAcceleratorType": accelerator, "guestAcceleratorCount": 8}],
    }  # fmt: skip
    if stated is not None:
        row["bundledLocalSsds"] = stated
    kinds, rejected = kinds_of([row], "us-central1-a", frozenset(), GoogleSettings())
    if ssd_gb is None:
        assert kinds == []
        assert ["local SSD" in one.reason for one in rejected] == [True]
    else:
        found = {part: count for part, count, _ in kinds[0].parts(price_table([], REGIONS))}
        assert found.get("local ssd", 0) == ssd_gb


def test_check_names_image_quotas_and_the_log_of_operations(tmp_path: Path) -> None:
    async def story(h: GoogleHarness, provider: GoogleProvider) -> None:
        lines = {one.name: one for one in await provider.check()}
        assert all(one.ok for one in lines.values()), lines
        assert {"key", "market", "image", "quotas", "operations"} <= set(lines)
        assert "PREEMPTIBLE_NVIDIA_L4_GPUS" in lines["quotas"].detail
        h.cloud.quotas = {region: {} for region in h.cloud.quotas}
        assert not next(one for one in await provider.check() if one.name == "quotas").ok

    play(tmp_path, story)


# Damaged payloads: no crash, no price that the rows do not hold, no machine lost.

SKUS = [row for row in sku_rows(families(), {}) if any(word in row["description"] for word in ("L4", "G2"))]
TYPES = [
    {
        "name": name, "guestCpus": cpus, "memoryMb": memory_mb,
        "accelerators": [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": count}],
    }
    for name, cpus, memory_mb, count in (("g2-standard-4", 4, 16_384, 1), ("g2-standard-24", 24, 98_304, 2))
]  # fmt: skip
MACHINE = {
    "id": "1", "name": "spotd-lab-j0b-1", "status": "RUNNING", "zone": "https://x/zones/us-central1-a",
    "labels": {"spotd-install": "lab", "spotd-key": "spotd-lab-j0b-1"},
    "scheduling": {"provisioningModel": "SPOT"}, "creationTimestamp": "2026-03-02T12:00:00.000-08:00",
}  # fmt: skip
PAST = [
    {"interval": {"startTime": "2026-03-01T00:00:00Z"}, "listPrice": {"currencyCode": "USD", "units": "2", "nanos": 5}}
]


def judge(skus: Any, types: Any, raw: Any, past: Any) -> None:
    def read(value: Any) -> Any:
        return decode(json.dumps({"rows": value}).encode(), who="Google Cloud")["rows"]

    settings = GoogleSettings()
    table = price_table(read(skus), REGIONS)
    for nanos in table.nanos.values():
        assert type(nanos) is int
        assert 0 < nanos < 10**17
    kinds, _ = kinds_of(read(types), "us-central1-a", frozenset(), settings)
    offers, _ = offers_of(kinds, table, settings, markets=list(Market), image_gb=50, scores={})
    whole = {row["name"] for row in types if row in TYPES}
    for offer in offers:
        assert type(offer.gpu_price) is int
        assert offer.gpu_price > 0
        assert type(offer.storage_fixed) is int
        if skus == SKUS and offer.extra["type"] in whole and offer.gpu_count in (1, 2):
            assert 10**5 < offer.gpu_price < 10**7
    label, row = key_in(read(raw), "lab"), read(raw)
    found = as_instance(row, AttemptKey("spotd-lab-j0b-1"), notice=lambda _: None)
    if row.get("name") == MACHINE["name"] and row.get("zone") == MACHINE["zone"]:
        assert found is not None
        assert found.state is not InstanceState.GONE
        if row.get("labels") == MACHINE["labels"]:
            assert label == MACHINE["name"]
    changes, _ = past_prices(read(past), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    assert all(type(price) is int and price > 0 for _, price in changes)


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, SKUS, TYPES, MACHINE, PAST, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, SKUS, TYPES, MACHINE, PAST, count=ALL)
