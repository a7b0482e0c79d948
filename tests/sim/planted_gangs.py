"""Bugs of jobs that run on several machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final

from spotd.core import author, enforcement, metering
from spotd.core.domain.attempts import Attempt
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


GANGS: Mapping[str, Bug] = {
    "count a gang as one machine": Bug(patch=counts_a_gang_as_one, rule=("machines_max",), shape=GANGS_OF_FEW),
}
