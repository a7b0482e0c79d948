"""Brings back the newest checkpoint whose every chunk is what its hash says, or the next older one, or none.

The bytes are gathered in a hidden folder beside their place, and only when every chunk of an entry was verified is it
renamed to its real name: whatever kills this in between, no framework finds half a checkpoint or an unverified byte.

A chunk passes through a block of bounded size: it is received, hashed and written from there. A chunk that turns out to
be bad has been written then, and is written over by the next try, or removed with all that is hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, TypeVar

from spotd_jobs.runner import web
from spotd_jobs.runner.ahead import Ahead, chunk_url
from spotd_jobs.runner.clocks import steady
from spotd_jobs.runner.files import TEMPORARY, remove
from spotd_jobs.runner.known import KnownChunks
from spotd_jobs.runner.say import clean, say
from spotd_jobs.runner.tree import DIR, FILE, LINK

if TYPE_CHECKING:
    from hashlib import _Hash

_MANIFEST_BYTES_MAX = 16 * 1024 * 1024
_PAUSE_S = 0.2
_PAUSE_MAX_S = 10.0
_BAD_TRIES = 3
_DENIED_TRIES = 6
_RESTORING = TEMPORARY + "restore-"
_ASIDE = TEMPORARY + "before-"
_BLOCK_BYTES = 4 * 1024 * 1024  # smaller ones cost more: threads that meet at the interpreter's lock, not the cache
_BLOCKS_BYTES_MAX = 64 * 1024 * 1024
_CONNECTIONS_FACTOR = 2  # over those of an upload, which holds whole chunks
_Got = TypeVar("_Got")


class Cancelled(Exception):
    """There is no more need for the restore."""


class BadCheckpoint(Exception):
    """This checkpoint can not be restored as it was saved. The text says why."""


class _DiskFailed(Exception):
    """This machine's own disk failed. (As an OSError it would pass for the store's, which is asked again.)"""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error


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


class Fallback(NamedTuple):
    """A checkpoint that was passed over."""

    name: str
    reason: str


class _Piece(NamedTuple):
    path: str
    offset: int
    chunk: dict[str, Any]


class Restore:
    """One try at everything a grant offers to restore, newest first.

    Args:
        stopped: asked between chunks; `pause` sleeps and tells the same.
        permitted: whether the grant should still be good. While it is not, a refusal says nothing about a checkpoint.
        ahead: what was fetched before this began.
    """

    def __init__(
        self,
        offers: Callable[[], list[dict[str, Any]]],
        folder: str,
        known: KnownChunks,
        connections: int,
        pause: Callable[[float], bool],
        stopped: Callable[[], bool],
        permitted: Callable[[], bool],
        ahead: Ahead | None = None,
    ) -> None:
        self._ahead = ahead
        self._offers = offers
        self._folder = folder
        self._known = known
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
        self.fallbacks: list[Fallback] = []

    def run(self) -> Restored | None:
        """The newest good one is in place, or there was none.

        Raises:
            Cancelled
            OSError: this machine's own disk failed or is full; no other checkpoint would fare better.
        """
        if self._ahead is not None:
            self._ahead.begin()
        try:
            return self._run()
        finally:
            if self._ahead is not None:
                self._ahead.end()

    def _run(self) -> Restored | None:
        for name in os.listdir(self._folder):
            if name.startswith(_RESTORING):
                remove(os.path.join(self._folder, name))
        for offer in list(self._offers()):
            self._offer = offer
            try:
                return self._restore()
            except BadCheckpoint as bad:
                self.fallbacks.append(Fallback(str(offer.get("name")), clean(str(bad))))
                say("checkpoint %s can not be used: %s" % (clean(str(offer.get("name"))), clean(str(bad))))
        self.name = None
        return None

    def _restore(self) -> Restored:
        began = steady()
        self.name, self.done, self.total = str(self._offer["name"]), 0, 0
        pinned = self._offer["manifest"]["sha256"]
        manifest = _checked(self._fetch("its manifest", self._get_manifest, pinned), self.name)
        self.total = manifest["bytes"]
        entry_name = str(manifest.get("entry") or self.name)
        work = os.path.join(self._folder, _RESTORING + str(os.getpid()))
        remove(work)
        os.mkdir(work, 0o700)
        try:
            self._fill(work, manifest)
            self._move_in(work, entry_name)
        finally:
            remove(work)
        for entry in manifest["files"]:
            for chunk in entry["chunks"]:
                self._known.learn(chunk["sha256"], chunk["key"])
        return Restored(
            self.name,
            entry_name,
            os.path.join(self._folder, entry_name),
            manifest.get("step"),
            self.total,
            round(steady() - began, 3),
            self._offer["manifest"]["key"],
            pinned,
        )

    def _fill(self, work: str, manifest: dict[str, Any]) -> None:
        pieces = []
        for entry in manifest["files"]:
            place = os.path.join(work, entry["path"])
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if entry["type"] == DIR:
                os.makedirs(place, exist_ok=True)
            elif entry["type"] == FILE:
                with open(place, "wb") as stream:
                    stream.truncate(entry["size"])
                offset = 0
                for chunk in entry["chunks"]:
                    pieces.append(_Piece(place, offset, chunk))
                    offset += chunk["size"]
        self._fetch_all(pieces)
        for entry in manifest["files"]:
            place = os.path.join(work, entry["path"])
            if entry["type"] == LINK:
                os.symlink(entry["target"], place)
            elif entry["type"] == FILE:
                os.chmod(place, entry["mode"] | 0o400)
                os.utime(place, ns=(entry["mtime_ns"], entry["mtime_ns"]))

    def _move_in(self, work: str, entry_name: str) -> None:
        # The entry itself comes last: pointers to something absent harm nobody.
        for name in sorted(os.listdir(work), key=lambda name: name == entry_name):
            target = os.path.join(self._folder, name)
            remove(target)
            os.rename(os.path.join(work, name), target)

    def _fetch_all(self, pieces: list[_Piece]) -> None:
        waiting = iter(pieces)
        self._error = None
        workers = max(1, min(self._connections * _CONNECTIONS_FACTOR, len(pieces)))
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
                    piece = next(waiting, None)
                if piece is None:
                    return
                self._bring(piece, block)
                with self._lock:
                    self.done += piece.chunk["size"]
        except BaseException as error:  # noqa: BLE001 - carried to `_fetch_all`, which raises it in its caller's thread
            self._error = self._error or error
        finally:
            web.drop_connections()

    def _bring(self, piece: _Piece, block: memoryview) -> None:
        """The chunk is in its place in the file, and what its hash says."""
        size, sha256 = piece.chunk["size"], piece.chunk["sha256"]
        descriptor = os.open(piece.path, os.O_WRONLY)
        try:
            ahead = _Place(descriptor, piece.offset)
            if self._ahead is not None and self._ahead.take(sha256, size, block, ahead.write):
                return

            def get(hashing: _Hash) -> int:
                place = _Place(descriptor, piece.offset)

                def take(data: memoryview) -> None:
                    hashing.update(data)
                    place.write(data)

                web.read_blocks(self._url_of(piece.chunk["key"]), size, block, take)
                return place.written

            if self._fetch("a chunk", get, sha256) != size:
                raise BadCheckpoint("a chunk has another size than its manifest says")
        except _DiskFailed as failed:
            raise failed.error from None
        finally:
            os.close(descriptor)

    def _get_manifest(self, hashing: _Hash) -> bytes:
        data = web.read(self._offer["manifest"]["url"], _MANIFEST_BYTES_MAX)
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
        raise BadCheckpoint("the grant has no leave to read one of its chunks")

    def _fetch(self, what: str, get: Callable[[_Hash], _Got], sha256: str) -> _Got:
        """What `get` got when all it hashed has this hash.

        Absence and wrong content are believed after a few tries, silence is not.
        """
        pause_s, bad, denied = _PAUSE_S, 0, 0
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
                why, bad = "%s is gone from the store" % what, bad + 1
            except web.TooLarge:
                why, bad = "%s is larger than its manifest says" % what, bad + 1
            except web.Denied:
                # A store that does not let its objects be listed says "refused" of absent ones, too.
                why, denied = "%s may not be read" % what, denied + (1 if self._permitted() else 0)
            except web.WebError as error:
                why = "%s: %s" % (what, error)
            if bad >= _BAD_TRIES or denied >= _DENIED_TRIES:
                raise BadCheckpoint(why)
            if self._pause(pause_s if not bad else _PAUSE_S / 4):
                raise Cancelled()
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)


def _checked(data: bytes, name: str) -> dict[str, Any]:
    """The manifest, if writing it out stays inside. The daemon has checked far more; this host trusts nobody either."""
    try:
        manifest = json.loads(data)
        for entry in manifest["files"]:
            parts = entry["path"].split("/")
            if any(part in ("", ".", "..") or "\0" in part for part in parts):
                raise BadCheckpoint("its manifest holds a path that leads outside")
            if entry["type"] == FILE and sum(chunk["size"] for chunk in entry["chunks"]) != entry["size"]:
                raise BadCheckpoint("its manifest does not add up")
            if entry["type"] == LINK and (entry["target"].startswith("/") or _climbs(entry["target"]) >= len(parts)):
                raise BadCheckpoint("its manifest holds a link that leads outside")
        if "/" in (manifest.get("entry") or "") or manifest["schema"] != 1 or manifest["name"] != name:
            raise BadCheckpoint("its manifest speaks of something else")
        manifest["bytes"] += 0
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadCheckpoint("its manifest can not be read") from None
    result: dict[str, Any] = manifest
    return result


def _climbs(target: str) -> int:
    """How many levels a link's target climbs; endless if it climbs after it went down."""
    parts = target.split("/")
    count = 0
    while count < len(parts) and parts[count] == "..":
        count += 1
    return 1 << 30 if ".." in parts[count:] else count


