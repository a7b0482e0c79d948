"""One seeded world from start to finish, with the oracles at its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from random import Random

from spotd.core.model import JobId, World
from spotd.core.requests import submit
from spotd.core.states import JobState
from spotd_providers.contract.values import AttemptKey
from tests.sim.cloud import Cloud, Faults
from tests.sim.daemon import EPOCH, Daemon, Died, job, policy

STEP = timedelta(seconds=30)


@dataclass
class Result:
    daemon: Daemon
    clouds: list[Cloud]
    ended_at: datetime
    crashes: int


def stormy(rng: Random) -> Faults:
    return Faults(
        lose_launch_after=rng.choice([0.0, 0.1, 0.3]),
        lose_launch_before=rng.choice([0.0, 0.1]),
        refuse_launch=rng.choice([0.0, 0.2]),
        fail_listing=rng.choice([0.0, 0.1, 0.4]),
        cut_listing=rng.choice([0.0, 0.1, 0.3]),
        lie_listing=rng.choice([0.0, 0.05]),
        fail_terminate=rng.choice([0.0, 0.2, 0.5]),
        forget_terminate=rng.choice([0.0, 0.1]),
        preempt_per_hour=rng.choice([0.0, 0.1, 0.6]),
        silence_per_hour=rng.choice([0.0, 0.1]),
        list_lag=timedelta(seconds=rng.choice([0, 30, 120])),
        store_down=rng.choice([0.0, 0.05]),
    )


def run_world(
    seed: int,
    *,
    jobs: int = 6,
    storm: timedelta = timedelta(hours=12),
    crash_rate: float = 0.02,
    limit: timedelta = timedelta(days=12),
    daemon_type: type[Daemon] = Daemon,
    **limits: object,
) -> Result:
    """The world of this seed until every job is final and every machine gone, or the limit."""
    rng = Random(seed)
    clouds = [
        Cloud("bidders", 5, Random(rng.random()), EPOCH, bids=True),
        Cloud("zones", 4, Random(rng.random()), EPOCH, bids=False),
    ]
    for cloud in clouds:
        cloud.faults = stormy(rng)
    world = World(policy=policy(clouds, **limits), jobs={}, attempts={}, intents={})
    needs: dict[JobId, timedelta] = {}
    daemon = daemon_type(world, clouds, needs, rng)
    for number in range(jobs):
        fresh = job(number, ceiling=rng.randint(500_000, 1_500_000), need=timedelta(0))
        needs[fresh.id] = timedelta(minutes=rng.randint(20, 400))
        daemon.commit(submit(daemon.world, fresh, EPOCH))
    now, crashes = EPOCH, 0

    def maybe_die(_point: str) -> None:
        if rng.random() < crash_rate:
            raise Died

    while now < EPOCH + limit:
        now += STEP
        calm = now >= EPOCH + storm
        if calm:
            for cloud in clouds:
                cloud.faults = Faults()
        daemon.crash = (lambda _p: None) if calm else maybe_die
        for cloud in clouds:
            cloud.advance(now)
        try:
            if rng.random() < 0.7 or calm:
                daemon.poll(now)
            daemon.cycle(now)
        except Died:
            crashes += 1
            daemon.crash = lambda _p: None
            daemon.boot(now)
        if calm and not daemon.world.jobs and not daemon.world.intents:
            break
    return Result(daemon, clouds, now, crashes)


def overlaps(clouds: list[Cloud]) -> list[tuple[str, datetime, datetime]]:
    """Times at which two machines of one job could compute, unless the provider forgot an end it had accepted."""
    by_job: defaultdict[str, list[tuple[datetime, datetime, AttemptKey]]] = defaultdict(list)
    for cloud in clouds:
        for key, start, end in cloud.live_spans():
            if key in cloud.forgot:
                continue
            by_job[key.split("-")[2]].append((start, end, key))
    found = []
    for name, spans in by_job.items():
        spans.sort()
        for (_, end, _k1), (start, _e, _k2) in pairwise(spans):
            if start < end:
                found.append((name, start, end))
    return found


def all_done(result: Result) -> bool:
    return all(j.state is JobState.SUCCEEDED for j in result.daemon.done.values())
