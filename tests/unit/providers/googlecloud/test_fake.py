"""The fake Google Cloud keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call, RecordedRequest
from tests.cases import every
from tests.unit.providers.googlecloud.fake import GoogleApi, GoogleCloud, GoogleInstance, GoogleQuirks, some_kinds
from tests.unit.providers.local.waiting import until
from tests.unit.providers.rest_client import RestClient, asking

KEY = "spotd-lab-7f3a-1"
ZONE = "us-central1-a"
UUID_1, UUID_2 = "5d0c0000-0000-4000-8000-000000000001", "5d0c0000-0000-4000-8000-000000000002"
INSERT: dict[str, Any] = {
    "name": KEY,
    "machineType": f"zones/{ZONE}/machineTypes/a2-highgpu-1g",
    "labels": {"spotd-install": "lab", "spotd-key": KEY},
    "scheduling": {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
        "preemptionNoticeDuration": {"seconds": "120"},
    },
    "disks": [
        {
            "boot": True,
            "autoDelete": True,
            "initializeParams": {
                "sourceImage": "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204",
                "diskSizeGb": "73",
                "diskType": f"zones/{ZONE}/diskTypes/pd-balanced",
            },
        }
    ],
    "networkInterfaces": [{"network": "global/networks/default", "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
    "serviceAccounts": [],
    "metadata": {"items": [{"key": "startup-script", "value": "#!/bin/sh\necho begun\nexec sleep 600\n"}]},
}
SCHEDULE: dict[str, Any] = INSERT["scheduling"]
INVALID: tuple[dict[str, Any], ...] = (
    {"name": "Upper"},
    {"name": "x" * 64},
    {"labels": {"Upper": "x"}},
    {"labels": {"a": "x" * 64}},
    {"scheduling": {**SCHEDULE, "provisioningModel": "CHEAP"}},
    {"scheduling": {**SCHEDULE, "automaticRestart": True}},
    {"scheduling": {**SCHEDULE, "onHostMaintenance": "MIGRATE"}},
    {"scheduling": {**SCHEDULE, "instanceTerminationAction": "BURN"}},
    {"scheduling": {"onHostMaintenance": "TERMINATE", "instanceTerminationAction": "DELETE"}},
    {"scheduling": {**SCHEDULE, "preemptionNoticeDuration": {"seconds": "121"}}},
    {
        "guestAccelerators": [
            {"acceleratorType": f"zones/{ZONE}/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 1}
        ]
    },
    {"metadata": {"items": [{"key": "startup-script", "value": "x" * (256 * 1024 + 1)}]}},
    {"disks": []},
    {"disks": [{"boot": True, "initializeParams": {"sourceImage": "projects/x/global/images/family/y"}}]},
    {"networkInterfaces": []},
)


class Account(RestClient):
    """A client with the words of Compute Engine."""

    cloud: GoogleCloud

    def url(self, path: str) -> str:
        return f"/compute/v1/projects/{self.cloud.project}{path}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        reply = self(method, self.url(path), body)
        assert reply.status == 200, reply
        return reply.json

    def no(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        reply = self(method, self.url(path), body)
        error = reply.json["error"]
        assert error["code"] == reply.status
        return reply.status, error["errors"][0]["reason"]

    def insert(self, request_id: str = "", **changes: Any) -> Any:
        query = f"?requestId={request_id}" if request_id else ""
        return self.ask("POST", f"/zones/{ZONE}/instances{query}", {**INSERT, **changes})

    def refused(self, **changes: Any) -> tuple[int, str]:
        return self.no("POST", f"/zones/{ZONE}/instances", {**INSERT, **changes})

    def launch(self, **changes: Any) -> GoogleInstance:
        operation = self.insert(**changes)
        assert "error" not in self.wait(operation)
        self.clock.advance(timedelta(minutes=1))
        return self.cloud.rented[operation["targetId"]]

    def wait(self, operation: Any) -> Any:
        return self.ask("POST", f"/zones/{ZONE}/operations/{operation['name']}/wait")

    def status(self, name: str = KEY) -> str | None:
        reply = self("GET", self.url(f"/zones/{ZONE}/instances/{name}"))
        return reply.json["status"] if reply.status == 200 else None

    def listed(self, query: str = "") -> dict[str, list[str] | str]:
        items = self.ask("GET", f"/aggregated/instances{query}")["items"]
        return {
            zone: [row["name"] for row in one["instances"]] if "instances" in one else one["warning"]["code"]
            for zone, one in items.items()
        }

    def reasons(self, name: str = KEY) -> list[str]:
        pattern = f"targetLink%20eq%20%22.*{name}$%22"
        return [row["operationType"] for row in self.ask("GET", f"/zones/{ZONE}/operations?filter={pattern}")["items"]]


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Account]:
    clock = FakeClock()
    cloud = GoogleCloud(folder / "cloud", clock=clock, quirks=GoogleQuirks(**quirks))
    cloud.stock(*some_kinds())
    with asking(Account, GoogleApi(cloud), clock) as ask:
        ask.authorization = f"Bearer {cloud.grant_token(timedelta(days=30))}"
        yield ask


def test_a_token_is_given_for_an_assertion_and_no_other_opens_the_project(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        form = "grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion=a.b.c"
        answer = ask.raw("POST", "/token", form).json
        assert (answer["token_type"], answer["expires_in"]) == ("Bearer", 3599)
        ask.authorization = f"Bearer {answer['access_token']}"
        assert ask.ask("GET", "")["name"] == ask.cloud.project
        assert ask("GET", "/compute/v1/projects/another").json["error"]["status"] == "PERMISSION_DENIED"
        ask.clock.advance(timedelta(hours=1))
        assert ask.no("GET", "/zones") == (401, "authError")
        ask.cloud.break_auth()
        assert ask.raw("POST", "/token", form).json["error"] == "invalid_grant"


def test_prices_of_a_machine_add_up_from_the_catalogue(tmp_path: Path) -> None:
    with account(tmp_path, page_rows=40) as ask:
        rows: list[Any] = []
        path = f"/v1/services/6F81-5844-456A/skus?key={ask.cloud.api_key}"
        ask.authorization, token = "", ""
        while True:
            page = ask.get(path + (f"&pageToken={token}" if token else ""))
            rows, token = rows + page["skus"], page["nextPageToken"]
            if not token:
                break
        prices = {}
        for row in rows:
            unit = row["pricingInfo"][0]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
            assert isinstance(unit["units"], str)
            key = (row["description"], row["serviceRegions"][0])
            prices[key] = Fraction(int(unit["units"])) + Fraction(unit["nanos"], 10**9)
        region = "europe-west4"

        def spot(words: str) -> Fraction:
            return prices[f"Spot Preemptible {words} running in {region}", region]

        total = 208 * spot("A3 Instance Core") + 1872 * spot("A3 Instance Ram") + 8 * spot("Nvidia H100 80GB GPU")
        total += 6000 * spot("SSD backed Local Storage") / 730
        kind = ask.cloud.kinds["a3-highgpu-8g"]
        price = ask.cloud.price(kind, "europe-west4-a", is_spot=True)
        assert 0 <= price - total * 10**6 < 1
        assert not any("A4 Core" in words for words, _ in prices), "an A4 has one price for its slices"
        ask.cloud.raise_price("a3-highgpu-8g", 2.0)
        assert ask.cloud.price(kind, "europe-west4-a", is_spot=True) > 1.9 * price
        assert ask("GET", path.partition("?")[0]).status == 401


def test_regions_zones_types_images_and_quotas_are_listed_in_pages(tmp_path: Path) -> None:
    with account(tmp_path, page_rows=2) as ask:
        regions = ask.ask("GET", "/regions")["items"]
        assert [one["name"] for one in regions] == ["us-central1", "europe-west4"]
        assert regions[0]["zones"][0].endswith(f"/zones/{ZONE}")
        assert regions[0]["quotas"][0] == {"metric": "PREEMPTIBLE_NVIDIA_L4_GPUS", "limit": 16.0, "usage": 0.0}
        names, token = [], ""
        while True:
            page = ask.ask("GET", f"/zones/{ZONE}/machineTypes" + (f"?pageToken={token}" if token else ""))
            names += [row["name"] for row in page["items"]]
            token = page.get("nextPageToken", "")
            if not token:
                break
        assert names == [one.name for one in some_kinds()]
        row = ask.ask("GET", f"/zones/{ZONE}/machineTypes/a3-highgpu-8g")
        assert row["accelerators"] == [{"guestAcceleratorType": "nvidia-h100-80gb", "guestAcceleratorCount": 8}]
        assert ask.no("GET", f"/zones/{ZONE}/machineTypes/a9")[0] == 404
        ask.cloud.quirks.page_rows = None
        aggregated = ask.ask("GET", "/aggregated/machineTypes")["items"]
        assert len(aggregated[f"zones/{ZONE}"]["machineTypes"]) == len(names)
        image = ask.get(
            "/compute/v1/projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204"
        )
        assert image["status"] == "READY"


def test_advice_answers_or_is_refused(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        body = {
            "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{ZONE}"}]},
            "instanceFlexibilityPolicy": {"instanceSelections": {"a": {"machineTypes": ["a3-highgpu-1g"]}}},
            "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
            "size": 1,
        }
        path = "/regions/us-central1/advice/capacity"
        assert ask.ask("POST", path, body)["recommendations"][0]["scores"]["obtainability"] == 0.72
        past = {
            "instanceProperties": {"machineType": "a3-highgpu-8g", "scheduling": {"provisioningModel": "SPOT"}},
            "locationPolicy": {"location": f"zones/{ZONE}"},
            "types": ["PREEMPTION", "PRICE"],
        }
        answer = ask.ask("POST", path + "History", past)
        assert answer["preemptionHistory"][0]["preemptionRate"] == 0.21
        assert int(answer["priceHistory"][0]["listPrice"]["units"]) > 0
        assert ask.no("POST", path + "History", {**past, "types": ["UPTIME"]}) == (400, "invalid")
        ask.cloud.quirks.advice_refused = 403
        assert ask.no("POST", path, body)[0] == 403


def test_an_instance_runs_its_script_and_bills_from_running_with_its_disk_and_address(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        one = ask.launch()
        assert ask.status() == "RUNNING"
        row = ask.ask("GET", f"/zones/{ZONE}/instances/{KEY}")
        assert row["networkInterfaces"][0]["accessConfigs"][0]["natIP"] == "203.0.113.7"
        assert row["labels"]["spotd-key"] == KEY
        until(lambda: "begun" in ask.ask("GET", f"/zones/{ZONE}/instances/{KEY}/serialPort?port=1")["contents"])
        ask.clock.advance(timedelta(hours=2))
        assert ask.cloud.billed(one.machine_id) == 2 * (one.price + 2500)
        (disk,) = ask.ask("GET", f"/zones/{ZONE}/disks")["items"]
        assert (disk["sizeGb"], disk["users"][0].rpartition("/")[2]) == ("73", KEY)
        assert ask.cloud.billed(disk["id"]) > 2 * 73 * 100_000 // 730
        assert ask.no("DELETE", f"/zones/{ZONE}/disks/{KEY}") == (400, "resourceInUseByAnotherResource")
        operation = ask.ask("DELETE", f"/zones/{ZONE}/instances/{KEY}?requestId={UUID_1}&noGracefulShutdown=true")
        assert (operation["status"], ask.status()) == ("RUNNING", "STOPPING")
        ask.clock.advance(timedelta(seconds=30))
        assert ask.status() is None
        assert "items" in ask.ask("GET", f"/zones/{ZONE}/disks")
        assert ask.cloud.disks == {}
        assert ask.no("DELETE", f"/zones/{ZONE}/instances/{KEY}") == (404, "notFound")


def test_a_launch_is_idempotent_by_request_and_by_name(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        first = ask.insert(UUID_1)
        assert ask.insert(UUID_1)["name"] == first["name"]
        assert ask.refused() == (409, "alreadyExists")
        assert ask.no("POST", f"/zones/{ZONE}/instances?requestId=7", INSERT) == (400, "invalid")
        ask.clock.advance(timedelta(hours=1))
        assert ask.no("POST", f"/zones/{ZONE}/instances?requestId={UUID_1}", INSERT) == (409, "alreadyExists")
        assert len(ask.cloud.rented) == 1


@pytest.mark.parametrize("capacity_by", ["operation", "insert"])
def test_what_is_sold_out_is_said_by_the_operation_or_at_once(capacity_by: str, tmp_path: Path) -> None:
    with account(tmp_path, capacity_by=capacity_by, waits_cut=1) as ask:
        ask.cloud.sell_out("a2-highgpu-1g", ZONE)
        if capacity_by == "insert":
            assert ask.refused() == (503, "UNSUPPORTED_OPERATION")
            return
        operation = ask.insert()
        assert ask.status() == "PROVISIONING"
        assert ask.wait(operation)["status"] == "RUNNING", "the first wait is cut"
        done = ask.wait(operation)
        assert done["error"]["errors"][0]["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
        assert ask.status() is None
        assert ask.cloud.spent_usd() == 0.0


def test_what_an_insert_may_not_hold_is_refused(tmp_path: Path) -> None:
    with account(tmp_path, quota_gpus=1) as ask:
        assert [one for changes in INVALID if (one := ask.refused(**changes)) != (400, "invalid")] == []
        assert ask.refused(machineType=f"zones/{ZONE}/machineTypes/a9")[0] == 404
        a4 = {"machineType": f"zones/{ZONE}/machineTypes/a4-highgpu-8g"}
        assert ask.refused(**a4) == (400, "invalid"), "an A4 takes no pd-balanced disk"
        small = {"machineType": f"zones/{ZONE}/machineTypes/a3-highgpu-1g"}
        assert ask.refused(**small, scheduling={"onHostMaintenance": "TERMINATE"}) == (400, "badRequest")
        assert ask.refused(serviceAccounts=[{"email": "x"}])[0] == 400
        assert ask.refused(machineType=f"zones/{ZONE}/machineTypes/g2-standard-24") == (403, "quotaExceeded")
        ask.cloud.quirks.quota_by = "operation"
        done = ask.wait(ask.insert(machineType=f"zones/{ZONE}/machineTypes/g2-standard-24"))
        assert done["error"]["errors"][0]["code"] == "QUOTA_EXCEEDED"
        assert not [one for one in ask.cloud.rented.values() if one.exists]
        gpu = {"acceleratorType": f"zones/{ZONE}/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 1}
        made = ask.launch(machineType=f"zones/{ZONE}/machineTypes/n1-standard-8", guestAccelerators=[gpu])
        assert made.price > ask.cloud.price(made.kind, ZONE, is_spot=True)


@pytest.mark.parametrize("action", ["DELETE", "STOP"])
def test_a_preempted_instance_is_deleted_or_stopped_as_it_was_asked(action: str, tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        one = ask.launch(scheduling={**SCHEDULE, "instanceTerminationAction": action})
        assert ask.status() == "RUNNING"
        ask.clock.advance(timedelta(hours=1))
        ask.cloud.give_notice(one.machine_id)
        assert _metadata(ask, KEY) == (200, "TRUE")
        ask.clock.advance(timedelta(seconds=120))
        assert ask.status() == "STOPPING"
        ask.clock.advance(timedelta(seconds=30))
        assert ask.status() == (None if action == "DELETE" else "TERMINATED")
        assert ask.reasons() == ["insert", "compute.instances.preempted"]
        assert bool(ask.cloud.disks) is (action == "STOP"), "the disk of a stopped instance bills on"


def test_an_instance_taken_back_within_its_first_minute_is_free(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        one = ask.launch()
        assert ask.status() == "RUNNING"
        ask.clock.advance(timedelta(seconds=20))
        assert ask.cloud.billed(one.machine_id) == -(-one.price // 60), "a minute at least"
        assert ask.ask("POST", f"/zones/{ZONE}/instances/{KEY}/simulateMaintenanceEvent")["status"] == "DONE"
        assert ask.cloud.billed(one.machine_id) == 0


def test_host_errors_shut_downs_and_time_limits_have_states_and_reasons_of_their_own(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        broken = ask.launch()
        assert ask.status() == "RUNNING"
        ask.cloud.fail_host(broken.machine_id)
        assert (ask.status(), ask.reasons()[-1]) == ("TERMINATED", "compute.instances.hostError")
        script = {"items": [{"key": "startup-script", "value": "#!/bin/sh\nshutdown -h now\n"}]}
        ask.launch(name="off", metadata=script)
        until(lambda: ask.status("off") == "TERMINATED")
        assert ask.reasons("off")[-1] == "compute.instances.guestTerminate"
        ask.launch(name="short", scheduling={**SCHEDULE, "maxRunDuration": {"seconds": "3600"}})
        assert ask.status("short") == "RUNNING"
        ask.clock.advance(timedelta(minutes=61))
        assert ask.status("short") is None


def test_lists_lag_warn_of_zones_out_of_reach_and_show_strangers(tmp_path: Path) -> None:
    with account(tmp_path, list_lag=timedelta(seconds=90)) as ask:
        ask.launch()
        notebook = ask.cloud.add_foreign("notebook").machine_id
        nothing = "NO_RESULTS_ON_PAGE"
        found = ask.listed("?returnPartialSuccess=true")
        assert found == {f"zones/{ZONE}": ["notebook"], "zones/us-central1-b": nothing, "zones/europe-west4-a": nothing}
        ask.clock.advance(timedelta(seconds=30))
        assert ask.listed()[f"zones/{ZONE}"] == [KEY, "notebook"]
        assert ask.listed("?filter=labels.spotd-install%3Dlab")[f"zones/{ZONE}"] == [KEY]
        assert ask.no("GET", "/aggregated/instances?filter=%26%26") == (400, "invalid")
        ask.cloud.quirks.page_rows = 1
        page = ask.ask("GET", "/aggregated/instances")
        assert ask.listed(f"?pageToken={page['nextPageToken']}")[f"zones/{ZONE}"] == ["notebook"]
        ask.cloud.quirks.unreachable.add(ZONE)
        assert ask.listed("?returnPartialSuccess=true")[f"zones/{ZONE}"] == "UNREACHABLE"
        assert ask.no("GET", "/aggregated/instances")[0] == 503
        ask.cloud.quirks.unreachable.clear()
        ask.cloud.quirks.edit_row[notebook] = "no row"
        ask.cloud.quirks.page_rows = None
        rows = ask.ask("GET", "/aggregated/instances")["items"][f"zones/{ZONE}"]["instances"]
        assert "no row" in rows


def test_an_end_may_leave_the_disk_or_the_instance(tmp_path: Path) -> None:
    with account(tmp_path, leaves_disk=True, undead=1) as ask:
        ask.launch()
        assert ask.ask("DELETE", f"/zones/{ZONE}/instances/{KEY}")
        ask.clock.advance(timedelta(minutes=1))
        assert ask.status() == "RUNNING", "it survives once"
        ask.ask("DELETE", f"/zones/{ZONE}/instances/{KEY}")
        ask.clock.advance(timedelta(minutes=1))
        assert ask.status() is None
        assert [row["name"] for row in ask.ask("GET", f"/zones/{ZONE}/disks")["items"]] == [KEY]
        ask.ask("DELETE", f"/zones/{ZONE}/disks/{KEY}")
        assert ask.cloud.disks == {}


@every(
    ("method", "path", "call"),
    [
        ("GET", "/v1/services/6F81-5844-456A/skus", Call.OFFERS),
        ("GET", "/compute/v1/projects/p/aggregated/machineTypes", Call.OFFERS),
        ("POST", "/compute/v1/projects/p/zones/z/instances", Call.LAUNCH),
        ("GET", "/compute/v1/projects/p/aggregated/instances", Call.LIST),
        ("GET", "/compute/v1/projects/p/zones/z/instances/n", Call.LIST),
        ("DELETE", "/compute/v1/projects/p/zones/z/instances/n", Call.TERMINATE),
        ("GET", "/compute/v1/projects/p", Call.ACCOUNT),
        ("POST", "/compute/v1/projects/p/zones/z/operations/o/wait", Call.OTHER),
        ("POST", "/token", Call.OTHER),
    ],
)
def test_requests_are_known_by_their_purpose(method: str, path: str, call: Call) -> None:
    assert GoogleApi.classify(RecordedRequest(method=method, path=path, query="", headers={}, body=b"")) is call


def _metadata(ask: Account, name: str) -> tuple[int, str]:
    """What the metadata server says to a machine, with the header that it must send."""
    connection = HTTPConnection("127.0.0.1", ask._port, timeout=10)
    try:
        path = f"/metadata/{name}/computeMetadata/v1/instance/preempted"
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
