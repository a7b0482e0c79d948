"""The job's own processes: started in one group, stopped as one, and none left behind.

The group stays in the runner's session, so that a signal to the machine's session kills the job too. A signal to
the runner alone, or to its group, must not leave a job behind that computes in vain, or beside its successor:
a guard in the job's group waits on a pipe that breaks when the runner is gone, however that happened, and then kills
the group. Processes that leave the group are found by a mark in their environment.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from typing import Any, NamedTuple, Sequence

from spotd_jobs.runner.store import RunnerGrant
from spotd_jobs.wire.client.sinks import log_line, reason_of, write_whole
from spotd_jobs.wire.client.web import Backoff, now_text, steady

MARK = "SPOTD_RUN_MARK"
CANARY_MARK = "%s-canary"
"""Of what measures the machine for the attempt with this mark."""
_PAUSE_S = 0.01
_REST_WITHIN_S = 2.0
_GUARD = 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM; while read -r nothing; do :; done; kill -9 0'
# A runner that dies before the guard stands breaks the pipe, and the command never begins. The shell changes the
# folder, too: posix_spawn can not, and forking by hand is not safe with threads around.
_GATED = 'read -r SPOTD_GO || exit 126; exec </dev/null; cd "$1" || exit 126; shift; exec "$@"'
_DEFAULTED = ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD")
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ProcessEnd(NamedTuple):
    """How a process ended: by its own exit, or by a signal."""

    exit_code: int | None
    signal: int | None
    at: float

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def killed_hard(self) -> bool:
        return self.signal == signal.SIGKILL or self.exit_code == 128 + signal.SIGKILL

    @property
    def is_by_request(self) -> bool:
        """Whether it died of a signal that asks a program to end, or a shell says so of what it was running."""
        return self.signal in _REQUESTS or self.exit_code in [128 + number for number in _REQUESTS]

    def words(self) -> str:
        if self.signal is None:
            return "exit code %s" % self.exit_code
        try:
            return "killed by " + signal.Signals(self.signal).name
        except ValueError:
            return "killed by signal %d" % self.signal


class JobProcess:
    """A command that runs in its own process group."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: str, output: int) -> None:
        """Start the command, with nothing to read and all its output going to `output`.

        Raises:
            OSError: this machine can start nothing any more.
        """
        gate, key = os.pipe()
        try:
            self.pid = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", _GATED, "sh", folder, *argv],
                env,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, gate, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                ],
                setpgroup=0,
                setsigmask=[],
                setsigdef=[getattr(signal, name) for name in _DEFAULTED],
            )
            self.ended: ProcessEnd | None = None
            self._guard = _guard(self.pid)
            os.write(key, b"\n")
        finally:
            os.close(gate)
            os.close(key)

    def poll(self) -> ProcessEnd | None:
        """How it ended, once it has."""
        if self.ended is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid == self.pid:
                killed = os.WIFSIGNALED(status)
                self.ended = ProcessEnd(
                    None if killed else os.WEXITSTATUS(status), os.WTERMSIG(status) if killed else None, steady()
                )
        return self.ended

    def is_over(self) -> bool:
        """Whether it has ended, and what it was running has, too, if a signal killed it.

        A shell dies of the signal at once, while the program it was running still saves: `cd src && python train.py`.
        One that ends in its own way has decided itself that nothing is left to be waited for.
        """
        ended = self.poll()
        return ended is not None and (ended.signal is None or not _members(self.pid) - {self._guard})

    def send(self, number: int) -> None:
        """Send the signal to the whole group, while its leader is not reaped: later the number may be another's."""
        if self.ended is None:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def end_guard(self) -> None:
        """End the process that stands guard over the group: it is this process's own child until then."""
        if self._guard:
            _kill(self._guard)
            _reap(self._guard)

    def kill_rest(self, mark: str) -> None:
        """Nothing of the job runs any more, neither in its group nor anywhere else with its mark."""
        give_up_at = steady() + _REST_WITHIN_S
        if not os.path.isdir("/proc/self"):
            _kill(-self.pid)  # the group as a whole: without /proc its members are unknown
            return
        while True:
            rest = _members(self.pid) | marked_processes(mark)
            if not rest or steady() > give_up_at:
                _reap(self._guard)
                return
            for pid in rest:
                _kill(pid)
            self.poll()
            time.sleep(_PAUSE_S)


def _guard(group: int) -> int:
    """Start a process in this group that kills it when the runner is gone; 0 if there is no such group any more."""
    try:
        return os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", _GUARD],
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, _lifeline(), 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=group,
            setsigmask=[],
            setsigdef=[getattr(signal, name) for name in _DEFAULTED],
        )
    except OSError:
        return 0


@functools.lru_cache(maxsize=None)
def _lifeline() -> int:
    """Return the end to read of a pipe without a writer: it is at its end when this process is gone, and not before.

    No other process that is started here inherits the end to write.
    """
    return os.pipe()[0]


def signal_number(name: str) -> int:
    """Return the signal of that name on this system; SIGTERM where it has none."""
    number = getattr(signal, name, None)
    return int(number) if isinstance(number, signal.Signals) else int(signal.SIGTERM)


