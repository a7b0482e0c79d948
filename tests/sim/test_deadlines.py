"""In worlds whose faults a deadline leaves time for, no job with the right estimate is late, whatever its policy."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd_jobs.spec.model import Deadline, MarketChoice, PolicyName, PriceLimit, Schedule
from spotd_jobs.spec.model import Work as StatedWork
from tests.sim import worlds
from tests.sim.hazards import Hazard
from tests.sim.oracles import broken_rules
from tests.sim.run import run_world
from tests.sim.worlds import Shape

SHAPE = Shape(
    storm=timedelta(hours=6),
    hazards=frozenset({Hazard.DEADLINES, Hazard.ON_DEMAND}),
    crash_rate=0.0,
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    user=False,
)


def feasible(made: Job, need: timedelta, luck: Random) -> Job:
    """Little more time than work and two hours, on-demand under the ceiling, and any policy."""
    schedule = Schedule(
        deadline=Deadline(span=timedelta(hours=2) + need * 1.05), policy=luck.choice([None, *PolicyName])
    )
    resources = replace(made.spec.resources, market=MarketChoice.AUTO)
    price = PriceLimit(per_gpu_hour=50_000_000)
    spec = replace(
        made.spec, schedule=schedule, work=StatedWork(time=need), price=price, resources=resources, retry_errors=2
    )
    return replace(made, spec=spec)


FAST = 2
"""Without the shield a job of this world is late."""


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.lengthy if n == FAST else pytest.mark.slow) for n in range(10)]
)
def test_no_job_that_could_be_in_time_is_late(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "due", feasible)
    result = run_world(seed, SHAPE)
    assert broken_rules(result) == []
    assert {end.state for end in result.daemon.done.values()} == {JobState.SUCCEEDED}
    # A world in which no spot machine is lost at a bad time needs no on-demand.
    assert seed != FAST or "attempt.migrated" in result.daemon.told.events
