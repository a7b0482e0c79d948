"""The fake Lambda Cloud keeps to the written reference, as a client without any of our code would find it."""

from __future__ import annotations

import base64
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import MICRO
from spotd_providers.local.hosts import read_ledger, segments
from spotd_providers.testkit.serve import Call
from tests.fakes.lambdacloud import (
    EDGE_ERROR,
    JUPYTER_TOKEN,
    STATUSES,
    Failure,
    Phase,
)
from tests.unit.providers.lambdacloud.client import CENT, KEY, LAUNCH, OPERATIONS, PUBLIC, account
from tests.unit.providers.local.waiting import until

INVALID: tuple[dict[str, Any], ...] = (
    {"region_name": "mars-north-1"},
    {"region_name": None},
    {"instance_type_name": ""},
    {"ssh_key_names": []},
    {"ssh_key_names": ["spotd-lab", "laptop"]},
    {"ssh_key_names": "spotd-lab"},
    {"name": "x" * 65},
    {"name": ""},
    {"hostname": "under_score"},
    {"quantity": 1},
    {"bid": 1},
    {"image": {"id": "a", "family": "b"}},
    {"image": {}},
    {"user_data": "#!/bin/sh\n" + "x" * 1_000_000},
    {"user_data": "#cloud-config\nruncmd: []\n"},
    {"tags": [{"key": "Spotd", "value": "x"}]},
    {"tags": [{"key": "lambda-ai-x", "value": "x"}]},
    {"tags": [{"key": "a" * 56, "value": "x"}]},
    {"tags": [{"key": "ab", "value": "x" * 129}]},
    {"tags": [{"key": "ab", "value": 7}]},
    {"tags": [{"key": "ab", "value": "1"}, {"key": "ab", "value": "2"}]},
    {"tags": {"ab": "1"}},
    {"file_system_mounts": [{"mount_point": "/etc/x", "file_system_id": "f"}]},
    {"file_system_mounts": [{"mount_point": "/home/../etc", "file_system_id": "f"}]},
    {"firewall_rulesets": ["f"]},
)
"""Changes of a launch that are outside its schema."""
ABSENT: tuple[tuple[dict[str, Any], tuple[int, str]], ...] = (
    ({"instance_type_name": "gpu_1x_b300"}, (404, "global/object-does-not-exist")),
    ({"ssh_key_names": ["another"]}, (404, "global/object-does-not-exist")),
    ({"image": {"family": "windows"}}, (404, "global/object-does-not-exist")),
    ({"file_system_names": ["lost"]}, (404, "global/object-does-not-exist")),
    ({"firewall_rulesets": [{"id": "lost"}]}, (404, "global/object-does-not-exist")),
    ({"region_name": "europe-central-1"}, (400, "instance-operations/launch/insufficient-capacity")),
    (
        {"instance_type_name": "gpu_8x_a100_80gb_sxm4"},
        (400, "instance-operations/launch/insufficient-capacity"),
    ),
)
"""Changes of a launch that ask for what is not there, and how each is refused."""
LAGGED = timedelta(seconds=30)


