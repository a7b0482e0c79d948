"""The API's socket: bound by us, because a server that binds it itself makes it writable for everybody.

A lock file beside the socket is held for as long as the socket is: of several daemons that find one stale socket,
exactly one replaces it, and none removes the socket of another.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spotd.paths import SOCKET_NAME, SOCKET_PATH_BYTES_MAX

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
