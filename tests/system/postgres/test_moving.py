"""A state moves between SQLite and PostgreSQL whole, and its old place is never used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd.daemon.commits import Database
from spotd.daemon.install import this_holder
from spotd.store import StateError, Store, StoreMoved, move_state
from spotd.store.store import MOVED_TO
from spotd.store.tables import META, METADATA
from tests.unit.store import values as v

pytestmark = pytest.mark.system
KNOWN = frozenset({"0123abcd"})


def rows(store: Store) -> dict[str, list[tuple[object, ...]]]:
    def read(reads: object) -> dict[str, list[tuple[object, ...]]]:
        tables = (table for table in METADATA.sorted_tables if table is not META)
        connection = reads.connection  # type: ignore[attr-defined]  # a Reads, whose class is the store's own
        return {t.name: [tuple(row) for row in connection.execute(t.select().order_by(*t.primary_key))] for t in tables}

    return store.read(read)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "state.sqlite"
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
        store.tx(lambda tx: tx.set_meta("state_id", "abc"))
    return path


def test_all_rows_are_the_same_there_and_back(old: Path, url: str, tmp_path: Path) -> None:
    with Store.open(old) as store:
        before = rows(store)
    assert sum(map(len, before.values())) == 5
    move_state(old, url, known_by=KNOWN)
    with Store.open(url) as store:
        assert rows(store) == before
        assert store.read(lambda reads: reads.meta("state_id")) == "abc"
        store.tx(lambda tx: tx.commit(v.running_job("j2")))
        later = rows(store)
    back = tmp_path / "back.sqlite"
    move_state(url, back, known_by=KNOWN)
    with Store.open(back) as store:
        assert rows(store) == later
    with pytest.raises(StoreMoved, match="was moved to"):
        Store.open(url)


def test_the_old_place_is_never_opened_again(old: Path, url: str) -> None:
    move_state(old, url, known_by=KNOWN)
    with pytest.raises(StoreMoved, match=r"was moved to postgresql://"):
        Store.open(old)


def test_a_move_that_was_broken_off_is_ended_by_the_same_command(old: Path, url: str) -> None:
    with Store.open(old) as store:
        before = rows(store)
        store.tx(lambda tx: tx.set_meta(MOVED_TO, url))
    with pytest.raises(StoreMoved):
        Store.open(old)
    move_state(old, url, known_by=KNOWN)
    with Store.open(url) as store:
        assert rows(store) == before


def test_nothing_is_laid_over_a_state_that_is_not_empty(old: Path, url: str) -> None:
    with Store.open(url) as store:
        store.tx(lambda tx: tx.commit(v.running_job("other")))
    with pytest.raises(StateError, match="is not empty"):
        move_state(old, url, known_by=KNOWN)
    Store.open(old).close()


async def holder_of(place: Path | str, folder: Path) -> frozenset[str]:
    with Store.open(place) as store:
        return (await this_holder(Database(store, inline=True), folder, place)).places


@pytest.mark.anyio
async def test_the_new_state_may_claim_the_lease_that_the_old_one_held(old: Path, url: str, tmp_path: Path) -> None:
    former = await holder_of(old, tmp_path)
    move_state(old, url, known_by=former)
    assert former & await holder_of(url, tmp_path / "another")
