"""What writer and readers of a manifest agree on: its limits, how it is packed, and where its chunks are."""

from __future__ import annotations

import zlib

MANIFEST_BYTES_MAX = 16 * 1024 * 1024
"""As it is stored."""
MANIFEST_TEXT_MAX = 40 * 1024 * 1024
"""Unpacked."""
CHUNKS_MAX = 65_536
CHUNK_BYTES_MAX = 64 * 1024 * 1024
COMPANIONS_MAX = 16
WINDOW = 3
"""A runner counts on a chunk that its attempt sent only while one of so many newest manifests of the attempt names it,
or was published before it was sent. The rest may be deleted while the attempt lives."""
_GZIP = b"\x1f\x8b"


class Unreadable(Exception):
    """There is no manifest in these bytes."""


def text_of(data: bytes) -> bytes:
    """Return the text of a manifest, which may be compressed.

    Raises:
        Unreadable: it is too large, cut short or damaged.
    """
    if not data.startswith(_GZIP):
        return data
    unpacking = zlib.decompressobj(31)
    try:
        text = unpacking.decompress(data, MANIFEST_TEXT_MAX + 1)
    except zlib.error:
        raise Unreadable("its manifest cannot be unpacked") from None
    if len(text) > MANIFEST_TEXT_MAX:
        raise Unreadable("its manifest is larger than %d bytes when it is unpacked" % MANIFEST_TEXT_MAX)
    if not unpacking.eof or unpacking.unused_data:
        raise Unreadable("its manifest is cut short or has something behind its end")
    return text


def chunk_key(job: str, attempt: int, name: str) -> str:
    """Return the key of a chunk that an attempt of the job sent."""
    return "jobs/%s/attempts/%d/data/%s" % (job, attempt, name)
