"""dstack's own vast.ai client, which rents real machines, judges the fake: offers, bids, ports, refusals, endings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import serving
from tests.fakes.official_clients import DSTACK, told_by
from tests.fakes.vastai import Phase, VastApi, VastCloud, some_asks, ticking


@pytest.mark.e2e
@pytest.mark.slow  # dstack and what it needs are a quarter of a gigabyte, installed at the first run
@pytest.mark.timeout(900)
def test_dstack_bids_reaches_and_ends_machines(tmp_path: Path) -> None:
    # A second is a minute here, so that the client's own pace meets no threshold.
    cloud = VastCloud(tmp_path / "cloud", clock=ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0))
    cloud.stock(*some_asks())
    try:
        with serving(VastApi(cloud)) as served, ticking(cloud):
            story = Path(__file__).with_name("dstack_story.py")
            told = told_by(DSTACK, story, served.url, cloud.api_key, home=tmp_path / "home")
            first, low, plain = cloud.contracts.values()
            said = cloud.machines.console(first.machine, lines=9)
    finally:
        cloud.shut_down()
    assert (told["key"], told["bad key"]) == (True, False)
    asks = {str(ask.ask_id): ask for ask in some_asks() if ask.gpu_name == "RTX 3090"}
    assert {name for name, *_ in told["offers"]} == set(asks)
    for name, spot, price, gpu, count, place in told["offers"]:
        listed = asks[name].min_bid if spot else asks[name].dph_base
        assert price == pytest.approx(listed + asks[name].disk_space * asks[name].storage_cost / 720, abs=1e-5)
        assert (gpu, count, place) == ("RTX3090", asks[name].num_gpus, "us-texas")

    assert told["first"]["reached"] == {"host": "203.0.113.42", "port": 20000}
    assert told["row"] == {"label": "spotd-lab-7f3a-1", "is_bid": True}
    # Its shell may get to write that the command was killed, before it is killed itself.
    assert said[0] == f"hello from {first.contract_id}"
    resp, left = told["taken"]
    assert ("no_such_ask" in json.loads(resp)["msg"], left) == (True, None)
    # A second end of the same machine is no error to it, and a machine that is gone is `null`.
    assert told["gone"] is None
    assert told["low"]["left"] == low.contract_id
    assert "`stopped`" in told["low"]["reached"]["given up"]
    assert told["low"]["ended"] is True
    # `price: null` is on-demand.
    assert told["on demand"] == plain.contract_id
    assert [contract.is_bid for contract in (first, low, plain)] == [True, True, False]
    assert [contract.phase for contract in (first, low)] == [Phase.GONE, Phase.GONE]
