"""What a plan must obey: each broken rule is refused in words, and nothing of the plan is written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text

from spotd.core.domain.intents import IntentKind, IntentState, JobId, Meter
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import (
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    AttemptState,
    EndReason,
    IllegalTransition,
    InvariantBroken,
    JobState,
)
from spotd.core.domain.world import UnreadableRow
from spotd.store import Store
from spotd.store.tables import COUNTING_WHERE
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.store import values as v
from tests.unit.store.reads import intents_of

J1 = v.job_id("j1")


def commit(store: Store, *plans: Plan) -> None:
    for plan in plans:
        write(store, plan)


def write(store: Store, plan: Plan) -> int:
    return store.tx(lambda tx: tx.commit(plan))


def is_refused(
    store: Store, plan: Plan, words: str, error: type[InvariantBroken] = InvariantBroken, *, job: JobId = J1
) -> None:
    """The plan is refused for this reason, and the state is as if nobody had tried."""

    def state() -> object:
        return store.read(
            lambda r: (r.job(job), r.attempts_of(job), intents_of(r, job), r.charges_of(job), r.last_event())
        )

    before = state()
    with pytest.raises(error, match=words):
        store.tx(lambda tx: tx.commit(plan))
    assert before == state()


def one_step(before: JobState) -> set[JobState]:
    return set(JOB_TRANSITIONS[before])


def two_steps(before: JobState) -> set[JobState]:
    """States reached by way of one that wants a machine."""
    return {after for way in JOB_TRANSITIONS[before] if way.may_be_placed for after in JOB_TRANSITIONS[way]}


@every("before", JobState)
@every("after", JobState)
def test_a_job_moves_only_along_the_table_and_each_step_has_its_event(
    store: Store, before: JobState, after: JobState
) -> None:
    ident = v.job_id(f"{before}-{after}")
    item, moved = v.job(ident, state=before), v.job(ident, state=after)
    commit(store, v.plan(item))
    if before is after:
        commit(store, v.plan(moved, silent=True))
    elif after in one_step(before):
        is_refused(store, v.plan(moved, silent=True), "0 of 1 events", job=ident)
        commit(store, v.plan(moved))
    elif after in two_steps(before):
        is_refused(store, v.plan(moved), "1 of 2 events", job=ident)
        commit(store, v.plan(moved, *v.told(moved)))
    else:
        is_refused(store, v.plan(moved, *v.told(moved)), "cannot become", IllegalTransition, job=ident)
        moved = item
    assert store.read(lambda r: r.job(ident)) == moved


@every("before", AttemptState)
@every("after", AttemptState)
def test_an_attempt_moves_only_along_the_table_with_its_event(
    store: Store, before: AttemptState, after: AttemptState
) -> None:
    ident = v.job_id(f"{before}-{after}")
    owner, item, moved = v.job(ident, state=JobState.RUNNING), *(v.attempt(ident, state=s) for s in (before, after))
    commit(store, v.plan(owner, item))
    if before is after:
        commit(store, v.plan(moved, silent=True))
    elif after in ATTEMPT_TRANSITIONS[before]:
        is_refused(store, v.plan(moved, silent=True), "without an event", job=ident)
        commit(store, v.plan(moved))
    else:
        is_refused(store, v.plan(moved), "cannot become", IllegalTransition, job=ident)
        moved = item
    assert store.read(lambda r: r.attempts_of(ident)) == (moved,)


def test_a_new_job_needs_an_event(store: Store) -> None:
    is_refused(store, v.plan(v.job(), silent=True), "job j1 goes from nothing to QUEUED with 0 of 1 events")


def test_a_new_attempt_needs_an_event_of_its_own(store: Store) -> None:
    owner = v.job(state=JobState.PROVISIONING)
    is_refused(store, v.plan(owner, v.attempt(), *v.told(owner), silent=True), "spotd-lab-j1-1 goes from nothing")


def test_an_event_of_another_job_explains_nothing(store: Store) -> None:
    is_refused(store, v.plan(v.job(), *v.told(v.job("j2")), silent=True), "0 of 1 events")


def test_an_event_of_another_attempt_explains_nothing(store: Store) -> None:
    owner = v.job(state=JobState.PROVISIONING)
    plan = v.plan(owner, v.attempt(), *v.told(owner, v.attempt(number=2)), silent=True)
    is_refused(store, plan, "without an event")


def test_changes_that_are_no_change_of_state_need_no_event(store: Store) -> None:
    commit(store, v.running_job())
    seen = replace(v.attempt(state=AttemptState.RUNNING), heartbeat_seq=7, phase="training")
    commit(store, v.plan(seen, silent=True))
    assert store.read(lambda r: r.attempts_of(J1)) == (seen,)


def test_an_attempt_without_its_job_is_refused(store: Store) -> None:
    is_refused(store, v.plan(v.attempt()), "has no job")


def test_an_attempt_keeps_its_key(store: Store) -> None:
    commit(store, v.intended_job())
    is_refused(store, v.plan(replace(v.attempt(), key=v.attempt("other").key)), "cannot change its key")


def test_two_attempts_cannot_carry_the_same_key(store: Store) -> None:
    commit(store, v.intended_job())
    twin = replace(v.attempt("j2"), key=v.attempt().key)
    is_refused(store, v.plan(v.job("j2", JobState.PROVISIONING), twin), "refused a write that breaks its rules")


COUNTING = [state for state in AttemptState if state.counts]


@every("first", COUNTING)
@every("second", COUNTING)
def test_a_second_attempt_that_counts_is_refused(store: Store, first: AttemptState, second: AttemptState) -> None:
    ident = v.job_id(f"{first}-{second}")
    commit(store, v.plan(v.job(ident, state=JobState.RUNNING), v.attempt(ident, state=first)))
    second_one = v.attempt(ident, number=2, state=second)
    is_refused(store, v.plan(second_one), "would have 2 attempts that count", job=ident)


def test_two_new_attempts_that_count_are_refused(store: Store) -> None:
    plan = v.plan(v.job(state=JobState.RUNNING), v.attempt(), v.attempt(number=2))
    is_refused(store, plan, "would have 2 attempts that count")


def test_the_database_itself_refuses_a_second_attempt_that_counts(store: Store) -> None:
    commit(store, v.running_job())
    commit(store, v.plan(v.attempt(number=2, state=AttemptState.ENDED)))
    with pytest.raises(InvariantBroken, match=r"(?i)unique constraint"):
        store.tx(lambda tx: tx._connection.exec_driver_sql("UPDATE attempts SET state = 'running'"))


def test_the_database_and_the_core_mean_the_same_by_counting() -> None:
    assert all((f"'{state}'" in COUNTING_WHERE) is state.counts for state in AttemptState)


def test_the_next_attempt_may_start_in_the_plan_that_ends_the_one_before(store: Store) -> None:
    commit(store, v.running_job())
    ended, fresh = v.attempt(state=AttemptState.ENDING, ended_at=v.NOW), v.attempt(number=2)
    moved = v.job(state=JobState.PROVISIONING, attempts_made=2)
    commit(store, v.plan(fresh, ended, moved, v.launch_of(fresh), *v.told(moved)))
    assert store.read(lambda r: r.attempts_of(J1)) == (ended, fresh)


FINAL = [state for state in JobState if state.is_final]


@pytest.mark.parametrize("state", FINAL)
def test_a_final_job_keeps_no_attempt_that_counts(store: Store, state: JobState) -> None:
    commit(store, v.running_job())
    is_refused(store, v.plan(v.job(state=state)), f"is {state} but would keep an attempt that counts")
    commit(store, v.plan(v.job(state=state), v.attempt(state=AttemptState.ENDING)))


@pytest.mark.parametrize("state", FINAL)
def test_a_final_job_gets_no_attempt(store: Store, state: JobState) -> None:
    commit(store, v.plan(v.job(state=state)))
    is_refused(store, v.plan(v.attempt()), f"is {state} but would keep an attempt that counts")


def test_a_launch_without_an_attempt_is_refused(store: Store) -> None:
    is_refused(store, v.plan(v.launch_of(v.attempt(), attempt=None)), "for no attempt")


def test_a_launch_whose_attempt_is_not_stored_is_refused(store: Store) -> None:
    is_refused(store, v.plan(v.launch_of(v.attempt())), "whose attempt is not stored")


def test_a_launch_under_another_key_than_its_attempts_is_refused(store: Store) -> None:
    plan = v.plan(v.job(state=JobState.PROVISIONING), v.attempt(), v.launch_of(v.attempt(), key=v.attempt("x").key))
    is_refused(store, plan, "whose attempt is not stored")


@pytest.mark.parametrize("state", [state for state in AttemptState if state is not AttemptState.INTENDED])
def test_a_launch_for_an_attempt_that_has_a_machine_is_refused(store: Store, state: AttemptState) -> None:
    commit(store, v.plan(v.job(state=JobState.RUNNING), v.attempt(state=state)))
    is_refused(store, v.plan(v.launch_of(v.attempt())), f"an attempt that is {state} already")


@pytest.mark.parametrize("settled", [IntentState.DONE, IntentState.FAILED])
@pytest.mark.parametrize("again", [IntentState.OPEN, IntentState.UNKNOWN, IntentState.ACCEPTED])
def test_a_settled_launch_is_never_open_again(store: Store, settled: IntentState, again: IntentState) -> None:
    commit(store, v.intended_job(), v.plan(v.launch_of(v.attempt(), state=settled)))
    is_refused(store, v.plan(v.launch_of(v.attempt(), state=again)), "is settled")


@pytest.mark.parametrize("sent", [IntentState.SENT, IntentState.UNKNOWN])
def test_a_launch_that_was_sent_never_counts_as_unsent_again(store: Store, sent: IntentState) -> None:
    commit(store, v.intended_job(), v.plan(v.launch_of(v.attempt(), state=sent)))
    is_refused(store, v.plan(v.launch_of(v.attempt(), state=IntentState.OPEN)), "counts as never sent")


def test_a_machine_that_comes_back_is_ended_again(store: Store) -> None:
    order = v.launch_of(v.attempt(), id="terminate:vast::i-1", kind=IntentKind.TERMINATE, ref=v.ref())
    done = replace(order, state=IntentState.DONE)
    commit(store, v.intended_job(), v.plan(order), v.plan(done), v.plan(order))
    assert order in store.read(lambda r: intents_of(r, J1))


def test_a_stranger_under_our_label_can_be_ended_although_its_job_is_unknown(store: Store) -> None:
    order = v.launch_of(v.attempt("lost"), kind=IntentKind.TERMINATE, attempt=None, ref=v.ref())
    commit(store, v.plan(order))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).intents == {order.id: order}


def test_a_row_that_cannot_be_understood_is_closed_alone(store: Store) -> None:
    """Neither the other attempt of its job nor the attempts of other jobs that have its number end with it."""
    other = v.job("j2", state=JobState.RUNNING)
    later = v.attempt(number=2, state=AttemptState.ENDING, end_reason=EndReason.OUTBID)
    commit(store, v.running_job(), v.plan(later), v.plan(other, v.attempt("j2"), *v.told(other)))
    commit(store, Plan(sealed=(UnreadableRow(job=J1, attempt=1, error="ValueError: x"),)))
    first, second = store.read(lambda r: r.attempts_of(J1))
    assert (first.state, first.end_reason) == (AttemptState.ENDED, EndReason.QUARANTINED)
    assert second == later
    (beside,) = store.read(lambda r: r.attempts_of(v.job_id("j2")))
    assert beside == v.attempt("j2")


@pytest.mark.parametrize("state", ["RUNNING", "A_WORD_OF_ANOTHER_VERSION"])
def test_a_job_that_cannot_be_understood_has_failed_whatever_word_its_state_is(store: Store, state: str) -> None:
    commit(store, v.running_job())
    store.tx(
        lambda tx: tx._connection.execute(text("UPDATE jobs SET state = :state"), {"state": state})
    )  # round the door on purpose
    rows = [UnreadableRow(job=J1, attempt=number, error="ValueError: x") for number in (None, 1)]
    commit(store, Plan(sealed=tuple(rows)))
    job = store.read(lambda r: r.job(J1))
    assert job is not None
    assert job.state is JobState.FAILED


def test_a_charge_of_an_attempt_that_is_not_stored_is_refused(store: Store) -> None:
    is_refused(store, v.plan(v.charge()), "a charge for attempt j1-1, which is not stored")


def test_charges_that_begin_at_one_instant_are_both_kept(store: Store) -> None:
    commit(store, v.running_job(), v.plan(v.charge(amount=3)))
    commit(store, v.plan(v.charge(amount=5), v.charge(amount=7)))
    kept = store.read(lambda r: r.charges_of(J1))
    assert [charge.amount for charge in kept] == [3, 5, 7]
    assert len({charge.start for charge in kept}) == 3
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).spent_by_day == {v.NOW.date(): 15}


@pytest.mark.parametrize(
    "wrong",
    [
        replace(v.charge(), end=v.NOW + timedelta(days=1)),
        replace(v.charge(), end=v.NOW - timedelta(seconds=1)),
        replace(v.charge(), day=v.NOW.date() - timedelta(days=1)),
        replace(v.charge(), amount=MicroUsd(-1)),
    ],
    ids=["across midnight", "backwards", "another day", "negative"],
)
def test_a_charge_that_no_day_can_book_is_refused(store: Store, wrong: object) -> None:
    commit(store, v.running_job())
    is_refused(store, v.plan(wrong), "a charge of attempt j1-1")  # type: ignore[arg-type]  # each is a Charge


def test_what_is_booked_back_lowers_its_day_and_has_no_length(store: Store) -> None:
    commit(store, v.running_job(), v.plan(v.charge()))
    back = replace(v.charge(at=v.NOW + timedelta(hours=1)), amount=MicroUsd(-400), on_demand=MicroUsd(0))
    is_refused(store, v.plan(back), "is negative")
    commit(store, v.plan(replace(back, end=back.start)))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).spent_by_day == {v.NOW.date(): 600}


def test_a_charge_up_to_midnight_belongs_to_the_day_that_ends(store: Store) -> None:
    commit(store, v.running_job())
    late = v.NOW.replace(hour=23, minute=55)
    commit(store, v.plan(v.charge(at=late)))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).spent_by_day == {late.date(): 1_000}


@pytest.mark.parametrize("table", ["events", "charges"])
@pytest.mark.parametrize("change", ["UPDATE {} SET job_id = 'x'", "DELETE FROM {}"], ids=["update", "delete"])
def test_what_is_append_only_can_not_be_changed_by_anybody(store: Store, table: str, change: str) -> None:
    commit(store, v.running_job(), v.plan(v.charge()))
    with pytest.raises(InvariantBroken, match=f"{table} are append-only"):
        store.tx(lambda tx: tx._connection.exec_driver_sql(change.format(table)))


def test_a_cooldown_is_prolonged_but_never_cut_short(store: Store) -> None:
    longest = v.cooldown(until=v.NOW + timedelta(hours=2), reason="lost again")
    commit(store, v.plan(v.cooldown(), longest, v.cooldown()), v.plan(v.cooldown(reason="shorter")))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).cooldowns == (longest,)
    longer = v.cooldown(until=v.NOW + timedelta(hours=3))
    commit(store, v.plan(longer))
    assert store.read(lambda r: r.world(v.POLICY, v.NOW)).cooldowns == (longer,)


def test_an_empty_plan_writes_nothing(store: Store) -> None:
    assert store.tx(lambda tx: tx.commit(Plan(wake_at=v.NOW))) == 0


def test_events_are_numbered_in_the_order_of_commits_without_gaps(store: Store) -> None:
    assert store.tx(lambda tx: (tx.commit(v.plan(v.job("a"), v.job("b"))), tx.commit(v.plan(v.job("c"))))) == (2, 3)
    is_refused(store, v.plan(v.job("d"), v.job("e", state=JobState.RUNNING), silent=True), "0 of 1 events")
    commit(store, v.plan(v.job("d")))
    found = store.read(lambda r: r.events())
    assert [(e.seq, e.event.job) for e in found] == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_a_running_meter_is_stored_as_it_runs(store: Store) -> None:
    commit(store, v.running_job())
    meter = Meter(settled=MicroUsd(5), rate=v.quote().price.total, on_demand_rate=None, since=v.NOW)
    commit(store, v.plan(v.attempt(state=AttemptState.RUNNING, meter=meter), silent=True))
    assert store.read(lambda r: r.attempts_of(J1))[0].meter == meter
