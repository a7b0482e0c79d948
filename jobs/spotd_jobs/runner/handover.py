"""The way of a machine from a job that is done to the next one: all that was the job's is removed, then it waits.

What cannot be proven is not claimed. Nothing of the job may run, and nothing of it may lie in the runner's folder or in
the folder of its checkpoints. On a machine that is the job's alone (a container) every process that began after the
runner, and every file that changed since, is the job's, too: where one is left, the machine is not handed over and ends
as ever. So what a job wrote elsewhere on such a machine costs it the handover, and the next job never finds it.
On a computer that others use as well, nothing else is examined.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from typing import Callable, Iterator

from spotd_jobs.runner.process import GRANT_URL_VARIABLE, JobProcess, marked_processes
from spotd_jobs.runner.shutdown import Wakeups
from spotd_jobs.runner.store import RunnerGrant, read_grant
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import folder_lock_path, log_line, read_text, remove, write_whole
from spotd_jobs.wire.client.web import steady

RUNNER = "runner.pyz"
NEXT = "next-grant"
"""A file in the runner's folder: the grant of the attempt that the machine was handed over to, for its next start."""
KEPT = frozenset({"lock", RUNNER, NEXT, "end.json"})
"""What stays in the runner's folder: none of it is written by a job."""
DOCUMENT_BYTES_MAX = 64 * 1024
RUNNER_BYTES_MAX = 64 * 1024 * 1024
_TABLE_MAX = 16 * 1024 * 1024
ASK_EVERY_S = 2.0
_KILL_S = 5.0
_WALK_S = 60.0
_WALK_MAX = 2_000_000
_PSEUDO = ("/proc", "/sys", "/dev")
_TOPS = ("/", "/dev/shm", "/dev/mqueue")  # noqa: S108 - what may hold a file of the job, in memory too
_IN_MEMORY = ("shm", "sem", "msg")
_LEAST_PAUSE_S = 0.05
_STEP_S = 2.0
_HOME_MAX = 60
"""Sockets are made below `TMPDIR`, and their paths have 107 bytes at most."""
_FOLDERS = {
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "PYTHONPYCACHEPREFIX": "pycache",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}


class FileClock:
    """When this runner began, by the clock that files are dated by, and whether that clock was set since."""

    def __init__(self) -> None:
        self.began = time.time() - 1.0
        self._off = time.time() - steady()

    @property
    def was_set(self) -> bool:
        return abs(time.time() - steady() - self._off) > _STEP_S


class NextJob:
    """What one attempt has to know of the machine's next one.

    Attributes:
        waits: all that was the job's is removed, and the machine may go on with another attempt.
        folders: what keeps programs that mean no harm within the runner's folder, as variables of their environment.
        groups: the groups of processes that were started for the job.
    """

    def __init__(self, grant: RunnerGrant, home: str) -> None:
        self._home = home
        self._grant = grant
        self.waits = False
        rules = grant.raw.get("reuse") or {}
        self._is_permitted = bool(rules)
        self._alone = bool(rules.get("alone"))
        self._clock = FileClock()
        self.groups: list[JobProcess] = []
        keeps = self._alone and len(home) <= _HOME_MAX
        self.folders = {name: os.path.join(home, folder) for name, folder in _FOLDERS.items()} if keeps else {}

    def clear(
        self, grant: RunnerGrant, checkpoints: str, mark: str, report: Callable[[str], None], *, restarted: bool
    ) -> bool:
        """Remove all that was the job's; return whether that is proven, so that the machine may wait.

        Args:
            grant: the newest one. Once the end is known it is replaced by one that names no next attempt.
            mark: what every process of the job has in its environment.
            report: takes the line that says why it is not proven.
        """
        if not self._is_permitted or not grant.raw.get("reuse"):
            return False
        self._grant = grant
        for group in self.groups:
            group.end_guard()
        if self._alone and restarted:
            why = "it was started again meanwhile, which leaves no sign of what changed before"
        else:
            why = words_against_handover(self._home, checkpoints, mark, self._clock, alone=self._alone)
        if why:
            report("this machine goes to no other job: " + why)
        self.waits = not why
        return self.waits

    def next_grant(self, wakeups: Wakeups) -> str:
        """Return the URL of the grant of the machine's next attempt; empty if none came in time."""
        grant, rules = self._grant, self._grant.raw["reuse"]
        wait_s = float(rules["wait_s"])
        until = min(steady() + wait_s, grant.asked_at + grant.lease_s)
        every_s = max(_LEAST_PAUSE_S, min(ASK_EVERY_S, wait_s / 20))
        while steady() < until and not wakeups.terminated:
            found = next_of(str(rules["url"]))
            if found is not None and found[:2] != (grant.job_id, grant.attempt):
                return found[2]
            wakeups.sleep(every_s)
        return ""


def next_of(url: str) -> tuple[str, int, str] | None:
    """Return job and attempt to which a machine was handed over, and where its grant is; `None`: to none now."""
    try:
        found = json.loads(web.read(url, DOCUMENT_BYTES_MAX))
        if found.get("schema") == 1:
            return str(found["job"]), int(found["attempt"]), str(found["grant_url"])
    except web.WebError:
        pass  # there is none, or the store does not answer: until the wait is over, both mean the same
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log_line("what names the next attempt can not be read: " + type(error).__name__)
    return None


