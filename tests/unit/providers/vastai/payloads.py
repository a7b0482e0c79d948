"""Where the recorded answers of vast.ai lie, and how to read them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

SEARCHES: Final = (
    "search-offers-2024-11-05.json.gz",
    "search-offers-2024-11-01.json",
    "bundles-h100-2026-07-18.json.gz",
)


def payload_folder() -> Path:
    """The recorded vast.ai answers; the test is skipped if they are not beside this checkout."""
    beside = Path(__file__).resolve().parents[4].parent / "shared" / "data"
    folder = Path(os.environ.get("SPOTD_SHARED_DATA", beside)) / "payloads" / "vast"
    if not folder.is_dir():
        pytest.skip(f"no recorded answers in {folder}; set SPOTD_SHARED_DATA to the folder that holds payloads/")
    return folder


def recorded(name: str) -> Any:
    """One recorded answer, decoded."""
    content = (payload_folder() / name).read_bytes()
    return json.loads(gzip.decompress(content) if name.endswith(".gz") else content)


def recorded_rows(name: str) -> list[dict[str, Any]]:
    """The offer rows of a recorded search, whether the HTTP answer or the official client's raw output was kept."""
    value = recorded(name)
    return list(value["offers"] if isinstance(value, dict) else value)


def as_answer(rows: list[Any]) -> bytes:
    """The HTTP body of a search that found these rows."""
    return json.dumps({"offers": rows}).encode()
