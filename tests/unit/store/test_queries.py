"""What the API is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import TypeVar

import pytest

from spotd.api.handlers.context import find_job
from spotd.api.responses import Ambiguous, NotFound
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.jobs import ArrayTask, Job, PaceSample
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.store import JobView, Reads, Store, Tx
from spotd.store.queries import AMBIGUOUS_MAX
from spotd_jobs.spec.model import Resources
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, ProviderName
from tests.unit.store import values as v
from tests.unit.store.reads import checkpoints_of, costs_by_day, costs_by_job, costs_by_provider, intents_of

T = TypeVar("T")
J1 = v.job_id("j1")


def commit(store: Store, *plans: Plan) -> None:
    for plan in plans:
        write(store, plan)


def write(store: Store, plan: Plan) -> int:
    return store.tx(lambda tx: tx.commit(plan))


def ask(store: Store, question: Callable[[Reads], T]) -> T:
    return store.read(question)


def found(store: Store, text: str) -> object:
    """The id that a user's word leads to, or the ids that it could mean."""
    try:
        return store.read(lambda r: find_job(r, text))
    except Ambiguous:
        return [view.id for view in store.read(lambda r: r.jobs_meant_by(text))]
    except NotFound:
        return None


def test_a_job_is_found_by_id_by_name_and_by_the_beginning_of_its_id(store: Store) -> None:
    commit(store, v.plan(v.job("ab12", name="llama"), v.job("cd34", name="bert")))
    assert [found(store, text) for text in ("ab12", "ab", "llama", "c", "bert")] == [
        "ab12",
        "ab12",
        "ab12",
        "cd34",
        "cd34",
    ]
    assert [found(store, text) for text in ("", "x", "LLAMA", "AB", "ab%", "_b12", "ab123")] == [None] * 7


def test_of_several_jobs_with_one_name_the_newest_is_meant(store: Store) -> None:
    old = v.job("z", JobState.SUCCEEDED, name="llama")
    new = v.job("a", JobState.SUCCEEDED, name="llama", submitted_at=v.NOW + timedelta(hours=1))
    commit(store, v.plan(new, old))
    assert found(store, "llama") == "a"


def test_an_id_goes_before_a_name_and_a_name_before_a_beginning(store: Store) -> None:
    newer = v.NOW + timedelta(hours=1)
    commit(store, v.plan(v.job("one", name="x"), v.job("two", name="one", submitted_at=newer)))
    assert found(store, "one") == "one"
    commit(store, v.plan(v.job("three", name="on")))
    assert found(store, "on") == "three"


def test_an_ambiguous_beginning_lists_what_it_could_mean_newest_first(store: Store) -> None:
    jobs = [v.job(f"ab{n:02}", submitted_at=v.NOW + timedelta(minutes=n)) for n in range(AMBIGUOUS_MAX + 5)]
    commit(store, v.plan(*jobs))
    assert found(store, "ab") == [f"ab{n:02}" for n in range(AMBIGUOUS_MAX + 4, 4, -1)]
    assert found(store, "ab0") == [f"ab0{n}" for n in range(9, -1, -1)]
    assert found(store, "ab03") == "ab03"


def ids(views: tuple[JobView, ...]) -> list[str]:
    return [view.id for view in views]


def test_the_list_of_jobs_is_newest_first_and_can_be_cut(store: Store) -> None:
    states = list(JobState)
    commit(store, v.plan(*[v.job(f"j{n:02}", s, submitted_at=v.NOW + timedelta(n)) for n, s in enumerate(states)]))
    newest_first = [f"j{n:02}" for n in range(len(states))][::-1]
    assert ids(ask(store, lambda r: r.jobs())) == newest_first
    assert ids(ask(store, lambda r: r.jobs(limit=3))) == newest_first[:3]
    active = [f"j{n:02}" for n, s in enumerate(states) if not s.is_final][::-1]
    assert ids(ask(store, lambda r: r.jobs(active=True))) == active
    assert ids(ask(store, lambda r: r.jobs(active=True, limit=2))) == active[:2]


def test_of_a_name_only_the_jobs_that_go_on_are_listed(store: Store) -> None:
    over = v.job("b", JobState.SUCCEEDED, name="x")
    commit(store, v.plan(v.job("a", name="x"), over, v.job("c", name="z")))
    assert ids(ask(store, lambda r: r.active_named("x"))) == ["a"]
    assert ask(store, lambda r: r.ended_ids()) == ("b",)
    assert ask(store, lambda r: r.names_of([v.job_id("a"), v.job_id("c"), v.job_id("d")])) == {"a": "x", "c": "z"}


