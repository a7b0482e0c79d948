"""Several runners that each save a part of a checkpoint: it is one checkpoint once all parts are stored, or none."""

from __future__ import annotations

import hashlib
import json
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import Grant, GrantStopOrder, Orders
from tests.integration.runner.holding import HeldBucket
from tests.integration.runner.rig import Machine, Rig, until
from tests.integration.runner.servers import Answer, Request, Server
from tests.integration.runner.test_gang import (
    GO_ON,
    NODES,
    await_loss,
    begun,
    end_of,
    gang_grant,
    next_round,
    signal_all,
    start,
    start_another,
)
from tests.integration.runner.test_over_http import Bucket, over_http

AT = 'd="$SPOTD_CHECKPOINT_DIR/step-{step}"; mkdir -p "$d"; '
PART = AT + 'echo "{step} of $SPOTD_NODE_RANK" > "$d/rank_$SPOTD_NODE_RANK"; '
MARKED = PART + 'touch "$d/DONE"; '
SAVES = MARKED.format(step=1)


def parts_grant(rig: Rig, script: str, *, keep_s: float = 0.0, settle_s: float = 1.0, **options: object) -> Grant:
    """A gang of which each machine saves. On a busy machine a script may take a while between two files."""
    grant = gang_grant(rig, script, settle_s=settle_s, **options)  # type: ignore[arg-type]  # handed on as they are
    saving = grant.spec.checkpoint.model_copy(update={"saved_by": "all"})
    assert grant.gang is not None
    spec = grant.spec.model_copy(update={"checkpoint": saving})
    return rig.renew(grant, spec=spec, gang=grant.gang.model_copy(update={"keep_s": keep_s}))


def start_later(rig: Rig, grant: Grant) -> list[Machine]:
    """The machines of a later attempt."""
    places = ({"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"} for rank in range(NODES))
    return [rig.start(grant, f"a{grant.attempt}m{rank}", place) for rank, place in enumerate(places)]


def files_of(rig: Rig, attempt: int = 1) -> dict[str, dict[str, bytes]]:
    """Of each checkpoint that the daemon would believe: the content of its files."""
    return {
        one.name: {
            entry.path.partition("/")[2]: b"".join(
                chunk.part_of(rig.store.get(chunk.key) or b"") for chunk in entry.chunks
            )
            for entry in one.files
            if entry.type == "file"
        }
        for one in rig.accepted(attempt)
    }


def whole(step: int = 1, nodes: int = NODES) -> dict[str, bytes]:
    return {"DONE": b"", **{f"rank_{rank}": f"{step} of {rank}\n".encode() for rank in range(nodes)}}


def reasons(machine: Machine, kind: str) -> list[str]:
    return [str(event.data["reason"]) for event in machine.events(kind)]


def test_the_parts_of_all_machines_are_one_checkpoint_which_each_of_any_number_restores_whole(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{SAVES} touch begun"))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"
        assert files_of(rig) == {"step-1": whole()}
        assert json.loads(rig.store.get(rig.store.keys(machines[0].prefix + "checkpoints/")[0]) or b"")["nodes"] == 3
        shows = 'echo "finds $(ls -A "$SPOTD_RESUME" | tr "\\n" " ")"'
        alone = rig.start(rig.grant(["/bin/sh", "-c", shows], attempt=2, restore=rig.restores(1)), "alone")
        assert alone.wait() == 0
        again = start_later(rig, parts_grant(rig, shows, attempt=3, restore=rig.restores(1)))
        assert [machine.wait() for machine in again] == [0, 0, 0]
        found = [line for line in (alone.log() + again[0].log()).splitlines() if "finds" in line]
        assert [line.split("finds ")[1] for line in found] == ["DONE rank_0 rank_1 rank_2 "] * 4


def test_machines_that_would_go_on_from_different_checkpoints_do_not_begin(tmp_path: Path) -> None:
    """The newest does not fit on the disk of one of them, which would take the one before."""
    full = (
        "from spotd_jobs.runner import main, restore\n"
        "def require_room(self, document):\n"
        "    if document['entry'] == 'step-2': raise restore.NoRoom('it is too large')\n"
        "restore.RestoreRun._require_room = require_room\n"
        "main.run()\n"
    )
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{SAVES} {MARKED.format(step=2)}"))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert [one.name for one in rig.restores(1)] == ["step-2", "step-1"]
        grant = parts_grant(rig, "touch begun", attempt=2, restore=rig.restores(1))
        places = [{"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"} for rank in range(NODES)]
        again = [
            rig.start(grant, f"a2m{rank}", place, script=full if rank == 2 else None)
            for rank, place in enumerate(places)
        ]
        assert [machine.wait() for machine in again] == [0, 0, 0]
        ended = end_of(again[0])
        assert ended["outcome"] == "member_lost"
        assert ended["reason"] == "machine 3 of 3 goes on from another checkpoint than the first"
        assert not any((machine.home / "work" / "begun").exists() for machine in again)


def test_it_is_stored_while_the_commands_run_and_not_before_every_machine_has_its_part(tmp_path: Path) -> None:
    late = f'test "$SPOTD_NODE_RANK" != 2 || while ! test -e {tmp_path}/now; do sleep 0.02; done'
    script = f"{late}; {SAVES} touch begun; {GO_ON}"
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, script))
        until(lambda: reasons(machines[0], "checkpoint_refused"), "a word on the part that is missing")
        assert reasons(machines[0], "checkpoint_refused") == ["machine 3 of 3 has no part of it"]
        assert not rig.accepted(1)
        (tmp_path / "now").touch()
        machines[0].event("checkpoint")
        assert files_of(rig) == {"step-1": whole()}
        stored = until(lambda: (beat := machines[0].heartbeat()) and beat.stored, "a heartbeat that says so")
        assert stored.name == "step-1"


