"""Folders of this machine that are stored as datasets: by `data put` under a name, by `submit` for its job."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotd.cli import stderr
from spotd.cli.entry import CommandFailed
from spotd.client.daemon import Daemon
from spotd.words import count, size_text

if TYPE_CHECKING:
    from spotd.api.schemas.bodies import FolderBody
    from spotd.api.schemas.jobs import DatasetAnswer, DatasetResponse
    from spotd_jobs.spec.model import JobSpec

TRIES: Final = 3
"""What the store had at the beginning of an upload can be gone at its end; then it is sent again."""


def measure_folders(spec: JobSpec) -> dict[str, FolderBody]:
    """Return how large each folder is that the job names as a source of data.

    Raises:
        CommandFailed: one cannot be a dataset.
    """
    from spotd_jobs.dataset_pack import DatasetError, measure_dataset

    found: dict[str, FolderBody] = {}
    for one in spec.data:
        if one.is_folder:
            try:
                size, files = measure_dataset(Path(one.source))
            except DatasetError as exc:
                raise CommandFailed(str(exc), hint=exc.hint) from exc
            found[one.source] = {"bytes": size, "files": files}
    return found


def store_folders(daemon: Daemon, measured: dict[str, FolderBody]) -> dict[str, FolderBody]:
    """Store each of these folders; return them with the hashes of what they hold.

    Raises:
        CommandFailed: one changes while it is read, or cannot be stored.
    """
    stored: dict[str, FolderBody] = {}
    for folder in measured:
        made, sent = store_folder(Path(folder), daemon, daemon.store_dataset)
        stderr.note(f"stored {count(made['files'], 'file')}, {size_text(made['bytes'])}; sent {size_text(sent)} of it")
        stored[folder] = {"bytes": made["bytes"], "files": made["files"], "sha256": made["sha256"]}
    return stored


def store_folder(
    folder: Path, daemon: Daemon, keep: Callable[[str], DatasetAnswer], *, follow: bool = False
) -> tuple[DatasetResponse, int]:
    """Send what the store lacks of the folder; return the dataset, and how many bytes were sent.

    Args:
        keep: called with the text of its root, once all else is stored.

    Raises:
        CommandFailed: it cannot be a dataset, or does not stay in the store.
    """
    from spotd_jobs.dataset_pack import DatasetError, measure_dataset, pack_dataset

    for _ in range(TRIES):
        sink = _Uploading(daemon)
        try:
            total = measure_dataset(folder, follow=follow)[0] if stderr.is_terminal() else None
            with stderr.ProgressLine("store", total) as progress:
                root = pack_dataset(folder, sink, follow=follow, progress=progress.add)
        except DatasetError as exc:
            raise CommandFailed(str(exc), hint=exc.hint) from exc
        answer = keep(root.decode("ascii"))
        if "dataset" in answer:
            return answer["dataset"], sink.sent
    raise CommandFailed("what was sent did not stay in the store", hint="spotctl doctor")


class _Uploading:
    """Sends what the store lacks, and counts it. Called from several threads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.sent = 0

    def put_chunk(self, sha256: str, data: bytes | bytearray) -> None:
        if not self._daemon.has_data_chunk(sha256):
            self._daemon.put_data_chunk(sha256, io.BytesIO(data), len(data))
            self.sent += len(data)

    def put_part(self, sha256: str, text: bytes) -> None:
        self._daemon.put_data_part(sha256, io.BytesIO(text), len(text))
