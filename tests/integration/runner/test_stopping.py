"""Everything that ends an attempt from outside: notices, orders, signals, a lease that runs out, a second start."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from spotd_jobs.wire.grant import GrantStopOrder, Orders
from spotd_jobs.wire.reports import EventKind, Outcome
from tests.integration.runner.rig import Machine, Rig, until
from tests.integration.runner.trainer import TRAINER

pytestmark = pytest.mark.e2e
CODE = {"train.py": TRAINER}


def train(*words: str) -> list[str]:
    return [sys.executable, "-IS", "train.py", *words]


def notice(machine: Machine, in_s: float | None) -> None:
    at = None if in_s is None else (datetime.now(UTC) + timedelta(seconds=in_s)).isoformat()
    (machine.home / "notice").write_text(json.dumps({"at": at, "reason": "outbid"}))


def outcome(machine: Machine) -> Outcome:
    done = machine.events()[-1].exit()
    assert done is not None, machine.console()
    return done.outcome


def started(machine: Machine, line: str) -> None:
    """The job has printed this, so it is past its own start."""
    until(lambda: line in machine.log(), f"log line {line!r}")


def test_a_job_that_saves_on_the_notice_loses_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(train("1", "60", "renamed", "1000", "final"), code=CODE, settle_s=30.0))
        started(machine, "step 1")
        notice(machine, 20.0)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.PREEMPTED
        assert [one.name for one in rig.accepted(1)] == ["step-1"], "no settle time once nobody writes"
        told = machine.event("preempt_notice")
        assert (told.data["source"], told.data["reason"]) == ("file", "outbid")
        seen = json.loads((machine.home / "job-notice.json").read_text())
        assert (seen["kind"], seen["reason"], seen["schema"]) == ("preempt", "outbid", 1)
        kinds = [event.kind for event in machine.events()]
        assert kinds.index(EventKind.PREEMPT_NOTICE) < kinds.index(EventKind.CHECKPOINT) < kinds.index(EventKind.EXIT)


SLOW_TO_SAVE = r"""
import os, signal, sys, time
def leave(*_):
    time.sleep(1)
    made = os.environ["SPOTD_CHECKPOINT_DIR"] + "/step-1"
    os.mkdir(made + ".tmp")
    with open(made + ".tmp/DONE", "w") as f:
        f.write("saved")
    os.rename(made + ".tmp", made)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("it trains", flush=True)
