"""Bugs of jobs that run on several machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Final

from spotd.core import author, enforcement, metering
from spotd.core.domain.attempts import Attempt
from spotd_jobs.spec.model import Resources
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

GANGS_OF_FEW: Final = Shape(
    jobs=5,
    hosts=6,
    storm=timedelta(hours=3),
    need=(20, 60),
    user=False,
    crash_rate=0.0,
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    limits={"machines_max": 5},
    hazards=frozenset({Hazard.GANGS}),
)


def counts_a_gang_as_one() -> AbstractContextManager[None]:
    """Counts attempts where machines are limited."""

    def wrong(items: Iterable[Attempt]) -> int:
        return len(list(items))

    return patched(
        (metering, "machines_of", wrong), (author, "machines_of", wrong), (enforcement, "machines_of", wrong)
    )


def buys_fewer_than_asked() -> AbstractContextManager[None]:
    """Takes a number below the range where no more can be had."""

    def wrong(wanted: Resources) -> tuple[int, ...]:
        return tuple(range(wanted.nodes_max or wanted.nodes, max(1, wanted.nodes - 1) - 1, -1))

    return patched((Resources, "sizes", property(wrong)))


RANGES_OF_FEW: Final = replace(GANGS_OF_FEW, hazards=frozenset({Hazard.GANGS, Hazard.RANGES}))
GANGS: Mapping[str, Bug] = {
    "count a gang as one machine": Bug(patch=counts_a_gang_as_one, rule=("machines_max",), shape=GANGS_OF_FEW),
    "buy fewer machines than the range has": Bug(
        patch=buys_fewer_than_asked, rule=("gang_sizes",), shape=RANGES_OF_FEW
    ),
}
