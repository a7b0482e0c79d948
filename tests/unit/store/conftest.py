"""States for these tests. Bringing one up to date costs more than most tests, so it happens once and is copied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd.store import Store


@pytest.fixture(scope="session")
def blank_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty state with today's schema, closed."""
    path = tmp_path_factory.mktemp("blank") / "state.db"
    Store.open(path).close()
    return path


@pytest.fixture
def path(blank_state: Path, tmp_path: Path) -> Path:
    """Where the state of this test is."""
    shutil.copyfile(blank_state, tmp_path / "state.db")
    return tmp_path / "state.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    """An empty state, open."""
    with Store.open(path) as store:
        yield store