time.sleep(60)
"""


def test_a_program_below_a_shell_that_dies_of_the_signal_has_its_time_to_save(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        run = ["/bin/sh", "-c", f"cd . && {sys.executable} -IS slow.py && echo never"]
        machine = rig.start(rig.grant(run, code={"slow.py": SLOW_TO_SAVE}, settle_s=30.0))
        started(machine, "it trains")
        notice(machine, 20.0)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.PREEMPTED
        assert [one.name for one in rig.accepted(1)] == ["step-1"]


def test_a_job_deaf_to_the_signal_is_killed_in_time_and_its_settled_checkpoint_is_kept(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "deaf"), code=CODE, settle_s=0.3, stop_grace_s=0.5)
        machine = rig.start(grant)
        started(machine, "step 1")
        notice(machine, None)
        began = time.monotonic()
        assert machine.wait() == 0
        assert time.monotonic() - began < 10
        done = machine.events()[-1].exit()
        assert done is not None
        assert (done.outcome, done.signal, done.oom) != (Outcome.PREEMPTED, signal.SIGTERM, True)
        assert [one.name for one in rig.accepted(1)] == ["step-1"]


def test_the_grace_is_cut_to_the_time_that_is_left(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "deaf"), code=CODE, stop_grace_s=300.0)
        machine = rig.start(grant)
        started(machine, "step 1")
        notice(machine, 2.0)
        began = time.monotonic()
        assert machine.wait() == 0
        assert time.monotonic() - began < 20
        assert outcome(machine) is Outcome.PREEMPTED


def test_sigterm_to_the_runner_is_a_notice(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(train("1", "60", "renamed", "1000", "final"), code=CODE))
        started(machine, "step 1")
        machine.process.send_signal(signal.SIGTERM)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.PREEMPTED
        assert machine.event("preempt_notice").data["source"] == "signal"
        assert [one.name for one in rig.accepted(1)] == ["step-1"]


@pytest.mark.parametrize("end", ["kill -TERM $$", "exit 143", "exit 130"])
def test_a_command_that_hears_its_machine_end_before_the_runner_does_has_not_failed(end: str, tmp_path: Path) -> None:
    run = f"echo $$ > $SPOTD_OUTPUT_DIR/pid; while ! test -f $SPOTD_OUTPUT_DIR/go; do sleep 0.05; done; {end}"
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", run]))
        folder = machine.home / "outputs"
        until((folder / "pid").exists, "the command")
        pid = until((folder / "pid").read_text, "its number").strip()
        (folder / "go").touch()
        until(lambda: not Path("/proc", pid).exists(), "its end")
        machine.process.send_signal(signal.SIGTERM)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.PREEMPTED


def test_a_program_that_still_saves_below_a_command_that_heard_its_machine_end_has_its_time(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        run = ["/bin/sh", "-c", f"echo $$ > $SPOTD_OUTPUT_DIR/pid; cd . && {sys.executable} -IS slow.py && echo never"]
        machine = rig.start(rig.grant(run, code={"slow.py": SLOW_TO_SAVE}, settle_s=30.0))
        started(machine, "it trains")
        group = int((machine.home / "outputs" / "pid").read_text())
        os.killpg(group, signal.SIGTERM)
        until(lambda: not Path("/proc", str(group)).exists(), "the end of the shell")
        machine.process.send_signal(signal.SIGTERM)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.PREEMPTED
        assert [one.name for one in rig.accepted(1)] == ["step-1"]


def test_a_command_that_a_signal_ended_alone_has_failed(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", "kill -TERM $$"]))
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.FAILED


def test_an_order_stops_the_job_and_what_it_saved_is_kept(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "final"), code=CODE)
        machine = rig.start(grant)
        started(machine, "step 1")
        rig.order_stop(grant, "the budget is used up")
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.STOPPED
        assert machine.event("stop_order").data["reason"] == "the budget is used up"
        assert [one.name for one in rig.accepted(1)] == ["step-1"]


def test_an_order_without_grace_or_flush_ends_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "final"), code=CODE, stop_grace_s=300.0)
        machine = rig.start(grant)
        started(machine, "step 1")
        rig.renew(grant, orders=Orders(stop=GrantStopOrder(reason="cancelled", grace_s=0.0, flush=False)))
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.STOPPED
        assert rig.accepted(1) == []
        assert "saving" not in machine.log()


def test_an_order_can_shorten_the_grace_of_one_under_way(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "deaf"), code=CODE, stop_grace_s=300.0)
        machine = rig.start(grant)
        started(machine, "step 1")
        rig.order_stop(grant)
        machine.event("stop_order")
        rig.order_stop(grant, grace_s=0.0)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.STOPPED


def test_a_wish_for_a_checkpoint_reaches_the_job_without_a_signal(tmp_path: Path) -> None:
    run = 'while ! test -f "$SPOTD_NOTICE_FILE"; do sleep 0.05; done; cat "$SPOTD_NOTICE_FILE"'
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", run])
        machine = rig.start(grant)
        machine.event("started")
        rig.renew(grant, orders=Orders(checkpoint=4))
        assert machine.wait() == 0
        assert json.loads(machine.log())["kind"] == "checkpoint"
        assert machine.event("checkpoint_order").data == {"seq": 4}
        beat = machine.heartbeat()
        assert beat is not None
        assert beat.order_checkpoint == 4
        assert outcome(machine) is Outcome.SUCCEEDED


def test_a_lease_that_is_not_renewed_ends_the_attempt_with_its_work_saved(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("1", "60", "renamed", "1000", "final"), code=CODE, lease_s=4.0)
        machine = rig.start(grant)
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.LEASE_EXPIRED
        assert [one.name for one in rig.accepted(1)] == ["step-1"]
        assert (machine.directory / "machine-done").exists()


def test_renewals_keep_the_lease_and_rewriting_the_same_grant_does_not(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "sleep 60"], lease_s=3.0)
        machine = rig.start(grant)
        machine.event("started")
        until_at = time.monotonic() + 4.0
        renewed = grant
        while time.monotonic() < until_at:
            renewed = rig.renew(renewed)
            until(partial(_took, machine, renewed.issued_at), "the renewal")
        assert machine.process.poll() is None

        def ended() -> bool:
            rig.issue(renewed)
            return machine.process.poll() is not None

        until(ended, "the end of the lease")
        assert outcome(machine) is Outcome.LEASE_EXPIRED


def _took(machine: Machine, issued_at: datetime) -> bool:
    beat = machine.heartbeat()
    return beat is not None and beat.grant_issued_at == issued_at


def test_a_grant_that_was_removed_ends_the_attempt(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "sleep 60"])
        machine = rig.start(grant)
        machine.event("started")
        rig.store.path(machine.prefix + "grant.json").unlink()
        assert machine.wait() == 0
        assert outcome(machine) is Outcome.NOT_CURRENT
        assert (machine.directory / "machine-done").exists()


@pytest.mark.parametrize("why", ["gone", "stopped", "expired"])
def test_a_machine_without_a_current_grant_runs_nothing(why: str, tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        expires_s = 0.0 if why == "expired" else 3600.0
        grant = rig.grant(["/bin/sh", "-c", "echo ran"], lease_s=0.5, expires_s=expires_s)
        if why == "gone":
            rig.store.path(grant.upload.prefix + "grant.json").unlink()
        if why == "stopped":
            rig.order_stop(grant)
        machine = rig.start(grant)
        assert machine.wait() == 0
        assert machine.events() == []
        assert "nothing is run" in machine.console()
        assert (machine.directory / "machine-done").exists() is (why != "gone")


def test_a_second_start_beside_a_living_runner_does_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "sleep 60"])
        machine = rig.start(grant)
        machine.event("started")
        again = rig.start(grant)
        assert again.wait() == 3
        assert len(machine.events("started")) == 1


def test_a_machine_started_again_on_a_wiped_disk_does_not_start_the_job_over(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.renew(rig.grant(["/bin/sh", "-c", "echo ran"]), seen_running=True)
        machine = rig.start(grant)
        assert machine.wait() == 0
        assert machine.events() == []
        assert "has run before" in machine.console()
        assert (machine.directory / "machine-done").exists()


def test_a_runner_started_again_without_anything_to_resume_from_does_not_start_over(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(train("500", "0.2", "marked"), code=CODE)
        machine = rig.start(grant)
        machine.event("checkpoint")
        machine.kill()
        rig.renew(grant)
        again = rig.start(grant)
        assert again.wait() == 0
        assert len(again.events("started")) == 1
        assert "has run before" in again.console()


def test_two_jobs_on_one_computer_never_share_a_checkpoint_folder(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        shared = str(tmp_path / "workspace/checkpoints")
        first = rig.start(
            rig.grant(["/bin/sh", "-c", "echo a >$SPOTD_CHECKPOINT_DIR/a; sleep 60"], checkpoint_path=shared)
        )
        first.event("started")
        second = rig.start(rig.grant(["/bin/true"], attempt=2, checkpoint_path=shared))
        assert second.wait() == 0
        done = second.events()[-1].exit()
        assert done is not None
        assert done.outcome is Outcome.RUNNER_ERROR
        assert "same checkpoint folder" in done.reason
        first.event("checkpoint")


def test_what_lay_in_the_checkpoint_folder_is_moved_beside_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        folder = tmp_path / "workspace/checkpoints"
        (folder / "checkpoint-900").mkdir(parents=True)
        for attempt in (1, 2):
            run = ["/bin/sh", "-c", "ls -A $SPOTD_CHECKPOINT_DIR; touch $SPOTD_CHECKPOINT_DIR/x"]
            machine = rig.start(rig.grant(run, attempt=attempt, checkpoint_path=str(folder)))
            assert machine.wait() == 0
            assert machine.log() == ""
        (aside,) = [path for path in folder.parent.iterdir() if path != folder]
        assert [path.name for path in aside.iterdir()] == ["x"], "only what the last start found is kept"


def test_a_start_after_the_end_runs_nothing_and_ends_the_machine_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["/bin/sh", "-c", "echo ran"])
        machine = rig.start(grant)
        assert machine.wait() == 0
        (machine.directory / "machine-done").unlink()
        rig.renew(grant)
        again = rig.start(grant)
        assert again.wait() == 0
        assert machine.log().count("ran") == 1
        assert (machine.directory / "machine-done").exists()


def test_a_killed_runner_that_is_started_again_kills_what_it_left_and_resumes_only_what_is_certain(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path) as rig:
        escape = ["/bin/sh", "-c", 'setsid sleep 300 & echo $! >escaped; exec "$@"', "sh"]
        grant = rig.grant([*escape, *train("500", "0.2", "marked")], code=CODE)
        machine = rig.start(grant)
        machine.event("checkpoint")
        (orphan,) = (int(path.read_text()) for path in machine.home.glob("**/escaped"))
        machine.process.kill()
        machine.process.wait()
        assert Path(f"/proc/{orphan}").exists(), "a process that left its group and session outlives its runner"
        grant = rig.renew(grant, restore=rig.restores(1))
        again = rig.start(grant)
        until(lambda: len(machine.events("started")) == 2, "the second start")
        assert not _lives(orphan)
        assert again.events("restored")
        started(again, "resumed at")
        before = {row["name"] for row in again.manifests()}
        until(lambda: len(again.manifests()) > len(before), "a checkpoint of the second start")
        seqs = [event.seq for event in again.events()]
        assert seqs == sorted(set(seqs))
        assert rig.accepted(1)


@pytest.mark.parametrize("how", ["the runner alone", "the runner's group"])
def test_a_job_does_not_outlive_its_runner_whoever_kills_it(how: str, tmp_path: Path) -> None:
    run = "trap '' HUP TERM; sleep 300 & echo $$ $! >pids; while :; do sleep 1; done"
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", run], setup="sleep 300 & echo $! >pid-of-setup"))
        until(
            lambda: [*machine.home.glob("**/pids")] and "\n" in next(machine.home.glob("**/pids")).read_text(), "pids"
        )
        found = [int(pid) for path in machine.home.glob("**/pid*") for pid in path.read_text().split()]
        assert len(found) == 3
        assert all(map(_lives, found))
        if how == "the runner alone":
            machine.process.kill()
        else:
            os.killpg(machine.process.pid, signal.SIGKILL)
        machine.process.wait()
        until(lambda: not any(map(_lives, found)), "the end of the job's processes")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
