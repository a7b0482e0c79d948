"""Machines as sessions of processes, each in a directory of its own.

Theory. A machine is started by a start script, as on any rented host, and everything it ever starts must end with it.
Processes may fork, change their group and even their session, so the processes of a machine are found in three ways:
by its session, by a mark in the environment that children inherit, and as descendants of those found by the first two.
The search is repeated until it finds none.

The machines outlive the server that owns them, as a cloud's machines outlive its web site: what is needed to find
them again (pid and the kernel's start time) is on disk, written *before* the first process exists, so that a server
killed at any moment finds either the machine or its mark.

Layout below the root: `records/<id>.json` (ours), `records/<id>.exit` (how the script ended), `records/<id>.sh`,
and `hosts/<id>/`, the machine's own directory, with its `console.log`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Protocol

from pydantic import TypeAdapter

from spotd_providers.kit.text import write_atomically
from spotd_providers.local.hosts import processes
from spotd_providers.local.hosts.processes import (
    HostMachineState,
    MachineError,
    MachineStatus,
    make_python_env,
    program_path,
)

# The time of hosts on this computer: virtual for prices and bills, real for the processes themselves.
#
# `virtual = virtual0 + (real - real0) * scale`. The three parameters are written once to a `clock.json` and never
# change, so that every process that reads the file speaks of the same instant, across restarts.


_READINGS: Final = 9


class HostClock(Protocol):
    """The part of `contract.provider.Clock` that hosts need."""

    def now(self) -> datetime: ...

    def real_seconds(self, duration: timedelta) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledClock:
    """A virtual clock that runs `scale` times as fast as the wall clock."""

    real0: float
    virtual0: datetime
    scale: float

    def now(self) -> datetime:
        return self.at_real(time.time())

    def at_real(self, epoch_s: float) -> datetime:
        """Convert a wall clock's time (say, the change time of a file) to virtual time."""
        return self.virtual0 + timedelta(seconds=(epoch_s - self.real0) * self.scale)

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds() / self.scale


REAL_TIME = ScaledClock(real0=0.0, virtual0=datetime(1970, 1, 1, tzinfo=UTC), scale=1.0)


def measure(clock: HostClock) -> ScaledClock:
    """Measure the parameters of any clock that runs evenly against the wall clock.

    The tightest of a few readings is taken: being descheduled between two reads is hours at a high scale.
    """
    an_hour = timedelta(hours=1)
    readings: list[tuple[float, float, datetime]] = []
    for _ in range(_READINGS):
        before = time.time()
        virtual = clock.now()
        after = time.time()
        readings.append((after - before, (before + after) / 2, virtual))
    _, real, virtual = min(readings)
    return ScaledClock(real0=real, virtual0=virtual, scale=an_hour.total_seconds() / clock.real_seconds(an_hour))


def write_clock(path: Path, clock: ScaledClock) -> None:
    """Write the clock's parameters to a `clock.json`."""
    content = {"real0": clock.real0, "virtual0": clock.virtual0.isoformat(), "scale": clock.scale}
    write_atomically(path, json.dumps(content))


