"""One seeded world from start to finish. `python -m tests.sim.run SEED [SHAPE]` replays one and says what happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from tests.sim.cloud import Cloud
from tests.sim.daemon import Daemon, Work
from tests.sim.hazards import Hazard
from tests.sim.weather import Weather
from tests.sim.worlds import Shape

CALM_MAX = timedelta(days=12)
LOOK_EVERY = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished world, for the oracles."""

    seed: int
    shape: Shape
    daemon: Daemon
    clouds: list[Cloud]
    submitted: dict[JobId, tuple[Job, Work]]
    begun_at: datetime
    calm_at: datetime
    ended_at: datetime
    crashes: int
    daemon_away: timedelta
    closed: frozenset[str] = frozenset()
    """Hosts that sold nothing before the calm."""
    twin: Result | None = None
    """The other daemon with its own part of the world."""

    @property
    def days(self) -> float:
        return (self.ended_at - self.begun_at) / timedelta(days=1)


def run_world(
    seed: int,
    shape: Shape | None = None,
    *,
    daemon_type: type[Daemon] = Daemon,
    limit: timedelta | None = None,
    enough: Callable[[Result], bool] | None = None,
) -> Result:
    """The world of this seed until every job is final and every machine gone, or the limit.

    Or until what has happened so far, of which it is asked every hour, is enough.
    """
    weather = Weather(seed, shape or Shape(), daemon_type)
    weather.begin()
    calm_max = CALM_MAX * 3 if Hazard.WINDOWS in weather.shape.hazards else CALM_MAX
    end = weather.begun_at + (limit or weather.shape.storm + calm_max)
    look_at = weather.begun_at
    while enough is not None and look_at + LOOK_EVERY < end and not weather.finished():
        look_at += LOOK_EVERY
        weather.agenda.run(look_at, weather.finished)
        if enough(_result(weather)):
            return _result(weather)
    weather.agenda.run(end, weather.finished)
    for cloud in weather.clouds:
        cloud.advance(weather.agenda.now)
    return _result(weather)


def _result(weather: Weather) -> Result:
    result = Result(
        seed=weather.seed,
        shape=weather.shape,
        daemon=weather.daemon,
        clouds=weather.clouds,
        submitted=weather.submitted,
        begun_at=weather.begun_at,
        calm_at=weather.calm_at,
        ended_at=weather.agenda.now,
        crashes=weather.crashes,
        daemon_away=weather.away,
        closed=weather.deceptions.closed,
    )
    if weather.twin is None:
        return result
    twin, submitted = weather.twin.daemon, weather.twin.submitted
    return replace(
        part(result, result.daemon),
        twin=replace(
            part(result, twin), daemon=twin, submitted=submitted, shape=replace(result.shape, jobs=len(submitted))
        ),
    )


def part(result: Result, daemon: Daemon) -> Result:
    """What this daemon alone has had of the world."""
    return replace(result, clouds=[c.part_of(daemon.owner, daemon.read[c.name]) for c in result.clouds])


def main(seed: int, shape: str = "drawn") -> int:
    from tests.sim.oracles import broken_rules  # the oracles read results: this way round only here
    from tests.sim.swarm import drawn
    from tests.sim.test_seeds import SHAPES

    chosen = drawn(seed) if shape == "drawn" else SHAPES[shape]
    print(chosen)
    result = run_world(seed, chosen)
    print(f"seed {seed}: {result.days:.2f} simulated days, {result.crashes} crashes")
    for kind, count in sorted(Counter(result.daemon.told.events).items()):
        print(f"{count:6} {kind}")
    broken = broken_rules(result)
    for rule in broken:
        print(f"BROKEN: {rule}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:3]))
