"""Lists that name a preemption minutes late, and hosts that refuse each launch as one that they cannot do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from spotd.core.kernel.outcomes import LaunchFailure
from tests.sim.hazards import Hazard
from tests.sim.worlds import Shape

if TYPE_CHECKING:
    from tests.sim.cloud import Cloud
    from tests.sim.machines import Host
    from tests.sim.weather import Weather

LATE_FROM: Final = 10_000_000
"""The first seed of worlds with late causes."""


def with_late_causes(base: Shape, seed: int) -> Shape:
    """The world with late causes, whose daemon knows how late they may be, or believes less, and with unable hosts."""
    luck = Random(f"late causes in {seed}")
    causes = timedelta(minutes=luck.choice([0, 5, 15, 15, 60]))
    late = {Hazard.LATE_CAUSES} | ({Hazard.UNABLE} if luck.random() < 0.5 else set())
    return replace(base, hazards=base.hazards | late, limits={**base.limits, "causes_within": causes})


def make_hosts_unable(weather: Weather) -> None:
    """Let some hosts refuse each launch as not supported; some of them change their minds after hours."""
    if Hazard.UNABLE not in weather.shape.hazards:
        return
    luck = Random(f"unable in {weather.seed}")
    share = luck.choice([0.2, 0.4, 0.8])
    for cloud in weather.clouds:
        for host in cloud.hosts:
            if cloud.trade.owned or luck.random() >= share:
                continue
            cloud.closed[host.name] = LaunchFailure.NOT_SUPPORTED
            if luck.random() < 0.5:
                hours = luck.choice([0.5, 2, 6])
                weather.agenda.after(timedelta(hours=hours), lambda cloud=cloud, host=host: _can_again(cloud, host))  # type: ignore[misc]  # mypy cannot infer a lambda with a default


def _can_again(cloud: Cloud, host: Host) -> None:
    cloud.closed.pop(host.name, None)
