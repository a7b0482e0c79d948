"""The simulated daemon and the back-test of the market that it lived in agree on starts, losses, moves and cost."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from spotd.backtest.recorded import Assumptions, RecordedMarket
from spotd.backtest.replay import MarketReplay, PlannedRun
from spotd.backtest.run import End, JobRun, RunOutcome, policy_of, series_key
from spotd_providers.contract.values import OfferId
from tests.sim import weather, worlds
from tests.sim.cloud import Cloud
from tests.sim.daemon import Daemon
from tests.sim.machines import BOOT, CHECKPOINT_EVERY
from tests.sim.weather import Weather
from tests.sim.worlds import QUIET, Shape

SHAPE = replace(
    QUIET,
    jobs=1,
    hosts=6,
    floors=True,
    need=(600, 900),
    paces=(60,),
    storm=timedelta(days=4),
    limits={"raise_bids": True, "hold_max": timedelta(minutes=10), "moves_max": 2},
)
SEEDS = range(6)
COST_PERCENT, ONE_COST_PERCENT, TIME_PERCENT, LOSSES_PERCENT, STARTS_PERCENT, MOVES = 5, 20, 15, 25, 25, 4
"""In the simulation lists are late by a poll, calls take time, and an outbid machine wakes late: hence no equality.

One bid that differs sends a job down another course: over 22 seeds single costs lay -16.5 to +5.2 % apart, all together
4 %. Without bids and holds the whole is 11 % apart, and losses are two to three times as many.
"""


class RecordedWeather(Weather):
    """A world that notes every change of a price, as a price recorder would."""

    def __init__(self, seed: int, shape: Shape, daemon_type: type[Daemon]) -> None:
        self.changes: list[tuple[int, int, int]] = []
        self.last: dict[int, int] = {}
        super().__init__(seed, shape, daemon_type)

    def prices(self, cloud: Cloud) -> None:
        super().prices(cloud)
        for number, host in enumerate(cloud.hosts):
            if self.last.get(number) != host.price:
                self.last[number] = host.price
                self.changes.append((int(self.agenda.now.timestamp()), number, host.price))


@dataclass(frozen=True)
class Both:
    """What one job came to in the simulation, and in the back-test of its market."""

    starts: int
    losses: int
    moves: int
    cost: int
    took_s: int
    replayed: RunOutcome


def _both(seed: int, monkeypatch: pytest.MonkeyPatch) -> Both:
    full = worlds.trades
    monkeypatch.setattr(weather, "trades", lambda *given: {"bidders": full(*given)["bidders"]})
    world = RecordedWeather(seed, SHAPE, Daemon)
    world.begin()
    world.agenda.run(world.begun_at + SHAPE.storm, lambda: bool(world.daemon.done))
    (identity,) = world.submitted
    job, work = world.submitted[identity]
    ended = world.daemon.done[identity]
    assert ended.state.is_final
    cloud = world.clouds[0]
    series = tuple(replace(host.offer, offer_id=OfferId(host.name)) for host in cloud.hosts)
    begins, ends = (int(at.timestamp()) for at in (world.begun_at, world.agenda.now + timedelta(hours=6)))
    recorded = RecordedMarket(
        series=series,
        instants=array("q", [at for at, _, _ in world.changes]),
        numbers=array("q", [number for _, number, _ in world.changes]),
        prices=array("q", [price for _, _, price in world.changes]),
        begins_at=begins,
        ends_at=ends,
    )
    terms = Assumptions(
        work_s=round(work.need.total_seconds()),
        restart_s=round(BOOT.total_seconds()),
        every_s=round(CHECKPOINT_EVERY.total_seconds()),
        fee_ppm={cloud.name: cloud.fee_ppm},
        raise_bids=True,
        hold_max=timedelta(minutes=10),
        moves_max=2,
    )
    policy = replace(policy_of(terms, recorded.providers), ceiling_default=world.daemon.world.policy.ceiling_default)
    numbers = {series_key(one): number for number, one in enumerate(series)}
    run = JobRun(job.spec, policy, terms, numbers, begins)
    assert job.spec.price is not None
    replay = MarketReplay(
        recorded,
        [PlannedRun(run, begins, job.spec.price.per_gpu_hour or 0)],
        step_s=60,
        fees={cloud.name: cloud.fee_ppm},
        per_gpu=True,
    )
    list(replay.advance())
    ended_at = ended.ended_at
    assert ended_at is not None
    return Both(
        starts=ended.attempts_made,
        losses=ended.totals.preemptions,
        moves=ended.moves.count,
        cost=ended.spent,
        took_s=int((ended_at - world.begun_at).total_seconds()),
        replayed=run.outcome(ends),
    )


@pytest.mark.lengthy
def test_daemon_and_back_test_agree_on_starts_losses_moves_and_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            found.append(_both(seed, patch))
    assert all(one.replayed.end is End.FINISHED for one in found)
    cost, replayed = sum(one.cost for one in found), sum(one.replayed.cost for one in found)
    assert abs(replayed - cost) * 100 <= cost * COST_PERCENT
    for one in found:
        assert abs(one.replayed.cost - one.cost) * 100 <= one.cost * ONE_COST_PERCENT
        assert abs(one.replayed.took_s - one.took_s) * 100 <= one.took_s * TIME_PERCENT
    losses, again = sum(one.losses for one in found), sum(one.replayed.preemptions for one in found)
    assert abs(losses - again) * 100 <= losses * LOSSES_PERCENT
    starts, launches = (
        sum(one.starts for one in found),
        sum(one.replayed.launches + one.replayed.returns for one in found),
    )
    assert abs(starts - launches) * 100 <= starts * STARTS_PERCENT
    assert abs(sum(one.moves for one in found) - sum(one.replayed.moves for one in found)) <= MOVES
    assert sum(one.moves for one in found) > 0
