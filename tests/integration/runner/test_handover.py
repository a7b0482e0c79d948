"""A machine on its way from a job that is done to the next one: what is removed, what is proven, what it becomes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd_jobs.runner import handover
from spotd_jobs.runner.handover import FileClock, words_against_handover
from spotd_jobs.runner.process import MARK
from spotd_jobs.wire.grant import Grant, NextAttempt, ReuseRules
from tests.integration.runner.rig import JOB, Rig, until

NEXT = "jobs/j1/next/0000000001.json"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as made:
        yield made


def with_reuse(rig: Rig, grant: Grant, *, wait_s: float = 20.0) -> Grant:
    return rig.renew(grant, reuse=ReuseRules(url=rig.store.url(NEXT), wait_s=wait_s, alone=False))


def announced(rig: Rig, grant: Grant) -> None:
    document = NextAttempt(job=JOB, attempt=grant.attempt, grant_url=grant.grant_url)
    rig.store.put(NEXT, document.to_bytes())


def test_one_machine_carries_two_attempts_and_the_second_finds_nothing_of_the_first(rig: Rig) -> None:
    leaves = (
        "echo $CANARY > left; (setsid sleep 600 &) ; mkdir $SPOTD_CHECKPOINT_DIR/c; echo x > $SPOTD_CHECKPOINT_DIR/c/x"
    )
    first = rig.grant(["/bin/sh", "-c", leaves], setup="sleep 600 & true", secrets={"CANARY": "a-secret"})
    looks = "ls -A . $SPOTD_CHECKPOINT_DIR; env | grep -c CANARY; echo attempt $SPOTD_ATTEMPT"
    second = with_reuse(rig, rig.grant(["/bin/sh", "-c", looks], attempt=2), wait_s=0.2)
    machine = rig.start(with_reuse(rig, first))
    ended = machine.event("exit").exit()
    assert ended is not None
    assert ended.waits
    assert machine.process.poll() is None
    announced(rig, second)
    assert machine.wait() == 0
    machine.grant = second
    assert "attempt 2" in machine.log()
    assert "0\n" in machine.log()
    assert "left" not in machine.log()
    until(lambda: not machine.processes(), "every process to end")
    boot = machine.event("boot").data
    assert boot["restart"] is False


def test_a_machine_that_nobody_takes_ends_itself_when_its_wait_is_over(rig: Rig) -> None:
    machine = rig.start(with_reuse(rig, rig.grant(["true"]), wait_s=0.5))
    assert machine.wait() == 0
    assert (machine.directory / "machine-done").exists()


def test_what_announces_the_machines_own_attempt_is_no_next_one(rig: Rig) -> None:
    grant = with_reuse(rig, rig.grant(["true"]), wait_s=0.5)
    announced(rig, grant)
    machine = rig.start(grant)
    assert machine.wait() == 0
    assert len(machine.events("boot")) == 1


@pytest.mark.parametrize("run", [["false"], ["/bin/sh", "-c", "kill -9 $$"]], ids=["failed", "killed"])
def test_the_machine_of_a_job_that_failed_ends_at_once(rig: Rig, run: list[str]) -> None:
    machine = rig.start(with_reuse(rig, rig.grant(run)))
    assert machine.wait() == 0
    ended = machine.event("exit").exit()
    assert ended is not None
    assert not ended.waits


def test_a_machine_that_was_handed_over_and_starts_again_goes_on_with_its_last_attempt(rig: Rig) -> None:
    first = with_reuse(rig, rig.grant(["true"]))
    second = rig.grant(["/bin/sh", "-c", "echo runs; sleep 600"], attempt=2)
    machine = rig.start(first)
    machine.event("exit")
    announced(rig, second)
    machine.grant = second
    machine.event("started")
    machine.kill()
    again = rig.start(first)  # its provider knows the first grant only
    again.grant = second
    assert again.event("boot").attempt == 2


def test_a_machine_that_starts_again_while_it_waits_ends_and_does_not_do_the_job_once_more(rig: Rig) -> None:
    first = with_reuse(rig, rig.grant(["true"]), wait_s=300.0)
    machine = rig.start(first)
    machine.event("exit")
    until((machine.home / "done").exists, "the end to be noted")
    machine.kill()
    again = rig.start(first)
    assert again.wait() == 0
    assert len(again.events("boot")) == 1
    assert (again.directory / "machine-done").exists()


# --- what is proven ---


def cleared(folder: Path, *, alone: bool = True, mark: str = "m") -> str:
    home, checkpoints = folder / "home", folder / "checkpoints"
    clock = FileClock()
    return words_against_handover(str(home), str(checkpoints), mark, clock, alone=alone)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a system of three old files, on which no process is young."""
    for name in ("home/work", "checkpoints/step", "usr"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("home/work/left", "home/lock", "checkpoints/step/x", "usr/tool"):
        (tmp_path / name).write_text("x")
    real = handover._changed_elsewhere
    monkeypatch.setattr(handover, "_younger_processes", list)
    monkeypatch.setattr(handover, "_left_in_memory", lambda _began: "")
    monkeypatch.setattr(
        handover, "_changed_elsewhere", lambda own, lock, began: real(own, lock, began, (str(tmp_path),))
    )
    time.sleep(1.1)  # files are dated in whole steps of a clock: what is older than a second is older
    return tmp_path


def test_all_that_was_the_jobs_is_removed(folder: Path) -> None:
    assert cleared(folder) == ""
    assert sorted(path.name for path in (folder / "home").iterdir()) == ["lock"]
    assert list((folder / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("what", ["usr/new", "usr/tool", "etc"])
def test_what_a_job_changed_elsewhere_keeps_the_machine_from_others(folder: Path, what: str) -> None:
    clock = FileClock()
    (folder / what).mkdir() if what == "etc" else (folder / what).write_text("its secret")
    said = words_against_handover(str(folder / "home"), str(folder / "checkpoints"), "m", clock, alone=True)
    assert said.endswith("changed while the job ran")
    assert said.startswith(str(folder))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory is shared by files here")
def test_a_file_in_shared_memory_keeps_the_machine_from_others() -> None:
    began = time.time() - 0.5
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as left:
        others = {entry.path for entry in os.scandir("/dev/shm")} - {left.name}
        tops = tuple(top for top in handover._TOPS if top.startswith("/dev"))
        said = handover._changed_elsewhere(others, "", began, tops)
        assert said == f"{left.name} changed while the job ran"


@pytest.mark.skipif(not Path("/proc/sysvipc/shm").exists(), reason="System V is not shown here")
def test_memory_of_system_v_that_the_job_made_keeps_the_machine_from_others() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.shmget(0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT
    if made < 0:
        pytest.skip("no memory may be shared here")
    try:
        assert handover._left_in_memory(time.time() - 60) == "shm"
        assert handover._left_in_memory(time.time() + 3600) == ""
    finally:
        libc.shmctl(made, 0, None)  # IPC_RMID


def test_on_a_computer_of_others_nothing_elsewhere_is_looked_at(folder: Path) -> None:
    (folder / "usr" / "new").write_text("somebody else's")
    assert cleared(folder, alone=False) == ""


def test_a_clock_that_was_set_proves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FileClock()
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    said = words_against_handover(str(folder / "home"), str(folder / "checkpoints"), "m", clock, alone=True)
    assert said.startswith("the clock of the machine was set")


def test_too_many_files_prove_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_WALK_MAX", 1)
    assert cleared(folder).startswith("there are too many files")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are not shown here")
def test_a_process_of_the_job_is_ended_and_a_younger_one_of_nobody_keeps_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = shutil.which("sleep") or "sleep"
    marked = subprocess.Popen([sleep, "600"], env={MARK: "this-one"})
    assert cleared(folder, mark="this-one") == ""
    assert marked.wait() < 0
    monkeypatch.undo()
    other = subprocess.Popen([sleep, "600"], env={})
    try:
        assert other.pid in handover._younger_processes()
        assert os.getpid() not in handover._younger_processes()
    finally:
        other.kill()
        other.wait()