@pytest.mark.parametrize("killed", range(NODES))
def test_a_machine_that_is_lost_in_a_save_leaves_the_checkpoint_before_and_nothing_of_that_one(
    tmp_path: Path, killed: int
) -> None:
    """Each has written a part; the killed one is gone before all hold theirs."""
    second = f'{PART.format(step=2)} test "$SPOTD_NODE_RANK" = {killed} || touch "$d/DONE"; '
    waits = f"while ! test -e {tmp_path}/save; do sleep 0.02; done; "
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{SAVES} {waits} {second} touch begun; {GO_ON}", settle_s=2.0))
        machines[0].event("checkpoint")
        (tmp_path / "save").touch()
        begun(machines)
        machines[killed].kill()
        rest = [machine for rank, machine in enumerate(machines) if rank != killed]
        assert [machine.wait() for machine in rest] == [0, 0]
        assert files_of(rig) == {"step-1": whole()}
        if killed:
            assert end_of(machines[0])["outcome"] == "member_lost"
            assert any(f"machine {killed + 1} of 3" in why for why in reasons(machines[0], "checkpoint_refused"))


def test_a_notice_to_one_machine_saves_on_all_and_what_they_saved_is_one_checkpoint(tmp_path: Path) -> None:
    script = f"trap 'sleep 0.$SPOTD_NODE_RANK; {SAVES} exit 0' TERM; touch begun; {GO_ON}"
    for number, rank in ((1, None), (2, 0), (3, 2)):
        with Rig(tmp_path / str(number)) as rig:
            grant = parts_grant(rig, script)
            machines = start(rig, grant)
            begun(machines)
            if rank is None:
                rig.order_stop(grant)
            else:
                (machines[rank].home / "notice").write_text(json.dumps({"reason": "taken back"}))
            assert [machine.wait() for machine in machines] == [0, 0, 0]
            assert end_of(machines[0])["outcome"] == ("stopped" if rank is None else "preempted")
            assert files_of(rig) == {"step-1": whole()}


def test_all_stop_in_time_for_the_machine_that_goes_first(tmp_path: Path) -> None:
    """Their own grace would be longer than it lives."""
    script = f"trap '{SAVES} {GO_ON}' TERM; touch begun; {GO_ON}"
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, script, stop_grace_s=600.0))
        begun(machines)
        at = datetime.now(UTC) + timedelta(seconds=8)
        notice = {"reason": "taken back", "at": at.isoformat().replace("+00:00", "Z")}
        (machines[2].home / "notice").write_text(json.dumps(notice))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "preempted"
        assert files_of(rig) == {"step-1": whole()}
        (saved,) = rig.accepted(1)
        assert datetime.fromtimestamp(rig.store.path(rig.manifest_keys[saved.sha256]).stat().st_mtime, UTC) < at


def test_what_all_had_saved_is_stored_when_the_command_of_one_fails(tmp_path: Path) -> None:
    for number, rank in enumerate(range(NODES)):
        fails = f'touch begun; test "$SPOTD_NODE_RANK" != {rank} || exit 7; {GO_ON}'
        with Rig(tmp_path / str(number)) as rig:
            machines = start(rig, parts_grant(rig, f'trap "exit 0" TERM; {SAVES} {fails}', settle_s=30.0))
            assert [machine.wait() for machine in machines] == [0, 0, 0]
            assert (end_of(machines[0])["outcome"], end_of(machines[0])["exit_code"]) == ("failed", 7)
            assert files_of(rig) == {"step-1": whole()}


