"""The world holds what the core needs to decide, all of it, and nothing that is over."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone

import pytest

from spotd.core.domain.cooldowns import COOLDOWNS_REMEMBERED, CooldownScope
from spotd.core.domain.intents import AttemptId, IntentState, JobId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.store import Store, Tx
from tests.unit.store import values as v


def commit(store: Store, plan: Plan) -> None:
    store.tx(lambda tx: tx.commit(plan))


def world(store: Store, now: datetime = v.NOW) -> World:
    return store.read(lambda r: r.world(v.POLICY, now))


def test_an_empty_state_is_an_empty_world(store: Store) -> None:
    assert world(store) == World(policy=v.POLICY, jobs={}, attempts={}, intents={})


@pytest.mark.parametrize("state", list(JobState))
def test_a_job_is_there_until_it_is_final(store: Store, state: JobState) -> None:
    commit(store, v.plan(v.job(state=state)))
    assert (JobId("j1") in world(store).jobs) is not state.is_final


@pytest.mark.parametrize("state", [s for s in AttemptState if not s.counts])
@pytest.mark.parametrize("final", [s for s in JobState if s.is_final])
def test_a_final_job_is_there_while_its_machine_may_be(store: Store, state: AttemptState, final: JobState) -> None:
    commit(store, v.plan(v.job(state=final), v.attempt(state=state)))
    shown = state is not AttemptState.ENDED
    assert (JobId("j1") in world(store).jobs) is shown
    assert (AttemptId(job=JobId("j1"), number=1) in world(store).attempts) is shown


@pytest.mark.parametrize("state", list(IntentState))
def test_an_intent_is_there_until_it_is_settled(store: Store, state: IntentState) -> None:
    item = v.launch_of(v.attempt(), state=state)
    commit(store, v.plan(v.job(state=JobState.PROVISIONING), v.attempt(), item))
    assert (item.id in world(store).intents) is item.is_open


def test_a_cooldown_is_remembered_for_a_while_after_it_is_over(store: Store) -> None:
    item = v.cooldown(until=v.NOW)
    commit(store, v.plan(item))
    forgotten_at = v.NOW + COOLDOWNS_REMEMBERED
    assert world(store, forgotten_at - timedelta(microseconds=1)).cooldowns == (item,)
    assert world(store, forgotten_at).cooldowns == ()


def test_a_bid_of_a_machine_that_is_gone_is_remembered_until_it_is_over(store: Store) -> None:
    item = replace(v.cooldown(until=v.NOW), scope=CooldownScope.BID, subject="host-1 1 440000")
    commit(store, v.plan(item))
    before = v.NOW - timedelta(microseconds=1)
    assert world(store, before).cooldowns == (item,)
    assert world(store, v.NOW).cooldowns == ()  # of what is known
    assert world(store, before).cooldowns == (item,)  # loaded anew, since the clock was set back


def test_cooldowns_of_long_ago_are_deleted_with_the_next_one(store: Store) -> None:
    commit(store, v.plan(v.cooldown(until=v.NOW)))
    late = v.NOW + 3 * COOLDOWNS_REMEMBERED
    fresh = replace(v.cooldown(until=late + timedelta(minutes=1)), subject="host-2", since=late)
    commit(store, v.plan(fresh))
    assert world(store, v.NOW).cooldowns == (fresh,)


def test_the_books_are_those_of_the_utc_month_by_day(store: Store) -> None:
    commit(store, v.running_job())
    last_of_october = datetime(2026, 10, 31, 23, 50, tzinfo=UTC)
    for at in (last_of_october, datetime(2026, 11, 1, tzinfo=UTC), v.NOW, v.NOW + timedelta(minutes=5)):
        commit(store, v.plan(v.charge(at=at)))
    assert world(store).spent_by_day == {date(2026, 11, 1): 1_000, date(2026, 11, 21): 2_000}
    assert world(store, last_of_october).spent_by_day == {
        date(2026, 10, 31): 1_000,
        date(2026, 11, 1): 1_000,
        date(2026, 11, 21): 2_000,
    }


def test_the_month_is_that_of_utc_wherever_the_clock_is(store: Store) -> None:
    commit(store, v.running_job())
    commit(store, v.plan(v.charge(at=datetime(2026, 10, 31, 12, tzinfo=UTC))))
    morning_in_kyiv = datetime(2026, 11, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert world(store, morning_in_kyiv).spent_by_day == {date(2026, 10, 31): 1_000}


def test_jobs_are_in_the_order_of_their_submission(store: Store) -> None:
    later, sooner = v.job("a", submitted_at=v.NOW + timedelta(seconds=1)), v.job("b")
    commit(store, v.plan(later, sooner, v.job("c")))
    assert list(world(store).jobs) == ["b", "c", "a"]


def test_what_has_not_changed_is_the_very_same_value(store: Store) -> None:
    """Nothing is parsed again: a cycle costs what has changed."""
    commit(store, v.plan(v.job("a"), v.job("b")))
    first = world(store)
    commit(store, v.plan(v.job("b", reason="new"), silent=True))
    second = world(store)
    assert second.jobs[JobId("a")] is first.jobs[JobId("a")]
    assert second.jobs[JobId("b")].reason == "new"
    assert second.jobs[JobId("b")].spec is first.jobs[JobId("b")].spec


def test_a_list_is_the_very_same_until_something_is_written(store: Store) -> None:
    commit(store, v.running_job())
    first = store.read(lambda r: r.jobs(active=True))
    assert store.read(lambda r: r.jobs(active=True)) is first
    assert store.read(lambda r: r.ended_jobs(limit=5)) == ()
    ended = v.attempt(state=AttemptState.ENDED)
    commit(store, v.plan(v.job(state=JobState.SUCCEEDED), ended))
    assert store.read(lambda r: r.jobs(active=True)) == ()
    assert [view.state for view in store.read(lambda r: r.ended_jobs(limit=5))] == [JobState.SUCCEEDED]


def test_a_list_of_what_never_happened_is_forgotten(store: Store) -> None:
    commit(store, v.plan(v.job("a")))

    def gone_wrong(tx: Tx) -> None:
        tx.commit(v.plan(v.job("b")))
        assert {view.id for view in tx.jobs()} == {"a", "b"}
        raise RuntimeError("after all not")

    with pytest.raises(RuntimeError):
        store.tx(gone_wrong)
    assert {view.id for view in store.read(lambda r: r.jobs())} == {"a"}


def test_a_job_that_is_over_is_not_remembered(store: Store) -> None:
    commit(store, v.running_job())
    world(store)
    ended = v.attempt(state=AttemptState.ENDED)
    commit(store, v.plan(v.job(state=JobState.SUCCEEDED), ended))
    assert world(store).jobs == {}
    memory = store._memory
    assert (memory.jobs, memory.specs, memory.quotes) == ({}, {}, {})


def test_a_job_that_is_retried_comes_back_with_its_checkpoints(store: Store) -> None:
    saved = (v.checkpoint("b"), v.checkpoint("a"))
    commit(store, v.plan(v.job(state=JobState.FAILED, checkpoints=saved)))
    commit(store, v.plan(v.job(checkpoints=saved)))
    assert world(store).jobs[JobId("j1")] == v.job(checkpoints=saved)


def test_the_world_is_the_same_after_the_next_start(store: Store) -> None:
    commit(store, v.running_job())
    commit(store, v.intended_job("j2"))
    commit(store, v.plan(v.cooldown(), v.charge()))
    warm = world(store)
    store._memory.forget()
    assert world(store) == warm


def test_a_changed_quote_is_read_anew(store: Store) -> None:
    commit(store, v.running_job())
    world(store)
    other = replace(v.attempt(state=AttemptState.RUNNING), quote=v.quote(total=5))
    commit(store, v.plan(other, silent=True))
    assert world(store).attempts[other.id].quote == v.quote(total=5)


def test_a_changed_spec_is_written_and_read_anew(store: Store) -> None:
    commit(store, v.plan(v.job()))
    world(store)
    other = v.job(spec=replace(v.spec(), priority=7))
    commit(store, v.plan(other, silent=True))
    assert world(store).jobs[other.id] == other
