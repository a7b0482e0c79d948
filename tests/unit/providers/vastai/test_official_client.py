"""The official `vastai` client judges the fake: search, bid, list, rebid, logs, destroy, as its users do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from spotd_providers.contract.values import AttemptKey, MicroUsdPerHour
from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import RecordedRequest, serving
from spotd_providers.vastai.plugin import VastProvider
from tests.fakes.official_clients import CannotInstall
from tests.fakes.vastai import Phase, VastApi, VastCloud, some_asks, ticking
from tests.unit.providers.local.waiting import until
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.official import OfficialClient, installed_client
from tests.unit.providers.vastai.stories import cheapest, play

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy]  # 41 packages, installed at the first run

LABEL = "spotd-lab-7f3a-1"


@pytest.fixture(scope="session")
def command() -> Path:
    try:
        return installed_client()
    except CannotInstall as exc:
        pytest.skip(str(exc))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[VastCloud]:
    # A second is a minute here, so that the client's own pace meets no threshold.
    cloud = VastCloud(tmp_path / "cloud", clock=ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0))
    cloud.stock(*some_asks())
    yield cloud
    cloud.shut_down()


@pytest.fixture
def client(cloud: VastCloud, command: Path, tmp_path: Path) -> Iterator[OfficialClient]:
    with (
        serving(VastApi(cloud)) as served,
        ticking(cloud),
        OfficialClient(command, served.url, cloud.api_key, tmp_path / "home") as client,
    ):
        yield client


def test_the_official_client_searches_bids_lists_rebids_reads_and_destroys(
    cloud: VastCloud, client: OfficialClient
) -> None:
    query = "gpu_name=RTX_3090 num_gpus=1 geolocation in [US,CA] reliability>0.9 cuda_vers>=12.4 gpu_ram>=20"
    offers = client.tells("search", "offers", "-i", "--storage", "64", "-o", "dph_total", query)
    # Search rows say false in both markets; only the search that was asked for tells which one this is.
    assert {(o["gpu_name"], o["num_gpus"], o["is_bid"]) for o in offers} == {("RTX 3090", 1, False)}
    assert [o["dph_total"] for o in offers] == sorted(o["dph_total"] for o in offers)
    offer = offers[0]
    price = round(offer["min_bid"] * 1.1, 6)

    created = client.tells(
        "create", "instance", str(offer["id"]), "--image", "debian:12", "--disk", "20", "--bid_price", str(price),
        "--label", LABEL, "--cancel-unavail", "--env", "-e SPOTD=1 -p 8080:8080", "--entrypoint", "/bin/sh",
        "--args", "-c", "echo $SPOTD from container $CONTAINER_ID; sleep 600",
    )  # fmt: skip
    assert created["success"] is True
    contract = cloud.contracts[created["new_contract"]]
    assert (contract.is_bid, contract.label, contract.price) == (True, LABEL, round(price * 1_000_000))
    until(lambda: contract.phase is Phase.RUNNING, what="the machine to run")

    (listed,) = client.tells("show", "instances")
    assert (listed["id"], listed["label"], listed["actual_status"]) == (contract.contract_id, LABEL, "running")
    assert listed["extra_env"]["SPOTD"] == "1"
    assert LABEL in client.says("show", "instances", "--label", LABEL, "--cols", "id,label,status")
    assert client.tells("show", "instance", str(contract.contract_id))["id"] == contract.contract_id

    assert "price changed" in client.says("change", "bid", str(contract.contract_id), "--price", "0.25")
    assert contract.price == 250_000

    until(lambda: cloud.machines.console(contract.machine, lines=9), what="the machine's first words")
    assert f"1 from container {contract.contract_id}" in client.says("logs", str(contract.contract_id), "--tail", "50")

    assert "destroying" in client.says("destroy", "instance", str(contract.contract_id), "-y")
    assert contract.phase is Phase.GONE
    assert not cloud.machines.alive(contract.machine)
    assert client.tells("show", "instances") == []


def test_a_search_by_bid_does_not_make_the_official_clients_purchase_a_bid(
    cloud: VastCloud, client: OfficialClient
) -> None:
    (offer, *_) = client.tells("search", "offers", "-i")
    created = client.tells("create", "instance", str(offer["id"]), "--image", "debian:12", "--ssh", "--direct")
    contract = cloud.contracts[created["new_contract"]]
    assert not contract.is_bid
    assert contract.runtype == "ssh_direc ssh_proxy"


def test_the_official_client_understands_every_no(cloud: VastCloud, client: OfficialClient) -> None:
    assert "no_such_ask" in client.fails("create", "instance", "1", "--image", "debian:12")
    ask_id = str(next(iter(cloud.asks)))
    assert "below" in client.fails("create", "instance", ask_id, "--image", "debian:12", "--bid_price", "0.01")
    (left,) = client.tells("show", "instances")
    assert (left["intended_status"], left["is_bid"]) == ("stopped", True)
    assert "no_such_instance" in client.fails("destroy", "instance", "1", "-y")
    cloud.api_key = "another"
    assert "Invalid user key" in client.fails("show", "instances")


def test_the_official_client_takes_an_answer_under_its_exact_content_type_only(
    cloud: VastCloud, client: OfficialClient
) -> None:
    cloud.quirks.content_type = "application/json; charset=utf-8"
    assert "invalid return Content-Type" in client.says("search", "offers")


def test_more_machines_than_a_page_are_all_listed(cloud: VastCloud, client: OfficialClient) -> None:
    for number in range(60):
        cloud.add_foreign(f"machine-{number}")
    assert len(client.tells("show", "instances")) == 60


def by_purpose(requests: Iterable[RecordedRequest]) -> dict[str, dict[str, Any]]:
    """The last request of each kind: its parameters and the fields of its body, without those that say nothing."""
    found = {}
    for request in requests:
        parameters = {name: _decoded(value) for name, value in parse_qsl(request.query, keep_blank_values=True)}
        fields = json.loads(request.body) if request.body else {}
        told = {name: value for name, value in {**parameters, **fields}.items() if value not in (None, False, {})}
        found[f"{request.method} {re.sub('[0-9]{3,}', 'N', request.path)}"] = told
    return found


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.slow
def test_the_provider_sends_what_the_official_client_sends(cloud: VastCloud, command: Path, tmp_path: Path) -> None:
    """Where both do the same thing, they say the same; a purchase has the very same fields."""
    script = "echo it's me; sleep 600"
    ours: dict[str, dict[str, Any]] = {}

    async def story(h: VastHarness, provider: VastProvider) -> None:
        offer = await cheapest(h, provider)
        request = h.request(
            offer, AttemptKey(LABEL), price_max=MicroUsdPerHour(500_000), image="debian:12", start_script=script
        )
        made = (await provider.launch(request)).instance
        await h.settle()
        await provider.find(made.key)
        await provider.change_bid(made.ref, MicroUsdPerHour(250_000))
        await provider.logs(made.ref, lines=50)
        await provider.terminate(made.ref)
        ours.update(by_purpose(h.requests()))

    play(tmp_path / "ours", story)
    with (
        serving(VastApi(cloud)) as served,
        ticking(cloud),
        OfficialClient(command, served.url, cloud.api_key, tmp_path / "home") as official,
    ):
        (ask, *_) = official.tells("search", "offers", "-i", "--storage", "20", "-o", "dph_total", "--limit", "3000")
        made = official.tells(
            "create", "instance", str(ask["id"]), "--image", "debian:12", "--disk", "20", "--bid_price", "0.5",
            "--label", LABEL, "--cancel-unavail", "--user", "root", "--entrypoint", "/bin/sh", "--args", "-c", script,
        )["new_contract"]  # fmt: skip
        official.tells("show", "instances")
        official.tells("show", "instance", str(made))
        official.says("change", "bid", str(made), "--price", "0.25")
        until(lambda: cloud.machines.console(str(made), lines=9), what="the machine's first words")
        official.says("logs", str(made), "--tail", "50")
        official.says("destroy", "instance", str(made), "-y")
        theirs = by_purpose(served.requests)
    kinds = set(ours) & set(theirs)
    assert {
        "POST /api/v0/bundles/",
        "PUT /api/v0/asks/N/",
        "GET /api/v1/instances/",
        "GET /api/v0/instances/N/",
        "PUT /api/v0/instances/bid_price/N/",
        "PUT /api/v0/instances/request_logs/N/",
        "DELETE /api/v0/instances/N/",
    } <= kinds
    for kind in kinds:
        shared = set(ours[kind]) & set(theirs[kind]) - {"select_filters"}
        assert {name: ours[kind][name] for name in shared} == {name: theirs[kind][name] for name in shared}, kind
        print(kind, "only ours:", set(ours[kind]) - shared, "only theirs:", set(theirs[kind]) - shared)
    assert set(ours["PUT /api/v0/asks/N/"]) == set(theirs["PUT /api/v0/asks/N/"])