def read_clock(path: Path) -> ScaledClock:
    """Read a `clock.json`.

    Raises:
        ValueError: the file does not hold one.
    """
    try:
        content = json.loads(path.read_text())
        clock = ScaledClock(
            real0=float(content["real0"]),
            virtual0=datetime.fromisoformat(content["virtual0"]),
            scale=float(content["scale"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{path} is no clock file: {exc}") from exc
    if clock.virtual0.tzinfo is None or not 0 < clock.scale < float("inf"):
        raise ValueError(f"{path} is no clock file: it needs a zone and a scale above 0")
    return clock


def real_now() -> datetime:
    """Return the wall clock's time, which processes on this computer compare with their own."""
    return datetime.now(UTC)


_STATUS: Final = TypeAdapter(MachineStatus)
MARK: Final = "SPOTD_LOCAL_MACHINE"
_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,119}")
_KILL_SECONDS_MAX: Final = 10.0
_CONSOLE_TAIL_BYTES: Final = 1024 * 1024
# The shell that stays behind notes how the script ended, since no process can wait for another's child. The
# temporary name keeps a half-written number from being read.
_WRAPPER: Final = (
    '/bin/sh "$1"; spotd_code=$?; printf %s "$spotd_code" >"$2.new" && mv "$2.new" "$2"; exit "$spotd_code"'
)


class Machines:
    """The machines below one root directory. Every method is synchronous and may be called from any thread.

    `kill` may take as long as the system needs to end processes: milliseconds, and never more than ten seconds.
    """

    def __init__(self, root: Path, *, clock: HostClock, path: str | None = None) -> None:
        """Adopt the machines that an earlier owner of this root started, or find that they ended.

        `path` is the machines' PATH; by default a Python environment of the machine's own, then ours.
        """
        self._root = root.resolve()
        self._clock = clock
        self._path = path
        self._lock = threading.RLock()
        self._records: dict[str, MachineStatus] = {}
        (self._root / "records").mkdir(parents=True, exist_ok=True)
        (self._root / "hosts").mkdir(parents=True, exist_ok=True)
        self._root_mark = self._read_root_mark()
        for file in sorted((self._root / "records").glob("*.json")):
            record = _STATUS.validate_json(file.read_bytes())
            self._records[record.machine_id] = record
            if record.pid is None and record.state is HostMachineState.RUNNING:
                self._adopt_by_mark(record)

    def start(self, machine_id: str, start_script: str, env: Mapping[str, str] | None = None) -> MachineStatus:
        """Run the script as a new session in the machine's directory, which is kept from an earlier boot.

        Raises:
            MachineError: it runs already, or the id cannot name a directory.
        """
        if _ID.fullmatch(machine_id) is None:
            raise MachineError(f"{machine_id!r} cannot name a machine")
        with self._lock:
            if machine_id in self._records and self.alive(machine_id):
                raise MachineError(f"machine {machine_id} runs already")
            previous = self._records.get(machine_id)
            directory = self.directory(machine_id)
            self.home(machine_id).mkdir(parents=True, exist_ok=True)
            for stale in (self._exit_file(machine_id), *self._done_files(machine_id), self._notice_file(machine_id)):
                stale.unlink(missing_ok=True)
            write_atomically(self._script_file(machine_id), start_script, mode=0o700)
            record = MachineStatus(
                machine_id=machine_id,
                boots=previous.boots + 1 if previous else 1,
                started_at=self._clock.now(),
                env=dict(env or {}),
            )
            self._save(record)
            with (directory / "console.log").open("ab") as console:
                process = subprocess.Popen(
                    [
                        "/bin/sh",
                        "-c",
                        _WRAPPER,
                        "spotd-machine",
                        str(self._script_file(machine_id)),
                        str(self._exit_file(machine_id)),
                    ],
                    cwd=directory,
                    env=self._environment(machine_id, record.env),
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            row = processes.find_process(process.pid)
            self._save(replace(record, pid=process.pid, pid_started=row.started if row else ""))
            # The machine is meant to outlive this object, and is reaped by pid: Popen must neither warn nor wait.
            process.returncode = 0
            return self.status(machine_id)

    def restart(self, machine_id: str) -> MachineStatus:
        """Run the machine's own start script again in the same directory, with the same environment."""
        with self._lock:
            record = self._get(machine_id)
            return self.start(machine_id, self._script_file(machine_id).read_text(), record.env)

    def ids(self) -> tuple[str, ...]:
        """Return every machine that was started below this root and not removed."""
        with self._lock:
            return tuple(self._records)

    def status(self, machine_id: str) -> MachineStatus:
        """Return the machine's status. Its end is recorded on disk when it is observed first."""
        with self._lock:
            return self._settle(self._get(machine_id))

    def alive(self, machine_id: str) -> bool:
        """Whether it runs and has not said that it is done."""
        return self.status(machine_id).state is HostMachineState.RUNNING

    def directory(self, machine_id: str) -> Path:
        """Return the machine's own directory, in which its start script runs."""
        return self._root / "hosts" / machine_id

    def home(self, machine_id: str) -> Path:
        """Return the machine's `$SPOTD_HOME`."""
        return self.directory(machine_id) / "spotd"

    def console(self, machine_id: str, *, lines: int) -> list[str]:
        """Return the last lines that the machine printed."""
        try:
            with (self.directory(machine_id) / "console.log").open("rb") as stream:
                stream.seek(0, os.SEEK_END)
                stream.seek(max(0, stream.tell() - _CONSOLE_TAIL_BYTES))
                text = stream.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        return list(deque(text.splitlines(), maxlen=max(0, lines)))

    def notice(self, machine_id: str, at: datetime, *, reason: str = "preempted") -> None:
        """Write to `$SPOTD_HOME/notice` when the machine will be taken away.

        `at` is virtual; the file's `at` is the wall clock's instant, the only time the machine itself knows.
        """
        with self._lock:
            self._get(machine_id)
            real_left_s = self._clock.real_seconds(at - self._clock.now())
            content = {
                "at": (real_now() + timedelta(seconds=real_left_s)).isoformat(),
                "reason": reason,
                "virtual_at": at.isoformat(),
            }
            self.home(machine_id).mkdir(parents=True, exist_ok=True)
            write_atomically(self._notice_file(machine_id), json.dumps(content))

    def kill(self, machine_id: str) -> None:
        """Kill every process of the machine. Succeeds for one that is unknown or ended.

        Raises:
            MachineError: processes outlived ten seconds of SIGKILL.
        """
        with self._lock:
            record = self._records.get(machine_id)
            if record is None:
                return
            record = self._settle(record)
            give_up_at = time.monotonic() + _KILL_SECONDS_MAX
            pause_s = 0.002
            while victims := self._processes_of(record):
                # The leader first, so that it does not take its script's death for an exit.
                for pid in sorted(victims, key=lambda pid: pid != record.pid):
                    processes.kill_hard(pid)
                if time.monotonic() > give_up_at:
                    raise MachineError(f"machine {machine_id}: {len(victims)} processes outlive SIGKILL")
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.05)
            if record.pid is not None:
                processes.reap(record.pid)
            if record.state is HostMachineState.RUNNING:
                self._note_end(replace(record, state=HostMachineState.KILLED, ended_at=self._clock.now()))

    def kill_all(self) -> None:
        for machine_id in self.ids():
            self.kill(machine_id)

    def remove(self, machine_id: str) -> None:
        """Kill the machine and delete its directory."""
        with self._lock:
            self.kill(machine_id)
            self._records.pop(machine_id, None)
            shutil.rmtree(self.directory(machine_id), ignore_errors=True)
            for file in (self._exit_file(machine_id), self._script_file(machine_id), self._record_file(machine_id)):
                file.unlink(missing_ok=True)

    def _environment(self, machine_id: str, extra: Mapping[str, str]) -> dict[str, str]:
        directory = self.directory(machine_id)
        return {
            **({} if self._path is not None else make_python_env(directory)),
            "PATH": self._path or program_path(directory),
            "LANG": "C.UTF-8",
            "HOME": str(directory),
            "SPOTD_HOME": str(self.home(machine_id)),
            **extra,
            MARK: self._mark_value(machine_id),
        }

    def _read_root_mark(self) -> str:
        """Return this root's own mark.

        Two roots may use the same ids, even one after the other at the same place, and a mark must never catch another
        root's machine.
        """
        file = self._root / "mark"
        if not file.exists():
            write_atomically(file, secrets.token_hex(8))
        return file.read_text()

    def _mark_value(self, machine_id: str) -> str:
        return f"{self._root_mark}:{machine_id}"

    def _record_file(self, machine_id: str) -> Path:
        return self._root / "records" / f"{machine_id}.json"

    def _exit_file(self, machine_id: str) -> Path:
        return self._root / "records" / f"{machine_id}.exit"

    def _script_file(self, machine_id: str) -> Path:
        return self._root / "records" / f"{machine_id}.sh"

    def _notice_file(self, machine_id: str) -> Path:
        return self.home(machine_id) / "notice"

    def _done_files(self, machine_id: str) -> tuple[Path, Path]:
        return self.directory(machine_id) / "machine-done", self.home(machine_id) / "machine-done"

    def _get(self, machine_id: str) -> MachineStatus:
        record = self._records.get(machine_id)
        if record is None:
            raise MachineError(f"there is no machine {machine_id}")
        return record

    def _save(self, record: MachineStatus) -> MachineStatus:
        self._records[record.machine_id] = record
        write_atomically(self._record_file(record.machine_id), _STATUS.dump_json(record).decode())
        return record

    def _note_end(self, record: MachineStatus) -> MachineStatus:
        """Record the end, on disk if that can be written: a full disk must not keep a machine from being killed.

        Without the note its next owner finds the processes gone all the same. Nothing is noted in a root that took the
        place of this one after it was removed: its machines may have the same ids.
        """
        self._records[record.machine_id] = record
        with contextlib.suppress(OSError):
            if (self._root / "mark").read_text() == self._root_mark:
                self._save(record)
        return record

    def _leader(self, record: MachineStatus) -> processes.Process | None:
        """Return the machine's first process, if it runs and is really that one."""
        if record.pid is None:
            return None
        row = processes.find_process(record.pid)
        return row if row and row.started == record.pid_started and not row.dead else None

    def _settle(self, record: MachineStatus) -> MachineStatus:
        """Return the record, with the machine's end in it if it has ended."""
        if record.state is not HostMachineState.RUNNING:
            return record
        done_at = min((_changed_at(file) for file in self._done_files(record.machine_id)), default=None, key=_late)
        if self._leader(record) is not None and done_at is None:
            return record
        exit_file = self._exit_file(record.machine_id)
        exit_code, exit_at = _exit_code(exit_file), _changed_at(exit_file)
        if record.pid is not None:
            processes.reap(record.pid)
        first_sign = min((at for at in (done_at, exit_at) if at is not None), default=None)
        return self._note_end(
            replace(
                record,
                state=HostMachineState.LOST if first_sign is None else HostMachineState.ENDED,
                ended_at=self._virtual(first_sign),
                exit_code=exit_code,
                done=done_at is not None,
            )
        )

    def _virtual(self, epoch_s: float | None) -> datetime:
        """Convert a past moment of the wall clock to virtual time; now, if the moment is not known."""
        now = self._clock.now()
        if epoch_s is None:
            return now
        an_hour = timedelta(hours=1)
        ago = (time.time() - epoch_s) * (an_hour.total_seconds() / self._clock.real_seconds(an_hour))
        return now - timedelta(seconds=max(0.0, ago))

    def _processes_of(self, record: MachineStatus) -> frozenset[int]:
        table = {row.pid: row for row in processes.all_processes()}
        caught = set(processes.pids_with_environment(f"{MARK}={self._mark_value(record.machine_id)}"))
        leader = table.get(record.pid) if record.pid is not None else None
        if leader is None or leader.started == record.pid_started:
            # No other process has our leader's pid, so the session of that number is still ours.
            caught |= {row.pid for row in table.values() if row.session == record.pid}
        children: dict[int, list[int]] = {}
        for row in table.values():
            children.setdefault(row.parent, []).append(row.pid)
        unseen = list(caught)
        while unseen:
            new = [child for child in children.get(unseen.pop(), ()) if child not in caught]
            caught.update(new)
            unseen.extend(new)
        return frozenset(pid for pid in caught if pid in table and not table[pid].dead and pid != os.getpid())

    def _adopt_by_mark(self, record: MachineStatus) -> None:
        """Find a machine whose owner died before it recorded the pid: by its mark, or as dead."""
        marked = processes.pids_with_environment(f"{MARK}={self._mark_value(record.machine_id)}")
        rows = (processes.find_process(pid) for pid in marked)
        leader = next((row for row in rows if row and row.session == row.pid and not row.dead), None)
        if leader is not None:
            self._save(replace(record, pid=leader.pid, pid_started=leader.started))
        else:
            self._settle(record)


def _changed_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def _late(moment: float | None) -> float:
    return float("inf") if moment is None else moment


def _exit_code(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
