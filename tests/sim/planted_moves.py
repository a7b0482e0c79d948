"""Bugs of running machines beside the market: of their bids, of moves to cheaper ones, and of the watchdog."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core import bids, host_reports, relocation
from spotd.core.domain.attempts import Attempt, HostSample, Watch, watched
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd.core.kernel import listed
from spotd.core.relocation import Relocation
from spotd.daemon.calls import BidChanges
from spotd_jobs.spec.model import WatchdogPolicy
from spotd_providers.contract.values import MicroUsdPerHour
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

LONG: Final = Shape(storm=timedelta(hours=6), user=False, need=(200, 400))
BIDDING: Final = replace(LONG, floors=True, limits={"raise_bids": True, "hold_max": timedelta(minutes=10)})
MOVING: Final = replace(LONG, limits={"moves_max": 5})
WATCHED: Final = replace(LONG, watched=True)


def bids_without_a_limit() -> AbstractContextManager[None]:
    """Keeps the machine at any price."""

    def wrong(item: Attempt, _job: Job, _policy: Policy) -> MicroUsdPerHour | None:
        return None if item.bidding.floor is None else MicroUsdPerHour(2 * item.quote.price.gpu)

    return patched(
        (relocation, "raised_bid", wrong),
        (Relocation, "_cheapest_move", lambda _self, _job, _item, _rate: None),
        (bids, "words_against_raise", lambda *_: ""),
    )


def bids_more_than_it_counts() -> AbstractContextManager[None]:
    """Places twice the bid that ceiling and budgets know of."""
    call = BidChanges._call

    async def wrong(self: BidChanges, attempt: Attempt, bid: MicroUsdPerHour) -> tuple[str, str]:
        return await call(self, attempt, MicroUsdPerHour(2 * bid))

    return patched((BidChanges, "_call", wrong))


def moves_before_it_has_ended() -> AbstractContextManager[None]:
    """Takes the machine for gone as soon as its job is to move, and never ends it."""
    move = Relocation._move

    def wrong(self: Relocation, item: Attempt) -> None:
        before = self._moved
        move(self, item)
        if self._moved > before:
            self._builder.end_attempt(item.id, EndReason.MIGRATED, "at once")
            self._builder.machine_gone(item.id)
            self._builder.wake(self._now)

    return patched((Relocation, "_move", wrong), (listed, "is_own_key", lambda _policy, _key: False))


def saving_is_nothing() -> AbstractContextManager[None]:
    """Does not count what a job writes into its checkpoint folder."""

    def wrong(before: Watch | None, sample: HostSample, rules: WatchdogPolicy, at: datetime) -> Watch:
        return watched(before, replace(sample, writes=0), rules, at)

    return patched((host_reports, "watched", wrong))


MOVES: Mapping[str, Bug] = {
    "raise a bid above the ceiling": Bug(
        patch=bids_without_a_limit, rule=("said_by_the_core",), shape=BIDDING, until=timedelta(hours=2)
    ),
    "bid more than was counted": Bug(
        patch=bids_more_than_it_counts, rule=("raised_bids",), shape=BIDDING, until=timedelta(hours=2)
    ),
    "move before the machine has ended": Bug(
        patch=moves_before_it_has_ended, rule=("doubles",), shape=MOVING, until=timedelta(hours=8)
    ),
    "stop a job that saves": Bug(patch=saving_is_nothing, rule=("stalls",), shape=WATCHED, until=timedelta(hours=8)),
}
