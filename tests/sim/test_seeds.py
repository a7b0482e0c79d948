"""Seeded worlds with faults, crashes, outages and an impatient user: every oracle holds in each of them.

`python -m tests.sim.run SEED` replays one in its standard shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import pytest
from _pytest.mark.structures import ParameterSet

from tests.sim.bounds import waits_for_a_lower_price
from tests.sim.daemon import Daemon
from tests.sim.gangs import (
    KEPT,
    KEPT_AND_LEFT,
    KEPT_AND_OUTBID,
    KEPT_AND_RESTORED,
    KEPT_WITHOUT_FIRST,
    KEPT_WITHOUT_FIRST_AND_OUTBID,
    KEPT_WITHOUT_FIRST_AND_RESTORED,
)
from tests.sim.harsh import CEILINGS_FROM, HARSH_FROM
from tests.sim.hazards import HARSH, HARSH_LATER, OWN_MACHINES, READY, Hazard
from tests.sim.oracles import broken_rules
from tests.sim.own import OWN_FROM
from tests.sim.planted_lives import CLOCKS_DIFFER
from tests.sim.run import Result, run_world
from tests.sim.swarm import drawn, run_all
from tests.sim.worlds import QUIET, Shape

SHORT = Shape(storm=timedelta(hours=6))
SHAPES = {
    "standard": SHORT,
    "few machines": replace(SHORT, limits={"machines_max": 2}),
    "day budget": replace(SHORT, limits={"budget_day": 3_000_000}, outages_per_hour=0.0, reachable=True, user=False),
    "job budgets": replace(SHORT, job_budget=700_000, outages_per_hour=0.0, reachable=True),
    "outages": replace(SHORT, outages_per_hour=0.3),
    "no faults": replace(QUIET, storm=timedelta(hours=6)),
    "deadlines": replace(SHORT, hazards=frozenset({Hazard.DEADLINES, Hazard.ON_DEMAND})),
    "canaries": replace(
        SHORT,
        jobs=10,
        hosts=6,
        whims_per_hour=20.0,
        kills_per_hour=1.0,
        job_budget=300_000,
        limits={"canary": timedelta(minutes=5)},
        hazards=frozenset({Hazard.UNFIT, Hazard.NOTICES, Hazard.DEADLINES, Hazard.ON_DEMAND}),
    ),
    "clocks differ": CLOCKS_DIFFER,
    "kept machines": KEPT,
    "kept machines outbid": KEPT_AND_OUTBID,
    "kept machines restored": KEPT_AND_RESTORED,
    "kept machines left": KEPT_AND_LEFT,
    "kept machines without the first": KEPT_WITHOUT_FIRST,
    "kept machines without the first outbid": KEPT_WITHOUT_FIRST_AND_OUTBID,
    "kept machines without the first restored": KEPT_WITHOUT_FIRST_AND_RESTORED,
    "faults without crashes": replace(SHORT, crash_rate=0.0, kills_per_hour=0.0, outages_per_hour=0.0),
}
FAST, MANY = 0, range(1, 40)
FOUND = (
    pytest.param("faults without crashes", 3, marks=pytest.mark.lengthy),
    ("job budgets", 11),
    pytest.param("deadlines", 39, marks=pytest.mark.lengthy),
    pytest.param("clocks differ", 32, marks=pytest.mark.lengthy),
    *(pytest.param("canaries", seed, marks=pytest.mark.lengthy) for seed in (4, 30)),
)
"""Worlds that broke a rule once, beside the drawn ones below."""
DRAWN_FAST = (50_517, 51_536, 51_718, 52_240, 52_467, 53_108)
HARSH_FAST = (1_000_006, 1_000_915, 2_000_098)
OWN_FAST = (5_000_948, 5_001_913)
GANGS_FAST = (7_000_103, 7_500_004, 7_700_014, 7_800_003)
UNFIT_FAST = (8_000_010, 8_000_013)
LATE_FAST = (10_000_013,)
DRAWN_MORE = (0, 10, 1200, 1675, 2043, 53_433, 55_331)
LATER_MORE = (
    10_000_003,
    10_000_007,
    8_000_007,
    8_000_060,
    8_000_098,
    1_000_034,
    1_000_117,
    5_000_000,
    5_000_001,
    7_000_000,
    7_000_009,
    7_700_108,
    7_700_110,
    7_700_116,
)
FAST_SHAPES = frozenset({"standard", "job budgets", "outages", "no faults"})
"""`make test` runs one world of each of these, and a small world of each drawn hazard; `make lengthy` runs the others.

