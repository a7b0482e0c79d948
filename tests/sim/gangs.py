"""Several machines as one in a simulated world: what happens to some of them, and what all others do then.

The first of them speaks for all. Where another one is lost or falls silent, the first one stops, saves if its command
still can, and reports that. Where the first one is lost, nothing of all of them is heard any more. A provider that has
lost one of several ends all of them a little later; of one that is silent it knows nothing.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from spotd_providers.contract.values import InstanceState
from tests.sim.cloud import Cloud
from tests.sim.hazards import Hazard
from tests.sim.machines import Machine
from tests.sim.worlds import Shape

if TYPE_CHECKING:
    from tests.sim.weather import Weather

GANGS_FROM: Final = 7_000_000
"""The first seed of these worlds."""
RANGES_FROM: Final = 7_500_000
"""From this one on some jobs accept a range of machines, beside every hazard of all other worlds."""
KEPT_FROM: Final = 7_700_000
"""From this one on the healthy ones of many are kept while lost ones are replaced."""
KEPT: Final = Shape(
    jobs=4,
    hosts=8,
    storm=timedelta(hours=3),
    need=(60, 240),
    hazards=frozenset({Hazard.GANGS, Hazard.RANGES, Hazard.REPLACE, Hazard.LISTS, Hazard.CLOCK_STEPS, Hazard.NOTICES}),
)
"""A small world in which most machines are of several, and many of these are lost."""
LARGEST: Final = 4
ENDED_AFTER: Final = timedelta(minutes=2)
"""From the loss of one of several machines to the end of all of them by their provider."""
LOST_PER_HOUR: Final = 0.6
ROOMS_PER_HOUR: Final = 1.0


def with_gangs(shape: Shape, seed: int) -> Shape:
    """The same world with jobs of several machines, of which it allows as many as one job needs."""
    limits = {**shape.limits}
    if "machines_max" in limits:
        limits["machines_max"] = Random(f"gangs of {seed}").randint(LARGEST, 3 * LARGEST)
    ranges = {Hazard.RANGES} if seed >= RANGES_FROM else set()
    if seed >= KEPT_FROM:
        ranges.add(Hazard.REPLACE)
    return replace(shape, hazards=shape.hazards | {Hazard.GANGS} | ranges, limits=limits)


class Gangs:
    """What happens to some of several machines, until the calm."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.luck = Random(f"gangs in {weather.seed}")

    def begin(self) -> None:
        if Hazard.GANGS not in self.weather.shape.hazards:
            return
        is_kept = Hazard.REPLACE in self.weather.shape.hazards
        for cloud in self.weather.clouds:
            if is_kept:
                cloud.replaces_seldom = self.luck.choice([0.0, 0.3, 0.95])
            if self.weather.shape.faults:
                started, listed = self.luck.choice([0.0, 0.1, 0.3]), self.luck.choice([0.0, 0.1, 0.3])
                cloud.faults = replace(cloud.faults, half_started=started, half_listed=listed)
        has_ranges = Hazard.RANGES in self.weather.shape.hazards
        if self.weather.shape.faults or has_ranges:
            self.weather.often(LOST_PER_HOUR * (5 if is_kept else 1), self.lose_some, self.luck)
        if has_ranges:
            self.draw_room()
            self.weather.often(ROOMS_PER_HOUR, self.draw_room, self.luck)

    def draw_room(self) -> None:
        """How many machines each host gives at once from now on."""
        for cloud in self.weather.clouds:
            cloud.room = {host.name: self.luck.choice([1, 2, 3, LARGEST, LARGEST]) for host in cloud.hosts}

    def rest(self) -> None:
        """Each host gives as many as anybody asks for."""
        for cloud in self.weather.clouds:
            cloud.room, cloud.replaces_seldom = {}, 0.0

    def lose_some(self) -> None:
        """One machine, or two, of a gang that runs."""
        found = [
            (cloud, m)
            for cloud in self.weather.clouds
            for m in cloud.active.values()
            if m.offer.nodes > 1
            and m.state is InstanceState.RUNNING
            and (m.member_lost_at is None or m.kept_at is not None)
        ]
        if not found:
            return
        cloud, m = self.luck.choice(found)
        cloud.advance(self.weather.agenda.now)
        if not m.alive:
            return
        part = [rank for rank in range(m.offer.nodes + len(m.dropped)) if rank not in m.dropped]
        ranks = {self.luck.choice(part) for _ in range(self.luck.choice([1, 1, 2]))}
        silent = self.luck.random() < 0.4
        if m.task.keeps is not None and 0 not in ranks:
            m.gone |= ranks
            m.lost |= ranks
            if m.member_lost_at is None:
                m.member_lost_at, m.member_saves = cloud.now, self.luck.random() < 0.5
            return
        m.task = replace(m.task, keeps=None)
        if m.kept_at is not None:
            cloud.end_wait(m)
        if 0 in ranks:
            self._lose_first(cloud, m)
        else:
            m.member_lost_at, m.member_saves = cloud.now, self.luck.random() < 0.5
        if not silent:
            m.gives_up_at = cloud.now + ENDED_AFTER

    def _lose_first(self, cloud: Cloud, m: Machine) -> None:
        """The others end their commands with it, and whatever it saves later nothing can arrive for hours."""
        cloud.hush(m, timedelta(minutes=self.luck.choice([10, 90, 600])))
        m.member_lost_at, m.member_saves = cloud.now, False
