"""Files that are whole or absent, whatever is killed while they are written."""

from __future__ import annotations

import errno
import itertools
import os
import threading

TEMPORARY = ".spotd-"
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_REMOVE_DEPTH_MAX = 100
_REMOVE_PATH_MAX = 1500
_numbers = itertools.count()


class DiskFull(Exception):
    """No room on this machine's disk for what must be on it. The text names what."""


def is_full(error: BaseException) -> bool:
    """Whether it failed for want of room on a disk of this machine."""
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _FULL)


def free_bytes(folder: str) -> int | None:
    """How much may still be written to the disk that holds the folder; `None` where that is unknown."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def write_whole(path: str, data: bytes | bytearray | memoryview, *, durable: bool = False, mode: int = 0o600) -> None:
    """Write exactly `data` to the file. A reader sees the old content or this, never a part.

    Args:
        durable: it is on the disk, name and all, when this returns.
    """
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, "%s%d-%d-%d" % (TEMPORARY, os.getpid(), threading.get_ident(), next(_numbers)))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode)
    try:
        try:
            write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    if durable:
        sync_folder(folder)


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """All of it was written: a single write may take less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_folder(folder: str) -> None:
    """Make the folder's names durable, where the file system can promise it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        return  # some network file systems refuse to sync folders; their renames are synchronous
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """There is nothing at this path, whether it was a file, a link or a tree."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        _remove_folder(path)


def _remove_folder(top: str) -> None:
    """Nothing of the folder is left, as far as the system permits.

    Not by recursion, which ends where folders are deep; what is too deep even for a path is first moved to the top.
    """
    waiting = [(top, 0)]
    folders = []
    while waiting:
        folder, depth = waiting.pop()
        folders.append(folder)
        try:
            with os.scandir(folder) as entries:
                inner = list(entries)
        except OSError:
            continue
        for entry in inner:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif depth < _REMOVE_DEPTH_MAX and len(entry.path) < len(top) + _REMOVE_PATH_MAX:
                    waiting.append((entry.path, depth + 1))
                else:
                    place = os.path.join(top, "%s%d-%d" % (TEMPORARY, os.getpid(), next(_numbers)))
                    os.rename(entry.path, place)
                    waiting.append((place, 0))
            except OSError:
                continue
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError:
            continue


def lock(path: str) -> int | None:
    """Held until this process ends, however it ends; `None` when another holds it. The file stays, as it must.

    Raises:
        OSError: the file can not be made.
    """
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def folder_lock_path(folder: str) -> str:
    """Where the lock of a folder is that must itself stay empty."""
    import hashlib

    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:24]
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", "spotd-%d-%s.lock" % (os.getuid(), digest))  # noqa: S108 - a lock of this machine and user; its name holds no secret, its content is none


def read_text(path: str, size_max: int = 1 << 20) -> str | None:
    """Return the file's text, or `None` when there is none to read."""
    try:
        with open(path, "rb") as stream:
            return stream.read(size_max).decode("utf-8", "replace")
    except OSError:
        return None
