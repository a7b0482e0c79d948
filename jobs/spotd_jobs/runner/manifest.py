"""A manifest as a document: written with every chunk listed once, read in this and the older form.

The numbers here are those of the daemon's own reader, which refuses what is beyond them.
"""

from __future__ import annotations

import gzip
import json
import os
from typing import Any, Iterable

from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.tree import Node, Unfit
from spotd_jobs.wire.client.manifest_text import (
    CHUNKS_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_TEXT_MAX,
    Unreadable,
    chunk_key,
    text_of,
)
from spotd_jobs.wire.client.names import name_of

_PLAIN_MAX = 64 * 1024
_ROW_BYTES = 150
_CHUNK_BYTES = 110
_ODD_BYTES = 3
_PLAIN_CHARACTERS = bytes(byte for byte in range(32, 127) if byte not in b'%\\"')


def text_bytes(nodes: Iterable[Node], chunks: int) -> int:
    """About how long the manifest of these will be; it will not be longer."""
    rows = 0
    for node in nodes:
        names = os.fsencode(node.path) + os.fsencode(node.target or "")
        rows += _ROW_BYTES + len(names) + _ODD_BYTES * len(names.translate(None, _PLAIN_CHARACTERS))
    return rows + _CHUNK_BYTES * chunks + _PLAIN_MAX


def too_much(chunks: int, text: int) -> str:
    """Why no manifest can hold this; empty if one can."""
    if chunks > CHUNKS_MAX:
        return "it would be more than %d chunks" % CHUNKS_MAX
    if text > MANIFEST_TEXT_MAX:
        return "the list of its files would be longer than %d MB" % (MANIFEST_TEXT_MAX // 1_000_000)
    return ""


def manifest_bytes(store: RunnerStore, **fields: Any) -> bytes:
    """Return the manifest as it is stored; `files` has the chunks of each file with it.

    Raises:
        Unfit: it is larger than the daemon reads.
    """
    numbers: dict[str, int] = {}
    chunks: list[list[Any]] = []
    rows = []
    for file in fields.pop("files"):
        pieces: list[list[int]] = []
        for chunk in file["chunks"]:
            number = numbers.setdefault(chunk["key"], len(chunks))
            if number == len(chunks):
                chunks.append([chunk["key"].rpartition("/")[2], chunk["size"]])
            whole = chunk["length"] == chunk["size"]
            pieces.append([number] if whole else [number, chunk["offset"], chunk["length"]])
        row = {name: value for name, value in file.items() if name != "chunks" and value not in (None, 0)}
        row["mode"] = file["mode"]
        rows.append(dict(row, pieces=pieces) if pieces else row)
    document = dict(store.document(**fields), schema=2, chunks=chunks, files=rows)
    text = store.seal(document)
    data = text if len(text) <= _PLAIN_MAX else gzip.compress(text, 6)
    if len(data) > MANIFEST_BYTES_MAX:
        raise Unfit("the list of its files is larger than %d MB" % (MANIFEST_BYTES_MAX // 1_000_000))
    return data


def read(data: bytes) -> dict[str, Any]:
    """Return the manifest, with names as this system has them, and of each file where in which chunk its bytes are.

    Raises:
        Unreadable: there is none.
    """
    try:
        document = json.loads(text_of(data))
        if document["schema"] == 2:
            _unfold(document)
        for file in document["files"]:
            for chunk in file["chunks"]:
                chunk.setdefault("offset", 0)
                chunk.setdefault("length", chunk["size"])
                if not 0 <= chunk["offset"] <= chunk["offset"] + chunk["length"] <= chunk["size"]:
                    raise Unreadable("a piece of a file lies outside its chunk")
        result: dict[str, Any] = document
        return result
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise Unreadable("its manifest can not be read") from None


def _unfold(document: dict[str, Any]) -> None:
    chunks = []
    for name, size, *attempt in document["chunks"]:
        key = chunk_key(document["job"], attempt[0] if attempt else document["attempt"], name)
        chunks.append({"key": key, "sha256": name[:64], "size": size})
    document["entry"] = name_of(document["entry"])
    for file in document["files"]:
        file["path"] = name_of(file["path"])
        file["target"] = name_of(file["target"]) if file.get("target") is not None else None
        file.setdefault("size", 0)
        file.setdefault("mtime_ns", 0)
        pieces = []
        for number, *place in file.pop("pieces", []):
            chunk = dict(chunks[number])
            if place:
                chunk["offset"], chunk["length"] = place
            pieces.append(chunk)
        file["chunks"] = pieces
