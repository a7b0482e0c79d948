"""What the writer remembers of the world: it is never another one than a whole load would show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED
from spotd.core.domain.intents import IntentState, JobId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.store import Folding, Store, Tx
from spotd.store.engine import StorePoint
from spotd.store.tables import FENCE, JOBS
from spotd.store.world import WorldMemory
from tests.unit.store import values as v

SEVERAL = v.running_job("a"), v.intended_job("b"), v.plan(v.job("c"), v.cooldown()), v.plan(v.charge("a"))


def world(store: Store, now: datetime = v.NOW) -> World:
    return store.tx(lambda tx: tx.world(v.POLICY, now))


def stored(store: Store, now: datetime = v.NOW) -> World:
    return store.read(lambda reads: reads.world(v.POLICY, now))


def commit(store: Store, *plans: Plan) -> None:
    for plan in plans:
        store.tx(lambda tx, plan=plan: tx.commit(plan))  # type: ignore[misc]  # mypy cannot infer a lambda with a default


def statements(store: Store, work: Callable[[], object]) -> list[str]:
    """The statements that this work sends, without those that begin and end a transaction."""
    sent: list[str] = []

    def note(*args: object) -> None:
        sent.append(str(args[2]))

    event.listen(store._engine, "before_cursor_execute", note)
    work()
    event.remove(store._engine, "before_cursor_execute", note)
    return [one for one in sent if not one.startswith(("BEGIN", FENCE))]


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read for the comparison."""
    monkeypatch.setattr(WorldMemory, "is_proved", False)


@pytest.mark.usefixtures("unproved")
def test_a_world_of_which_nothing_was_written_is_shown_without_a_query(store: Store) -> None:
    commit(store, *SEVERAL)
    first = world(store)
    assert statements(store, lambda: world(store)) == []
    second = world(store)
    assert second == first == stored(store)
    assert second.attempts is first.attempts
    assert second.jobs is first.jobs


@pytest.mark.usefixtures("unproved")
def test_a_heartbeat_costs_the_rows_of_its_job(store: Store) -> None:
    commit(store, *SEVERAL)
    before = world(store)
    item = next(item for item in before.attempts.values() if item.state is AttemptState.RUNNING)
    commit(store, Plan(attempts={item.id: replace(item, heartbeat_seq=item.heartbeat_seq + 1)}))
    sent = statements(store, lambda: world(store))
    assert len(sent) == 2
    assert all("IN (" in one for one in sent)
    after = world(store)
    assert after == stored(store)
    assert after.attempts[item.id].heartbeat_seq == item.heartbeat_seq + 1
    assert all(after.attempts[i] is before.attempts[i] for i in before.attempts if i != item.id)


def _beat(item: Attempt) -> Attempt:
    return replace(item, heartbeat_seq=7)


