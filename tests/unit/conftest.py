"""What holds for the tests of single parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine


@pytest.fixture(autouse=True, scope="package")
def _no_disk_sync() -> Iterator[None]:
    """These tests cut no power, so they need not wait for the disk; a process that a test starts still does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _statements_compiled_once() -> Iterator[None]:
    """Nearly each test opens a state of its own, and compiling its statements anew takes longer than most tests."""
    model = create_engine("sqlite://")
    model.connect().close()

    def alike(url: str, **options: Any) -> Engine:
        engine = create_engine(url, **options)
        engine.dialect, engine._compiled_cache = model.dialect, model._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd.store.engine.create_engine", alike)
        yield
    model.dispose()
