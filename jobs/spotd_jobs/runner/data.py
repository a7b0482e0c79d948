"""The datasets of a job: brought to this machine before its command begins, every byte verified, and kept on it.

The files of a dataset grow in a folder of the runner's own, beside a list of the chunks that are complete. A runner
that is started again verifies what is on that list by its hash and fetches only the rest. Once all is there the folder
is renamed to its place below the job's folder, and nothing is ever written elsewhere.

Every file gets the same time of change. A runner that finds a dataset in its place sees by that, and by the sizes,
whether the job has written to it, and then brings back what was changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Callable

from spotd_jobs.runner.outputs import InputUnusable
from spotd_jobs.runner.restore import (
    BadCheckpoint,
    Load,
    Placement,
    RestoreRun,
)
from spotd_jobs.wire.client import dataset as documents
from spotd_jobs.wire.client import sinks, web
from spotd_jobs.wire.client.web import steady

if TYPE_CHECKING:
    from hashlib import _Hash

_DISK_BLOCK_BYTES = 4096
_ROOM_LEFT_BYTES = 16 * 1024 * 1024
READ_BYTES = 4 * 1024 * 1024
_SAID_EVERY_S = 30.0
MTIME_NS = documents.MTIME_S * 10**9


class DataUnusable(InputUnusable):
    """A dataset that can not be brought here as it was stored. The text states which and why."""


class DataRun(RestoreRun):
    """One dataset.

    Args:
        grants: those of the newest grant.
        home: where it grows; on the same disk as `workdir`.
    """

    def __init__(
        self,
        grants: Callable[[], list[dict[str, Any]]],
        number: int,
        home: str,
        workdir: str,
        connections: int,
        pause: Callable[[float], bool],
        stopped: Callable[[], bool],
        permitted: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        grant = grants()[number]
        self.source, self.path, self.sha256 = str(grant["source"]), str(grant["path"]), str(grant["sha256"])
        if not sinks.is_plain(self.path) or "\0" in self.path or not documents.is_digest(self.sha256):
            raise DataUnusable("the grant names a dataset that leads outside")
        self._home = os.path.join(home, "datasets", "%d-%s" % (number, self.sha256[:16]))
        super().__init__(list, self._home, connections, pause, stopped, permitted)
        self._grants = grants
        self._number = number
        self._say = say
        self._said_at = steady()
        self._workdir = workdir
        self._tree = os.path.join(self._home, "tree")
        self._listed = os.path.join(self._home, "complete")
        self._mark = os.path.join(self._home, "placed")
        self._place = os.path.join(workdir, self.path)
        self._urls: dict[str, str] = {}
        self._urls_at: list[str] = []
        self._complete: dict[str, int] = {}
        self._list: Any = None
        self._root = documents.DataRoot((), 0, 0, 0)
        self.is_placed = False
        self.is_kept = False

    def begin(self) -> None:
        """Read the root, and find out what is here already.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        os.makedirs(self._home, exist_ok=True)
        self._root = self._read(documents.data_root_key(self.sha256), self.sha256, documents.read_root)
        self.total = self._root.bytes
        if os.path.isdir(self._place) and not os.path.islink(self._place) and self._was_placed():
            if self._is_unchanged():
                self.is_placed = self.is_kept = True
                return
            self._say("data %s: the job has changed files of it; they are brought back" % self.source)
            sinks.remove(self._tree)
            os.rename(self._place, self._tree)
        self._complete = self._read_complete()

    def missing_bytes(self) -> int:
        """How much of the disk this will take beside what it has."""
        if self.is_placed:
            return 0
        blocks = self._root.bytes + 2 * _DISK_BLOCK_BYTES * self._root.files
        return max(0, blocks - sum(self._complete.values()))

    def fetch(self) -> None:
        """Bring all that is missing.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        if self.is_placed:
            return
        began = steady()
        os.makedirs(self._tree, exist_ok=True)
        with open(self._listed, "ab", buffering=0) as self._list:
            try:
                for row in self._root.parts:
                    self._fetch_part(self._read(documents.data_part_key(row.sha256), row.sha256, documents.read_part))
            except BadCheckpoint as bad:
                raise DataUnusable("%s: %s" % (self.source, bad)) from None
        took = max(0.001, steady() - began)
        self._say("data %s: %s in %.0f s" % (self.source, size_words(self.done), took))

    def put_in_place(self) -> None:
        """Rename what was fetched to its place.

        Raises:
            DataUnusable: something else is there.
            OSError
        """
        if self.is_placed:
            return
        parent = os.path.dirname(self._place)
        os.makedirs(parent, exist_ok=True)
        inside = os.path.realpath(self._workdir)
        if not (os.path.realpath(parent) + os.sep).startswith(inside + os.sep):
            raise DataUnusable("%s: its path %s leads out of the job's folder" % (self.source, self.path))
        try:
            os.rmdir(self._place)  # an empty folder is what many projects keep for their data
        except FileNotFoundError:
            pass
        except OSError:
            raise DataUnusable(
                "%s: the job's folder has something at %s already; choose another path" % (self.source, self.path)
            ) from None
        sinks.write_whole(self._mark, self._mark_text(), durable=True)
        os.rename(self._tree, self._place)
        self.is_placed = True

    def _fetch_part(self, part: documents.DataPart) -> None:
        loads: dict[str, Load] = {}
        for entry in part.entries:
            self._make(entry)
            offset = 0
            for piece in entry.pieces:
                chunk = part.chunks[piece.chunk]
                load = loads.get(chunk.sha256)
                if load is None:
                    row = {"key": documents.data_chunk_key(chunk.sha256), "sha256": chunk.sha256, "size": chunk.size}
                    load = loads[chunk.sha256] = Load(row, [])
                load.places.append(Placement(os.path.join(self._tree, entry.path), offset, piece.offset, piece.length))
                offset += piece.length
        missing = [load for load in loads.values() if not self._is_here(load)]
        self._fetch_all(missing)
        for entry in part.entries:
            place = os.path.join(self._tree, entry.path)
            if entry.kind == documents.LINK:
                sinks.remove(place)
                os.symlink(str(entry.target), place)
            elif entry.kind == documents.FILE:
                os.chmod(place, 0o755 if entry.executable else 0o644)
                os.utime(place, ns=(MTIME_NS, MTIME_NS))

    def _make(self, entry: documents.DataEntry) -> None:
        place = os.path.join(self._tree, entry.path)
        os.makedirs(place if entry.kind == documents.DIR else os.path.dirname(place), exist_ok=True)
        if entry.kind != documents.FILE:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(place, flags, 0o644)
        try:
            if os.fstat(descriptor).st_size != entry.size:
                os.ftruncate(descriptor, entry.size)
        finally:
            os.close(descriptor)

    def _is_here(self, load: Load) -> bool:
        """Whether this chunk is on the disk, as a former start has left it."""
        sha256 = load.chunk["sha256"]
        if sha256 not in self._complete:
            return False
        if self._stopped():
            return False  # the fetch that follows raises it
        places = sorted(load.places, key=lambda place: place.start)
        hashing, at = hashlib.sha256(), 0
        for place in places:
            if place.start != at:
                return False
            at += place.length
            with open(place.path, "rb", buffering=0) as stream:
                stream.seek(place.offset)
                left = place.length
                while left:
                    data = stream.read(min(left, READ_BYTES))
                    if not data:
                        return False
                    hashing.update(data)
                    left -= len(data)
        if at != load.chunk["size"] or hashing.hexdigest() != sha256:
            return False
        self.done += at
        return True

    def _bring(self, load: Load, block: memoryview) -> None:
        self._load(load, block)
        with self._lock:
            os.write(self._list.fileno(), self._line_of(load))
            if steady() - self._said_at < _SAID_EVERY_S:
                return
            self._said_at = steady()
        self._say("data %s: %s of %s" % (self.source, size_words(self.done), size_words(self.total)))

    def _load(self, load: Load, block: memoryview) -> None:
        super()._bring(load, block)

    def _line_of(self, load: Load) -> bytes:
        """Return the line for the list of what is complete."""
        return b"%s %d\n" % (load.chunk["sha256"].encode(), load.chunk["size"])

    def _read_complete(self) -> dict[str, int]:
        """Return the chunks that a former start has completed, as far as its list is whole."""
        found: dict[str, int] = {}
        try:
            with open(self._listed, encoding="ascii", errors="replace") as stream:
                for line in stream:
                    sha256, _, size = line.rstrip("\n").partition(" ")
                    if line.endswith("\n") and documents.is_digest(sha256) and size.isdigit():
                        found[sha256] = int(size)
        except FileNotFoundError:
            return {}
        return found

    def _mark_text(self) -> bytes:
        return json.dumps({"sha256": self.sha256, "path": self.path}).encode()

    def _was_placed(self) -> bool:
        try:
            with open(self._mark, "rb") as stream:
                return stream.read(65536) == self._mark_text()
        except OSError:
            return False

    def _is_unchanged(self) -> bool:
        """Whether every file in its place has the size and the time that it was given."""
        for row in self._root.parts:
            for entry in self._read(documents.data_part_key(row.sha256), row.sha256, documents.read_part).entries:
                try:
                    found = os.lstat(os.path.join(self._place, entry.path))
                except OSError:
                    return False
                if entry.kind == documents.FILE and not is_as_made(found, entry.size):
                    return False
        return True

    def _read(self, key: str, sha256: str, parse: Callable[[bytes], Any]) -> Any:
        """Return the document of this hash.

        Raises:
            DataUnusable
            restore.Cancelled
        """

        def get(hashing: _Hash) -> bytes:
            try:
                text = sinks.text_of(web.read(self._url_of(key), documents.DOCUMENT_BYTES_MAX))
            except sinks.Unreadable:
                return b""
            hashing.update(text)
            return text

        try:
            return parse(self._fetch("the list of its files", get, sha256))
        except (BadCheckpoint, sinks.Unreadable) as bad:
            raise DataUnusable("%s: %s" % (self.source, bad)) from None

    def _url_of(self, key: str) -> str:
        grant = self._grant()
        if grant.get("base"):
            from urllib.parse import quote

            return str(grant["base"]) + quote(key, safe="/-_.~")
        # Always by the newest grant: a long download may outlive the URLs it began with.
        pages = [str(page) for page in grant.get("urls") or []]
        with self._lock:
            if pages and pages != self._urls_at:
                self._urls = {key: url for page in pages for key, url in _read_urls(page).items()}
                self._urls_at = pages
            url = self._urls.get(key)
        if url is None:
            raise BadCheckpoint("the grant does not permit to read a part of it")
        return url

    def _grant(self) -> dict[str, Any]:
        for grant in self._grants():
            if grant["path"] == self.path and grant["sha256"] == self.sha256:
                return grant
        raise BadCheckpoint("the grant does not offer it any more")


class DataProgress:
    """How far all datasets of a job have come."""

    def __init__(self) -> None:
        self.runs: list[DataRun] = []

    def read(self) -> dict[str, Any] | None:
        """Return it for the heartbeat; nothing before it has begun."""
        runs = [run for run in self.runs if not run.is_kept]
        if not runs:
            return None
        names = ", ".join(sinks.ascii_text(run.source) for run in runs)[:200]
        return {"name": names, "bytes_done": sum(r.done for r in runs), "bytes_total": sum(r.total for r in runs)}


def fetch_data(runs: list[DataRun], folder: str) -> None:
    """Bring all datasets of a job, once it is known that they fit on the disk.

    Raises:
        DiskFull: they do not, and nothing was fetched.
        DataUnusable
        restore.Cancelled, OSError
    """
    for run in runs:
        run.begin()
    missing = sum(run.missing_bytes() for run in runs)
    free = sinks.free_bytes(folder)
    if missing and free is not None and free < missing + _ROOM_LEFT_BYTES:
        names = ", ".join(run.source for run in runs if not run.is_placed)
        raise sinks.DiskFull(
            "the data %s needs %s of disk and %s are free" % (names, size_words(missing), size_words(free))
        )
    for run in runs:
        if run.is_placed:
            sinks.log_line("data %s is here already" % sinks.ascii_text(run.source))
        run.fetch()


def is_as_made(found: os.stat_result, size: int) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == size and found.st_mtime_ns == MTIME_NS


def _read_urls(place: str) -> dict[str, str]:
    try:
        urls = json.loads(sinks.text_of(web.read(place, documents.DOCUMENT_BYTES_MAX)))
        return {str(key): str(url) for key, url in urls.items()}
    except (sinks.Unreadable, ValueError, AttributeError):
        raise web.WebError("the list of its URLs can not be read") from None


def size_words(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return "%.1f %s" % (count / size, unit)
    return "%d B" % count
