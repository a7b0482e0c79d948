"""Datasets that are not in the store: a file of any server, and the listed files of a bucket or a hub.

No key is on the host: what it reads is public, or its URL is signed and expires. Every file is read in spans, several
at once, and held to what was stated of it when the job was submitted.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, Callable

from spotd_jobs.runner.data import (
    MTIME_NS,
    READ_BYTES,
    DataRun,
    DataUnusable,
    is_as_made,
    size_words,
)
from spotd_jobs.runner.restore import BadCheckpoint, Cancelled, ChunkWriter, DiskFailed, Load, Placement
from spotd_jobs.wire.client import dataset as documents
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.dataset import CHUNK_BYTES
from spotd_jobs.wire.client.sinks import remove
from spotd_jobs.wire.client.web import steady

if TYPE_CHECKING:
    from hashlib import _Hash


AWAY_S = 600.0
"""A source of which no byte arrived for so long is away."""
NOTHING_BROUGHT_S = 3_600.0
"""So is one that breaks off every answer for so long: what arrives of a span counts once all of it did."""


class DataAway(Exception):
    """The place of a dataset does not answer. The machine is billed meanwhile, so it is not waited for without end."""


class _ElsewhereRun(DataRun):
    """A dataset of a place that may be away while the store, and with it the daemon, can be reached."""

    _bytes_at = _brought_at = 0.0

    def _fetch_all(self, loads: list[Load]) -> None:
        self._bytes_at = self._brought_at = steady()
        super()._fetch_all(loads)

    def _bring(self, load: Load, block: memoryview) -> None:
        super()._bring(load, block)
        self._brought_at = steady()

    def _note_silence(self, why: str) -> None:
        now = steady()
        if now - self._bytes_at > AWAY_S or now - self._brought_at > NOTHING_BROUGHT_S:
            raise DataAway("%s: %s" % (self.source, why))


class UrlRun(_ElsewhereRun):
    """One file of a server that is not the store: read in spans, several at once, and believed once its hash is right.

    The list of what is complete names a span by where it begins, as a number of as many digits as a hash has.
    """

    def begin(self) -> None:
        """Find out what is here already.

        Raises:
            OSError
        """
        os.makedirs(self._home, exist_ok=True)
        self.total = int(self._grants()[self._number]["bytes"])
        self._root = documents.DataRoot((), self.total, 1, 0)
        if os.path.isfile(self._place) and not os.path.islink(self._place) and self._was_placed():
            if is_as_made(os.lstat(self._place), self.total):
                self.is_placed = self.is_kept = True
                return
            self._say("data %s: the job has changed it; it is read again" % self.source)
            remove(self._place)
        if os.path.isfile(self._tree) and os.path.getsize(self._tree) == self.total:
            self._complete = self._read_complete()

    def fetch(self) -> None:
        """Bring all that is missing.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        if self.is_placed:
            return
        began = steady()
        was_begun = bool(self._complete)
        self._fetch_spans()
        if self._digest() != self.sha256 and was_begun:
            self._say("data %s: what an earlier start left of it is damaged; it is read again" % self.source)
            self._complete = {}
            self._fetch_spans()
        if self._digest() != self.sha256:
            remove(self._tree)
            raise DataUnusable("%s: its content is not what sha256 says" % self.source)
        os.utime(self._tree, ns=(MTIME_NS, MTIME_NS))
        self._say("data %s: %s in %.0f s" % (self.source, size_words(self.done), steady() - began))

    def _fetch_spans(self) -> None:
        if not self._complete:
            remove(self._listed)
        with open(self._tree, "ab") as stream:
            stream.truncate(self.total)
        os.chmod(self._tree, 0o644)
        self.done = sum(self._complete.values())
        loads = []
        for first in range(0, self.total, CHUNK_BYTES):
            name, count = "%064x" % first, min(CHUNK_BYTES, self.total - first)
            if self._complete.get(name) != count:
                row = {"sha256": name, "first": first, "size": count}
                loads.append(Load(row, [Placement(self._tree, first, 0, count)]))
        with open(self._listed, "ab", buffering=0) as self._list:
            try:
                self._fetch_all(loads)
            except BadCheckpoint as bad:
                raise DataUnusable("%s: %s" % (self.source, bad)) from None

    def _load(self, load: Load, block: memoryview) -> None:
        span = web.Span(load.chunk["first"], load.chunk["size"], self.total)
        places = ChunkWriter(load.places)

        def get(_: _Hash) -> None:
            places.begin()

            def take(data: memoryview) -> None:
                self._bytes_at = steady()
                places.write(data)

            web.read_blocks(self.source, span.size, block, take, span)
            if places.written != span.size:
                raise web.WebError("the answer was cut short")

        try:
            self._fetch("it", get, hashlib.sha256().hexdigest())  # a span has no hash; that of the file is compared
        except DiskFailed as failed:
            raise failed.error from None
        finally:
            places.close()

    def _digest(self) -> str:
        hashing = hashlib.sha256()
        with open(self._tree, "rb", buffering=0) as stream:
            while True:
                if self._stopped():
                    raise Cancelled()
                data = stream.read(READ_BYTES)
                if not data:
                    return hashing.hexdigest()
                hashing.update(data)


