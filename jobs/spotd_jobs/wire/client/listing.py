"""The files of a dataset that lies elsewhere than in the store, in a bucket or a hub, as they were at a submission.

A listing is canonical JSON and stored under the SHA-256 of its text, so that a job which keeps that hash reads the same
files on every machine. How the content of a file is held to what was listed depends on what its owner states of it:
a SHA-256, the hash of a git object, or, of an object of a bucket, the `ETag` that the server compares at each read.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, NamedTuple

from spotd_jobs.wire.client.dataset import (
    BYTES_MAX,
    CHUNK_BYTES,
    CHUNKS_MAX,
    DOCUMENT_TEXT_MAX,
    PREFIX,
    require_order,
    require_path,
)
from spotd_jobs.wire.client.sinks import Unreadable, ascii_text, name_of

SCHEMA = 1
FILES_MAX = CHUNKS_MAX
SHA256, GIT, ETAG, STORED = "sha256", "git", "etag", "stored"
_CHECKS = {
    SHA256: re.compile(r"[0-9a-f]{64}"),
    GIT: re.compile(r"[0-9a-f]{40}"),
    ETAG: re.compile(r"[!#-~]{1,200}"),
    STORED: re.compile(r"[0-9a-f]{64}"),
}


class ListedFile(NamedTuple):
    """One file.

    Attributes:
        path: below the dataset's folder, as the system's calls take it.
        kind: what `check` is. `STORED` is a SHA-256, too, of a file that the store has as a chunk.
    """

    path: str
    size: int
    kind: str
    check: str


def data_listing_key(sha256: str) -> str:
    return PREFIX + "listings/" + sha256


def file_url_key(number: int) -> str:
    """Return by what a grant names the URL of a file, which is known by its place in the list."""
    return "file/%d" % number


def listing_text(files: Iterable[ListedFile]) -> bytes:
    """Return the canonical text of a listing."""
    rows = [[ascii_text(one.path), one.size, one.kind, one.check] for one in files]
    document = {"schema": SCHEMA, "files": rows}
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def read_listing(text: bytes) -> tuple[ListedFile, ...]:
    """Return the files that the text lists, whose paths all stay inside.

    Raises:
        Unreadable: it lists none, or not as a writer of ours does.
    """
    if len(text) > DOCUMENT_TEXT_MAX:
        raise Unreadable("the list of its files is larger than %d bytes" % DOCUMENT_TEXT_MAX)
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise Unreadable("the list of its files is of another version of spotd")
        files = tuple(_file(row) for row in document["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable("the list of its files can not be read") from None
    if not 0 < len(files) <= FILES_MAX or sum(one.size for one in files) > BYTES_MAX:
        raise Unreadable("it lists no file, or more than %d" % FILES_MAX)
    require_order(one.path for one in files)
    if text != listing_text(files):
        raise Unreadable("its text is not the canonical one")
    return files


def _file(row: Any) -> ListedFile:
    path, size, kind, check = name_of(row[0]), row[1], row[2], row[3]
    require_path(path)
    if type(size) is not int or not 0 <= size <= BYTES_MAX or _CHECKS[kind].fullmatch(check) is None:
        raise ValueError(row)
    if kind == STORED and not 0 < size <= CHUNK_BYTES:
        raise ValueError(row)
    return ListedFile(path, size, kind, check)
