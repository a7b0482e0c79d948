"""The restore: the newest checkpoint whose every chunk matches its hash, or the next older one, or none.

The bytes are gathered in a hidden folder beside their place, and only when every chunk of an entry was verified is it
renamed to its real name: whatever kills this in between, no framework finds half a checkpoint or an unverified byte.

A chunk passes through a block of bounded size: it is received, hashed and written from there. A chunk that turns out to
be bad has been written then, and is written over by the next try, or removed with all that is hidden.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
from typing import Any, Callable, NamedTuple, TypeVar

from spotd_jobs.runner import manifest
from spotd_jobs.runner.complete import is_bound
from spotd_jobs.runner.manifest import DIR, FILE, LINK
from spotd_jobs.runner.prefetch import Prefetch, chunk_url
from spotd_jobs.wire.client import sinks, web
from spotd_jobs.wire.client.web import Backoff, steady

# Where the bytes of a chunk belong on this machine's disk: one place in a large file, or many small files.


class DiskFailed(Exception):
    """A failure of this machine's own disk.

    As an OSError it would pass for the store's, which is asked again.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error


class Placement(NamedTuple):
    """Where a part of a chunk belongs: `length` bytes of it from `start` on, at `offset` of the file."""

    path: str
    offset: int
    start: int
    length: int


class ChunkWriter:
    """Where the bytes of one chunk go, block by block."""

    def __init__(self, places: list[Placement]) -> None:
        self._places = places
        # A chunk of one large file is written in many blocks; one of many small files in few.
        self._descriptor = os.open(places[0].path, os.O_WRONLY) if len(places) == 1 else -1
        self.written = 0

    def begin(self) -> None:
        """Begin a chunk: the next bytes are its first."""
        self.written = 0

    def write(self, data: memoryview) -> None:
        """Write the next bytes of the chunk to all files they belong to.

        Raises:
            DiskFailed
        """
        begin, end = self.written, self.written + len(data)
        try:
            for place in self._places:
                first, last = max(begin, place.start), min(end, place.start + place.length)
                if first < last:
                    self._put(place, data[first - begin : last - begin], place.offset + first - place.start)
        except OSError as error:
            raise DiskFailed(error) from None
        self.written = end

    def _put(self, place: Placement, data: memoryview, offset: int) -> None:
        descriptor = self._descriptor if self._descriptor >= 0 else os.open(place.path, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done : done + _WRITE_BYTES], offset + done)
        finally:
            if descriptor != self._descriptor:
                os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


# The checkpoint folder at a start of the runner: empty, and what was in it put aside.
#
# Several machines of one attempt may share it, on a disk of all of them. So what each of them hides there has its rank
# in its name, and none touches what another hides. The first machine leaves a mark of the attempt: from then on the
# others clear nothing, since one that starts again, or for another, may come while the first one still stores what was
# saved last.


_ASIDE = sinks.TEMPORARY + "before-"
_RESTORING = sinks.TEMPORARY + "restore-"
_FIRST = sinks.TEMPORARY + "first"


def _hidden(beginning: str, rank: int) -> str:
    """Return how names begin of what the machine of this rank hides."""
    return "%sm%d-" % (beginning, rank) if rank else beginning


def _is_of(name: str, beginning: str, rank: int) -> bool:
    own = _hidden(beginning, rank)
    return name.startswith(own) and (rank != 0 or not name.startswith(own + "m"))


