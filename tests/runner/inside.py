"""The runner's parts in this process, over a folder, where a whole process would only be slower."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotd_jobs.runner import manifest, names, tree
from spotd_jobs.runner.grants import Grant
from spotd_jobs.runner.known import KnownChunks
from spotd_jobs.runner.restore import Restore
from spotd_jobs.runner.saver import safe_name
from spotd_jobs.runner.store import Store
from spotd_jobs.runner.upload import Progress, TreeUpload
from tests.runner.rig import Rig


def runner_grant(rig: Rig, attempt: int = 1, **changes: Any) -> Grant:
    """A grant as the runner itself reads it."""
    return Grant(rig.grant(["true"], attempt=attempt, **changes).model_dump(mode="json", by_alias=True))


def store_of(grant: Grant, hopeless: Any = lambda: False) -> Store:
    return Store(lambda: grant, 1, hopeless)


def upload_tree(rig: Rig, store: Store, folder: Path, name: str, chunk_bytes: int = 64) -> bytes:
    """The manifest of an entry that was uploaded, not yet published."""
    seen = tree.look(str(folder), name)
    stage = tree.stage(str(folder), seen, str(rig.folder / "stage" / str(store.numbers.take())))
    known = KnownChunks(str(rig.folder / "known"), store.prefix)
    files = TreeUpload(stage, store, known, Progress(), chunk_bytes, lambda: False).run(2)
    return manifest.written(
        store,
        kind="checkpoint",
        name=safe_name(name),
        entry=names.encoded(name),
        serial=store.numbers.take(),
        step=None,
        created_at="2026-11-21T10:00:00Z",
        bytes=sum(row["size"] for row in files),
        files=files,
        previous=None,
    )


def restore_into(
    rig: Rig, folder: Path, offers: list[dict[str, Any]], permitted: Callable[[], bool] = lambda: True
) -> Restore:
    """A restore that is ready to run; its pauses are none."""
    folder.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()
    return Restore(
        lambda: offers,
        str(folder),
        2,
        lambda seconds: stopped.is_set(),
        stopped.is_set,
        permitted,
    )
