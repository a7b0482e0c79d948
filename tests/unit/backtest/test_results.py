"""Starts, shares of work, percentiles and the recommendation."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.backtest import playing
from spotd.backtest.playing import BacktestCase, Question, cases_of, play, starts_over, without_unrecorded
from spotd.backtest.recorded import GONE, UNKNOWN, Assumptions, BacktestRefused, RecordedMarket, VanishedRule
from spotd.backtest.result import CeilingAdvice, Summary, advice_on, percentile, summarized
from spotd.backtest.run import End, RunOutcome
from spotd_jobs.spec.model import Deadline, JobSpec, PriceLimit, Resources, Schedule, WatchdogPolicy
from tests.cases import every
from tests.unit.backtest.builders import CLOUD, FEES, START, job, offer, random_market, recorded_market

HOUR = 3600


def asked(recorded: RecordedMarket, starts: tuple[int, ...], deadline: timedelta | None = None) -> Question:
    return Question(
        spec=job(),
        recorded=recorded,
        cases=cases_of([PriceLimit(per_gpu_hour=one) for one in (250_000, 400_000)], ["ceiling"]),
        starts=starts,
        terms=Assumptions(work_s=2 * HOUR, fee_ppm=FEES),
        deadline=deadline,
    )


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_outcome_is_the_same_whatever_the_number_of_processes() -> None:
    question = asked(random_market(3), tuple(START + 600 * place for place in range(7)))
    counts: list[int] = []
    alone = play(question, processes=1, progress=counts.append)
    assert [len(case) for case in alone] == [7, 7]
    assert play(question, processes=3, progress=lambda count: None) == alone
    assert play(question, processes=50, progress=lambda count: None) == alone
    assert any(one.launches for one in alone[1])


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_is_ended_from_outside_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "play_some", lambda *_: os._exit(9))
    with pytest.raises(BacktestRefused, match="memory ran out"):
        play(asked(random_market(3), (START, START + 600)), processes=2, progress=lambda count: None)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_defect_in_a_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(playing, "play_some", fails)
    with pytest.raises(BacktestRefused, match="ZeroDivisionError: by zero"):
        play(asked(random_market(3), (START, START + 600)), processes=2, progress=lambda count: None)


# --- one run, followed by hand ---------------------------------------------------------------------------------


def test_a_run_through_one_loss_is_what_one_computes_by_hand() -> None:
    """$0.24 with the fee; lost after 1 h 10 min; back after 30 min; 6 min to start, a checkpoint every 15 min."""
    lost, back = START + 70 * 60, START + 100 * 60
    changes = [(START, 0, 200_000), (lost, 0, GONE), (back, 0, 200_000)]
    recorded = recorded_market([offer(pays_bid=False)], changes, begins_at=START, ends_at=START + 9 * HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert outcome.end is End.FINISHED
    # 64 min worked, 60 of them saved; what is left takes 60 min after another start
    assert outcome.took_s == 100 * 60 + 6 * 60 + 60 * 60
    assert (outcome.preemptions, outcome.launches, outcome.waiting_s, outcome.repeated_s) == (1, 2, 30 * 60, 4 * 60)
    assert outcome.cost == pytest.approx(240_000 * (70 + 66) / 60, abs=2)
    assert outcome.on_demand == pytest.approx(900_000 * 1.2 * (70 + 66) / 60, abs=2)


def test_a_record_that_ends_first_is_never_taken_for_an_end() -> None:
    recorded = recorded_market([offer()], [(START, 0, 200_000)], begins_at=START, ends_at=START + HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.took_s, outcome.waiting_s) == (End.CENSORED, HOUR, 0)
    assert outcome.cost > 0


def test_a_price_that_rises_above_the_ceiling_stops_the_machine_and_loses_no_work() -> None:
    changes = [(START, 0, 300_000), (START + HOUR, 0, 900_000), (START + 2 * HOUR, 0, 300_000)]
    one = offer(pays_bid=False)
    recorded = recorded_market([one], changes, begins_at=START, ends_at=START + 9 * HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.price_stops, outcome.preemptions) == (End.FINISHED, 1, 0)
    assert outcome.repeated_s == 0


def test_a_price_of_exactly_the_ceiling_ends_the_waiting() -> None:
    one = offer(provider=CLOUD, pays_bid=False)
    changes = [(START, 0, 500_000), (START + HOUR, 0, 400_001), (START + 2 * HOUR, 0, 400_000)]
    recorded = recorded_market([one], changes, begins_at=START, ends_at=START + 9 * HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.waiting_s) == (End.FINISHED, 2 * HOUR)


@every(("price", "losses"), [(220_000, 0), (220_001, 1)])
def test_a_machine_is_lost_once_the_price_is_above_its_bid(price: int, losses: int) -> None:
    """$0.20 wins, and a tenth more is bid."""
    changes = [(START, 0, 200_000), (START + HOUR, 0, price), (START + HOUR + 300, 0, 200_000)]
    recorded = recorded_market([offer()], changes, begins_at=START, ends_at=START + 9 * HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.preemptions) == (End.FINISHED, losses)


@every(("rule", "losses"), [(VanishedRule.LOST, 1), (VanishedRule.KEPT, 0)])
def test_what_becomes_of_a_machine_whose_offer_vanishes_is_a_rule(rule: VanishedRule, losses: int) -> None:
    changes = [(START, 0, 200_000), (START + HOUR, 0, GONE), (START + 2 * HOUR, 0, 200_000)]
    recorded = recorded_market([offer()], changes, begins_at=START, ends_at=START + 9 * HOUR)
    question = asked(recorded, (START,))
    question = replace(question, terms=replace(question.terms, vanished=rule))
    (outcome,) = play(question, processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.preemptions) == (End.FINISHED, losses)


def test_nothing_is_launched_or_lost_where_nothing_was_recorded() -> None:
    changes = [(START, 0, UNKNOWN), (START + HOUR, 0, 200_000), (START + 2 * HOUR, 0, UNKNOWN)]
    recorded = recorded_market([offer()], changes, begins_at=START, ends_at=START + 9 * HOUR)
    (outcome,) = play(asked(recorded, (START,)), processes=1, progress=lambda count: None)[1]
    assert (outcome.end, outcome.preemptions, outcome.waiting_s) == (End.FINISHED, 0, HOUR)


def test_a_job_is_played_alone_and_unwatched_whatever_it_comes_after() -> None:
    question = asked(random_market(3), (START,), deadline=timedelta(hours=9))
    alone = JobSpec(name="x", run=("a",), image="i", schedule=Schedule(after=("prep",), preempt=True))
    alone = replace(alone, watchdog=WatchdogPolicy(no_progress=timedelta(minutes=5)))
    spec = replace(question, spec=alone).spec_for(question.cases[0])
    assert (spec.schedule.after, spec.schedule.preempt, spec.watchdog.is_on) == ((), False, False)
    assert spec.schedule.deadline == Deadline(span=timedelta(hours=9))
    assert spec.work.time == timedelta(hours=2)


# --- starts ----------------------------------------------------------------------------------------------------


def recorded_for(seconds: int) -> RecordedMarket:
    return recorded_market([offer()], [(START, 0, 1)], begins_at=START, ends_at=START + seconds)


@given(
    span=st.integers(HOUR + 400, 40 * 24 * HOUR), count=st.integers(1, 200), seed=st.integers(0, 2**63 - 1)
)  # fmt: skip
def test_starts_are_whole_steps_that_leave_room_for_the_job(span: int, count: int, seed: int) -> None:
    terms = Assumptions(work_s=HOUR, restart_s=0)
    starts = starts_over(recorded_for(span), terms, fastest=1_000_000, count=count, seed=seed)
    assert starts == starts_over(recorded_for(span), terms, fastest=1_000_000, count=count, seed=seed)
    assert 1 <= len(starts) <= count
    assert list(starts) == sorted(set(starts))
    assert all(start % 60 == 0 and start >= START for start in starts)
    assert all(start + HOUR <= START + span for start in starts)


def test_a_record_that_is_shorter_than_the_job_is_refused() -> None:
    with pytest.raises(BacktestRefused, match=r"holds 1\.0 h, and the job needs 2\.1 h"):
        starts_over(recorded_for(HOUR), Assumptions(work_s=2 * HOUR), fastest=1_000_000, count=5, seed=1)


def test_what_no_record_shows_is_left_out_and_said() -> None:
    spec = replace(job(), resources=Resources(cpus=8, min_cuda="12.4", regions=("eu",), providers=("aws",)))
    wanted, notes = without_unrecorded(spec, recorded_for(HOUR))
    assert wanted.resources == Resources()
    assert "cpus, min_cuda, regions, providers" in notes[0]
    assert without_unrecorded(job(), recorded_for(HOUR)) == (job(), ())


# --- percentiles and advice ------------------------------------------------------------------------------------


@given(known=st.lists(st.integers(0, 99)), more=st.integers(0, 30), percent=st.integers(1, 100))
def test_a_percentile_counts_what_is_not_known_as_larger_than_all(known: list[int], more: int, percent: int) -> None:
    count = len(known) + more
    found = percentile(known, count, percent)
    padded = sorted([*known, *[10**9] * more])
    rank = -(-count * percent // 100)
    expected = padded[rank - 1] if count else None
    assert found == (None if expected == 10**9 else expected)


def outcome(took_s: int = HOUR, cost: int = 10, end: End = End.FINISHED) -> RunOutcome:
    return RunOutcome(
        started_at=START, end=end, took_s=took_s, cost=cost, on_demand=30, preemptions=1, price_stops=0, launches=2,
        waiting_s=600, repeated_s=60, why="the budget is used up" if end is End.STOPPED else "",
    )  # fmt: skip


def summary(ceiling: int, cost: int, hours: float, *, unfinished: int = 0, deadline_s: int | None = None) -> Summary:
    some = [outcome(int(hours * HOUR), cost)] * (10 - unfinished) + [outcome(end=End.CENSORED)] * unfinished
    return summarized(
        BacktestCase(policy="ceiling", ceiling=PriceLimit(per_gpu_hour=ceiling)), some, deadline_s=deadline_s
    )  # fmt: skip


def test_too_few_finished_runs_have_no_percentile() -> None:
    some = summary(1, 10, 2, unfinished=3)
    assert (some.finished, some.censored, some.cost_median, some.cost_p90, some.took_p90_s) == (7, 3, 10, None, None)
    stopped = summarized(some.case, [outcome(end=End.STOPPED)] * 2, deadline_s=HOUR)
    assert (stopped.stopped, stopped.late, stopped.why_stopped) == (2, 1.0, ("the budget is used up",))


def recommended(*summaries: Summary, deadline_s: int | None = None, patience: float = 1.5) -> CeilingAdvice:
    return advice_on(summaries, deadline_s=deadline_s, patience=patience)


def test_the_cheapest_that_is_not_too_slow_is_recommended_and_of_equals_the_lowest() -> None:
    slow, good, same, costly = summary(1, 5, 9), summary(2, 8, 5), summary(3, 8, 5), summary(4, 12, 4)
    advice = recommended(slow, good, same, costly)
    assert advice.summary is good
    assert [ceiling for ceiling, _ in advice.neighbours] == ["$0.000001/GPU-h", "$0.000003/GPU-h"]
    assert recommended(slow, good, same, costly, patience=3).summary is slow
    assert recommended(slow, good, same, costly, patience=1).summary is costly


def test_a_ceiling_under_which_runs_do_not_finish_is_never_recommended() -> None:
    cut = summary(1, 1, 1, unfinished=2)
    whole = summary(2, 9, 9)
    assert recommended(cut, whole).summary is whole
    none = recommended(cut)
    assert none.summary is None
    assert "8 of 10" in none.reason


def test_with_a_deadline_every_run_must_be_in_time() -> None:
    limit = 6 * HOUR
    slow, good = summary(1, 5, 9, deadline_s=limit), summary(2, 8, 5, deadline_s=limit)
    assert recommended(slow, good, deadline_s=limit).summary is good
    none = recommended(slow, deadline_s=limit)
    assert none.summary is None
    assert "misses it in 100% of its runs" in none.reason
