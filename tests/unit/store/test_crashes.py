"""`kill -9` at every point of a commit or a migration: the state is the one before or the one after."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotd.core.domain.world import World
from spotd.store import EventView, Reads, Store, StorePoint
from spotd.store.engine import BUNDLED
from tests.unit.store import values as v
from tests.unit.store.dying import MIGRATING, before, deadly
from tests.unit.store.migrating import KILLS

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Seen:
    """Everything that the two plans write."""

    world: World
    events: tuple[EventView, ...]
    charges: tuple[object, ...]


def look(r: Reads) -> Seen:
    return Seen(world=r.world(v.POLICY, v.NOW), events=r.events(), charges=r.charges_of(v.job_id("j1")))


def run_to_death(module: str, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.store.{module}", argument],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def graveyard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state for each point, whose writer was killed there."""
    folder = tmp_path_factory.mktemp("graveyard")
    run_to_death("dying", f"{folder}/{{}}.db")
    return folder


@pytest.fixture(scope="module")
def alive() -> tuple[Seen, Seen, Seen]:
    """An empty state, the one after the first plan, and the one after the second."""
    with Store.open(":memory:") as store:
        empty = store.read(look)
        store.tx(lambda tx: tx.commit(before()))
        first = store.read(look)
        store.tx(lambda tx: tx.commit(deadly()))
        return empty, first, store.read(look)


def assert_before_or_after(found_at: Path | str, alive: tuple[Seen, Seen, Seen], point: StorePoint) -> None:
    """The state whose writer was killed there is that before its plan or that after it, and goes on from there."""
    empty, first, second = alive
    with Store.open(found_at) as store:
        found = store.read(look)
        if point in MIGRATING:
            assert found == empty
            store.tx(lambda tx: tx.commit(before()))
            assert store.read(look) == first
        elif point is StorePoint.COMMITTED:
            assert found == second
        else:
            assert found == first
            store.tx(lambda tx: tx.commit(deadly()))
            assert store.read(look) == second


@pytest.mark.parametrize("point", list(StorePoint))
def test_a_killed_writer_leaves_the_state_before_or_after(
    graveyard: Path, alive: tuple[Seen, Seen, Seen], point: StorePoint
) -> None:
    assert_before_or_after(graveyard / f"{point.replace('.', '_')}.db", alive, point)


def test_the_deadly_plan_writes_every_kind_of_row_there_is() -> None:
    plan = deadly()
    assert all((plan.jobs, plan.attempts, plan.intents, plan.cooldowns, plan.charges, plan.events))
    assert any(job.checkpoints for job in plan.jobs.values())


def test_every_point_is_passed_in_the_order_in_which_they_are_named() -> None:
    passed: list[StorePoint] = []
    with Store.open(":memory:", at_point=passed.append) as store:
        store.tx(lambda tx: tx.commit(deadly()))
    assert list(dict.fromkeys(passed)) == list(StorePoint), "a step of the migration is passed once a revision"


def content(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump())


def revision(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def test_a_writer_that_is_killed_within_a_migration_leaves_the_former_state_or_the_new_one(tmp_path: Path) -> None:
    """From each revision to today's, ten kills each: nothing is half, and the next start ends where it would have."""
    run_to_death("migrating", str(tmp_path))
    undone = done = 0
    for former in BUNDLED.revisions[:-1]:
        whole = tmp_path / f"{former}.db"
        before_step = content(whole)
        Store.open(whole).close()
        after_step = content(whole)
        for number in range(KILLS):
            path = tmp_path / f"{former}-{number}.db"
            found = content(path)
            assert found == (before_step if revision(path) == former else after_step), path.name
            undone += revision(path) == former
            done += revision(path) == BUNDLED.head
            Store.open(path).close()
            assert content(path) == after_step, path.name
    assert undone + done == KILLS * (len(BUNDLED.revisions) - 1)
    assert undone > done > 0
