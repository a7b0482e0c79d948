"""The fake Verda keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import MICRO
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.serve import Call
from tests.fakes.rest import RestRefusal
from tests.fakes.verda import JUPYTER_TOKEN, VerdaApi, VerdaCloud, VerdaQuirks, some_types
from tests.unit.providers.local.waiting import until
from tests.unit.providers.rest_client import RestClient, RestReply, asking

KEY = "spotd-lab-7f3a-1"
TYPE = "1H100.80S.30V"
CREATE: dict[str, Any] = {
    "instance_type": TYPE,
    "image": "ubuntu-24.04-cuda-12.8-open-docker",
    "hostname": KEY,
    "description": KEY,
    "location_code": "FIN-03",
    "is_spot": True,
    "contract": "SPOT",
    "pricing": "FIXED_PRICE",
    "ssh_key_ids": [],
    "os_volume": {"name": KEY, "size": 73, "on_spot_discontinue": "delete_permanently"},
    "tags": [{"key": "spotd", "value": KEY}],
}
ON_DEMAND: dict[str, Any] = {"is_spot": False, "contract": "PAY_AS_YOU_GO", "location_code": "FIN-01"}
SPOT_SLOT = 750_000 // 6
VOLUME_HOUR = 73 * 200_000 // 730
INVALID: tuple[dict[str, Any], ...] = (
    {"instance_type": None},
    {"instance_type": "9X900"},
    {"hostname": "under_score"},
    {"hostname": "x" * 61},
    {"description": ""},
    {"image": "windows"},
    {"instance_type": "1V100.6V", "location_code": "FIN-01"},
    {"location_code": "MARS-01"},
    {"is_spot": "true"},
    {"contract": "FREE"},
    {"pricing": "BID"},
    {"os_volume": {"name": "x", "size": "100"}},
    {"os_volume": {"name": "x", "size": 0}},
    {"os_volume": {"name": "x", "size": 10, "on_spot_discontinue": "burn"}},
    {"tags": [{"key": "k" * 64, "value": ""}]},
    {"tags": [{"key": str(n), "value": ""} for n in range(11)]},
    {"existing_volumes": ["lost"]},
    {"bid": 1},
)


class Account(RestClient):
    """A client with the words of Verda."""

    cloud: VerdaCloud

    def log_in(self, secret: str | None = None) -> RestReply:
        body = {"grant_type": "client_credentials", "client_id": self.cloud.client_id}
        return self("POST", "/oauth2/token", {**body, "client_secret": secret or self.cloud.client_secret})

    def create(self, **changes: Any) -> str:
        reply = self("POST", "/instances", {**CREATE, **changes})
        assert reply.status in (200, 202), reply
        return reply.text

    def no(self, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
        reply = self(method, path, body)
        assert set(reply.json) == {"code", "message"}, reply
        return reply.status, reply.json["code"], reply.json["message"]

    def refused(self, **changes: Any) -> tuple[int, str, str]:
        return self.no("POST", "/instances", {**CREATE, **changes})

    def end(self, *ids: str, volumes: tuple[str, ...] = (), **more: Any) -> RestReply:
        return self("PUT", "/instances", {"id": list(ids), "action": "delete", "volume_ids": list(volumes), **more})

    def boot(self) -> None:
        self.clock.advance(timedelta(minutes=3))

    def status(self, instance_id: str) -> str:
        return str(self.get(f"/instances/{instance_id}")["status"])


@contextmanager
def account(folder: Path, **quirks: Any) -> Iterator[Account]:
    clock = FakeClock()
    cloud = VerdaCloud(
        folder / "cloud", clock=clock, quirks=VerdaQuirks(**{"token_lives": timedelta(days=9), **quirks})
    )
    cloud.stock(*some_types())
    with asking(Account, VerdaApi(cloud), clock) as ask:
        ask.authorization = f"Bearer {ask.log_in().json['access_token']}"
        yield ask


def test_tokens_expire_are_refreshed_and_can_be_void_before_their_time(tmp_path: Path) -> None:
    with account(tmp_path, token_lives=timedelta(minutes=10), refresh_lives=timedelta(minutes=30)) as ask:
        expired = (401, "unauthorized_request", "The access token is invalid or has expired")
        assert ask.log_in("wrong").json["code"] == "unauthorized_request"
        answer = ask.log_in().json
        assert (answer["expires_in"], answer["token_type"]) == (600, "Bearer")
        ask.authorization = f"Bearer {answer['access_token']}"
        assert ask.get("/instances") == []
        ask.clock.advance(timedelta(minutes=10))
        assert ask.no("GET", "/instances") == expired
        refresh = {"grant_type": "refresh_token", "refresh_token": answer["refresh_token"]}
        ask.cloud.quirks.one_token = True
        again = ask("POST", "/oauth2/token", refresh).json
        ask.authorization = f"Bearer {again['access_token']}"
        assert ask.get("/instances") == []
        assert ask("POST", "/oauth2/token", refresh).status == 401, "a refresh token works once"
        ask.cloud.quirks.refresh_refused = 400
        assert ask.no("POST", "/oauth2/token", refresh)[:2] == (400, "invalid_request")
        ask.cloud.revoke_tokens()
        assert ask.no("GET", "/instances") == expired
        assert ask.get("/instance-types"), "the catalogue is open"
        ask.cloud.quirks.open_catalogue = False
        assert ask.no("GET", "/instance-types") == expired
        ask.cloud.break_auth()
        assert ask("POST", "/oauth2/token", {**refresh, "refresh_token": again["refresh_token"]}).status == 400
        ask.cloud.quirks.expires_in_says = 0
        assert ask.log_in().json["expires_in"] == 0


def test_prices_come_as_texts_numbers_or_both_and_in_euros_unless_dollars_are_asked_for(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        row = ask.get("/instance-types?currency=usd")[0]
        assert (row["price_per_hour"], row["spot_price"], row["currency"]) == ("2.19", "0.75", "usd")
        assert (row["gpu"], row["gpu_memory"]["size_in_gigabytes"]) == (
            {"description": "1x H100 SXM5 80GB", "number_of_gpus": 1}, 80,
        )  # fmt: skip
        euros = ask.get("/instance-types")[0]
        assert (euros["price_per_hour"], euros["currency"]) == ("1.971", "eur")
        ask.cloud.quirks.prices = "mixed"
        kinds = {type(one[name]) for one in ask.get("/instance-types") for name in ("price_per_hour", "spot_price")}
        assert kinds == {str, float}
        ask.cloud.quirks.prices, ask.cloud.quirks.any_currency = "number", "eur"
        assert ask.get("/instance-types?currency=usd")[0]["spot_price"] == 0.675
        assert [one["gpu"] for one in ask.get("/instance-types")][-2:] == [
            {"description": "", "number_of_gpus": 0}, None,
        ]  # fmt: skip
        assert ask("GET", "/instance-types?currency=gbp").status in (200, 400)
        price = ask.get("/volume-types")[0]["price"]
        assert price["price_per_month_per_gb"] == pytest.approx(price["cps_per_gb"] * 3600 * 730 / 100)
        ask.cloud.quirks.older_volume_prices = True
        assert "monthly_per_gb" in ask.get("/volume-types")[0]["price"]
        ask.cloud.quirks.edit_offer[TYPE] = "no row"
        assert ask.get("/instance-types")[0] == "no row"


@pytest.mark.parametrize("flag", ["isSpot", "is_spot", "either", "none"])
def test_the_spot_flag_is_read_in_one_spelling_in_both_or_not_at_all(tmp_path: Path, flag: str) -> None:
    def names(query: str) -> set[str]:
        rows = ask.get(f"/instance-availability?{query}")
        return {f"{name}@{row['location_code']}" for row in rows for name in row["availabilities"]}

    with account(tmp_path, spot_flag=flag) as ask:
        on_demand, spot = f"{TYPE}@FIN-01", f"{TYPE}@FIN-03"
        for name in ("isSpot", "is_spot"):
            is_read = flag in (name, "either")
            assert ((spot in names(f"{name}=true")), (on_demand in names(f"{name}=true"))) == (is_read, not is_read)
        assert on_demand in names("isSpot=false&is_spot=false")
        assert names("location_code=ICE-01") == set()
        assert ask.get(f"/instance-availability/{TYPE}?isSpot=true&is_spot=true&location_code=FIN-03") is (
            flag != "none"
        )
        assert ask("GET", "/instance-availability/9X900").status == 404


def test_an_instance_is_ordered_boots_runs_its_script_and_is_deleted_with_its_volume(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        script = ask("POST", "/scripts", {"name": KEY, "script": "#!/bin/sh\necho begun\nexec sleep 600\n"})
        assert script.json is None
        one = ask.create(startup_script_id=script.text)
        row = ask.get(f"/instances/{one}")
        assert (row["status"], row["os_volume_id"], row["ip"], row["tags"]) == ("ordered", None, None, CREATE["tags"])
        assert (row["price_per_hour"], row["is_spot"], row["jupyter_token"]) == ("0.75", True, JUPYTER_TOKEN)
        ask.clock.advance(timedelta(minutes=1))
        assert ask.status(one) == "provisioning"
        young = (400, "invalid_request", "Can't discontinue a provisioning instance")
        assert ask.no("PUT", "/instances", {"id": one, "action": "delete"}) == young
        ask.boot()
        row = ask.get("/instances?status=running")[0]
        assert (row["id"], row["volume_ids"]) == (one, [row["os_volume_id"]])
        until(lambda: ask.cloud.machines.console(one, lines=9) == ["begun"])
        assert ask("DELETE", f"/scripts/{script.text}").status == 200
        assert ask("GET", f"/scripts/{script.text}").status == 404
        assert ask.end(one, volumes=("strange",)).status == 400
        assert ask.end(one, volumes=tuple(row["volume_ids"]), delete_permanently=True).status == 202
        assert ask.status(one) == "deleting"
        assert ask("DELETE", f"/volumes/{row['os_volume_id']}", {"is_permanent": True}).status == 400
        until(lambda: not ask.cloud.machines.alive(one))
        ask.clock.advance(timedelta(minutes=1))
        assert (ask.get("/instances"), ask.get("/volumes"), ask.get("/volumes/trash")) == ([], [], [])
        assert ask.status(one) == "discontinued"
        gone = (400, "invalid_request", "Can't discontinue a discontinued instance")
        assert ask.no("PUT", "/instances", {"id": one, "action": "delete"}) == gone
        ask.clock.advance(timedelta(minutes=30))
        assert ask.no("GET", f"/instances/{one}") == (404, "not_found", "Invalid instance id")


def test_a_script_that_was_deleted_before_the_boot_does_not_run_unless_it_is_read_at_the_order(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ran = []
        for ask.cloud.quirks.script_read_at in ("boot", "order"):
            script = ask("POST", "/scripts", {"name": KEY, "script": "#!/bin/sh\nexec sleep 600\n"}).text
            one = ask.create(startup_script_id=script)
            ask("DELETE", f"/scripts/{script}")
            ask.boot()
            assert ask.status(one) == "running"
            ran.append(one in ask.cloud.machines.ids())
        assert ran == [False, True]
        ask.cloud.quirks.script_bytes_max = 10
        assert ask("POST", "/scripts", {"name": KEY, "script": "#!/bin/sh\ntrue\n"}).status == 400


@pytest.mark.parametrize("bills_from", ["order", "running"])
def test_an_instance_is_billed_ahead_in_slots_and_its_volume_by_the_second(tmp_path: Path, bills_from: str) -> None:
    with account(tmp_path, bills_from=bills_from) as ask:
        one = ask.create()
        ask.cloud.advance()
        assert ask.cloud.billed(one) == (SPOT_SLOT if bills_from == "order" else 0)
        ask.boot()
        volume = ask.get(f"/instances/{one}")["os_volume_id"]
        born = ask.cloud.volumes[volume].made_at
        ask.clock.advance(timedelta(minutes=18))
        assert ask.end(one).status == 202
        ask.clock.advance(timedelta(hours=9))
        # 21 minutes from the order are three slots, 18 from the first moment of running are two.
        assert ask.cloud.billed(one) == SPOT_SLOT * (3 if bills_from == "order" else 2)
        ask.clock.advance(timedelta(hours=10) - (ask.clock.now() - born))
        assert ask.get("/volumes")[0]["status"] == "detached", "a volume that no delete names stays, and is billed"
        assert ask.cloud.billed(volume) == 10 * VOLUME_HOUR
        assert ask.get("/balance")["amount"] == pytest.approx(500 - ask.cloud.spent_usd())
        assert ask("DELETE", f"/volumes/{volume}", {"is_permanent": True}).status == 202
        ask.clock.advance(timedelta(hours=10))
        assert ask.cloud.billed(volume) == 10 * VOLUME_HOUR
        assert all(span.end is not None for span in segments(read_ledger(ask.cloud.ledger_path)))


@pytest.mark.parametrize(
    ("unnamed", "permanently", "names", "left", "trash_bills"),
    [("detached", False, False, "detached", False), ("trash", False, False, "trash", False),
     ("trash", False, False, "trash", True), ("detached", False, True, "trash", False),
     ("trash", True, True, "none", True), ("detached", True, False, "detached", False)],
)  # fmt: skip
def test_what_a_delete_does_not_name_stays_and_what_it_names_lies_in_the_trash_for_four_days(
    tmp_path: Path, unnamed: str, permanently: bool, names: bool, left: str, trash_bills: bool
) -> None:
    with account(tmp_path, unnamed_volumes=unnamed, trash_bills=trash_bills) as ask:
        one = ask.create()
        ask.boot()
        volume = ask.get(f"/instances/{one}")["os_volume_id"]
        ask.end(one, volumes=(volume,) if names else (), delete_permanently=permanently)
        ask.clock.advance(timedelta(minutes=1))
        rows = {"detached": ask.get("/volumes"), "trash": ask.get("/volumes/trash")}
        assert {kind: [row["id"] for row in found] for kind, found in rows.items() if found} == (
            {} if left == "none" else {left: [volume]}
        )
        assert ask.cloud.ledger.is_open(volume) is (left == "detached" or (trash_bills and left == "trash"))
        ask.clock.advance(timedelta(hours=96))
        assert ask.get("/volumes/trash") == []
        assert ask.cloud.ledger.is_open(volume) is (left == "detached")


@pytest.mark.parametrize("wish", [None, "keep_detached", "move_to_trash", "delete_permanently"])
def test_a_spot_instance_that_is_taken_away_leaves_its_volume_as_it_was_asked(tmp_path: Path, wish: str | None) -> None:
    with account(tmp_path) as ask:
        disk = {"name": KEY, "size": 10, **({"on_spot_discontinue": wish} if wish else {})}
        one = ask.create(os_volume=disk)
        ask.boot()
        ask.get("/instances")
        ask.cloud.preempt(one)
        assert ask.status(one) == "discontinued"
        rows = (len(ask.get("/volumes")), len(ask.get("/volumes/trash")))
        assert rows == {"move_to_trash": (0, 1), "delete_permanently": (0, 0)}.get(wish or "", (1, 0))
        ask.cloud.quirks.preempted_shows = "nothing"
        ask.cloud.quirks.volume_lag = timedelta(minutes=20)
        lost, off = ask.create(os_volume=disk), ask.create()
        ask.boot()
        ask.get("/instances")
        ask.cloud.preempt(lost)
        assert ask("GET", f"/instances/{lost}").status == 404
        late = [row for row in ask.get("/volumes") if row["instance_id"] == lost]
        assert [row["status"] for row in late] == (["attached"] if rows == (1, 0) else [])
        for row in late:
            assert ask("DELETE", f"/volumes/{row['id']}").status == 400
            ask.clock.advance(timedelta(minutes=20))
            assert ask.get(f"/volumes/{row['id']}")["status"] == "detached"
        ask.cloud.quirks.preempted_shows = "offline"
        ask.cloud.preempt(off)
        assert ask.status(off) == "offline"
        assert ask.cloud.ledger.is_open(off)


def test_several_ids_are_answered_one_by_one_in_a_2xx(tmp_path: Path) -> None:
    with account(tmp_path, undeletable=frozenset({"provisioning"}), undead=0) as ask:
        old = ask.create()
        ask.boot()
        ask.cloud.quirks.undead = 1
        young = ask.create()
        ask.clock.advance(timedelta(minutes=1))
        reply = ask.end(old, young, "unknown")
        assert (reply.status, [(row["status"], row["statusCode"]) for row in reply.json]) == (
            202, [("success", 202), ("error", 400), ("error", 404)],
        )  # fmt: skip
        assert reply.json[1]["error"] == "Can't discontinue a provisioning instance"
        ask.cloud.quirks.results = "always"
        assert ask.end("unknown").json[0] | {"error": ""} == {
            "action": "delete", "instanceId": "unknown", "status": "error", "error": "", "statusCode": 404,
        }  # fmt: skip
        ask.boot()
        assert [ask.end(young).json[0]["status"], ask.status(young)] == ["success", "running"], "it survives once"
        ask.cloud.quirks.results = "never"
        assert ask.no("PUT", "/instances", {"id": ["unknown", young], "action": "delete"})[0] == 404
        assert ask.status(young) == "deleting"
        for bad in (
            {"action": "delete"},
            {"id": [], "action": "delete"},
            {"id": [7], "action": "delete"},
            {"id": young},
        ):
            assert ask("PUT", "/instances", bad).status == 400


def test_what_a_create_may_not_hold_is_refused_and_orders_nothing(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        answers = [(changes, ask.refused(**changes)[:2]) for changes in INVALID]
        assert [one for one in answers if one[1] != (400, "invalid_request")] == []
        assert ask.refused(instance_type="1V100.6V", location_code="FIN-01")[2].startswith("Operating system is not")
        for lost in ({"startup_script_id": "lost"}, {"ssh_key_ids": ["lost"]}):
            assert ask.refused(**lost)[:2] == (404, "not_found")
        for text in ("{", "[]", '{"instance_type": NaN}'):
            assert ask.raw("POST", "/instances", text).status == 400
        ask.cloud.quirks.needs_ssh_key, ask.cloud.quirks.os_volume_gb_min = True, 50
        assert ask.refused()[2] == "ssh_key_ids should not be empty"
        key = ask("POST", "/ssh-keys", {"name": "a", "key": "ssh-ed25519 AAAA"}).text
        assert ask.refused(ssh_key_ids=[key], os_volume={"name": "x", "size": 49})[1] == "invalid_request"
        ask.cloud.quirks.takes_tags = False
        assert ask.refused(ssh_key_ids=[key])[2] == "property tags should not exist"
        assert not ask.cloud.rented
        images = {row["image_type"]: row["id"] for row in ask.get("/images?instance_type=1V100.6V")}
        assert set(images) == set(ask.cloud.types["1V100.6V"].images)
        ask.cloud.quirks.needs_ssh_key, ask.cloud.quirks.takes_tags = False, True
        ask.create(location_code="FIN-01", instance_type="1V100.6V", image=images["ubuntu-22.04-cuda-12.4-docker"])


def test_a_create_is_refused_by_cause(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        assert ask.refused(location_code="ICE-01")[1:] == (
            "invalid_request", "Instance type is not available in this location",
        )  # fmt: skip
        ask.cloud.quirks.capacity = RestRefusal(503, "GPUs are out of stock", code="service_unavailable")
        ask.cloud.sell_out(TYPE)
        assert ask.refused() == (503, "service_unavailable", "GPUs are out of stock")
        ask.cloud.quirks.quota_gpus = 7
        assert "limit" in ask.refused(instance_type="8H100.80S.176V")[2]
        ask.cloud.deposit_usd = 0.1
        assert ask.refused()[:2] == (402, "insufficient_funds")
        ask.cloud.quirks.refusals[Call.LAUNCH] = RestRefusal(500, "Internal error", code="server_error")
        assert ask.refused()[:2] == (500, "server_error")
        assert not ask.cloud.rented
        ask.cloud.quirks.requests_per_minute, ask.cloud.quirks.retry_after_s = 1, 7
        limited = ask("GET", "/instances")
        assert (limited.status, limited.headers["retry-after"]) == (429, "7")


def test_a_launch_may_happen_although_it_is_refused_or_lost_and_hostnames_repeat(tmp_path: Path) -> None:
    with account(tmp_path, fail_after_launch=RestRefusal(503, "x", code="service_unavailable")) as ask:
        assert ask.refused()[0] == 503
        ask.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OSError):
            ask.create()
        ask.cloud.quirks.quoted_id, ask.cloud.quirks.create_status = True, 200
        assert ask.create().startswith('"')
        assert [row["hostname"] for row in ask.get("/instances")] == [KEY] * 3


def test_lists_lag_leave_out_spoil_and_show_strangers(tmp_path: Path) -> None:
    lag = timedelta(seconds=30)
    with account(tmp_path, list_lag=2 * lag, show_lag=lag, echoes_tags=False) as ask:
        one, foreign = ask.create(), ask.cloud.add_foreign("notebook", tags={"spotd": "x"}).machine_id
        assert [row["id"] for row in ask.get("/instances")] == [foreign]
        assert "tags" not in ask.get("/instances")[0]
        assert ask("GET", f"/instances/{one}").status == 404
        ask.clock.advance(lag)
        assert ask("GET", f"/instances/{one}").status == 200
        ask.clock.advance(lag)
        assert len(ask.get("/instances")) == 2
        ask.cloud.quirks.edit_row[one] = {"status": "meditating"}
        assert ask.status(one) == "meditating"
        ask.cloud.quirks.edit_row[one] = "no row"
        assert "no row" in ask.get("/instances")
        ask.cloud.quirks.hidden.add(one)
        assert len(ask.get("/instances")) == 1
        ask.cloud.vanish(foreign)
        assert ask.get("/instances") == []


@pytest.mark.parametrize("failure", ["no_capacity", "error", "provisioning"])
def test_a_boot_that_fails_has_a_word_and_a_bill_of_its_own(tmp_path: Path, failure: str) -> None:
    with account(tmp_path) as ask:
        ask.cloud.fail_next_boot(TYPE, failure)
        one = ask.create()
        ask.clock.advance(timedelta(hours=1))
        assert ask.status(one) == failure
        assert len(ask.get("/volumes")) == (failure != "no_capacity")
        assert ask.cloud.billed(one) == (SPOT_SLOT if failure == "no_capacity" else 6 * SPOT_SLOT)
        assert ask.end(one).status == (400 if failure == "provisioning" else 202)


def test_who_sells_spot_is_a_reading_and_the_dynamic_price_follows_the_market(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        bought = []
        for ask.cloud.quirks.spot_decided_by in ("is_spot", "contract", "nothing"):
            place = "FIN-01" if ask.cloud.quirks.spot_decided_by == "contract" else "FIN-03"
            row = ask.get(f"/instances/{ask.create(contract=None, location_code=place)}")
            bought.append((row["is_spot"], row["price_per_hour"]))
        assert bought == [(True, "0.75"), (False, "2.19"), (False, "2.19")]
        ask.cloud.quirks.default_pricing = "DYNAMIC_PRICE"
        moving = ask.create(**{**ON_DEMAND, "pricing": None})
        fixed = ask.create(**ON_DEMAND)
        ask.cloud.set_price(TYPE, price=4.0)
        assert ask.get(f"/instances/{moving}")["price_per_hour"] == "2.4"
        assert ask.get(f"/instances/{fixed}")["price_per_hour"] == "2.19"


@pytest.mark.parametrize("bills", [True, False])
def test_a_stop_bills_on_by_the_knob_and_an_empty_balance_stops_and_ends(tmp_path: Path, bills: bool) -> None:
    with account(tmp_path, offline_bills=bills, slot=timedelta(seconds=1), stops_at_zero=True) as ask:
        one = ask.create()
        ask.boot()
        assert ask("PUT", "/instances", {"id": one, "action": "shutdown"}).status == 202
        before = ask.cloud.billed(one)
        ask.clock.advance(timedelta(hours=1))
        assert ask.cloud.billed(one) - before == (MICRO * 3 // 4 if bills else 0)
        assert ask("PUT", "/instances", {"id": one, "action": "start"}).status == 202
        assert ask.no("PUT", "/instances", {"id": one, "action": "start"})[:2] == (403, "forbidden_action")
        ask.cloud.deposit_usd = 0.0
        assert ask.status(one) == "offline"
        assert ask.get("/balance")["amount"] < 0
        ask.cloud.quirks.balance_currency = "eur"
        assert ask.get("/balance")["currency"] == "eur"
        ask.clock.advance(timedelta(days=1))
        assert ask.status(one) == "discontinued"
        assert not ask.cloud.ledger.is_open(one)
