"""What holds for the tests of single parts."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from threading import Lock
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine

from spotd.store.engine import AtPoint, migrate, pass_on
from spotd.store.place import MEMORY, DatabasePlace


@pytest.fixture(autouse=True, scope="package")
def _no_disk_sync() -> Iterator[None]:
    """These tests cut no power, so they need not wait for the disk; a process that a test starts still does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _statements_compiled_once() -> Iterator[None]:
    """Nearly each test opens a state of its own, and compiling its statements anew takes longer than most tests."""
    model = create_engine("sqlite://")
    model.connect().close()

    def alike(url: str, **options: Any) -> Engine:
        engine = create_engine(url, **options)
        engine.dialect, engine._compiled_cache = model.dialect, model._compiled_cache
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd.store.engine.create_engine", alike)
        yield
    model.dispose()


@pytest.fixture(autouse=True, scope="session")
def _tables_made_once() -> Iterator[None]:
    """A new state in memory is a copy of the first one of its process: to make the tables takes longer than many tests.

    A state in a file is always made as in production, and so is one whose test asks to be told of each step.
    """
    made: list[sqlite3.Connection] = []
    copying = Lock()  # a daemon under test may open its state in a thread of its own

    def copied(connection: Connection, place: DatabasePlace, at_point: AtPoint) -> bool:
        if str(place) != MEMORY or at_point is not pass_on:
            return migrate(connection, place, at_point)
        own: Any = connection.connection.driver_connection
        with copying:
            if made:
                connection.rollback()
                made[0].backup(own)
                return True
            is_new = migrate(connection, place, at_point)
            made.append(sqlite3.connect(":memory:", check_same_thread=False))
            own.backup(made[0])
            return is_new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd.store.store.migrate", copied)
        yield
    for model in made:
        model.close()


@pytest.fixture(autouse=True, scope="session")
def _plugins_found_once() -> Iterator[None]:
    """Each config asks which plugins are installed, and to search all distributions takes longer than to read it."""

    @cache
    def found(_paths: tuple[str, ...], group: str) -> EntryPoints:
        return entry_points(group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd.config.credentials.entry_points", lambda *, group: found(tuple(sys.path), group))
        yield