def marked_processes(mark: str) -> set[int]:
    """Return the processes that carry the mark in their environment, this one left out. Empty without /proc."""
    wanted = ("%s=%s" % (MARK, mark)).encode()
    found = set()
    for name in _proc_numbers():
        try:
            with open("/proc/%s/environ" % name, "rb") as stream:
                if wanted in stream.read().split(b"\0"):
                    found.add(int(name))
        except OSError:
            continue  # another user's, or gone
    found.discard(os.getpid())
    return {pid for pid in found if not _is_dead(pid)}


def _members(group: int) -> set[int]:
    members = set()
    for name in _proc_numbers():
        fields = _stat(name)
        if len(fields) > 2 and int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            members.add(int(name))
    return members


def _reap(pid: int) -> None:
    if pid:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return


def _is_dead(pid: int) -> bool:
    fields = _stat(str(pid))
    return not fields or fields[0] in (b"Z", b"X")


def _stat(name: str) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group ..."""
    try:
        with open("/proc/%s/stat" % name, "rb") as stream:
            text = stream.read()
    except OSError:
        return []
    return text[text.rfind(b")") + 2 :].split()


def _proc_numbers() -> list[str]:
    try:
        return [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


# Whether the kernel killed something of the job for want of memory, by whatever this machine lets be read.
#
# The count of the own control group is best: a container's is its own, and it counts a worker that was killed while the
# command itself ended with an ordinary exit code. Without it, a hard kill is searched for in the kernel's log, and
# where even that is closed, a count of the whole machine that did not rise still proves that it was not the memory.


_V2 = "/sys/fs/cgroup%s/memory.events"
_V1 = "/sys/fs/cgroup/memory%s/memory.oom_control"
_WHOLE_MACHINE = "/proc/vmstat"
_KERNEL_LOG = "/dev/kmsg"
_KILLED = b"Killed process"
_RECORDS_MAX = 100_000
_RECORD_BYTES = 8192


class OomWatch:
    """Counts from when it is made."""

    def __init__(
        self, groups: Sequence[str] | None = None, machine: str = _WHOLE_MACHINE, log: str = _KERNEL_LOG
    ) -> None:
        self._groups = _own_groups() if groups is None else groups
        self._machine = machine
        self._in_group = _first_count(self._groups)
        self._in_machine = _first_count([machine])
        self._log = _open_at_end(log)

    def happened(self, ended: ProcessEnd) -> bool | None:
        """`None`: the job was killed hard and nothing here shows by what."""
        if ended.succeeded:
            return False
        now = _first_count(self._groups)
        if now is not None and self._in_group is not None:
            return now > self._in_group
        if not ended.killed_hard:
            return False
        if self._log is not None:
            return _shows_a_kill(self._log)
        now = _first_count([self._machine])
        return False if now is not None and now == self._in_machine else None


def _own_groups() -> list[str]:
    """Where this process's control group counts, most specific first; in a container its own is often the root."""
    places = []
    try:
        with open("/proc/self/cgroup", encoding="ascii", errors="replace") as stream:
            for line in stream:
                _, controllers, path = line.strip().split(":", 2)
                if not controllers:
                    places.append(_V2 % path.rstrip("/"))
                elif "memory" in controllers.split(","):
                    places.append(_V1 % path.rstrip("/"))
    except (OSError, ValueError):
        places = []
    return [*places, _V2 % "", _V1 % ""]


def _first_count(places: Sequence[str]) -> int | None:
    for place in places:
        try:
            with open(place, encoding="ascii", errors="replace") as stream:
                for line in stream:
                    word, _, number = line.partition(" ")
                    if word == "oom_kill":
                        return int(number)
        except (OSError, ValueError):
            continue
    return None


