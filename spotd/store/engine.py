"""The one door to the database: place, connection, its settings, and translation of its errors.

Theory. pysqlite's own transaction handling is switched off (`isolation_level = None`): it would begin late, and not at
all before DDL. Every BEGIN is ours, COMMIT and ROLLBACK go through SQLAlchemy. One connection writes. WAL with
synchronous=FULL means that a returned commit survives a power cut; memory mapping stays off because it turns an I/O
error into a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, create_mock_engine, event, exc, inspect, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import StaticPool

from spotd.core.domain.states import InvariantBroken
from spotd.store.place import (
    POSTGRES,
    DatabasePlace,
    StateError,
    StateUnavailable,
    StoreCorrupt,
    StoreInUse,
    StoreOtherSchema,
    StoreTooNew,
)
from spotd.store.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config


BUSY_TIMEOUT_MS: Final = 5_000
WAL_BYTES_KEPT: Final = 64_000_000
_SETTINGS: Final = (
    f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA mmap_size = 0",
    f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}",
)
_CODE_MASK: Final = 0xFF
"""The low byte of an extended SQLite result code is its kind."""


def has_log(place: DatabasePlace) -> bool:
    """Whether a process that did not end by itself left commits beside the file, in its write-ahead log."""
    if place.path is None:
        return False
    log = place.path.with_name(f"{place.path.name}-wal")
    return log.is_file() and log.stat().st_size > 0


def open_engine(place: DatabasePlace, *, reads_only: bool = False, keeps_log: bool = False) -> Engine:
    """Open an engine with exactly one connection, set up for durability; or one that can write nothing.

    Args:
        keeps_log: the log is read and stays: a connection that may write moves its commits into the file at the end.
    """
    if place.url is not None:
        from spotd.store.postgres import open_postgres

        return open_postgres(place, reads_only=reads_only)
    if place.path is not None:
        _create_private(place.path)
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(
            f"file:{quote(str(place))}?mode=ro" if keeps_log else str(place),
            uri=keeps_log,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_MS / 1000,
        ),
        poolclass=StaticPool,
        hide_parameters=True,
    )
    event.listen(engine, "connect", _set_up_reader if reads_only or keeps_log else _set_up)
    return engine


def _create_private(path: Path) -> None:
    """Make the file; if it is new, only its owner may read it (job specs hold environment values)."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        raise StateUnavailable(
            f"cannot open the state {path}: {exc.strerror}",
            hint="check that its folder exists and that this user may write there",
        ) from exc


def _set_up(connection: sqlite3.Connection, _record: object) -> None:
    for setting in _SETTINGS:
        connection.execute(setting)


def _set_up_reader(connection: sqlite3.Connection, record: object) -> None:
    _set_up(connection, record)
    connection.execute("PRAGMA query_only = ON")


@contextmanager
def translated(place: DatabasePlace) -> Iterator[None]:
    """Raise errors of the database as ours, with the cause kept.

    Raises:
        StateUnavailable, StoreCorrupt, InvariantBroken: see `translate`.
    """
    try:
        yield
    except exc.DBAPIError as error:
        raise translate(place, error.orig) from error
    except sqlite3.Error as error:
        raise translate(place, error) from error


def translate(place: DatabasePlace, error: BaseException | None) -> Exception:
    """Return our error for a driver's error."""
    if place.url is not None:
        from spotd.store.postgres import translate_postgres

        return translate_postgres(place, error)
    code = getattr(error, "sqlite_errorcode", 0) & _CODE_MASK
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if code == sqlite3.SQLITE_CONSTRAINT:
        return InvariantBroken(f"the state {place} refused a write that breaks its rules: {error}")
    if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return StoreCorrupt(
            f"the state {place} is damaged or not a spotd database ({name})",
            hint="move it away and restore a copy; without it spotd does not know which machines it has rented",
        )
    if code == sqlite3.SQLITE_FULL:
        return StateUnavailable(
            f"the disk with the state {place} is full", hint="free some space there; nothing was half-written"
        )
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return StateUnavailable(
            f"the state {place} is locked by another program", hint="close whatever else has the file open for writing"
        )
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}:
        return StateUnavailable(
            f"the state {place} cannot be written ({name})", hint="check the owner and mode of the file and its folder"
        )
    if code == sqlite3.SQLITE_IOERR:
        return StateUnavailable(
            f"the disk with the state {place} reports an error ({name})",
            hint="check the disk and its free space; nothing was half-written",
        )
    return StateError(f"the state {place} failed unexpectedly ({name}): {error}", hint="this is a defect of spotd")