def test_the_price_list_has_a_price_per_instance_and_the_regions_that_have_some(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        rows = ask("GET", "/instance-types").data
        assert rows["gpu_8x_h100_sxm5"] == {
            "instance_type": {
                "name": "gpu_8x_h100_sxm5",
                "description": "8x H100 (80 GB SXM5)",
                "gpu_description": "H100 (80 GB SXM5)",
                "price_cents_per_hour": 3592,
                "specs": {"vcpus": 208, "memory_gib": 1800, "storage_gib": 24780, "gpus": 8},
            },
            "regions_with_capacity_available": [{"name": "us-west-1", "description": "California, USA"}],
        }
        assert rows["gpu_8x_a100_80gb_sxm4"]["regions_with_capacity_available"] == []
        assert rows["cpu_4x_general"]["instance_type"]["gpu_description"] == "N/A"
        ask.cloud.quirks.edit_types["gpu_1x_a10"] = "no row"
        assert ask("GET", "/instance-types").data["gpu_1x_a10"] == "no row"


def test_an_instance_boots_runs_its_user_data_and_ends(tmp_path: Path) -> None:
    with account(tmp_path, lingers=timedelta(minutes=5)) as ask:
        machine = ask.launch()
        row = ask("GET", f"/instances/{machine}").data
        assert (row["status"], row["ip"], row["jupyter_token"]) == ("booting", None, None)
        assert row["actions"]["restart"]["reason_code"] == "vm-has-not-launched"
        ask.clock.advance(timedelta(minutes=1))
        row = ask.listed()[machine]
        assert (row["status"], row["name"], row["tags"]) == ("active", KEY, LAUNCH["tags"])
        assert row["instance_type"]["price_cents_per_hour"] == 75
        assert JUPYTER_TOKEN in row["jupyter_token"]
        assert JUPYTER_TOKEN in row["jupyter_url"]
        assert row["actions"]["terminate"] == {"available": True}
        until(lambda: ask.cloud.machines.console(machine, lines=9) == ["begun"])
        ended = ask.terminate(machine).data["terminated_instances"]
        assert [(one["id"], one["status"]) for one in ended] == [(machine, "terminating")]
        assert ended[0]["actions"]["terminate"]["reason_code"] == "vm-is-terminating"
        until(lambda: not ask.cloud.machines.alive(machine))
        ask.clock.advance(timedelta(minutes=1))
        assert ask.listed()[machine]["status"] == "terminated"
        assert ask.terminate(machine).error == (404, "global/object-does-not-exist")
        ask.clock.advance(timedelta(minutes=5))
        assert ask.listed() == {}
        assert ask("GET", f"/instances/{machine}").error == (404, "global/object-does-not-exist")


def test_eight_gpus_boot_for_longer(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        machine = ask.launch(instance_type_name="gpu_8x_h100_sxm5")
        ask.clock.advance(timedelta(minutes=18))
        assert ask.status(machine) == "booting"
        ask.clock.advance(timedelta(minutes=2))
        assert ask.status(machine) == "active"


def test_a_launch_outside_the_schema_or_of_what_is_not_there_is_refused_and_starts_nothing(tmp_path: Path) -> None:
    wanted = [*((changes, (400, "global/invalid-parameters")) for changes in INVALID), *ABSENT]
    with account(tmp_path) as ask:
        answers = [(changes, ask.refused(**changes)) for changes, _ in wanted]
        assert [one for one, right in zip(answers, wanted, strict=True) if one != right] == []
        assert not ask.cloud.instances


def test_capacity_is_used_up_and_comes_back_with_the_end(tmp_path: Path) -> None:
    none_left = (400, "instance-operations/launch/insufficient-capacity")
    with account(tmp_path) as ask:
        machine = ask.launch(instance_type_name="gpu_8x_h100_sxm5")
        assert ask("GET", "/instance-types").data["gpu_8x_h100_sxm5"]["regions_with_capacity_available"] == []
        assert ask.refused(instance_type_name="gpu_8x_h100_sxm5") == none_left
        ask.terminate(machine)
        ask.launch(instance_type_name="gpu_8x_h100_sxm5")
        ask.cloud.quirks.sells_nothing = True
        assert ask.refused() == none_left
        ask.cloud.quirks.sells_nothing = False
        ask.cloud.sell_out("gpu_1x_a10")
        assert ask.refused() == none_left
        ask.cloud.quirks.quota_gpus = 8
        assert ask.refused(instance_type_name="gpu_1x_h100_pcie") == (400, "global/quota-exceeded")


def test_a_key_is_wanted_as_bearer_or_as_basic_user(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        basic = base64.b64encode(f"{ask.cloud.api_key}:".encode()).decode()
        assert ask("GET", "/instances", key=f"Basic {basic}").status == 200
        for wrong in ("Bearer another", ask.cloud.api_key, "Basic ???", "Digest x", f"Bearer {ask.cloud.api_key} "):
            wanted = 200 if wrong.endswith(" ") else 401
            assert ask("GET", "/instances", key=wrong).status == wanted, wrong
        assert ask("GET", "/nowhere", key="Bearer another").error == (401, "global/invalid-api-key")


def test_unknown_paths_methods_and_bodies_are_refused_in_the_envelope(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        assert ask("GET", "/balance").error == (404, "global/not-found")
        assert ask("DELETE", "/instances").error == (405, "global/not-found")
        assert ask("GET", f"{OPERATIONS}/launch").error == (405, "global/not-found")
        bodies: tuple[Any, ...] = ([], "text", 7)
        for body in bodies:
            assert ask("POST", f"{OPERATIONS}/launch", body).error == (400, "global/invalid-parameters")
        ask.clock.advance(ask.pause)
        for text in ("", "{", "NaN"):
            ask.clock.advance(ask.pause)
            reply = ask.raw("POST", f"{OPERATIONS}/launch", text, f"Bearer {ask.cloud.api_key}")
            assert reply.error == (400, "global/invalid-parameters")
        for ids in ([], [7], "x", None):
            assert ask("POST", f"{OPERATIONS}/terminate", {"instance_ids": ids}).status == 400


def test_one_request_a_second_and_one_launch_in_twelve(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.pause = timedelta(0)
        limited = (429, "global/too-many-requests")
        assert ask("GET", "/instances").status == 200
        refused = ask("GET", "/regions")
        assert refused.error == limited
        assert "retry-after" not in refused.headers
        ask.pause = timedelta(seconds=1)
        ask.launch()
        for _ in range(11):
            assert ask.refused() == limited
        ask.launch()
        assert len(ask.cloud.instances) == 2
        ask.pause, ask.cloud.quirks.retry_after_s = timedelta(0), 12
        ask.cloud.quirks.rate_limit_code = None
        html = ask("GET", "/instances")
        assert (html.status, html.json, html.headers["retry-after"]) == (429, None, "12")
        ask.cloud.quirks.rate_limits = False
        assert ask("GET", "/instances").status == 200


def test_every_error_of_the_reference_can_be_ordered_for_a_call_with_either_status(tmp_path: Path) -> None:
    wanted = {**STATUSES, "provider/hypervisor/odd": 500}
    with account(tmp_path) as ask:
        for code, status in wanted.items():
            ask.cloud.quirks.refusals[Call.LAUNCH] = code
            assert ask.refused() == (status, code)
            ask.cloud.quirks.statuses[code] = 418
            assert ask.refused() == (418, code)
        assert ask("GET", "/instances").data == []


def test_a_launch_may_happen_although_its_answer_is_an_error_or_lost(tmp_path: Path) -> None:
    with account(tmp_path, fail_after_launch="provider/timeout") as ask:
        assert ask.refused() == (500, "provider/timeout")
        assert [one.label for one in ask.cloud.visible()] == [KEY]
        ask.faults.lose_answer(Call.LAUNCH)
        with pytest.raises(OSError):
            ask.launch()
        assert len(ask.cloud.visible()) == 2
        ask.launch()
        assert len({row["name"] for row in ask.listed().values()}) == 1, "names may repeat"
        ask.faults.answer(Call.LIST, EDGE_ERROR)
        blocked = ask("GET", "/instances")
        assert (blocked.status, blocked.json) == (403, None)


def test_the_price_may_change_between_offer_and_launch(tmp_path: Path) -> None:
    with account(tmp_path, price_at_next_launch={"gpu_1x_a10": 99}) as ask:
        assert ask("GET", "/instance-types").data["gpu_1x_a10"]["instance_type"]["price_cents_per_hour"] == 75
        first = ask.launch()
        ask.cloud.set_price("gpu_1x_a10", 120)
        second = ask.launch()
        prices = {key: row["instance_type"]["price_cents_per_hour"] for key, row in ask.listed().items()}
        assert prices == {first: 99, second: 120}


def test_instances_are_listed_late_hidden_spoiled_or_foreign(tmp_path: Path) -> None:
    with account(tmp_path, list_lag=2 * LAGGED, show_lag=LAGGED) as ask:
        machine, foreign = ask.launch(), ask.cloud.add_foreign(None).instance_id
        assert set(ask.listed()) == {foreign}
        ask.pause = timedelta(seconds=1)
        assert ask("GET", f"/instances/{machine}").error == (404, "global/object-does-not-exist")
        ask.clock.advance(LAGGED)
        assert ask.status(machine) == "booting"
        assert set(ask.listed()) == {foreign}
        ask.clock.advance(LAGGED)
        assert ask.listed()[foreign]["name"] is None
        ask.cloud.quirks.edit_instance[machine] = {"status": "meditating"}
        assert ask.listed()[machine]["status"] == "meditating"
        ask.cloud.quirks.edit_instance[machine] = "no row"
        assert "no row" in ask("GET", "/instances").data
        ask.cloud.quirks.hidden.add(machine)
        assert set(ask.listed()) == {foreign}
        ask.cloud.add_foreign("notebook", {"spotd-key": "spotd-lab2-x-1"})
        assert len(ask.listed()) == 2


def test_a_row_is_renamed_tagged_and_dated_if_this_api_does_that(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        machine = ask.launch()
        path = f"/instances/{machine}"
        changed = ask("POST", path, {"name": "other", "tags": []}).data
        assert (changed["name"], changed["tags"]) == ("other", [])
        assert ask("POST", path, {"status": "active"}).error == (400, "global/invalid-parameters")
        assert ask("POST", "/instances/unknown", {"name": "x"}).status == 404
        ask.clock.advance(timedelta(minutes=1))
        assert not {"first_healthy", "is_reserved"} & set(ask("GET", path).data)
        ask.cloud.quirks.shows_first_healthy = ask.cloud.quirks.shows_is_reserved = True
        row = ask("GET", path).data
        assert row["first_healthy"].endswith("Z")
        assert row["is_reserved"] is False


def test_quantity_is_taken_by_the_older_schema_only(tmp_path: Path) -> None:
    with account(tmp_path, takes_quantity=True) as ask:
        for quantity in (0, -1, True, "2", 1.0):
            assert ask.refused(quantity=quantity) == (400, "global/invalid-parameters")
        assert ask.refused(quantity=5) == (400, "instance-operations/launch/insufficient-capacity")
        assert len(ask("POST", f"{OPERATIONS}/launch", {**LAUNCH, "quantity": 2}).data["instance_ids"]) == 2


def test_a_restart_bills_on_and_does_not_run_user_data_again(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        machine = ask.launch()
        restart = {"instance_ids": [machine]}
        assert ask("POST", f"{OPERATIONS}/restart", restart).error == (409, "global/conflict")
        ask.clock.advance(timedelta(minutes=1))
        until(lambda: ask.status(machine) == "active" and ask.cloud.machines.console(machine, lines=9) == ["begun"])
        again = ask("POST", f"{OPERATIONS}/restart", restart).data["restarted_instances"]
        assert [row["status"] for row in again] == ["booting"]
        before = ask.cloud.billed(machine)
        ask.clock.advance(timedelta(minutes=3))
        assert ask.status(machine) == "active"
        assert ask.cloud.billed(machine) >= before + 3 * 75 * CENT // 60
        assert ask.cloud.machines.console(machine, lines=9) == ["begun"]
        assert ask("POST", f"{OPERATIONS}/restart", {"instance_ids": ["unknown"]}).status == 404


def test_one_unknown_id_ends_none_and_ending_twice_is_answered_either_way(tmp_path: Path) -> None:
    with account(tmp_path, undead=1) as ask:
        machine = ask.launch()
        assert ask.terminate(machine, "unknown").error == (404, "global/object-does-not-exist")
        assert ask.terminate(machine).data["terminated_instances"][0]["status"] == "booting", "it survives once"
        assert ask.terminate(machine).data["terminated_instances"][0]["status"] == "terminating"
        assert ask.terminate(machine).status == 200
        ask.cloud.quirks.terminate_again_conflicts = True
        assert ask.terminate(machine).error == (409, "global/conflict")


@pytest.mark.parametrize("failure", Failure)
def test_a_boot_that_fails_is_never_billed(tmp_path: Path, failure: Failure) -> None:
    with account(tmp_path) as ask:
        ask.cloud.fail_next_boot("gpu_1x_a10", failure)
        machine = ask.launch()
        ask.clock.advance(timedelta(hours=5))
        assert ask.status(machine) == ("booting" if failure is Failure.STUCK else "unhealthy")
        assert ask.cloud.billed(machine) == 0
        assert ask.terminate(machine).status == 200
        assert ask.cloud.spent_usd() == 0


def test_an_unhealthy_instance_is_billed_on(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        machine = ask.launch()
        ask.clock.advance(timedelta(minutes=1))
        assert ask.status(machine) == "active"
        ask.cloud.make_unhealthy(machine)
        ask.clock.advance(timedelta(hours=1))
        assert ask.status(machine) == "unhealthy"
        assert ask.cloud.billed(machine) >= 75 * CENT
        ask.cloud.recover(machine)
        assert ask.status(machine) == "active"


@pytest.mark.parametrize("way", ["preempted", "preempted and billed", "terminated", "vanished"])
def test_an_instance_that_is_taken_away_stops_billing_unless_the_knob_says_so(tmp_path: Path, way: str) -> None:
    with account(tmp_path, bills_preempted=way == "preempted and billed") as ask:
        machine = ask.launch()
        ask.clock.advance(timedelta(minutes=1))
        until(lambda: ask.status(machine) == "active" and ask.cloud.machines.alive(machine))
        cloud = ask.cloud
        take = {"terminated": cloud.end_by_itself, "vanished": cloud.vanish}.get(way, cloud.preempt)
        take(machine)
        until(lambda: not cloud.machines.alive(machine))
        billed = cloud.billed(machine)
        if way == "vanished":
            assert ask("GET", f"/instances/{machine}").status == 404
            assert ask.listed() == {}
        else:
            assert ask.status(machine) == way.partition(" ")[0]
        ask.clock.advance(timedelta(hours=1))
        assert (cloud.billed(machine) > billed) is (way == "preempted and billed")
        assert ask.terminate(machine).status == (200 if way == "preempted and billed" else 404)


@pytest.mark.parametrize("phase", [Phase.ACTIVE, Phase.UNHEALTHY, Phase.TERMINATED])
def test_a_shutdown_from_inside_reaches_the_fakes_machine_only_and_ends_the_bill_only_by_the_knob(
    tmp_path: Path, phase: Phase
) -> None:
    with account(tmp_path, after_shutdown=phase) as ask:
        machine = ask.launch(user_data="#!/bin/sh\nshutdown -h now\nexec sleep 600\n")
        ask.clock.advance(timedelta(minutes=1))
        until(lambda: ask.listed() and ask.cloud.instances[machine].is_off)
        assert ask.status(machine) == phase.value
        until(lambda: not ask.cloud.machines.alive(machine))
        ask.clock.advance(timedelta(hours=1))
        assert (ask.cloud.billed(machine) > 60 * CENT) is (phase is not Phase.TERMINATED)


def test_a_script_that_ends_leaves_its_machine_active_and_killed_processes_leave_it_unhealthy(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        short, killed = ask.launch(user_data="#!/bin/sh\ntrue\n"), ask.launch()
        ask.clock.advance(timedelta(minutes=1))
        until(lambda: ask.status(short) == "active" and not ask.cloud.machines.alive(short))
        assert (ask.status(short), ask.status(killed)) == ("active", "active")
        pid = ask.cloud.machines.status(killed).pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        until(lambda: ask.status(killed) == "unhealthy")
        assert ask.status(short) == "active"


@pytest.mark.parametrize(("rounds_up", "minutes"), [(True, 3), (False, 2)])
def test_the_bill_is_in_whole_minutes_from_the_health_check_to_the_end(
    tmp_path: Path, rounds_up: bool, minutes: int
) -> None:
    with account(tmp_path, minute_rounds_up=rounds_up) as ask:
        ask.pause = timedelta(seconds=1)
        machine = ask.launch()
        ask.clock.advance(timedelta(minutes=1))
        ask.listed()
        assert ask.cloud.instances[machine].healthy_at is not None
        assert ask.cloud.billed(machine) == (75 * CENT // 60 if rounds_up else 0)
        ask.clock.advance(timedelta(seconds=149))
        ask.terminate(machine)
        ask.clock.advance(timedelta(hours=9))
        assert ask.cloud.billed(machine) == minutes * 75 * CENT // 60
        assert ask.cloud.spent_usd() == pytest.approx(minutes * 0.75 / 60)
        spans = segments(read_ledger(ask.cloud.ledger_path))
        assert [(one.key, one.compute) for one in spans] == [(KEY, 0), (KEY, 75 * CENT)]
        assert all(one.end is not None for one in spans)


@pytest.mark.parametrize("follows", [True, False])
def test_a_new_price_holds_for_running_instances_only_by_the_knob(tmp_path: Path, follows: bool) -> None:
    with account(tmp_path, price_follows=follows, bills_terminating=follows) as ask:
        ask.pause = timedelta(seconds=1)
        machine = ask.launch()
        ask.clock.advance(timedelta(seconds=60))
        began = ask.clock.now()
        ask.cloud.advance()
        ask.clock.advance(timedelta(hours=1))
        ask.cloud.set_price("gpu_1x_a10", 150)
        ask.clock.advance(timedelta(seconds=3599))
        ask.terminate(machine)
        ask.clock.advance(timedelta(hours=1))
        ask.listed()
        assert ask.clock.now() - began > timedelta(hours=3)
        # One more minute is billed where that of `terminating` is.
        assert ask.cloud.billed(machine) == ((75 + 150) * CENT + 150 * CENT // 60 if follows else 150 * CENT)


def test_ssh_keys_are_registered_once_by_name(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        made = ask("POST", "/ssh-keys", {"name": "laptop", "public_key": PUBLIC}).data
        assert ask("POST", "/ssh-keys", {"name": "laptop", "public_key": PUBLIC}).error == (400, "global/duplicate")
        for bad in ({"name": "x"}, {"name": "x", "public_key": "key"}, {"name": "x", "public_key": "ssh-rsa ?"}):
            assert ask("POST", "/ssh-keys", bad).error == (400, "global/invalid-parameters")
        assert [row["name"] for row in ask("GET", "/ssh-keys").data] == ["spotd-lab", "laptop"]
        ask.launch(ssh_key_names=["laptop"])
        assert ask("DELETE", f"/ssh-keys/{made['id']}").status == 200
        assert ask("DELETE", f"/ssh-keys/{made['id']}").error == (404, "global/object-does-not-exist")


def test_a_file_system_is_of_one_region_in_use_for_a_while_and_billed_until_deleted(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        wanted = {"name": "data", "region": "us-east-1"}
        disk = ask("POST", "/filesystems", wanted).data["id"]
        assert ask("POST", "/filesystems", wanted).error == (400, "global/duplicate")
        assert ask("POST", "/filesystems", {**wanted, "region": "moon"}).error == (400, "global/invalid-parameters")
        mount = {"file_system_mounts": [{"mount_point": "/lambda/nfs/data", "file_system_id": disk}]}
        wrong = (400, "instance-operations/launch/file-system-in-wrong-region")
        assert ask.refused(**mount) == wrong
        assert ask.refused(file_system_names=["data"]) == wrong
        machine = ask.launch(**mount, region_name="us-east-1")
        assert ask("GET", "/file-systems").data[0]["is_in_use"] is True
        ask.terminate(machine)
        assert ask("DELETE", f"/filesystems/{disk}").error == (400, "filesystems/filesystem-in-use")
        ask.clock.advance(timedelta(minutes=10))
        ask.cloud.fill_file_system(disk, 720.0)
        ask.clock.advance(timedelta(hours=10) - ask.pause)
        assert ask("DELETE", f"/filesystems/{disk}").status == 200
        ask.clock.advance(timedelta(hours=10))
        assert ask.cloud.billed(disk) == 2 * MICRO, "720 GiB at $0.20 per month of 720 hours, for ten hours"
        assert ask("DELETE", f"/filesystems/{disk}").error == (404, "global/object-does-not-exist")
        assert ask("GET", "/filesystems").data == []
        ask.cloud.quirks.has_filesystems_route = False
        assert ask("GET", "/filesystems").error == (404, "global/not-found")


def test_a_ruleset_in_use_stays_and_images_and_regions_are_listed(tmp_path: Path) -> None:
    with account(tmp_path) as ask:
        ask.cloud.rulesets["r1"] = "ssh only"
        machine = ask.launch(firewall_rulesets=[{"id": "r1"}])
        assert ask("DELETE", "/firewall-rulesets/r1").error == (400, "firewall-rulesets/firewall-ruleset-in-use")
        ask.terminate(machine)
        assert [row["name"] for row in ask("GET", "/firewall-rulesets").data] == ["ssh only"]
        assert ask("DELETE", "/firewall-rulesets/r1").status == 200
        assert ask("DELETE", "/firewall-rulesets/r1").status == 404
        image = ask("GET", "/images").data[0]
        ask.launch(image={"id": image["id"]})
        ask.launch(image={"family": image["family"]})
        assert {row["name"] for row in ask("GET", "/regions").data} >= {image["region"]["name"], "us-east-1"}
