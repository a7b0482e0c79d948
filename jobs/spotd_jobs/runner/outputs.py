"""What a finished job leaves for its owner: the files its `outputs` patterns match, and its output folder."""

from __future__ import annotations

import glob
import hashlib
import os

from spotd_jobs.runner import tree
from spotd_jobs.runner.clocks import now_text
from spotd_jobs.runner.files import remove
from spotd_jobs.runner.known import KnownChunks
from spotd_jobs.runner.say import say
from spotd_jobs.runner.store import Store
from spotd_jobs.runner.upload import Progress, TreeUpload

MANIFEST = "outputs/manifest.json"


def find_outputs(folder: str, patterns: list[str]) -> list[str]:
    """The files (and links) below the work directory that a pattern matches, relative to it, each once."""
    found = set()
    for pattern in patterns:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            say("an outputs pattern that leads out of the work directory is left out")
            continue
        for place in glob.iglob(os.path.join(glob.escape(folder), pattern), recursive=True):
            if os.path.isdir(place) and not os.path.islink(place):
                found.update(_files_below(place, folder))
            else:
                found.add(os.path.relpath(place, folder))
    return sorted(found)


def _files_below(place: str, folder: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in os.walk(place) for name in names
    ]


def gather(workdir: str, patterns: list[str], output_dir: str, into: str) -> tree.Tree:
    """One folder `into` that shows all outputs under the names they will have, as links to where they are.

    The output folder's files come first: where a pattern matches the same name, they win.
    """
    remove(into)
    os.makedirs(into)
    sources = [(output_dir, path) for path in sorted(_files_below(output_dir, output_dir))]
    sources += [(workdir, path) for path in find_outputs(workdir, patterns)]
    for source, path in sources:
        place, original = os.path.join(into, path), os.path.realpath(os.path.join(source, path))
        if os.path.lexists(place) or not os.path.isfile(original):
            continue
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(original, place)
        except OSError:
            say("an output was left out: another one has the name of its folder")
    return tree.look(os.path.dirname(into), os.path.basename(into))


def upload_outputs(
    store: Store, known: KnownChunks, progress: Progress, chunk_bytes: int, found: tree.Tree, into: str
) -> tuple[int, int, str]:
    """Number, bytes and manifest key of the outputs, which are in the store.

    Raises:
        store.GivenUp, tree.Vanished
    """
    progress.begin("outputs", found.size)
    try:
        stage = tree.Stage(found, os.path.dirname(into), None)
        files = TreeUpload(stage, store, known, progress, chunk_bytes, lambda: False).run(store.parallel)
    finally:
        progress.end()
    cut = len(found.name) + 1
    entries = [dict(entry, path=entry["path"][cut:]) for entry in files if entry["type"] == tree.FILE]
    manifest = store.document(
        kind="outputs",
        name="outputs",
        serial=store.numbers.take(),
        step=None,
        created_at=now_text(),
        bytes=sum(entry["size"] for entry in entries),
        files=entries,
        previous=None,
    )
    data = store.sealed(manifest)
    store.put(MANIFEST, data, hashlib.sha256(data).hexdigest())
    return len(entries), manifest["bytes"], store.prefix + MANIFEST
