"""Answers of vast.ai in other words and shapes than its fake's: what the documents leave open must not matter."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.start import NO_PYTHON as SAID_BY_THE_START_SCRIPT
from spotd_jobs.start import start_script
from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import InstanceState, Loss, Market
from spotd_providers.kit.text import NO_PYTHON
from spotd_providers.testkit.clock import run_virtually
from spotd_providers.testkit.serve import AsgiApp, Call, Canned, Receive, Scope, Send, serving
from spotd_providers.vastai.offers import OnDemandPrices, offers_of
from spotd_providers.vastai.plugin import VastProvider
from spotd_providers.vastai.wire import VastSettings, offer_rows
from tests.unit.providers.local.waiting import until
from tests.unit.providers.vastai.harness import VastHarness, open_harness
from tests.unit.providers.vastai.stories import cheapest, play

# The offer and the two instance rows that the API description prints, field for field.
OFFER = {
    "id": 23117845, "ask_contract_id": 23117845, "bundle_id": 611202, "machine_id": 18233, "host_id": 90112,
    "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_frac": 0.25, "gpu_ram": 24564, "gpu_total_ram": 24564,
    "compute_cap": 890, "cuda_max_good": 12.8, "driver_version": "570.124.06", "cpu_cores": 64,
    "cpu_cores_effective": 16.0, "cpu_ram": 257655, "disk_space": 612.4, "disk_bw": 3120.0, "inet_up": 812.3,
    "inet_down": 904.1, "inet_up_cost": 0.0039, "inet_down_cost": 0.0026, "storage_cost": 0.15,
    "storage_total_cost": 0.01333, "dph_base": 0.1201, "dph_total": 0.1334, "min_bid": 0.1201, "is_bid": True,
    "duration": 1209600.0, "end_date": 1796000000.0, "reliability": 0.9962, "reliability2": 0.9962,
    "verification": "verified", "hosting_type": 0, "rentable": True, "rented": False, "static_ip": True,
    "direct_port_count": 120, "public_ipaddr": "203.0.113.42", "geolocation": "Quebec, CA", "dlperf": 98.4,
    "score": 412.7,
}  # fmt: skip
FEWEST = (
    "id", "machine_id", "gpu_name", "num_gpus", "gpu_ram",
    "dph_base", "min_bid", "storage_cost", "inet_up_cost", "inet_down_cost",
)  # fmt: skip
RUNNING = {
    "id": 27311904, "label": "spotd-lab-7f3a-1", "is_bid": True, "intended_status": "running", "cur_state": "running",
    "next_state": "running", "actual_status": "running", "status_msg": "success, running pytorch/...",
    "ports": {"22/tcp": [{"HostIp": "203.0.113.42", "HostPort": "20000"}]},
}  # fmt: skip
OUTBID = {
    "id": 27311904, "label": "spotd-lab-7f3a-1", "is_bid": True, "intended_status": "stopped", "cur_state": "stopped",
    "next_state": "stopped", "actual_status": "exited", "ports": None, "min_bid": 0.171,
}  # fmt: skip


def no(status: int, **body: Any) -> Canned:
    """A refusal."""
    return Canned(status=status, body=json.dumps({"success": False, **body}).encode())


def test_the_documented_offer_is_priced_in_both_markets() -> None:
    rows = offer_rows(json.dumps({"offers": [OFFER]}).encode()).rows
    for market in Market:
        (offer,), rejected = offers_of(rows, market, VastSettings(), on_demand=OnDemandPrices())
        assert not rejected
        assert (offer.gpu, offer.gpu_price, offer.host_id, offer.region) == ("RTX_4090", 120_100, "18233", "CA")


def test_an_offer_with_the_fewest_fields_is_priced() -> None:
    rows = offer_rows(json.dumps({"offers": [{name: OFFER[name] for name in FEWEST}]}).encode()).rows
    for market in Market:
        offers, _ = offers_of(rows, market, VastSettings(), on_demand=OnDemandPrices())
        assert len(offers) == 1


@pytest.mark.parametrize(
    ("row", "state", "loss"), [(RUNNING, InstanceState.RUNNING, None), (OUTBID, InstanceState.PAUSED, Loss.OUTBID)]
)
@pytest.mark.parametrize("extra", [{}, {"success": True, "next_token": None, "total_instances": 1}])
def test_the_documented_instances_are_understood_in_a_bare_page(
    tmp_path: Path, row: dict[str, Any], state: InstanceState, loss: Loss | None, extra: dict[str, Any]
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        h.faults.answer(Call.LIST, Canned(status=200, body=json.dumps({"instances": [row], **extra}).encode()))
        listing = await provider.instances()
        assert listing.complete
        assert [(i.key, i.state, i.loss) for i in listing.instances] == [("spotd-lab-7f3a-1", state, loss)]

    play(tmp_path, story)


@pytest.mark.parametrize("status", [200, 400, 403, 404, 429])
@pytest.mark.parametrize(
    ("code", "kind"), [("spend_rate_limit", QuotaExceeded), ("insufficient_credit", NoBalance)], ids=["spend", "credit"]
)
def test_a_purchase_refused_for_money_means_that_under_any_status(
    tmp_path: Path, status: int, code: str, kind: type[ProviderError]
) -> None:
    if status == 429 and kind is NoBalance:
        pytest.skip("a 429 is about pace")

    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, no(status, error=code, msg=f"{code}: wait or add credit"))
        with pytest.raises(kind):
            await provider.launch(h.request(offer))

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": "invalid_args", "msg": "error 403/3586: hosts may rent only their own offer"}, RequestRejected),
        ({"error": "account_unverified", "msg": "error 403/3601: verify your email first"}, RequestRejected),
        ({"error": "permission_denied", "msg": "this key lacks instance_write"}, AuthFailed),
        ({"msg": "This action requires login."}, AuthFailed),
        ({}, AuthFailed),
    ],
)
def test_a_403_on_a_purchase_is_the_key_only_where_its_words_are_about_the_key(
    tmp_path: Path, body: dict[str, Any], kind: type[ProviderError]
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.LAUNCH, no(403, **body))
        with pytest.raises(kind):
            await provider.launch(h.request(offer))
        h.faults.answer(Call.LIST, no(403, **body))
        with pytest.raises(AuthFailed):
            await provider.instances()

    play(tmp_path, story)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(no(200, error="no_such_instance", msg="x"), id="200"),
        pytest.param(no(400, error="no_such_instance", msg="x"), id="400"),
        pytest.param(no(404, error="no_such_instance"), id="404"),
        pytest.param(no(410, error="no_such_instance"), id="410"),
        pytest.param(no(404, error="invalid_args", msg="error 404/3101: no_such_instance 7"), id="in its message only"),
        pytest.param(Canned(status=204), id="no content"),
    ],
)
def test_destroying_what_is_gone_is_done_however_it_is_told(tmp_path: Path, answer: Canned) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        h.faults.answer(Call.TERMINATE, answer)
        await provider.terminate(launched.instance.ref)
        assert len(h.requests(Call.TERMINATE)) == 1

    play(tmp_path, story)


@pytest.mark.parametrize("answer", [no(404, error="route_unknown"), Canned(status=200, body=b"<html>")])
def test_a_destruction_that_is_not_confirmed_is_not_taken_for_one(tmp_path: Path, answer: Canned) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        h.faults.answer(Call.TERMINATE, answer, times=9)
        with pytest.raises(Unavailable):
            await provider.terminate(launched.instance.ref)

    play(tmp_path, story)


def test_the_last_digit_of_a_float_is_no_rise_in_price(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider, Market.ON_DEMAND)
        price = offer.gpu_price / 1_000_000
        for number in range(27_000_000, 27_000_400):
            h.cloud.quirks.edit_instance[number] = {"dph_base": price + 5e-17 + price * 2e-16}
        launched = await provider.launch(h.request(offer))
        assert launched.instance.state is InstanceState.PENDING
        assert h.live(launched.instance.key)

    play(tmp_path, story)


@pytest.mark.parametrize("start", [None, -3600.0, 86400.0], ids=["unsaid", "an hour behind", "a day ahead"])
def test_a_new_machine_that_waits_for_its_gpu_is_not_outbid_whatever_vasts_clock_says(
    tmp_path: Path, start: float | None
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider)))
        words = {"actual_status": None, "cur_state": "stopped", "next_state": "stopped", "intended_status": "running"}
        told = None if start is None else h.clock.now().timestamp() + start
        h.cloud.quirks.edit_instance[int(launched.instance.ref.instance_id)] = {**words, "start_date": told}
        (seen,) = await provider.find(launched.instance.key)
        assert (seen.state, seen.loss) == (InstanceState.PENDING, None)
        if start is None or start < 0:
            await h.advance(timedelta(minutes=3))
            (seen,) = await provider.find(launched.instance.key)
            assert (seen.state, seen.loss) == (InstanceState.PAUSED, Loss.OUTBID)

    play(tmp_path, story)


def below(prefix: str, app: AsgiApp) -> AsgiApp:
    """The app as a proxy serves it: below a folder."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(prefix + "/"), scope["path"]
        await app({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    return served


@pytest.mark.parametrize("written", ["/behind/a/proxy", "/behind/a/proxy/", "/behind/a/proxy/api/v0/"])
def test_the_api_may_live_below_a_path(tmp_path: Path, written: str) -> None:
    with open_harness(tmp_path) as h, serving(below("/behind/a/proxy", h.faults)) as proxy:

        async def main() -> None:
            h.base_url = proxy.url + written
            async with h.opened() as provider:
                assert isinstance(provider, VastProvider)
                launched = await provider.launch(h.request(await cheapest(h, provider)))
                assert (await provider.instances()).complete
                await provider.terminate(launched.instance.ref)
                assert not h.live(launched.instance.key)

        run_virtually(main)


def test_an_image_without_python_is_named_as_such_and_asked_about_once(tmp_path: Path) -> None:
    # The real script, that finds nothing in any of the places it looks.
    script = re.sub(r"(?m)^for p in [^;]*;", "for p in no-such-python;", start_script("file:///grant.json"))

    async def story(h: VastHarness, provider: VastProvider) -> None:
        launched = await provider.launch(h.request(await cheapest(h, provider), start_script=script))
        await h.settle()
        h.cloud.advance()
        until(lambda: not h.cloud.machines.alive(launched.instance.ref.instance_id), what="the end of the script")
        for _ in range(2):
            (seen,) = await provider.find(launched.instance.key)
            assert (seen.state, seen.loss, seen.detail) == (InstanceState.PAUSED, Loss.IMAGE_ERROR, NO_PYTHON)
        assert len([r for r in h.requests() if "request_logs" in r.path]) == 1

    play(tmp_path, story)


def test_the_provider_knows_the_start_scripts_own_words() -> None:
    assert NO_PYTHON == SAID_BY_THE_START_SCRIPT