def test_files_that_two_machines_save_alike_are_stored_once_and_with_other_content_not_at_all(tmp_path: Path) -> None:
    same = 'echo same > "$d/config"; '
    other = 'echo "of $SPOTD_NODE_RANK" > "$d/config"; '
    for name, more, expected in (("same", same, {"step-1": {**whole(), "config": b"same\n"}}), ("other", other, {})):
        with Rig(tmp_path / name) as rig:
            machines = start(rig, parts_grant(rig, f"{PART.format(step=1)} {more} touch $d/DONE"))
            assert [machine.wait() for machine in machines] == [0, 0, 0]
            assert files_of(rig) == expected
            if not expected:
                assert reasons(machines[0], "checkpoint_skipped") == [
                    "machines 1 and 2 saved other content under step-1/config"
                ]


def test_of_a_name_that_is_written_over_nothing_is_mixed(tmp_path: Path) -> None:
    again = f'while ! test -e {tmp_path}/save; do sleep 0.02; done; echo more >> "$d/rank_$SPOTD_NODE_RANK"; '
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{SAVES} {again} {GO_ON}"))
        machines[0].event("checkpoint")
        (tmp_path / "save").touch()
        until(lambda: reasons(machines[0], "checkpoint_refused"), "a word on the name")
        assert reasons(machines[0], "checkpoint_refused")[0].endswith("each save needs a name of its own")
        assert files_of(rig) == {"step-1": whole()}


def test_parts_of_pytorch_wait_for_their_metadata_and_need_no_time_to_settle_then(tmp_path: Path) -> None:
    part = AT.format(step=1) + 'echo "$SPOTD_NODE_RANK" > "$d/__${{SPOTD_NODE_RANK}}_0.distcp"; '.format()
    waits = f'test "$SPOTD_NODE_RANK" = 0 && while ! test -e {tmp_path}/now; do sleep 0.02; done && '
    marks = f'{waits} printf "__0_0.distcp __1_0.distcp __2_0.distcp" > "$d/.metadata"; '
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{part} touch begun; {marks} {GO_ON}"))
        begun(machines)
        until(lambda: reasons(machines[0], "checkpoint_refused"), "a word on the missing metadata")
        assert reasons(machines[0], "checkpoint_refused") == ["its .metadata is not written yet"]
        (tmp_path / "now").touch()
        machines[0].event("checkpoint")
        assert set(files_of(rig)["step-1"]) == {".metadata", *(f"__{rank}_0.distcp" for rank in range(NODES))}


def test_metadata_that_names_a_part_which_no_machine_has_makes_no_checkpoint(tmp_path: Path) -> None:
    part = AT.format(step=1) + 'echo 1 > "$d/__${SPOTD_NODE_RANK}_0.distcp"; '
    marks = 'test "$SPOTD_NODE_RANK" != 0 || printf "__0_0.distcp __3_0.distcp" > "$d/.metadata"'
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{part} {marks}"))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert not files_of(rig)
        assert reasons(machines[0], "checkpoint_skipped") == ["a part that its .metadata names is missing"]


ZERO = AT.format(step=1) + 'echo 1 > "$d/zero_pp_rank_${SPOTD_NODE_RANK}_mp_rank_00_optim_states.pt"; '


def test_what_deepspeed_saved_is_restored_by_as_many_machines_only(tmp_path: Path) -> None:
    latest = 'test "$SPOTD_NODE_RANK" != 0 || printf step-1 > "$SPOTD_CHECKPOINT_DIR/latest"'
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{ZERO} {latest}"))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert len(files_of(rig)["step-1"]) == NODES + 1, "the pointer file is with it"
        same = start_later(rig, parts_grant(rig, 'test -n "$SPOTD_RESUME"', attempt=2, restore=rig.restores(1)))
        assert [machine.wait() for machine in same] == [0, 0, 0]
        assert end_of(same[0])["outcome"] == "succeeded"
        alone = rig.start(rig.grant(["touch", "begun"], attempt=3, restore=rig.restores(1)), "alone")
        assert alone.wait() == 0
        ended = end_of(alone)
        assert ended["outcome"] == "input_unusable"
        assert ended["reason"] == (
            "DeepSpeed loads checkpoint step-1 by as many machines as saved it: by 3, and here are 1"
        )
        assert not (alone.home / "work" / "begun").exists()


