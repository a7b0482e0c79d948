"""All or nothing, durable when it returns, one at a time, from any thread."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from spotd.core.domain.states import InvariantBroken, JobState
from spotd.store import Reads, StateUnavailable, Store, Tx
from tests.unit.store import values as v
from tests.unit.store.reads import checkpoints_of


def pragma(tx: Reads, name: str) -> object:
    return tx._connection.exec_driver_sql(f"PRAGMA {name}").scalar()


SETTINGS = {
    "journal_mode": "wal",
    "synchronous": 2,
    "foreign_keys": 1,
    "busy_timeout": 5000,
    "mmap_size": 0,
    "journal_size_limit": 64_000_000,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_live_connection_is_set_up_for_durability(store: Store, name: str) -> None:
    """Synchronous 2 is FULL: a commit that returned survives a power cut."""
    assert store.tx(lambda tx: pragma(tx, name)) == SETTINGS[name]
    assert store.read(lambda tx: pragma(tx, name)) == SETTINGS[name]


def test_the_connection_is_set_up_again_after_every_opening(store: Store, path: Path) -> None:
    store.close()
    with Store.open(path) as again:
        assert again.tx(lambda tx: {name: pragma(tx, name) for name in SETTINGS}) == SETTINGS


def test_a_failing_function_leaves_nothing_behind(store: Store) -> None:
    def fail(tx: Tx) -> None:
        tx.commit(v.running_job("j1"))
        tx.commit(v.plan(v.job("j2"), v.cooldown(), v.charge()))
        tx.set_meta("key", "value")
        assert len(tx.jobs()) == 2
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.tx(fail)
    assert store.read(lambda r: (r.jobs(), r.last_event(), r.meta("key"))) == ((), 0, None)
    assert store.read(lambda r: r.world(v.POLICY, v.NOW).cooldowns) == ()


def test_a_world_seen_in_a_transaction_that_failed_is_forgotten(store: Store) -> None:
    store.tx(lambda tx: tx.commit(v.plan(v.job())))

    def fail(tx: Tx) -> None:
        tx.commit(v.plan(v.job(reason="never happened"), silent=True))
        assert tx.world(v.POLICY, v.NOW).jobs[v.job_id("j1")].reason == "never happened"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.tx(fail)
    store.tx(lambda tx: tx.commit(v.plan(v.job(reason="happened"), silent=True)))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).jobs[v.job_id("j1")].reason == "happened"


def test_a_plan_that_was_undone_is_written_in_full_the_second_time(store: Store) -> None:
    store.tx(lambda tx: tx.commit(v.running_job()))
    saved = v.plan(v.job(state=JobState.RUNNING, attempts_made=1, checkpoints=(v.checkpoint(),)), silent=True)

    def fail(tx: Tx) -> None:
        tx.commit(saved)
        tx.world(v.POLICY, v.NOW)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.tx(fail)
    store.tx(lambda tx: tx.commit(saved))
    assert store.read(lambda r: checkpoints_of(r, v.job_id("j1"))) == (v.checkpoint(),)


def test_a_job_that_goes_back_to_what_the_world_showed_is_written(store: Store) -> None:
    shown, other = v.job(checkpoints=(v.checkpoint("a"),)), v.job(checkpoints=(v.checkpoint("b"),))
    store.tx(lambda tx: tx.commit(v.plan(shown)))
    store.read(lambda r: r.world(v.POLICY, v.NOW))
    store.tx(lambda tx: tx.commit(v.plan(other, silent=True)))
    store.tx(lambda tx: tx.commit(v.plan(shown, silent=True)))
    assert store.read(lambda r: r.job(v.job_id("j1"))) == shown


def test_a_refused_plan_spoils_its_transaction_even_if_the_caller_goes_on(store: Store) -> None:
    def go_on(tx: Tx) -> None:
        tx.commit(v.plan(v.job("j1")))
        with pytest.raises(InvariantBroken):
            tx.commit(v.plan(v.job("j2"), silent=True))

    with pytest.raises(InvariantBroken, match="went on after one of its plans was refused"):
        store.tx(go_on)
    assert store.read(lambda r: r.jobs()) == ()


def test_a_table_made_in_a_failing_transaction_does_not_exist(store: Store) -> None:
    def fail(tx: Tx) -> None:
        tx._connection.exec_driver_sql("CREATE TABLE half (x)")
        tx._connection.exec_driver_sql("ALTER TABLE jobs ADD COLUMN half TEXT")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.tx(fail)
    schema = store.read(lambda r: r._connection.exec_driver_sql("SELECT group_concat(sql) FROM sqlite_master").scalar())
    assert "half" not in str(schema)


def test_a_write_transaction_holds_the_write_lock_from_its_first_moment(store: Store, path: Path) -> None:
    other = sqlite3.connect(path, timeout=0, isolation_level=None)

    def try_beside(_tx: Tx) -> None:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")

    store.tx(try_beside)
    other.execute("BEGIN IMMEDIATE")
    other.close()


def test_another_program_sees_only_whole_transactions(store: Store, path: Path) -> None:
    other = sqlite3.connect(path)
    seen = []

    def look(tx: Tx) -> None:
        tx.commit(v.plan(v.job("j1"), v.job("j2")))
        seen.append(other.execute("SELECT count(*) FROM jobs").fetchone()[0])

    store.tx(look)
    seen.append(other.execute("SELECT count(*) FROM jobs").fetchone()[0])
    other.close()
    assert seen == [0, 2]


def test_a_read_stays_with_the_moment_it_began(store: Store, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)

    def look_twice(r: Reads) -> tuple[object, object]:
        first = r.meta("key")
        other.execute("INSERT INTO meta VALUES ('key', 'value')")
        return first, r.meta("key")

    assert store.read(look_twice) == (None, None)
    assert store.read(lambda r: r.meta("key")) == "value"
    other.close()


@pytest.mark.process
def test_a_state_locked_by_another_program_is_unavailable_and_works_again_later(store: Store, path: Path) -> None:
    store.read(lambda r: pragma(r, "busy_timeout = 0"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateUnavailable, match=r"state\.db is locked by another program"):
        store.tx(lambda tx: tx.commit(v.plan(v.job())))
    assert store.read(lambda r: r.jobs()) == ()
    other.execute("ROLLBACK")
    other.close()
    store.tx(lambda tx: tx.commit(v.plan(v.job())))
    assert len(store.read(lambda r: r.jobs())) == 1


@pytest.mark.parametrize("inner", ["tx", "read"])
def test_a_transaction_inside_another_is_refused(store: Store, inner: str) -> None:
    with pytest.raises(InvariantBroken, match="begun inside another"):
        store.tx(lambda _tx: getattr(store, inner)(lambda r: r.jobs()))
    assert store.read(lambda r: r.jobs()) == ()


def test_threads_take_turns(store: Store) -> None:
    def add_job(text: str) -> None:
        store.tx(lambda tx: tx.commit(v.plan(v.job(text))))

    def add(n: int) -> None:
        for k in range(5):
            add_job(f"j{n}-{k}")

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    events = store.read(lambda r: r.events())
    assert sorted(str(e.event.job) for e in events) == sorted(f"j{n}-{k}" for n in range(4) for k in range(5))
    assert [e.seq for e in events] == list(range(1, 21))


def test_what_was_committed_is_there_after_the_next_opening(store: Store, path: Path) -> None:
    store.tx(lambda tx: tx.commit(v.running_job()))
    before = store.read(lambda r: r.world(v.POLICY, v.NOW))
    store.close()
    with Store.open(path) as again:
        assert again.read(lambda r: r.world(v.POLICY, v.NOW)) == before
        assert again.read(lambda r: r.counts_by_state())[JobState.RUNNING] == 1


@pytest.mark.parametrize("method", ["tx", "read"])
def test_a_closed_state_says_so_and_does_not_open_itself_again(store: Store, method: str) -> None:
    store.close()
    store.close()
    with pytest.raises(StateUnavailable, match="was closed"):
        getattr(store, method)(lambda r: r.jobs())


def test_facts_about_the_state_are_kept_and_replaced(store: Store) -> None:
    store.tx(lambda tx: tx.set_meta("install", "one"))
    assert store.read(lambda r: r.meta("install")) == "one"
    store.tx(lambda tx: tx.set_meta("install", "two"))
    assert store.read(lambda r: r.meta("install")) == "two"
    assert store.read(lambda r: r.meta("other")) is None


def test_values_of_statements_do_not_appear_in_errors(store: Store) -> None:
    def insert(tx: Tx) -> None:
        tx._connection.exec_driver_sql("INSERT INTO nowhere VALUES (?)", ("hunter2",))

    with pytest.raises(Exception, match="no such table") as caught:
        store.tx(insert)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__
