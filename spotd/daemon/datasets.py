"""Datasets in the object store: their names, what they consist of, and the deletion of what belongs to none any more.

Theory. A dataset is its root document, which is named by its hash; a name is a small document that states which root is
meant. A job keeps the hash and not the name, so that every attempt reads the same bytes, whatever the name means by
then. A root is *needed* while a name means it or a job that has not ended reads it, and what a needed root consists of
is needed too.

A folder that a job names as its source is stored the same way and gets no name: its root is needed while the job has
not ended. Of data that stays elsewhere the store has the list of its files, which is needed as long.

Content is stored before the name, so an upload in progress has content that nothing needs yet. Garbage collection
therefore believes two witnesses: the store, that the object is older than `KEPT`, and this process, that nothing has
needed it or asked for it since `KEPT`. A name is given under the same lock under which content is deleted, and only to
a root whose every chunk is in the store then: whatever was deleted before is sent again. No host may write below
`data/`, since grants permit writing below the own attempt alone.

What is in the store is seen by listing it, a thousand objects a request, and never remembered.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final, TypeVar

from spotd.core.domain.world import World
from spotd.daemon.commits import Threads
from spotd.daemon.contents import Parts, unpacked
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.remote_data import RemoteData, measure_url
from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client import dataset as documents
from spotd_jobs.wire.client.sinks import Unreadable
from spotd_providers.contract.provider import Clock, Logger

T = TypeVar("T")
KEPT: Final = timedelta(hours=24)
NAME_BYTES_MAX: Final = 4_096
NAMES: Final = documents.PREFIX + "names/"
PARTS: Final = documents.PREFIX + "parts/"
CHUNKS: Final = documents.PREFIX + "chunks/"
ASKED_MAX: Final = 4
"""So many objects are asked for one by one, more are found in a listing."""
DELETED_AT_ONCE: Final = 500
DELETED_MAX: Final = 20_000
"""In one pass."""
COLLECT_EVERY: Final = timedelta(hours=1)
"""On the wall: what is deleted is a day old by the clock of the store, which is the wall's."""
COLLECT_WITHIN_S: Final = 1800.0


class BadDataset(Exception):
    """Documents that make no dataset. The text states why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a name means.

    Attributes:
        sha256: of the root's text.
    """

    name: str
    sha256: str
    bytes: int
    files: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A dataset that is stored, whether or not it has a name."""

    sha256: str
    bytes: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    """A root that consists of what the store lacks: of some of it the hashes."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSwept:
    """What one garbage collection deleted."""

    objects: int = 0
    bytes: int = 0


