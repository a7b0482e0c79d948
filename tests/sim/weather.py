"""Everything that happens to a simulated daemon: faults, kills, outages, and its user; then the calm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from tests.sim.agenda import Agenda
from tests.sim.cloud import Cloud
from tests.sim.daemon import EPOCH, Daemon, Work
from tests.sim.gangs import Gangs
from tests.sim.harsh import Deceptions
from tests.sim.hazards import Hazard
from tests.sim.late import make_hosts_unable
from tests.sim.machines import Faults
from tests.sim.mishaps import Mishaps
from tests.sim.own import Owners, own_clouds
from tests.sim.plans import Plans
from tests.sim.process import Died
from tests.sim.unfit import spoil_hosts
from tests.sim.worlds import Shape, may_share, policy, reachable, some_job, stormy, trades

PRICES_MOVE_EVERY = timedelta(minutes=5)
HOUR = timedelta(hours=1)
ANEW = 100
"""What the number of a job grows by when it is submitted again."""
MONTH_END = datetime(2026, 1, 31, 19, tzinfo=UTC)


class Weather:
    """One world from its beginning to its calm."""

    def __init__(self, seed: int, shape: Shape, daemon_type: type[Daemon]) -> None:
        self.seed = seed
        self.shape = shape
        self.rng = rng = Random(seed)
        self.luck = luck = Random(f"hazards of {seed}")
        self.plans = Plans(seed, shape)
        self.begun_at = self.plans.begins_at or (MONTH_END if Hazard.MONTH_END in shape.hazards else EPOCH)
        self.agenda = Agenda(self.begun_at)
        self.clouds = [
            Cloud(name, max(1, shape.hosts - (name != "bidders")), Random(rng.random()), self.begun_at, trade)
            for name, trade in trades(rng, luck, shape).items()
        ]
        self.clouds += own_clouds(seed, shape, self.begun_at)
        pace = timedelta(seconds=rng.choice(shape.paces))
        self.work: dict[JobId, Work] = {}
        self.submitted: dict[JobId, tuple[Job, Work]] = {}
        identity = "aaaa" if Hazard.TWIN in shape.hazards else ""
        rules = policy(self.clouds, pace, identity=identity, **shape.limits)
        world = World(policy=rules, jobs={}, attempts={}, intents={})
        self.daemon = daemon_type(world, self.clouds, self.work, rng, self.agenda, pace)
        self.crashes = 0
        self.away = timedelta(0)
        self.calm_at = self.begun_at + shape.storm
        self.is_calm = False
        self.mishaps = Mishaps(self)
        self.deceptions = Deceptions(self)
        self.owners = Owners(self)
        self.gangs = Gangs(self)
        self.twin = Twin(self, seed, daemon_type, pace) if Hazard.TWIN in shape.hazards else None

    def begin(self) -> None:
        for cloud in self.clouds:
            cloud.faults = stormy(self.rng) if self.shape.faults else Faults(market_moves=True)
            if self.shape.reachable:
                cloud.faults = reachable(cloud.faults)
            self.prices(cloud)
        self.mishaps.begin()
        self.deceptions.begin()
        self.owners.begin()
        self.gangs.begin()
        spoil_hosts(self)
        make_hosts_unable(self)
        self.daemon.crash = self.maybe_die
        self.daemon.died = self.dead
        self.daemon.boot()
        if self.twin is not None:
            self.twin.begin()
        for number in range(self.shape.jobs):
            at = self.rng.uniform(0, 0.5) if self.shape.user and self.rng.random() < 0.5 else 0.0
            self.agenda.at(self.begun_at + self.shape.storm * at, lambda number=number: self.submit(number))  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        self.often(self.shape.kills_per_hour, self.kill, self.rng)
        for cloud in self.clouds:
            self.often(self.shape.outages_per_hour, lambda cloud=cloud: self.outage(cloud), self.rng)  # type: ignore[misc]  # as above
        self.often(self.shape.outages_per_hour, self.store_outage, self.rng)
        if self.shape.user:
            self.often(self.shape.whims_per_hour, self.whim, self.rng)
        self.agenda.at(self.calm_at, self.calm)

    def often(self, per_hour: float, action: Callable[[], None], rng: Random) -> None:
        """The action happens again and again at random until the calm."""
        if per_hour <= 0:
            return

        def again() -> None:
            if not self.is_calm:
                action()
                self.often(per_hour, action, rng)

        self.agenda.after(HOUR * rng.expovariate(per_hour), again)

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
        self.hosts_write(up=up)
        self.daemon.can_read = self.daemon.can_write = up
        if self.twin is not None:
            self.twin.daemon.can_read = self.twin.daemon.can_write = up

    def hosts_write(self, *, up: bool) -> None:
        for cloud in self.clouds:
            cloud.advance(self.agenda.now)
            cloud.store_up = up

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
        if self.daemon.full_since is not None:
            self.agenda.after(timedelta(minutes=1), self.revive)
        elif not self.daemon.up:
            self.daemon.boot()

    def calm(self) -> None:
        """Faults stop, everything comes back, prices fall below every ceiling."""
        self.is_calm = True
        self.gangs.rest()
        for cloud in self.clouds:
            cloud.faults, cloud.down = Faults(), False
        self.store(up=True)
        self.mishaps.end()
        self.deceptions.end()
        policy = replace(self.daemon.policy._policy, budget_month=None)
        if Hazard.SIZES in self.shape.hazards:  # to restore terabytes takes more than the money of any day
            policy = replace(policy, budget_day=None)
        self.daemon.policy.reload(policy)
        self.owners.end()
        self.daemon.crash = lambda _point: None
        self.revive()
        if Hazard.CHAINS in self.shape.hazards:
            self.end_chains()
        if self.twin is not None:
            self.twin.calm()

    # --- the user ---

    def submit(self, number: int) -> None:
        if not self.daemon.open:
            self.agenda.after(timedelta(minutes=1), lambda: self.submit(number))
            return
        fresh, work = some_job(self.rng, self.luck, number, self.shape, self.agenda.now)
        fresh = self.owners.asked(fresh)
        if self.plans.hazards:
            lost = self.daemon.told.lost_jobs
            known = {i: job for i, (job, _) in self.submitted.items() if i not in lost}
            fresh, work = self.plans.planned(number, fresh, work, known)
        fresh = self.deceptions.priced(fresh)
        if Hazard.REUSE in self.shape.hazards:
            fresh = may_share(fresh, Random(f"reuse of {number} in {self.seed}"))
        self.work[fresh.id] = work
        self.submitted[fresh.id] = (fresh, work)
        self.daemon.submit(fresh)

    def submit_again(self, lost: JobId) -> None:
        """Its owner misses a job that the state has never heard of, and queues it anew, under another id."""
        number = int(lost.removeprefix("j")) + ANEW
        self.agenda.after(timedelta(minutes=10), lambda: self.submit(number))

    def whim(self) -> None:
        """A cancel or a retry at a random moment; with the daemon down the user is told so and nothing happens."""
        known = sorted(self.submitted.keys() - self.daemon.told.lost_jobs)
        if not self.daemon.open or not known:
            return
        chosen = self.rng.choice(known)
        if self.rng.random() < 0.3:
            self.daemon.cancel(chosen)
        else:
            self.daemon.retry(chosen)

    def end_chains(self) -> None:
        """Its owner cancels a job that waits for one which is over and has not succeeded."""
        world = self.daemon.world
        for job in [*world.jobs.values()] if self.daemon.open else ():
            if job.chain is None or job.chain.inputs is not None:
                continue
            over = [self.daemon.done.get(before) for before in job.chain.after]
            if any(end is not None and end.state is not JobState.SUCCEEDED for end in over):
                self.daemon.cancel(job.id)
        self.agenda.after(HOUR, self.end_chains)

    # --- the end ---

    def finished(self) -> bool:
        world = self.daemon.world
        if not self.is_calm or world.jobs or world.intents or world.attempts:
            return False
        if any(cloud.active and cloud.revoked is None for cloud in self.clouds):
            return False  # of a job that a restored state has never heard of
        if self.deceptions.waits_for_bills():
            return False
        known = self.submitted.keys() - self.daemon.told.lost_jobs
        return len(known) == self.shape.jobs and (self.twin is None or self.twin.finished())


class Twin:
    """Another daemon with the same label and the same ids of jobs, on the same accounts: only its identity differs."""

    def __init__(self, weather: Weather, seed: int, daemon_type: type[Daemon], pace: timedelta) -> None:
        self.weather = weather
        self.rng = Random(f"twin of {seed}")
        self.submitted: dict[JobId, tuple[Job, Work]] = {}
        self.work: dict[JobId, Work] = {}
        rules = policy(weather.clouds, pace, identity="bbbb")
        world = World(policy=rules, jobs={}, attempts={}, intents={})
        self.daemon = daemon_type(world, weather.clouds, self.work, self.rng, weather.agenda, pace)
        self.daemon.read = {cloud.name: [] for cloud in weather.clouds}

    def begin(self) -> None:
        self.daemon.crash = self.weather.maybe_die
        self.daemon.died = lambda: self.weather.agenda.after(timedelta(seconds=self.rng.choice([1, 60])), self.revive)
        self.daemon.boot()
        for number in range(2):
            fresh, work = some_job(self.rng, self.rng, number, self.weather.shape, self.weather.agenda.now)
            self.work[fresh.id] = work
            self.submitted[fresh.id] = (fresh, work)
            self.daemon.submit(fresh)

    def revive(self) -> None:
        if not self.daemon.up:
            self.daemon.boot()

    def calm(self) -> None:
        self.daemon.crash = lambda _point: None
        self.revive()

    def finished(self) -> bool:
        world = self.daemon.world
        return not (world.jobs or world.intents or world.attempts)
