"""Bugs of running machines beside the market: of their bids, of moves to cheaper ones, and of the watchdog."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core import bids, watchdog
from spotd.core.attempts import Attempt
from spotd.core.progress import HostSample, Watch, watched
from spotd.core.relocation import Relocation
from spotd.core.states import EndReason
from spotd_jobs.spec.model import WatchdogPolicy
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

LONG: Final = Shape(storm=timedelta(hours=6), user=False, need=(200, 400))
BIDDING: Final = replace(LONG, floors=True, limits={"raise_bids": True, "hold_max": timedelta(minutes=10)})
MOVING: Final = replace(LONG, limits={"moves_max": 5})
WATCHED: Final = replace(LONG, watched=True)


def bids_without_a_limit() -> AbstractContextManager[None]:
    """Raises a bid as high as it takes."""
    return patched((bids, "bid_limit", lambda _item, _job, _policy: 10**9))


def moves_before_it_has_ended() -> AbstractContextManager[None]:
    """Takes the machine for gone as soon as its job is to move."""
    move = Relocation._move

    def wrong(self: Relocation, item: Attempt) -> None:
        before = self._moved
        move(self, item)
        if self._moved > before:
            self._builder.end_attempt(item.id, EndReason.MIGRATED, "at once")
            self._builder.machine_gone(item.id)

    return patched((Relocation, "_move", wrong))


def saving_is_nothing() -> AbstractContextManager[None]:
    """Does not count what a job writes into its checkpoint folder."""

    def wrong(before: Watch | None, sample: HostSample, rules: WatchdogPolicy, at: datetime) -> Watch:
        return watched(before, replace(sample, writes=0), rules, at)

    return patched((watchdog, "watched", wrong))


MOVES: Mapping[str, Bug] = {
    "raise a bid above the ceiling": Bug(patch=bids_without_a_limit, rule=("raised_bids",), shape=BIDDING),
    "move before the machine has ended": Bug(patch=moves_before_it_has_ended, rule=("doubles",), shape=MOVING),
    "stop a job that saves": Bug(patch=saving_is_nothing, rule=("stalls",), shape=WATCHED),
}
