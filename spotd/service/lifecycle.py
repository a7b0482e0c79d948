"""Signals: stop in an orderly way, or take over a changed config.

On SIGTERM or SIGINT nothing new is bought, calls under way are finished and committed within a bound, and every machine
is left running: the next start adopts it. A second signal ends the waiting. On SIGHUP the config is read again; one
that cannot be used changes nothing and is reported.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread

from spotd.daemon.commits import PolicyHolder
from spotd.daemon.control_loop import ControlLoop
from spotd.daemon.executor import Executor
from spotd.daemon.install import BadConfig
from spotd.daemon.policy import Settings, changes
from spotd.paths import SOCKET_NAME, SOCKET_PATH_BYTES_MAX
from spotd_providers.contract.provider import Logger

# Messages to systemd about this process: a dozen lines, because the packages for it are no longer kept.


class SystemdNotifier:
    """Messages to the service manager; silent where there is none. Never raises: delivery is best effort."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        own = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(usec) / 1_000_000 if own and usec.isdecimal() and int(usec) > 0 else None
        """Within how many seconds the service manager wants a sign of life, `None` when it does not."""

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=running")

    def waiting(self) -> None:
        self._send("READY=1\nSTATUS=waiting: another spotd leads")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=finishing calls under way")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # A leading @ is how systemd writes Linux's abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(0)
                sock.sendto(message.encode(), address)
        except OSError:
            return


DRAIN_S: Final = 25.0
LAST_CYCLE_S: Final = 5.0
LOAD_S: Final = 10.0
SHUTTING_DOWN: Final = "spotd is shutting down"
BEGINS_ANEW: Final = "the computer's clock was set, and spotd begins anew with the new date"

Reload = Callable[[], Settings]


async def load_in_time(load: Reload) -> Settings:
    """Return the config as it is now, read in a thread: a file of it may lie where nothing answers.

    Raises:
        BadConfig
    """
    try:
        with anyio.fail_after(LOAD_S):
            return await anyio.to_thread.run_sync(load, abandon_on_cancel=True)
    except TimeoutError:
        raise BadConfig(f"the config, or a file that it names, could not be read within {LOAD_S:.0f} s") from None


@asynccontextmanager
async def signals() -> AsyncIterator[AsyncIterator[signal.Signals]]:
    """Yield the signals that this process receives, one after another."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        yield received


class Lifecycle:
    """Reacts to signals until the daemon is to end."""

    def __init__(
        self,
        *,
        settings: Settings,
        load: Callable[[], Awaitable[Settings]],
        apply: Callable[[Settings], None],
        policy: PolicyHolder,
        control_loop: ControlLoop,
        executor: Executor,
        notify: SystemdNotifier,
        log: Logger,
    ) -> None:
        self._settings = settings
        self._load = load
        self._apply = apply
        self._policy = policy
        self._control_loop = control_loop
        self._executor = executor
        self._notify = notify
        self._log = log
        self._running: anyio.CancelScope | None = None
        self._stopping = False
        self.begins_anew = False
        """The run was ended by `end_when`."""

    async def end_when(self, event: Callable[[], Awaitable[None]]) -> None:
        """Finish calls under way after the event, and let `run` return, for the daemon to start again."""
        await event()
        self._policy.paused = BEGINS_ANEW
        await self._drain()
        if self._running is not None and not self._stopping:
            self.begins_anew = True
            self._running.cancel()

    async def run(self, received: AsyncIterator[signal.Signals]) -> None:
        """Wait until the daemon may be taken apart."""
        async with anyio.create_task_group() as group:
            self._running = group.cancel_scope
            async for number in received:
                if number is signal.SIGHUP:
                    await self.reload()
                elif self._stopping:
                    self._log.warning("daemon.stopping_at_once", signal=number.name)
                    group.cancel_scope.cancel()
                    return
                else:
                    self._stopping = True
                    group.start_soon(self._stop, number, group.cancel_scope, name="stop")

    async def _stop(self, number: signal.Signals, scope: anyio.CancelScope) -> None:
        self._log.info("daemon.stopping", signal=number.name, calls=self._executor.busy)
        await self.drain()
        scope.cancel()

    async def drain(self) -> None:
        """Buy nothing new; finish and commit calls under way, or the next start finds them unknown."""
        self._policy.paused = SHUTTING_DOWN
        self._notify.stopping()
        await self._drain()

    async def _drain(self) -> None:
        self._control_loop.only_reconciles = True
        await self._control_loop.whole_cycle(seconds=LAST_CYCLE_S)
        done = await self._executor.drain(seconds=DRAIN_S)
        state = self._control_loop.state
        machines = 0 if state is None else sum(1 for a in state.world.attempts.values() if a.machine.may_compute)
        self._log.info("daemon.drained", complete=done, machines_left_running=machines)

    async def reload(self) -> None:
        """Put the config's limits in force; where that fails the old ones stay and the log has the reason."""
        self._notify.reloading()
        try:
            fresh = await self._load()
        except BadConfig as exc:
            self._log.error("config.refused", error=str(exc), kept="the config that was in force")
        else:
            at_once, restart = changes(self._settings, fresh)
            if fresh.install != self._settings.install:
                # Machines carry the label: it stays for as long as this process runs.
                kept = self._settings.install
                self._log.warning("config.install_kept", kept=kept, configured=fresh.install)
                fresh = replace(fresh, install=kept)
            self._apply(fresh)
            self._settings = fresh
            self._log.info("config.reloaded", changed=at_once, needs_restart=restart)
        self._notify.ready()