def test_a_rank_of_deepspeed_of_which_no_machine_has_the_states_makes_no_checkpoint(tmp_path: Path) -> None:
    latest = 'test "$SPOTD_NODE_RANK" != 0 || printf step-1 > "$SPOTD_CHECKPOINT_DIR/latest"'
    gap = ZERO.replace("{step}", "1").replace("${SPOTD_NODE_RANK}", "$((SPOTD_NODE_RANK + SPOTD_NODE_RANK / 2))")
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{gap} {latest}"))
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert not files_of(rig)
        assert reasons(machines[0], "checkpoint_skipped") == ["the optimizer states of a rank are missing"]


def test_machines_that_share_one_folder_store_its_files_once(tmp_path: Path) -> None:
    shared = (
        f"mkdir -p {tmp_path}/shared; rm -rf $SPOTD_CHECKPOINT_DIR; ln -s {tmp_path}/shared $SPOTD_CHECKPOINT_DIR; "
    )
    with Rig(tmp_path) as rig:
        grant = parts_grant(rig, f"{shared} {SAVES} touch begun; {GO_ON}", settle_s=1.0)
        machines = start(rig, grant)
        machines[0].event("checkpoint")
        assert files_of(rig) == {"step-1": whole()}
        chunks = [key for key in rig.store.keys(machines[0].prefix) if "/data/" in key]
        assert sorted(chunks) == sorted(rig.accepted(1)[0].chunk_keys)


def test_one_that_is_cut_off_and_back_changes_nothing_that_can_be_restored(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, f"{SAVES} touch begun; {GO_ON}", silent_s=1.5))
        begun(machines)
        machines[0].event("checkpoint")
        signal_all(machines[1], signal.SIGSTOP)
        assert machines[0].wait() == machines[2].wait() == 0
        assert end_of(machines[0])["outcome"] == "member_lost"
        before, stored = files_of(rig), set(rig.store.keys(machines[0].prefix))
        signal_all(machines[1], signal.SIGCONT)
        assert machines[1].wait() == 0
        assert files_of(rig) == before == {"step-1": whole()}
        assert {key for key in set(rig.store.keys(machines[0].prefix)) - stored if "/data/" not in key} == set()


def test_kept_machines_and_one_that_replaces_another_go_on_from_the_parts_and_save_again(tmp_path: Path) -> None:
    resumed = 'test -z "$SPOTD_RESUME" || { ls "$SPOTD_RESUME" | wc -l; ' + MARKED.format(step=2) + " exit 0; }"
    with Rig(tmp_path) as rig:
        grant = parts_grant(rig, f'trap "exit 0" TERM; {resumed}; {SAVES} touch begun; {GO_ON}', keep_s=30.0)
        machines = start(rig, grant)
        begun(machines)
        machines[0].event("checkpoint")
        machines[2].kill()
        await_loss(machines[0], 2)
        another = start_another(rig, grant, 2)
        next_round(rig, grant, [0, 0, 1])
        assert [machine.wait() for machine in (*machines[:2], another)] == [0, 0, 0]
        assert end_of(machines[0])["outcome"] == "succeeded"
        assert sorted(files_of(rig).values(), key=str) == sorted([whole(1), whole(2)], key=str)
        assert [line.split("] ")[-1] for line in machines[0].log().splitlines() if line.endswith("4")] == ["4"] * NODES


def test_of_a_save_that_is_written_over_while_the_machines_come_to_hold_it_nothing_is_mixed(tmp_path: Path) -> None:
    """The second machine is ahead of the others: it writes its next save of that name before they do."""
    save = AT.format(step=1) + 'echo "$g" > "$d/__${SPOTD_NODE_RANK}_0.distcp"; '
    mark = 'test "$SPOTD_NODE_RANK" != 0 || printf "__0_0.distcp __1_0.distcp __2_0.distcp" > "$d/.metadata"; '
    script = f'g=1; {save} {mark} test "$SPOTD_NODE_RANK" = 1 || sleep 0.8; g=2; {save} {mark} touch begun; {GO_ON}'
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, script, settle_s=1.2))
        machines[0].event("checkpoint")
        (saved,) = files_of(rig).values()
        assert [saved[f"__{rank}_0.distcp"] for rank in range(NODES)] == [b"2\n"] * NODES