# Moments at which a process can die, named so that tests can go through all of them.


class StorePoint(StrEnum):
    """A moment right after what its name states."""

    MIGRATION_BEGUN = "migration.begun"
    MIGRATION_STEP = "migration.step"
    MIGRATION_COMMITTED = "migration.committed"
    BEGUN = "begun"
    JOBS = "jobs"
    ATTEMPTS = "attempts"
    CHECKPOINTS = "checkpoints"
    INTENTS = "intents"
    COOLDOWNS = "cooldowns"
    CHARGES = "charges"
    EVENTS = "events"
    COMMITTED = "committed"


AtPoint = Callable[[StorePoint], None]


def pass_on(_point: StorePoint) -> None:
    """Do nothing at any point: what production uses."""


# One writer per state: an exclusive lock on a small file beside it, which names the process that holds it.


_PID_LENGTH_MAX: Final = 20
LEADER_TABLE: Final = "leader"
"""In PostgreSQL, who may write: there before the tables of a state are."""


class WriterLock:
    """Held from construction until `release`, and never longer than its process lives."""

    def __init__(self, state: Path) -> None:
        """Make this process the one writer of the state.

        Raises:
            StoreInUse: another one is.
            StateUnavailable: the lock file cannot be made.
        """
        path = state.with_name(state.name + ".lock")
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise StateUnavailable(
                f"cannot lock the state {state}: {exc.strerror}",
                hint="check that its folder exists and that this user may write there",
            ) from exc
        try:
            self._take(state, self._file)
        except BaseException:
            self.release()
            raise

    def _take(self, state: Path, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.pread(file, _PID_LENGTH_MAX, 0).decode("ascii", "replace").strip()
            who = f"process {pid}" if pid.isdecimal() else "another process"
            raise StoreInUse(
                f"the state {state} is in use by {who}",
                hint="stop that spotd first, or give this one a state directory of its own",
            ) from exc
        except OSError as exc:
            raise StateUnavailable(
                f"cannot lock the state {state}: {exc.strerror}",
                hint="keep the state on a local file system that supports locks",
            ) from exc
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Let another process write the state. The file stays: removing it would let two lock different files."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# Brings a database to the schema of this version, all steps in one transaction, or refuses to touch it.
#
# alembic is imported only when there are steps to take: it costs a daemon that is up to date nothing. A state that
# does not exist yet is made at once from the tables, or a daemon would carry alembic's nine megabytes until its next
# start; a test holds that to what the steps make of the first schema.


_FOLDER: Final = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The revisions a version knows, oldest first, and the folders with their scripts.

    The list repeats what the scripts hold, so that opening an up-to-date state need not load them; a test compares.

    Attributes:
        fingerprints: what `fingerprint` returns for a state of each revision. Before the first release there were lower
            numbers, some of them for several schemas, so a number alone does not show what a file holds.
    """

    fingerprints: Mapping[str, str]
    folders: tuple[Path, ...]

    @property
    def revisions(self) -> tuple[str, ...]:
        return tuple(self.fingerprints)

    @property
    def head(self) -> str:
        return self.revisions[-1]


BUNDLED: Final = Schema(
    fingerprints={
        "0015": "f22a464d38b50426",
        "0016": "d9e49ab53043280c",
        "0017": "f4a12a1882b83dea",
        "0018": "15f3c9ea5e2b34db",
        "0019": "16b6a3a3b646c314",
        "0020": "dfbe0d4cfc0b105f",
        "0021": "3ef91f9f49891416",
        "0022": "97a7e0522631ff47",
        "0023": "f5dce43b5f632ada",
        "0024": "0d55be48d1c6bfce",
        "0025": "0ff5829c96042db3",
    },
    folders=(_FOLDER / "versions",),
)


def fingerprint(connection: Connection) -> str:
    """Return a hash of spotd's tables and columns, whatever their order. Tables of other programs do not matter."""
    query = _COLUMNS
    if connection.dialect.name == POSTGRES:
        from spotd.store.postgres import COLUMNS as query  # noqa: N811 - the same query in another dialect
    rows = connection.execute(text(query))
    described = sorted(f"{table}.{name} {kind} {required} {key}" for table, name, kind, required, key in rows)
    known = [line for line in described if line.partition(".")[0] in METADATA.tables]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


_COLUMNS: Final = (
    'SELECT tables.name, columns.name, columns.type, columns."notnull", columns.pk '
    "FROM sqlite_master AS tables JOIN pragma_table_info(tables.name) AS columns WHERE tables.type = 'table'"
)


def stored_revision(connection: Connection, place: DatabasePlace, schema: Schema = BUNDLED) -> str | None:
    """Return the schema revision of the database, `None` for an empty one. Nothing is written.

    Raises:
        StoreTooNew: this version does not know the revision.
        StoreOtherSchema: the tables are not those of its revision.
        StoreCorrupt: these are not the tables of a spotd state.
    """
    tables = set(inspect(connection).get_table_names()) - {LEADER_TABLE}
    if not tables:
        return None
    revisions = []
    if "alembic_version" in tables and "attempts" in tables:
        revisions = list(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())
    if len(revisions) != 1:
        raise StoreCorrupt(f"the file {place} is not a spotd state", hint="name another file or move this one away")
    revision = str(revisions[0])
    is_older = revision < schema.revisions[0]
    if revision not in schema.revisions and not is_older:
        raise StoreTooNew(
            f"the state {place} was written by a newer spotd: its revision is {revision}, "
            f"this version knows up to {schema.head}",
            hint="install the newer spotd again, or name another state; the file was left as it is",
        )
    if is_older or fingerprint(connection) != schema.fingerprints[revision]:
        raise StoreOtherSchema(
            f"the state {place} states revision {revision} and has no tables that this version knows: a spotd from "
            "before the first release wrote it, or it was changed by hand",
            hint="it was left as it is: end its machines with the spotd that wrote it, or in the providers' consoles, "
            "then move it away or name another state; a copy from before the change can be restored",
        )
    return revision


def migrate(connection: Connection, place: DatabasePlace, at_point: AtPoint, schema: Schema = BUNDLED) -> bool:
    """Bring the database to the newest schema; return whether anything had to be done. Call it outside a transaction.

    Raises:
        StoreTooNew, StoreOtherSchema, StoreCorrupt: nothing was touched.
    """
    before = stored_revision(connection, place, schema)
    connection.rollback()
    if before == schema.head:
        return False
    is_sqlite = place.url is None
    if is_sqlite:
        # A rebuilt table must not take its children with it; the setting can only be changed outside a transaction.
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
        connection.rollback()
    try:
        if is_sqlite:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        at_point(StorePoint.MIGRATION_BEGUN)
        if before is None:
            before = _create(connection, at_point)
        if before != schema.head:
            _upgrade(connection, at_point, schema)
        stored_revision(connection, place, schema)
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall() if is_sqlite else ()
        if broken:
            raise StoreCorrupt(
                f"the state {place} has {len(broken)} rows that refer to nothing",
                hint="it was left at its former version; restore a copy of it",
            )
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    finally:
        if is_sqlite:
            connection.exec_driver_sql("PRAGMA foreign_keys = ON")
            connection.rollback()
    at_point(StorePoint.MIGRATION_COMMITTED)
    return True


def migration_config(schema: Schema = BUNDLED) -> Config:
    """Return alembic's settings, all of them in code."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("path_separator", "newline")
    config.set_main_option("script_location", _option(_FOLDER))
    config.set_main_option("version_locations", "\n".join(_option(folder) for folder in schema.folders))
    return config


def _option(path: Path) -> str:
    """Return the path as a ConfigParser value, where a % would begin an interpolation."""
    return str(path).replace("%", "%%")


@cache
def _statements() -> tuple[str, ...]:
    """Return what makes the tables, compiled once."""
    found: list[str] = []
    METADATA.create_all(
        create_mock_engine("sqlite://", lambda one, *_, **__: found.append(str(one.compile(dialect=sqlite.dialect())))),
        checkfirst=False,
    )
    return tuple(found)


def _create(connection: Connection, at_point: AtPoint) -> str:
    """Make the tables of this version; return their revision."""
    if connection.dialect.name == POSTGRES:
        from spotd.store.postgres import create_tables

        create_tables(connection)
    else:
        for statement in _statements():
            connection.exec_driver_sql(statement)
    # As alembic itself makes it, which finds it there at the next step.
    connection.exec_driver_sql(
        "CREATE TABLE alembic_version "
        "(version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    connection.execute(text("INSERT INTO alembic_version (version_num) VALUES (:head)"), {"head": BUNDLED.head})
    at_point(StorePoint.MIGRATION_STEP)
    return BUNDLED.head


def _upgrade(connection: Connection, at_point: AtPoint, schema: Schema, *, to: str | None = None) -> None:
    from alembic import command

    def each_step(**_: Any) -> None:
        at_point(StorePoint.MIGRATION_STEP)

    config = migration_config(schema)
    config.attributes["connection"] = connection
    config.attributes["each_step"] = each_step
    command.upgrade(config, schema.head if to is None else to)
