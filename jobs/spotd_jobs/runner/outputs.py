"""What a finished job leaves for its owner, and what other jobs left for this one.

Each file that the `outputs` patterns match, or that lies in the output folder, stands for itself: one that can not be
stored is left out and counted, with the reason of the first. What other jobs left comes into a folder of its own for
each, every chunk verified, all of it or nothing.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple

from spotd_jobs.runner import manifest
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.restore import Cancelled, RestoreRun
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.upload import Progress, TreeUpload
from spotd_jobs.wire.client import sinks, web
from spotd_jobs.wire.client.web import Backoff, now_text, steady

if TYPE_CHECKING:
    import tarfile

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
        if "/" in name or name.startswith(".") or not sinks.is_plain(name):
            raise InputUnusable("the grant names an input that leads outside")
        place, mark = os.path.join(folder, name), os.path.join(folder, _DONE + name)
        if _is_done(mark, sha256):
            continue
        sinks.remove(place)
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
        sinks.write_whole(mark, sha256.encode())


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
            if sinks.is_full(error):
                raise sinks.DiskFull("no room for the code archive") from None
            raise CodeUnusable("the code archive could not be written: " + sinks.reason_of(error)) from None
        if wrong >= _WRONG_TRIES or steady() > give_up_at:
            raise CodeUnusable(why)
        sinks.log_line(why + ", trying again")
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
    import tarfile  # most of what it loads is wanted by nothing else, and many jobs bring no code

    work = folder + ".new"
    sinks.remove(work)
    sinks.remove(folder)
    os.mkdir(work)
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                _unpack_member(tar, member, work)
    except CodeUnusable:
        raise
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise CodeUnusable("the code archive is damaged: " + sinks.reason_of(error)) from None
    except OSError as error:
        if sinks.is_full(error):
            raise sinks.DiskFull("no room for the code") from None
        raise CodeUnusable("the code could not be unpacked: " + sinks.reason_of(error)) from None
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


MANIFEST = "outputs/manifest.json"
_TRIES = 5
_EVERYWHERE = "**"


class LeftOut:
    """Which files are not among the outputs, and why the first of them is not."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""

    def add(self, path: str, why: str) -> None:
        self.count += 1
        line = sinks.clean("%s: %s" % (sinks.ascii_text(path)[-120:], why))
        self.reason = self.reason or line
        sinks.log_line("an output was left out: " + line)


class StoredOutputs(NamedTuple):
    """The outputs, in the store."""

    files: int
    bytes: int
    key: str


def find_outputs(folder: str, patterns: list[str], left_out: LeftOut) -> list[str]:
    """Return the files (and links) below the work directory that a pattern matches, relative to it, each once."""
    found: set[str] = set()
    for pattern in patterns:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            left_out.add(pattern, "the pattern leads out of the work directory")
            continue
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        for path in _matches(folder, parts, left_out):
            place = os.path.join(folder, path)
            if os.path.isdir(place) and not os.path.islink(place):
                found.update(os.path.join(path, inner) for inner in _files_below(place, left_out))
            else:
                found.add(path)
    return sorted(found)


def _matches(folder: str, parts: list[str], left_out: LeftOut) -> Iterator[str]:
    """Paths that match the parts of a pattern as a shell would: a hidden name only where the pattern writes the dot."""
    waiting: list[tuple[str, int]] = [("", 0)]
    seen: set[tuple[str, int]] = set()
    while waiting:
        path, at = waiting.pop()
        if (path, at) in seen:
            continue
        seen.add((path, at))
        if at == len(parts):
            if path:
                yield path
            continue
        last = at == len(parts) - 1
        if parts[at] == _EVERYWHERE:
            waiting.append((path, at + 1))
            if last and path:
                continue  # all that lies below a folder that matches is an output
        for name, is_dir in _entries(folder, path, left_out):
            below = os.path.join(path, name)
            if parts[at] == _EVERYWHERE:
                if name.startswith("."):
                    continue
                if is_dir:
                    waiting.append((below, at))
                elif last:
                    yield below
            elif _is_match(name, parts[at]) and (is_dir or last):
                waiting.append((below, at + 1))


def _is_match(name: str, pattern: str) -> bool:
    if name.startswith(".") and not pattern.startswith("."):
        return False
    return fnmatch.fnmatchcase(name, pattern)


def _entries(folder: str, path: str, left_out: LeftOut) -> list[tuple[str, bool]]:
    """Names directly below, and whether each is a folder that is no link."""
    if path.count("/") >= manifest.DEPTH_MAX:
        left_out.add(path, "it is too deep")
        return []
    place = os.path.join(folder, path)
    if path and os.path.islink(place):
        return []
    try:
        with os.scandir(place) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        if not path or not isinstance(error, NotADirectoryError):
            left_out.add(path or os.path.basename(folder), sinks.reason_of(error))
        return []


