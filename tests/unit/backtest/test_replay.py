"""The replay from change to change does what the plain one does, which asks the core at every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from spotd.backtest.recorded import Assumptions, RecordedMarket, VanishedRule
from spotd.backtest.replay import MarketReplay, PlannedRun
from spotd.backtest.run import JobRun, RunOutcome, SeriesKey, policy_of, series_key
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import JobState
from spotd.core.domain.world import Experience
from spotd_jobs.spec.model import (
    Deadline,
    GpuAlternative,
    GpuSpeed,
    JobSpec,
    MarketChoice,
    PolicyName,
    Resources,
    Schedule,
    Window,
    Work,
)
from tests.unit.backtest import plain
from tests.unit.backtest.builders import FEES, START, job, random_market

Seen = tuple[RunOutcome, Job, Experience]


def some_of(cases: Iterable[Any], quick: int, long: int) -> list[Any]:
    """Every case; so many are quick, so many more are in `make test`, and the others in `make lengthy`."""
    return [
        case if n < quick else pytest.param(case, marks=pytest.mark.long if n < quick + long else pytest.mark.lengthy)
        for n, case in enumerate(cases)
    ]


def seen(run: JobRun, recorded: RecordedMarket) -> Seen:
    """The outcome, and everything that later decisions were made from, but for the list of checkpoints.

    In which words a job waits may change without a decision that matters.
    """
    job, experience = run._job, run._world.experience
    words = {"state": JobState.QUEUED, "reason": "", "state_since": job.submitted_at, "checkpoints": ()}
    return run.outcome(recorded.ends_at), replace(job, **words), experience  # type: ignore[arg-type]  # its own fields


def both(
    recorded: RecordedMarket, planned: list[tuple[JobSpec, int]], terms: Assumptions, *, per_gpu: bool = True
) -> tuple[list[Seen], list[Seen]]:
    policy = policy_for(recorded, planned, terms)
    slow: list[Seen] = []
    for spec, start in planned:
        run = JobRun(spec, policy, terms, numbers_of(recorded), start)
        plain.played(run, recorded, start, terms.step_s)
        slow.append(seen(run, recorded))
    return slow, replayed(recorded, planned, terms, per_gpu=per_gpu)


def replayed(
    recorded: RecordedMarket, planned: list[tuple[JobSpec, int]], terms: Assumptions, *, per_gpu: bool = True
) -> list[Seen]:
    policy = policy_for(recorded, planned, terms)
    runs = []
    for spec, start in planned:
        assert spec.price is not None
        limit = (spec.price.per_gpu_hour if per_gpu else spec.price.machine_hour) or 0
        runs.append(PlannedRun(JobRun(spec, policy, terms, numbers_of(recorded), start), start, limit))
    replay = MarketReplay(recorded, runs, step_s=terms.step_s, fees=FEES, per_gpu=per_gpu)
    list(replay.advance())
    return [seen(one.run, recorded) for one in runs]


def policy_for(recorded: RecordedMarket, planned: list[tuple[JobSpec, int]], terms: Assumptions) -> Policy:
    return policy_of(terms, recorded.providers, paced=planned[0][0].schedule.deadline is not None)


def numbers_of(recorded: RecordedMarket) -> dict[SeriesKey, int]:
    return {series_key(one): number for number, one in enumerate(recorded.series)}


@pytest.mark.parametrize("seed", some_of(range(12), 1, 2))
def test_the_replay_equals_the_plain_one(seed: int) -> None:
    rng = Random(seed)
    recorded = random_market(seed, offers=rng.choice((1, 3, 6)))
    terms = Assumptions(
        work_s=rng.choice((3000, 10_000)),
        restart_s=rng.choice((0, 200, 700)),
        every_s=rng.choice((300, 900)),
        checkpoint_bytes=rng.choice((0, 10**10)),
        vanished=rng.choice(tuple(VanishedRule)),
        fee_ppm=FEES,
    )
    market = rng.choice((None, MarketChoice.AUTO))
    planned = [
        (job(ceiling, market=market, budget=rng.choice((None, 700_000))), START + 60 * rng.randrange(60))
        for ceiling in (250_000, 320_000, 400_000, 560_000)
    ]
    slow, fast = both(recorded, planned, terms)
    assert fast == slow


@pytest.mark.parametrize("seed", some_of(range(40), 1, 2))
def test_bids_holds_and_moves_change_nothing_of_that(seed: int) -> None:
    rng = Random(seed + 1000)
    kinds = rng.choice(((("RTX_4090", 1),), (("RTX_4090", 1), ("H100_SXM", 2))))
    recorded = random_market(seed + 300, offers=rng.choice((2, 5, 8)), hours=16, kinds=kinds)
    work_s = rng.choice((12_000, 40_000))
    terms = Assumptions(
        work_s=work_s,
        restart_s=rng.choice((0, 200, 700)),
        every_s=rng.choice((300, 900, 4000)),
        checkpoint_bytes=rng.choice((0, 10**9)),
        vanished=rng.choice(tuple(VanishedRule)),
        fee_ppm=FEES,
        raise_bids=rng.random() < 0.8,
        hold_max=rng.choice((timedelta(0), timedelta(minutes=10), timedelta(minutes=15))),
        moves_max=rng.choice((0, 2, 1000)),
    )
    wanted = (GpuAlternative(name="RTX_4090", count=1), GpuAlternative(name="H100", count=2))
    planned = [
        (
            replace(
                job(ceiling, budget=rng.choice((None, None, 900_000))),
                resources=Resources(gpu=wanted),
                speed=(
                    GpuSpeed(name="RTX_4090", ppm=1_000_000),
                    GpuSpeed(name="H100", ppm=rng.choice((500_000, 2_500_000))),
                ),
                work=rng.choice((Work(), Work(time=timedelta(seconds=work_s)))),
            ),
            START + 60 * rng.randrange(60),
        )
        for ceiling in (250_000, 400_000, 560_000)
    ]
    slow, fast = both(recorded, planned, terms)
    assert fast == slow


def test_such_markets_raise_and_lower_bids_wait_for_machines_and_move_jobs() -> None:
    terms = Assumptions(
        work_s=40_000, fee_ppm=FEES, raise_bids=True, hold_max=timedelta(minutes=10), moves_max=2
    )  # fmt: skip
    outcomes = []
    for seed in range(6):
        recorded = random_market(seed + 300, offers=5, hours=16)
        outcomes.append(replayed(recorded, [(job(560_000), START)], terms)[0][0])
    assert sum(one.bids for one in outcomes) > 0
    assert sum(one.returns for one in outcomes) > 0
    assert sum(one.moves for one in outcomes) > 0


@pytest.mark.parametrize("seed", some_of(range(6), 1, 2))
def test_windows_limits_of_time_and_several_kinds_of_machine_change_nothing_of_that(seed: int) -> None:
    rng = Random(seed)
    recorded = random_market(seed + 80, offers=8, kinds=(("RTX_4090", 1), ("H100_SXM", 2)))
    terms = Assumptions(work_s=8000, restart_s=200, fee_ppm=FEES, step_s=rng.choice((60, 20, 150)))
    begins = rng.randrange(0, 24 * 60, 30)
    window = Window(days=tuple(range(7)), start_min=begins, end_min=(begins + 240) % 1440)
    schedule = Schedule(
        windows=rng.choice(((), (window,))),
        timezone="Europe/Kyiv",
        max_duration=rng.choice((None, timedelta(minutes=70))),
    )
    wanted = (GpuAlternative(name="RTX_4090", count=1), GpuAlternative(name="H100", count=2))
    spec = replace(
        job(320_000),
        resources=Resources(gpu=wanted),
        schedule=schedule,
        speed=rng.choice(((), (GpuSpeed(name="RTX_4090", ppm=1_000_000), GpuSpeed(name="H100", ppm=1_400_000)))),
        work=rng.choice((Work(), Work(time=timedelta(seconds=8000)))),
    )
    slow, fast = both(recorded, [(spec, START + 300 * part) for part in range(3)], terms)
    assert fast == slow


@pytest.mark.parametrize("policy", some_of(PolicyName, 1, 9))
def test_a_job_with_a_deadline_is_decided_at_every_step(policy: PolicyName) -> None:
    seed = [*PolicyName].index(policy)
    recorded = random_market(seed + 50, offers=5)
    terms = Assumptions(work_s=5000, restart_s=200, fee_ppm=FEES)
    schedule = Schedule(deadline=Deadline(span=timedelta(hours=4)), policy=policy)
    spec = replace(job(600_000, market=MarketChoice.AUTO), schedule=schedule, work=Work(time=timedelta(seconds=5000)))
    slow, fast = both(recorded, [(spec, START + 60 * rest) for rest in (0, 31)], terms)
    assert fast == slow
