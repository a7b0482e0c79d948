"""The way into an OpenStack cloud: its catalogue, the project of its tokens, and the version that its Nova speaks."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from spotd_providers.contract.errors import AuthFailed, ProviderError, Unavailable
from spotd_providers.contract.values import InstanceState
from spotd_providers.kit.http import Http
from spotd_providers.openstack.keys import Keystone
from spotd_providers.openstack.plugin import OpenstackProvider
from spotd_providers.openstack.wire import OpenstackSettings
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call, Canned
from tests.cases import every
from tests.fakes.openstack import OpenstackQuirks
from tests.unit.providers.openstack.harness import OpenstackHarness, play

UNSAFE = [
    "http://volume.example/v3",
    "https://volume.example:99999/v3",
    "https://volume.example:x/v3",
    "https://vol ume.example/v3",
    "https://me:pw@volume.example/v3",
    "https://[volume/v3",
    "https://volume.example/v3#part",
    "ftp://volume.example",
]


def _catalog(url: str, place: str = "A") -> list[Any]:
    return [{"type": "compute", "endpoints": [{"interface": "public", "region_id": place, "url": url}]}]


def _keystone(base_url: str = "https://auth.example") -> Keystone:
    return Keystone(cast(Http, None), OpenstackSettings(base_url=base_url), "secret", FakeClock())


def test_a_region_once_known_is_not_left_for_another_one() -> None:
    keys = _keystone()
    urls, unsafe = keys._endpoints(_catalog("https://a.example/v2.1/"))
    assert (urls, unsafe) == ({"compute": "https://a.example/v2.1"}, frozenset())
    with pytest.raises(Unavailable, match="region"):
        keys._endpoints(_catalog("https://b.example/v2.1", "B"))
    assert keys.region == "A"


@every(("base_url", "is_safe"), [("https://auth.example", False), ("http://127.0.0.1:9", True)])
def test_a_token_goes_in_the_clear_to_this_computer_only_where_keystone_is_on_it(base_url: str, is_safe: bool) -> None:
    urls, unsafe = _keystone(base_url)._endpoints(_catalog("http://127.0.0.1:6379"))
    assert ("compute" in urls, "compute" in unsafe) == (is_safe, not is_safe)


@pytest.mark.parametrize("address", UNSAFE)
def test_a_service_at_an_address_that_is_not_safe_is_left_out_and_the_others_go_on(
    address: str, tmp_path: Path
) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offers = {one.offer_id: one for one in (await provider.offers(h.query())).offers}
        made = (await provider.launch(h.request(offers["hm.v100s"]))).instance  # type: ignore[index] # a plain text
        await h.settle()
        assert [one.key for one in (await provider.instances()).instances] == [made.key]
        assert "an address for volume that is not safe" in str(h.log)
        await provider.terminate(made.ref)
        await h.settle()
        assert h.live() == []

    play(tmp_path, story, OpenstackQuirks(addresses={"block-storage": address}))


@pytest.mark.parametrize("address", ["https://999.1.1.1/image", "https://xn--.example/image", f"https://{'a' * 70}.b/"])
def test_an_address_that_no_client_can_call_is_unavailable(address: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = (await provider.offers(h.query())).offers[0]
        with pytest.raises(Unavailable):
            await provider.launch(h.request(offer))

    play(tmp_path, story, OpenstackQuirks(addresses={"image": address}))


def test_an_address_that_ends_with_the_version_has_it_once(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        root = f"{h.served.url}/GRA11"
        h.cloud.quirks.addresses = {"image": f"{root}/image/v2/", "network": f"{root}/network/v2.0"}
        await provider.launch(h.request((await provider.offers(h.query())).offers[0]))
        assert len(h.live()) == 1

    play(tmp_path, story, network="Ext-Net")


@pytest.mark.parametrize("is_named", [True, False])
def test_a_later_token_of_another_project_proves_nothing(is_named: bool, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = (await provider.launch(h.request((await provider.offers(h.query())).offers[0]))).instance
        await h.settle()
        ours, account = h.cloud.project, await provider.account()
        h.cloud.project = "0" * 32 if is_named else None  # type: ignore[assignment] # a token without a project
        h.cloud.revoke_tokens()
        with pytest.raises(Unavailable, match="another project"):
            await provider.instances()
        h.cloud.project = ours
        (shown,) = (await provider.instances()).instances
        assert (shown.key, shown.state) == (made.key, InstanceState.RUNNING)
        assert await provider.account() == account

    play(tmp_path, story)


NO_VERSION = [
    (200, {"version": {"id": "v2.1", "version": 2.96}}),
    (200, {"version": {"version": "2.96"}}),
    (200, {"version": {"id": "v2.1"}}),
    (200, "<html>"),
    (200, {}),
    (300, {"choices": []}),
    (404, {"itemNotFound": {"code": 404, "message": "The resource could not be found."}}),
    (403, {"error": {"code": 403, "message": "Forbidden"}}),
    (503, {}),
]


@pytest.mark.parametrize("said", NO_VERSION)
def test_an_answer_without_a_version_is_none_and_does_not_replace_a_known_one(
    said: tuple[int, Any], tmp_path: Path
) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.quirks.version_says = said
        with pytest.raises(Unavailable, match="version"):
            await provider.instances()
        h.cloud.quirks.version_says = None
        await provider.instances()
        assert await provider._client.version() == (2, 74)
        h.cloud.quirks.version_says = said
        await h.advance(timedelta(hours=7))
        await provider.instances()
        assert await provider._client.version() == (2, 74)

    play(tmp_path, story)


def test_the_first_nova_states_an_empty_version(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.quirks.version_says = (200, {"version": {"id": "v2.0", "version": "", "min_version": ""}})
        await provider.instances()
        assert await provider._client.version() == (2, 1)

    play(tmp_path, story, OpenstackQuirks(microversion_max="2.1"))


def test_a_nova_that_no_longer_knows_the_version_is_asked_for_its_own(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        offer = (await provider.offers(h.query())).offers[0]
        h.cloud.quirks.microversion_max = "2.60"  # as where a new release is taken back
        with pytest.raises(Unavailable):
            await provider.instances()
        assert (await provider.instances()).complete
        h.cloud.quirks.microversion_max = "2.50"
        provider._flavor_names.clear()
        with pytest.raises(Unavailable):
            await provider.launch(h.request(offer))
        await provider.launch(h.request(offer))
        assert len(h.live()) == 1

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"code": 401, "message": "The request you have made requires authentication."}}, AuthFailed),
        (401, {"error": "unauthorized"}, Unavailable),
        (403, {"error": None}, Unavailable),
        (404, {"error": {"code": 404, "message": "Could not find"}}, Unavailable),
    ],
)
def test_only_keystone_refuses_a_credential(status: int, body: Any, kind: type[ProviderError], tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.faults.answer(Call.OTHER, Canned(status=status, body=json.dumps(body).encode()), times=9)
        with pytest.raises(kind):
            await provider.instances()
        h.faults.clear()
        assert (await provider.instances()).complete

    play(tmp_path, story)


@pytest.mark.parametrize(("newest_known", "hides"), [("2.68", True), ("2.69", False)])
def test_the_doctor_says_that_an_old_nova_hides_servers(newest_known: str, hides: bool, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.quirks.down = {h.cloud.add_foreign("gpu1").machine_id}
        assert ("unreadable" in {one.offer_id for one in (await provider.instances()).rejected}) is not hides
        (line,) = [one for one in await provider.check() if one.name == "region"]
        assert ("hides the servers of a cell that is down" in line.detail) is hides

    play(tmp_path, story, OpenstackQuirks(microversion_max=newest_known))