def clear_aside(folder: str, boot: int, attempt: str = "", rank: int = 0) -> None:
    """Make the folder, empty: a checkpoint of unknown state is never resumed from.

    What was there is not deleted but moved beside the folder, until the next start of the runner. (Some training
    scripts refuse a folder that holds anything, so it stays inside, hidden, only where there is no other way.)

    Args:
        attempt: names the attempt where several machines work at it, one of which this is; else empty.

    Raises:
        OSError: the folder can not be made or written.
    """
    os.makedirs(folder, exist_ok=True)
    if attempt and not rank:
        _leave_mark(folder, attempt)
    elif attempt and any(_read(place) == attempt for place in _marks(folder)):
        return
    remove_aside(folder, rank)
    names = os.listdir(folder)
    for name in names:
        is_kept = attempt and (name == _FIRST or name.startswith((_RESTORING, _ASIDE)))
        if name.startswith(sinks.TEMPORARY) and not is_kept:
            sinks.remove(os.path.join(folder, name))
    rest = [name for name in names if not name.startswith(sinks.TEMPORARY)]
    if not rest:
        return
    own = "%s%d" % (_hidden(_ASIDE, rank), boot)
    try:
        _move(folder, rest, folder + own)
    except OSError:
        left = [name for name in rest if os.path.lexists(os.path.join(folder, name))]
        _move(folder, left, os.path.join(folder, own))


def remove_aside(folder: str, rank: int = 0) -> None:
    """Nothing is left of what earlier starts of the runner put beside the folder, or hidden inside it."""
    parent, own_name = os.path.split(folder)
    for place, beginning in ((parent, own_name + _ASIDE), (folder, _ASIDE)):
        for name in os.listdir(place):
            if _is_of(name, beginning, rank):
                sinks.remove(os.path.join(place, name))


def _move(folder: str, names: list[str], into: str) -> None:
    os.mkdir(into, 0o700)
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another machine moved it
            os.rename(os.path.join(folder, name), os.path.join(into, name))


def _marks(folder: str) -> tuple[str, str]:
    """Return where the mark may be: beside the folder, or inside where that is a disk of its own."""
    return folder + _FIRST, os.path.join(folder, _FIRST)


def _leave_mark(folder: str, attempt: str) -> None:
    beside, inside = _marks(folder)
    for place in (beside, inside) if os.path.ismount(os.path.realpath(folder)) else (beside,):
        with contextlib.suppress(OSError), open(place, "w", encoding="utf-8") as stream:
            stream.write(attempt)


def _read(place: str) -> str:
    try:
        with open(place, encoding="utf-8", errors="replace") as stream:
            return stream.read(_MARK_CHARS_MAX)
    except OSError:
        return ""


_DISK_BLOCK_BYTES = 4096
_ROOM_LEFT_BYTES = 16 * 1024 * 1024
_PAUSE_S = 0.2
_PAUSE_MAX_S = 10.0
_BAD_TRIES = 3
_DENIED_TRIES = 6
_MARK_CHARS_MAX = 4096
_MOVES_MAX = 20
_BLOCK_BYTES = 4 * 1024 * 1024  # smaller ones cost more: threads that meet at the interpreter's lock, not the cache
_WRITE_BYTES = 64 * 1024  # in larger writes ext4 asks for as large pieces of memory, which may take twice as long
_BLOCKS_BYTES_MAX = 64 * 1024 * 1024
_CONNECTIONS_FACTOR = 2  # over those of an upload, which holds whole chunks
_Got = TypeVar("_Got")


class Cancelled(Exception):
    """There is no more need for the restore."""


class BadCheckpoint(Exception):
    """A checkpoint that can not be restored as it was saved. The text states why."""


class NoRoom(BadCheckpoint):
    """A checkpoint that does not fit on this machine's disk; on another it will."""


class ByAnotherNumber(Exception):
    """A checkpoint that only as many machines can load as wrote it. To pass it over would put the job back."""


class Restored(NamedTuple):
    """What is in the checkpoint folder now, under the name `entry`."""

    name: str
    entry: str
    path: str
    step: int | None
    bytes: int
    seconds: float
    key: str
    manifest_sha256: str


class SkippedCheckpoint(NamedTuple):
    """A checkpoint that was passed over."""

    name: str
    reason: str


class Load(NamedTuple):
    """One chunk and all places it belongs to."""

    chunk: dict[str, Any]
    places: list[Placement]


