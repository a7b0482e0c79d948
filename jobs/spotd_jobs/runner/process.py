"""The job's own processes: started in one group, stopped as one, and none left behind.

The group stays in the runner's session, so that a signal to the machine's session kills the job too. A signal to
the runner alone, or to its group, must not leave a job behind that computes in vain, or beside its successor:
a guard in the job's group waits on a pipe that breaks when the runner is gone, however that happened, and then kills
the group. Processes that leave the group are found by a mark in their environment.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import NamedTuple

from spotd_jobs.wire.client.clocks import steady

MARK = "SPOTD_RUN_MARK"
_PAUSE_S = 0.01
_GUARD = 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM; while read -r nothing; do :; done; kill -9 0'
# A runner that dies before the guard stands breaks the pipe, and the command never begins. The shell changes the
# folder, too: posix_spawn can not, and forking by hand is not safe with threads around.
_GATED = 'read -r SPOTD_GO || exit 126; exec </dev/null; cd "$1" || exit 126; shift; exec "$@"'
_DEFAULTED = ("SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD")


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

    def kill_rest(self, mark: str, timeout_s: float = 2.0) -> None:
        """Nothing of the job runs any more, neither in its group nor anywhere else with its mark."""
        give_up_at = steady() + timeout_s
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
