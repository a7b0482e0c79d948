"""The official `openstacksdk` judges the fake: the way in, flavours, a launch, an end, and volumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import serving
from tests.fakes.official_clients import OPENSTACK, told_by
from tests.fakes.openstack import OpenstackApi, OpenstackCloud, OpenstackQuirks, some_flavors
from tests.fakes.ticking import ticking


@pytest.mark.e2e
@pytest.mark.lengthy  # 25 packages, installed at the first run
@pytest.mark.timeout(600)
def test_the_official_client_logs_in_launches_reads_the_console_and_deletes(tmp_path: Path) -> None:
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = OpenstackCloud(tmp_path / "cloud", clock=clock, quirks=OpenstackQuirks(page_rows=2))
    cloud.stock(*some_flavors())
    try:
        with serving(OpenstackApi(cloud)) as served, ticking(cloud):
            story, key = Path(__file__).with_name("official_story.py"), f"{cloud.credential_id}:{cloud.secret}"
            seen = told_by(OPENSTACK, story, served.url + "/identity/v3", key, home=tmp_path / "home")
        first, second = cloud.rented.values()
        image = cloud.image("Ubuntu 24.04").image_id
    finally:
        cloud.shut_down()
    assert seen["project"] == cloud.project
    assert seen["flavors"] == {one.name: [one.vcpus, one.ram, one.disk] for one in some_flavors()}
    assert seen["specs"] == {"pci_passthrough:alias": "a100-80:4"}
    assert (seen["image"], seen["networks"], seen["limits"]) == (image, ["private", "Ext-Net"], [50, 0])
    assert seen["made"][1] is True
    assert seen["running"] == ["l4-90", {"spotd-key": first.name}, None, None]
    assert seen["address"] == ["198.51.100.9"]
    assert (seen["found"], seen["missed"]) == ([True], [])
    assert seen["no flavour"] == [400, "Flavor f-none could not be found."]
    assert seen["no image"] == [400, "Can not find requested image"]
    assert seen["console"] == "begun"
    assert seen["gone"][0] == 404
    assert seen["volumes"] == [["", 20, "in-use"]]
    assert seen["left"] == []
    assert not any(cloud.ledger.is_open(one.machine_id) for one in (first, second))
