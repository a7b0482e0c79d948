"""A disk that fills up: a clear word, nothing half-written, and everything works again once there is space."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from spotd.core.domain.plan import Plan
from spotd.store import StateUnavailable, Store
from tests.unit.store import values as v


def large() -> Plan:
    """More than the space that is left."""
    return v.plan(*[v.job(f"big{n:04}", reason="x" * 2_000) for n in range(400)])


@contextmanager
def few_pages(store: Store) -> Iterator[None]:
    """The database may not grow by more than a few pages: SQLITE_FULL."""
    pages = store.tx(lambda r: r._connection.exec_driver_sql("PRAGMA page_count").scalar_one())
    store.tx(lambda r: r._connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 8}").scalar())
    yield
    store.tx(lambda r: r._connection.exec_driver_sql("PRAGMA max_page_count = 1000000").scalar())


@contextmanager
def small_files(_store: Store) -> Iterator[None]:
    """No file of this process may become larger than 100 kB: writing fails in the middle of the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


Shortage = Callable[[Store], AbstractContextManager[None]]


@pytest.mark.long
@pytest.mark.parametrize("shortage", [few_pages, small_files])
def test_a_full_disk_loses_nothing_and_is_survived(tmp_path: Path, shortage: Shortage) -> None:
    path = tmp_path / "state.db"
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
        before = store.read(lambda r: (r.world(v.POLICY, v.NOW), r.events()))
        with shortage(store):
            for _ in range(2):
                with pytest.raises(StateUnavailable, match=r"the disk with the state .*state\.db") as caught:
                    store.tx(lambda tx: tx.commit(large()))
                assert "nothing was half-written" in caught.value.hint
                assert store.read(lambda r: (r.world(v.POLICY, v.NOW), r.events())) == before
        store.tx(lambda tx: tx.commit(large()))
        after = store.read(lambda r: (r.world(v.POLICY, v.NOW), r.events()))
        assert len(after[0].jobs) == 401
    with Store.open(path) as again:
        assert again.read(lambda r: (r.world(v.POLICY, v.NOW), r.events())) == after


def test_a_disk_that_is_full_at_the_first_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with Store.open(":memory:") as any_store, small_files(any_store):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(StateUnavailable, match=r"the disk with the state .*state\.db"):
            Store.open(path)
    with Store.open(path) as store:
        assert store.read(lambda r: r.jobs()) == ()
