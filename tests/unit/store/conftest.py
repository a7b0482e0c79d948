"""States for these tests. Bringing one up to date costs more than most tests, so it happens once and is copied.

Where `SPOTD_TEST_STATE` names a PostgreSQL server, the tests that ask for `store` run over one there, emptied for each;
those that speak to SQLite themselves are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from spotd.store import Store
from spotd.store.tables import METADATA
from spotd.store.world import WorldMemory

_SERVER: Final = os.environ.get("SPOTD_TEST_STATE", "")
_OVER_SQLITE: Final = (
    "test_crashes",
    "test_full_disk",
    "test_migrations",
    "test_opening",
    "test_power_cut",
    "test_transactions",
)
"""Their subject is the file, its log, its locks or its disk."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent) + os.sep
    if _SERVER:
        items[:] = [one for one in items if not (str(one.path).startswith(here) and one.path.stem in _OVER_SQLITE)]


@pytest.fixture(autouse=True)
def proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each world that a transaction of these tests is shown is compared with one that is read anew."""
    monkeypatch.setattr(WorldMemory, "is_proved", True)


@pytest.fixture(scope="session")
def blank_state(tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    """An empty state with today's schema, closed."""
    if _SERVER:
        return _blank_schema(f"state_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")
    path = tmp_path_factory.mktemp("blank") / "state.db"
    Store.open(path).close()
    return path


def _blank_schema(name: str) -> str:
    import psycopg

    with psycopg.connect(_SERVER, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    url = f"{_SERVER}?options=-csearch_path%3D{name}"
    Store.open(url).close()
    return url


@pytest.fixture
def path(blank_state: Path | str, tmp_path: Path) -> Path | str:
    """Where the state of this test is."""
    if isinstance(blank_state, str):
        import psycopg

        with psycopg.connect(blank_state, autocommit=True) as connection:
            connection.execute(f"TRUNCATE {', '.join(METADATA.tables)}".encode())
        return blank_state
    shutil.copyfile(blank_state, tmp_path / "state.db")
    return tmp_path / "state.db"


@pytest.fixture
def store(path: Path | str) -> Iterator[Store]:
    """An empty state, open."""
    with Store.open(path) as store:
        yield store