class ListedRun(_ElsewhereRun):
    """The files of a listing, each read at a URL of its own.

    The list of what is complete names a span by its file and where it begins, and has the hash of what arrived: an
    earlier start's spans are believed by that. A whole file is then held to the hash that was listed of it; of an
    object of a bucket, whose owner states no hash, each read asks for just the content that was listed.
    """

    def __init__(self, *of_a_run: Any) -> None:
        super().__init__(*of_a_run)
        self._files: tuple[documents.ListedFile, ...] = ()
        self._arrived: dict[tuple[int, int], tuple[int, str]] = {}

    def begin(self) -> None:
        """Read the listing, and find out what is here already.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        os.makedirs(self._home, exist_ok=True)
        self._files = self._read(documents.data_listing_key(self.sha256), self.sha256, documents.read_listing)
        self.total = sum(one.size for one in self._files)
        self._root = documents.DataRoot((), self.total, len(self._files), 0)
        if os.path.isdir(self._place) and not os.path.islink(self._place) and self._was_placed():
            if self._is_unchanged():
                self.is_placed = self.is_kept = True
                return
            self._say("data %s: the job has changed files of it; they are brought back" % self.source)
            remove(self._tree)
            remove(self._listed)
            remove(self._place)
        self._arrived = self._read_arrivals()
        self._complete = {"%d-%d" % place: size for place, (size, _) in self._arrived.items()}

    def fetch(self) -> None:
        """Bring all that is missing.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        if self.is_placed:
            return
        began = steady()
        loads = []
        os.makedirs(self._tree, exist_ok=True)
        for number, one in enumerate(self._files):
            place = self._make_file(one)
            for first in range(0, one.size, CHUNK_BYTES):
                size = min(CHUNK_BYTES, one.size - first)
                load = Load({"number": number, "first": first, "size": size}, [Placement(place, first, 0, size)])
                if not self._has_arrived(load):
                    loads.append(load)
        with open(self._listed, "ab", buffering=0) as self._list:
            try:
                self._fetch_all(loads)
            except BadCheckpoint as bad:
                raise DataUnusable("%s: %s" % (self.source, bad)) from None
        for one in self._files:
            self._require_content(one)
            os.utime(os.path.join(self._tree, one.path), ns=(MTIME_NS, MTIME_NS))
        self._say("data %s: %s in %.0f s" % (self.source, size_words(self.done), max(0.001, steady() - began)))

    def _make_file(self, one: documents.ListedFile) -> str:
        place = os.path.join(self._tree, one.path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(place, flags, 0o644)
        try:
            if os.fstat(descriptor).st_size != one.size:
                os.ftruncate(descriptor, one.size)
        finally:
            os.close(descriptor)
        return place

    def _has_arrived(self, load: Load) -> bool:
        """Whether an earlier start brought this span, and it is on the disk as it came."""
        size, sha256 = self._arrived.get((load.chunk["number"], load.chunk["first"]), (0, ""))
        if size != load.chunk["size"] or self._stopped():
            return False  # the fetch that follows raises where it was stopped
        place = load.places[0]
        if self._hash_of(place.path, hashlib.sha256(), place.offset, size) != sha256:
            return False
        self.done += size
        return True

    def _load(self, load: Load, block: memoryview) -> None:
        one = self._files[load.chunk["number"]]
        etag = one.check if one.kind == documents.ETAG else ""
        span = web.Span(load.chunk["first"], load.chunk["size"], one.size, etag)
        places = ChunkWriter(load.places)

        def get(_: _Hash) -> None:
            hashing = hashlib.sha256()
            places.begin()

            def take(data: memoryview) -> None:
                self._bytes_at = steady()
                hashing.update(data)
                places.write(data)

            url = self._url_of(documents.file_url_key(load.chunk["number"]))
            web.read_blocks(url, span.size, block, take, None if one.kind == documents.STORED else span)
            if places.written != span.size:
                raise web.WebError("the answer was cut short")
            load.chunk["sha256"] = hashing.hexdigest()

        try:
            self._fetch(one.path, get, hashlib.sha256().hexdigest())  # what a span holds is judged with its file
        except DiskFailed as failed:
            raise failed.error from None
        finally:
            places.close()

    def _line_of(self, load: Load) -> bytes:
        chunk = load.chunk
        return b"%d %d %d %s\n" % (chunk["number"], chunk["first"], chunk["size"], chunk["sha256"].encode())

    def _read_arrivals(self) -> dict[tuple[int, int], tuple[int, str]]:
        found = {}
        try:
            with open(self._listed, encoding="ascii", errors="replace") as stream:
                for line in stream:
                    words = line.split()
                    if line.endswith("\n") and len(words) == 4 and all(word.isdigit() for word in words[:3]):
                        found[int(words[0]), int(words[1])] = (int(words[2]), words[3])
        except FileNotFoundError:
            return {}
        return found

    def _require_content(self, one: documents.ListedFile) -> None:
        """Require that the file is what was listed.

        Raises:
            DataUnusable
            restore.Cancelled, OSError
        """
        if one.kind == documents.ETAG:
            return
        hashing: Any = hashlib.sha256()
        if one.kind == documents.GIT:
            hashing = hashlib.sha1(b"blob %d\0" % one.size)  # noqa: S324 - by it git names objects, and the commit listed
        place = os.path.join(self._tree, one.path)
        if self._hash_of(place, hashing, 0, one.size) != one.check:
            remove(self._tree)
            remove(self._listed)
            raise DataUnusable("%s: the content of %s is not what was listed" % (self.source, one.path))

    def _hash_of(self, place: str, hashing: Any, first: int, size: int) -> str:
        with open(place, "rb", buffering=0) as stream:
            stream.seek(first)
            while size:
                if self._stopped():
                    raise Cancelled()
                data = stream.read(min(size, READ_BYTES))
                if not data:
                    return ""
                hashing.update(data)
                size -= len(data)
        found: str = hashing.hexdigest()
        return found

    def _is_unchanged(self) -> bool:
        for one in self._files:
            try:
                found = os.lstat(os.path.join(self._place, one.path))
            except OSError:
                return False
            if not is_as_made(found, one.size):
                return False
        return True


def data_run(grants: Callable[[], list[dict[str, Any]]], number: int, *rest: Any) -> DataRun:
    """Return the run that brings this dataset; the arguments are those of `DataRun`."""
    source = str(grants()[number]["source"])
    if source.startswith("https://"):
        return UrlRun(grants, number, *rest)
    kind = ListedRun if source.startswith(("s3://", "hf://")) else DataRun
    return kind(grants, number, *rest)
