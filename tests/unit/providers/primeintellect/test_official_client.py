"""The official `prime` client judges the fake: availability, a pod and its status, history and wallet."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import serving
from tests.fakes.official_clients import PRIME, told_by
from tests.fakes.primeintellect import PrimeApi, PrimeCloud, PrimeQuirks, some_configurations
from tests.fakes.ticking import ticking


@pytest.mark.e2e
@pytest.mark.slow  # 50 packages, installed at the first run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slash", ["with", "without"])
def test_the_official_client_finds_orders_waits_deletes_and_reads_the_bill(
    tmp_path: Path, slash: Literal["with", "without"]
) -> None:
    # A second is a minute here.
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = PrimeCloud(tmp_path / "cloud", clock=clock, quirks=PrimeQuirks(slash=slash))
    cloud.stock(*some_configurations())
    try:
        with serving(PrimeApi(cloud)) as served, ticking(cloud):
            story = Path(__file__).with_name("official_story.py")
            told = told_by(PRIME, story, served.url, cloud.api_key, home=tmp_path / "home")
        (pod,) = cloud.rented.values()
        said = cloud.machines.console(pod.machine_id, lines=9)
    finally:
        cloud.shut_down()
    price = 0.5748 + 100 * 0.00014
    assert (told["rows"], "H100_80GB" in told["types"]) == (len(some_configurations()), True)
    assert told["row"] == ["1A100.22V", pytest.approx(0.5748 + 50 * 0.00014), True, "Low", 50]
    assert told["ordered"] == ["PROVISIONING", pod.label, pytest.approx(price), True]
    assert told["active"] == ["ACTIVE", "root@203.0.113.77 -p 22", "203.0.113.77", pytest.approx(price), 1]
    assert told["listed"] == [True, "FINISHED"]
    assert said == ["begun"]
    billed = cloud.billed(pod.machine_id) / 1e6
    assert told["past"] == [True, pytest.approx(billed)]
    assert told["wallet"] == [pytest.approx(200 - billed), [[True, pytest.approx(billed)]]]
    assert "No such configuration" in told["old id"]
    assert not cloud.ledger.is_open(pod.machine_id)