def test_ended_jobs_come_page_by_page(store: Store) -> None:
    commit(store, v.plan(v.job("x"), *[v.job(one, JobState.SUCCEEDED) for one in "abcd"]))
    assert ask(store, lambda r: r.ended_page(before=None, limit=3)) == ("d", "c", "b")
    assert ask(store, lambda r: r.ended_page(before=v.job_id("b"), limit=3)) == ("a",)


def test_counts_are_by_state_and_name_every_state(store: Store) -> None:
    commit(store, v.plan(v.job("a"), v.job("b"), v.job("c", JobState.FAILED)))
    counts = ask(store, lambda r: r.counts_by_state())
    assert set(counts) == set(JobState)
    assert {s: n for s, n in counts.items() if n} == {JobState.QUEUED: 2, JobState.FAILED: 1}


def two_attempts() -> Plan:
    """A job on its second machine, the first one still ending; each costs money."""
    first = v.attempt(
        state=AttemptState.ENDING,
        ref=v.ref("i-1"),
        meter=Meter(settled=MicroUsd(400), rate=MicroUsdPerHour(3_600), on_demand_rate=None, since=v.NOW),
        on_demand_settled=MicroUsd(900),
    )
    second = v.attempt(
        number=2,
        state=AttemptState.RUNNING,
        phase="training",
        meter=Meter(rate=MicroUsdPerHour(7_200), on_demand_rate=MicroUsdPerHour(36_000), since=v.NOW),
        running_at=v.NOW,
    )
    saved = (v.checkpoint("new", step=2), v.checkpoint("old"))
    owner = v.job(
        state=JobState.RUNNING, attempts_made=2, spent=MicroUsd(50), on_demand=MicroUsd(70), checkpoints=saved
    )
    return v.plan(owner, first, second)


def the_job(store: Store) -> JobView:
    view = store.read(lambda r: r.job_view(J1))
    assert view is not None
    return view


def test_a_line_of_the_list_says_where_the_job_runs_and_what_it_costs(store: Store) -> None:
    commit(store, two_attempts())
    view = the_job(store)
    assert view == ask(store, lambda r: r.jobs())[0]
    assert [a.id.number for a in view.open] == [1, 2]
    assert (view.open[1].provider, view.open[1].gpu) == ("vast", "H100")
    assert view.gpu_wanted == "H100:1, A100-80GB:2"
    assert view.checkpoint == v.checkpoint("new", step=2)
    in_a_second = v.NOW + timedelta(seconds=1)
    assert view.spent_at(v.NOW) == 50 + 400
    assert view.spent_at(in_a_second) == 50 + 400 + 1 + 2
    assert view.on_demand_at(v.NOW) == 70 + 900
    assert view.on_demand_at(in_a_second) == 70 + 900 + 1 + 10


def test_the_cost_of_ended_attempts_is_counted_once(store: Store) -> None:
    commit(store, two_attempts())
    ended = v.attempt(state=AttemptState.ENDED, meter=Meter(settled=MicroUsd(400)))
    second = replace(the_attempt(store, 2), state=AttemptState.ENDED, meter=Meter(settled=MicroUsd(9)))
    commit(store, v.plan(v.job(state=JobState.SUCCEEDED, attempts_made=2, spent=MicroUsd(459)), ended, second))
    view = the_job(store)
    assert view.open == ()
    assert view.spent_at(v.NOW + timedelta(days=9)) == 459


def the_attempt(store: Store, number: int) -> Attempt:
    return store.read(lambda r: r.attempts_of(J1))[number - 1]


def test_a_job_without_attempts_or_checkpoints_has_none_in_the_list(store: Store) -> None:
    commit(store, v.plan(v.job()))
    view = the_job(store)
    assert (view.open, view.checkpoint) == ((), None)
    assert ask(store, lambda r: r.job_view(JobId("nobody"))) is None


@pytest.mark.parametrize(
    ("resources", "shown"),
    [(Resources(min_vram_mb=40_000, gpu_count=2), ">=40GB:2"), (Resources(), "any:1")],
    ids=["by memory", "anything"],
)
def test_what_a_job_wants_is_shown_however_it_was_said(store: Store, resources: Resources, shown: str) -> None:
    commit(store, v.plan(v.job(spec=replace(v.spec(), resources=resources))))
    assert the_job(store).gpu_wanted == shown


def test_every_attempt_of_a_job_is_shown_oldest_first(store: Store) -> None:
    ended = v.attempt(state=AttemptState.ENDED)
    commit(store, v.plan(v.job(state=JobState.RUNNING), ended, v.attempt(number=2)), v.running_job("j2"))
    assert ask(store, lambda r: r.attempts_of(J1)) == (ended, v.attempt(number=2))


def test_a_job_that_does_not_exist_is_none(store: Store) -> None:
    assert ask(store, lambda r: r.job(J1)) is None
    assert ask(store, lambda r: (r.attempts_of(J1), checkpoints_of(r, J1), intents_of(r, J1))) == ((), (), ())


