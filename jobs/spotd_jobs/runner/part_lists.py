"""The lists of a checkpoint's parts, as the machines that have them send them to the first one, which merges them."""

from __future__ import annotations

from typing import Any, NamedTuple

from spotd_jobs.runner import complete, manifest
from spotd_jobs.runner.manifest import DIR, LINK
from spotd_jobs.wire.client import sinks
from spotd_jobs.wire.client.sinks import ascii_text

_FOLDERS_MAX = 1000


def merge(entry: str, parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of all parts, by rank, as those of one checkpoint.

    Raises:
        manifest.Unfit: two of them have other content under one path, or together they are too many for a manifest.
    """
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, rows in enumerate(parts):
        for row in rows:
            path = row["path"]
            if rank and path != entry and not path.startswith(entry + "/"):
                raise manifest.Unfit("machine %d sent a file that is not of it" % (rank + 1))
            before, other = found.setdefault(path, (rank, row))
            if other is not row and not _is_same(other, row):
                words = "machines %d and %d saved other content under %s"
                raise manifest.Unfit(words % (before + 1, rank + 1, path[-80:]))
    if len(found) > manifest.ENTRIES_MAX:
        raise manifest.Unfit("it holds more than %d files" % manifest.ENTRIES_MAX)
    above = ""
    for path in sorted(found, key=lambda one: one.replace("/", "\0")):
        if above and path.startswith(above + "/"):
            raise manifest.Unfit("%s is a file of one machine, and a folder of another" % above[-80:])
        if found[path][1]["type"] != DIR:
            above = path
    rows = [{name: value for name, value in row.items() if name != "digest"} for _, row in found.values()]
    chunks = {chunk["key"] for row in rows for chunk in row["chunks"]}
    if len(chunks) > sinks.CHUNKS_MAX:
        raise manifest.Unfit("it would be more than %d chunks" % sinks.CHUNKS_MAX)
    return rows


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["type"] != other["type"]:
        return False
    if one["type"] == LINK:
        return bool(one["target"] == other["target"])
    return one["type"] == DIR or _content(one) == _content(other)


def _content(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what is equal exactly for files of the same bytes, however they share chunks with others."""
    chunks = row["chunks"]
    if len(chunks) == 1:
        return (row["size"], row.get("digest") or chunks[0]["sha256"])
    return (row["size"], *((chunk["sha256"], chunk["offset"], chunk["length"]) for chunk in chunks))


class Part(NamedTuple):
    """What one machine has of a checkpoint, by its list."""

    files: list[dict[str, Any]]
    named: dict[str, str]
    sent: int


def read_part(data: bytes, prefix: str) -> Part:
    """Return the part whose list these bytes are; its content is stored below `prefix`.

    Raises:
        manifest.Unfit: they are none.
    """
    try:
        return _part_of(data, prefix)
    except (sinks.Unreadable, ValueError, KeyError, TypeError, AttributeError):
        raise manifest.Unfit("its list can not be read") from None


def _part_of(data: bytes, prefix: str) -> Part:
    document = manifest.read(data)
    for row in document["files"]:
        row["path"] = ascii_text(row["path"])
        row["target"] = None if row["target"] is None else ascii_text(row["target"])
        if not all(chunk["key"].startswith(prefix + "data/") for chunk in row["chunks"]):
            raise ValueError("a chunk of another attempt")
    named = {str(path): str(why) for path, why in document["named"].items()}
    return Part(document["files"], named, int(document["sent"]))


def metadata_of(tree: manifest.Tree) -> tuple[list[str], list[str]]:
    """In which of its folders PyTorch's parts lack their metadata here, and in which that is."""
    folders: dict[str, list[str]] = {}
    for path in tree.inside():
        folder, _, name = path.rpartition("/")
        folders.setdefault(ascii_text(folder), []).append(name)
    lacks = [folder for folder, names in folders.items() if complete.lacks_metadata(names)]
    return lacks[:_FOLDERS_MAX], [folder for folder, names in folders.items() if ".metadata" in names][:_FOLDERS_MAX]
