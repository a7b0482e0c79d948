"""A file that its job writes while it is read for an upload: nothing of it is stored as what it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotd_jobs.runner import manifest, upload
from spotd_jobs.runner.manifest import ChunkIndex, Vanished
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.runner.upload import Progress, TreeUpload


@pytest.mark.parametrize("changes", [True, False], ids=["it is written in place", "it stays"])
def test_a_file_that_is_written_in_place_once_its_bytes_were_read_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, changes: bool
) -> None:
    """The bytes that were read may be half of the old and half of the new; its size is the same."""
    file, stored, read = tmp_path / "ckpt" / "w", list[str](), upload._read_exactly
    file.parent.mkdir()
    file.write_bytes(b"a" * 640)

    def read_and_write(*arguments: Any) -> None:
        read(*arguments)
        if changes:
            with file.open("r+b") as opened:
                opened.write(b"b" * 640)

    monkeypatch.setattr(upload, "_read_exactly", read_and_write)
    seen = manifest.scan(str(file.parent), "w")
    stage = manifest.stage(str(file.parent), seen, str(tmp_path / "stage"))
    prefix = "jobs/j1/attempts/1/"
    store = cast("RunnerStore", SimpleNamespace(prefix=prefix, put=lambda name, *_: stored.append(name)))
    known = ChunkIndex(str(tmp_path / "known"), prefix)
    one = TreeUpload(stage, store, known, Progress(), 1024, lambda: False)
    if changes:
        with pytest.raises(Vanished):
            one.run(1)
    else:
        one.run(1)
    assert bool(stored) is not changes