STEPS: dict[str, Plan] = {
    "a job is submitted": v.plan(v.job("0")),
    "a job ends": v.plan(v.job("a", JobState.SUCCEEDED, attempts_made=1), v.attempt("a", state=AttemptState.ENDED)),
    "a machine is being ended": v.plan(
        v.job("a", JobState.SUCCEEDED, attempts_made=1), v.attempt("a", state=AttemptState.ENDING)
    ),
    "a host lives": v.plan(_beat(v.attempt("a", state=AttemptState.RUNNING)), silent=True),
    "a call is settled": v.plan(v.launch_of(v.attempt("b"), state=IntentState.FAILED)),
    "a cool-down": v.plan(replace(v.cooldown(), subject="other")),
    "a charge": v.plan(v.charge("a", at=v.NOW + timedelta(minutes=9))),
    "checkpoints": v.plan(v.job("c", checkpoints=(v.checkpoint("z"),)), silent=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_after_each_kind_of_write_it_is_what_is_stored(store: Store, name: str) -> None:
    commit(store, *SEVERAL)
    before = world(store)
    commit(store, STEPS[name])
    after = world(store)
    assert after == stored(store)
    assert after != before


def test_a_job_that_is_over_comes_back_in_its_place_when_it_is_retried(store: Store) -> None:
    first = v.job("a")
    commit(store, v.plan(first), v.plan(v.job("a", JobState.FAILED)), v.plan(v.job("b")))
    assert [*world(store).jobs] == ["b"]
    commit(store, v.plan(first))
    assert [*world(store).jobs] == [*stored(store).jobs] == ["a", "b"]


def test_within_a_transaction_it_shows_what_was_written_there(store: Store) -> None:
    commit(store, *SEVERAL)
    world(store)

    def work(tx: Tx) -> tuple[World, World]:
        before = tx.world(v.POLICY, v.NOW)
        tx.commit(v.plan(v.job("d")))
        return before, tx.world(v.POLICY, v.NOW)

    before, after = store.tx(work)
    assert after.jobs.keys() - before.jobs.keys() == {"d"}


@pytest.mark.parametrize("fails", ["the work", "the commit"])
def test_what_was_taken_back_is_not_remembered(path: Path | str, fails: str) -> None:
    failing = False

    def at_point(point: StorePoint) -> None:
        if failing and fails == "the commit" and point is StorePoint.EVENTS:
            raise OSError("no space")

    with Store.open(path, at_point=at_point) as store:
        commit(store, *SEVERAL)
        before = world(store)

        def work(tx: Tx) -> None:
            tx.commit(v.plan(v.job("a", JobState.RECOVERING), silent=False))
            assert tx.world(v.POLICY, v.NOW).jobs[JobId("a")].state is JobState.RECOVERING
            raise RuntimeError("after all not")

        failing = True
        with pytest.raises((RuntimeError, OSError)):
            store.tx(work)
        failing = False
        assert world(store) == before == stored(store)


ROUND_THE_DOOR: dict[str, Callable[[Tx], object]] = {
    "cool-downs are forgotten": lambda tx: tx.forget_cooldowns(),
    "a statement of its own": lambda tx: tx.connection.execute(JOBS.update().values(reason="by another way")),
    "a statement of the driver": lambda tx: tx.connection.exec_driver_sql("UPDATE jobs SET reason = 'so'"),
    "housekeeping": lambda tx: tx.fold(v.NOW + 3 * COOLDOWNS_REMEMBERED, Folding()),
}


@pytest.mark.parametrize("name", ROUND_THE_DOOR)
def test_a_write_that_is_no_plan_makes_everything_be_read_anew(store: Store, name: str) -> None:
    commit(store, *SEVERAL)
    world(store)
    store.tx(ROUND_THE_DOOR[name])
    store._memory.forget()  # of the reader's rows, which a write round the door may leave as they were
    assert world(store) == stored(store)
    world(store)
    store.tx(lambda tx: (ROUND_THE_DOOR[name](tx), tx.commit(v.plan(v.job("d")))))
    store._memory.forget()
    assert world(store) == stored(store)


def test_what_another_connection_writes_is_seen(store: Store, path: Path | str) -> None:
    if not isinstance(path, Path):
        pytest.skip("in PostgreSQL the fence keeps others away")
    import sqlite3

    commit(store, *SEVERAL)
    world(store)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE jobs SET reason = 'by hand' WHERE id = 'c'")
    other.close()
    assert world(store).jobs[JobId("c")].reason == "by hand"
    with sqlite3.connect(path) as other:
        other.execute("UPDATE jobs SET reason = 'again' WHERE id = 'c'")
    other.close()
    commit(store, v.plan(v.job("d")))
    assert world(store).jobs[JobId("c")].reason == "again"


def test_a_row_that_cannot_be_understood_is_said_each_time(store: Store) -> None:
    commit(store, *SEVERAL)
    world(store)
    store.tx(lambda tx: tx.connection.exec_driver_sql("UPDATE attempts SET state = 'no state' WHERE job_id = 'a'"))
    assert [row.job for row in world(store).unreadable] == ["a"]
    again = world(store)
    assert [row.job for row in again.unreadable] == ["a"]
    job = replace(again.jobs[JobId("a")], state=JobState.FAILED)
    commit(store, replace(v.plan(job), sealed=again.unreadable))
    assert world(store).unreadable == ()


def test_cool_downs_run_out_and_months_begin_although_nothing_was_written(store: Store) -> None:
    commit(store, *SEVERAL)
    [known] = world(store).cooldowns
    later = known.until + COOLDOWNS_REMEMBERED
    assert world(store, later - timedelta(seconds=1)).cooldowns == (known,)
    assert world(store, later).cooldowns == ()
    assert world(store, later - timedelta(seconds=1)).cooldowns == (known,)  # the clock was set back
    assert world(store).spent_by_day
    assert world(store, datetime(2026, 12, 1, tzinfo=UTC)).spent_by_day == {}


def test_a_memory_that_is_wrong_is_noticed_by_the_comparison(store: Store) -> None:
    commit(store, *SEVERAL)
    known = world(store)
    store._known._world = replace(known, jobs={})
    with pytest.raises(AssertionError, match="the jobs in memory"):
        world(store)
