"""Opening a state: one writer, nothing that is not ours is changed, and a clear word for all that is wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from spotd.store import StateError, StateUnavailable, Store, StoreCorrupt, StoreInUse, StoreTooNew, StoreUnsupported
from tests.unit.store import values as v


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def refuses(url: str | Path, error: type[StateError], *words: str) -> None:
    with pytest.raises(error) as caught:
        Store.open(url)
    assert caught.value.hint
    for word in words:
        assert word in str(caught.value)


def test_a_path_a_url_and_a_string_name_the_same_state(path: Path) -> None:
    for url in (path, str(path), f"sqlite:///{path}"):
        with Store.open(url) as store:
            store.tx(lambda tx: tx.set_meta("opened", "yes"))
    with Store.open(path) as store:
        assert store.read(lambda r: r.meta("opened")) == "yes"


def test_a_new_state_can_be_read_by_its_owner_only(path: Path) -> None:
    with Store.open(path) as store:
        store.tx(lambda tx: tx.set_meta("a", "b"))
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("state.db", "state.db-wal", "state.db-shm", "state.db.lock"), 0o600)


def test_a_second_writer_in_this_process_is_refused_by_its_number(path: Path) -> None:
    with Store.open(path):
        refuses(path, StoreInUse, str(path), f"process {os.getpid()}")
    Store.open(path).close()


@pytest.mark.process
def test_a_second_process_is_refused_and_told_which_one_holds_the_state(path: Path) -> None:
    code = (
        f"import sys; from spotd.store import Store; s = Store.open({str(path)!r}); print('open', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        refuses(path, StoreInUse, str(path), f"process {other.pid}")
        other.kill()
    Store.open(path).close()


def test_a_lock_whose_holder_is_unreadable_is_still_a_lock(path: Path) -> None:
    with Store.open(path):
        path.with_name("state.db.lock").write_text("")
        refuses(path, StoreInUse, "another process")


@pytest.mark.parametrize(
    "url", ["postgresql://user:hunter2@host/db", "postgresql+psycopg://user:hunter2@host/db", "mysql://hunter2@host/db"]
)
def test_another_database_is_refused_without_showing_its_password(url: str) -> None:
    refuses(url, StoreUnsupported, url.partition("://")[0], 'state = "sqlite"')
    with pytest.raises(StoreUnsupported) as caught:
        Store.open(url)
    assert "hunter2" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    refuses(tmp_path / "no" / "state.db", StateUnavailable, str(tmp_path / "no"), "No such file")
    assert not (tmp_path / "no").exists()


def test_a_folder_in_the_place_of_the_state_is_named(path: Path) -> None:
    path.mkdir()
    refuses(path, StateUnavailable, str(path), "Is a directory")


def newer(path: Path) -> bytes:
    """A state as a later version would leave it; its bytes."""
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    return path.read_bytes()


def test_a_state_of_a_newer_version_is_refused_and_left_as_it_is(path: Path) -> None:
    before = newer(path)
    refuses(path, StoreTooNew, str(path), "0999", "newer spotd", "name another state")
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["state.db", "state.db.lock"]


def test_a_refused_state_is_not_kept_locked(path: Path) -> None:
    newer(path)
    refuses(path, StoreTooNew)
    refuses(path, StoreTooNew)


@pytest.mark.parametrize("content", [b"not a database at all" * 50, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refuses(path, StoreCorrupt, str(path), "damaged or not a spotd database")
    assert path.read_bytes() == content


@pytest.mark.parametrize("table", ["photos", "alembic_version"])
def test_a_database_of_another_program_is_refused_and_left_as_it_is(path: Path, table: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE {table} (version_num)")
    connection.close()
    before = path.read_bytes()
    refuses(path, StoreCorrupt, str(path), "is not a spotd state")
    assert path.read_bytes() == before


def test_a_state_damaged_in_the_middle_names_its_file_when_the_damage_is_met(path: Path) -> None:
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.plan(*[v.job(f"j{n:04}") for n in range(500)])))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)
        file.write(b"\xa5" * (size // 2))
    with pytest.raises(StoreCorrupt, match=r"state\.db is damaged"), Store.open(path) as store:
        store.read(lambda r: r.world(v.POLICY, v.NOW))


def test_a_value_that_cannot_be_understood_names_the_file_and_the_value_and_hides_no_job(path: Path) -> None:
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.plan(v.job())))
        store.tx(lambda tx: tx._connection.exec_driver_sql("UPDATE jobs SET state = 'DREAMING'"))
        with pytest.raises(StoreCorrupt, match=r"state\.db holds a value .*DREAMING"):
            store.read(lambda r: r.job(v.job().id))
        assert [line.id for line in store.read(lambda r: r.jobs())] == [v.job().id]


def test_an_empty_file_becomes_a_state(path: Path) -> None:
    path.touch()
    with Store.open(path) as store:
        assert store.read(lambda r: r.jobs()) == ()
