"""Cost in statements, which does not depend on the machine: constant however many rows there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

from spotd.core.domain.intents import IntentKind
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.store import Reads, Store
from tests.unit.store import values as v
from tests.unit.store.reads import costs_by_day, costs_by_job

MANY = 200


@dataclass
class Counted:
    """A state whose statements are counted."""

    store: Store
    statements: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        event.listen(self.store._engine, "before_cursor_execute", lambda *args: self.statements.append(args[2]))

    def cost_of(self, work: Callable[[Store], object]) -> int:
        """How many statements the work sends, those that begin a transaction left out."""
        before = len(self.statements)
        work(self.store)
        return len([s for s in self.statements[before:] if not s.startswith("BEGIN")])


def many(count: int) -> Plan:
    """Running jobs, each with two attempts, two checkpoints and a charge."""
    rows: list[object] = []
    for n in range(count):
        text = f"j{n:05}"
        saved = (v.checkpoint("b"), v.checkpoint("a"))
        rows.append(v.job(text, JobState.RUNNING, attempts_made=2, checkpoints=saved))
        ended, running = v.attempt(text, 1, AttemptState.ENDED), v.attempt(text, 2, AttemptState.RUNNING)
        rows += [
            ended,
            running,
            v.charge(text),
            v.launch_of(running, id=f"terminate:{text}", kind=IntentKind.TERMINATE),
        ]
    return v.plan(*rows)  # type: ignore[arg-type]  # each is a value that a plan holds


@pytest.fixture(scope="module")
def states() -> Iterator[tuple[Counted, Counted]]:
    """A state with one job and one with hundreds."""
    with Store.open(":memory:") as small, Store.open(":memory:") as large:
        small.tx(lambda tx: tx.commit(many(1)))
        large.tx(lambda tx: tx.commit(many(MANY)))
        yield Counted(small), Counted(large)


def asking(question: Callable[[Reads], object]) -> Callable[[Store], object]:
    return lambda store: store.read(question)


def the_world(store: Store) -> World:
    return store.read(lambda r: r.world(v.POLICY, v.NOW))


def cold_world(store: Store) -> World:
    store._memory.forget()
    return the_world(store)


def change_every_job(store: Store) -> int:
    """Every job of the state gets another reason, as after a change of prices."""
    jobs = {i: replace(job, reason="changed") for i, job in the_world(store).jobs.items()}
    return store.tx(lambda tx: tx.commit(Plan(jobs=jobs, events=v.told(*jobs.values()))))


def change_from_nothing(store: Store) -> int:
    store._memory.forget()
    return change_every_job(store)


WORK: dict[str, tuple[int, Callable[[Store], object]]] = {
    "list of jobs": (3, asking(lambda r: r.jobs())),
    "active jobs": (3, asking(lambda r: r.jobs(active=True, limit=50))),
    "one job": (2, asking(lambda r: r.job(v.job_id("j00000")))),
    "find by id": (4, asking(lambda r: r.jobs_meant_by("j00000"))),
    "find by beginning": (7, asking(lambda r: r.jobs_meant_by("j0"))),
    "costs": (1, asking(lambda r: costs_by_job(r))),
    "counts": (1, asking(lambda r: r.counts_by_state())),
    "world from nothing": (8, cold_world),
    "world when nothing changed": (5, the_world),
    "commit of a change to every job": (5 + 6, change_every_job),
    "the same from nothing": (7 + 6, change_from_nothing),
}


@pytest.mark.parametrize("name", WORK)
def test_hundreds_of_jobs_cost_no_more_statements_than_one(states: tuple[Counted, Counted], name: str) -> None:
    small, large = states
    most, work = WORK[name]
    for state in states:
        the_world(state.store)
    assert large.cost_of(work) <= most
    assert small.cost_of(work) <= most


def test_the_large_state_is_as_large_as_it_should_be(states: tuple[Counted, Counted]) -> None:
    _, large = states
    world = the_world(large.store)
    assert (len(world.jobs), len(world.attempts), len(world.intents)) == (MANY, MANY, MANY)
    listed = large.store.read(lambda r: r.jobs())
    assert {(view.checkpoint, len(view.open)) for view in listed} == {(v.checkpoint("b"), 1)}


SEARCHED: dict[str, Callable[[Store], object]] = {
    "world from nothing": cold_world,
    "world when nothing changed": the_world,
    "events of a job": asking(lambda r: r.events(job_id=v.job_id("j00000"), since=3)),
    "newest events of a job": asking(lambda r: r.newest_events(job_id=v.job_id("j00000"))),
    "events after a number": asking(lambda r: r.events(since=5)),
    "one job": asking(lambda r: (r.job_view(v.job_id("j00000")), r.attempts_of(v.job_id("j00000")))),
    "cost of a day": asking(lambda r: costs_by_day(r, since=v.NOW.date())),
    "commit": change_every_job,
}


@pytest.mark.parametrize("name", SEARCHED)
def test_what_is_asked_all_the_time_never_reads_a_whole_table(states: tuple[Counted, Counted], name: str) -> None:
    """A state keeps the history of years, and a cycle must not read it."""
    _, large = states
    sent: list[tuple[str, object]] = []

    def note(*args: Any) -> None:
        sent.append((args[2], args[3]))

    event.listen(large.store._engine, "before_cursor_execute", note)
    SEARCHED[name](large.store)
    event.remove(large.store._engine, "before_cursor_execute", note)
    selects = [(sql, values) for sql, values in sent if sql.startswith("SELECT")]
    assert selects
    for sql, values in selects:
        steps = large.store.read(partial(explained, sql=sql, values=values))
        assert not [step for step in steps if re.fullmatch(r"SCAN \w+", step)], (sql, steps)


def explained(r: Reads, *, sql: str, values: Any) -> list[str]:
    return [row[3] for row in r._connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)]


def test_an_id_is_found_without_comparing_the_names_of_all_jobs_that_go_on(states: tuple[Counted, Counted]) -> None:
    _, large = states

    def compared(text: str) -> bool:
        del large.statements[:]
        large.cost_of(asking(lambda r: r.jobs_meant_by(text)))
        return any("jobs.name" in statement.partition("WHERE")[2] for statement in large.statements)

    assert [compared(text) for text in ("j00000", "j0")] == [False, True]
