"""The official `verda` client judges the fake: tokens, prices, an order, its end, and what stays of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import serving
from tests.fakes.official_clients import VERDA, told_by
from tests.fakes.ticking import ticking
from tests.fakes.verda import VerdaApi, VerdaCloud, VerdaQuirks, some_types


@pytest.mark.e2e
@pytest.mark.lengthy  # 14 packages, installed at the first run
@pytest.mark.timeout(600)
def test_the_official_client_refreshes_orders_waits_deletes_and_sweeps(tmp_path: Path) -> None:
    # A second is a minute here. Every token seems to be over at once, so the client refreshes before each call.
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = VerdaCloud(tmp_path / "cloud", clock=clock, quirks=VerdaQuirks(expires_in_says=0))
    cloud.stock(*some_types())
    try:
        with serving(VerdaApi(cloud)) as served, ticking(cloud):
            story, key = Path(__file__).with_name("official_story.py"), f"{cloud.client_id}:{cloud.client_secret}"
            told = told_by(VERDA, story, served.url + VerdaApi.base_path, key, home=tmp_path / "home")
        (one,) = cloud.rented.values()
        said = cloud.machines.console(one.machine_id, lines=9)
        tokens = [request for request in served.requests if request.path.endswith("/token")]
    finally:
        cloud.shut_down()
    assert told["wrong secret"][0] == "unauthorized_request"
    assert [b"refresh_token" in request.body for request in tokens[:3]] == [False, False, True]
    assert len(tokens) > 20
    assert told["balance"] == [500.0, "usd"]
    assert told["types"] == {kind.name: [kind.price, kind.spot] for kind in some_types()}
    assert told["images"] == list(cloud.types["1V100.6V"].images)
    assert told["spot"] == [True, False]
    assert "1V100.6V" in told["stock"]["FIN-01"]
    assert told["places"] == ["FIN-01", "FIN-02", "FIN-03", "ICE-01"]
    assert told["disks"] == {"NVMe": 0.2, "HDD": 0.05}
    assert told["script"] == [one.script, [one.label]]
    assert told["no capacity"] == ["invalid_request", "Instance type is not available in this location"]
    assert told["ordered"] == ["ordered", None, True, "SPOT", "FIXED_PRICE", 0.75]
    assert told["too early"] == ["invalid_request", "Can't discontinue a provisioning instance"]
    assert told["running"] == [True, "203.0.113.9"]
    assert said == ["begun"]
    assert told["volume"] == ["attached", one.label]
    assert told["again"] == ["invalid_request", "Can't discontinue a discontinued instance"]
    assert told["left"] == [[], [], [one.label]]
    assert (told["trash"], cloud.volumes) == ([], {})
    assert told["unknown"] == ["not_found", "Invalid instance id"]
    assert cloud.billed(one.machine_id) > 0
    assert not cloud.ledger.is_open(one.machine_id)
