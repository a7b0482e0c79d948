"""What holds for the tests of single parts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _no_disk_sync() -> Iterator[None]:
    """These tests cut no power, so they need not wait for the disk; a process that a test starts still does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield
