"""The fake is as odd as vast.ai: its dialects of "no", its thresholds, its keys, its shapes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from spotd_providers.contract.values import InstallId, Market
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.harness import CANARY
from spotd_providers.testkit.serve import serving
from tests.fakes.ledger_sums import most_at_once
from tests.fakes.vastai import Phase, Quirks, VastApi, VastCloud, some_asks, ticking
from tests.unit.providers.local.waiting import until
from tests.unit.providers.vastai.harness import VastHarness, open_harness
from tests.unit.providers.vastai.raw import Reply, ask

SHELL = {"image": "debian:12", "disk": 10, "runtype": "args", "onstart": "/bin/sh"}


def call(h: VastHarness, method: str, path: str, body: Any = None, key: str | None = CANARY) -> Reply:
    # Thresholds count virtual seconds; these tests are about something else unless they say so.
    h.later(timedelta(seconds=10))
    return ask(h.served.port, method, path, key=key, body=body)


def buy(h: VastHarness, **fields: Any) -> Reply:
    ask_id = next(iter(h.cloud.asks))
    body = {**SHELL, "label": "spotd-lab-x-1", "price": 1.0, "args": ["-c", "sleep 600"], **fields}
    return call(h, "PUT", f"/api/v0/asks/{ask_id}/", body)


def test_no_key_and_a_bad_key_are_refused_in_different_dialects(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        none = call(h, "GET", "/api/v0/users/current/", key=None)
        assert (none.status, none.json["msg"]) == (403, "This action requires login.")
        bad = call(h, "GET", "/api/v0/users/current/", key="wrong")
        assert (bad.status, bad.json["error"], bad.json["msg"]) == (404, "auth_error", "Invalid user key")
        h.cloud.quirks.auth_status = 401
        assert call(h, "GET", "/api/v0/users/current/", key="wrong").status == 401
        assert call(h, "POST", "/api/v0/bundles/", {}, key=None).status == 200


def test_the_account_answer_holds_the_key_so_that_nobody_may_log_it(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        assert call(h, "GET", "/api/v0/users/current/").json["api_key"] == CANARY


def test_a_second_call_too_soon_is_429_in_plain_text_without_advice(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        first = call(h, "GET", "/api/v1/instances/")
        second = ask(h.served.port, "GET", "/api/v1/instances/", key=CANARY)
        assert (first.status, second.status, second.json) == (200, 429, None)
        assert "threshold=1.0" in second.text
        assert "retry-after" not in second.headers
        h.cloud.quirks.retry_after = True
        assert ask(h.served.port, "GET", "/api/v1/instances/", key=CANARY).headers["retry-after"] == "2"


def test_searches_are_counted_by_the_minute_and_by_the_day(tmp_path: Path) -> None:
    with open_harness(tmp_path, quirks=Quirks(search_quota=13)) as h:
        statuses = [ask(h.served.port, "POST", "/api/v0/bundles/", body={}).status for _ in range(12)]
        assert statuses == [200] * 10 + [429] * 2
        assert call(h, "GET", "/api/v0/gpu_names/unique/").status == 200
        h.later(timedelta(minutes=2))
        assert ask(h.served.port, "POST", "/api/v0/bundles/", body={}).status == 200
        spent = ask(h.served.port, "POST", "/api/v0/bundles/", body={})
        assert (spent.status, spent.json["error"]) == (429, "search_quota_exceeded")


def test_a_route_without_its_final_slash_is_redirected_and_an_unknown_one_is_html(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        moved = call(h, "GET", "/api/v1/instances?limit=5")
        assert (moved.status, moved.headers["location"]) == (301, "/api/v1/instances/?limit=5")
        lost = call(h, "GET", "/api/v0/nothing/")
        assert (lost.status, lost.json) == (404, None)


def test_the_old_listing_is_gone_and_computed_columns_cannot_be_filtered(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        assert call(h, "GET", "/api/v0/instances/").json["error"] == "deprecated_endpoint"
        query = quote(json.dumps({"dph_total": {"lte": 1}}))
        assert call(h, "GET", f"/api/v1/instances/?select_filters={query}").status == 400


def test_a_single_instance_is_an_object_under_the_plural_key_and_null_when_gone(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        contract = buy(h).json["new_contract"]
        path = f"/api/v0/instances/{contract}/"
        assert call(h, "GET", f"{path}?owner=me").json["instances"]["id"] == contract
        assert call(h, "DELETE", path, {}).json == {"success": True}
        assert call(h, "GET", path).json == {"instances": None}
        again = call(h, "DELETE", path, {})
        assert (again.json["success"], again.json["error"]) == (False, "no_such_instance")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"image": None}, "invalid_args"),
        ({"disk": 7}, "invalid_args"),
        ({"env": "-e A=1"}, "invalid_args"),
        ({"price": 129}, "invalid_price"),
        ({"price": "1.0"}, "invalid_price"),
        ({"args": ["-c", "x" * 4090]}, "invalid_args"),
    ],
)
def test_a_purchase_that_can_never_be_right_is_refused(tmp_path: Path, wrong: dict[str, Any], error: str) -> None:
    with open_harness(tmp_path) as h:
        refused = buy(h, **wrong)
        assert (refused.status, refused.json["error"]) == (400, error)
        assert not h.cloud.contracts


def test_an_ask_is_rented_once_and_takes_its_overlapping_neighbours_with_it(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        whole, part = (a for a in h.cloud.asks.values() if a.machine_id == 18_001)
        body = {**SHELL, "args": ["-c", "sleep 600"]}
        assert call(h, "PUT", f"/api/v0/asks/{part.ask_id}/", body).json["success"]
        for ask_id in (part.ask_id, whole.ask_id):
            assert "no_such_ask" in call(h, "PUT", f"/api/v0/asks/{ask_id}/", body).json["msg"]
        left = {row["id"] for row in call(h, "POST", "/api/v0/bundles/", {"limit": 99}).json["offers"]}
        assert not left & {part.ask_id, whole.ask_id}


def test_a_container_key_ends_its_own_machine_and_touches_nothing_else(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        first, second = list(h.cloud.asks)[:1] + list(h.cloud.asks)[-1:]
        mine, other = (
            call(h, "PUT", f"/api/v0/asks/{ask_id}/", {**SHELL, "args": ["-c", "sleep 600"]}).json
            for ask_id in (first, second)
        )
        key = mine["instance_api_key"]
        for method, path in (
            ("DELETE", f"/api/v0/instances/{other['new_contract']}/"),
            ("GET", "/api/v1/instances/"),
            ("GET", "/api/v0/users/current/"),
            ("PUT", f"/api/v0/asks/{second}/"),
            ("PUT", f"/api/v0/instances/bid_price/{mine['new_contract']}/"),
        ):
            assert call(h, method, path, {}, key=key).status == 403
        assert call(h, "DELETE", f"/api/v0/instances/{mine['new_contract']}/", {}, key=key).status == 200
        phases = {c.contract_id: c.phase for c in h.cloud.contracts.values()}
        assert phases[mine["new_contract"]] is Phase.GONE
        assert phases[other["new_contract"]] is not Phase.GONE


# The runner's own last act, with what the grant of such a machine holds.
LAST_ACT = """
python3 - <<'END'
import os
from spotd_jobs.runner.process import end_machine
end_machine({"method": "vast", "base_url": os.environ["VAST_URL"]}, "succeeded")
END
sleep 600
"""


@pytest.mark.e2e
def test_a_machine_that_is_done_destroys_itself_with_nothing_but_its_environment(tmp_path: Path) -> None:
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = VastCloud(tmp_path / "cloud", clock=clock)
    cloud.stock(*some_asks())
    try:
        with serving(VastApi(cloud)) as served, ticking(cloud):
            body = {**SHELL, "label": "spotd-lab-x-1", "args": ["-c", LAST_ACT]}
            path = f"/api/v0/asks/{next(iter(cloud.asks))}/"
            contract_id = ask(served.port, "PUT", path, key=cloud.api_key, body=body).json["new_contract"]
            contract = cloud.contracts[contract_id]
            until(lambda: contract.phase is Phase.GONE, what="the machine to end itself")
            until(lambda: not cloud.machines.alive(contract.machine), what="its processes to be gone")
    finally:
        cloud.shut_down()
    spans = segments(read_ledger(cloud.ledger_path))
    assert most_at_once(spans) == 1
    assert all(span.end is not None for span in spans)
    assert any(span.compute for span in spans)


def test_ssh_style_containers_run_their_onstart_and_stay_up(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        contract = buy(h, runtype="ssh_direc ssh_proxy", onstart="echo hello from onstart", args=None).json[
            "new_contract"
        ]
        h.later(timedelta(minutes=5))
        h.cloud.advance()
        until(lambda: h.cloud.machines.console(str(contract), lines=5) == ["hello from onstart"])
        assert h.cloud.machines.alive(str(contract))


@pytest.mark.parametrize(("shape", "kind"), [("map", dict), ("list", list), ("null", type(None))])
def test_ports_come_in_every_recorded_shape(tmp_path: Path, shape: str, kind: type) -> None:
    with open_harness(tmp_path, quirks=Quirks(ports=shape)) as h:
        contract = buy(h).json["new_contract"]
        h.later(timedelta(minutes=5))
        row = call(h, "GET", f"/api/v0/instances/{contract}/").json["instances"]
        assert row["actual_status"] == "running"
        assert isinstance(row["ports"], kind)


def test_events_due_long_ago_are_dated_to_their_moment(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        contract_id = buy(h, price=1.0).json["new_contract"]
        contract = h.cloud.contracts[contract_id]
        ask_id = contract.ask.ask_id
        bought = contract.created_at
        h.cloud.at(bought + timedelta(hours=1), lambda at: h.cloud.set_min_bid(ask_id, 2.0, at=at))
        h.cloud.at(bought + timedelta(hours=2), lambda at: h.cloud.set_min_bid(ask_id, 0.1, at=at))
        h.later(timedelta(hours=9))
        h.cloud.advance()
        boot = h.cloud.quirks.boot
        spans = [s for s in segments(read_ledger(h.cloud.ledger_path)) if s.compute]
        assert [(s.start - bought, s.end and s.end - bought) for s in spans] == [
            (boot, timedelta(hours=1)),
            (timedelta(hours=2) + boot, None),
        ]


def test_prices_of_the_search_follow_the_market(tmp_path: Path) -> None:
    with open_harness(tmp_path) as h:
        ask_id = next(iter(h.cloud.asks))
        h.cloud.set_min_bid(ask_id, 0.033)
        rows = call(h, "POST", "/api/v0/bundles/", {"type": "bid", "limit": 99, "allocated_storage": 64}).json["offers"]
        (row,) = (row for row in rows if row["id"] == ask_id)
        assert (row["min_bid"], row["is_bid"]) == (0.033, False)
        assert row["dph_total"] == pytest.approx(row["dph_base"] + row["storage_cost"] * 64 / 720)
        assert h.install == InstallId("lab")
        assert {offer.market for offer in h.sold()} == set(Market)