def _files_below(place: str, left_out: LeftOut) -> list[str]:
    found: list[str] = []
    waiting = [""]
    while waiting:
        path = waiting.pop()
        for name, is_dir in _entries(place, path, left_out):
            (waiting if is_dir else found).append(os.path.join(path, name))
    return found


def gather(
    workdir: str, patterns: list[str], output_dir: str, into: str, left_out: LeftOut | None = None
) -> manifest.Tree:
    """One folder `into` that shows all outputs under the names they will have, as links to where they are.

    The output folder's files come first: where a pattern matches the same name, they win.
    """
    left_out = left_out if left_out is not None else LeftOut()
    sinks.remove(into)
    os.makedirs(into)
    sources = [(output_dir, path) for path in sorted(_files_below(output_dir, left_out))]
    sources += [(workdir, path) for path in find_outputs(workdir, patterns, left_out)]
    for source, path in sources:
        place, original = os.path.join(into, path), os.path.realpath(os.path.join(source, path))
        if os.path.lexists(place):
            continue
        why = "it is too deep" if manifest.is_too_deep(place[len(os.path.dirname(into)) + 1 :]) else _why_not(original)
        if why:
            left_out.add(path, why)
            continue
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(original, place)
        except (FileExistsError, NotADirectoryError):
            left_out.add(path, "another output has the name of its folder")
        except OSError as error:
            left_out.add(path, sinks.reason_of(error))
    return manifest.scan(os.path.dirname(into), os.path.basename(into))


def _why_not(original: str) -> str:
    """Why this can not be an output; empty if it can."""
    if not os.path.isfile(original):
        return "it is no file"
    try:
        os.close(os.open(original, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        return sinks.reason_of(error)
    return ""


def store_outputs(
    store: RunnerStore,
    known: ChunkIndex,
    progress: Progress,
    chunk_bytes: int,
    places: tuple[str, list[str], str, str],
    left_out: LeftOut,
) -> StoredOutputs | None:
    """Store the outputs; return `None` if there are none.

    Args:
        places: work directory, patterns, output folder, and a folder of the runner's own.

    Raises:
        store.GivenUp, tree.Vanished, tree.Unfit, OSError: none of them is.
    """
    workdir, patterns, output_dir, into = places
    gone: set[str] = set()
    for further in range(_TRIES, 0, -1):
        this_time = LeftOut()
        found = gather(workdir, patterns, output_dir, into, this_time)
        for path in gone:
            # It was changed each time it was read: a process that outlived the job may write on for ever.
            this_time.add(path, "it was changed while it was read")
        left_out.count, left_out.reason = this_time.count, this_time.reason
        found = manifest.Tree(found.name, tuple(node for node in found.nodes if node.path not in gone))
        if not found.files:
            return None
        try:
            return upload_outputs(store, known, progress, chunk_bytes, found, into)
        except manifest.Vanished as vanished:
            if further == 1:
                raise
            if further < _TRIES:
                gone.add(str(vanished))
    return None


def count_of(places: tuple[str, list[str], str, str]) -> int:
    """How many files there would be to store."""
    workdir, patterns, output_dir, _ = places
    ignored = LeftOut()
    return len(_files_below(output_dir, ignored)) + len(find_outputs(workdir, patterns, ignored))


def upload_outputs(
    store: RunnerStore, known: ChunkIndex, progress: Progress, chunk_bytes: int, found: manifest.Tree, into: str
) -> StoredOutputs:
    """Upload these files.

    Raises:
        store.GivenUp, tree.Vanished, tree.Unfit
    """
    progress.begin("outputs", found.size)
    try:
        stage = manifest.Stage(found, os.path.dirname(into), None)
        files = TreeUpload(stage, store, known, progress, chunk_bytes, lambda: False).run(store.parallel)
    finally:
        progress.end()
    cut = len(sinks.ascii_text(found.name)) + 1
    entries = [dict(entry, path=entry["path"][cut:]) for entry in files if entry["type"] == manifest.FILE]
    size = sum(entry["size"] for entry in entries)
    data = manifest.manifest_bytes(
        store,
        kind="outputs",
        name="outputs",
        entry="outputs",
        serial=store.numbers.take(),
        step=None,
        created_at=now_text(),
        bytes=size,
        files=entries,
        previous=None,
    )
    store.put(MANIFEST, data, hashlib.sha256(data).hexdigest())
    return StoredOutputs(len(entries), size, store.prefix + MANIFEST)
