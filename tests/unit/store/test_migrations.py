"""The schema: written by hand, equal to the tables, brought up to date in one step that happens or does not."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, event

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import AttemptState, JobState
from spotd.store import Reads, Store, StoreCorrupt, StoreOtherSchema, StorePoint
from spotd.store.engine import (
    BUNDLED,
    Schema,
    _statements,
    _upgrade,
    fingerprint,
    migrate,
    migration_config,
    open_engine,
    pass_on,
)
from spotd.store.place import parse_place
from spotd.store.tables import METADATA
from tests.unit.core.builders import shop_policy
from tests.unit.store import values as v

FIRST_SCHEMA = Path(__file__).with_name("first_schema.sql")
"""As the first release made it; never edited after that."""
FIRST_ROWS = Path(__file__).with_name("first_rows.sql")
"""What a daemon of that release wrote in it; never edited either."""


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


@pytest.fixture
def stepwise() -> Iterator[Connection]:
    """A state that took every step, as one has that is as old as spotd."""
    engine = open_engine(parse_place(":memory:"))
    with engine.connect() as connection:
        connection.connection.executescript(FIRST_SCHEMA.read_text(encoding="utf-8"))
        _upgrade(connection, pass_on, BUNDLED)
        yield connection
    engine.dispose()


def test_the_migrated_schema_is_that_of_the_tables(stepwise: Connection) -> None:
    assert compare_metadata(MigrationContext.configure(stepwise), METADATA) == []


def test_indexes_and_triggers_are_the_same_to_the_letter(engine: Engine, stepwise: Connection) -> None:
    """alembic compares neither triggers nor the condition of a partial index, on which promise 2 rests."""
    sql = "SELECT name, sql FROM sqlite_master WHERE type != 'table' AND sql IS NOT NULL"
    migrated: dict[str, str] = dict(stepwise.exec_driver_sql(sql).all())
    with engine.connect() as connection:
        declared: dict[str, str] = dict(connection.exec_driver_sql(sql).all())
    assert {"events_no_delete", "charges_no_update"} < set(migrated)
    assert migrated == declared


def test_a_state_made_at_once_is_the_one_that_took_every_step(engine: Engine, stepwise: Connection) -> None:
    def described(connection: Connection) -> dict[str, list[set[tuple[object, ...]]]]:
        names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
        # Without the position: a step adds its columns at the end.
        return {
            name: [
                {row[1:] for row in connection.exec_driver_sql(f"PRAGMA table_info('{name}')").all()},
                {row[2:] for row in connection.exec_driver_sql(f"PRAGMA foreign_key_list('{name}')").all()},
                {row[2:] for row in connection.exec_driver_sql(f"PRAGMA index_list('{name}')").all()},
            ]
            for name in names
        }

    with engine.connect() as connection:
        at_once = described(connection)
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").all() == [(BUNDLED.head,)]
    assert len(at_once) > 3
    assert at_once == described(stepwise)


@pytest.mark.process
def every_row(connection: sqlite3.Connection, tables: Mapping[str, str]) -> dict[str, list[tuple[object, ...]]]:
    """All rows of these tables, by these columns."""
    return {
        table: connection.execute(f"SELECT {columns} FROM {table} ORDER BY {columns}").fetchall()  # noqa: S608 - our own
        for table, columns in tables.items()
    }


def test_the_rows_of_the_first_release_are_all_there_and_understood_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(FIRST_SCHEMA.read_text(encoding="utf-8") + FIRST_ROWS.read_text(encoding="utf-8"))
        names = [name for (name,) in old.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {
            name: ", ".join(f'"{row[1]}"' for row in old.execute(f"PRAGMA table_info({name})"))
            for name in names
            if name != "alembic_version" and not name.startswith("sqlite_")
        }
        before = every_row(old, columns)
    assert {name: len(before[name]) for name in ("jobs", "attempts", "charges", "events", "checkpoints")} == {
        "jobs": 3, "attempts": 3, "charges": 2, "events": 31, "checkpoints": 1
    }  # fmt: skip
    with Store.open(path) as store:
        world = store.read(lambda reads: reads.world(shop_policy(), datetime(2026, 3, 2, 13, tzinfo=UTC)))
        done, running, waiting = (store.read(partial(Reads.job, job_id=JobId(f"j{n}"))) for n in (1, 2, 3))
        charges = store.read(lambda reads: reads.charges_of(JobId("j1")))
        attempts = store.read(lambda reads: reads.attempts_of(JobId("j1")))
    with closing(sqlite3.connect(path)) as new:
        assert every_row(new, columns) == before
    assert world.unreadable == ()
    assert done is not None
    assert running is not None
    assert waiting is not None
    assert [job.state for job in (done, running, waiting)] == [
        JobState.SUCCEEDED, JobState.RUNNING, JobState.WAITING_PRICE
    ]  # fmt: skip
    assert set(world.jobs) == {"j2", "j3"}
    assert [item.state for item in world.attempts.values()] == [AttemptState.RUNNING]
    assert sum(charge.amount for charge in charges) == sum(item.meter.settled for item in attempts) == done.spent
    assert [saved.name for saved in done.checkpoints] == ["step-1"]


@pytest.mark.process
def test_a_new_state_is_made_without_loading_alembic(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from spotd.store import Store\n"
        "with Store.open(Path(sys.argv[1])): print([m for m in ('alembic', 'mako') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "new.db")]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


def test_the_known_revisions_are_those_of_the_scripts() -> None:
    scripts = ScriptDirectory.from_config(migration_config())
    oldest_first = [script.revision for script in scripts.walk_revisions()][::-1]
    assert list(BUNDLED.revisions) == oldest_first
    assert scripts.get_heads() == [BUNDLED.head]


def test_the_fingerprint_of_each_revision_is_what_its_step_makes() -> None:
    found = {}
    engine = open_engine(parse_place(":memory:"))
    with engine.connect() as connection:
        connection.connection.executescript(FIRST_SCHEMA.read_text(encoding="utf-8"))
        for revision in BUNDLED.revisions:
            _upgrade(connection, pass_on, BUNDLED, to=revision)
            found[revision] = fingerprint(connection)
    engine.dispose()
    assert found == dict(BUNDLED.fingerprints), "a new revision needs its line, a released one stays as it is"
    assert len(set(found.values())) == len(found)


def test_a_step_that_makes_other_tables_than_its_revision_says_is_undone(
    path: Path, engine: Engine, tmp_path: Path
) -> None:
    before = content(path)
    body = "op.add_column('attempts', sa.Column('more', sa.Text(), nullable=True))"
    with engine.connect() as connection, pytest.raises(StoreOtherSchema, match="revision next"):
        migrate(connection, parse_place(path), pass_on, next_version(tmp_path / "new", body))
    assert content(path) == before


def test_a_state_that_is_up_to_date_is_opened_without_loading_the_scripts(path: Path) -> None:
    passed: list[StorePoint] = []
    with Store.open(path, at_point=passed.append):
        assert passed == []


NEXT = """
    from alembic import op
    import sqlalchemy as sa

    revision = "next"
    down_revision = "{head}"

    def upgrade():
        op.add_column("jobs", sa.Column("colour", sa.Text(), nullable=True))
        op.execute("UPDATE jobs SET name = 'renamed'")
        {body}
"""


def next_version(folder: Path, body: str = "") -> Schema:
    """A schema one step ahead of this one."""
    folder.mkdir(parents=True)
    (folder / "next_one.py").write_text(dedent(NEXT).format(body=body, head=BUNDLED.head))
    engine = open_engine(parse_place(":memory:"))
    with engine.connect() as connection:
        for statement in (*_statements(), "ALTER TABLE jobs ADD COLUMN colour TEXT"):
            connection.exec_driver_sql(statement)
        expected = fingerprint(connection)
    engine.dispose()
    return Schema(fingerprints={**BUNDLED.fingerprints, "next": expected}, folders=(*BUNDLED.folders, folder))


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