def test_what_is_being_written_over_when_all_hold_what_was_there_is_not_stored(tmp_path: Path) -> None:
    """As above, but the first machine never comes to an end of its next save."""
    save = AT.format(step=1) + 'echo "$g" > "$d/__${SPOTD_NODE_RANK}_0.distcp"; '
    mark = 'test "$SPOTD_NODE_RANK" != 0 || printf "__0_0.distcp __1_0.distcp __2_0.distcp" > "$d/.metadata"; '
    on = 'test "$SPOTD_NODE_RANK" = 0 && rm "$d/.metadata" && while :; do echo >> "$d/__0_0.distcp"; sleep 0.02; done; '
    script = f'g=1; {save} {mark} test "$SPOTD_NODE_RANK" = 1 || sleep 0.8; g=2; {save} {on} {GO_ON}'
    with Rig(tmp_path) as rig:
        machines = start(rig, parts_grant(rig, script, settle_s=1.2))
        until(lambda: reasons(machines[0], "checkpoint_refused"), "a word on the change")
        assert reasons(machines[0], "checkpoint_refused") == ["it was changed or removed before all machines held it"]
        assert not files_of(rig)


def test_a_part_that_was_not_done_while_its_command_ran_is_done_when_that_has_ended_well(tmp_path: Path) -> None:
    script = f'{PART.format(step=1)} test "$SPOTD_NODE_RANK" != 0 || touch "$d/DONE"; touch begun; '
    with Rig(tmp_path) as rig:
        waits = f"while ! test -e {tmp_path}/over; do sleep 0.02; done"
        machines = start(rig, parts_grant(rig, script + waits, settle_s=60.0))
        begun(machines)
        until(lambda: list((machines[0].home / "stages").glob("*")), "all machines to be asked for their parts")
        (tmp_path / "over").touch()
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert files_of(rig) == {"step-1": whole()}


class PartHeld(HeldBucket):
    """Keeps one machine's part of one checkpoint waiting."""

    def answer(self, request: Request) -> Answer:
        if b"1 of 2\n" in request.body and not self._open.is_set():
            self.held += 1
            self._open.wait(self._patience_s)
        return Bucket.answer(self, request)


def test_the_newest_goes_first_once_they_end_and_the_one_that_made_room_is_put_together_anew(tmp_path: Path) -> None:
    waits = f"while ! test -e {tmp_path}/save; do sleep 0.02; done; "
    with Rig(tmp_path) as rig:
        bucket = PartHeld(rig)
        with Server(bucket.answer) as server:
            script = f'trap "exit 0" TERM; {SAVES} {waits} {MARKED.format(step=2)} touch begun; {GO_ON}'
            grant = over_http(rig, server, parts_grant(rig, script))
            rig.issue(grant)
            machines = start(rig, grant)
            until(lambda: bucket.held, "a part to be under way")
            (tmp_path / "save").touch()
            begun(machines)
            until(lambda: _upload_of(machines[0]) == (1, "step-1"), "the next checkpoint to be queued")
            rig.renew(grant, orders=Orders(stop=GrantStopOrder(reason="cancelled")))
            until(lambda: _upload_of(machines[0])[1] == "step-2", "the next checkpoint to go first")
            bucket.go_on()
            assert [machine.wait() for machine in machines] == [0, 0, 0]
        assert [event.data["name"] for event in machines[0].events("checkpoint")] == ["step-2", "step-1"]
        assert files_of(rig) == {"step-1": whole(1), "step-2": whole(2)}
        # What was stored before another manifest was published may be deleted, so it is sent again.
        digest = hashlib.sha256(b"1 of 1\n").hexdigest()
        assert len([key for key in rig.store.keys(machines[0].prefix) if f"/data/{digest}-" in key]) == 2


def _upload_of(machine: Machine) -> tuple[int, str | None]:
    seen = machine.heartbeat()
    return (0, None) if seen is None else (seen.upload.queued, seen.upload.name)


def test_a_list_that_fills_many_messages_arrives_whole(tmp_path: Path) -> None:
    files = 'for i in $(seq 40); do echo "$i of $SPOTD_NODE_RANK" > "$d/${i}_$SPOTD_NODE_RANK"; done; '
    small = "from spotd_jobs.runner import main, parts; parts._PIECE_BYTES = 99; main.run()"
    with Rig(tmp_path) as rig:
        grant = parts_grant(rig, f"{AT.format(step=1)} {files} touch $d/DONE")
        places = ({"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"} for rank in range(NODES))
        machines = [rig.start(grant, f"m{rank}", place, script=small) for rank, place in enumerate(places)]
        assert [machine.wait() for machine in machines] == [0, 0, 0]
        (saved,) = files_of(rig).values()
        assert len(saved) == 1 + 40 * NODES
        assert saved["40_2"] == b"40 of 2\n"