def event(n: int, job: str | None = None) -> Event:
    return Event(at=v.NOW, kind=f"e{n}", message="m", job=None if job is None else JobId(job))


def test_events_go_on_after_a_number_and_stop_at_a_limit(store: Store) -> None:
    commit(store, v.plan(*[event(n, "j1" if n % 2 else None) for n in range(1, 11)]))

    def kinds(**asked: object) -> list[str]:
        return [e.event.kind for e in store.read(lambda r: r.events(**asked))]  # type: ignore[arg-type]  # names differ

    assert kinds() == [f"e{n}" for n in range(1, 11)]
    assert kinds(since=7) == ["e8", "e9", "e10"]
    assert kinds(since=2, limit=3) == ["e3", "e4", "e5"]
    assert kinds(since=4, job_id=J1, limit=2) == ["e5", "e7"]
    assert kinds(since=10) == []
    assert ask(store, lambda r: r.last_event()) == 10


def test_the_newest_events_are_told_in_the_order_they_happened(store: Store) -> None:
    assert ask(store, lambda r: r.newest_events()) == ()
    commit(store, v.plan(*[event(n, "j1" if n % 2 else None) for n in range(1, 11)]))
    assert [e.seq for e in ask(store, lambda r: r.newest_events(limit=3))] == [8, 9, 10]
    assert [e.seq for e in ask(store, lambda r: r.newest_events(job_id=J1, limit=2))] == [7, 9]


def spent_over_two_days(store: Store) -> None:
    yesterday = datetime(2026, 11, 20, 9, tzinfo=UTC)
    aws = ProviderName("aws")
    commit(store, v.running_job("j1"), v.running_job("j2"))
    commit(
        store,
        v.plan(
            v.charge("j1", at=yesterday, amount=10, on_demand=30),
            v.charge("j1", at=v.NOW, amount=5, on_demand=None),
            v.charge("j2", at=v.NOW, amount=7, on_demand=9, provider=aws),
        ),
    )


def test_costs_add_up_by_job_by_provider_and_by_day(store: Store) -> None:
    spent_over_two_days(store)

    assert store.read(costs_by_job) == [("j1", 15, 35), ("j2", 7, 9)]
    assert store.read(costs_by_provider) == [("aws", 7, 9), ("vast", 15, 35)]
    assert store.read(costs_by_day) == [(date(2026, 11, 20), 10, 30), (date(2026, 11, 21), 12, 14)]
    today = date(2026, 11, 21)
    assert store.read(lambda r: costs_by_provider(r, until=date(2026, 11, 20))) == [("vast", 10, 30)]
    assert store.read(lambda r: costs_by_day(r, since=today, until=today)) == [(today, 12, 14)]


def test_the_spans_of_a_job_are_in_order(store: Store) -> None:
    spent_over_two_days(store)
    assert [c.amount for c in ask(store, lambda r: r.charges_of(J1))] == [10, 5]


def test_ended_jobs_are_listed_without_those_that_go_on_newest_first(store: Store) -> None:
    minute = timedelta(minutes=1)
    for number, state in enumerate([JobState.SUCCEEDED, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED]):
        made = v.job(f"j{number}", state, name=f"n{number}", submitted_at=v.NOW + number * minute, ended_at=v.NOW)
        store.tx(partial(Tx.commit, plan=v.plan(made)))
    assert [view.id for view in store.read(lambda r: r.ended_jobs(limit=2))] == ["j3", "j2"]
    assert [view.id for view in store.read(lambda r: r.ended_jobs(limit=9))] == ["j3", "j2", "j0"]


def test_of_the_paces_of_jobs_an_array_has_one_vote_and_an_agent_none(store: Store) -> None:
    def paced(name: str, steps: int, **changes: object) -> Job:
        one = PaceSample(attempt=1, gpu="T4", gpu_count=1, steps=steps, span=timedelta(hours=1))
        later = v.NOW + timedelta(minutes=steps)
        return replace(v.job(name, JobState.SUCCEEDED), paces=(one,), submitted_at=later, **changes)  # type: ignore[arg-type]  # fields by name

    array = [
        paced(f"t{n}", 10, array=ArrayTask(id=v.job_id("aa"), name="a", count=3, index=n, at_once=None))
        for n in range(3)
    ]
    commit(store, v.plan(paced("j1", 1), paced("j2", 2), paced("j3", 3, submitted_by="agent"), v.job("j4"), *array))
    found = ask(store, lambda reads: reads.newest_paces(limit=9))
    assert [one.steps for paces in found for one in paces] == [10, 2, 1]
    assert len(ask(store, lambda reads: reads.newest_paces(limit=2))) == 2