class RestoreRun:
    """One try at everything a grant offers to restore, newest first.

    Args:
        stopped: asked between chunks; `pause` sleeps and returns the same.
        permitted: whether the grant should still be good. While it is not, a refusal proves nothing about a checkpoint.
        prefetch: what was fetched before this began.
        nodes, rank: how many machines restore it side by side, and which of them this is.
    """

    def __init__(
        self,
        offers: Callable[[], list[dict[str, Any]]],
        folder: str,
        connections: int,
        pause: Callable[[float], bool],
        stopped: Callable[[], bool],
        permitted: Callable[[], bool],
        prefetch: Prefetch | None = None,
        nodes: int = 1,
        rank: int = 0,
    ) -> None:
        self._prefetch = prefetch
        self._nodes = nodes
        self._rank = rank
        self._offers = offers
        self._folder = folder
        self._connections = connections
        self._pause = pause
        self._stopped = stopped
        self._permitted = permitted
        self._offer: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.name: str | None = None
        self.done = 0
        self.total = 0
        self.fallbacks: list[SkippedCheckpoint] = []

    def run(self) -> Restored | None:
        """Put the newest good one in place, or return that there was none.

        Raises:
            Cancelled
            DiskFull: there is one, but none fits on this disk.
            ByAnotherNumber
            OSError: this machine's own disk failed; no other checkpoint would fare better.
        """
        if self._prefetch is not None:
            self._prefetch.begin()
        try:
            return self._run()
        finally:
            if self._prefetch is not None:
                self._prefetch.end()

    def _run(self) -> Restored | None:
        for name in os.listdir(self._folder):
            if _is_of(name, _RESTORING, self._rank):
                sinks.remove(os.path.join(self._folder, name))
        no_room = ""
        for offer in list(self._offers()):
            self._offer = offer
            try:
                return self._restore()
            except BadCheckpoint as bad:
                no_room = no_room or (str(bad) if isinstance(bad, NoRoom) else "")
                if self._prefetch is not None:
                    self._prefetch.end()  # it is of the newest, and takes up the room that an older one needs
                self.fallbacks.append(SkippedCheckpoint(str(offer.get("name")), sinks.clean(str(bad))))
                sinks.log_line(
                    "checkpoint %s can not be used: %s" % (sinks.clean(str(offer.get("name"))), sinks.clean(str(bad)))
                )
        self.name = None
        if no_room:
            # To start afresh would put the job back by all that is stored.
            raise sinks.DiskFull("no checkpoint fits on the disk: " + no_room)
        return None

    def _restore(self) -> Restored:
        began = steady()
        self.name, self.done, self.total = str(self._offer["name"]), 0, 0
        pinned = self._offer["manifest"]["sha256"]
        document = _check(self._fetch("its manifest", self._get_manifest, pinned), self.name)
        self.total = document["bytes"]
        wrote = document.get("nodes")
        if wrote and wrote != self._nodes and is_bound([entry["path"] for entry in document["files"]]):
            words = "DeepSpeed loads checkpoint %s by as many machines as saved it: by %d, and here are %d"
            raise ByAnotherNumber(words % (sinks.clean(self.name), wrote, self._nodes))
        entry_name = str(document.get("entry") or self.name)
        work = os.path.join(self._folder, _hidden(_RESTORING, self._rank) + str(os.getpid()))
        sinks.remove(work)
        self._require_room(document)
        try:
            os.mkdir(work, 0o700)
            self._fill(work, document)
            self._move_in(work, entry_name)
        except OSError as error:
            if sinks.is_full(error):
                raise NoRoom("the disk was full before all of it was there") from None
            raise
        finally:
            sinks.remove(work)
        return Restored(
            self.name,
            entry_name,
            os.path.join(self._folder, entry_name),
            document.get("step"),
            self.total,
            round(steady() - began, 3),
            self._offer["manifest"]["key"],
            pinned,
        )

    def _require_room(self, document: dict[str, Any]) -> None:
        """Require that it fits on the disk, as far as that can be known before.

        Raises:
            NoRoom
        """
        blocks = sum(-(-int(entry["size"]) // _DISK_BLOCK_BYTES) + 1 for entry in document["files"])
        needed = blocks * _DISK_BLOCK_BYTES + _ROOM_LEFT_BYTES
        if self._room(needed) < needed:
            remove_aside(self._folder, self._rank)  # what was kept of an earlier start is worth less than going on
        free = self._room(needed)
        if free < needed:
            raise NoRoom("it needs %.1f GB of disk and %.1f GB are free" % (needed / 1e9, free / 1e9))

    def _room(self, unknown: int) -> int:
        free = sinks.free_bytes(self._folder)
        return unknown if free is None else free + (self._prefetch.size() if self._prefetch is not None else 0)

    def _fill(self, work: str, document: dict[str, Any]) -> None:
        loads: dict[str, Load] = {}
        made: set[str] = set()
        for entry in document["files"]:
            place = os.path.join(work, entry["path"])
            folder = place if entry["type"] == DIR else os.path.dirname(place)
            try:
                if folder not in made:
                    made.add(folder)
                    os.makedirs(folder, exist_ok=True)
                if entry["type"] == FILE:
                    # Never over another: some disks do not distinguish all names that others do.
                    with open(place, "xb") as stream:
                        stream.truncate(entry["size"])
            except OSError as error:
                if sinks.is_full(error):
                    raise
                raise BadCheckpoint(
                    "this disk can not hold %s: %s" % (sinks.ascii_text(entry["path"])[-80:], sinks.reason_of(error))
                ) from None
            offset = 0
            for chunk in entry["chunks"]:
                load = loads.setdefault(chunk["key"], Load(chunk, []))
                load.places.append(Placement(place, offset, chunk["offset"], chunk["length"]))
                offset += chunk["length"]
        self._fetch_all(list(loads.values()))
        for entry in document["files"]:
            place = os.path.join(work, entry["path"])
            if entry["type"] == LINK:
                os.symlink(entry["target"], place)
            elif entry["type"] == FILE:
                os.chmod(place, entry["mode"] | 0o400)
                os.utime(place, ns=(entry["mtime_ns"], entry["mtime_ns"]))

    def _move_in(self, work: str, entry_name: str) -> None:
        # The entry itself comes last: pointers to something absent do no harm.
        for name in sorted(os.listdir(work), key=lambda name: name == entry_name):
            target = os.path.join(self._folder, name)
            for move in range(_MOVES_MAX):
                sinks.remove(target)
                try:
                    os.rename(os.path.join(work, name), target)
                    break
                except OSError as error:
                    # Another machine that restores the same into a folder of both was faster.
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or move == _MOVES_MAX - 1:
                        raise

    def _fetch_all(self, loads: list[Load]) -> None:
        waiting = iter(loads)
        self._error = None
        workers = max(1, min(self._connections * _CONNECTIONS_FACTOR, len(loads)))
        block = min(_BLOCK_BYTES, _BLOCKS_BYTES_MAX // workers)
        threads = [
            threading.Thread(target=self._work, args=(waiting, block), name="restore-%d" % number, daemon=True)
            for number in range(1, workers)
        ]
        for thread in threads:
            thread.start()
        self._work(waiting, block)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, waiting: Any, block_bytes: int) -> None:
        block = memoryview(bytearray(block_bytes))
        try:
            while self._error is None:
                with self._lock:
                    load = next(waiting, None)
                if load is None:
                    return
                self._bring(load, block)
                with self._lock:
                    self.done += sum(place.length for place in load.places)
        except BaseException as error:  # noqa: BLE001 - carried to `_fetch_all`, which raises it in its caller's thread
            self._error = self._error or error
        finally:
            web.drop_connections()

    def _bring(self, load: Load, block: memoryview) -> None:
        """Bring the chunk to all its places, verified by its hash."""
        size, sha256 = load.chunk["size"], load.chunk["sha256"]
        places = ChunkWriter(load.places)
        try:
            if self._prefetch is not None and self._prefetch.take(sha256, size, block, places.write):
                return

            def get(hashing: hashlib._Hash) -> int:
                places.begin()

                def take(data: memoryview) -> None:
                    hashing.update(data)
                    places.write(data)

                web.read_blocks(self._url_of(load.chunk["key"]), size, block, take)
                return places.written

            if self._fetch("a chunk", get, sha256) != size:
                raise BadCheckpoint("a chunk has another size than its manifest says")
        except DiskFailed as failed:
            raise failed.error from None
        finally:
            places.close()

    def _get_manifest(self, hashing: hashlib._Hash) -> bytes:
        data = web.read(self._offer["manifest"]["url"], sinks.MANIFEST_BYTES_MAX)
        hashing.update(data)
        return data

    def _url_of(self, key: str) -> str:
        # Always from the newest grant: a long restore may outlive the URLs it began with.
        for offer in [*self._offers(), self._offer]:
            if (
                offer["name"] == self._offer["name"]
                and offer["manifest"]["sha256"] == self._offer["manifest"]["sha256"]
            ):
                url = chunk_url(offer, key)
                if url is not None:
                    return url
        raise BadCheckpoint("the grant does not permit to read one of its chunks")

    def _fetch(self, what: str, get: Callable[[hashlib._Hash], _Got], sha256: str) -> _Got:
        """Return what `get` got when all it hashed has this hash.

        Absence and wrong content are believed after a few tries, silence is not.
        """
        pauses, bad, denied = Backoff(_PAUSE_S, _PAUSE_MAX_S), 0, 0
        while True:
            if self._stopped():
                raise Cancelled()
            try:
                hashing = hashlib.sha256()
                got = get(hashing)
                if hashing.hexdigest() == sha256:
                    return got
                why, bad = "%s is not what its hash says" % what, bad + 1
            except web.Missing:
                why, bad = "%s is not there any more" % what, bad + 1
            except web.Changed as changed:
                why, bad = str(changed), bad + 1
            except web.TooLarge:
                why, bad = "%s is larger than its manifest says" % what, bad + 1
            except web.Denied:
                # A store that does not let its objects be listed answers "refused" for absent ones, too.
                why, denied = "%s may not be read" % what, denied + (1 if self._permitted() else 0)
            except web.WebError as error:
                why = "%s: %s" % (what, error)
                self._note_silence(why)
            if bad >= _BAD_TRIES or denied >= _DENIED_TRIES:
                raise BadCheckpoint(why)
            pause_s = pauses.next_s()
            if self._pause(pause_s if not bad else _PAUSE_S / 4):
                raise Cancelled()

    def _note_silence(self, why: str) -> None:
        """Take note of a try that had no answer. The store is waited for until the lease of the attempt ends."""


def _check(data: bytes, name: str) -> dict[str, Any]:
    """Return the manifest, if writing it out stays inside. The daemon has checked far more; this host checks again."""
    try:
        document = manifest.read(data)
        for entry in document["files"]:
            parts = entry["path"].split("/")
            if not sinks.is_plain(entry["path"]) or "\0" in entry["path"]:
                raise BadCheckpoint("its manifest holds a path that leads outside")
            if entry["type"] == FILE and sum(chunk["length"] for chunk in entry["chunks"]) != entry["size"]:
                raise BadCheckpoint("its manifest does not add up")
            if entry["type"] == LINK:
                climbs, rest = sinks.climb(entry["target"])
                if entry["target"].startswith("/") or climbs >= len(parts) or ".." in rest:
                    raise BadCheckpoint("its manifest holds a link that leads outside")
        if "/" in (document.get("entry") or "") or document["name"] != name:
            raise BadCheckpoint("its manifest speaks of something else")
        document["bytes"] += 0
    except sinks.Unreadable as error:
        raise BadCheckpoint(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadCheckpoint("its manifest can not be read") from None
    return document
