"""What other jobs left for this one: each in a folder of its own, every chunk verified, all of it or nothing."""

from __future__ import annotations

import hashlib
import os
import tarfile
from typing import Any, Callable

from spotd_jobs.runner.restore import Cancelled, RestoreRun
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import DiskFull, is_full, is_plain, log_line, reason_of, remove, write_whole
from spotd_jobs.wire.client.web import Backoff, steady

_DONE = ".done-"


class InputUnusable(Exception):
    """Outputs of another job that can not be brought here as that job left them. The text states which and why."""


def fetch_inputs(
    inputs: Callable[[], list[dict[str, Any]]],
    folder: str,
    connections: int,
    pause: Callable[[float], bool],
    stopped: Callable[[], bool],
    permitted: Callable[[], bool],
) -> None:
    """Bring all inputs below the folder, one after the other; what a former start brought is kept as the job left it.

    Args:
        inputs: those of the newest grant.

    Raises:
        InputUnusable
        restore.Cancelled, DiskFull, OSError: as of a restore.
    """
    os.makedirs(folder, exist_ok=True)
    for one in inputs():
        name, sha256 = str(one["folder"]), str(one["restore"]["manifest"]["sha256"])
        if "/" in name or name.startswith(".") or not is_plain(name):
            raise InputUnusable("the grant names an input that leads outside")
        place, mark = os.path.join(folder, name), os.path.join(folder, _DONE + name)
        if _is_done(mark, sha256):
            continue
        remove(place)
        os.makedirs(place)
        run = RestoreRun(
            lambda name=name: [one["restore"] for one in inputs() if one["folder"] == name],  # type: ignore[misc]  # a lambda's default
            place,
            connections,
            pause,
            stopped,
            permitted,
        )
        if run.run() is None:
            why = run.fallbacks[0].reason if run.fallbacks else "the grant does not offer it any more"
            raise InputUnusable("%s: %s" % (name, why))
        write_whole(mark, sha256.encode())


def _is_done(mark: str, sha256: str) -> bool:
    try:
        with open(mark, encoding="ascii") as stream:
            return stream.read() == sha256
    except (OSError, ValueError):
        return False


# The job's code: fetched, verified, and unpacked without ever leaving its folder.


_PAUSE_S = 0.2
_PAUSE_MAX_S = 10.0
_WRONG_TRIES = 3
_TRY_FOR_S = 900.0
_BLOCK_BYTES = 1024 * 1024


class CodeUnusable(Exception):
    """Code that cannot be run. The text states why."""


def fetch_code(code: dict[str, Any], archive: str, pause: Callable[[float], bool]) -> None:
    """Fetch the archive that the grant names to `archive`.

    Raises:
        CodeUnusable, Cancelled
        DiskFull: it does not fit on this disk.
    """
    pauses, wrong = Backoff(_PAUSE_S, _PAUSE_MAX_S), 0
    give_up_at = steady() + _TRY_FOR_S
    while True:
        try:
            if _download(code, archive) == code["sha256"]:
                return
            why, wrong = "the code archive is not what its hash says", wrong + 1
        except (web.Missing, web.TooLarge) as error:
            why, wrong = "the code archive: %s" % error, wrong + 1
        except web.WebError as error:
            why = "the code archive: %s" % error
        except OSError as error:
            if is_full(error):
                raise DiskFull("no room for the code archive") from None
            raise CodeUnusable("the code archive could not be written: " + reason_of(error)) from None
        if wrong >= _WRONG_TRIES or steady() > give_up_at:
            raise CodeUnusable(why)
        log_line(why + ", trying again")
        if pause(pauses.next_s()):
            raise Cancelled()


def _download(code: dict[str, Any], archive: str) -> str:
    digest = hashlib.sha256()
    with open(archive, "wb") as stream:

        def take(block: memoryview) -> None:
            digest.update(block)
            stream.write(block)

        web.read_blocks(code["url"], int(code["size"]), memoryview(bytearray(_BLOCK_BYTES)), take)
    return digest.hexdigest()


def unpack(archive: str, folder: str) -> None:
    """Unpack the archive's content, and nothing else, into `folder`.

    Raises:
        CodeUnusable: it is damaged, or holds what could leave the folder.
        DiskFull: it does not fit on this disk.
    """
    work = folder + ".new"
    remove(work)
    remove(folder)
    os.mkdir(work)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                _unpack_member(tar, member, work)
    except CodeUnusable:
        raise
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise CodeUnusable("the code archive is damaged: " + reason_of(error)) from None
    except OSError as error:
        if is_full(error):
            raise DiskFull("no room for the code") from None
        raise CodeUnusable("the code could not be unpacked: " + reason_of(error)) from None
    os.rename(work, folder)


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: str) -> None:
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or any("\0" in part for part in parts):
        raise CodeUnusable("the code archive holds a path that leads outside")
    if not parts:
        return
    place = os.path.join(folder, *parts)
    _no_links_above(folder, parts)
    if member.isdir():
        os.makedirs(place, exist_ok=True)
        return
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if member.issym():
        if not _stays_inside(parts, member.linkname):
            raise CodeUnusable("the code archive holds a link that leads outside")
        os.symlink(member.linkname, place)
        return
    if not (member.isreg() or member.islnk()):
        raise CodeUnusable("the code archive holds something that is no file, folder or link")
    source = tar.extractfile(member)
    if source is None or os.path.islink(place):
        raise CodeUnusable("the code archive holds a file that can not be read")
    with open(place, "wb") as target:
        while True:
            block = source.read(1 << 20)
            if not block:
                break
            target.write(block)
    os.chmod(place, (member.mode & 0o777) | 0o600)
    os.utime(place, (member.mtime, member.mtime))


def _no_links_above(folder: str, parts: list[str]) -> None:
    place = folder
    for part in parts[:-1]:
        place = os.path.join(place, part)
        if os.path.islink(place):
            raise CodeUnusable("the code archive writes through a link")


def _stays_inside(parts: list[str], target: str) -> bool:
    if not target or target.startswith("/"):
        return False
    depth = len(parts) - 1
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            return False
    return True
