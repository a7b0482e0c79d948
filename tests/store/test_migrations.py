"""The schema: written by hand, equal to the tables, brought up to date in one step that happens or does not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, event

from spotd.store import Store, StoreCorrupt, StorePoint
from spotd.store.engine import open_engine, parse_place
from spotd.store.migrate import BUNDLED, Schema, migrate, migration_config
from spotd.store.points import pass_on
from spotd.store.tables import METADATA
from tests.store import values as v


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state.db"
    with Store.open(path) as store:
        store.tx(lambda tx: tx.commit(v.running_job()))
    return path


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = open_engine(parse_place(path))
    yield engine
    engine.dispose()


def test_the_migrated_schema_is_that_of_the_tables(engine: Engine) -> None:
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_indexes_are_the_same_to_the_letter(engine: Engine) -> None:
    """alembic does not compare the condition of a partial index, on which promise 2 rests."""
    sql = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    with engine.connect() as connection:
        migrated: dict[str, str] = dict(connection.exec_driver_sql(sql).all())
    blank = open_engine(parse_place(":memory:"))
    with blank.connect() as connection:
        METADATA.create_all(connection)
        declared: dict[str, str] = dict(connection.exec_driver_sql(sql).all())
    blank.dispose()
    assert migrated == declared


def test_the_known_revisions_are_those_of_the_scripts() -> None:
    scripts = ScriptDirectory.from_config(migration_config())
    oldest_first = [script.revision for script in scripts.walk_revisions()][::-1]
    assert list(BUNDLED.revisions) == oldest_first
    assert scripts.get_heads() == [BUNDLED.head]


def test_a_state_that_is_up_to_date_is_opened_without_loading_the_scripts(path: Path) -> None:
    passed: list[StorePoint] = []
    with Store.open(path, at_point=passed.append):
        assert passed == []


NEXT = """
    from alembic import op
    import sqlalchemy as sa

    revision = "0003"
    down_revision = "0002"

    def upgrade():
        op.add_column("jobs", sa.Column("colour", sa.Text(), nullable=True))
        op.execute("UPDATE jobs SET name = 'renamed'")
        {body}
"""


def next_version(folder: Path, body: str = "") -> Schema:
    """A schema one step ahead of this one."""
    folder.mkdir(parents=True)
    (folder / "r0003_next.py").write_text(dedent(NEXT).format(body=body))
    return Schema(revisions=(*BUNDLED.revisions, "0003"), folders=(*BUNDLED.folders, folder))


def content(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return "\n".join(connection.iterdump())
    finally:
        connection.close()


def test_a_step_keeps_every_row_and_is_taken_once(path: Path, engine: Engine, tmp_path: Path) -> None:
    schema = next_version(tmp_path / "100% new")
    with engine.connect() as connection:
        assert migrate(connection, parse_place(path), pass_on, schema)
        assert not migrate(connection, parse_place(path), pass_on, schema)
        rows = connection.exec_driver_sql("SELECT id, name, colour FROM jobs").all()
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    assert rows == [("j1", "renamed", None)]


@pytest.mark.parametrize(
    "body", ["raise ZeroDivisionError", "op.execute('nonsense')"], ids=["the script fails", "the database refuses"]
)
def test_a_step_that_fails_half_way_leaves_the_state_as_it_was(
    path: Path, engine: Engine, tmp_path: Path, body: str
) -> None:
    before = content(path)
    with engine.connect() as connection:
        with pytest.raises(Exception, match=r"nonsense|^$"):
            migrate(connection, parse_place(path), pass_on, next_version(tmp_path / "new", body))
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    assert content(path) == before


@pytest.mark.parametrize("point", [StorePoint.MIGRATION_BEGUN, StorePoint.MIGRATION_STEP])
def test_a_step_that_is_interrupted_leaves_the_state_as_it_was(
    path: Path, engine: Engine, tmp_path: Path, point: StorePoint
) -> None:
    before = content(path)

    def interrupt(passed: StorePoint) -> None:
        if passed is point:
            raise KeyboardInterrupt

    with engine.connect() as connection, pytest.raises(KeyboardInterrupt):
        migrate(connection, parse_place(path), interrupt, next_version(tmp_path / "new"))
    assert content(path) == before


def test_a_step_that_orphans_rows_is_refused(path: Path, engine: Engine, tmp_path: Path) -> None:
    before = content(path)
    with engine.connect() as connection, pytest.raises(StoreCorrupt, match="rows that refer to nothing"):
        migrate(
            connection, parse_place(path), pass_on, next_version(tmp_path / "new", "op.execute('DELETE FROM jobs')")
        )
    assert content(path) == before


def test_everything_from_an_empty_file_to_the_newest_schema_is_one_transaction(tmp_path: Path) -> None:
    place = parse_place(tmp_path / "fresh.db")
    engine = open_engine(place)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2].split()[0].upper()))
    commits: list[object] = []
    event.listen(engine, "commit", commits.append)
    with engine.connect() as connection:
        migrate(connection, place, pass_on, next_version(tmp_path / "new"))
    engine.dispose()
    assert statements.count("BEGIN") == 1
    assert len(commits) == 1
    assert statements.index("BEGIN") < statements.index("CREATE") < statements.index("ALTER")
