"""Opening a state: one writer, nothing that is not ours is changed, and a clear word for all that is wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from spotd.store import (
    StateError,
    StateUnavailable,
    Store,
    StoreCorrupt,
    StoreInUse,
    StoreOtherSchema,
    StoreTooNew,
    StoreUnsupported,
    postgres,
)
from spotd.store.engine import BUNDLED
from tests.cases import every
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


@every(
    "url", ["postgres://user:hunter2@host/db", "postgresql+psycopg://user:hunter2@host/db", "mysql://hunter2@host/db"]
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


UNRELEASED = sorted((Path(__file__).parent / "unreleased").glob("*.sql"))
"""Schemas of commits before the first release, whose numbers of revisions were used again for others."""


def folder(path: Path) -> dict[str, bytes]:
    """What lies beside the state, without its lock."""
    return {one.name: one.read_bytes() for one in path.parent.iterdir() if one.suffix not in {".lock", ".db-shm"}}


def unreleased(path: Path, schema: Path, revision: str = "") -> dict[str, bytes]:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL;" + schema.read_text(encoding="utf-8"))
        if revision:
            with connection:
                connection.execute("UPDATE alembic_version SET version_num = ?", [revision])
    return folder(path)


def test_there_are_schemas_from_before_the_first_release() -> None:
    assert len(UNRELEASED) > 3


@pytest.mark.parametrize("schema", UNRELEASED, ids=lambda one: one.stem)
def test_a_state_of_an_unreleased_schema_is_refused_and_left_as_it_is(path: Path, schema: Path) -> None:
    before = unreleased(path, schema)
    refuses(path, StoreOtherSchema, str(path), "before the first release", "end its machines", "name another state")
    assert folder(path) == before
    refuses(path, StoreOtherSchema)


@pytest.mark.parametrize("revision", ["0001", "0014", BUNDLED.head])
@pytest.mark.parametrize("schema", UNRELEASED, ids=lambda one: one.stem)
def test_an_unreleased_schema_is_recognised_whatever_revision_it_states(
    path: Path, schema: Path, revision: str
) -> None:
    before = unreleased(path, schema, revision)
    refuses(path, StoreOtherSchema, f"revision {revision}")
    assert folder(path) == before


@pytest.mark.parametrize(
    "change", ["ALTER TABLE jobs ADD COLUMN colour TEXT", "ALTER TABLE jobs DROP COLUMN submitted_by"]
)
def test_a_newest_state_whose_columns_were_changed_is_refused(path: Path, change: str) -> None:
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(change)
    before = folder(path)
    refuses(path, StoreOtherSchema, BUNDLED.head)
    assert folder(path) == before


def test_tables_of_other_programs_beside_ours_are_no_obstacle(path: Path) -> None:
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE _replica (seq INTEGER); ANALYZE;")
    Store.open(path).close()


@pytest.mark.process
@pytest.mark.parametrize("revision", ["0011", "0999"])
def test_commits_in_the_log_of_a_refused_state_stay_there(path: Path, revision: str) -> None:
    """The process that wrote it was killed, so its commits are in the log beside the file."""
    schema = next(one for one in UNRELEASED if "eff008f" in one.name)
    code = (
        "import os, sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1])\n"
        "connection.executescript('PRAGMA journal_mode = WAL;' + open(sys.argv[2]).read())\n"
        "connection.execute('UPDATE alembic_version SET version_num = ?', [sys.argv[3]])\n"
        "connection.commit()\n"
        "os._exit(9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path), str(schema), revision], check=False, timeout=60)
    assert killed.returncode == 9
    before = folder(path)
    assert before["state.db-wal"]
    refuses(path, StoreOtherSchema if revision == "0011" else StoreTooNew, revision)
    assert folder(path) == before


@pytest.mark.process
def test_a_state_whose_process_was_killed_opens_with_what_its_log_holds(path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from spotd.store import Store\n"
        "store = Store.open(Path(sys.argv[1])); store.tx(lambda tx: tx.set_meta('a', 'b')); os._exit(9)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert folder(path)["state.db-wal"]
    with Store.open(path) as store:
        assert store.read(lambda reads: reads.meta("a")) == "b"


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


@pytest.mark.parametrize(
    ("options", "settings", "passed_on"),
    [
        ("-csearch_path=a", {"search_path": "a"}, {}),
        ("-c search_path=a --work_mem=8MB", {"search_path": "a", "work_mem": "8MB"}, {}),
        ("", {}, {}),
        ("-csearch_path=a -E", {}, {"options": "-csearch_path=a -E"}),
        (r"-csearch_path=a\ b", {}, {"options": r"-csearch_path=a\ b"}),
    ],
)
def test_settings_of_a_url_are_made_by_a_statement_which_poolers_pass_on(
    options: str, settings: dict[str, str], passed_on: dict[str, str]
) -> None:
    url = make_url("postgresql://db/spotd").update_query_dict({"options": options})
    assert postgres._options(url) == (settings, passed_on)
