"""Which chunks an accepted manifest has already shown to be in the store, in a bounded amount of memory.

A runner counts on a chunk that its attempt sent only while one of the `WINDOW` newest manifests names it, so nothing
older has to be remembered; and sixteen bytes are enough to know a chunk and its size again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from spotd_jobs.wire.client.manifest_text import WINDOW

_MASK = 2**64 - 1


def digest(key: str) -> int:
    """Return sixty-four bits that cannot be foreseen outside this process."""
    return hash(key) & _MASK


class ProvedChunks:
    """The chunks of the newest accepted manifests, with their sizes."""

    def __init__(self, manifests: int = WINDOW) -> None:
        self._known: deque[tuple[array[int], array[int]]] = deque(maxlen=manifests)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.size_of(key) is not None

    def size_of(self, key: str) -> int | None:
        """Return the size that was found of this chunk, `None` where it is not among the newest."""
        wanted = digest(key)
        for digests, sizes in self._known:
            place = bisect_left(digests, wanted)
            if place < len(digests) and digests[place] == wanted:
                return sizes[place]
        return None

    def add(self, sizes: Mapping[str, int]) -> None:
        """Remember the chunks of one more accepted manifest; those of the oldest are forgotten."""
        pairs = sorted((digest(key), size) for key, size in sizes.items())
        self._known.append((array("Q", [key for key, _ in pairs]), array("Q", [size for _, size in pairs])))

    @property
    def bytes(self) -> int:
        """Return how much memory it takes."""
        return sum(2 * digests.itemsize * len(digests) for digests, _ in self._known)
