"""OpenStack does what every provider must do, and what it must not forget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss, Market, Offer
from spotd_providers.kit.rest import Meaning
from spotd_providers.kit.shapes import decode, row_or_none
from spotd_providers.openstack.plugin import OpenstackProvider
from spotd_providers.openstack.wire import (
    DIALECT,
    OpenstackSettings,
    ServerRow,
    as_instance,
    flavors_of,
    newest,
    offers_of,
    problem_of,
)
from spotd_providers.testkit.serve import Call
from spotd_providers.testkit.suite import Behaviour, run
from tests.fakes.openstack import ADMIN_PASSWORD, OpenstackQuirks, refusal
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.damaged import ALL, SLICE, judge_damaged
from tests.unit.providers.openstack.harness import PRICED, OpenstackHarness, a_server, an_offer, open_harness, play


@pytest.mark.parametrize("behaviour", stories())
def test_openstack_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


def test_a_launch_marks_its_server_twice_and_keeps_secrets_out_of_it(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        (server,) = h.cloud.rented.values()
        assert server.name == server.metadata["spotd-key"] == made.key
        assert server.metadata["spotd-install"] == "lab"
        assert (server.body["networks"], server.body["imageRef"]) == ("auto", h.cloud.image("Ubuntu 24.04").image_id)
        assert server.script is not None
        assert not any(secret in server.script for secret in (h.cloud.secret, *h.cloud.tokens))
        assert ADMIN_PASSWORD not in str(h.log)

    play(tmp_path, story)


def test_a_second_launch_under_one_key_makes_no_second_server(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        request = h.request(await an_offer(h, provider))
        h.cloud.quirks.fail_after_launch = refusal(500, "Unexpected API Error.")
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        again = (await provider.launch(request)).instance
        assert [one.machine_id for one in h.live()] == [again.ref.instance_id]
        assert h.launch_calls() == 1

    play(tmp_path, story)


@pytest.mark.parametrize("is_named", [True, False], ids=["name", "metadata"])
def test_a_server_with_one_of_both_marks_is_neither_ours_nor_passed_over(is_named: bool, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        key = h.key()
        theirs = h.cloud.add_foreign(key if is_named else "gpu1", {} if is_named else {"spotd-key": key})
        listing = await provider.instances()
        assert not listing.complete
        assert listing.instances == ()
        with pytest.raises(Unavailable):
            await provider.find(key)
        ref = (await a_server(h, provider)).ref
        with pytest.raises(RequestRejected, match="name and metadata"):
            await provider.terminate(type(ref)(provider=ref.provider, instance_id=theirs.machine_id))  # type: ignore[arg-type] # a plain text is one
        assert theirs.exists
        if is_named:
            with pytest.raises(Unavailable, match="does not say"):
                await provider.launch(h.request(await an_offer(h, provider), key))

    play(tmp_path, story)


def test_a_server_without_a_host_is_ended_and_is_no_capacity(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = await an_offer(h, provider)
        h.cloud.sell_out("l4-90")
        made = (await provider.launch(h.request(offer))).instance
        await h.advance(timedelta(seconds=10))
        (shown,) = (await provider.instances()).instances
        assert (shown.state, shown.loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        assert "No valid host" in shown.detail
        await provider.terminate(made.ref)
        h.cloud.quirks.schedules = timedelta(0)
        with pytest.raises(NoCapacity):
            await provider.launch(h.request(offer))
        await h.settle()
        assert h.live() == []

    play(tmp_path, story)


def test_a_volume_that_a_server_boots_from_gets_its_key_and_is_deleted_when_it_is_left(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = await an_offer(h, provider, "hm.v100s")
        assert (offer.storage_price, offer.disk_gb_max) == (100_000, None)
        made = await a_server(h, provider, "hm.v100s")
        await provider.instances()
        (volume,) = h.cloud.volumes.values()
        assert (volume.name, volume.size) == (made.key, 20)
        await provider.terminate(made.ref)
        await h.settle()
        assert len(h.cloud.volumes) == 1
        theirs = type(volume)(volume_id="v-9", size=5, made_at=h.clock.now(), name="data", status="available")
        h.cloud.volumes["v-9"] = theirs
        for _ in range(3):
            await provider.instances()
            await h.advance(timedelta(minutes=11))
        assert list(h.cloud.volumes.values()) == [theirs]

    play(tmp_path, story, OpenstackQuirks(leaks_volumes=True))


def test_a_volume_with_a_name_keeps_it(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        await a_server(h, provider, "hm.v100s")
        assert h.live()
        (volume,) = h.cloud.volumes.values()
        volume.name = "their data"
        await provider.instances()
        assert volume.name == "their data"

    play(tmp_path, story)


def test_a_locked_server_cannot_be_ended_and_is_said_to_be_locked(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        h.cloud.lock_server(made.ref.instance_id)
        with pytest.raises(Unavailable, match="is locked"):
            await provider.terminate(made.ref)

    play(tmp_path, story)


@pytest.mark.parametrize("quirks", [{"bare_404": True}, {"project_in_url": True}], ids=["edge", "project"])
def test_a_404_that_is_not_of_the_server_proves_no_end(quirks: dict[str, Any], tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        if "bare_404" in quirks:
            h.cloud.quirks.bare_404 = True
            with pytest.raises(Unavailable):
                await provider.terminate(made.ref)
            with pytest.raises(Unavailable):
                await provider.find(made.key)
        else:
            await provider.terminate(made.ref)
            await h.settle()
            assert h.live() == []

    play(tmp_path, story, OpenstackQuirks(project_in_url="project_in_url" in quirks))


@pytest.mark.parametrize("newest_known", ["2.1", "2.36", "2.60", "2.96"])
def test_the_newest_version_that_both_know_is_spoken(newest_known: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        page = await provider.offers(h.query())
        assert ("gpu.a100.spot" in {one.offer_id for one in page.offers}) is (newest_known == "2.96")
        made = await a_server(h, provider)
        assert (made.market, made.price) == (Market.ON_DEMAND, 750_000)
        (server,) = h.cloud.rented.values()
        assert ("networks" in server.body) is (newest_known not in ("2.1", "2.36"))

    play(tmp_path, story, OpenstackQuirks(microversion_max=newest_known))


@pytest.mark.parametrize(
    "says", [None, "soon", "2020-01-01T00:00:00Z", "9999-01-01T00:00:00Z", 5, "2026-03-02T12:00:00"]
)
def test_tokens_are_renewed_before_they_run_out_and_when_they_are_refused(says: Any, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        for _ in range(4):
            assert (await provider.instances()).complete
            await h.advance(timedelta(minutes=7))
        h.cloud.revoke_tokens()
        assert (await provider.instances()).complete
        refused = [one for one in h.requests() if one.path.endswith("/auth/tokens")]
        assert len(refused) <= 8

    play(tmp_path, story, OpenstackQuirks(token_lives=timedelta(minutes=10), expires_says=says))


def test_a_token_is_asked_for_once_while_it_holds(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        for _ in range(5):
            await provider.instances()
        assert sum(one.path.endswith("/auth/tokens") for one in h.requests()) == 1

    play(tmp_path, story)


def test_a_password_opens_the_project_too(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.password = h.cloud.secret
        assert await provider.account() == f"{h.cloud.project} in GRA11"

    with open_harness(tmp_path) as h:
        more: dict[str, Any] = {"credential_id": "", "username": h.cloud.username, "project_id": h.cloud.project}
    play(tmp_path / "again", story, **more)


@pytest.mark.parametrize("region", ["", "MARS1"])
def test_a_region_that_is_not_there_is_said_with_those_that_are(region: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        with pytest.raises(Unavailable, match="region"):
            await provider.offers(h.query())
        assert "GRA11" in str(await provider.check())

    play(tmp_path, story, region=region)


def test_a_flavour_without_a_price_is_not_offered_and_the_doctor_says_so(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        reasons = {str(one.offer_id): one.reason for one in (await provider.offers(h.query())).rejected}
        assert set(reasons) == {"t2-45", "secret.gpu", "win-l4-90"}
        assert reasons["t2-45"].startswith("no price")
        lines = {one.name: one for one in await provider.check()}
        assert all(line.ok for line in lines.values()), lines
        assert lines["flavors"].detail == "6 have a price; 3 without one are not offered"
        assert lines["quota"].detail == "0 of 50 servers are there"

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("more", "line", "text"),
    [
        ({"flavors": []}, "flavors", "no flavour has a price"),
        ({"flavors": [{"name": "h900", "price": 1}]}, "flavors", "no flavour h900"),
        ({"flavors": [{"name": "secret.gpu", "price": 1}]}, "flavors", "does not say which GPUs"),
        ({"image": "Windows"}, "image", "no active image"),
        ({"network": "Lost-Net"}, "network", "no network"),
    ],
)
def test_the_doctor_names_a_wrong_setting(more: dict[str, Any], line: str, text: str, tmp_path: Path) -> None:
    async def story(_: OpenstackHarness, provider: OpenstackProvider) -> None:
        (found,) = [one for one in await provider.check() if one.name == line]
        assert not found.ok
        assert text in found.detail

    play(tmp_path, story, **more)


@pytest.mark.parametrize("newest_known", ["2.1", "2.96"])
def test_a_named_network_and_a_key_pair_are_in_the_launch(newest_known: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        (server,) = h.cloud.rented.values()
        assert (server.body["networks"], server.body["key_name"]) == (
            [{"uuid": h.cloud.network("Ext-Net").network_id}],
            "laptop",
        )
        address = await provider.shell(made.ref)
        assert (address.host, address.user) == ("198.51.100.9", "ubuntu")

    play(tmp_path, story, OpenstackQuirks(microversion_max=newest_known), network="Ext-Net", ssh_key="laptop")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (403, "Quota exceeded for cores: Requested 30, but already used 90 of 100 cores", QuotaExceeded),
        (403, "Policy doesn't allow os_compute_api:servers:create to be performed.", AuthFailed),
        (400, "Invalid key_name provided.", RequestRejected),
        (409, "Multiple possible networks found, use a Network ID to be more specific.", RequestRejected),
        (403, "Only volume-backed servers are allowed for flavors with zero disk.", RequestRejected),
        (403, "It is not allowed to create an interface on external network 7", RequestRejected),
        (404, "Flavor f-0001 could not be found.", OfferGone),
        (400, "Flavor f-0001 could not be found.", OfferGone),
        (500, "Unexpected API Error.", OutcomeUnknown),
    ],
)
def test_refusals_by_cause(status: int, text: str, kind: type[ProviderError], tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = await an_offer(h, provider)
        h.refuse_launches(refusal(status, text))
        with pytest.raises(kind):
            await provider.launch(h.request(offer))
        assert h.live() == []
        assert len(h.requests(Call.LAUNCH)) == 1

    play(tmp_path, story)


def test_an_overrun_limit_and_a_used_up_quota_differ() -> None:
    def meaning(status: int, text: str, code: str = "overLimit") -> Meaning:
        words = problem_of({code: {"code": status, "message": text}})
        return DIALECT.meaning(status, words, is_purchase=True)

    assert meaning(413, "This request was rate-limited.") is Meaning.TOO_OFTEN
    assert meaning(413, "VolumeSizeExceedsAvailableQuota: exceeds quota") is Meaning.QUOTA
    assert meaning(404, "The resource could not be found.", "itemNotFound") is Meaning.REJECTED
    assert meaning(404, "Instance 7 could not be found.", "itemNotFound") is Meaning.ABSENT
    assert meaning(404, "Not Found", "error") is Meaning.REJECTED  # a gateway's, which knows of no server


def test_a_volume_that_does_not_go_with_its_server_is_neither_named_nor_deleted(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "hm.v100s")
        (server,) = h.cloud.rented.values()
        server.body["block_device_mapping_v2"][0]["delete_on_termination"] = False  # as its owner may set it
        await provider.instances()
        await provider.terminate(made.ref)
        await h.settle()
        for _ in range(3):
            await h.advance(timedelta(minutes=11))
            await provider.instances()
        assert [one.name for one in h.cloud.volumes.values()] == [""]

    play(tmp_path, story)


def test_the_list_of_servers_asks_for_no_limit_which_would_hide_those_of_a_cell_that_is_down(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        asked: list[str] = []
        real = provider._client.send

        async def send(method: str, path: str, **options: Any) -> Any:
            asked.append(path)
            return await real(method, path, **options)

        provider._client.send = send  # type: ignore[method-assign] # notes what is asked and asks it
        await provider.instances()
        lists = [path for path in asked if path.startswith("/compute/servers/detail")]
        assert [path for path in lists if "limit=" not in path and "name=" not in path] == lists != []

    play(tmp_path, story)


def test_the_list_is_read_page_by_page(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        keys = [h.key() for _ in range(7)]
        h.add_machines(keys)
        listing = await provider.instances()
        assert (listing.complete, {one.key for one in listing.instances}) == (True, set(keys))

    play(tmp_path, story, OpenstackQuirks(page_rows=2))


@pytest.mark.parametrize("market", list(Market))
def test_a_server_that_is_gone_was_preempted_if_its_flavour_is_preemptible(market: Market, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "gpu.a100.spot" if market is Market.SPOT else "l4-90")
        await provider.instances()
        h.cloud.preempt(made.ref.instance_id)
        (shown,) = (await provider.instances()).instances
        assert (shown.state, shown.loss) == (InstanceState.GONE, Loss.PREEMPTED if market is Market.SPOT else None)

    play(tmp_path, story)


# Documented answers, and damaged ones: no crash, no price that the config does not state, no server lost.

FLAVORS: list[dict[str, Any]] = [
    {"id": "f-1", "name": "h100-760", "vcpus": 60, "ram": 760_000, "disk": 400, "OS-FLV-DISABLED:disabled": False,
     "extra_specs": {}},
    {"id": "f-2", "name": "gpu.big", "vcpus": 60, "ram": 760_000, "disk": 0, "extra_specs": {
        "pci_passthrough:alias": "l40s:4", "hw:cpu_policy": "dedicated"}},
    {"id": "f-3", "name": "vgpu.small", "vcpus": 4, "ram": 8_000, "disk": 20, "extra_specs": {"resources:VGPU": "1"}},
    {"id": "f-4", "name": "b3-8", "vcpus": 2, "ram": 8_000, "disk": 50},
]  # fmt: skip
SETTINGS = OpenstackSettings(
    flavors=[
        {"name": "h100-760", "price": "5.60"},
        {"name": "gpu.big", "price": 4, "market": "spot"},
        {"name": "vgpu.small", "price": "0.20"},
        {"name": "b3-8", "price": 0.05, "gpus": 0},
    ],
    disk_price=0.1,
)
SERVER: dict[str, Any] = {
    "id": "6c78851c-8471-4ec9-b812-4767d3a9fc1b", "name": "spotd-lab-j0b-1", "status": "ACTIVE",
    "OS-EXT-STS:task_state": None, "created": "2026-03-02T12:00:00Z", "flavor": {"original_name": "gpu.big"},
    "OS-SRV-USG:launched_at": "2026-03-02T12:03:00.000000", "metadata": {"spotd-key": "spotd-lab-j0b-1"},
    "addresses": {"Ext-Net": [{"addr": "203.0.113.9", "version": 4, "OS-EXT-IPS:type": "fixed"}]},
    "accessIPv4": "", "fault": {"code": 500, "message": "No valid host was found."}, "image": "",
    "os-extended-volumes:volumes_attached": [{"id": "v-1"}],
}  # fmt: skip


def _offers(rows: Sequence[Any]) -> list[Offer]:
    return offers_of(flavors_of(rows).rows, SETTINGS, "GRA11")[0]


def test_gpus_are_read_from_names_aliases_and_the_config() -> None:
    found = {str(one.offer_id): (one.gpu, one.gpu_count, one.gpu_price) for one in _offers(FLAVORS)}
    assert found == {
        "h100-760": ("H100_PCIE", 2, 5_600_000),
        "gpu.big": ("L40S", 4, 4_000_000),
        "b3-8": ("CPU", 0, 50_000),
    }


def test_a_size_that_is_no_multiple_of_its_family_is_not_guessed() -> None:
    page = flavors_of([{**FLAVORS[0], "name": "h100-900"}]).rows
    settings = OpenstackSettings(flavors=[{"name": "h100-900", "price": 1}])
    offers, (odd,) = offers_of(page, settings, "GRA11")
    assert offers == []
    assert "does not say which GPUs" in odd.reason


def judge(flavors: Any, raw: Any) -> None:
    read = decode(json.dumps(flavors).encode(), who="OpenStack")
    prices = {one.name: one.price for one in SETTINGS.flavors}
    for offer in _offers(read if isinstance(read, list) else []):
        assert type(offer.gpu_price) is int
        assert offer.gpu_price == prices[str(offer.offer_id)]
        assert 0 <= offer.gpu_count <= 99
    read = decode(json.dumps(raw).encode(), who="OpenStack")
    row = row_or_none(ServerRow, read)
    newest([read])
    if isinstance(read, dict) and read.get("id") == SERVER["id"]:
        assert row is not None
        assert row.ip is None or isinstance(row.ip, str)
        shown = as_instance(row, AttemptKey("spotd-lab-j0b-1"), SETTINGS.flavor(row.flavor_name or ""))
        assert shown.price in (None, *prices.values())
        assert shown.state is not InstanceState.GONE or read["status"].strip().lower() in ("deleted", "soft_deleted")


def test_a_damaged_answer_never_becomes_a_false_price() -> None:
    judge_damaged(judge, FLAVORS, SERVER, count=SLICE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_damaged_answers_never_become_a_false_price() -> None:
    judge_damaged(judge, FLAVORS, SERVER, count=ALL)


def test_settings_say_what_is_missing() -> None:
    assert OpenstackSettings().missing() == [
        "base_url",
        "credential_id (or username and project_id)",
        "project_id",
        "image",
    ]
    with pytest.raises(ValueError, match="each flavour once"):
        OpenstackSettings(flavors=[*PRICED, PRICED[0]])
