"""What holds for the tests of single parts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
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


@pytest.fixture(autouse=True, scope="session")
def _plugins_found_once() -> Iterator[None]:
    """Each config asks which plugins are installed, and to search all distributions takes longer than to read it."""

    @cache
    def found(_paths: tuple[str, ...], group: str) -> EntryPoints:
        return entry_points(group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd.config.credentials.entry_points", lambda *, group: found(tuple(sys.path), group))
        yield
