"""Which chunks the store has already, so that no byte is sent twice: not after an interruption, not for a new name."""

from __future__ import annotations

import threading


class KnownChunks:
    """Content hash to full key. Chunks of this attempt are remembered on disk, for a runner that is started again."""

    def __init__(self, path: str, prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self._lock = threading.Lock()
        self._keys: dict[str, str] = {}
        self._under_way: dict[str, threading.Event] = {}
        self._load()

    def learn(self, sha256: str, key: str) -> None:
        """The store has this chunk under this key (of an earlier attempt, say).

        A chunk of another job, from whose checkpoint this one began, is not this job's to refer to: it is sent again.
        """
        if not key.startswith(self._prefix.partition("/attempts/")[0] + "/attempts/"):
            return
        with self._lock:
            self._keys.setdefault(sha256, key)

    def claim(self, sha256: str) -> str | None:
        """The key, if the store has the chunk; `None` gives the caller the duty to send it and then call `sent`.

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

    def sent(self, sha256: str, key: str) -> None:
        """The claimed chunk is in the store."""
        with self._lock:
            self._keys[sha256] = key
            self._under_way.pop(sha256).set()
        try:
            # One short line per write: it is whole or, at the very end after a crash, ignored.
            with open(self._path, "a", encoding="ascii") as stream:
                stream.write("%s %s\n" % (sha256, self._prefix))
        except OSError:
            return  # it only saves sending again after a restart

    def failed(self, sha256: str) -> None:
        """The claimed chunk was not sent; another may try."""
        with self._lock:
            self._under_way.pop(sha256).set()

    def _load(self) -> None:
        try:
            with open(self._path, encoding="ascii", errors="replace") as stream:
                lines = stream.read().split("\n")[:-1]
        except OSError:
            return
        for line in lines:
            sha256, _, prefix = line.partition(" ")
            if len(sha256) == 64 and prefix == self._prefix:
                self._keys[sha256] = "%sdata/%s" % (prefix, sha256)
