"""The whole loop of reconcile, decide and act in seeded worlds with faults and crashes at every point."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.states import JobState
from spotd_providers.contract.values import InstanceState
from tests.sim.run import overlaps, run_world

SEEDS = range(16)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_machine_is_forgotten_or_doubled_and_every_job_finishes(seed: int) -> None:
    result = run_world(seed)
    daemon = result.daemon
    assert len(daemon.done) == 6
    assert {j.state for j in daemon.done.values()} == {JobState.SUCCEEDED}, seed
    for cloud in result.clouds:
        left = [m for m in cloud.machines.values() if not m.foreign and m.state is not InstanceState.GONE]
        assert left == [], f"seed {seed}: forgotten machines"
        assert not [i for i in cloud.terminated_by_us if i.startswith("foreign")]
        for _key, offered, price_max in cloud.launch_calls:
            assert price_max >= offered
        keys = [key for key, *_ in cloud.launch_calls]
        assert len(keys) == len(set(keys)), f"seed {seed}: a launch was repeated under one key"
    for _job, start, best in daemon.resumes:
        assert start == best, f"seed {seed}: did not resume from the newest checkpoint"
    assert overlaps(result.clouds) == [], f"seed {seed}"


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = run_world(5), run_world(5)
    assert first.daemon.events == second.daemon.events
    assert first.ended_at == second.ended_at


def test_storms_do_happen() -> None:
    kinds: set[str] = set()
    crashes = 0
    for seed in range(6):
        result = run_world(seed)
        kinds.update(result.daemon.events)
        crashes += result.crashes
    assert crashes > 20
    assert {
        "launch.unknown",
        "machine.adopted",
        "attempt.outbid",
        "attempt.preempted",
        "attempt.never_launched",
        "machine.missing",
        "machine.ending_failed",
        "attempt.host_lost",
        "attempt.launch_failed",
    } <= kinds


@pytest.mark.parametrize("seed", range(2))
def test_a_day_budget_is_never_broken_by_more_than_one_step(seed: int) -> None:
    budget = 3_000_000
    result = run_world(seed, jobs=8, budget_day=budget, limit=timedelta(days=6), storm=timedelta(hours=6))
    by_day: dict[object, int] = {}
    for attempt in result.daemon.charges:
        by_day[attempt.day] = by_day.get(attempt.day, 0) + attempt.amount
    step = 8 * 1_500_000 * 30 // 3600
    assert by_day
    assert max(by_day.values()) <= budget + step
