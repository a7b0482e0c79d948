"""The fake TensorDock keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call
from tests.fakes.rest import RestRefusal
from tests.fakes.tensordock import TensorDockApi, TensorDockCloud, TensorDockQuirks, some_nodes
from tests.unit.providers.local.waiting import until
from tests.unit.providers.rest_client import RestClient, asking

KEY = "spotd-lab-7f3a-1"
MODEL = "geforcertx4090-pcie-24gb"
RESOURCES: dict[str, Any] = {"vcpu_count": 8, "ram_gb": 32, "storage_gb": 150, "gpus": {MODEL: {"count": 1}}}
CREATE: dict[str, Any] = {
    "name": KEY,
    "type": "virtualmachine",
    "image": "ubuntu2404",
    "location_id": "loc-2",
    "resources": RESOURCES,
    "useDedicatedIp": True,
    "ssh_key": "ssh-ed25519 AAAA laptop",
    "cloud_init": {
        "runcmd": ["bash /var/lib/boot.sh"],
        "write_files": [{"path": "/var/lib/boot.sh", "content": "echo begun\nexec sleep 600\n", "permissions": "0755"}],
    },
}
COMPUTE_HOUR = 370_000 + 8 * 3_000 + 32 * 2_000
STORAGE_HOUR = 150 * 50
INVALID: tuple[dict[str, Any], ...] = (
    {"name": None},
    {"type": "container"},
    {"image": "windows"},
    {"location_id": None},
    {"hostnode_id": "node-2"},
    {"ssh_key": "key"},
    {"ssh_key_id": "lost"},
    {"port_forwards": [{"internal_port": 22, "external_port": 20000}]},
    {"resources": {**RESOURCES, "storage_gb": 99}},
    {"resources": {**RESOURCES, "storage_gb": 110}},
    {"resources": {**RESOURCES, "vcpu_count": 7}},
    {"resources": {**RESOURCES, "ram_gb": "32"}},
    {"resources": {**RESOURCES, "gpus": {}}},
    {"resources": {**RESOURCES, "gpus": {"model": {"gpuV0Name": MODEL, "count": 1}}}},
    {"cloud_init": {"runcmd": "bash"}},
    {"cloud_init": {"write_files": [{"path": "boot.sh", "content": ""}]}},
    {"bid": 1},
)


class Account(RestClient):
    """A client with the words of TensorDock."""

    cloud: TensorDockCloud

    def order(self, **changes: Any) -> Any:
        wish = {name: value for name, value in {**CREATE, **changes}.items() if value is not None}
        return self("POST", "/instances", {"data": {"type": "virtualmachine", "attributes": wish}})

    def create(self, **changes: Any) -> str:
        reply = self.order(**changes)
        assert reply.status == self.cloud.quirks.create_status, reply
        return str(reply.json["data"]["id"])

    def refused(self, **changes: Any) -> tuple[int, int]:
        reply = self.order(**changes)
        assert set(reply.json) == {"status", "error"}, reply
        return reply.status, reply.json["status"]

    def boot(self) -> None:
        self.clock.advance(timedelta(minutes=5))

    def status(self, vm_id: str) -> str:
        return str(self.get(f"/instances/{vm_id}")["status"])

    def listed(self) -> list[Any]:
        return [row["attributes"] for row in self.get("/instances")["data"]["instances"]]


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Account]:
    clock = FakeClock()
    quirks = {"requests_per_minute": None, **quirks}
    cloud = TensorDockCloud(folder / "cloud", clock=clock, quirks=TensorDockQuirks(**quirks))
    cloud.stock(*some_nodes())
    with asking(Account, TensorDockApi(cloud), clock) as ask:
        ask.authorization = f"Bearer {cloud.token}"
        yield ask


def test_prices_are_in_parts_and_the_list_may_be_empty_although_there_is_stock(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        places = {one["id"]: one for one in ask.get("/locations")["data"]["locations"]}
        assert [len(places[one]["gpus"]) for one in sorted(places)] == [1, 1, 2, 1], "one is sold out"
        (rtx,) = places["loc-2"]["gpus"]
        assert (rtx["v0Name"], rtx["max_count"], rtx["price_per_hr"]) == (MODEL, 2, 0.37)
        assert rtx["pricing"] == {"per_vcpu_hr": 0.003, "per_gb_ram_hr": 0.002, "per_gb_storage_hr": 0.00005}
        ask.cloud.quirks.lists_sold_out, ask.cloud.quirks.prices = True, "text"
        sold_out = ask.get("/locations")["data"]["locations"][-1]["gpus"][0]
        assert (sold_out["max_count"], sold_out["price_per_hr"]) == (0, "0.22")
        nodes = ask.get(f"/hostnodes?gpu_model={MODEL}&status=available")["data"]["hostnodes"]
        assert [one["available_resources"]["gpus"][0]["availableCount"] for one in nodes] == [2, 4]
        ask.cloud.quirks.no_locations = "without token"
        assert ask.get("/locations")["data"]["locations"]
        ask.authorization = ""
        assert ask.get("/locations") == {"data": {"locations": []}}
        assert ask("GET", "/hostnodes").status == 401
        ask.cloud.quirks.no_locations = "always"
        ask.authorization = f"Bearer {ask.cloud.token}"
        assert ask.get("/locations") == {"data": {"locations": []}}


def test_a_machine_boots_runs_its_cloud_init_late_and_is_deleted(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        vm = ask.create()
        assert ask.status(vm) == "starting"
        ask.clock.advance(timedelta(minutes=3))
        assert (ask.status(vm), vm in ask.cloud.machines.ids()) == ("running", False)
        ask.clock.advance(timedelta(minutes=1))
        assert ask.listed()[0]["name"] == KEY
        until(lambda: ask.cloud.machines.console(vm, lines=9) == ["begun"])
        assert ask("DELETE", f"/instances/{vm}").status == 200
        assert ask.status(vm) == "deleting"
        ask.cloud.quirks.delete_again = True
        assert ask("DELETE", f"/instances/{vm}").json["status"] == 409
        ask.cloud.quirks.lingers = timedelta(minutes=5)
        ask.clock.advance(timedelta(minutes=1))
        assert (ask.status(vm), ask.listed()) == ("deleted", [])
        ask.clock.advance(timedelta(minutes=5))
        gone = ask("GET", f"/instances/{vm}")
        assert (gone.status, gone.json["status"]) == (200, 404), "an error in a 200"
        ask.cloud.quirks.errors_in_200 = False
        assert ask("DELETE", f"/instances/{vm}").status == 404
        assert ask.cloud.nodes["node-2"].free == 2


@pytest.mark.parametrize("bills_from", ["order", "running"])
def test_the_bill_is_by_the_second_from_the_order_or_the_boot_and_for_storage_from_the_order(
    tmp_path: Path, bills_from: str
) -> None:
    with account(tmp_path, bills_from=bills_from) as ask:
        vm = ask.create()
        ask.boot()
        assert ask.listed()[0]["rateHourly"] == pytest.approx((COMPUTE_HOUR + STORAGE_HOUR) / 1e6)
        ask.clock.advance(timedelta(minutes=55))
        ask("DELETE", f"/instances/{vm}")
        ask.clock.advance(timedelta(hours=9))
        hours = 1 if bills_from == "order" else 57 / 60
        assert ask.cloud.billed(vm) == round(COMPUTE_HOUR * hours) + STORAGE_HOUR
        assert ask.cloud.spent_usd() == pytest.approx(ask.cloud.billed(vm) / 1e6)


@pytest.mark.parametrize(("bills", "gives_back"), [(True, False), (False, False), (True, True)])
def test_a_stopped_machine_bills_its_storage_and_perhaps_its_gpu(tmp_path: Path, bills: bool, gives_back: bool) -> None:
    with account(tmp_path, stopped_bills=bills, stop_gives_back=gives_back) as ask:
        vm = ask.create()
        ask.boot()
        assert ask("POST", f"/instances/{vm}/start").json["status"] == 400
        assert ask("POST", f"/instances/{vm}/stop").json == {"success": True}
        before = ask.cloud.billed(vm)
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(vm) - before == STORAGE_HOUR + COMPUTE_HOUR * (bills and not gives_back)
        assert ask.status(vm) == ("stoppeddisassociated" if gives_back else "stopped")
        assert ask.listed()[0]["rateHourly"] == pytest.approx(STORAGE_HOUR / 1e6)
        ask.cloud.sell_out(MODEL)
        started = ask("POST", f"/instances/{vm}/start").json
        assert started.get("status") == (400 if gives_back else None)


def test_what_a_create_may_not_hold_is_refused_and_orders_nothing(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        answers = [(changes, ask.refused(**changes)) for changes in INVALID]
        assert [one for one in answers if one[1] != (200, 400)] == []
        assert ask.refused(ssh_key=None, ssh_key_id="lost") == (200, 404)
        assert ask.refused(location_id="mars") == (200, 404)
        a4000 = {**RESOURCES, "gpus": {"rtxa4000-pcie-16gb": {"count": 1}}}
        assert ask.refused(location_id="loc-3", resources=a4000) == (200, 400), "no address of its own there"
        bodies: tuple[Any, ...] = ({}, {"data": []}, {"data": {"type": "x", "attributes": {}}})
        for body in bodies:
            assert ask("POST", "/instances", body).json["status"] == 400
        assert ask.raw("POST", "/instances", "{").json["status"] == 400
        assert not ask.cloud.rented
        ask.cloud.quirks.steps_on_create = ask.cloud.quirks.needs_ssh_key = False
        ask.create(ssh_key=None, resources={**RESOURCES, "vcpu_count": 7, "storage_gb": 110})


def test_a_create_is_refused_by_cause(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        three = {**RESOURCES, "gpus": {MODEL: {"count": 3}}}
        assert ask.refused(resources=three) == (200, 400)
        assert ask.refused(resources={**RESOURCES, "vcpu_count": 4000}) == (200, 400), "no host is so big"
        ask.cloud.quirks.errors_in_200 = False
        ask.cloud.quirks.capacity = RestRefusal(503, "out of stock")
        assert ask.refused(resources=three) == (503, 503)
        ask.cloud.quirks.quota_gpus = 0
        assert ask.refused() == (403, 403)
        ask.cloud.deposit_usd = 0.99
        assert ask.refused() == (402, 402)
        ask.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(500, "Internal server error")
        ask.cloud.quirks.errors_in_200 = True
        assert ask.refused() == (500, 500)
        ask.authorization = "Bearer another"
        assert ask.refused() == (401, 401)
        assert not ask.cloud.rented


def test_every_documented_shape_is_spoken(tmp_path: Path) -> None:
    with account(
        tmp_path, gpus_shape="model", reply_shape="attributes", create_status=200, create_says="running"
    ) as ask:
        gpus = {"model": {"gpuV0Name": MODEL, "count": 2}}
        reply = ask.order(resources={**RESOURCES, "gpus": gpus})
        assert (reply.status, reply.json["data"]["attributes"]) == (200, {"name": KEY, "status": "running"})
        vm = reply.json["data"]["id"]
        ask.cloud.quirks.row_gpus, ask.cloud.quirks.case = "list", "upper"
        assert ask.listed()[0]["resources"]["gpus"] == [{"gpuV0Name": MODEL, "count": 2}]
        assert ask.status(vm) == "STARTING"
        ask.cloud.quirks.list_shape = ask.cloud.quirks.show_shape = "data"
        assert [row["id"] for row in ask.get("/instances")["data"]] == [vm]
        assert ask.get(f"/instances/{vm}")["data"]["attributes"]["status"] == "STARTING"


def test_a_port_is_of_one_machine_and_a_secret_is_a_key(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        wish = {"data": {"type": "secret", "attributes": {"name": "laptop", "type": "SSHKEY", "value": "ssh-rsa A"}}}
        key = ask("POST", "/secrets", wish).json["data"]["id"]
        assert [row["name"] for row in ask.get("/secrets")["data"]["secrets"]] == ["laptop"]
        forwards = [{"internal_port": 22, "external_port": 20000}]
        host = {"location_id": None, "hostnode_id": "node-2", "useDedicatedIp": None, "port_forwards": forwards}
        vm = ask.create(**host, ssh_key=None, ssh_key_id=key)
        assert ask.listed()[0]["portForwards"] == {"22": 20000}
        assert ask.refused(**host) == (200, 409)
        ask("DELETE", f"/instances/{vm}")
        ask.boot()
        ask.create(**host)
        assert ask("DELETE", f"/secrets/{key}").json == {"success": True}
        assert ask("DELETE", f"/secrets/{key}").json["status"] == 404


def test_launches_happen_unseen_lists_lag_and_rows_are_spoilt(tmp_path: Path) -> None:
    lag = timedelta(seconds=30)
    failing = RestRefusal(502, "Bad gateway")
    with account(tmp_path, list_lag=2 * lag, show_lag=lag, fail_after_launch=failing, undead=1) as ask:
        assert ask.refused() == (502, 502)
        ask.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OSError):
            ask.create()
        first, _ = ask.cloud.rented
        foreign = ask.cloud.add_foreign("notebook").machine_id
        assert [row["name"] for row in ask.listed()] == ["notebook"]
        assert ask("GET", f"/instances/{first}").json["status"] == 404
        ask.clock.advance(2 * lag)
        assert [row["name"] for row in ask.listed()] == [KEY, KEY, "notebook"], "names repeat"
        ask.cloud.quirks.edit_row = {first: {"status": "meditating"}, foreign: "no row"}
        rows = ask.get("/instances")["data"]["instances"]
        assert (rows[0]["attributes"]["status"], rows[2]) == ("meditating", "no row")
        ask.cloud.quirks.edit_row.clear()
        assert ask("DELETE", f"/instances/{first}").json == {"success": True}
        assert ask.status(first) == "starting", "it survives once"
        ask.cloud.quirks.undeletable = frozenset({"starting"})
        assert ask("DELETE", f"/instances/{first}").json["status"] == 409
        ask.cloud.vanish(first)
        assert ask("GET", f"/instances/{first}").json["status"] == 404
        assert len(ask.listed()) == 2


@pytest.mark.parametrize("failure", ["error", "starting"])
def test_a_boot_that_fails_is_billed_until_it_is_deleted(tmp_path: Path, failure: str) -> None:
    with account(tmp_path) as ask:
        ask.cloud.fail_next_boot(MODEL, failure)
        vm = ask.create()
        ask.clock.advance(timedelta(hours=1))
        assert ask.status(vm) == failure
        assert ask.cloud.billed(vm) == COMPUTE_HOUR + STORAGE_HOUR
        assert ask("DELETE", f"/instances/{vm}").json == {"success": True}
        assert not ask.cloud.ledger.is_open(vm)


def test_a_hundred_requests_a_minute(tmp_path: Path) -> None:
    with account(tmp_path, requests_per_minute=3) as ask:
        assert [ask("GET", "/instances").status for _ in range(4)] == [200, 200, 200, 429]
        ask.clock.advance(timedelta(minutes=1))
        assert ask("GET", "/instances").status == 200
        assert TensorDockQuirks().requests_per_minute == 100