def words_against_handover(home: str, checkpoints: str, mark: str, clock: FileClock, *, alone: bool) -> str:
    """Remove all that was the job's; return why that is not proven, empty where it is.

    Args:
        checkpoints: the folder of its checkpoints, which may lie elsewhere.
        mark: what every process of the job has in its environment.
    """
    if not os.path.isdir("/proc/self"):
        return "this system does not show its processes"
    give_up_at = steady() + _KILL_S
    while marked_processes(mark):
        if steady() > give_up_at:
            return "processes of the job can not be ended"
        for pid in marked_processes(mark):
            _kill(pid)
        time.sleep(0.01)
    if alone and (left := _younger_processes()):
        return "process %d began while the job ran" % left[0]
    for name in sorted(os.listdir(home)):
        if name not in KEPT:
            remove(os.path.join(home, name))
    inside = (checkpoints + os.sep).startswith(home + os.sep)
    if not inside and os.path.isdir(checkpoints):
        for name in sorted(os.listdir(checkpoints)):
            remove(os.path.join(checkpoints, name))
    rest = [name for name in sorted(os.listdir(home)) if name not in KEPT]
    if not inside and os.path.isdir(checkpoints):
        rest += sorted(os.listdir(checkpoints))
    if rest:
        return "%s can not be removed" % rest[0]
    if not alone:
        return ""
    if clock.was_set:
        return "the clock of the machine was set, which leaves no sign of what changed"
    if kind := _left_in_memory(clock.began):
        return "memory that the job shared (%s) is left" % kind
    own = {os.path.realpath(home), os.path.realpath(checkpoints)}
    return _changed_elsewhere(own, os.path.realpath(folder_lock_path(checkpoints)), clock.began)


def _left_in_memory(began: float) -> str:
    """Return of which kind there is something of System V that was made since this instant; empty where nothing is."""
    for kind in _IN_MEMORY:
        header, *rows = (read_text("/proc/sysvipc/" + kind, _TABLE_MAX) or "").splitlines() or [""]
        names = header.split()
        if rows and ("ctime" not in names or any(int(row.split()[names.index("ctime")]) >= began for row in rows)):
            return kind
    return ""


def _younger_processes() -> list[int]:
    """Return the processes that began after this one, which are not parts of the system's kernel."""
    own = _began(os.getpid())
    found = []
    for name in os.listdir("/proc"):
        began = _began(int(name)) if name.isdigit() else None
        if began is not None and own is not None and began > own:
            found.append(int(name))
    return sorted(found)


def _began(pid: int) -> int | None:
    """When the process began, in ticks; `None` for one that is gone, dead, or a thread of the kernel."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            text = stream.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X") or fields[1] == b"2" or pid == 2:
        return None
    return int(fields[19])


def _changed_elsewhere(own: set[str], lock: str, began: float, tops: tuple[str, ...] = _TOPS) -> str:
    """Return what changed outside of these folders since this instant, in words; empty where nothing did."""
    give_up_at, seen = steady() + _WALK_S, 0
    pending = list(tops)
    while pending:
        folder = pending.pop()
        for path, status in _entries(folder):
            seen += 1
            if seen > _WALK_MAX or steady() > give_up_at:
                return "there are too many files on this machine to see which of them changed"
            if path in own or path in _PSEUDO or path == lock:
                continue
            if status is None:
                return "%s can not be read" % path
            is_folder = stat.S_ISDIR(status.st_mode)
            if status.st_ctime >= began and not _holds(path, own, lock):
                return "%s changed while the job ran" % path
            if is_folder:
                pending.append(path)
    return ""


def _holds(path: str, own: set[str], lock: str) -> bool:
    """Whether it is a folder in which one of the runner's own folders was made."""
    return any(os.path.dirname(one) == path for one in (*own, lock))


def _entries(folder: str) -> Iterator[tuple[str, os.stat_result | None]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    yield entry.path, entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    yield entry.path, None
    except FileNotFoundError:
        return
    except OSError:
        yield folder, None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def become(grant_url: str, home: str, end_mark: str) -> None:
    """Fetch the runner that this grant names, verify it, and become it: this process goes on as that runner.

    Args:
        end_mark: the file by which a runner that starts here does nothing.

    Raises:
        OSError, web.WebError, ValueError: it can not be had.
    """
    import hashlib

    blob = read_grant(grant_url).raw["runner"]
    data = web.read(str(blob["url"]), RUNNER_BYTES_MAX)
    if hashlib.sha256(data).hexdigest() != blob["sha256"]:
        raise ValueError("the runner is not what its hash says")
    write_whole(os.path.join(home, RUNNER), data, durable=True)
    write_whole(os.path.join(home, NEXT), grant_url.encode(), durable=True)
    remove(end_mark)
    environment = dict(os.environ)
    environment[GRANT_URL_VARIABLE] = grant_url
    log_line("this machine goes on with its next attempt")
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-IS", os.path.join(home, RUNNER), "--home", home], environment)  # noqa: S606 - its own program, verified by its hash
