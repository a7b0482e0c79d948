"""A power cut at any instant: the state opens, and holds every commit that had returned, whole commits only."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import apsw
import pytest

from spotd.core.domain.intents import IntentState
from spotd.core.domain.plan import Plan, broken_rules
from spotd.core.domain.states import AttemptState, JobState
from spotd.store import Store, Tx
from tests.unit.store import values as v
from tests.unit.store.power_cut import Acknowledged, Connection, Image, Record, RecordedFiles, draw_images

pytestmark = pytest.mark.long

IMAGES: Final = 3_000
OPENED_EVERY: Final = 100
"""Of so many images one is opened by the store itself, which takes ten times as long as to read its rows."""
CONTROL_IMAGES: Final = 200
JOBS: Final = 5
CHECKPOINT_PAGES: Final = 40
STATE: Final = "state.db"
SHARED_MEMORY: Final = Path("/dev/shm")

Query = Callable[[str], Any]


def _digest(query: Query) -> str:
    """Return a hash of every row of every table, empty for a file without tables."""
    tables = [name for (name,) in query("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    digest = hashlib.sha256()
    for table in tables:
        rows = query(f'SELECT * FROM "{table}" ORDER BY rowid')  # noqa: S608 - a name of this very file
        digest.update(repr((table, [tuple(row) for row in rows])).encode())
    return digest.hexdigest() if tables else ""


def _plans() -> Iterator[Plan]:
    """Jobs that are queued, placed, bought and ended, one commit for each step."""
    for number in range(1, JOBS + 1):
        name = f"j{number}"
        item = v.attempt(name)
        yield v.plan(v.job(name, name=name))
        yield v.plan(v.job(name, JobState.PROVISIONING, name=name, attempts_made=1), item, v.launch_of(item))
        yield Plan(intents={one.id: one for one in [v.launch_of(item, state=IntentState.SENT)]})
        item = replace(item, state=AttemptState.RUNNING, ref=v.ref(f"i-{name}"), launched_at=v.NOW, running_at=v.NOW)
        running = v.job(name, JobState.RUNNING, name=name, attempts_made=1, checkpoints=(v.checkpoint(),))
        yield v.plan(running, item, v.launch_done(item))
        yield v.plan(v.charge(name), *v.told(running))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One life of a state. `states[n]` is the hash of the state after commit n, 0 being the one without a commit."""

    record: Record
    states: tuple[str, ...]


def _recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str = "") -> Recorded:
    record, states = Record(), []
    files = RecordedFiles(record)
    with monkeypatch.context() as patched:
        patched.setattr(
            "spotd.store.engine.sqlite3.connect",
            lambda path, **_: Connection(path, synchronous=synchronous, checkpoint_pages=CHECKPOINT_PAGES),
        )
        store = Store.open(folder / STATE)
        states.append(_state_of(store))
        for number, plan in enumerate(_plans(), 1):
            store.tx(partial(_commit, plan))
            record.steps.append(Acknowledged(number))
            states.append(_state_of(store))
        steps = [*record.steps]  # the power goes before the state is closed
        store.close()
    files.unregister()
    return Recorded(record=Record(steps), states=tuple(states))


def _commit(plan: Plan, tx: Tx) -> None:
    tx.commit(plan)


def _state_of(store: Store) -> str:
    return store.tx(lambda tx: _digest(lambda sql: tx._connection.exec_driver_sql(sql).all()))


