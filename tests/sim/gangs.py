"""Several machines as one in a simulated world: what happens to some of them, and what all others do then.

The first of them speaks for all. Where another one is lost or falls silent, the first one stops, saves if its command
still can, and reports that. Where the first one is lost, nothing of all of them is heard any more, or the others say
that they wait. A provider that has lost one of several ends all of them a little later; of one that is silent it knows
nothing.
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
FIRST_FROM: Final = 7_800_000
"""From this one on also without the first one."""
KEPT: Final = Shape(
    jobs=4,
    hosts=8,
    storm=timedelta(hours=3),
    need=(60, 240),
    hazards=frozenset({Hazard.GANGS, Hazard.RANGES, Hazard.REPLACE, Hazard.LISTS, Hazard.CLOCK_STEPS, Hazard.NOTICES}),
)
"""A small world in which most machines are of several, and many of these are lost."""
KEPT_AND_OUTBID: Final = replace(
    KEPT,
    floors=True,
    limits={"raise_bids": True, "hold_max": timedelta(minutes=15)},
    hazards=KEPT.hazards | {Hazard.SPIKES},
)
"""The same at a market that outbids most of them, and wakes them again."""
KEPT_AND_RESTORED: Final = replace(KEPT, hazards=KEPT.hazards | {Hazard.RESTORED})
"""The same with copies of the state that are put back while others wait, or between two waits."""
KEPT_AND_LEFT: Final = replace(KEPT, hazards=KEPT.hazards | {Hazard.OWN_REMOVED})
"""The same with a daemon that is started without a provider, and a while later with it again."""
KEPT_WITHOUT_FIRST: Final = replace(KEPT, jobs=5, hazards=KEPT.hazards | {Hazard.FIRST})
"""The same where the others are kept without the first one, too."""
KEPT_WITHOUT_FIRST_AND_OUTBID: Final = replace(KEPT_AND_OUTBID, hazards=KEPT_AND_OUTBID.hazards | {Hazard.FIRST})
KEPT_WITHOUT_FIRST_AND_RESTORED: Final = replace(KEPT_AND_RESTORED, hazards=KEPT_AND_RESTORED.hazards | {Hazard.FIRST})
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
    if seed >= FIRST_FROM:
        ranges.add(Hazard.FIRST)
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
                cloud.new_ones_hang = self.luck.choice([0.0, 0.0, 0.2])
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

    def follow(self, cloud: Cloud, m: Machine) -> None:
        """What happens soon after a loss: all are outbid and wake, or the daemon loses its provider or its state."""
        hazards, agenda = self.weather.shape.hazards, self.weather.agenda
        span = timedelta(seconds=self.luck.choice([10, 60, 180]))
        if Hazard.SPIKES in hazards and m.offer.pays_bid and self.luck.random() < 0.9:
            agenda.after(span, lambda: self.outbid(cloud, m))
        for later in (
            (span, span + timedelta(minutes=5), span + timedelta(minutes=15)) if Hazard.RESTORED in hazards else ()
        ):
            agenda.after(later, self.restore)
        if Hazard.OWN_REMOVED in hazards and not self.weather.owners.clouds and self.luck.random() < 0.3:
            agenda.after(span, lambda: self.leave_config(cloud))

    def outbid(self, cloud: Cloud, m: Machine) -> None:
        cloud.advance(self.weather.agenda.now)
        if m.state is InstanceState.RUNNING:
            cloud.outbid(m)
            span = timedelta(seconds=self.luck.choice([10, 60, 300]))
            self.weather.agenda.after(span, lambda: self.wake(cloud, m))

    def restore(self) -> None:
        if not self.weather.is_calm:
            self.weather.mishaps.copy_or_restore()

    def wake(self, cloud: Cloud, m: Machine) -> None:
        cloud.advance(self.weather.agenda.now)
        if m.state is InstanceState.PAUSED:
            cloud.wake(m)

    def leave_config(self, cloud: Cloud) -> None:
        """The daemon is started without this provider, and some minutes later with it again."""
        daemon = self.weather.daemon
        if daemon.removed or not daemon.open:
            return
        daemon.removed = frozenset({cloud.name})
        daemon.kill()
        self.weather.agenda.after(timedelta(minutes=self.luck.choice([5, 20])), self.return_to_config)

    def return_to_config(self) -> None:
        daemon = self.weather.daemon
        daemon.removed = frozenset()
        if daemon.up and daemon.absent:
            daemon.kill()

    def rest(self) -> None:
        """Each host gives as many as anybody asks for."""
        self.return_to_config()
        for cloud in self.weather.clouds:
            cloud.room, cloud.replaces_seldom, cloud.new_ones_hang = {}, 0.0, 0.0

    def lose_some(self) -> None:
        """One machine, or two, of a gang that runs."""
        found = [
            (cloud, m)
            for cloud in self.weather.clouds
            for m in cloud.active.values()
            if m.offer.nodes > 1
            and m.state is InstanceState.RUNNING
            and (m.member_lost_at is None or m.kept_at is not None)
            and m.first_lost_at is None
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
        if m.without_first:
            m.gone |= ranks
            return
        if m.waits_without(ranks, cloud.now) and Hazard.FIRST in self.weather.shape.hazards:
            m.lose_first(ranks, cloud.now)
            self.follow(cloud, m)
            return
        if m.task.keeps is not None and m.first not in ranks:
            m.gone |= ranks
            m.lost |= ranks
            if m.member_lost_at is None:
                m.member_lost_at, m.member_saves = cloud.now, self.luck.random() < 0.5
            self.follow(cloud, m)
            return
        m.task = replace(m.task, keeps=None)
        if m.kept_at is not None:
            cloud.end_wait(m)
        if m.first in ranks:
            self._lose_first(cloud, m)
        else:
            m.member_lost_at, m.member_saves = cloud.now, self.luck.random() < 0.5
        if not silent:
            m.gives_up_at = cloud.now + ENDED_AFTER

    def _lose_first(self, cloud: Cloud, m: Machine) -> None:
        """The others end their commands with it, and whatever it saves later nothing can arrive for hours."""
        cloud.hush(m, timedelta(minutes=self.luck.choice([10, 90, 600])))
        m.member_lost_at, m.member_saves = cloud.now, False
