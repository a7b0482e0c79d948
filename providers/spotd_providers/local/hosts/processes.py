"""The processes of this computer: their identity, their session and their machine.

A pid alone names nothing, since the system hands it out again. A process is its pid *and* the moment it started,
as the kernel reports it, so a record on disk can be compared with what runs now. Linux answers from `/proc`; elsewhere
`ps` is asked, which is slower and shows less.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from spotd_providers.kit.text import write_atomically

_PROC: Final = Path("/proc")
HAS_PROC: Final = Path("/proc/self/stat").exists()
_DEAD_STATES: Final = frozenset("ZX")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One row of the process table.

    Attributes:
        session: session id on Linux; the process group elsewhere.
        started: the kernel's word for when it started, comparable only for equality.
        dead: it has ended and merely waits to be reaped.
    """

    pid: int
    parent: int
    session: int
    started: str
    dead: bool


def find_process(pid: int) -> Process | None:
    if HAS_PROC:
        return _from_stat(pid)
    return next((process for process in _ask_ps(["-p", str(pid)]) if process.pid == pid), None)


def all_processes() -> tuple[Process, ...]:
    """Return every process that this user can see."""
    if not HAS_PROC:
        return _ask_ps(["-A"])
    rows = (_from_stat(int(name)) for name in os.listdir(_PROC) if name.isdigit())  # noqa: PTH208 - names, not paths
    return tuple(row for row in rows if row is not None)


def pids_with_environment(mark: str) -> frozenset[int]:
    """Return the processes whose first environment holds the entry `mark` (`NAME=value`)."""
    if not HAS_PROC:
        return _pids_with_environment_by_ps(mark)
    wanted = mark.encode()
    found = set()
    for name in os.listdir(_PROC):  # noqa: PTH208 - names, not paths: a scan reads hundreds of them
        if not name.isdigit():
            continue
        try:
            environment = _read(f"{_PROC}/{name}/environ")
        except OSError:
            continue  # another user's, or gone
        if wanted in environment and wanted in environment.split(b"\0"):
            found.add(int(name))
    return frozenset(found)


def kill_hard(pid: int) -> None:
    """Send SIGKILL to this pid, if there is one and it is ours."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def reap(pid: int) -> int | None:
    """Return the exit code of a child that ended, once; `None` if it runs or is not our child."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done == pid else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_BOOT: Final = _boot_id()


def _read(path: str) -> bytes:
    """Return all of a file of the kernel; a scan reads hundreds, and takes two fifths of the time without `Path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while piece := os.read(descriptor, 65_536):
            text += piece
        return text
    finally:
        os.close(descriptor)


def _from_stat(pid: int) -> Process | None:
    try:
        text = _read(f"{_PROC}/{pid}/stat")
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses: the fields begin after the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=f"{_BOOT}:{fields[19].decode()}",
        dead=fields[0].decode() in _DEAD_STATES,
    )


def _ask_ps(selection: list[str]) -> tuple[Process, ...]:
    answer = subprocess.run(
        ["ps", *selection, "-o", "pid=", "-o", "ppid=", "-o", "pgid=", "-o", "state=", "-o", "lstart="],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    found = []
    for line in answer.stdout.splitlines():
        pid, parent, group, state, *started = line.split()
        found.append(
            Process(
                pid=int(pid),
                parent=int(parent),
                session=int(group),
                started=" ".join(started),
                dead=state[0] in _DEAD_STATES,
            )
        )
    return tuple(found)


def _pids_with_environment_by_ps(mark: str) -> frozenset[int]:
    answer = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, text=True, check=False)
    lines = (line.strip().partition(" ") for line in answer.stdout.splitlines())
    return frozenset(int(pid) for pid, _, command in lines if mark in command.split())


# A Python environment of a local machine's own, so that what a job installs stays in the machine's folder.
#
# A machine of the local market is a process of this computer, and its first `python3` would be the one that spotd
# runs in: `pip install` in a job's `setup` would change the user's own environment. The machine gets a virtual
# environment as `venv` makes it, which finds all that is installed beside spotd and installs into itself. It is
# written here, since `venv` takes tenths of a second for each machine.
#
# Source of the form: PEP 405, and https://docs.python.org/3/library/site.html for the lines of a `.pth` file.


FOLDER: Final = "python"
_NAMES: Final = ("python", "python3")
_PIP_NAMES: Final = ("pip", "pip3")
_PIP: Final = '#!/bin/sh\nexec "{python}" -m pip "$@"\n'


def make_python_env(directory: Path) -> dict[str, str]:
    """Make the environment below the machine's directory, unless it is there; return the variables that select it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = directory / FOLDER
    programs = folder / "bin"
    base = Path(getattr(sys, "_base_executable", "") or sys.executable)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    if not (folder / "pyvenv.cfg").exists():
        programs.mkdir(parents=True, exist_ok=True)
        packages.mkdir(parents=True, exist_ok=True)
        for name in _NAMES:
            (programs / name).unlink(missing_ok=True)
            (programs / name).symlink_to(base)
        for name in _PIP_NAMES:
            write_atomically(programs / name, _PIP.format(python=programs / "python3"), mode=0o755)
        beside = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in beside)
        write_atomically(packages / "beside-spotd.pth", lines)
        # Last: it is what makes the folder an environment, so one that is half made is made again.
        text = f"home = {base.parent}\ninclude-system-site-packages = true\n"
        write_atomically(folder / "pyvenv.cfg", text)
    return {"VIRTUAL_ENV": str(folder), "PIP_REQUIRE_VIRTUALENV": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def program_path(directory: Path) -> str:
    """Return the machine's PATH: its own environment, then the folder of this interpreter, then our own."""
    own = directory / FOLDER / "bin"
    return os.pathsep.join([str(own), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


# The status of a machine, in memory and on disk for the next owner.


class MachineError(Exception):
    """A machine could not be started, found or ended; the message names it."""


class HostMachineState(StrEnum):
    """The state of a machine, by its processes."""

    RUNNING = "running"
    ENDED = "ended"
    """By itself: the start script ended, or the runner said it is done."""
    KILLED = "killed"
    LOST = "lost"
    """Its processes vanished and left no exit code: killed from outside, or the computer was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The status of a machine.

    Attributes:
        boots: how many times its start script was started.
        pid_started: the kernel's word for when its first process started.
        exit_code: of the start script, where it ended by itself.
        done: the runner wrote `machine-done`: whatever still runs there may be killed.
        started_at: virtual time of the last boot.
        ended_at: virtual time of its end, as precise as the file system records.
    """

    machine_id: str
    boots: int
    started_at: datetime
    env: Mapping[str, str] = field(default_factory=dict)
    state: HostMachineState = HostMachineState.RUNNING
    pid: int | None = None
    pid_started: str | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    done: bool = False
