"""The fake Prime Intellect keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call
from tests.fakes.primeintellect import JUPYTER_PASSWORD, PrimeApi, PrimeCloud, PrimeQuirks, some_configurations
from tests.fakes.rest import RestRefusal
from tests.unit.providers.local.waiting import until
from tests.unit.providers.rest_client import RestClient, asking

KEY = "spotd-lab-7f3a-1"
POD: dict[str, Any] = {
    "name": KEY,
    "cloudId": "1A100.22V",
    "gpuType": "A100_80GB",
    "socket": "SXM4",
    "gpuCount": 1,
    "diskSize": 100,
    "vcpus": None,
    "memory": None,
    "image": "custom_template",
    "customTemplateId": "template-1",
    "dataCenterId": "FIN-02",
    "country": "FI",
    "security": "secure_cloud",
    "maxPrice": 0.6,
    "envVars": [{"key": "SPOTD_START", "value": 'echo "it\'s" begun; exec sleep 600'}],
    "sshKeyId": None,
    "jupyterPassword": None,
    "autoRestart": False,
    "prepaidForHr": None,
}
HOUR = 574_800 + 100 * 140
INVALID: tuple[dict[str, Any], ...] = (
    {"cloudId": None},
    {"gpuCount": "1"},
    {"diskSize": 49},
    {"diskSize": 3001},
    {"maxPrice": "0.6"},
    {"autoRestart": "no"},
    {"envVars": {"K": "V"}},
    {"image": "windows"},
    {"bid": 1},
)


class Account(RestClient):
    """A client with the words of Prime Intellect."""

    cloud: PrimeCloud

    def order(self, upstream: str = "datacrunch", **changes: Any) -> Any:
        body: dict[str, Any] = {"pod": {**POD, **changes}, "provider": {"type": upstream}, "disks": [], "team": None}
        return self("POST", "/pods/", body)

    def create(self, **changes: Any) -> str:
        reply = self.order(**changes)
        assert reply.status == self.cloud.quirks.create_status, reply
        return str(reply.json["id"])

    def refused(self, **changes: Any) -> int:
        reply = self.order(**changes)
        assert set(reply.json) == {"detail"}, reply
        return int(reply.status)

    def boot(self) -> None:
        self.clock.advance(timedelta(minutes=4))

    def pod(self, pod_id: str) -> Any:
        return self.get(f"/pods/{pod_id}")

    def offers(self, query: str = "") -> dict[str, Any]:
        return {row["cloudId"]: row for row in self.get(f"/availability/gpus{query}")["items"]}


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Account]:
    clock = FakeClock()
    cloud = PrimeCloud(folder / "cloud", clock=clock, quirks=PrimeQuirks(**quirks))
    cloud.stock(*some_configurations())
    with asking(Account, PrimeApi(cloud), clock) as ask:
        ask.authorization = f"Bearer {cloud.api_key}"
        yield ask


def test_offers_come_in_pages_with_and_without_the_disk_in_their_price(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        first = ask.get("/availability/gpus?page=1&page_size=4")
        assert (len(first["items"]), first["totalCount"]) == (4, len(some_configurations()))
        assert ask.get("/availability/gpus?page=9&page_size=4")["items"] == []
        rows = ask.offers()
        assert rows["NVIDIA A100 80GB PCIe"]["prices"]["onDemand"] == pytest.approx(1.64 + 120 * 0.00014)
        assert rows["NVIDIA A100 80GB PCIe"]["disk"]["defaultIncludedInPrice"] is False
        assert [rows[one]["isSpot"] for one in ("n3-H100x1", "shared", "1A100.22V")] == [None, False, True]
        assert rows["shared"]["prices"]["onDemand"] is None
        assert rows["gone"]["stockStatus"] == "Unavailable"
        ask.cloud.quirks.stock_words = ("Waitlist",)
        assert {row["stockStatus"] for row in ask.offers().values()} == {"Waitlist", "Unavailable"}
        assert set(rows["moving"]["sharedDisk"].values()) == {None}
        ask.cloud.quirks.disk_in_price, ask.cloud.quirks.memory_total = False, True
        ask.cloud.quirks.empty_blocks, ask.cloud.quirks.lists_sold_out = "null", False
        rows = ask.offers("?gpu_type=A100_80GB&regions=eu_north&regions=eu_west")
        assert {key: (row["gpuMemory"], row["prices"]["onDemand"]) for key, row in rows.items()} == {
            "1A100.22V": (80, 0.5748), "2A100.44V": (160, 1.1496),
        }  # fmt: skip
        assert rows["1A100.22V"]["sharedDisk"] is None
        assert "gone" not in ask.offers()
        assert ask.get("/availability/gpu-summary")["A100_80GB"]["1"]["cheapest"] == {
            "onDemand": 1.64, "communityPrice": None, "spotPrice": 0.5748,
        }  # fmt: skip
        for query in ("page_size=101", "page_size=0", "page=0", "page=x"):
            assert ask("GET", f"/availability/gpus?{query}").status == 422


def test_a_sick_replica_sells_nothing_and_a_page_may_fail(tmp_path: Path) -> None:
    with account(tmp_path, sick_answers=2, total_lies=3) as ask:
        assert [len(ask.offers()) > 0 for _ in range(3)] == [False, False, True]
        assert ask.get("/availability/gpus")["totalCount"] == len(some_configurations()) + 3
        ask.cloud.quirks.fails_from = 4
        pages = [ask("GET", f"/availability/gpus?page={page}&page_size=4").status for page in (1, 2)]
        assert pages == [200, 500]
        ask.cloud.quirks.edit_offer["n3-H100x1"] = "no row"
        assert "no row" in ask.get("/availability/gpus?page_size=4")["items"]


def test_a_pod_boots_installs_runs_its_template_with_its_variables_and_goes_to_the_history(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        pod = ask.create()
        row = ask.pod(pod)
        assert (row["status"], row["sshConnection"], row["isSpot"]) == ("PROVISIONING", None, True)
        assert row["priceHr"] == pytest.approx(HOUR / 1e6)
        assert row["jupyterPassword"] == JUPYTER_PASSWORD
        ask.clock.advance(timedelta(minutes=3))
        row = ask.pod(pod)
        assert (row["status"], row["installationStatus"], row["installationProgress"]) == ("ACTIVE", "PENDING", 40)
        assert (row["sshConnection"], row["ip"]) == ("root@203.0.113.77 -p 22", "203.0.113.77")
        assert pod not in ask.cloud.machines.ids()
        ask.clock.advance(timedelta(minutes=1))
        listed = ask.get("/pods/?offset=0&limit=100")
        assert (listed["total_count"], listed["data"][0]["installationStatus"]) == (1, "FINISHED")
        until(lambda: ask.cloud.machines.console(pod, lines=9) == ["it's begun"])
        ended = ask("DELETE", f"/pods/{pod}")
        assert (ended.status, ended.json["status"]) == (200, "DELETING")
        ask.clock.advance(timedelta(minutes=1))
        assert ask("GET", f"/pods/{pod}").json == {"detail": "Pod not found"}
        assert ask("DELETE", f"/pods/{pod}").status == 404
        assert ask.get("/pods/")["data"] == []
        (past,) = ask.get("/pods/history")["data"]
        assert (past["id"], past["status"], past["totalBilledPrice"]) == (pod, "TERMINATED", ask.cloud.spent_usd())


@pytest.mark.parametrize(("slash", "there", "elsewhere"), [("with", "/", ""), ("without", "", "/")])
def test_a_path_with_the_other_slash_is_elsewhere(tmp_path: Path, slash: str, there: str, elsewhere: str) -> None:
    with account(tmp_path, slash=slash) as ask:
        for method, path in (("GET", "/pods"), ("POST", "/pods"), ("GET", "/pods/status")):
            reply = ask(method, f"{path}{elsewhere}?a=1", {} if method == "POST" else None)
            assert (reply.status, reply.headers["location"]) == (307, f"/api/v1{path}{there}?a=1")
        assert ask("GET", f"/pods{there}").status == 200
        ask.cloud.quirks.slash = "either"
        assert [ask("GET", f"/pods{end}").status for end in ("", "/")] == [200, 200]


@pytest.mark.parametrize("bills_from", ["order", "active"])
def test_a_pod_is_billed_by_the_second_with_its_disk_and_the_wallet_shows_it_late(
    tmp_path: Path, bills_from: str
) -> None:
    with account(tmp_path, bills_from=bills_from, billing_lag=timedelta(hours=1)) as ask:
        pod = ask.create()
        assert ask.pod(pod)["provisioningPriceHr"] == (HOUR / 1e6 if bills_from == "order" else 0)
        ask.boot()
        assert ask.get("/billing/wallet?limit=20&offset=0")["recent_billings"] == []
        ask.clock.advance(timedelta(minutes=116))
        ask("DELETE", f"/pods/{pod}")
        billed = round(HOUR * (2 if bills_from == "order" else 117 / 60))
        assert ask.cloud.billed(pod) == billed
        wallet = ask.get("/billing/wallet")
        assert wallet["balance_usd"] == pytest.approx(200 - billed / 1e6)
        (row,) = wallet["recent_billings"]
        assert (row["resource_id"], row["amount_usd"] < billed / 1e6) == (pod, True)
        ask.clock.advance(timedelta(hours=3))
        ask.cloud.quirks.billing_rows = "hour"
        rows = ask.get("/billing/wallet")["recent_billings"]
        assert (len(rows) > 1, sum(row["amount_usd"] for row in rows)) == (True, pytest.approx(billed / 1e6))


def test_what_a_create_may_not_hold_is_refused_and_orders_nothing(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        answers = [(changes, ask.refused(**changes)) for changes in INVALID]
        assert [one for one in answers if one[1] != 422] == []
        assert ask.order(cloudId=None).json["detail"][0]["loc"] == ["body", "pod", "cloudId"]
        assert ask.order(diskSize=1).json["detail"][0]["loc"] == ["body", "pod", "diskSize"]
        for changes in (
            {"cloudId": "old"},
            {"dataCenterId": "US-KS-2"},
            {"gpuCount": 2},
            {"security": "community_cloud"},
        ):
            assert ask.refused(**changes) == 404
        assert ask.refused(upstream="runpod") == 404
        assert ask.refused(customTemplateId="lost") == 404
        ahead = {"cloudId": "ahead", "gpuType": "B200_180GB", "socket": "PCIe", "dataCenterId": None, "diskSize": 120}
        assert ask.refused(upstream="primecompute", **ahead) == 422, "it has to be paid ahead"
        for text in ("{", "[]", "{}"):
            assert ask.raw("POST", "/pods/", text).status == 422
        assert not ask.cloud.rented
        ask.cloud.rename_cloud_ids()
        assert ask.refused() == 404
        assert "1A100.22V-b" in ask.offers()


def test_a_create_is_refused_by_cause(tmp_path: Path) -> None:
    with account(tmp_path, enforces_max_price=True) as ask:
        assert ask.refused(maxPrice=0.5) == 409
        ask.cloud.quirks.price_at_launch["A100_80GB"] = 0.61
        assert ask.refused() == 409
        ask.cloud.quirks.enforces_max_price = False
        assert ask.pod(ask.create())["priceHr"] == pytest.approx(0.61 + 0.014), "nobody reads the ceiling"
        ask.cloud.quirks.quota_gpus = 1
        assert ask.refused() == 403
        ask.cloud.sell_out("1A100.22V")
        assert ask.refused() == 409
        ask.cloud.quirks.capacity = RestRefusal(503, "upstream is out of stock")
        assert ask.refused() == 503
        ask.cloud.deposit_usd = 0.0
        assert ask.refused() == 402
        ask.cloud.quirks.scopes.discard("instances")
        assert (ask.refused(), ask("GET", "/availability/gpus").status) == (403, 200)
        ask.cloud.quirks.scopes.add("instances")
        ask.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(500, "Internal Server Error")
        assert ask.refused() == 500
        ask.cloud.api_key = "another"
        assert ask.refused() == 401


def test_a_pod_says_where_it_is_in_one_of_three_forms(tmp_path: Path) -> None:
    with account(tmp_path, cost_name="costPerHr", installation="progress") as ask:
        pod = ask.create()
        ask.boot()
        rows = []
        for ask.cloud.quirks.address in ("text", "list", "nothing"):
            rows += ask.get(f"/pods/status/?pod_ids={pod}&pod_ids=unknown")["data"]
        assert [row["ip"] for row in rows] == ["203.0.113.77", ["203.0.113.77"], [None]]
        row = rows[0]
        assert (row["podId"], row["costPerHr"]) == (pod, pytest.approx(HOUR / 1e6))
        assert (row["installationStatus"], row["installationProgress"]) == (None, 100)


def test_a_pod_without_a_template_waits_for_a_login(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        pod = ask.create(image="ubuntu_22_cuda_12", customTemplateId=None)
        ask.boot()
        assert ask.pod(pod)["status"] == "ACTIVE"
        assert pod not in ask.cloud.machines.ids()
        ask.cloud.run_there(pod, "#!/bin/sh\necho logged in\nexec sleep 600\n")
        until(lambda: ask.cloud.machines.console(pod, lines=9) == ["logged in"])


@pytest.mark.parametrize("shows", ["TERMINATED", "ERROR", "nothing"])
@pytest.mark.parametrize("bills", [True, False])
def test_a_pod_that_is_taken_away_is_gone_broken_or_forgotten(tmp_path: Path, shows: str, bills: bool) -> None:
    shown = {"lingers": timedelta(minutes=9), "lists_ended": True}
    with account(tmp_path, preempted_shows=shows, error_bills=bills, **shown) as ask:
        pod = ask.create()
        ask.boot()
        ask.pod(pod)
        ask.cloud.preempt(pod)
        assert not ask.cloud.machines.alive(pod)
        reply = ask("GET", f"/pods/{pod}")
        assert (reply.status == 404) if shows == "nothing" else reply.json["status"] == shows
        assert len(ask.get("/pods/")["data"]) == (shows != "nothing")
        assert ask.cloud.ledger.is_open(pod) is (shows == "ERROR")
        before = ask.cloud.billed(pod)
        ask.clock.advance(timedelta(minutes=6))
        assert ask.cloud.billed(pod) - before == (HOUR // 10 if shows == "ERROR" and bills else 0)
        assert ask("DELETE", f"/pods/{pod}").status == (200 if shows == "ERROR" else 404)


def test_auto_restart_gives_a_pod_a_second_life(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        pod = ask.create(autoRestart=True)
        ask.boot()
        ask.pod(pod)
        until(lambda: ask.cloud.machines.console(pod, lines=9) == ["it's begun"])
        ask.cloud.preempt(pod)
        assert ask.pod(pod)["status"] == "PROVISIONING"
        ask.boot()
        assert ask.pod(pod)["status"] == "ACTIVE"
        until(lambda: ask.cloud.machines.console(pod, lines=9) == ["it's begun"] * 2)


def test_launches_happen_unseen_lists_lag_and_rows_are_spoilt(tmp_path: Path) -> None:
    lag = timedelta(seconds=30)
    failing = RestRefusal(502, "Bad Gateway")
    with account(tmp_path, list_lag=2 * lag, show_lag=lag, fail_after_launch=failing, undead=1) as ask:
        assert ask.refused() == 502
        ask.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OSError):
            ask.create()
        first, _ = ask.cloud.rented
        foreign = ask.cloud.add_foreign("notebook").machine_id
        assert [row["name"] for row in ask.get("/pods/")["data"]] == ["notebook"]
        assert ask("GET", f"/pods/{first}").status == 404
        ask.clock.advance(2 * lag)
        assert [row["name"] for row in ask.get("/pods/")["data"]] == [KEY, KEY, "notebook"], "names repeat"
        page = ask.get("/pods/?offset=1&limit=1")
        assert (page["total_count"], len(page["data"])) == (3, 1)
        ask.cloud.quirks.fails_from = 1
        assert [ask("GET", f"/pods/?offset={at}&limit=1").status for at in (0, 1)] == [200, 500]
        ask.cloud.quirks.fails_from = None
        ask.cloud.quirks.edit_row = {first: {"status": "meditating"}, foreign: "no row"}
        rows = ask.get("/pods/")["data"]
        assert (rows[0]["status"], rows[2]) == ("meditating", "no row")
        ask.cloud.quirks.edit_row.clear()
        assert ask("DELETE", f"/pods/{first}").json["status"] == "PROVISIONING", "it survives once"
        ask.cloud.quirks.undeletable = frozenset({"PROVISIONING"})
        assert ask("DELETE", f"/pods/{first}").status == 409
        ask.cloud.quirks.undeletable = frozenset()
        ask("DELETE", f"/pods/{first}")
        assert ask("DELETE", f"/pods/{first}").status == 200
        ask.cloud.quirks.delete_again = True
        assert ask("DELETE", f"/pods/{first}").status == 409


@pytest.mark.parametrize("failure", ["ERROR", "PROVISIONING", "INSTALLING"])
def test_a_boot_that_fails_is_billed_until_it_is_deleted(tmp_path: Path, failure: str) -> None:
    with account(tmp_path) as ask:
        ask.cloud.fail_next_boot("A100_80GB", failure)
        pod = ask.create()
        ask.clock.advance(timedelta(hours=1))
        row = ask.pod(pod)
        assert row["status"] == ("ACTIVE" if failure == "INSTALLING" else failure)
        assert row["installationStatus"] == "PENDING"
        assert bool(row["installationFailure"]) is (failure == "ERROR")
        assert ask.cloud.billed(pod) == HOUR
        assert ask("DELETE", f"/pods/{pod}").status == 200
        assert not ask.cloud.ledger.is_open(pod)


def test_a_variable_price_moves_while_the_pod_runs(tmp_path: Path) -> None:
    moving = {"cloudId": "moving", "gpuType": "RTX4090_24GB", "socket": "PCIe", "dataCenterId": None, "diskSize": 120}
    with account(tmp_path) as ask:
        pod, fixed = ask.create(upstream="dc_roan", **moving), ask.create()
        ask.clock.advance(timedelta(hours=1))
        ask.cloud.set_price("moving", 3.0)
        ask.cloud.set_price("1A100.22V", 3.0)
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(pod) == 3_300_000 + 2 * 120 * 140
        assert ask.pod(fixed)["priceHr"] == pytest.approx(HOUR / 1e6)