def _open_at_end(log: str) -> int | None:
    """Open the kernel's log after its last record; `None` where it may not be read."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def _shows_a_kill(descriptor: int) -> bool:
    for _ in range(_RECORDS_MAX):
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return False  # that was the last one
        except BrokenPipeError:
            continue  # records were overwritten before they were read
        except OSError:
            return False
        if not record:
            return False
        if _KILLED in record:
            return True
    return False


# The machine's own end once its attempt is over, so that it costs nothing while the daemon is away.
#
# The credentials are the host's own, scoped by its provider to this one instance; they come from its environment and
# are never handed to the job.


INSTANCE_KEYS = ("CONTAINER_API_KEY", "RUNPOD_API_KEY")
MACHINE_DONE = "machine-done"
_FETCH_PAUSE_S = 2.0
_PAUSE_MAX_S = 60.0
_TRY_FOR_S = 1800.0
_LINGER_S = 300.0
_ASKED_BY_NETWORK = ("vast", "runpod")
_VAST = "https://console.vast.ai"
_RUNPOD = "https://api.runpod.io"


def end_machine(how: dict[str, Any] | None, outcome: str, try_for_s: float = _TRY_FOR_S) -> bool:
    """Ask the provider to end this machine; return whether it accepted, or there is no way to ask it.

    False after half an hour of refusals: the process then ends, and its next start comes here again. Where a
    provider starts a container again as soon as it ends (RunPod, on a wiped disk), returning would be the worst that
    can be done: so this waits to be killed, for a while.
    """
    if how is None:
        return True
    give_up_at = steady() + try_for_s
    pauses = Backoff(_FETCH_PAUSE_S, _PAUSE_MAX_S)
    while True:
        try:
            _ask(how, outcome)
            if how.get("method") in _ASKED_BY_NETWORK:
                time.sleep(_LINGER_S)
            return True
        except Exception as error:  # noqa: BLE001 - a machine that is not ended costs money: whatever failed, try again
            log_line("this machine could not be ended yet: " + reason_of(error))
        pause_s = pauses.next_s()
        if steady() + pause_s >= give_up_at:
            return False
        time.sleep(pause_s)


def _ask(how: dict[str, Any], outcome: str) -> None:
    method = how.get("method")
    if method == "file":
        content = json.dumps({"at": now_text(), "outcome": outcome})
        write_whole(os.path.join(os.getcwd(), MACHINE_DONE), content.encode(), durable=True)
    elif method == "vast":
        place = "/api/v0/instances/%s/" % _quote(_own("CONTAINER_ID"))
        _delete((how.get("base_url") or _VAST).rstrip("/") + place, _own("CONTAINER_API_KEY"))
    elif method == "runpod":
        base, key = (how.get("base_url") or _RUNPOD).rstrip("/"), _own("RUNPOD_API_KEY")
        pod = "%s/v2/pods/%s" % (base, _quote(_own("RUNPOD_POD_ID")))
        rank = os.environ.get("SPOTD_NODE_RANK")
        _delete(pod if rank is None else "%s/v2/clusters/%s" % (base, _quote(_cluster(pod, key, rank))), key)
    elif method == "shutdown":
        _shut_down()
    else:
        log_line("this runner knows no way named %r to end a machine" % str(method)[:40])


def _cluster(pod: str, key: str, rank: str) -> str:
    """Return the id of this pod's cluster, which can be deleted as a whole only, if this machine is to end it.

    The first one ends all, since it alone has something to save. Whether its key may is not documented.
    """
    from spotd_jobs.wire.client import web

    if rank != "0":
        raise RuntimeError("the first machine ends all of them")
    status, _, answer = web.request("GET", pod, {"Authorization": "Bearer " + key, "Accept": "application/json"})
    cluster = json.loads(answer).get("cluster") if status == 200 else None
    if not isinstance(cluster, dict):
        raise RuntimeError("the provider names no cluster of this machine: HTTP %d" % status)
    return str(cluster.get("id"))


def _own(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError("the host has no " + name)
    return value


def _quote(part: str) -> str:
    from urllib.parse import quote

    return quote(part, safe="")


def _delete(url: str, key: str) -> None:
    from spotd_jobs.wire.client import web

    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json", "Accept": "application/json"}
    status, _, answer = web.request("DELETE", url, headers, [b"{}"])
    # Gone already is what was wanted; but vast.ai answers 404 to a key that it refuses, too, and bills on.
    if status == 404 and b"auth_error" in answer:
        raise RuntimeError("the provider refuses the machine's own key")
    if status not in (200, 202, 204, 404, 410):
        raise RuntimeError("the provider answers HTTP %d" % status)


def _shut_down() -> None:
    import subprocess

    for command in (["shutdown", "-h", "now"], ["poweroff"], ["systemctl", "poweroff"], ["halt", "-p"]):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return
    raise RuntimeError("no command to shut down works here")


# The environment of the job's own processes: the machine's, the job's, its secrets, and what spotd promises.


GRANT_URL_VARIABLE = "SPOTD_GRANT_URL"
_HIDDEN = (*INSTANCE_KEYS, GRANT_URL_VARIABLE)


def job_environment(grant: RunnerGrant, places: dict[str, str], folders: dict[str, str]) -> dict[str, str]:
    """Return the environment of the job's processes; `folders` are of the machine's, and the job may name others.

    Later ones win: nothing of the image, the job file or the secrets can change the value of `SPOTD_*`.

    The host's keys over this machine, and the URL of the grant, are not in it.
    """
    env = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    env.update(folders)
    env.setdefault("PYTHONUNBUFFERED", "1")  # output that waits in a buffer is lost with the machine
    for more in (grant.spec.get("env") or {}, grant.raw.get("secrets") or {}):
        env.update({str(name): str(value) for name, value in more.items()})
    every_s = grant.checkpoint.get("every_s")
    array = grant.raw.get("array") or {}
    env.update(
        SPOTD_ARRAY_INDEX=str(array.get("index", "")),
        SPOTD_ARRAY_COUNT=str(array.get("count", "")),
        SPOTD_JOB_ID=grant.job_id,
        SPOTD_JOB_NAME=grant.job_name,
        SPOTD_ATTEMPT=str(grant.attempt),
        SPOTD_CHECKPOINT_INTERVAL_S="%g" % float(every_s) if every_s else "",
    )
    env.update(places)
    return env
