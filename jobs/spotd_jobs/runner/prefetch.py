"""The newest checkpoint, fetched while the image that will restore it is still on its way.

Where a machine pulls the job's image itself, it starts the runner once more beside that (`SPOTD_PREFETCH`): each chunk,
verified, goes to a file that bears its hash. The restore takes what it finds, verifies it again and fetches the rest.
This reports nothing, locks nothing and ends nothing; whatever goes wrong here only leaves more to the restore.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from typing import Any, Callable, Iterator

from spotd_jobs.runner import manifest
from spotd_jobs.runner.store import NotCurrent, first_grant
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import MANIFEST_BYTES_MAX, Unreadable, lock, log_line, reason_of, remove, write_whole

VARIABLE = "SPOTD_PREFETCH"
_FOLDER = "prefetch"
_OVER = "prefetch-over"
_LOCK = "prefetch-lock"
_CHUNK_BYTES_MAX = 256 * 1024 * 1024
_CONNECTIONS = 4
_TRIES = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Prefetch:
    """What was prefetched into this home, for the restore."""

    def __init__(self, home: str) -> None:
        self._home = home

    def begin(self) -> None:
        """From here on the restore fetches by itself; two that fetch the same would halve the speed of both."""
        try:
            write_whole(os.path.join(self._home, _OVER), b"")
        except OSError as error:
            log_line("the prefetch can not be stopped: " + reason_of(error))

    def take(self, sha256: str, size: int, block: memoryview, write: Callable[[memoryview], None]) -> bool:
        """Whether this chunk, and nothing else, went through `block` to `write`. It can be taken once."""
        path = os.path.join(self._home, _FOLDER, sha256)
        hashing, left = hashlib.sha256(), size
        try:
            with open(path, "rb", buffering=0) as stream:
                while left:
                    count = stream.readinto(block[: min(left, len(block))])
                    if not count:
                        return False
                    hashing.update(block[:count])
                    write(block[:count])
                    left -= count
            os.remove(path)
        except OSError:
            return False
        return hashing.hexdigest() == sha256

    def size(self) -> int:
        """Bytes of the disk that are free again once all of it was taken."""
        total = 0
        try:
            with os.scandir(os.path.join(self._home, _FOLDER)) as entries:
                for entry in entries:
                    total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            return 0
        return total

    def end(self) -> None:
        """Nothing of it is left on the disk."""
        remove(os.path.join(self._home, _FOLDER))


def prefetch_newest(grant_url: str, home: str) -> None:
    """Fetch what can be had of the newest checkpoint for the restore, unless that has begun meanwhile."""
    held = lock(os.path.join(home, _LOCK))
    if held is None or _is_over(home):
        return
    try:
        grant = first_grant(grant_url, lambda seconds: _wait(home, seconds))
    except NotCurrent as why:
        log_line("nothing is prefetched: %s" % why)
        return
    offers = grant.raw.get("restore") or []
    if not offers:
        return
    os.makedirs(os.path.join(home, _FOLDER), mode=0o700, exist_ok=True)
    Fetching(offers[0], home, int(grant.transfer.get("connections") or _CONNECTIONS)).run()
    if _is_over(home):
        # The restore is at work or done: what was on its way here when it began is of no use to it.
        remove(os.path.join(home, _FOLDER))


class Fetching:
    """One checkpoint's chunks, by several connections, until all are there, one can not be had, or it is over."""

    def __init__(self, offer: dict[str, Any], home: str, connections: int) -> None:
        self._offer = offer
        self._home = home
        self._connections = connections
        self._lock = threading.Lock()
        self._failed = False

    def run(self) -> None:
        waiting = self._chunks()
        threads = [threading.Thread(target=self._work, args=(waiting,)) for _ in range(max(1, self._connections))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _chunks(self) -> Iterator[dict[str, Any]]:
        try:
            data = web.read(self._offer["manifest"]["url"], MANIFEST_BYTES_MAX)
        except web.WebError as error:
            log_line("nothing is prefetched: its manifest: %s" % error)
            return
        if hashlib.sha256(data).hexdigest() != self._offer["manifest"]["sha256"]:
            return  # the restore reports it
        seen = set()
        try:
            files = manifest.read(data)["files"]
        except Unreadable:
            return  # the restore reports it, too
        for entry in files:
            for chunk in entry["chunks"]:
                if chunk["sha256"] not in seen and _SHA256.fullmatch(chunk["sha256"]):
                    seen.add(chunk["sha256"])
                    yield chunk

    def _work(self, waiting: Iterator[dict[str, Any]]) -> None:
        buffer = bytearray(0)
        try:
            while not self._failed and not _is_over(self._home):
                with self._lock:
                    chunk = next(waiting, None)
                if chunk is None or not 0 < chunk["size"] <= _CHUNK_BYTES_MAX:
                    return
                if len(buffer) < chunk["size"]:
                    buffer = bytearray(chunk["size"])
                data = memoryview(buffer)[: chunk["size"]]
                if not self._fetch(chunk, data):
                    self._failed = True
                    return
                path = os.path.join(self._home, _FOLDER, chunk["sha256"])
                if not os.path.exists(path):
                    write_whole(path, data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._failed = True
            log_line("no more is prefetched: " + reason_of(error))
        finally:
            web.drop_connections()

    def _fetch(self, chunk: dict[str, Any], place: memoryview) -> bool:
        url = chunk_url(self._offer, chunk["key"])
        for _ in range(_TRIES if url else 0):
            hashing = hashlib.sha256()
            try:
                web.read_blocks(str(url), len(place), place, hashing.update)
            except web.WebError as error:
                log_line("prefetch: %s" % error)
                if _wait(self._home, 1.0):
                    return False
                continue
            if hashing.hexdigest() == chunk["sha256"]:
                return True
        return False


def chunk_url(offer: dict[str, Any], key: str) -> str | None:
    """Where the offer lets this chunk be read, if it does."""
    url = (offer.get("chunks") or {}).get(key)
    if url:
        return str(url)
    if offer.get("chunks_base"):
        from urllib.parse import quote

        return str(offer["chunks_base"]) + quote(key, safe="/-_.~")
    return None


def _is_over(home: str) -> bool:
    return os.path.exists(os.path.join(home, _OVER))


def _wait(home: str, seconds: float) -> bool:
    threading.Event().wait(seconds)
    return _is_over(home)
