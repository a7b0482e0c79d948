"""Names in recorded answers of the real providers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd_providers.contract.gpus import aws_gpus, canonical, gpu_info

ROOT = Path(__file__).resolve().parents[4]
DATA = Path(os.environ.get("SPOTD_SHARED_DATA", ROOT.parent / "shared" / "data"))

pytestmark = pytest.mark.skipif(
    not (DATA / "payloads").is_dir(), reason=f"recorded payloads are not at {DATA} (set SPOTD_SHARED_DATA)"
)


def _vast() -> Iterator[tuple[str, int]]:
    for path in sorted((DATA / "payloads/vast").glob("search-offers-*.json.gz")):
        with gzip.open(path, "rt") as stream:
            answer = json.load(stream)
        rows = answer["offers"] if isinstance(answer, dict) else answer
        yield from ((row["gpu_name"], row["gpu_ram"]) for row in rows)


def _runpod() -> Iterator[tuple[str, int]]:
    for path in sorted((DATA / "payloads/runpod").glob("gputypes-*.json")):
        for row in json.loads(path.read_text())["data"]["gpuTypes"]:
            yield row["id"], row["memoryInGb"] * 1024


def test_recorded_vast_names_are_rows_except_odd_cards() -> None:
    kept = {(name, ram) for name, ram in _vast() if gpu_info(canonical("vast", name, ram)) is None}
    assert kept <= {("RTX 3060 laptop", 12288), ("RTX 3060 laptop", 6144), ("GTX 1060", 3072)}


def test_recorded_runpod_names_are_rows_except_slices() -> None:
    kept = {name for name, ram in _runpod() if gpu_info(canonical("runpod", name, ram)) is None}
    assert {name for name in kept if " MIG " not in name} <= {"unknown"}


def test_recorded_aws_types_agree_with_the_table() -> None:
    seen = 0
    for path in sorted((DATA / "payloads/aws/describe-instance-types-2021").glob("*.json")):
        for row in json.loads(path.read_text())["InstanceTypes"]:
            gpus = row["GpuInfo"]["Gpus"][0]
            name = canonical("aws", gpus["Name"], gpus["MemoryInfo"]["SizeInMiB"])
            assert aws_gpus(row["InstanceType"]) == (name, gpus["Count"])
            seen += 1
    assert seen
