"""The logins of private images that RunPod keeps: one for each login, ours alone, and none that is not used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from spotd_providers.contract.errors import RequestRejected, Unavailable
from spotd_providers.contract.values import RegistryLogin, Secret
from spotd_providers.runpod.plugin import RunpodProvider
from spotd_providers.testkit.harness import LOGIN, PRIVATE_IMAGE
from spotd_providers.testkit.serve import Call, Canned, RecordedRequest
from tests.unit.providers.runpod.harness import RunpodHarness
from tests.unit.providers.runpod.stories import cheapest, play

ROTATED = replace(LOGIN, password=Secret("canary-login-of-tomorrow"))


def names(h: RunpodHarness) -> list[str]:
    return sorted(one["name"] for one in h.cloud.belongings.registries.values())


async def buy(h: RunpodHarness, provider: RunpodProvider, login: RegistryLogin = LOGIN) -> str:
    """Buy a pod with this login of the config; the id of the credential that it names."""
    h.logins = (login,)
    await provider.launch(h.request(await cheapest(h, provider), image=PRIVATE_IMAGE, login=login))
    return str(json.loads(h.requests(Call.LAUNCH)[-1].body)["registry"])


def about_registries(h: RunpodHarness) -> list[RecordedRequest]:
    return [request for request in h.requests() if "/registries" in request.path]


def test_one_credential_serves_every_pod_of_a_login_and_every_run_of_spotd(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        first = await buy(h, provider)
        assert await buy(h, provider) == first
        async with h.opened() as again:
            assert isinstance(again, RunpodProvider)
            assert await buy(h, again) == first
        (stored,) = h.cloud.belongings.registries.values()
        assert (stored["username"], stored["password"]) == (LOGIN.username, LOGIN.password.reveal())
        assert stored["name"].startswith("spotd-lab.image-")

    play(tmp_path, story)


def test_who_has_no_private_image_asks_nothing_of_registries(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.logins = (LOGIN,)
        await provider.launch(h.request(await cheapest(h, provider)))
        await provider.offers(h.query())
        assert not about_registries(h)
        assert "registry" not in json.loads(h.requests(Call.LAUNCH)[-1].body)

    play(tmp_path, story)


def test_a_changed_password_is_a_new_credential_and_the_old_one_goes_with_its_last_pod(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        old = await buy(h, provider)
        new = await buy(h, provider, ROTATED)
        assert new != old
        await provider.offers(h.query())
        assert set(h.cloud.belongings.registries) == {old, new}, "a pod uses the old one"
        for machine in (await provider.instances()).instances:
            await provider.terminate(machine.ref)
        await provider.offers(h.query())
        assert set(h.cloud.belongings.registries) == {new}
        seen = len(about_registries(h))
        await provider.offers(h.query())
        assert len(about_registries(h)) == seen, "nothing is left to do, and RunPod is asked all the same"

    play(tmp_path, story)


def test_what_the_config_drops_is_deleted_also_after_a_restart_and_foreign_ones_never(tmp_path: Path) -> None:
    foreign = ("mine", "spotd-lab2.image-00", "spotd-lab-image", "spotd-lab")

    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        for name in foreign:
            h.cloud.belongings.add_registry({"name": name, "username": "u", "password": "p"})
        await buy(h, provider)
        for machine in (await provider.instances()).instances:
            await provider.terminate(machine.ref)
        assert len(names(h)) == len(foreign) + 1
        h.logins = ()
        async with h.opened() as again:
            await again.offers(h.query())
        assert names(h) == sorted(foreign)

    play(tmp_path, story)


def test_a_deletion_that_fails_is_tried_again_and_offers_come_all_the_same(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        await buy(h, provider)
        for machine in (await provider.instances()).instances:
            await provider.terminate(machine.ref)
        h.logins = ()
        h.cloud.belongings.lists_registries = False
        assert (await provider.offers(h.query())).offers
        assert len(names(h)) == 1
        h.cloud.belongings.lists_registries = True
        await provider.offers(h.query())
        assert not names(h)

    play(tmp_path, story)


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_a_login_that_runpod_does_not_store_buys_nothing_and_stops_no_other_job(tmp_path: Path, status: int) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        h.cloud.belongings.refuses_registries = status
        with pytest.raises(RequestRejected, match=r"does not store the login of registry\.example") as refused:
            await buy(h, provider)
        assert LOGIN.password.reveal() not in str(refused.value)
        assert not h.live()

    play(tmp_path, story)


def test_a_lost_answer_leaves_one_credential(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.logins = (LOGIN,)
        h.cloud.belongings.refuses_registries = 503
        with pytest.raises(Unavailable):
            await provider.launch(h.request(offer, login=LOGIN))
        h.cloud.belongings.refuses_registries = 0
        await buy(h, provider)
        assert len(names(h)) == 1

    play(tmp_path, story)


def test_the_name_of_a_credential_betrays_neither_password_nor_key(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        await buy(h, provider)
        (name,) = names(h)
        parts = (LOGIN.server, LOGIN.username, LOGIN.password.reveal())
        bare = {hashlib.sha256(sep.join(parts).encode()).hexdigest()[:16] for sep in ("", ":", "\0")}
        assert name.removeprefix("spotd-lab.image-") not in bare, "who knows the name could try passwords"
        assert LOGIN.password.reveal() not in name

    play(tmp_path, story)


def test_an_answer_that_is_no_list_is_no_reason_to_buy(tmp_path: Path) -> None:
    async def story(h: RunpodHarness, provider: RunpodProvider) -> None:
        offer = await cheapest(h, provider)
        h.faults.answer(Call.OTHER, Canned(status=200, body=b'{"registries":7}'), times=100)
        with pytest.raises(Unavailable):
            await provider.launch(h.request(offer, login=LOGIN))
        assert not h.live()

    play(tmp_path, story)
