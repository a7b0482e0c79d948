"""Brings a database to the schema of this version, all steps in one transaction, or refuses to touch it.

alembic is imported only when there are steps to take: it costs a daemon that is up to date nothing. A state that does
not exist yet is made at once from the tables, or a daemon would carry alembic's nine megabytes until its next start; a
test holds that to what the steps make of the first schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, create_mock_engine, inspect, text
from sqlalchemy.dialects import sqlite

from spotd.store.engine import DatabasePlace
from spotd.store.errors import StoreCorrupt, StoreOtherSchema, StoreTooNew
from spotd.store.points import AtPoint, StorePoint
from spotd.store.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config

_FOLDER: Final = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The revisions a version knows, oldest first, and the folders with their scripts.

    The list repeats what the scripts hold, so that opening an up-to-date state need not load them; a test compares.

    Attributes:
        fingerprints: what `fingerprint` returns for a state of each revision. Before the first release the numbers of
            revisions were used again for other tables, so a number alone does not show what a file holds.
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
        "0001": "ee5db1e6d589859b",
        "0002": "eb5f8a1a00f6c21e",
        "0003": "8f9641e336644878",
        "0004": "6ec3cae73cfc3405",
        "0005": "49e52ef2f10e6e78",
        "0006": "941618718c83e5ff",
        "0007": "004d4bcb95db5527",
        "0008": "3c118b05a1efab61",
        "0009": "5d5b24de294a5363",
        "0010": "5905416695274e22",
        "0011": "322c0e6d464fe23e",
        "0012": "94566034b00ba5b8",
        "0013": "c1dbfba001480f3d",
        "0014": "b7380712edd71c2d",
        "0015": "f22a464d38b50426",
    },
    folders=(_FOLDER / "versions",),
)


def fingerprint(connection: Connection) -> str:
    """Return a hash of spotd's tables and columns, whatever their order. Tables of other programs do not matter."""
    rows = connection.execute(text(_COLUMNS))
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
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    revisions = []
    if "alembic_version" in tables and "attempts" in tables:
        revisions = list(connection.execute(text("SELECT version_num FROM alembic_version")).scalars())
    if len(revisions) != 1:
        raise StoreCorrupt(f"the file {place} is not a spotd state", hint="name another file or move this one away")
    revision = str(revisions[0])
    if revision not in schema.revisions:
        raise StoreTooNew(
            f"the state {place} was written by a newer spotd: its revision is {revision}, "
            f"this version knows up to {schema.head}",
            hint="install the newer spotd again, or name another state; the file was left as it is",
        )
    if fingerprint(connection) != schema.fingerprints[revision]:
        raise StoreOtherSchema(
            f"the state {place} states revision {revision} and does not have its tables: a spotd from before the first "
            "release wrote it, or it was changed by hand",
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
    # A rebuilt table must not take its children with it; the setting can only be changed outside a transaction.
    connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.rollback()
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        at_point(StorePoint.MIGRATION_BEGUN)
        if before is None:
            before = _create(connection, at_point)
        if before != schema.head:
            _upgrade(connection, at_point, schema)
        stored_revision(connection, place, schema)
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
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
