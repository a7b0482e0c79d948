"""Packed answers, unpacked within a bound: a thousandth of the bytes on the line is enough to fill a small computer.

An unpacked answer costs more once it is parsed: an empty list takes three bytes of JSON and sixty of memory. So the
number of values is bounded, too, before any parser sees it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 256 * 1024
VALUES_MAX: Final = 1_500_000
"""Three times what a market of five thousand offers of a hundred fields has."""
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32


class BodyTooLarge(Exception):
    """An answer that is larger than any that makes sense, or packed in a way that was not asked for."""


def require_few_values(body: bytes) -> None:
    """Require that a JSON text holds no more values than can be parsed.

    Raises:
        ValueError: it has more.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > VALUES_MAX:
        raise ValueError(f"more than {VALUES_MAX} values")


class Inflate:
    """A converter from pieces of the line to pieces of the body, of which there may be `bytes_max` bytes.

    Raises:
        BodyTooLarge: at once for an unknown packing, later beyond `bytes_max` or for a torn body.
    """

    def __init__(self, encoding: str, *, bytes_max: int) -> None:
        word = encoding.strip().lower()
        if word not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise BodyTooLarge("the answer is packed in a way that was not asked for")
        self._is_packed = word not in ("", "identity")
        self._left = bytes_max
        self._fed = False
        self._one = zlib.decompressobj(_GZIP_OR_ZLIB)

    def __call__(self, raw: bytes) -> Iterator[bytes]:
        for piece in self._unpacked(raw) if self._is_packed else (raw,):
            self._left -= len(piece)
            if self._left < 0:
                raise BodyTooLarge("the answer is larger than any that makes sense")
            if piece:
                yield piece

    def finish(self) -> None:
        """Raise `BodyTooLarge` if a packed body ended in the middle; of a plain one HTTP itself states the length."""
        if self._fed and not self._one.eof:
            raise BodyTooLarge("the packed answer ends in the middle")

    def _unpacked(self, raw: bytes) -> Iterator[bytes]:
        rest = raw
        self._fed = self._fed or bool(raw)
        while rest:
            if self._one.eof:
                self._one = zlib.decompressobj(_GZIP_OR_ZLIB)  # a gzip body may have several members
            try:
                piece = self._one.decompress(rest, PIECE_BYTES)
            except zlib.error as exc:
                raise BodyTooLarge("the answer cannot be unpacked") from exc
            rest = self._one.unused_data if self._one.eof else self._one.unconsumed_tail
            yield piece
