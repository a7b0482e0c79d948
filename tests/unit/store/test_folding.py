"""The state does not grow for ever, and nothing that money is told from is ever gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy.exc import IntegrityError

from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import Intent, IntentKind, IntentState, JobId
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import JobState
from spotd.store import EventView, Folding, Store
from spotd.store.store import NEVER_FOLDED, ROUTINE
from spotd.store.tables import EVENTS
from tests.unit.store import values as v
from tests.unit.store.reads import events_of_kind

pytestmark = pytest.mark.long

DAY = timedelta(days=1)
RULES = Folding(newest=100, of_a_job=200, most=1_000, piece=500, least=50, routine=100, routine_least=20)


def some(count: int, *, kind: str = "host.note", job: str | None = None, age: timedelta = timedelta(0)) -> Plan:
    owner = None if job is None else JobId(job)
    return Plan(
        events=tuple(Event(at=v.NOW - age, kind=kind, message="a host wrote it", job=owner) for _ in range(count))
    )


def kinds(store: Store) -> list[str]:
    return [e.event.kind for e in store.read(lambda reads: reads.events(limit=100_000))]


def lines(store: Store, job: str | None = None) -> list[EventView]:
    """What says which events are gone, of one job or of no one job."""
    found = store.read(lambda reads: events_of_kind(reads, "events.folded"))
    return [line for line in found if line.event.job == job]


def saves(count: int, *, job: str = "j1") -> Plan:
    """What so many checkpoints of a job leave behind, with one event between that matters to its money."""
    of_each = tuple(
        event
        for number in range(count)
        for kind in ROUTINE
        for event in [Event(at=v.NOW, kind=kind, message=f"checkpoint {number}", job=JobId(job), attempt=1)]
    )
    paid = Event(at=v.NOW, kind="attempt.preempted", message="the provider took it", job=JobId(job), attempt=1)
    return Plan(events=(*of_each, paid))


def folded(store: Store, rules: Folding = RULES) -> int:
    total = 0
    while (count := store.tx(lambda tx: tx.fold(v.NOW, rules))) > 0:
        total += count
    return total


def test_old_events_beyond_a_count_become_one_line_with_their_number(store: Store) -> None:
    store.tx(lambda tx: tx.commit(some(300, age=91 * DAY)))
    store.tx(lambda tx: tx.commit(some(100)))
    assert folded(store) == 300
    assert kinds(store) == ["events.folded"] + ["host.note"] * 100
    (line,) = lines(store)
    assert (line.event.data["events"], line.event.data["host.note"]) == (300, 300)
    assert line.seq == 300, "the line stands where the last of them stood"
    store.tx(lambda tx: tx.commit(some(1)))
    assert store.read(lambda reads: reads.last_event()) == 401, "numbers go on rising"


def test_the_newest_stay_however_far_the_clock_is_ahead(store: Store) -> None:
    store.tx(lambda tx: tx.commit(some(100, age=9_000 * DAY)))
    assert folded(store) == 0


def test_of_one_job_no_more_stay_than_are_of_use_and_other_jobs_lose_nothing(store: Store) -> None:
    store.tx(lambda tx: tx.commit(some(150, job="j2")))
    store.tx(lambda tx: tx.commit(some(900, job="j1")))
    folded(store)
    assert len(store.read(lambda reads: reads.events(job_id=JobId("j2"), limit=10_000))) == 150
    assert 200 <= len(store.read(lambda reads: reads.events(job_id=JobId("j1"), limit=10_000))) < 250


def test_all_together_are_bounded(store: Store) -> None:
    for number in range(40):
        store.tx(lambda tx, number=number: tx.commit(some(100, job=f"j{number}")))  # type: ignore[misc]  # a default argument
    folded(store)
    assert len(kinds(store)) <= RULES.most + RULES.least + 10


@pytest.mark.parametrize("kind", NEVER_FOLDED)
def test_what_receipts_are_made_of_is_never_folded(store: Store, kind: str) -> None:
    store.tx(lambda tx: tx.commit(some(2_000, kind=kind, job="j1", age=500 * DAY)))
    assert folded(store) == 0
    assert kinds(store) == [kind] * 2_000


def test_of_what_every_checkpoint_adds_a_live_job_keeps_the_newest_and_one_line_for_all_others(store: Store) -> None:
    for _ in range(40):
        store.tx(lambda tx: tx.commit(saves(50)))
        folded(store)
    found = store.read(lambda reads: reads.events(job_id=JobId("j1"), limit=100_000))
    counts = Counter(item.event.kind for item in found)
    for kind in ROUTINE:
        assert 100 <= counts[kind] < 120 + 50
    assert counts["attempt.preempted"] == 40, "what matters to money and machines stays"
    (line,) = lines(store, "j1")
    gone = 2 * 2_000 - sum(counts[kind] for kind in ROUTINE)
    assert line.event.data["events"] == gone == sum(int(line.event.data[kind] or 0) for kind in ROUTINE)
    assert f"{gone:,} older events" in line.event.message
    newest = [item.event.message for item in found if item.event.kind == ROUTINE[0]][-50:]
    assert newest == [f"checkpoint {number}" for number in range(50)]
    assert line.seq < min(item.seq for item in found if item.event.kind in ROUTINE)


def test_the_checkpoints_of_many_jobs_are_folded_in_few_pieces(store: Store) -> None:
    for number in range(30):
        store.tx(lambda tx, number=number: tx.commit(saves(130, job=f"j{number}")))  # type: ignore[misc]  # a default argument
    pieces = 0
    while store.tx(lambda tx: tx.fold(v.NOW, replace(RULES, most=100_000))):
        pieces += 1
    assert pieces == 4, "30 jobs with 60 too many each, 500 or a little more at once"
    assert all(len(lines(store, f"j{number}")) == 1 for number in range(30))


def test_lines_that_say_what_was_folded_become_one_when_they_are_old(store: Store) -> None:
    for days in range(8):
        store.tx(lambda tx, days=days: tx.commit(some(200, age=(300 - days) * DAY)))  # type: ignore[misc]  # a default argument
        folded(store)
    store.tx(lambda tx: tx.commit(some(100)))
    folded(store)
    (line,) = lines(store)
    assert line.event.data["events"] == line.event.data["host.note"] == 1_600


@pytest.mark.parametrize("kind", ["attempt.lost", "job.queued", "launch.refused", "machine.ending"])
def test_no_count_folds_what_matters_to_money_and_machines_before_its_time(store: Store, kind: str) -> None:
    for number in range(20):
        store.tx(lambda tx, number=number: tx.commit(some(300, kind=kind, job=f"j{number}")))  # type: ignore[misc]  # a default argument
    assert folded(store) == 0
    assert store.tx(lambda tx: tx.fold(v.NOW + 91 * DAY, RULES)) == RULES.piece


def test_a_job_of_which_nothing_more_may_be_folded_holds_up_no_other(store: Store) -> None:
    store.tx(lambda tx: tx.commit(some(2_000, kind="checkpoint.fallback", job="j1")))
    store.tx(lambda tx: tx.commit(some(10, job="j1")))
    store.tx(lambda tx: tx.commit(some(900, job="j2")))
    folded(store)
    assert len(store.read(lambda reads: reads.events(job_id=JobId("j2"), limit=10_000))) < 260


def test_a_line_whose_numbers_are_none_is_folded_all_the_same(store: Store) -> None:
    odd = Event(at=v.NOW - 200 * DAY, kind="events.folded", message="?", data={"events": "many", "host.note": None})
    store.tx(lambda tx: tx.commit(Plan(events=(odd,))))
    store.tx(lambda tx: tx.commit(some(300, age=91 * DAY)))
    assert folded(store, replace(RULES, newest=0)) > 0
    assert lines(store)[0].event.data["events"] == 300


def test_charges_jobs_and_attempts_are_what_they_were(store: Store) -> None:
    store.tx(lambda tx: tx.commit(v.running_job()))
    store.tx(lambda tx: tx.commit(replace(some(0), charges=(v.charge(),))))
    before = store.read(lambda reads: (reads.charges_of(JobId("j1")), reads.attempts_of(JobId("j1")), reads.jobs()))
    store.tx(lambda tx: tx.commit(some(2_000, job="j1", age=500 * DAY)))
    folded(store)
    after = store.read(lambda reads: (reads.charges_of(JobId("j1")), reads.attempts_of(JobId("j1")), reads.jobs()))
    assert before == after


@pytest.mark.parametrize("statement", ["DELETE FROM events", "UPDATE events SET message = ''"])
def test_events_are_deleted_in_no_other_way(store: Store, statement: str) -> None:
    store.tx(lambda tx: tx.commit(some(300, age=91 * DAY)))
    folded(store)

    def tamper(tx: object) -> None:
        tx._connection.exec_driver_sql(statement)  # type: ignore[attr-defined]  # round the door on purpose

    with pytest.raises((IntegrityError, Exception), match="append-only"):
        store.tx(tamper)
    assert EVENTS.name == "events"


def test_cool_downs_that_ran_out_and_settled_calls_of_ended_jobs_are_gone(store: Store) -> None:
    ended = replace(v.job("j1", state=JobState.FAILED), ended_at=v.NOW - 200 * DAY, submitted_at=v.NOW - 300 * DAY)
    cool = Cooldown(provider=v.VAST, scope=CooldownScope.OFFER, subject="o1", until=v.NOW - 8 * DAY, reason="")
    late = replace(cool, subject="o2", until=v.NOW + DAY)
    gone = Intent(
        id="terminate:vast::1",  # type: ignore[arg-type]  # spelled out
        kind=IntentKind.TERMINATE,
        provider=v.VAST,
        key="spotd-lab-j1-1",  # type: ignore[arg-type]  # spelled out
        state=IntentState.DONE,
        created_at=v.NOW - 200 * DAY,
        attempt=None,
    )
    open_ = replace(gone, id="terminate:vast::2", state=IntentState.OPEN)  # type: ignore[arg-type]  # spelled out
    event = Event(at=v.NOW, kind="job.submitted", message="", job=ended.id)
    plan = Plan(
        jobs={ended.id: ended}, intents={gone.id: gone, open_.id: open_}, cooldowns=(cool, late), events=(event,)
    )
    store.tx(lambda tx: tx.commit(plan))
    assert store.tx(lambda tx: tx.fold(v.NOW, RULES)) == 2
    rows = store.tx(lambda tx: tx._connection.exec_driver_sql("SELECT id FROM intents").scalars().all())
    assert rows == [open_.id]


def test_a_state_under_a_flood_keeps_its_size(store: Store) -> None:
    sizes: list[int] = []
    for _ in range(12):
        for _ in range(4):
            store.tx(lambda tx: tx.commit(some(250, job="j1")))
        folded(store)
        sizes.append(store.tx(lambda tx: tx._connection.exec_driver_sql("PRAGMA page_count").scalar_one()))
    assert max(sizes[3:]) <= sizes[2] + 2, "the pages of what was folded are used again"
