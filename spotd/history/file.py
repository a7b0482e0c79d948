"""The door to the file: its settings, its tables, and what its errors mean.

One connection writes, reads and checkpoints. `synchronous=NORMAL` loses the last commits in a power cut and never
corrupts: prices come again at the next poll. `max_page_count` makes SQLite itself refuse to grow beyond the limit.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from spotd.history.spans import Watch
from spotd.history.values import Kind
from spotd_providers.contract.values import Market, ProviderName

APPLICATION_ID: Final = 0x73706F74
VERSION: Final = 1
PAGE_BYTES: Final = 4096
_WAL_PAGES: Final = 500
_CODE_MASK: Final = 0xFF
_TABLES: Final = """
CREATE TABLE kinds (
    id INTEGER PRIMARY KEY, provider TEXT NOT NULL, gpu TEXT NOT NULL, gpu_count INTEGER NOT NULL, market TEXT NOT NULL,
    UNIQUE (provider, gpu, gpu_count, market)
);
-- storage: newest price of a GB-month seen, since it hardly ever changes
CREATE TABLE series (
    id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, offer TEXT NOT NULL, pool TEXT NOT NULL, storage INTEGER NOT NULL,
    UNIQUE (kind, offer)
);
-- price: GPU part of the whole machine before the fee; null from when the offer was gone
CREATE TABLE points (
    series INTEGER NOT NULL, at INTEGER NOT NULL, price INTEGER, PRIMARY KEY (series, at)
) WITHOUT ROWID;
-- low_by and high_by: how far the extremes of the slot were from the typical price
CREATE TABLE slots (
    series INTEGER NOT NULL, slot INTEGER NOT NULL, typical INTEGER NOT NULL, low_by INTEGER NOT NULL,
    high_by INTEGER NOT NULL, offered_s INTEGER NOT NULL, PRIMARY KEY (series, slot)
) WITHOUT ROWID;
-- all offers of a kind in one slot: prices at equal shares of the time on offer, as big-endian 64-bit integers
CREATE TABLE markets (
    kind INTEGER NOT NULL, slot INTEGER NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL,
    offered_s INTEGER NOT NULL, prices BLOB NOT NULL, PRIMARY KEY (kind, slot)
) WITHOUT ROWID;
-- changes_from: since when every change is there
CREATE TABLE kept (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE watched (
    provider TEXT NOT NULL, since INTEGER NOT NULL, until INTEGER NOT NULL, PRIMARY KEY (provider, since)
) WITHOUT ROWID;
"""


class FileUnusable(Exception):
    """The file can never be used again: damaged, not ours, or of another version. It is to be set aside."""


class FileOfTheFuture(Exception):
    """The file cannot be used at this instant. Nothing is wrong with it once the clock is right."""


def open_file(path: Path, *, bytes_max: int) -> sqlite3.Connection:
    """Open a connection to the file, which is made if it is not there, for its owner only.

    Raises:
        FileUnusable, sqlite3.Error, OSError
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(str(path), isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        is_new = _is_new(connection)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise sqlite3.OperationalError("the folder cannot hold a write-ahead log")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * PAGE_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        if is_new:
            _make_tables(connection)
        connection.execute(f"PRAGMA max_page_count = {bytes_max // PAGE_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_new(connection: sqlite3.Connection) -> bool:
    """Whether there are no tables yet; asked before anything is changed, since the file may not be ours."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if (found, version) == (APPLICATION_ID, VERSION):
        return False
    if (found, version) != (0, 0) or connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
        raise FileUnusable(f"it is not a price history of version {VERSION}")
    return True


def _make_tables(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        for statement in _TABLES.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write all of the block, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite rolls back by itself after some errors
            connection.execute("ROLLBACK")
        raise


def has_own_tables(connection: sqlite3.Connection) -> bool:
    """Whether the file holds the tables of a price history and nothing else.

    A file from elsewhere may call a view `points` that never ends, or a column what takes a gigabyte to compute.
    """
    blank = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _make_tables(blank)
        return _schema(connection) <= _schema(blank)
    finally:
        blank.close()


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_schema LIMIT 100")
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows}


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is wrong, and not its disk or the moment."""
    return getattr(error, "sqlite_errorcode", 0) & _CODE_MASK in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def pages_used(connection: sqlite3.Connection) -> int:
    """Return how many pages hold something; the file may be longer by pages that are free again."""
    total: int = connection.execute("PRAGMA page_count").fetchone()[0]
    free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return total - free


def watched_spans(connection: sqlite3.Connection) -> dict[ProviderName, list[Watch]]:
    """Return the spans in which each provider was polled without a long pause, in order."""
    found: dict[ProviderName, list[Watch]] = {}
    rows = connection.execute("SELECT provider, since, until FROM watched ORDER BY provider, since")
    for provider, since, until in rows:
        found.setdefault(ProviderName(provider), []).append((since, until))
    return found


def kinds(connection: sqlite3.Connection) -> Iterator[Kind]:
    """Yield every kind of machine of which there is a price."""
    rows = connection.execute("SELECT id, provider, gpu, gpu_count, market FROM kinds")
    for number, provider, gpu, count, market in rows:
        yield Kind(id=number, provider=ProviderName(provider), gpu=gpu, gpu_count=count, market=Market(market))


def changes_from(connection: sqlite3.Connection) -> int:
    """Return since when every change is there."""
    row = connection.execute("SELECT value FROM kept WHERE name = 'changes_from'").fetchone()
    return 0 if row is None else row[0]


def set_aside(path: Path) -> Path:
    """Rename the file; at most one is kept under that name, so that a bad disk does not fill itself.

    Raises:
        OSError
    """
    aside = path.with_name(path.name + ".damaged")
    path.replace(aside)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    return aside