class _Place:
    """Where a chunk goes, block by block."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self.written = 0

    def write(self, data: memoryview) -> None:
        """The next bytes of the chunk are in the file.

        Raises:
            _DiskFailed
        """
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], self._offset + self.written + done)
        except OSError as error:
            raise _DiskFailed(error) from None
        self.written += done


def clear_aside(folder: str, boot: int) -> None:
    """The folder exists and is empty: a checkpoint of unknown state is never resumed from.

    What was there is not deleted but moved beside the folder, until the next start of the runner. (Some training
    scripts refuse a folder that holds anything, so it stays inside, hidden, only where there is no other way.)

    Raises:
        OSError: the folder can not be made or written.
    """
    os.makedirs(folder, exist_ok=True)
    parent, own_name = os.path.split(folder)
    for name in os.listdir(parent):
        if name.startswith(own_name + _ASIDE):
            remove(os.path.join(parent, name))
    names = os.listdir(folder)
    for name in names:
        if name.startswith(TEMPORARY):
            remove(os.path.join(folder, name))
    rest = [name for name in names if not name.startswith(TEMPORARY)]
    if not rest:
        return
    try:
        _move(folder, rest, "%s%s%d" % (folder, _ASIDE, boot))
    except OSError:
        left = [name for name in rest if os.path.lexists(os.path.join(folder, name))]
        _move(folder, left, os.path.join(folder, "%s%d" % (_ASIDE, boot)))


def _move(folder: str, names: list[str], into: str) -> None:
    os.mkdir(into, 0o700)
    for name in names:
        os.rename(os.path.join(folder, name), os.path.join(into, name))
