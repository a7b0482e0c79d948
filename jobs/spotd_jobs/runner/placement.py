"""Where the bytes of a chunk belong on this machine's disk: one place in a large file, or many small files."""

from __future__ import annotations

import os
from typing import NamedTuple


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
                done += os.pwrite(descriptor, data[done:], offset + done)
        finally:
            if descriptor != self._descriptor:
                os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