Beside them `test_planted_bugs.py` runs some twenty worlds with the real daemon.
"""

FIRST_OF_SWARM = 100_000


class DecidesTwice(Daemon):
    decides_twice = True


def marked(fast: Iterable[str | int], more: Iterable[str | int]) -> list[ParameterSet]:
    return [
        *(pytest.param(world, marks=pytest.mark.long) for world in fast),
        *(pytest.param(world, marks=pytest.mark.lengthy) for world in more),
    ]


def run(shape: str, seed: int) -> Result:
    result = run_world(seed, SHAPES[shape], enough=only_waits)
    assert broken_rules(result) == [], f"seed {seed} of {shape!r}: python -m tests.sim.run {seed} {shape!r}"
    return result


def only_waits(result: Result) -> bool:
    """Whether nothing was left after a day of calm but jobs whose budgets no host of it is cheap enough for."""
    world = result.daemon.world
    rests = not (world.attempts or world.intents or any(cloud.active for cloud in result.clouds))
    whole = len(result.submitted) == result.shape.jobs
    waiting = all(waits_for_a_lower_price(result, job) for job in world.jobs)
    return result.ended_at >= result.calm_at + timedelta(days=1) and rests and whole and waiting


@pytest.mark.parametrize("shape", marked(sorted(FAST_SHAPES), sorted(SHAPES.keys() - FAST_SHAPES)))
def test_no_machine_is_forgotten_or_doubled_and_every_job_ends_as_it_must(shape: str) -> None:
    run(shape, FAST)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "seed"), FOUND)
def test_a_world_that_broke_a_rule_once_keeps_every_rule(shape: str, seed: int) -> None:
    run(shape, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_machine_is_forgotten_or_doubled_in_many_more_worlds(shape: str, seed: int) -> None:
    run(shape, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_market_of_two_hundred_offers_and_forty_jobs_keeps_every_rule(seed: int) -> None:
    assert broken_rules(run_world(seed, Shape(jobs=40, hosts=100))) == []


@pytest.mark.parametrize(
    "seed",
    marked([*DRAWN_FAST, *HARSH_FAST, *OWN_FAST, *GANGS_FAST, *UNFIT_FAST, *LATE_FAST], [*DRAWN_MORE, *LATER_MORE]),
)
def test_a_world_that_is_drawn_whole_from_its_seed_keeps_every_rule(seed: int) -> None:
    result = run_world(seed, drawn(seed), daemon_type=DecidesTwice)
    assert broken_rules(result) == [], f"python -m tests.sim.run {seed}"
    assert result.daemon.told.skipped, "no decision was left out"


@pytest.mark.slow
def test_a_hundred_days_of_drawn_worlds_keep_every_rule() -> None:
    worlds = run_all(days=100, jobs=2, first=FIRST_OF_SWARM, record=None)
    assert [(world["seed"], world["broken"]) for world in worlds if world["broken"]] == []


def test_every_hazard_is_drawn_by_some_seed_and_most_by_a_few() -> None:
    drawn_ones = Counter(hazard for seed in range(50_000, 50_200) for hazard in drawn(seed).hazards)
    assert set(drawn_ones) == READY
    assert min(drawn_ones.values()) >= 20
    harsh_ones = Counter(hazard for seed in range(HARSH_FROM, HARSH_FROM + 100) for hazard in drawn(seed).hazards)
    assert min(harsh_ones[hazard] for hazard in HARSH) >= 20
    later = Counter(hazard for seed in range(CEILINGS_FROM, CEILINGS_FROM + 100) for hazard in drawn(seed).hazards)
    assert min(later[hazard] for hazard in HARSH_LATER) >= 20
    own_ones = Counter(hazard for seed in range(OWN_FROM, OWN_FROM + 200) for hazard in drawn(seed).hazards)
    assert min(own_ones[hazard] for hazard in OWN_MACHINES) >= 20


def test_each_hazard_is_in_a_world_that_every_run_plays() -> None:
    """All but bills, whose world in `planted_bills.py` the real daemon passes."""
    fast = (*DRAWN_FAST, *HARSH_FAST, *OWN_FAST, *GANGS_FAST, *UNFIT_FAST, *LATE_FAST)
    played = {hazard for seed in fast for hazard in drawn(seed).hazards}
    apart = {Hazard.GANGS, Hazard.RANGES, Hazard.REPLACE, Hazard.FIRST, Hazard.UNFIT, Hazard.LATE_CAUSES, Hazard.UNABLE}
    assert played >= (READY | HARSH | HARSH_LATER | OWN_MACHINES | apart) - {Hazard.BILLS}


@pytest.mark.long
def test_the_same_seed_gives_the_same_history() -> None:
    first, second = run_world(52_467, drawn(52_467)), run_world(52_467, drawn(52_467))
    assert first.crashes > 10
    assert first.daemon.told.events == second.daemon.told.events
    assert first.ended_at == second.ended_at


@pytest.mark.lengthy
def test_storms_do_happen() -> None:
    kinds: Counter[str] = Counter()
    crashes = 0
    for seed in (3, 4, 5):
        result = run_world(seed, replace(SHAPES["outages"], jobs=5))
        assert broken_rules(result) == []
        kinds.update(result.daemon.told.events)
        crashes += result.crashes
    assert crashes > 20
    assert {
        "launch.unknown",
        "machine.adopted",
        "attempt.outbid",
        "attempt.never_launched",
        "attempt.lease_expired",
        "machine.missing",
        "machine.ending_failed",
        "attempt.host_lost",
        "attempt.launch_failed",
        "attempt.user_error",
    } <= set(kinds)