@pytest.fixture
def image_folder() -> Iterator[Path]:
    """A folder for thousands of images, in memory where the system has it."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="spotd-power-cut-") as name:
        yield Path(name)


@dataclass(frozen=True, slots=True)
class Content:
    """The hash of the rows that SQLite finds in an image, or what keeps it from that."""

    rows: str = ""
    damage: str = ""


def _content(folder: Path) -> Content:
    try:
        with closing(sqlite3.connect(folder / STATE, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")  # it is an image: nothing of it has to survive
            if connection.execute("PRAGMA quick_check").fetchall() != [("ok",)]:
                return Content(damage="it is damaged")
            return Content(rows=_digest(lambda sql: connection.execute(sql).fetchall()))
    except sqlite3.DatabaseError as exc:
        return Content(damage=f"it cannot be opened: {exc}")


class Reader:
    """Reads images in a folder. Half of them have the bytes of another one, which SQLite reads but once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Content] = {}

    def content(self, image: Image) -> Content:
        whole = hashlib.sha256()
        for name, data in sorted(image.files.items()):
            whole.update(f"{name} {len(data)} ".encode())
            whole.update(data)
        if (known := self._known.get(whole.hexdigest())) is None:
            image.write(self._folder)
            known = self._known[whole.hexdigest()] = _content(self._folder)
        return known


def _problem(life: Recorded, cut: int, content: Content) -> str:
    """Return what is wrong with the state that was found after this cut; empty for nothing."""
    acknowledged, found = life.record.acknowledged(cut), content.rows
    if content.damage:
        return content.damage
    if found in life.states[acknowledged : acknowledged + 2] or (not found and acknowledged == 0):
        return ""
    if found in life.states:
        return f"acknowledged commits are lost: {life.states.index(found)} of {acknowledged} are there"
    return "it holds a part of a commit"


def _store_problem(folder: Path) -> str:
    """Return what spotd itself finds wrong; it must be able to go on from the image."""
    with Store.open(folder / STATE) as store:
        world = store.read(lambda reads: reads.world(v.POLICY, v.NOW))
        if world.unreadable or (broken := broken_rules(world)):
            return f"rules are broken: {world.unreadable or broken}"
        store.tx(lambda tx: tx.commit(v.plan(v.job("after", name="after"))))
    return ""


def test_no_power_cut_costs_a_commit_that_had_returned(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, rng, reader = _recorded(tmp_path, monkeypatch), Random(22), Reader(image_folder)
    cuts = set()
    for number, image in enumerate(draw_images(life.record, IMAGES, rng)):
        cuts.add(image.cut)
        assert not (problem := _problem(life, image.cut, reader.content(image))), (
            f"image {number}, cut {image.cut}: {problem}"
        )
        if number % OPENED_EVERY == 0:
            image.write(image_folder)
            assert not (problem := _store_problem(image_folder)), f"image {number}, cut {image.cut}: {problem}"
    assert len(cuts) > len(life.record.steps) * 0.8, "the cuts leave out a part of the life"


@pytest.mark.parametrize("synchronous", ["NORMAL", "OFF"])
def test_a_state_that_waits_less_for_the_disk_loses_commits(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str
) -> None:
    """The control: what finds nothing at FULL finds this."""
    life, rng, reader = _recorded(tmp_path, monkeypatch, synchronous), Random(22), Reader(image_folder)
    problems = set()
    for image in draw_images(life.record, CONTROL_IMAGES, rng):
        problems.add(_problem(life, image.cut, reader.content(image)).partition(":")[0])
    assert "acknowledged commits are lost" in problems
    assert (problems & {"it is damaged", "it holds a part of a commit", "it cannot be opened"} != set()) == (
        synchronous == "OFF"
    ), problems


def test_the_recorded_life_has_every_kind_of_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is written, moved into the file and begun anew, and the first journal is deleted."""
    life = _recorded(tmp_path, monkeypatch)
    kinds = {(type(step).__name__, getattr(step, "file", "")) for step in life.record.steps}
    log, journal = f"{STATE}-wal", f"{STATE}-journal"
    assert kinds >= {("Written", log), ("Synced", log), ("Written", STATE), ("Synced", STATE), ("Deleted", journal)}
    headers = [s for s in life.record.steps if getattr(s, "file", "") == log and getattr(s, "offset", None) == 0]
    assert len(headers) >= 3, "the log is begun anew"
    assert len(set(life.states)) == len(life.states)
    assert apsw.sqlite_lib_version() >= "3.40"
