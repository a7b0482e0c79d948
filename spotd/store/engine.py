"""The one door to the database: place, connection, its settings, and translation of its errors.

Theory. pysqlite's own transaction handling is switched off (`isolation_level = None`): it would begin late, and not at
all before DDL. Every BEGIN is ours, COMMIT and ROLLBACK go through SQLAlchemy. One connection writes. WAL with
synchronous=FULL means that a returned commit survives a power cut; memory mapping stays off because it turns an I/O
error into a crash.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sqlalchemy import Engine, create_engine, event, exc
from sqlalchemy.engine import make_url
from sqlalchemy.pool import StaticPool

from spotd.core.domain.states import InvariantBroken
from spotd.store.errors import StateError, StateUnavailable, StoreCorrupt, StoreUnsupported

MEMORY: Final = ":memory:"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePlace:
    """Where a state lives. `path` is `None` for one that lives in memory only."""

    path: Path | None

    def __str__(self) -> str:
        return MEMORY if self.path is None else str(self.path)


def parse_place(url: str | Path) -> DatabasePlace:
    """Return the place of a path, `sqlite:///...` URL or `:memory:`.

    Raises:
        StoreUnsupported: another kind of database. The message does not repeat the URL, which may hold a password.
    """
    if isinstance(url, str) and "://" in url:
        scheme = url.partition("://")[0]
        if scheme.partition("+")[0] != "sqlite":
            raise StoreUnsupported(
                f'a state in "{scheme}://" is not supported in this version',
                hint='write state = "sqlite" in the [daemon] section of the config',
            )
        url = make_url(url).database or MEMORY
    return DatabasePlace(path=None if str(url) == MEMORY else Path(url).absolute())


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