# The folder of archives that are on their way into the object store.


def clear(folder: Path) -> int:
    """Delete what a process that was killed in the middle of an upload has left; return how many files it was.

    To be called before anything is uploaded: the writer's lock on the state ensures that no other process spools here.
    """
    count = 0
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            with suppress(FileNotFoundError):
                path.unlink()
                count += 1
    return count


# The API's socket: bound by us, because a server that binds it itself makes it writable for everybody.
#
# A lock file beside the socket is held for as long as the socket is: of several daemons that find one stale socket,
# exactly one replaces it, and none removes the socket of another.


PROBE_TIMEOUT_S: Final = 1.0
BACKLOG: Final = 128


class SocketRefused(Exception):
    """A socket that cannot be ours; the message gives the reason, and the hint is the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A listening socket and which file it is."""

    socket: socket.socket
    path: Path
    inode: tuple[int, int]
    lock: int
    """Descriptor of the lock file, which stays: removing it would let two daemons lock different files."""

    def close(self) -> None:
        """Stop answering and free the path, unless another daemon's socket is there by now."""
        self.socket.close()
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.inode:
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the folder is gone, and the socket with it
        finally:
            os.close(self.lock)


def bind(path: Path) -> Bound:
    """Bind a listening socket at the path, mode 0600, in a folder that only its owner may enter.

    One that a dead daemon left behind is replaced. The folder is made 0700 when it is made here. One that exists is
    never changed, since other programs may use it; it is accepted only when it is ours and closed to others, because
    anyone who can write to the folder can swap the socket.

    Raises:
        SocketRefused: a live daemon answers there, or the place cannot be used.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise SocketRefused(
            f"the socket's path is longer than the {SOCKET_PATH_BYTES_MAX} bytes a unix socket may have: {path}",
            hint="set SPOTD_SOCKET to a shorter path",
        )
    _own_folder(path.parent)
    lock = _lock(path)
    try:
        _remove_stale(path)
        return _bound(path, lock)
    except BaseException:
        os.close(lock)
        raise


def _lock(path: Path) -> int:
    """Make this process the only daemon that may bind or remove this socket, until the descriptor is closed."""
    beside = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise SocketRefused(f"cannot lock {beside}: {exc.strerror}", hint="set SPOTD_SOCKET to another path") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(descriptor)
        raise SocketRefused(
            f"another spotd daemon answers at {path}", hint="stop it first, or set SPOTD_SOCKET to another path"
        ) from exc
    return descriptor


def _bound(path: Path, lock: int) -> Bound:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except OSError as exc:
        sock.close()
        raise SocketRefused(f"cannot bind {path}: {exc.strerror}", hint="set SPOTD_SOCKET to another path") from exc
    finally:
        os.umask(before)
    path.chmod(0o600)
    sock.listen(BACKLOG)
    sock.settimeout(0)
    made = path.lstat()
    return Bound(socket=sock, path=path, inode=(made.st_dev, made.st_ino), lock=lock)


def _own_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as exc:
        raise SocketRefused(f"cannot use the folder {folder}: {exc.strerror}", hint="set SPOTD_SOCKET") from exc
    if found.st_uid != os.getuid():
        raise SocketRefused(f"the folder {folder} belongs to another user", hint="set SPOTD_SOCKET to a path of yours")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        hint = f"set SPOTD_SOCKET to {folder / 'spotd' / SOCKET_NAME}, whose folder spotd makes for itself"
        if not mode & (stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH):
            hint += f", or, if nothing else uses {folder}, run: chmod 700 {folder}"
        raise SocketRefused(
            f"others may enter the folder {folder} (mode {mode:04o}), and secrets travel over the socket in it",
            hint=hint,
        )


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketRefused(f"{path} exists and is not a socket", hint="move it away, or set SPOTD_SOCKET")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as exc:
            raise SocketRefused(
                f"something holds {path} and does not answer: {exc}", hint="stop it, or set SPOTD_SOCKET"
            ) from exc
    raise SocketRefused(
        f"another spotd daemon answers at {path}", hint="stop it first, or set SPOTD_SOCKET to another path"
    )