class Datasets:
    """The datasets of one store. Synchronous: called from worker threads."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        measure: Callable[[str], int] = measure_url,
        remote: RemoteData | None = None,
    ) -> None:
        self._objects = objects
        self.measure = measure
        """Returns how large what a URL serves is."""
        self.remote = RemoteData() if remote is None else remote
        self._lock = threading.Lock()
        self._parts = Parts(objects)
        self._idle: dict[str, datetime] = {}
        """Since when nothing has needed this object, as far as this process saw."""

    def named(self, name: str) -> Dataset | None:
        """Return what the name means now.

        Raises:
            StoreError
        """
        if not documents.is_dataset_name(name):
            return None
        try:
            return _read_name(name, self._objects.get(_name_key(name), bytes_max=NAME_BYTES_MAX))
        except ObjectMissing:
            return None

    def every(self) -> list[Dataset]:
        """Return all datasets that have a name, by their names.

        Raises:
            StoreError
        """
        names = [info.key.removeprefix(NAMES).removesuffix(".json") for info in self._objects.list(NAMES)]
        found = (self.named(name) for name in names)
        return [one for one in found if one is not None]

    def has_chunk(self, sha256: str) -> bool:
        """Return whether the store holds this chunk, which an upload in progress is about to need."""
        with self._lock:
            self._idle.pop(documents.data_chunk_key(sha256), None)
        return self._objects.head(documents.data_chunk_key(sha256)) is not None

    def put_part(self, sha256: str, text: bytes) -> None:
        """Store the part.

        Raises:
            BadDataset: it is none, or has another hash.
            StoreError
        """
        _require(lambda: documents.read_part(text))
        if documents.digest_of(text) != sha256:
            raise BadDataset("a part arrived with another content than announced")
        with self._lock:
            self._idle.pop(documents.data_part_key(sha256), None)
        self._parts.put(sha256, text)

    def give_name(self, name: str, text: bytes, now: datetime) -> Dataset | Incomplete:
        """Let the name mean the dataset of this root, if the store holds all that it consists of.

        Raises:
            BadDataset: the root is none, or its parts do not fit together.
            StoreError
        """
        if not documents.is_dataset_name(name):
            raise BadDataset(f"{name[:80]!r} is no name of a dataset")
        with self._lock:
            made = self._store_root(text)
            if isinstance(made, Incomplete):
                return made
            named = Dataset(name=name, sha256=made.sha256, bytes=made.bytes, files=made.files, created_at=now)
            self._objects.put(_name_key(name), _name_bytes(named))
        return named

    def store(self, text: bytes) -> Content | Incomplete:
        """Store the root, if the store holds all that it consists of; it is kept for `KEPT` and while jobs read it.

        Raises:
            BadDataset: the root is none, or its parts do not fit together.
            StoreError
        """
        with self._lock:
            return self._store_root(text)

    def stored(self, sha256: str) -> Content | None:
        """Return what the store holds under this hash; `None` unless it is all there, and then it is kept for `KEPT`.

        Raises:
            StoreError
            BadDataset: its parts do not fit together.
        """
        with self._lock:
            try:
                root = self.root(sha256)
            except ObjectMissing:
                return None
            if self._missing(root):
                return None
            self._keep(sha256, root)
        return Content(sha256=sha256, bytes=root.bytes, files=root.files)

    def is_stored(self, sha256: str) -> bool:
        """Whether the store has all of this dataset; then it keeps it for `KEPT`.

        Raises:
            StoreError
            BadDataset: its parts do not fit together.
        """
        return self.stored(sha256) is not None

    def store_listing(self, files: Iterable[documents.ListedFile]) -> str:
        """Store the list of files that stay elsewhere; return its hash.

        Raises:
            StoreError
        """
        text = documents.listing_text(files)
        key = documents.data_listing_key(documents.digest_of(text))
        with self._lock:
            self._objects.put(key, gzip.compress(text, 6, mtime=0))
            self._idle.pop(key, None)
        return documents.digest_of(text)

    def keep_file(self, sha256: str, data: bytes) -> None:
        """Store a file that hosts cannot read where it is."""
        key = documents.data_chunk_key(sha256)
        with self._lock:
            self._idle.pop(key, None)
            self._objects.put(key, data)

    def has_listing(self, sha256: str) -> bool:
        """Whether the store has this list and all files that hosts read there by it; then it keeps them for `KEPT`.

        Raises:
            StoreError
        """
        with self._lock:
            try:
                keys = list(self.keys_of_listing(sha256))
            except ObjectMissing:
                return False
            if any(self._objects.head(key) is None for key in keys[1:]):
                return False
            for key in keys:
                self._idle.pop(key, None)
        return True

    def listing(self, sha256: str) -> tuple[documents.ListedFile, ...]:
        """Return the list of this hash.

        Raises:
            ObjectMissing: it is not in the store.
            StoreError: what is there is another one.
        """
        key = documents.data_listing_key(sha256)
        try:
            text = self._objects.get(key, bytes_max=documents.DOCUMENT_BYTES_MAX)
            return documents.read_listing(unpacked(key, text, sha256))
        except Unreadable as exc:
            raise StoreError(f"{key} in the store is no list of files: submit the job again") from exc

    def keys_of_listing(self, sha256: str) -> Iterator[str]:
        """Yield the key of everything that the store has of data that stays elsewhere, the list first.

        Raises:
            ObjectMissing, StoreError: as of `listing`.
        """
        files = self.listing(sha256)
        yield documents.data_listing_key(sha256)
        yield from {documents.data_chunk_key(one.check): None for one in files if one.kind == documents.STORED}

    def _store_root(self, text: bytes) -> Content | Incomplete:
        root = _require(lambda: documents.read_root(text))
        missing = self._missing(root)
        if missing:
            return Incomplete(missing=missing)
        sha256 = documents.digest_of(text)
        self._objects.put(documents.data_root_key(sha256), gzip.compress(text, 6, mtime=0))
        self._keep(sha256, root)
        return Content(sha256=sha256, bytes=root.bytes, files=root.files)

    def _keep(self, sha256: str, root: documents.DataRoot) -> None:
        """Let nothing of it count as idle: a job is about to read it."""
        if self._idle:
            for key in self._keys(sha256, root):
                self._idle.pop(key, None)

    def forget(self, name: str) -> None:
        """Let the name mean nothing. Its content goes once nothing else needs it.

        Raises:
            StoreError
        """
        self._objects.delete([_name_key(name)])

    def root(self, sha256: str) -> documents.DataRoot:
        """Return the root of this hash.

        Raises:
            ObjectMissing: it is not in the store.
            StoreError: what is there is another one.
        """
        key = documents.data_root_key(sha256)
        return documents.read_root(
            unpacked(key, self._objects.get(key, bytes_max=documents.DOCUMENT_BYTES_MAX), sha256)
        )

    def keys_of(self, sha256: str) -> Iterator[str]:
        """Yield the key of everything that a dataset consists of, some maybe more than once.

        Raises:
            ObjectMissing, StoreError: as of `root`.
        """
        return self._keys(sha256, self.root(sha256))

    def _keys(self, sha256: str, root: documents.DataRoot) -> Iterator[str]:
        yield documents.data_root_key(sha256)
        for row in root.parts:
            yield documents.data_part_key(row.sha256)
            for chunk in self._parts.summary(row.sha256).chunks:
                yield documents.data_chunk_key(chunk.sha256)

    def collect(self, read_by_jobs: Collection[str], now: datetime, *, listings: Collection[str] = ()) -> DataSwept:
        """Delete what no dataset has needed for so long that no upload in progress can.

        Args:
            read_by_jobs: the hashes of the roots that jobs read which have not ended.
            listings: the hashes of the lists of files elsewhere that they read.

        Raises:
            StoreError: nothing is deleted while it is unknown what is needed.
        """
        with self._lock:
            needed: set[str] = set()
            for sha256 in {one.sha256 for one in self.every()} | set(read_by_jobs):
                needed.update(self.keys_of(sha256))
            for sha256 in listings:
                needed.update(self.keys_of_listing(sha256))
            idle: dict[str, datetime] = {}
            garbage: list[str] = []
            freed = 0
            for info in self._objects.list(documents.PREFIX):
                if info.key in needed or info.key.startswith(NAMES):
                    continue
                idle[info.key] = since = self._idle.get(info.key, now)
                if len(garbage) < DELETED_MAX and now - since >= KEPT and now - info.modified >= KEPT:
                    garbage.append(info.key)
                    freed += info.size
            self._idle = idle
            for start in range(0, len(garbage), DELETED_AT_ONCE):
                some = garbage[start : start + DELETED_AT_ONCE]
                self._objects.delete(some)
                for key in some:
                    del self._idle[key]
        return DataSwept(objects=len(garbage), bytes=freed)

    def _missing(self, root: documents.DataRoot) -> tuple[str, ...]:
        """Return what of the root the store lacks; check that its parts are what it says.

        Raises:
            BadDataset, StoreError
        """
        sizes: dict[str, int] = {}
        ends: list[tuple[bytes, bytes]] = []
        packed = self._sizes(PARTS, {row.sha256 for row in root.parts})
        absent = tuple(row.sha256 for row in root.parts if row.sha256 not in packed)
        if absent:
            return absent
        for row in root.parts:
            part = self._parts.summary(row.sha256, packed_bytes=packed[row.sha256])
            if (part.content_bytes, part.files, len(part.chunks)) != (row.bytes, row.files, row.chunks):
                raise BadDataset("a part is not what its list says")
            if part.first is not None and part.last is not None:
                ends.append((part.first, part.last))
            for chunk in part.chunks:
                if sizes.setdefault(chunk.sha256, chunk.size) != chunk.size:
                    raise BadDataset("one chunk has two sizes")
        if any(first <= last or first.startswith(last + b"\0") for (_, last), (first, _) in pairwise(ends)):
            raise BadDataset("its parts are not in the order of their paths")
        there = self._sizes(CHUNKS, sizes)
        return tuple(sha256 for sha256, size in sizes.items() if there.get(sha256) != size)[:1000]

    def _sizes(self, prefix: str, wanted: Collection[str]) -> dict[str, int]:
        """Return how large those are that the store has, by their hashes: by one listing, or a request for each.

        A listing shows the objects of all datasets, so that of a store with many costs more than to ask for a few.
        """
        if len(wanted) <= ASKED_MAX:
            asked = (self._objects.head(prefix + sha256) for sha256 in wanted)
            return {_hash_in(info.key): info.size for info in asked if info is not None}
        listed = ((_hash_in(info.key), info.size) for info in self._objects.list(prefix))
        return {sha256: size for sha256, size in listed if sha256 in wanted}


def _require(read: Callable[[], T]) -> T:
    """Return what was read.

    Raises:
        BadDataset: nothing could be.
    """
    try:
        return read()
    except Unreadable as exc:
        raise BadDataset(str(exc)) from exc


def _name_key(name: str) -> str:
    return f"{NAMES}{name}.json"


def _hash_in(key: str) -> str:
    return key.rpartition("/")[2]


def _name_bytes(dataset: Dataset) -> bytes:
    document = {
        "schema": 1,
        "sha256": dataset.sha256,
        "bytes": dataset.bytes,
        "files": dataset.files,
        "created_at": dataset.created_at.astimezone(UTC).isoformat(),
    }
    return json.dumps(document).encode()


def _read_name(name: str, data: bytes) -> Dataset:
    try:
        document = json.loads(data)
        sha256, size, files = document["sha256"], document["bytes"], document["files"]
        if not documents.is_digest(sha256) or type(size) is not int or type(files) is not int:
            raise ValueError(sha256)
        created_at = datetime.fromisoformat(document["created_at"]).astimezone(UTC)
    except (ValueError, KeyError, TypeError) as exc:
        raise StoreError(f"what {name} means cannot be read in the store: put the dataset again") from exc
    return Dataset(name=name, sha256=sha256, bytes=size, files=files, created_at=created_at)


class DatasetGarbage:
    """Garbage collection of datasets. `reconcile_once` is one pass."""

    def __init__(
        self,
        datasets: Datasets,
        *,
        world: Callable[[], World | None],
        wall: Clock,
        log: Logger,
        inline: bool = False,
        may_delete: Callable[[], bool] = lambda: True,
    ) -> None:
        self._datasets = datasets
        self._world = world
        self._wall = wall
        self._log = log
        self._threads = Threads(inline=inline)
        self._may_delete = may_delete
        self.controller = Controller(
            "dataset-garbage",
            self.reconcile_once,
            interval_s=COLLECT_EVERY.total_seconds(),
            expected=(StoreError,),
            outage=Outage(log, "data.held", "data.back"),
            deadline_s=COLLECT_WITHIN_S,
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        """Delete what nothing has needed for a day, unless it is not known for certain what is needed.

        The world of the newest cycle may lack a job that was queued a moment ago: what it reads had a name then.

        Raises:
            StoreError: nothing is deleted.
        """
        world = self._world()
        if world is None or world.unreadable or not self._may_delete():
            return
        needed, listings, now = read_by_jobs(world), listings_read_by_jobs(world), self._wall.now()
        done = await self._threads.run(lambda: self._datasets.collect(needed, now, listings=listings))
        if done.objects:
            self._log.info("data.swept", objects=done.objects, bytes=done.bytes)


def read_by_jobs(world: World) -> frozenset[str]:
    """Return the hashes of the datasets that jobs read which have not ended."""
    return frozenset(one.sha256 for one in _sources(world) if one.sha256 is not None and not one.is_elsewhere)


def listings_read_by_jobs(world: World) -> frozenset[str]:
    """Return the hashes of the lists of files elsewhere that jobs read which have not ended."""
    return frozenset(one.sha256 for one in _sources(world) if one.sha256 is not None and one.is_listed)


def _sources(world: World) -> Iterator[DataSource]:
    return (one for job in world.jobs.values() if not job.state.is_final for one in job.spec.data)
