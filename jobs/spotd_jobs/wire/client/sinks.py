"""The names of objects, and the sinks that take them."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
import threading
import unicodedata
import zlib

# Whether a path, or the target of a link, stays below the folder it is relative to.


def is_plain(path: str) -> bool:
    """Whether no part of the path is empty, `.` or `..`, so that it leads down and nowhere else."""
    return not any(part in ("", ".", "..") for part in path.split("/"))


def climb(target: str) -> tuple[int, list[str]]:
    """How many levels the target of a link climbs at its beginning, and the parts that follow."""
    parts = target.split("/")
    count = 0
    while count < len(parts) and parts[count] == "..":
        count += 1
    return count, parts[count:]


# The ways bytes get below an attempt's prefix, behind one method: `put(name, data, sha256)`.
#
# `name` is relative to the prefix. A put is all or nothing and durable when it returns; it is never retried here.


class SinkError(Exception):
    """The bytes are not there; the same put may work later. The text is fit for an event."""


class SinkDenied(SinkError):
    """The store refused; only a newer grant may help."""


class Sink:
    """One way to write. `parallel` is how many puts at once are worth while."""

    parallel = 1

    def put(self, name: str, data: bytes | memoryview, sha256: str | None = None) -> None:
        """Write exactly `data` to the object `name` below the prefix.

        Raises:
            SinkError
        """
        raise NotImplementedError


def require_name(name: str) -> str:
    """Return the name itself, if it stays below the prefix.

    Raises:
        ValueError: it does not; a fault of the runner, never of the store.
    """
    if not is_plain(name) or "\\" in name or "\0" in name:
        raise ValueError("an object name must stay below the prefix")
    return name


# Files that are whole or absent, whatever is killed while they are written.


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


# Names of files as text that is safe to show, keep and send, from which the name's very bytes can be had again.
#
# A file name on Linux is bytes: it may hold a line break, half a character, a backslash or an invisible sign. As
# text, what is printable stands for itself, and every other byte is `%` and two upper-case hex digits. A `%` of the
# name itself is written so only where it would be misread.


_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
_ENCODED = re.compile(rb"%([0-9A-F]{2})")
_PLAIN = re.compile(rb"(?:[ -$&-\[\]-~]|%(?![0-9A-F]{2}))*")
_ODD = re.compile(rb"[^ -~]|[%\\]")
_HEX = frozenset("0123456789ABCDEF")


def is_hidden(character: str) -> bool:
    """Whether it is a control, format (bidi, zero width), surrogate, private or line-separating character."""
    return unicodedata.category(character) in _HIDDEN


def is_printable(text: str) -> bool:
    """Whether no character of the text is hidden."""
    # `isprintable` refuses more than these, and is a hundred times as fast: manifests hold 100,000 names.
    return text.isprintable() or not any(is_hidden(character) for character in text)


def printable_text(raw: bytes) -> str:
    """Return the name as printable text."""
    if _PLAIN.fullmatch(raw):
        return raw.decode("ascii")
    text = raw.decode("utf-8", "surrogateescape")
    return "".join(_printable_character(text, place) for place in range(len(text)))


def raw_of(text: str) -> bytes:
    """Return the name that the text stands for."""
    return _ENCODED.sub(lambda found: bytes((int(found[1], 16),)), text.encode("utf-8", "surrogateescape"))


def _printable_character(text: str, place: int) -> str:
    character = text[place]
    if character == "%":
        return "%25" if len(text) > place + 2 and _HEX.issuperset(text[place + 1 : place + 3]) else "%"
    if character == "\\" or is_hidden(character):
        return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
    return character


def ascii_text(name: str) -> str:
    """Return the name or path, as the system's calls give it, as text for documents of a host.

    All but plain printable ASCII is encoded, so that it does not matter which characters the reader's Python calls
    printable.
    """
    return _ODD.sub(lambda found: b"%%%02X" % found[0][0], os.fsencode(name)).decode("ascii")


def name_of(text: str) -> str:
    """Return the name or path that the text stands for, as the system's calls take it."""
    return os.fsdecode(raw_of(text))


# What writer and readers of a manifest agree on: its limits, how it is packed, and where its chunks are.


MANIFEST_BYTES_MAX = 16 * 1024 * 1024
"""As it is stored."""
MANIFEST_TEXT_MAX = 40 * 1024 * 1024
"""Unpacked."""
CHUNKS_MAX = 65_536
CHUNK_BYTES_MAX = 64 * 1024 * 1024
COMPANIONS_MAX = 16
WINDOW = 3
"""A runner counts on a chunk that its attempt sent only while one of so many newest manifests of the attempt names it,
or was published before it was sent. The rest may be deleted while the attempt lives."""
_GZIP = b"\x1f\x8b"


class Unreadable(Exception):
    """There is no manifest in these bytes."""


def text_of(data: bytes) -> bytes:
    """Return the text of a manifest, which may be compressed.

    Raises:
        Unreadable: it is too large, cut short or damaged.
    """
    if not data.startswith(_GZIP):
        return data
    unpacking = zlib.decompressobj(31)
    try:
        text = unpacking.decompress(data, MANIFEST_TEXT_MAX + 1)
    except zlib.error:
        raise Unreadable("its manifest cannot be unpacked") from None
    if len(text) > MANIFEST_TEXT_MAX:
        raise Unreadable("its manifest is larger than %d bytes when it is unpacked" % MANIFEST_TEXT_MAX)
    if not unpacking.eof or unpacking.unused_data:
        raise Unreadable("its manifest is cut short or has something behind its end")
    return text


def chunk_key(job: str, attempt: int, name: str) -> str:
    """Return the key of a chunk that an attempt of the job sent."""
    return "jobs/%s/attempts/%d/data/%s" % (job, attempt, name)


# Lines of the runner for the machine's own console, and text made fit for documents.


LINE_CHARACTERS_MAX = 480


def log_line(text: str) -> None:
    """Print one line on stderr, for readers of the machine's console. It never holds a URL or a secret."""
    try:
        sys.stderr.write("spotd: " + text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the console is gone; the store is what counts


def clean(text: str) -> str:
    """Return the text as one bounded line without control or invisible characters, as the daemon demands."""
    text = text.encode("utf-8", "replace").decode("utf-8")[:LINE_CHARACTERS_MAX]
    if text.isascii():
        return "".join(character if " " <= character <= "~" else " " for character in text)
    return "".join(" " if is_hidden(character) else character for character in text)


def reason_of(error: BaseException) -> str:
    """Why something failed, without paths of URLs: an OSError by its own words, others by their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return clean(os.strerror(error.errno))
    return clean(str(error) or type(error).__name__)
