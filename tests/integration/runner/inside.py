"""The runner's parts in this process, over a folder, where a whole process would only be slower."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spotd_jobs.runner import manifest
from spotd_jobs.runner.checkpoint_uploader import safe_name
from spotd_jobs.runner.manifest import ChunkIndex
from spotd_jobs.runner.restore import RestoreRun
from spotd_jobs.runner.store import RunnerGrant, RunnerStore
from spotd_jobs.runner.upload import Progress, TreeUpload
from spotd_jobs.wire.client import sinks
from spotd_jobs.wire.client.web import steady
from tests.integration.runner.rig import Rig


def runner_grant(rig: Rig, attempt: int = 1, **changes: Any) -> RunnerGrant:
    """A grant as the runner itself reads it."""
    return RunnerGrant(rig.grant(["true"], attempt=attempt, **changes).model_dump(mode="json", by_alias=True), steady())


def store_of(grant: RunnerGrant, hopeless: Any = lambda: False) -> RunnerStore:
    return RunnerStore(lambda: grant, 1, hopeless)


def upload_tree(rig: Rig, store: RunnerStore, folder: Path, name: str, chunk_bytes: int = 64) -> bytes:
    """The manifest of an entry that was uploaded, not yet published."""
    seen = manifest.scan(str(folder), name)
    stage = manifest.stage(str(folder), seen, str(rig.folder / "stage" / str(store.numbers.take())))
    known = ChunkIndex(str(rig.folder / "known"), store.prefix)
    files = TreeUpload(stage, store, known, Progress(), chunk_bytes, lambda: False).run(2)
    return manifest.manifest_bytes(
        store,
        kind="checkpoint",
        name=safe_name(name),
        entry=sinks.ascii_text(name),
        serial=store.numbers.take(),
        step=None,
        created_at="2026-11-21T10:00:00Z",
        bytes=sum(row["size"] for row in files),
        files=files,
        previous=None,
    )


def restore_into(
    rig: Rig, folder: Path, offers: list[dict[str, Any]], permitted: Callable[[], bool] = lambda: True, rank: int = 0
) -> RestoreRun:
    """A restore that is ready to run, on the machine of this rank of several; its pauses are none."""
    folder.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()
    return RestoreRun(
        lambda: offers,
        str(folder),
        2,
        lambda seconds: stopped.is_set(),
        stopped.is_set,
        permitted,
        rank=rank,
    )
