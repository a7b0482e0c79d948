"""Which chunks the store has already, so that no byte is sent twice: not after an interruption, not for a new name.

Only chunks of the own attempt count. The host of an earlier one may still have write permission for a while, and what
it can write over must not be part of a checkpoint of this one: its first checkpoint is sent whole. This host may be
dead and still write, too, so small chunks (`REUSED_MIN`) are sent for each checkpoint anew: to write over one spoils
one checkpoint, not all that are kept.

The daemon deletes what old checkpoints of a running attempt leave behind, and it must never meet a runner that still
counts on it. So what this attempt sent is counted on only while it is young: sent after the third newest manifest was
published, or named by one of the three newest (`WINDOW`, the daemon's rule too). The rest is forgotten *before* the
next manifest goes out, and when its content comes again it is sent again, under a key that was never used (every
upload brings a mark of its own), so that a late deletion of the old one can not hit it.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from spotd_jobs.wire.client.files import write_whole
from spotd_jobs.wire.client.manifest_text import WINDOW

REUSED_MIN = 1024 * 1024
"""Bytes. A chunk of fewer costs next to nothing to send again."""


def new_mark() -> str:
    """Return what the names of an upload's chunks end in: no other upload of any attempt ends in the same."""
    return "-" + os.urandom(4).hex()


class ChunkIndex:
    """Content hash to full key. Chunks of this attempt are remembered on disk, for a runner that is started again."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._last: dict[str, int] = {}
        """Of this attempt's own: after how many manifests it was sent, or last named by one."""
        self._small: set[str] = set()
        """Of these, the ones that no other checkpoint may name."""
        self._count = 0
        self._under_way: dict[str, threading.Event] = {}
        self._load()

    def claim(self, sha256: str) -> str | None:
        """Return the key, if the store has the chunk; `None` gives the caller the duty to send it and then call `sent`.

        Waits while another thread sends the same chunk.
        """
        while True:
            with self._lock:
                key = self._keys.get(sha256)
                if key is not None:
                    return key
                under_way = self._under_way.get(sha256)
                if under_way is None:
                    self._under_way[sha256] = threading.Event()
                    return None
            under_way.wait()

    def sent(self, sha256: str, key: str, size: int) -> None:
        """Record that the claimed chunk of so many bytes is in the store."""
        with self._lock:
            if size < REUSED_MIN:
                self._small.add(sha256)
            self._keys[sha256] = key
            self._last[sha256] = self._count
            self._under_way.pop(sha256).set()
            line = self._line(sha256)
        try:
            # One short line per write: it is whole or, at the very end after a crash, ignored.
            with open(self._path, "a", encoding="ascii") as stream:
                stream.write(line)
        except OSError:
            return  # it only saves sending again after a restart

    def failed(self, sha256: str) -> None:
        """Record that the claimed chunk was not sent; another thread may try."""
        with self._lock:
            self._under_way.pop(sha256).set()

    def publishing(self) -> None:
        """Forget what is too old to be counted on once the next manifest is published.

        Raises:
            OSError: this could not be made to last, so the manifest must not be published. A full disk is no such case:
                then the file goes, and a runner that is started again sends everything again.
        """
        with self._lock:
            self._count += 1
            old = [s for s, last in self._last.items() if last <= self._count - WINDOW or s in self._small]
            for sha256 in old:
                del self._keys[sha256], self._last[sha256]
            self._small.clear()
            try:
                self._rewrite()
            except OSError:
                os.remove(self._path)

    def published(self, files: list[dict[str, Any]]) -> None:
        """Record that the manifest of these files is in the store: what it names counts as new again."""
        with self._lock:
            for entry in files:
                for chunk in entry["chunks"]:
                    if chunk["key"].startswith(self._prefix) and chunk["size"] >= REUSED_MIN:
                        self._keys[chunk["sha256"]] = chunk["key"]
                        self._last[chunk["sha256"]] = self._count
            try:
                self._rewrite()
            except OSError:
                return  # the file holds less than is true, which only costs sending again

    def _rewrite(self) -> None:
        lines = ["%d\n" % self._count, *(self._line(sha256) for sha256 in self._last)]
        write_whole(self._path, "".join(lines).encode())

    def _line(self, sha256: str) -> str:
        return "%s %s %d %d\n" % (sha256, self._keys[sha256], self._last[sha256], sha256 in self._small)

    def _load(self) -> None:
        try:
            with open(self._path, encoding="ascii", errors="replace") as stream:
                lines = stream.read().split("\n")[:-1]
        except OSError:
            return
        for line in lines:
            if line.isdigit():
                self._count = int(line)
            sha256, _, rest = line.partition(" ")
            key, _, last = rest.rpartition(" ")[0].rpartition(" ")
            if len(sha256) == 64 and key.startswith(self._prefix) and last.isdigit():
                self._keys[sha256], self._last[sha256] = key, int(last)
                if rest.endswith(" 1"):
                    self._small.add(sha256)
        self._count = max(self._count, *self._last.values(), 0)
