"""The engine that runs machines as processes."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spotd_providers.local.hosts import HostMachineState, MachineError, Machines, ScaledClock, measure, processes
from spotd_providers.local.hosts.machines import read_clock, write_clock
from tests.unit.providers.local.clocks import START, ManualClock
from tests.unit.providers.local.waiting import until

FOREVER = "exec sleep 1000"

# A grandchild in a session of its own, in the way of every daemon; it says its pid and then lives on.
ESCAPE = textwrap.dedent("""\
    import os, sys, time
    keep = sys.argv[1] == "keep"
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    if not keep:
        os.execve("/bin/sh", ["/bin/sh", "-c", "echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 1000"], {})
    open("pid.tmp", "w").write(str(os.getpid()))
    os.rename("pid.tmp", "pid")
    time.sleep(1000)
""")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path / "market", clock=ManualClock())
    yield found
    found.kill_all()


def _runs(pid: int) -> bool:
    row = processes.find_process(pid)
    return row is not None and not row.dead


def _pid_in(file: Path) -> int:
    return until(lambda: int(file.read_text()) if file.exists() else 0, what=str(file))


def test_a_machine_runs_its_script_in_its_own_directory_with_a_minimal_environment(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", "canary")
    machines.start("m-1", "env > env.txt; pwd; exit 3", {"EXTRA": "yes"})
    until(lambda: not machines.alive("m-1"))
    assert machines.status("m-1").exit_code == 3
    environment = dict(line.split("=", 1) for line in (machines.directory("m-1") / "env.txt").read_text().splitlines())
    directory = str(machines.directory("m-1"))
    assert environment["HOME"] == directory
    assert environment["SPOTD_HOME"] == f"{directory}/spotd"
    assert environment["EXTRA"] == "yes"
    assert set(environment) <= {
        "PATH", "LANG", "HOME", "SPOTD_HOME", "EXTRA", "SPOTD_LOCAL_MACHINE", "PWD", "OLDPWD", "SHLVL", "_",
        "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV", "PIP_DISABLE_PIP_VERSION_CHECK",
    }  # fmt: skip
    assert machines.console("m-1", lines=5) == [directory]


@pytest.mark.parametrize("keeps_environment", [True, False], ids=["same-environment", "emptied-environment"])
def test_kill_reaches_a_child_of_the_session_whatever_its_group_and_environment(
    machines: Machines, keeps_environment: bool
) -> None:
    program = (
        "import os, time; os.setpgid(0, 0); open('pid.tmp', 'w').write(str(os.getpid()));"
        "os.rename('pid.tmp', 'pid'); time.sleep(1000)"
    )
    prefix = "" if keeps_environment else "env -i "
    machines.start("m-1", f'{prefix}{sys.executable} -c "{program}" &\nwait')
    pid = _pid_in(machines.directory("m-1") / "pid")
    machines.kill("m-1")
    assert not _runs(pid)


def test_kill_reaches_a_grandchild_that_forked_twice_into_its_own_session(machines: Machines, tmp_path: Path) -> None:
    script = tmp_path / "escape.py"
    script.write_text(ESCAPE)
    status = machines.start("m-1", f"{sys.executable} {script} keep\n{FOREVER}")
    pid = _pid_in(machines.directory("m-1") / "pid")
    row = processes.find_process(pid)
    assert row is not None
    assert row.session != status.pid
    machines.kill("m-1")
    assert not _runs(pid)
    assert machines.status("m-1").state is HostMachineState.KILLED


def test_kill_reaches_what_a_script_that_has_ended_left_behind(machines: Machines, tmp_path: Path) -> None:
    script = tmp_path / "escape.py"
    script.write_text(ESCAPE)
    machines.start("m-1", f"{sys.executable} {script} keep")
    pid = _pid_in(machines.directory("m-1") / "pid")
    until(lambda: not machines.alive("m-1"))
    assert machines.status("m-1").state is HostMachineState.ENDED
    assert _runs(pid)
    machines.kill("m-1")
    assert not _runs(pid)
    assert machines.status("m-1").state is HostMachineState.ENDED


def test_kill_leaves_other_machines_and_another_roots_machine_of_the_same_name_alone(
    machines: Machines, tmp_path: Path
) -> None:
    other = Machines(tmp_path / "other", clock=ManualClock())
    try:
        other.start("m-1", FOREVER)
        machines.start("m-1", FOREVER)
        machines.start("m-2", FOREVER)
        machines.kill("m-1")
        assert machines.alive("m-2")
        assert other.alive("m-1")
    finally:
        other.kill_all()


def test_a_full_disk_keeps_no_machine_from_being_killed(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    status = machines.start("m-1", FOREVER)

    def no_space(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as full_disk:
        full_disk.setattr("spotd_providers.local.hosts.machines.write_atomically", no_space)
        machines.kill("m-1")
    assert status.pid is not None
    assert not _runs(status.pid)
    assert not machines.alive("m-1")


def test_the_end_of_a_machine_whose_root_was_removed_is_not_noted_in_the_root_that_took_its_place(
    machines: Machines, tmp_path: Path
) -> None:
    """Both may have the same ids: the second one would be without its record, and be found by nobody."""
    root = machines.directory("m-1").parent.parent
    first = machines.start("m-1", "exec sleep 1000")
    shutil.rmtree(root)
    successor = Machines(root, clock=ManualClock())
    second = successor.start("m-1", "exec sleep 1000")
    try:
        machines.kill_all()
        assert first.pid is not None
        assert not _runs(first.pid)
        adopted = Machines(root, clock=ManualClock()).status("m-1")
        assert (adopted.pid, adopted.state) == (second.pid, HostMachineState.RUNNING)
    finally:
        successor.kill_all()


def test_kill_of_an_unknown_machine_succeeds(machines: Machines) -> None:
    machines.kill("nobody")


def test_a_new_owner_of_the_root_adopts_what_runs_and_learns_how_the_rest_ended(
    machines: Machines, tmp_path: Path
) -> None:
    machines.start("lives", FOREVER)
    machines.start("ended", "exit 7")
    until(lambda: not machines.alive("ended"))
    heir = Machines(tmp_path / "market", clock=ManualClock())
    assert heir.alive("lives")
    assert heir.status("ended").exit_code == 7
    heir.kill("lives")
    assert not machines.alive("lives")


def test_machines_outlive_a_killed_owner_process_and_are_adopted(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""\
        import os, pathlib, signal
        from spotd_providers.local.hosts import REAL_TIME, Machines
        machines = Machines(pathlib.Path({str(tmp_path / "market")!r}), clock=REAL_TIME)
        machines.start("m-1", "exec sleep 1000")
        machines.start("m-2", "sleep 0.2; exit 5")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    dead = subprocess.run([sys.executable, "-c", program], check=False)
    assert dead.returncode == -9
    heir = Machines(tmp_path / "market", clock=ManualClock())
    try:
        assert heir.alive("m-1")
        until(lambda: not heir.alive("m-2"))
        assert heir.status("m-2").exit_code == 5
    finally:
        heir.kill_all()
    assert heir.status("m-1").state is HostMachineState.KILLED


def test_an_owner_killed_before_it_noted_the_pid_is_succeeded_by_one_that_finds_the_machine_by_its_mark(
    machines: Machines, tmp_path: Path
) -> None:
    status = machines.start("m-1", FOREVER)
    record = tmp_path / "market" / "records" / "m-1.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "pid": None, "pid_started": None}))
    heir = Machines(tmp_path / "market", clock=ManualClock())
    assert heir.status("m-1").pid == status.pid
    heir.kill("m-1")
    assert status.pid is not None
    assert not _runs(status.pid)


def test_a_machine_that_never_came_to_life_is_lost_and_not_confused_with_a_stranger_on_its_pid(
    machines: Machines, tmp_path: Path
) -> None:
    machines.start("m-1", FOREVER)
    machines.kill("m-1")
    record = tmp_path / "market" / "records" / "m-1.json"
    stranger = {"pid": os.getpid(), "pid_started": "another moment", "state": "running", "ended_at": None}
    record.write_text(json.dumps({**json.loads(record.read_text()), **stranger}))
    heir = Machines(tmp_path / "market", clock=ManualClock())
    assert heir.status("m-1").state is HostMachineState.LOST
    heir.kill("m-1")


def test_a_machine_that_says_it_is_done_has_ended_though_it_still_runs(machines: Machines) -> None:
    machines.start(
        "m-1", 'echo done > "$HOME/machine-done.new"; mv "$HOME/machine-done.new" "$HOME/machine-done"; ' + FOREVER
    )
    until(lambda: not machines.alive("m-1"))
    status = machines.status("m-1")
    assert status.state is HostMachineState.ENDED
    assert status.done
    assert status.exit_code is None


def test_restart_runs_the_same_script_in_the_same_directory_and_forgets_the_old_notice(machines: Machines) -> None:
    machines.start("m-1", 'echo "boot" >> boots; ' + FOREVER, {"COLOUR": "blue"})
    boots = machines.directory("m-1") / "boots"
    until(lambda: boots.exists() and boots.read_text().count("boot") == 1)
    machines.notice("m-1", START + timedelta(minutes=2))
    with pytest.raises(MachineError, match="runs already"):
        machines.restart("m-1")
    machines.kill("m-1")
    assert machines.restart("m-1").boots == 2
    until(lambda: boots.read_text().count("boot") == 2)
    assert not (machines.home("m-1") / "notice").exists()
    assert machines.alive("m-1")


def test_a_notice_speaks_the_wall_clock_to_the_machine(tmp_path: Path) -> None:
    clock = ScaledClock(real0=0.0, virtual0=START, scale=60.0)
    machines = Machines(tmp_path / "market", clock=clock)
    machines.start("m-1", FOREVER)
    try:
        before = datetime.now(START.tzinfo)
        at = clock.now() + timedelta(minutes=2)
        machines.notice("m-1", at, reason="capacity")
        content = json.loads((machines.home("m-1") / "notice").read_text())
        left = datetime.fromisoformat(content["at"]) - before
        assert timedelta(seconds=1.5) < left < timedelta(seconds=3)
        assert content["reason"] == "capacity"
        assert datetime.fromisoformat(content["virtual_at"]) == at
    finally:
        machines.kill_all()


@pytest.mark.parametrize("machine_id", ["", "../up", "a/b", ".hidden", "x" * 200])
def test_an_id_that_cannot_name_a_directory_is_refused(machines: Machines, machine_id: str) -> None:
    with pytest.raises(MachineError, match="cannot name"):
        machines.start(machine_id, FOREVER)


def test_remove_leaves_nothing(machines: Machines, tmp_path: Path) -> None:
    machines.start("m-1", FOREVER)
    machines.remove("m-1")
    assert machines.ids() == ()
    assert not list((tmp_path / "market").rglob("*m-1*"))


def test_a_clock_is_read_back_as_it_was_written_and_measured_as_it_runs(tmp_path: Path) -> None:
    clock = ScaledClock(real0=time.time() - 100.5, virtual0=START, scale=10_000.0)
    write_clock(tmp_path / "clock.json", clock)
    assert read_clock(tmp_path / "clock.json") == clock
    measured = measure(clock)
    assert measured.scale == pytest.approx(10_000.0)
    assert abs(measured.at_real(clock.real0 + 200.0) - clock.at_real(clock.real0 + 200.0)) < timedelta(seconds=60)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"real0": 1, "virtual0": "2026-01-01", "scale": 1}',
                '{"real0": 1, "virtual0": "2026-01-01T00:00:00Z", "scale": 0}'],
    ids=["empty", "list", "no-zone", "no-scale"],
)  # fmt: skip
def test_a_file_that_is_no_clock_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "clock.json").write_text(content)
    with pytest.raises(ValueError, match=r"clock\.json is no clock file"):
        read_clock(tmp_path / "clock.json")


def test_where_there_is_no_proc_ps_finds_the_same_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HAS_PROC", False)
    script = tmp_path / "escape.py"
    script.write_text(ESCAPE)
    machines = Machines(tmp_path / "market", clock=ManualClock())
    status = machines.start("m-1", f"{sys.executable} {script} keep\n{FOREVER}")
    pid = _pid_in(machines.directory("m-1") / "pid")
    assert machines.alive("m-1")
    machines.kill("m-1")
    monkeypatch.setattr(processes, "HAS_PROC", True)
    assert not _runs(pid)
    assert status.pid is not None
    assert not _runs(status.pid)


def _wheel(folder: Path, name: str) -> Path:
    """Write the smallest distribution that pip installs."""
    file = folder / f"{name}-1.0-py3-none-any.whl"
    record = f"{name}-1.0.dist-info"
    parts = {
        f"{name}.py": "",
        f"{record}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{record}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{record}/RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in parts.items():
            archive.writestr(path, content)
    return file


@pytest.mark.lengthy
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip beside spotd")
@pytest.mark.parametrize("pip", ["pip", "python3 -m pip"])
def test_what_a_job_installs_stays_in_its_machine(machines: Machines, tmp_path: Path, pip: str) -> None:
    wheel = _wheel(tmp_path, "spotd_absent_elsewhere")
    script = f"""
        {pip} install --quiet --no-index {wheel} && python3 - <<'END'
        import anyio, pathlib, spotd_absent_elsewhere
        pathlib.Path("found").write_text(spotd_absent_elsewhere.__file__)
        END
    """
    machines.start("m", textwrap.dedent(script))
    until(lambda: not machines.alive("m"), what="its end", seconds=60.0)
    assert machines.status("m").exit_code == 0, (machines.directory("m") / "console.log").read_text()
    assert (machines.directory("m") / "found").read_text().startswith(str(machines.directory("m")))
    assert importlib.util.find_spec("spotd_absent_elsewhere") is None


def test_a_machine_keeps_what_it_installed_when_it_starts_again(machines: Machines) -> None:
    machines.start("m", "touch $VIRTUAL_ENV/kept")
    until(lambda: not machines.alive("m"), what="its end")
    machines.start("m", "test -e $VIRTUAL_ENV/kept && python3 -c 'import anyio'")
    until(lambda: not machines.alive("m"), what="its second end")
    assert machines.status("m").exit_code == 0
