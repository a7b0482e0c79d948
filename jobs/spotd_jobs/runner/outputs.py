"""What a finished job leaves for its owner: the files its `outputs` patterns match, and its output folder.

Each file stands for itself: one that can not be stored is left out and counted, with the reason of the first.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from typing import Iterator, NamedTuple

from spotd_jobs.runner import manifest
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.upload import Progress, TreeUpload
from spotd_jobs.wire.client.sinks import ascii_text, clean, log_line, reason_of, remove
from spotd_jobs.wire.client.web import now_text

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
        line = clean("%s: %s" % (ascii_text(path)[-120:], why))
        self.reason = self.reason or line
        log_line("an output was left out: " + line)


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
            left_out.add(path or os.path.basename(folder), reason_of(error))
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
    remove(into)
    os.makedirs(into)
    sources = [(output_dir, path) for path in sorted(_files_below(output_dir, left_out))]
    sources += [(workdir, path) for path in find_outputs(workdir, patterns, left_out)]
    for source, path in sources:
        place, original = os.path.join(into, path), os.path.realpath(os.path.join(source, path))
        if os.path.lexists(place):
            continue
        why = _why_not(original)
        if why:
            left_out.add(path, why)
            continue
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(original, place)
        except (FileExistsError, NotADirectoryError):
            left_out.add(path, "another output has the name of its folder")
        except OSError as error:
            left_out.add(path, reason_of(error))
    return manifest.scan(os.path.dirname(into), os.path.basename(into))


def _why_not(original: str) -> str:
    """Why this can not be an output; empty if it can."""
    if not os.path.isfile(original):
        return "it is no file"
    try:
        os.close(os.open(original, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        return reason_of(error)
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
    cut = len(ascii_text(found.name)) + 1
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
