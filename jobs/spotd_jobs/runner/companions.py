"""What lies beside a checkpoint and names it: without it the framework would not find its own checkpoint again.

DeepSpeed's and Megatron's pointer files, and links such as Lightning's `last.ckpt`. They are stored with each
checkpoint they belong to, since each may be the one that is restored.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from spotd_jobs.runner import complete
from spotd_jobs.runner.chunk_index import ChunkIndex, new_mark
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.tree import Tree
from spotd_jobs.wire.client.files import read_text
from spotd_jobs.wire.client.manifest_text import COMPANIONS_MAX
from spotd_jobs.wire.client.names import ascii_text

_POINTER_BYTES_MAX = 4096


def companions(folder: str, of: Tree, pointed: set[str], store: RunnerStore, known: ChunkIndex) -> list[dict[str, Any]]:
    """Manifest entries of the pointers and links to this checkpoint; their content is in the store.

    Raises:
        store.GivenUp
    """
    entries: list[dict[str, Any]] = []
    is_named = of.name in pointed or complete.needs_pointer(of)
    for beside in sorted(os.listdir(folder)):
        if len(entries) == COMPANIONS_MAX:
            break
        place = os.path.join(folder, beside)
        if os.path.islink(place):
            if os.readlink(place) == of.name and not complete.is_temporary(beside):
                entries.append(_entry(beside, "link", of.name))
        elif is_named and complete.is_pointer(folder, beside):
            text = read_text(place, _POINTER_BYTES_MAX) or ""
            if of.name not in complete.pointed_names(text):
                # It names a newer one by now; what is restored must find itself.
                text = str(int(of.name[len("iter_") :])) if of.name.startswith("iter_") else of.name
            entries.append(_stored(beside, os.fsencode(text), store, known))
    return entries


def _stored(name: str, data: bytes, store: RunnerStore, known: ChunkIndex) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    key = known.claim(digest)
    if key is None:
        name_in_store = "data/" + digest + new_mark()
        key = store.prefix + name_in_store
        try:
            store.put(name_in_store, data, digest)
        except BaseException:
            known.failed(digest)
            raise
        known.sent(digest, key, len(data))
    entry = _entry(name, "file", None)
    entry.update(
        size=len(data),
        mode=0o644,
        chunks=[{"key": key, "sha256": digest, "size": len(data), "offset": 0, "length": len(data)}],
    )
    return entry


def _entry(path: str, kind: str, target: str | None) -> dict[str, Any]:
    return {
        "path": ascii_text(path),
        "type": kind,
        "size": 0,
        "mode": 0o777,
        "mtime_ns": 0,
        "target": None if target is None else ascii_text(target),
        "chunks": [],
    }
