"""What at an OpenStack cloud is ours: servers by name and metadata, and the volumes that they boot from."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import CheckLine, InstanceState
from spotd_providers.openstack.plugin import OpenstackProvider
from spotd_providers.testkit.serve import Call, Canned
from tests.fakes.openstack import OpenstackCloud, OpenstackQuirks, refusal
from tests.fakes.openstack.records import OpenstackVolume
from tests.unit.providers.openstack.harness import OpenstackHarness, a_server, an_offer, play


async def _sweep(h: OpenstackHarness, provider: OpenstackProvider) -> None:
    for _ in range(3):
        await h.advance(timedelta(minutes=11))
        await provider.instances()


def _volume(cloud: OpenstackCloud) -> OpenstackVolume:
    cloud.advance()
    (volume,) = cloud.volumes.values()
    return volume


# Servers.


def test_a_launch_is_not_repeated_while_the_cell_of_its_server_is_down(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        request = h.request(await an_offer(h, provider))
        h.cloud.quirks.fail_after_launch = refusal(500, "Unexpected API Error.")
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        (server,) = h.cloud.rented.values()
        h.cloud.quirks.down = {server.machine_id}
        with pytest.raises(Unavailable, match="does not say"):
            await provider.launch(request)
        h.cloud.quirks.down = set()
        assert (await provider.launch(request)).instance.ref.instance_id == server.machine_id
        assert len(h.live()) == 1

    play(tmp_path, story)


def test_a_known_server_of_a_cell_that_is_down_is_listed_as_unknown(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        await provider.instances()
        h.cloud.quirks.down = {made.ref.instance_id}
        listing = await provider.instances()
        assert listing.complete
        assert [(one.key, one.state) for one in listing.instances] == [(made.key, InstanceState.UNKNOWN)]

    play(tmp_path, story)


@pytest.mark.parametrize("name", ["spotd-lab-bastion", "spotd-lab-", "spotd-lab.x-notes"])
def test_a_server_whose_name_only_begins_like_a_key_is_somebodys(name: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.add_foreign(name)
        h.cloud.add_foreign("gpu1", {"spotd-key": name})
        listing = await provider.instances()
        assert (listing.complete, listing.instances) == (True, ())
        await a_server(h, provider)

    play(tmp_path, story)


def test_a_half_marked_server_of_another_key_stops_no_launch(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        other, key = h.key(), h.key()
        h.cloud.add_foreign(other)
        half = h.cloud.add_foreign("gpu1", {"spotd-key": key})
        with pytest.raises(Unavailable, match="does not say"):
            await provider.launch(h.request(await an_offer(h, provider), key))
        half.metadata.clear()
        await provider.launch(h.request(await an_offer(h, provider), key))

    play(tmp_path, story)


@pytest.mark.parametrize("changed", ["name", "metadata"])
def test_a_server_that_its_owner_renames_stays_ours(changed: str, tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider)
        (server,) = h.cloud.rented.values()
        if changed == "name":
            server.label = "trainer"
        else:
            server.metadata = {}
        listing = await provider.instances()
        assert (listing.complete, [one.key for one in listing.instances]) == (True, [made.key])
        await provider.terminate(made.ref)
        await h.settle()
        assert h.live() == []

    play(tmp_path, story)


# Volumes.


def test_a_boot_volume_is_marked_by_its_name_and_its_metadata(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "hm.v100s")
        _volume(h.cloud).metadata = {"theirs": "kept"}
        await provider.instances()
        volume = _volume(h.cloud)
        marks = {"spotd-key": made.key, "spotd-install": "lab"}
        assert (volume.name, volume.metadata) == (made.key, {"theirs": "kept", **marks})

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        (True, {}),
        (True, {"spotd-install": "lab"}),
        (True, {"spotd-install": "lab2", "spotd-key": True}),
        (True, {"spotd-install": "lab", "spotd-key": "spotd-lab-j9-1"}),
        (False, {"spotd-install": "lab", "spotd-key": True}),
    ],
    ids=["name", "no key", "other install", "other key", "no name"],
)
def test_a_volume_that_lacks_one_of_its_marks_is_never_deleted(
    name: bool, metadata: dict[str, Any], tmp_path: Path
) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "hm.v100s")
        await provider.instances()
        await provider.terminate(made.ref)
        await h.settle()
        volume = _volume(h.cloud)
        marks = volume.metadata
        volume.metadata = {field: made.key if value is True else value for field, value in metadata.items()}
        volume.name = made.key if name else ""
        await _sweep(h, provider)
        assert h.cloud.volumes
        volume.name, volume.metadata = made.key, marks
        await _sweep(h, provider)
        assert not h.cloud.volumes

    play(tmp_path, story, OpenstackQuirks(leaks_volumes=True))


def test_a_volume_that_may_not_be_named_keeps_no_other_from_it(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.flavors["hm.v100s"].free["GRA11"] = 8
        for _ in range(7):
            await a_server(h, provider, "hm.v100s")
        forbidden = list(h.cloud.volumes)[1:]
        h.cloud.quirks.forbids_volumes = set(forbidden)
        for _ in range(3):
            await provider.instances()
        assert [number for number, one in h.cloud.volumes.items() if not one.name] == forbidden
        assert str(h.log).count("volume_unnamed") == len(forbidden)  # once for each, not at each list
        h.cloud.quirks.forbids_volumes = set()
        for _ in range(2):
            await provider.instances()
        assert all(one.name for one in h.cloud.volumes.values())

    play(tmp_path, story)


def _without(field: str) -> Callable[[Any], Any]:
    return lambda row: {name: value for name, value in row.items() if name != field}


@pytest.mark.parametrize(
    "damage",
    [lambda _: {}, lambda row: {**row, "id": "v-0"}, _without("name"), _without("bootable"), _without("metadata")],
    ids=["empty", "another", "no name", "no bootable", "no metadata"],
)
def test_half_an_answer_about_a_volume_does_not_count_as_named(damage: Callable[[Any], Any], tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "hm.v100s")

        def edit(true: Canned) -> Canned:
            said = json.loads(true.body)
            body = {**said, "volume": damage(said["volume"])} if "volume" in said else said
            return Canned(status=true.status, body=json.dumps(body).encode(), headers=true.headers)

        h.faults.edit(Call.OTHER, edit, times=1000)
        for _ in range(2):
            await provider.instances()
        h.faults.clear()
        assert _volume(h.cloud).name == ""
        await provider.instances()
        assert _volume(h.cloud).name == made.key

    play(tmp_path, story)


def test_a_naming_that_cinder_does_not_confirm_is_asked_for_again(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        made = await a_server(h, provider, "hm.v100s")
        h.cloud.quirks.forgets_metadata = True
        await provider.instances()
        assert (_volume(h.cloud).name, _volume(h.cloud).metadata) == (made.key, {})
        h.cloud.quirks.forgets_metadata = False
        await provider.instances()
        assert _volume(h.cloud).metadata["spotd-key"] == made.key

    play(tmp_path, story)


def test_the_doctor_counts_volumes_that_a_failed_start_may_have_left(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        async def said() -> CheckLine:
            return next(one for one in await provider.check() if one.name == "volumes")

        assert (await said()).detail.startswith("0 without a name")
        h.cloud.fail_next_boot("hm.v100s", "Build of instance aborted: the volume did not finish being created")
        made = await a_server(h, provider, "hm.v100s")
        await provider.terminate(made.ref)
        await _sweep(h, provider)
        assert _volume(h.cloud).name == ""
        assert (await said()).detail.startswith("1 without a name")
        h.cloud.quirks.addresses["block-storage"] = "http://volume.example"
        h.cloud.revoke_tokens()
        assert not (await said()).ok
        assert "not safe" in (await said()).detail

    play(tmp_path, story, OpenstackQuirks(leaks_volumes=True))


def test_the_doctor_asks_for_no_volumes_where_no_flavour_boots_from_one(tmp_path: Path) -> None:
    async def story(h: OpenstackHarness, provider: OpenstackProvider) -> None:
        h.cloud.quirks.addresses["block-storage"] = "http://volume.example"
        assert all(one.ok for one in await provider.check())

    play(tmp_path, story, flavors=[{"name": "l4-90", "price": 1}])
