"""The fake Azure keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from spotd_providers.contract.values import MICRO
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call
from tests.fakes.rest import RestRefusal
from tests.unit.providers.azure.fake import BLOB_SECRET, AzureApi, AzureCloud, AzureQuirks, some_sizes
from tests.unit.providers.local.waiting import until
from tests.unit.providers.rest_client import RestClient, RestReply, asking

KEY = "spotd-lab-7f3a-1"
H100 = "Standard_NC40ads_H100_v5"
SCRIPT = "#!/bin/sh\necho begun\nexec sleep 600\n"
TOO_SMALL = {"properties": {"storageProfile": {"osDisk": {"createOption": "FromImage", "diskSizeGB": 1}}}}
INVALID: tuple[dict[str, Any], ...] = (
    {"zones": ["1", "2"]},
    {"zones": ["9"]},
    {"tags": {"a": "x" * 257}},
    {"bid": 1},
    {"location": None},
    {"properties": {"hardwareProfile": {"vmSize": "Standard_X"}}},
    {"properties": {"priority": "Cheap"}},
    {"properties": {"priority": "Regular"}},
    {"properties": {"evictionPolicy": "Burn"}},
    {"properties": {"billingProfile": {"maxPrice": 0}}},
    {"properties": {"billingProfile": {"maxPrice": "1"}}},
    {"properties": {"osProfile": {"computerName": "x", "adminUsername": "spotd"}}},
    {"properties": {"networkProfile": {"networkInterfaceConfigurations": []}}},
    TOO_SMALL,
)


class Account(RestClient):
    """A client with the words of Azure."""

    cloud: AzureCloud

    def path(self, rest: str, group: str = "spotd") -> str:
        return f"/subscriptions/{self.cloud.subscription}/resourceGroups/{group}{rest}"

    def ask(self, method: str, path: str, body: Any = None, version: str = "2026-04-01") -> RestReply:
        return self(method, f"{path}{'&' if '?' in path else '?'}api-version={version}", body)

    def log_in(self, **changes: str) -> RestReply:
        cloud = self.cloud
        form = {"grant_type": "client_credentials", "client_id": cloud.client_id, "client_secret": cloud.client_secret}
        form = {**form, "scope": "https://management.azure.com/.default", **changes}
        return self.raw("POST", f"/{cloud.tenant}/oauth2/v2.0/token", urlencode(form))

    def body(self, **changes: Any) -> dict[str, Any]:
        subnet = self.path("/providers/Microsoft.Network/virtualNetworks/spotd/subnets/default")
        ip = {"name": "pip", "sku": {"name": "Standard"}, "properties": {"deleteOption": "Delete"}}
        nic = {
            "name": "nic",
            "properties": {
                "primary": True,
                "deleteOption": "Delete",
                "ipConfigurations": [
                    {"name": "ip", "properties": {"subnet": {"id": subnet}, "publicIPAddressConfiguration": ip}}
                ],
            },
        }
        keys = [{"path": "/home/spotd/.ssh/authorized_keys", "keyData": "ssh-ed25519 AAAA"}]
        properties = {
            "hardwareProfile": {"vmSize": H100},
            "priority": "Spot",
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": -1},
            "storageProfile": {
                "imageReference": {
                    "publisher": "microsoft-dsvm",
                    "offer": "ubuntu-hpc",
                    "sku": "2204",
                    "version": "latest",
                },
                "osDisk": {"createOption": "FromImage", "deleteOption": "Delete", "diskSizeGB": 128},
            },
            "osProfile": {
                "computerName": KEY,
                "adminUsername": "spotd",
                "customData": base64.b64encode(SCRIPT.encode()).decode(),
                "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": keys}},
            },
            "networkProfile": {"networkApiVersion": "2022-11-01", "networkInterfaceConfigurations": [nic]},
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": True}},
        }
        tags = {"spotd-install": "lab", "spotd-key": KEY}
        return {
            "location": "westeurope",
            "zones": ["1"],
            "tags": tags,
            **changes,
            "properties": {**properties, **changes.get("properties", {})},
        }

    def vm(self, name: str = KEY, rest: str = "") -> str:
        return self.path(f"/providers/Microsoft.Compute/virtualMachines/{name}{rest}")

    def launch(self, name: str = KEY, **changes: Any) -> RestReply:
        return self.ask("PUT", self.vm(name), self.body(**changes))

    def operation(self, reply: RestReply) -> Any:
        where = urlsplit(reply.headers["azure-asyncoperation"])
        return self.get(f"{where.path}?{where.query}")

    def states(self, name: str = KEY) -> tuple[str, list[str]]:
        row = self.ask("GET", f"{self.vm(name)}?$expand=instanceView").json["properties"]
        return row["provisioningState"], [one["code"] for one in row["instanceView"]["statuses"][1:]]

    def machine(self) -> str:
        (vm,) = self.cloud.rented.values()
        return vm.machine_id


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Account]:
    """A subscription with a group, a network and a subnet."""
    clock = FakeClock()
    cloud = AzureCloud(folder / "cloud", clock=clock, quirks=AzureQuirks(**quirks))
    cloud.stock(*some_sizes())
    with asking(Account, AzureApi(cloud), clock) as ask:
        ask.authorization = f"Bearer {cloud.issue_token()}"
        assert ask.ask("PUT", ask.path(""), {"location": "westeurope"}).status == 201
        subnets = {"subnets": [{"name": "default", "properties": {"addressPrefix": "10.0.0.0/16"}}]}
        network = {"location": "westeurope", "properties": subnets}
        path = ask.path("/providers/Microsoft.Network/virtualNetworks/spotd")
        assert ask.ask("PUT", path, network, "2022-11-01").status == 201
        yield ask


def test_a_login_gives_a_token_that_ends(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.authorization = f"Bearer {ask.log_in().json['access_token']}"
        assert ask.ask("GET", ask.path("")).status == 200
        ask.clock.advance(timedelta(seconds=3600))
        assert ask.ask("GET", ask.path("")).json["error"]["code"] == "ExpiredAuthenticationToken"
        assert ask.log_in(client_secret="other").status == 401
        assert ask.log_in(scope="compute").status == 400


def test_each_call_needs_a_version_and_paths_have_no_case(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        assert ask("GET", ask.path("")).json["error"]["code"] == "MissingApiVersionParameter"
        assert ask.ask("GET", ask.vm(), version="soon").json["error"]["code"] == "InvalidApiVersionParameter"
        assert ask.launch().status == 201
        row = ask.ask("GET", ask.vm().upper()).json
        assert row["name"] == KEY
        assert "/resourceGroups/SPOTD/" in row["id"]
        assert ask.ask("GET", ask.vm().replace("/spotd/", "/other/")).json["error"]["code"] == "ResourceGroupNotFound"


def test_prices_come_in_pages_with_rows_that_are_no_hour_of_a_linux_machine(tmp_path: Path) -> None:
    text = "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and armRegionName eq 'westeurope'"
    query = f"/api/retail/prices?api-version=2023-01-01-preview&$filter={quote(text)}"
    with account(tmp_path, price_rows=10) as ask:
        ask.authorization = ""
        rows, link = [], query
        while link:
            answer = ask.get(link)
            rows += answer["Items"]
            assert answer["Count"] == len(answer["Items"]) <= 10
            parts = urlsplit(answer["NextPageLink"] or "")
            link = f"{parts.path}?{parts.query}" if answer["NextPageLink"] else ""
        assert {row["armRegionName"] for row in rows} == {"westeurope"}
        of_one = [row for row in rows if row["armSkuName"] == "Standard_ND96isr_H100_v5"]
        found = {
            (row["skuName"], "Windows" in row["productName"]): row["retailPrice"]
            for row in of_one
            if row["retailPrice"]
        }
        assert found["ND96isr H100 v5", False] == 127.816
        assert found["ND96isr H100 v5", True] == pytest.approx(132.232)
        assert found["ND96isr H100 v5 Spot", False] == 21.26
        assert any("Low Priority" in name for name, _ in found)
        spot = ask.get(query + quote(" and (contains(skuName,'Spot') or armSkuName eq 'x')"))["Items"]
        assert spot
        assert all(row["skuName"].endswith("Spot") for row in spot)
        assert ask("GET", query + quote(" and price lt 1")).status == 400


def test_sizes_are_listed_by_region_with_capabilities_as_texts(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        path = f"/subscriptions/{ask.cloud.subscription}/providers/Microsoft.Compute/skus"
        wanted = quote("location eq 'eastus'")
        reply = ask.ask("GET", f"{path}?$filter={wanted}", version="2021-07-01")
        rows = {row["name"]: row for row in reply.json["value"] if row["resourceType"] == "virtualMachines"}
        assert set(rows) == {H100, "Standard_NC4as_T4_v3", "Standard_NC24ads_A100_v4"}
        said = {one["name"]: one["value"] for one in rows[H100]["capabilities"]}
        assert (said["GPUs"], said["vCPUs"], said["LowPriorityCapable"]) == ("1", "40", "True")
        assert rows["Standard_NC24ads_A100_v4"]["restrictions"][0]["reasonCode"] == "NotAvailableForSubscription"


def test_one_launch_makes_one_machine_however_often_it_is_sent(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        first = ask.launch()
        assert (first.status, first.json["properties"]["provisioningState"]) == (201, "Creating")
        assert "customData" not in first.json["properties"]["osProfile"]
        assert first.headers["retry-after"] == "10"
        assert ask.operation(first) == {"name": ask.operation(first)["name"], "status": "InProgress"}
        assert ask.launch().status == 200
        assert ask.launch(zones=["2"]).json["error"]["code"] == "PropertyChangeNotAllowed"
        ask.clock.advance(timedelta(minutes=1))
        assert ask.states() == ("Creating", ["PowerState/starting"])
        ask.clock.advance(timedelta(minutes=3))
        assert ask.states() == ("Succeeded", ["PowerState/running"])
        assert ask.operation(first)["status"] == "Succeeded"
        assert len(ask.cloud.rented) == 1


def test_a_condition_refuses_the_second_launch(tmp_path: Path) -> None:
    with account(tmp_path) as ask, ask.cloud.lock:
        ask.cloud.put(KEY, ask.body(), is_new_only=True)
        with pytest.raises(RestRefusal, match="412"):
            ask.cloud.put(KEY.upper(), ask.body(), is_new_only=True)


@pytest.mark.parametrize("change", INVALID, ids=str)
def test_a_launch_outside_its_schema_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        reply = ask.launch(**change)
        assert (reply.status, reply.json["error"]["code"]) == (400, "InvalidParameter")
        assert not ask.cloud.rented


def test_an_allocation_that_fails_leaves_a_failed_machine_that_does_not_bill(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.cloud.sell_out(H100, "westeurope")
        reply = ask.launch()
        ask.clock.advance(timedelta(minutes=1))
        assert ask.operation(reply)["error"]["code"] == "AllocationFailed"
        assert ask.states() == ("Failed", [])
        assert ask.cloud.billed(ask.machine()) == 0
        assert ask.ask("DELETE", f"{ask.vm()}?forceDeletion=true").status == 202
        ask.clock.advance(timedelta(minutes=1))
        assert ask.ask("GET", ask.vm()).json["error"]["code"] == "ResourceNotFound"


def test_refusals_by_cause(tmp_path: Path) -> None:
    with account(tmp_path, cores_spot=10, capacity_at_once=True) as ask:
        assert "quota" in ask.launch().json["error"]["message"]
        ask.cloud.quirks.cores_spot = 100
        cheap = ask.launch(properties={"billingProfile": {"maxPrice": 0.01}}).json["error"]
        assert cheap["code"] == "OperationNotAllowed"
        assert "max price" in cheap["message"]
        restricted = ask.launch(
            location="eastus", properties={"hardwareProfile": {"vmSize": "Standard_NC24ads_A100_v4"}}
        )
        assert restricted.json["error"]["code"] == "SkuNotAvailable"
        ask.cloud.sell_out(H100, "westeurope")
        assert ask.launch().json["error"]["code"] == "AllocationFailed"
        ask.cloud.quirks.refused_paths.add("/virtualmachines")
        assert (ask.launch().status, ask.launch().json["error"]["code"]) == (403, "AuthorizationFailed")
        assert not ask.cloud.rented


def test_the_list_has_pages_and_states_are_on_their_own_route(tmp_path: Path) -> None:
    with account(tmp_path, list_rows=1) as ask:
        ask.launch()
        ask.cloud.add_foreign("notebook")
        first = ask.ask("GET", ask.path("/providers/Microsoft.Compute/virtualMachines")).json
        link = urlsplit(first["nextLink"])
        second = ask.get(f"{link.path}?{link.query}")
        assert "nextLink" not in second
        assert [one["name"] for one in (*first["value"], *second["value"])] == [KEY, "notebook"]
        assert first["value"][0]["tags"]["spotd-key"] == KEY
        assert "instanceView" not in first["value"][0]["properties"]
        ask.cloud.quirks.list_rows = 9
        path = f"/subscriptions/{ask.cloud.subscription}/providers/Microsoft.Compute/virtualMachines?statusOnly=true"
        states = {
            one["name"]: one["properties"]["instanceView"]["statuses"] for one in ask.ask("GET", path).json["value"]
        }
        assert [one["code"] for one in states["notebook"]] == ["ProvisioningState/succeeded", "PowerState/running"]
        ask.cloud.quirks.breaks_list = True
        broken = urlsplit(ask.ask("GET", path).json["nextLink"])
        assert ask("GET", f"{broken.path}?{broken.query}").status == 503


def test_an_end_takes_all_that_belongs_to_the_machine_and_may_be_survived_or_leave_a_disk(tmp_path: Path) -> None:
    with account(tmp_path, undead=1, leaves={"Microsoft.Compute/disks"}) as ask:
        ask.launch()
        kinds = {row["type"] for row in ask.ask("GET", ask.path("/resources")).json["value"]}
        assert "Microsoft.Network/publicIPAddresses" in kinds
        assert ask.ask("DELETE", ask.vm()).status == 202
        assert ask.states()[0] == "Creating", "it survives once"
        reply = ask.ask("DELETE", ask.vm())
        assert ask.states() == ("Deleting", [])
        ask.clock.advance(timedelta(minutes=2))
        assert ask.operation(reply)["status"] == "Succeeded"
        assert ask.ask("GET", ask.vm()).status == 404
        assert ask.ask("DELETE", ask.vm()).status == 204
        disks = ask.path("/providers/Microsoft.Compute/disks")
        (disk,) = ask.ask("GET", disks).json["value"]
        assert disk["tags"]["spotd-key"] == KEY
        spent = ask.cloud.spent_usd()
        ask.clock.advance(timedelta(hours=100))
        assert ask.cloud.spent_usd() == pytest.approx(spent + 2.7, rel=0.01)
        ask.authorization = f"Bearer {ask.cloud.issue_token()}"
        assert ask.ask("DELETE", f"{disks}/{disk['name']}").status == 202
        assert ask.ask("DELETE", f"{disks}/{disk['name']}").status == 204


def test_an_eviction_is_announced_and_told_late_by_the_log(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.launch()
        ask.clock.advance(timedelta(minutes=5))
        assert ask.ask("POST", ask.vm(rest="/simulateEviction")).status == 204
        assert _events(ask)["Events"][0]["EventType"] == "Preempt"
        since = ask.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        ask.clock.advance(timedelta(seconds=31))
        assert ask.ask("GET", ask.vm()).status == 404
        sub, uri = f"/subscriptions/{ask.cloud.subscription}", ask.vm()
        text = quote(f"eventTimestamp ge '{since}' and resourceUri eq '{uri}'")
        path = f"{sub}/providers/Microsoft.Insights/eventtypes/management/values?$filter={text}"
        assert ask.ask("GET", path, version="2015-04-01").json["value"] == []
        ask.clock.advance(timedelta(minutes=3))
        (event,) = ask.ask("GET", path, version="2015-04-01").json["value"]
        assert event["operationName"]["value"] == "Microsoft.Compute/virtualMachines/evictSpotVM/action"
        billed = ask.cloud.billed(ask.machine())
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(ask.machine()) == billed


def _events(ask: Account, name: str = KEY) -> Any:
    connection = HTTPConnection("127.0.0.1", ask._port, timeout=10)
    try:
        path = f"/imds/{name}/metadata/scheduledevents?api-version=2020-07-01"
        connection.request("GET", path, headers={"Metadata": "true"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_a_price_above_the_cap_evicts_and_any_other_is_paid(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.launch(properties={"billingProfile": {"maxPrice": 3.0}})
        ask.launch("spotd-lab-7f3a-2")
        ask.clock.advance(timedelta(minutes=5))
        ask.ask("GET", ask.vm())
        ask.cloud.set_price(H100, "westeurope", spot=4.0)
        assert ask.ask("GET", ask.vm()).status == 404
        other = ask.cloud.named("spotd-lab-7f3a-2")
        assert other is not None
        before = ask.cloud.billed(other.machine_id)
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(other.machine_id) - before == pytest.approx(4.032 * MICRO, rel=0.001)


def test_the_script_runs_its_console_is_behind_a_secret_and_a_shutdown_bills_on(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        script = base64.b64encode(b"#!/bin/sh\necho begun\nshutdown -h now\nexec sleep 600\n").decode()
        system = {**ask.body()["properties"]["osProfile"], "customData": script}
        ask.launch(properties={"osProfile": system})
        ask.clock.advance(timedelta(minutes=5))
        until(lambda: ask.states() == ("Succeeded", ["PowerState/stopped"]))
        link = ask.ask("POST", ask.vm(rest="/retrieveBootDiagnosticsData")).json["serialConsoleLogBlobUri"]
        assert BLOB_SECRET in link
        place = urlsplit(link)
        assert "begun" in ask("GET", f"{place.path}?{place.query}").text
        assert ask("GET", place.path).status == 403
        before = ask.cloud.billed(ask.machine())
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(ask.machine()) - before >= 2.5 * MICRO


def test_scores_rates_and_quotas_are_told_where_they_are_allowed(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        sub = f"/subscriptions/{ask.cloud.subscription}/providers/Microsoft.Compute/locations/westeurope"
        body = {
            "desiredLocations": ["westeurope"],
            "desiredSizes": [{"sku": H100}],
            "desiredCount": 1,
            "availabilityZones": True,
        }
        path = f"{sub}/placementScores/spot/generate"
        scores = ask.ask("POST", path, body).json["placementScores"]
        assert [(one["availabilityZone"], one["score"]) for one in scores] == [
            ("1", "High"),
            ("2", "High"),
            ("3", "High"),
        ]
        assert ask.ask("POST", path, {**body, "desiredLocations": ["x"] * 9}).status == 400
        kind = "microsoft.compute/skuspotevictionrate/location"
        where = f"where type =~ '{kind}' and location =~ 'westeurope'"
        query = f"SpotResources | {where} | project sku.name, rate = tostring(properties.evictionRate)"
        graph = "/providers/Microsoft.ResourceGraph/resources"
        asked = {"subscriptions": [ask.cloud.subscription], "query": query}
        rows = ask.ask("POST", graph, asked, "2021-03-01").json["data"]
        assert {"sku.name": H100.lower(), "rate": "5-10"} in rows
        assert ask.ask("POST", graph, {**asked, "query": "Resources"}, "2021-03-01").status == 400
        ask.launch()
        usages = {one["name"]["value"]: one for one in ask.ask("GET", f"{sub}/usages").json["value"]}
        assert usages["lowPriorityCores"]["currentValue"] == 40
        ask.cloud.quirks.unpreviewed = 403
        assert ask.ask("POST", path, body).status == 403


def test_machines_are_listed_late_hidden_spoiled_or_of_another_market(tmp_path: Path) -> None:
    late = timedelta(minutes=2)
    with account(tmp_path, list_lag=late, show_lag=late, sells_regular=True) as ask:
        ask.launch()
        path = ask.path("/providers/Microsoft.Compute/virtualMachines")
        assert ask.ask("GET", ask.vm()).status == 404
        assert ask.ask("GET", path).json["value"] == []
        ask.clock.advance(late)
        assert ask.ask("GET", ask.vm()).json["properties"]["priority"] == "Regular"
        ask.cloud.quirks.edit_row[ask.machine()] = "not a row"
        assert ask.ask("GET", path).json["value"] == ["not a row"]
        ask.cloud.quirks.hidden.add(ask.machine())
        assert ask.ask("GET", path).json["value"] == []


def test_a_refused_launch_may_have_made_its_machine(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.cloud.quirks.fail_after_launch = RestRefusal(500, "Something went wrong", code="InternalServerError")
        assert ask.launch().status == 500
        assert ask.cloud.named(KEY) is not None
        ask.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(429, "Slow down", headers={"retry-after": "7"})
        reply = ask.launch("spotd-lab-7f3a-2")
        assert (reply.json["error"]["code"], reply.headers["retry-after"]) == ("TooManyRequests", "7")
