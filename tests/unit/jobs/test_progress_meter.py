"""What the runner counts as writing in the folder of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotd_jobs.runner import logs
from spotd_jobs.runner.logs import ProgressMeter


def test_a_job_that_keeps_more_entries_than_are_read_is_seen_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_ENTRIES_MAX", 5)
    folders = [tmp_path / f"step-{number}" for number in range(6)]
    for folder in folders:
        folder.mkdir()
        for name in range(10):
            (folder / str(name)).touch()
    meter = ProgressMeter(lambda: 0, str(tmp_path))
    for later, folder in enumerate(folders, start=1):
        os.utime(folder, ns=(10**9, 4 * 10**18 + later * 10**12))
        before = meter.read([], runs=True)["writes"]
        for name in range(10):
            (folder / str(name)).write_bytes(b"x" * later)
        assert meter.read([], runs=True)["writes"] == before + 1, folder
