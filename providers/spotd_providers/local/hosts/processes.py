"""The processes of this computer: their identity, their session and their machine.

A pid alone names nothing, since the system hands it out again. A process is its pid *and* the moment it started,
as the kernel reports it, so a record on disk can be compared with what runs now. Linux answers from `/proc`; elsewhere
`ps` is asked, which is slower and shows less.
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
            environment = (_PROC / name / "environ").read_bytes()
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


def _from_stat(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
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
