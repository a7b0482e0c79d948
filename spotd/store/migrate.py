"""Brings a database to the schema of this version, all steps in one transaction, or refuses to touch it.

alembic is imported only when there is something to do: it costs a daemon that is up to date nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, inspect, text

from spotd.store.engine import Place
from spotd.store.errors import StoreCorrupt, StoreTooNew
from spotd.store.points import AtPoint, StorePoint

if TYPE_CHECKING:
    from alembic.config import Config

HEAD: Final = "0001"
"""The newest revision; a test compares it with the scripts."""
REVISIONS: Final = frozenset({"0001"})
_FOLDER: Final = Path(__file__).parent / "migrations"


def stored_revision(connection: Connection, place: Place) -> str | None:
    """The schema revision of the database, `None` for an empty one. Nothing is written.

    Raises:
        StoreTooNew: this version does not know the revision.
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
    if revision not in REVISIONS:
        raise StoreTooNew(
            f"the state {place} was written by a newer spotd (its revision is {revision}, this one knows up to {HEAD})",
            hint="install the newer spotd again, or name another state; the file was left as it is",
        )
    return revision


def migrate(connection: Connection, place: Place, at_point: AtPoint) -> bool:
    """The schema is that of `HEAD`; whether anything had to be done. Must be called outside a transaction.

    Raises:
        StoreTooNew, StoreCorrupt: nothing was touched.
    """
    before = stored_revision(connection, place)
    connection.rollback()
    if before == HEAD:
        return False
    # A rebuilt table must not take its children with it; the setting can only be changed outside a transaction.
    connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.rollback()
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        at_point(StorePoint.MIGRATION_BEGUN)
        _upgrade(connection, at_point)
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


def migration_config() -> Config:
    """alembic's settings, all of them in code."""
    from alembic.config import Config

    config = Config()
    # The path is doubled against ConfigParser's interpolation, which would read a % in a folder's name.
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _upgrade(connection: Connection, at_point: AtPoint) -> None:
    from alembic import command

    def each_step(**_: Any) -> None:
        at_point(StorePoint.MIGRATION_STEP)

    config = migration_config()
    config.attributes["connection"] = connection
    config.attributes["each_step"] = each_step
    command.upgrade(config, HEAD)
