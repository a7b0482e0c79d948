"""Several runners of one attempt: they begin together, end together, and only the first one writes to the store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import GangGrant, Grant, NextAttempt, ReuseRules
from tests.integration.runner.rig import Machine, Rig, until

NODES = 3
GO_ON = "while :; do sleep 0.05; done"
SAVES = 'd="$SPOTD_CHECKPOINT_DIR/step-1"; mkdir -p "$d"; echo "$SPOTD_NODE_RANK" > "$d/state"; touch "$d/DONE"'


def gang_grant(rig: Rig, script: str, *, wait_s: float = 20.0, silent_s: float = 10.0, **options: object) -> Grant:
    grant = rig.grant(["/bin/sh", "-c", script], **options)  # type: ignore[arg-type]  # handed on as they are
    url = rig.store.url(grant.upload.prefix + "gang.json")
    return rig.renew(grant, gang=GangGrant(nodes=NODES, first_url=url, wait_s=wait_s, silent_s=silent_s))


def start(rig: Rig, grant: Grant, *ranks: int) -> list[Machine]:
    return [
        rig.start(grant, f"m{rank}", {"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"})
        for rank in ranks or range(NODES)
    ]


def signal_all(machine: Machine, number: signal.Signals) -> None:
    for pid in machine.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def begun(machines: list[Machine]) -> None:
    """Every command has written the file `begun` in its work folder."""
    until(lambda: all((m.home / "work" / "begun").exists() for m in machines), "all commands to begin")


def end_of(first: Machine) -> dict[str, object]:
    return dict(first.event("exit").data)


def test_all_begin_together_with_their_places_and_the_first_one_stores_what_they_made(tmp_path: Path) -> None:
    shown = "$SPOTD_NODE_RANK $NODE_RANK $NNODES $SPOTD_NODES $MASTER_ADDR $MASTER_PORT $SPOTD_RENDEZVOUS_ID"
    script = f'echo "here {shown} $(echo $SPOTD_NODE_IPS)"; {SAVES}; echo "$NODE_RANK" > out.txt'
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, script, outputs=["out.txt"]))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"
        lines = [line for line in machines[0].log().splitlines() if "here" in line]
        places = sorted(line.split("here ")[1].split() for line in lines)
        assert [place[:4] for place in places] == [[str(rank), str(rank), "3", "3"] for rank in range(NODES)]
        assert {tuple(place[4:]) for place in places} == {(*places[0][4:7], "127.0.0.1", "127.0.0.1", "127.0.0.1")}
        assert sorted(line.split("here")[0] for line in lines) == ["", "[1] ", "[2] "]
        (kept,) = rig.accepted(1)
        assert rig.store.get(kept.chunk_keys[0]) == b"0\n"
        assert len(machines[0].events("boot")) == len(machines[0].events("exit")) == 1


def test_a_machine_that_is_killed_stops_the_others_and_what_is_there_is_saved(tmp_path: Path) -> None:
    script = f"trap '{SAVES}; exit 0' TERM; touch begun; {GO_ON}"
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, script))
        begun(machines)
        machines[2].kill()
        assert [machine.wait() for machine in machines[:2]] == [0, 0]
        ended = end_of(machines[0])
        assert (ended["outcome"], ended["reason"]) == ("member_lost", "machine 3 of 3 is lost")
        assert [kept.name for kept in rig.accepted(1)] == ["step-1"]
        until(lambda: not machines[0].processes() | machines[1].processes(), "their commands to be gone")


def test_without_the_first_machine_the_others_end_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, f"touch begun; trap '{SAVES}' TERM; {GO_ON}"))
        begun(machines)
        machines[0].kill()
        stored = {key: rig.store.get(key) for key in rig.store.keys("")}
        assert [machine.wait() for machine in machines[1:]] == [0, 0]
        until(lambda: not machines[1].processes() | machines[2].processes(), "their commands to be gone")
        assert {key: rig.store.get(key) for key in rig.store.keys("")} == stored


def test_one_that_is_cut_off_is_lost_and_writes_nothing_when_it_is_back(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, f"touch begun; {GO_ON}", silent_s=1.5))
        begun(machines)
        signal_all(machines[1], signal.SIGSTOP)
        assert machines[0].wait() == machines[2].wait() == 0
        assert end_of(machines[0])["outcome"] == "member_lost"
        stored = {key: rig.store.get(key) for key in rig.store.keys("")}
        signal_all(machines[1], signal.SIGCONT)
        assert machines[1].wait() == 0
        assert {key: rig.store.get(key) for key in rig.store.keys("")} == stored


def test_a_command_that_fails_on_one_machine_is_an_error_of_the_job_whatever_the_first_one_came_to(
    tmp_path: Path,
) -> None:
    script = f'trap "exit 0" TERM; touch begun; test "$NODE_RANK" != 1 || exit 7; {GO_ON}'
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, script))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        ended = end_of(machines[0])
        assert (ended["outcome"], ended["exit_code"], ended["reason"]) == ("failed", 7, "machine 2 of 3: exit code 7")


def test_a_command_that_fails_because_another_machine_is_gone_is_no_error_of_the_job(tmp_path: Path) -> None:
    waits = f"while ! test -e {tmp_path}/broken; do sleep 0.02; done"
    script = f'touch begun; {waits}; test "$NODE_RANK" != 0 || exit 3; {GO_ON}'
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, script, silent_s=2.0))
        begun(machines)
        signal_all(machines[2], signal.SIGSTOP)
        (tmp_path / "broken").touch()
        assert machines[0].wait() == 0
        ended = end_of(machines[0])
        assert (ended["outcome"], ended["reason"]) == ("member_lost", "machine 3 of 3 is lost")


def test_all_or_none_begin(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, "touch begun", wait_s=1.0), 0, 1)
        assert [machine.wait() for machine in machines] == [0, 0]
        ended = end_of(machines[0])
        assert (ended["outcome"], ended["reason"]) == ("member_lost", "machine 3 of 3 did not come within 1 s")
        assert not any((machine.home / "work" / "begun").exists() for machine in machines)


@pytest.mark.lengthy
def test_a_machine_that_is_started_again_once_all_have_begun_ends_the_attempt(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = gang_grant(rig, f"touch begun; {GO_ON}")
        machines = start(rig, grant)
        begun(machines)
        machines[1].kill()
        (again,) = start(rig, grant, 1)
        assert machines[0].wait() == machines[2].wait() == again.wait() == 0
        assert end_of(machines[0])["outcome"] == "member_lost"


def test_an_order_or_a_notice_to_any_machine_stops_all_of_them(tmp_path: Path) -> None:
    script = f'trap "echo $SPOTD_NODE_RANK >> {tmp_path}/stopped; exit 0" TERM; touch begun; {GO_ON}'
    for number, rank in ((1, None), (2, 0), (3, 2)):
        with Rig(tmp_path / str(number)) as rig:
            grant = gang_grant(rig, script)
            machines = start(rig, grant)
            begun(machines)
            if rank is None:
                rig.order_stop(grant.model_copy(update={"gang": grant.gang}))
            else:
                (machines[rank].home / "notice").write_text(json.dumps({"reason": "taken back"}))
            assert [machine.wait() for machine in machines] == [0, 0, 0]
            assert end_of(machines[0])["outcome"] == ("stopped" if rank is None else "preempted")
        assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1", "2"]
        (tmp_path / "stopped").unlink()


def test_what_does_not_know_the_token_is_not_taken_in(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, gang_grant(rig, "touch begun"), 0, 1)
        place = json.loads(until(lambda: rig.store.get(machines[0].prefix + "gang.json"), "the place of the first"))
        for message in ({"token": "x", "rank": 2, "address": "a"}, {"token": place["token"], "rank": 9}, ["no"], 5):
            with socket.create_connection((place["address"], place["port"])) as stranger:
                stranger.sendall(json.dumps(message).encode() + b"\n")
                stranger.settimeout(10)
                while stranger.recv(4096):
                    continue
        machines += start(rig, machines[0].grant, 2)
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"


@pytest.mark.parametrize("env", [{}, {"SPOTD_NODE_RANK": "3", "SPOTD_NODE_ADDRESS": "127.0.0.1"}])
def test_a_machine_without_a_place_among_them_runs_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(gang_grant(rig, "touch begun"), "m0", env)
        assert machine.wait() == 0
        assert end_of(machine)["outcome"] == "runner_error"
        assert not (machine.home / "work" / "begun").exists()


def without_disk(machine: Machine) -> None:
    """Its runner cannot even make its folder any more."""
    shutil.rmtree(machine.home, ignore_errors=True)
    machine.home.write_bytes(b"")


def test_a_machine_that_can_not_be_used_ends_all_before_they_begin_by_the_word_of_the_first(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = gang_grant(rig, "touch begun")
        (tmp_path / "m2").mkdir()
        (tmp_path / "m2" / "spotd").write_bytes(b"")
        machines = start(rig, grant, 0, 1)
        # A machine that begins after the end finds no first one, and waits for it as long as it may.
        until((rig.store.path(grant.upload.prefix) / "gang.json").exists, "the first one to be found")
        machines += start(rig, grant, 2)
        assert machines[0].wait() == machines[1].wait() == 0
        machines[2].wait()
        (ended,) = machines[0].events("exit")
        assert ended.data["outcome"] == "runner_error"
        assert str(ended.data["reason"]).startswith("machine 3 of 3: this machine can not be used: ")
        assert not any((machine.home / "work" / "begun").exists() for machine in machines[:2])


def test_a_machine_that_comes_back_without_a_disk_does_not_end_the_save_of_the_others(tmp_path: Path) -> None:
    script = f"trap 'sleep 1; {SAVES}; exit 0' TERM; touch begun; {GO_ON}"
    with Rig(tmp_path) as rig:
        grant = gang_grant(rig, script)
        machines = start(rig, grant)
        begun(machines)
        machines[1].kill()
        without_disk(machines[1])
        (again,) = start(rig, grant, 1)
        assert [machines[0].wait(), machines[2].wait()] == [0, 0]
        again.wait()
        assert [event.data["outcome"] for event in machines[0].events("exit")] == ["member_lost"]
        assert [kept.name for kept in rig.accepted(1)] == ["step-1"]


def test_a_machine_of_several_waits_for_no_other_job(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rules = ReuseRules(url=rig.store.url("next.json"), wait_s=300.0, alone=False)
        machines = start(rig, rig.renew(gang_grant(rig, "true"), reuse=rules))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert "waits" not in end_of(machines[0])


DONE_ON_RESUME = 'test -z "$SPOTD_RESUME" || { echo "$NODE_RANK of $NNODES"; exit 0; }'
GOES_ON = f"trap '{SAVES}; exit 0' TERM; touch begun; {DONE_ON_RESUME}"


def kept_grant(rig: Rig, *, keep_s: float = 30.0, script: str = f"{GOES_ON}; {GO_ON}") -> Grant:
    """A gang of which one machine is lost, and whose command ends well once it resumes."""
    grant = gang_grant(rig, script, silent_s=2.0)
    assert grant.gang is not None
    return rig.renew(grant, gang=grant.gang.model_copy(update={"keep_s": keep_s}))


def next_round(rig: Rig, grant: Grant, since: list[int | None]) -> Grant:
    """What the daemon writes once the lost machine is replaced, or the others go on without it."""
    assert grant.gang is not None
    nodes = sum(one is not None for one in since)
    gang = grant.gang.model_copy(update={"round": 1, "since": since, "nodes": nodes})
    return rig.renew(grant, gang=gang, restore=rig.restores(1))


def start_another(rig: Rig, grant: Grant, rank: int) -> Machine:
    place = {"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1", "SPOTD_NODE_ROUND": "1"}
    return rig.start(grant, f"another{rank}", place)


def await_loss(first: Machine, *ranks: int) -> None:
    def lost() -> list[int] | None:
        seen = first.heartbeat()
        return None if seen is None or seen.gang is None else sorted(seen.gang.lost)

    until(lambda: lost() == sorted(ranks), f"the first machine to say that {ranks} are lost")
    assert not first.events("exit")


@pytest.mark.parametrize("ranks", [(1,), (2,), (1, 2)])
def test_the_healthy_machines_go_on_from_what_was_saved_once_the_lost_ones_are_replaced(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    with Rig(tmp_path) as rig:
        grant = kept_grant(rig)
        machines = start(rig, grant)
        begun(machines)
        for rank in ranks:
            machines[rank].kill()
        await_loss(machines[0], *ranks)
        fresh = [start_another(rig, grant, rank) for rank in ranks]
        kept = [machine for rank, machine in enumerate(machines) if rank not in ranks]
        assert not any((one.home / "work" / "begun").exists() for one in fresh)
        next_round(rig, grant, [1 if rank in ranks else 0 for rank in range(NODES)])
        assert [machine.wait() for machine in (*kept, *fresh)] == [0] * NODES
        assert end_of(machines[0])["outcome"] == "succeeded"
        assert len(machines[0].events("boot")) == 2
        assert [line for line in machines[0].log().splitlines() if line.endswith("0 of 3")]
        assert sum(line.endswith(f" of {NODES}") for line in machines[0].log().splitlines()) == NODES


def test_the_others_go_on_without_the_lost_one_by_ranks_of_their_own(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = kept_grant(rig)
        machines = start(rig, grant)
        begun(machines)
        machines[1].kill()
        await_loss(machines[0], 1)
        next_round(rig, grant, [0, None, 0])
        assert machines[0].wait() == machines[2].wait() == 0
        assert end_of(machines[0])["outcome"] == "succeeded"
        shown = [line for line in machines[0].log().splitlines() if line.endswith("of 2")]
        assert sorted(line.split("] ")[-1] for line in shown) == ["0 of 2", "1 of 2"]


def test_a_loss_that_nobody_replaces_ends_the_attempt_in_time(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, kept_grant(rig, keep_s=1.0))
        begun(machines)
        machines[2].kill()
        assert machines[0].wait() == machines[1].wait() == 0
        assert (end_of(machines[0])["outcome"], end_of(machines[0])["reason"]) == (
            "member_lost",
            "machine 3 of 3 is lost",
        )
        assert [kept.name for kept in rig.accepted(1)] == ["step-1"]


def test_an_order_ends_machines_that_are_kept(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = kept_grant(rig)
        machines = start(rig, grant)
        begun(machines)
        machines[2].kill()
        await_loss(machines[0], 2)
        rig.order_stop(grant)
        assert machines[0].wait() == machines[1].wait() == 0
        assert end_of(machines[0])["outcome"] == "stopped"


def next_attempt(rig: Rig, grant: Grant) -> Grant:
    """What the daemon writes once the first machine is known to be lost: the others go on with their next attempt."""
    assert grant.gang is not None
    rounds = {"round": 1, "since": [0] * NODES, "next_url": rig.store.url("next-2.json")}
    following = gang_grant(rig, grant.spec.run[-1], silent_s=2.0, attempt=2, restore=rig.restores(1))
    assert following.gang is not None
    gang = following.gang.model_copy(update={**rounds, "keep_s": grant.gang.keep_s})
    following = rig.renew(following, gang=gang)
    name_next = NextAttempt(job=following.job.id, attempt=2, grant_url=following.grant_url)
    rig.store.put("next.json", name_next.to_bytes())
    rig.store.remove(grant.upload.prefix + "grant.json")
    return following


def begin_round(rig: Rig, grant: Grant, since: list[int | None]) -> Grant:
    assert grant.gang is not None
    nodes = sum(one is not None for one in since)
    return rig.renew(grant, gang=grant.gang.model_copy(update={"round": 2, "since": since, "nodes": nodes}))


def goes_on_without_the_first(rig: Rig, **options: float) -> Grant:
    grant = kept_grant(rig, script=f'test -n "$SPOTD_RESUME" || {{ {SAVES}; }}; {GOES_ON}; {GO_ON}', **options)
    assert grant.gang is not None
    return rig.renew(grant, gang=grant.gang.model_copy(update={"next_url": rig.store.url("next.json")}))


def await_words(rig: Rig, *ranks: int) -> None:
    names = [f"{rig.machines[0].prefix}waits/0-{rank}.json" for rank in ranks]
    until(lambda: rig.store.keys(f"{rig.machines[0].prefix}waits/") == names, f"{ranks} to say that they wait")
    before = [rig.store.get(name) for name in names]
    until(lambda: all(rig.store.get(n) != b for n, b in zip(names, before, strict=True)), "them to say so again")


def saved_and_begun(rig: Rig, machines: list[Machine]) -> None:
    begun(machines)
    until(lambda: rig.accepted(1), "a checkpoint")


def test_the_healthy_machines_go_on_with_their_next_attempt_once_the_first_one_is_replaced(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = goes_on_without_the_first(rig)
        machines = start(rig, grant)
        saved_and_begun(rig, machines)
        machines[0].kill()
        await_words(rig, 1, 2)
        assert not machines[0].events("exit")
        following = next_attempt(rig, grant)
        until(lambda: all((one.home / "next-grant").exists() for one in machines[1:]), "them to take the next attempt")
        place = {"SPOTD_NODE_RANK": "0", "SPOTD_NODE_ADDRESS": "127.0.0.1", "SPOTD_NODE_ROUND": "2"}
        fresh = rig.start(following, "another0", place)
        begin_round(rig, following, [2, 0, 0])
        assert [machine.wait() for machine in (fresh, *machines[1:])] == [0] * NODES
        assert end_of(fresh)["outcome"] == "succeeded"
        assert sum(line.endswith(f" of {NODES}") for line in fresh.log().splitlines()) == NODES
        assert not machines[0].events("exit")


def test_the_others_go_on_without_the_first_one_by_ranks_of_their_own(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = goes_on_without_the_first(rig)
        machines = start(rig, grant)
        saved_and_begun(rig, machines)
        machines[0].kill()
        await_words(rig, 1, 2)
        following = next_attempt(rig, grant)
        until(lambda: all((one.home / "next-grant").exists() for one in machines[1:]), "them to take the next attempt")
        begin_round(rig, following, [None, 0, 0])
        assert [machine.wait() for machine in machines[1:]] == [0, 0]
        events = [rig.store.get(key) or b"" for key in rig.store.keys(following.upload.prefix + "events/")]
        (ended,) = [json.loads(one)["data"] for one in events if json.loads(one)["kind"] == "exit"]
        assert ended["outcome"] == "succeeded"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_first_machine_that_is_cut_off_and_back_writes_nothing_that_counts(tmp_path: Path, *, at_once: bool) -> None:
    with Rig(tmp_path) as rig:
        grant = goes_on_without_the_first(rig)
        machines = start(rig, grant)
        saved_and_begun(rig, machines)
        signal_all(machines[0], signal.SIGSTOP)
        await_words(rig, 1, 2)
        following = next_attempt(rig, grant)
        if at_once:
            signal_all(machines[0], signal.SIGCONT)
            assert machines[0].wait() == 0
        place = {"SPOTD_NODE_RANK": "0", "SPOTD_NODE_ADDRESS": "127.0.0.1", "SPOTD_NODE_ROUND": "2"}
        fresh = rig.start(following, "another0", place)
        begin_round(rig, following, [2, 0, 0])
        assert [machine.wait() for machine in (fresh, *machines[1:])] == [0] * NODES
        stored = {key: rig.store.get(key) for key in rig.store.keys(following.upload.prefix)}
        if not at_once:
            signal_all(machines[0], signal.SIGCONT)
            assert machines[0].wait() == 0
        assert {key: rig.store.get(key) for key in rig.store.keys(following.upload.prefix)} == stored
        assert not (machines[0].home / "next-grant").exists()
        assert end_of(fresh)["outcome"] == "succeeded"
        # Its disk is lost, so nothing there says that its attempt is over.
        rebooted = rig.start(following, "rebooted", {**place, "SPOTD_NODE_ROUND": ""})
        assert rebooted.wait() == 0
        assert {key: rig.store.get(key) for key in rig.store.keys(following.upload.prefix)} == stored


def test_machines_that_wait_without_the_first_one_end_in_time_and_by_an_order(tmp_path: Path) -> None:
    for keep_s, orders in ((1.0, False), (60.0, True)):
        with Rig(tmp_path / str(orders)) as rig:
            grant = goes_on_without_the_first(rig, keep_s=keep_s)
            machines = start(rig, grant)
            saved_and_begun(rig, machines)
            machines[0].kill()
            if orders:
                await_words(rig, 1, 2)
                rig.order_stop(grant)
            assert machines[1].wait() == machines[2].wait() == 0
            assert not machines[0].events("exit")


def test_without_the_first_machine_nothing_is_kept_where_there_is_no_next_attempt(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, kept_grant(rig))
        begun(machines)
        machines[0].kill()
        stored = {key: rig.store.get(key) for key in rig.store.keys("")}
        assert machines[1].wait() == machines[2].wait() == 0
        assert {key: rig.store.get(key) for key in rig.store.keys("")} == stored


def test_the_first_one_is_lost_while_it_waits_for_another(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = goes_on_without_the_first(rig)
        machines = start(rig, grant)
        saved_and_begun(rig, machines)
        machines[2].kill()
        await_loss(machines[0], 2)
        machines[0].kill()
        await_words(rig, 1)
        following = next_attempt(rig, grant)
        places = [
            {"SPOTD_NODE_RANK": str(r), "SPOTD_NODE_ADDRESS": "127.0.0.1", "SPOTD_NODE_ROUND": "2"} for r in (0, 2)
        ]
        fresh = [rig.start(following, f"another{place['SPOTD_NODE_RANK']}", place) for place in places]
        begin_round(rig, following, [2, 0, 2])
        assert [machine.wait() for machine in (*fresh, machines[1])] == [0] * NODES
        assert end_of(fresh[0])["outcome"] == "succeeded"


def test_a_lost_machine_that_is_back_joins_no_later_round_and_writes_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = kept_grant(
            rig,
            script=f"{GOES_ON}; {GO_ON}".replace(
                "exit 0; }", f"touch again; while ! test -e {tmp_path}/over; do sleep 0.05; done; exit 0; }}"
            ),
        )
        machines = start(rig, grant)
        begun(machines)
        signal_all(machines[1], signal.SIGSTOP)
        await_loss(machines[0], 1)
        another = start_another(rig, grant, 1)
        next_round(rig, grant, [0, 1, 0])
        kept = [machines[0], machines[2], another]
        until(lambda: all((one.home / "work" / "again").exists() for one in kept), "all commands to go on")
        signal_all(machines[1], signal.SIGCONT)
        assert machines[1].wait() == 0
        # Its disk is lost, so nothing there says that its attempt is over.
        rebooted = rig.start(grant, "rebooted", {"SPOTD_NODE_RANK": "1", "SPOTD_NODE_ADDRESS": "127.0.0.1"})
        assert rebooted.wait() == 0
        (tmp_path / "over").touch()
        assert [machine.wait() for machine in kept] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"
        assert not (machines[1].home / "work" / "again").exists()


def test_a_command_that_fails_while_all_machines_live_is_an_error_of_the_job_although_machines_are_kept(
    tmp_path: Path,
) -> None:
    script = f'trap "exit 0" TERM; touch begun; test "$NODE_RANK" != 1 || exit 7; {GO_ON}'
    with Rig(tmp_path) as rig:
        machines = start(rig, kept_grant(rig, script=script))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        ended = end_of(machines[0])
        assert (ended["outcome"], ended["exit_code"], ended["reason"]) == ("failed", 7, "machine 2 of 3: exit code 7")


def test_commands_that_fail_because_another_machine_is_lost_are_kept_machines_all_the_same(tmp_path: Path) -> None:
    waits = f"while ! test -e {tmp_path}/broken; do sleep 0.02; done"
    script = f'{SAVES}; test -z "$SPOTD_RESUME" || exit 0; touch begun; {waits}; exit 3'
    with Rig(tmp_path) as rig:
        grant = kept_grant(rig, script=script)
        machines = start(rig, grant)
        begun(machines)
        signal_all(machines[2], signal.SIGSTOP)
        (tmp_path / "broken").touch()
        await_loss(machines[0], 2)
        another = start_another(rig, grant, 2)
        next_round(rig, grant, [0, 0, 1])
        assert [machine.wait() for machine in (*machines[:2], another)] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"
