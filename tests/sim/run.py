"""One seeded world from start to finish. `python -m tests.sim.run SEED [SHAPE]` replays one and says what happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from spotd.core.model import Job, JobId, World
from tests.sim.agenda import Agenda
from tests.sim.cloud import Cloud
from tests.sim.daemon import EPOCH, Daemon, Died, Work
from tests.sim.machines import Faults
from tests.sim.worlds import Shape, policy, reachable, some_job, stormy

PRICES_MOVE_EVERY = timedelta(minutes=5)
HOUR = timedelta(hours=1)
LIMIT = timedelta(days=12)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished world, for the oracles."""

    seed: int
    shape: Shape
    daemon: Daemon
    clouds: list[Cloud]
    submitted: dict[JobId, tuple[Job, Work]]
    calm_at: datetime
    ended_at: datetime
    crashes: int
    daemon_away: timedelta

    @property
    def days(self) -> float:
        return (self.ended_at - EPOCH) / timedelta(days=1)


class Weather:
    """Everything that happens to the daemon: faults, kills, outages, and its user; then the calm."""

    def __init__(self, seed: int, shape: Shape, daemon_type: type[Daemon]) -> None:
        self.shape = shape
        self.rng = rng = Random(seed)
        self.agenda = Agenda(EPOCH)
        fees = rng.choice([1_000_000, 1_200_000])
        self.clouds = [
            Cloud("bidders", shape.hosts, Random(rng.random()), EPOCH, bids=True, fee_ppm=fees),
            Cloud("zones", max(1, shape.hosts - 1), Random(rng.random()), EPOCH, bids=False, fee_ppm=1_000_000),
        ]
        pace = timedelta(seconds=rng.choice([30, 60, 120, 240]))
        self.work: dict[JobId, Work] = {}
        self.submitted: dict[JobId, tuple[Job, Work]] = {}
        world = World(policy=policy(self.clouds, pace, **shape.limits), jobs={}, attempts={}, intents={})
        self.daemon = daemon_type(world, self.clouds, self.work, rng, self.agenda, pace)
        self.crashes = 0
        self.away = timedelta(0)
        self.calm_at = EPOCH + shape.storm
        self.is_calm = False

    def begin(self) -> None:
        for cloud in self.clouds:
            cloud.faults = stormy(self.rng) if self.shape.faults else Faults(market_moves=True)
            if self.shape.reachable:
                cloud.faults = reachable(cloud.faults)
            self.prices(cloud)
        self.daemon.crash = self.maybe_die
        self.daemon.died = self.dead
        self.daemon.boot()
        for number in range(self.shape.jobs):
            at = self.rng.uniform(0, 0.5) if self.shape.user and self.rng.random() < 0.5 else 0.0
            self.agenda.at(EPOCH + self.shape.storm * at, lambda number=number: self.submit(number))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        self.often(self.shape.kills_per_hour, self.kill)
        for cloud in self.clouds:
            self.often(self.shape.outages_per_hour, lambda cloud=cloud: self.outage(cloud))  # type: ignore[misc]  # as above
        self.often(self.shape.outages_per_hour, self.store_outage)
        if self.shape.user:
            self.often(0.3, self.whim)
        self.agenda.at(self.calm_at, self.calm)

    def often(self, per_hour: float, action: Callable[[], None]) -> None:
        """The action happens again and again at random until the calm."""
        if per_hour <= 0:
            return

        def again() -> None:
            if not self.is_calm:
                action()
                self.often(per_hour, action)

        self.agenda.after(HOUR * self.rng.expovariate(per_hour), again)

    # --- the market ---

    def prices(self, cloud: Cloud) -> None:
        cloud.advance(self.agenda.now)
        cloud.move_prices(PRICES_MOVE_EVERY)
        self.agenda.after(PRICES_MOVE_EVERY, lambda: self.prices(cloud))

    def outage(self, cloud: Cloud) -> None:
        cloud.down = True
        self.agenda.after(HOUR * self.rng.choice([0.05, 0.5, 4]), lambda: setattr(cloud, "down", False))

    def store_outage(self) -> None:
        self.store(up=False)
        self.agenda.after(HOUR * self.rng.choice([0.05, 0.5, 2]), lambda: self.store(up=True))

    def store(self, *, up: bool) -> None:
        for cloud in self.clouds:
            cloud.advance(self.agenda.now)
            cloud.store_up = up
        self.daemon.store_up = up

    # --- the process ---

    def maybe_die(self, _point: str) -> None:
        if self.rng.random() < self.shape.crash_rate:
            raise Died

    def kill(self) -> None:
        if self.daemon.up:
            self.daemon.kill()

    def dead(self) -> None:
        self.crashes += 1
        away = timedelta(seconds=self.rng.choice([1, 5, 60]))
        if self.rng.random() < self.shape.outages_per_hour:
            away = timedelta(hours=self.rng.uniform(0.5, 5))
        self.away += away
        self.agenda.after(away, self.revive)

    def revive(self) -> None:
        if not self.daemon.up:
            self.daemon.boot()

    def calm(self) -> None:
        """Faults stop, everything comes back, prices fall below every ceiling."""
        self.is_calm = True
        for cloud in self.clouds:
            cloud.faults, cloud.down = Faults(), False
        self.store(up=True)
        self.daemon.crash = lambda _point: None
        self.revive()

    # --- the user ---

    def submit(self, number: int) -> None:
        if not self.daemon.up:
            self.agenda.after(timedelta(minutes=1), lambda: self.submit(number))
            return
        fresh, work = some_job(self.rng, number, self.shape, self.agenda.now)
        self.work[fresh.id] = work
        self.submitted[fresh.id] = (fresh, work)
        self.daemon.submit(fresh)

    def whim(self) -> None:
        """A cancel or a retry at a random moment; with the daemon down the user is told so and nothing happens."""
        if not self.daemon.up or not self.submitted:
            return
        chosen = self.rng.choice(sorted(self.submitted))
        if self.rng.random() < 0.3:
            self.daemon.cancel(chosen)
        else:
            self.daemon.retry(chosen)

    # --- the end ---

    def finished(self) -> bool:
        world = self.daemon.world
        if not self.is_calm or world.jobs or world.intents or world.attempts:
            return False
        return len(self.submitted) == self.shape.jobs


def run_world(
    seed: int, shape: Shape | None = None, *, daemon_type: type[Daemon] = Daemon, limit: timedelta = LIMIT
) -> Result:
    """The world of this seed until every job is final and every machine gone, or the limit."""
    weather = Weather(seed, shape or Shape(), daemon_type)
    weather.begin()
    weather.agenda.run(EPOCH + limit, weather.finished)
    for cloud in weather.clouds:
        cloud.advance(weather.agenda.now)
    return Result(
        seed=seed,
        shape=weather.shape,
        daemon=weather.daemon,
        clouds=weather.clouds,
        submitted=weather.submitted,
        calm_at=weather.calm_at,
        ended_at=weather.agenda.now,
        crashes=weather.crashes,
        daemon_away=weather.away,
    )


def main(seed: int, shape: str = "standard") -> int:
    from tests.sim.oracles import broken_rules  # the oracles read results: this way round only here
    from tests.sim.test_seeds import SHAPES

    result = run_world(seed, SHAPES[shape])
    print(f"seed {seed}: {result.days:.2f} simulated days, {result.crashes} crashes")
    for kind, count in sorted(Counter(result.daemon.told.events).items()):
        print(f"{count:6} {kind}")
    broken = broken_rules(result)
    for rule in broken:
        print(f"BROKEN: {rule}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:3]))
