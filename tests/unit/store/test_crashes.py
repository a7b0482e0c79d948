"""`kill -9` at every point of a commit or a migration: the state is the one before or the one after."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotd.core.domain.world import World
from spotd.store import EventView, Reads, Store, StorePoint
from tests.unit.store import values as v
from tests.unit.store.dying import MIGRATING, before, deadly

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Seen:
    """Everything that the two plans write."""

    world: World
    events: tuple[EventView, ...]
    charges: tuple[object, ...]


def look(r: Reads) -> Seen:
    return Seen(world=r.world(v.POLICY, v.NOW), events=r.events(), charges=r.charges_of(v.job_id("j1")))


@pytest.fixture(scope="module")
def graveyard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state for each point, whose writer was killed there."""
    folder = tmp_path_factory.mktemp("graveyard")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.store.dying", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
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


@pytest.mark.parametrize("point", list(StorePoint))
def test_a_killed_writer_leaves_the_state_before_or_after(
    graveyard: Path, alive: tuple[Seen, Seen, Seen], point: StorePoint
) -> None:
    empty, first, second = alive
    with Store.open(graveyard / f"{point}.db") as store:
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


def test_the_deadly_plan_writes_every_kind_of_row_there_is() -> None:
    plan = deadly()
    assert all((plan.jobs, plan.attempts, plan.intents, plan.cooldowns, plan.charges, plan.events))
    assert any(job.checkpoints for job in plan.jobs.values())


def test_every_point_is_passed_in_the_order_in_which_they_are_named() -> None:
    passed: list[StorePoint] = []
    with Store.open(":memory:", at_point=passed.append) as store:
        store.tx(lambda tx: tx.commit(deadly()))
    assert list(dict.fromkeys(passed)) == list(StorePoint), "a step of the migration is passed once a revision"
