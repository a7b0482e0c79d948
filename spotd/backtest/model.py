"""What a back-test assumes of machines, and one machine as it behaves under that.

Theory. A machine is of no use for a fixed time after its launch (boot, image, restore), then it works at the speed of
its GPU and saves at a fixed interval. Where it is lost, what it worked since its newest checkpoint is lost too. A
machine that is outbid is halted and kept by its provider: it comes back as soon as its bid wins, and then takes as long
as a launch to go on from its newest checkpoint. Spans are whole seconds of machine time; work is counted in millionths
of a second on a machine of speed 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final

from spotd.backtest.recorded import UNKNOWN
from spotd.core.domain.attempts import Attempt
from spotd_providers.contract.values import InstanceId, InstanceRef, Loss, Market, ProviderName

SPEED_ONE: Final = 1_000_000


class VanishedRule(StrEnum):
    """What becomes of a spot machine whose offer leaves the market without another word."""

    LOST = "lost"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no record of prices shows.

    Attributes:
        work_s: how long the whole job runs on a machine of speed 1.
        restart_s: from each launch until the command works again.
        every_s: between two checkpoints; what is lost with a machine is what it did since the newest.
        checkpoint_bytes: size of one checkpoint, where its traffic is to be paid.
        step_s: how often the daemon decides.
        fee_ppm: fee multiplier of each provider in parts per million; 1.00 where it is absent.
    """

    work_s: int
    restart_s: int = 360
    every_s: int = 900
    checkpoint_bytes: int = 0
    step_s: int = 60
    vanished: VanishedRule = VanishedRule.LOST
    fee_ppm: Mapping[ProviderName, int] = field(default_factory=dict)
    raise_bids: bool = False
    """`[bids] raise_running`, as the two below are `[bids] hold` and `[moves] most`."""
    hold_max: timedelta = timedelta(0)
    moves_max: int = 0

    @property
    def work(self) -> int:
        return self.work_s * SPEED_ONE


@lru_cache(maxsize=4096)
def instant(seconds: int) -> datetime:
    """Return the aware instant of a Unix second."""
    return datetime.fromtimestamp(seconds, UTC)


def second_after(at: datetime) -> int:
    """Return the first whole Unix second that is not before this instant."""
    return -int(-at.timestamp() // 1)


class ReplayedMachine:
    """One machine of a run, from its launch on.

    Attributes:
        series: number of the recorded series that it was launched from.
        speed: relative to one of speed 1, in millionths; `done` is the work that it begins with.
        price: of the GPU part that its provider states, where that is not the agreed one.
        lost_at, loss: when and why it was taken away.
        halted_at: since when it is outbid and kept.
        floor: the lowest bid that wins it, where bids are paid and its price is known.
        returns, repeated_s: how often it came back, and time whose work was lost whenever it was halted.
        ended_at: when its end was ordered.
        is_saved: it was ordered to save before its end, and did.
    """

    def __init__(self, attempt: Attempt, series: int, now: int, done: int, speed: int, terms: Assumptions) -> None:
        offer = attempt.quote.offer
        self.attempt = attempt.id
        self.key = attempt.key
        self.provider = offer.provider
        self.ref = InstanceRef(provider=offer.provider, instance_id=InstanceId(attempt.key))
        self.market = offer.market
        self.series = series
        self.launched_at = now
        self.works_from = now + terms.restart_s
        self.lost_at: int | None = None
        self.loss: Loss | None = None
        self.ended_at: int | None = None
        self.halted_at: int | None = None
        self.floor: int | None = int(offer.gpu_price) if offer.pays_bid else None
        self.returns = self.repeated_s = 0
        self.is_saved = False
        self.price: int | None = None
        self.reports = 0
        self.reported_saves = 0
        self._bid = int(attempt.price_max) if offer.pays_bid else None
        self._terms = terms
        self._halted_s = 0
        self._stretches = [(0, self.works_from)]
        """How many checkpoints were written before it began to work, and when it did, each time."""
        self._begins_with = done
        self._speed = speed
        self.finishes_at = self.works_from - (-(terms.work - done) // self._speed)

    @property
    def is_gone(self) -> bool:
        return self.lost_at is not None or self.ended_at is not None

    def observe(self, at: int, price: int) -> None:
        """Take in a change of the offer that it was launched from."""
        if self.market is not Market.SPOT or self.is_gone or price == UNKNOWN:
            return
        if self.halted_at is None and self.finishes_at <= at:
            return
        if self._bid is not None:
            self.floor = None if price < 0 else price
        if price < 0:
            if self._terms.vanished is VanishedRule.LOST:
                self.lost_at, self.loss = at, Loss.PREEMPTED
        elif self._bid is None:
            self.price = price
        else:
            self._follow_floor(at)

    def place_bid(self, now: int, bid: int) -> None:
        """Pay this bid from now on."""
        self._bid = bid
        if not self.is_gone:
            self._follow_floor(now)

    def _follow_floor(self, at: int) -> None:
        if self.floor is None or self._bid is None:
            return
        if self.floor > self._bid and self.halted_at is None:
            self.halted_at, self.loss = at, Loss.OUTBID
        elif self.floor <= self._bid and self.halted_at is not None:
            self._come_back(at, self.halted_at)

    def _come_back(self, at: int, halted_at: int) -> None:
        saves, saved = self.saves(at), self.saved(at)
        self.repeated_s += (self.done(at) - saved) // SPEED_ONE
        self._halted_s += at - halted_at
        self.returns += 1
        self._begins_with, self.halted_at, self.loss = saved, None, None
        self.works_from = at + self._terms.restart_s
        self._stretches.append((saves, self.works_from))
        self.finishes_at = self.works_from - (-(self._terms.work - saved) // self._speed)

    def _until(self, now: int) -> int:
        return min(at for at in (now, self.lost_at, self.ended_at, self.halted_at) if at is not None)

    def _worked_s(self, now: int) -> int:
        return max(0, self._until(now) - self.works_from)

    def done(self, now: int) -> int:
        """Return the work of the job that is done at this instant, be it saved or not."""
        return min(self._terms.work, self._begins_with + self._worked_s(now) * self._speed)

    def saves(self, now: int) -> int:
        """Return how many checkpoints it has written."""
        worked = min(self._worked_s(now), self.finishes_at - self.works_from)
        return self._stretches[-1][0] + worked // self._terms.every_s

    def saved(self, now: int) -> int:
        """Return the work that its newest checkpoint holds."""
        saves = self.saves(now) - self._stretches[-1][0]
        return self._begins_with + saves * self._terms.every_s * self._speed

    def saved_at(self, number: int) -> int:
        """Return when it wrote its checkpoint of this number, counted from 1."""
        before, works_from = next(one for one in reversed(self._stretches) if one[0] < number)
        return works_from + (number - before) * self._terms.every_s

    def is_finished(self, now: int) -> bool:
        """Whether the job's command has come to its end, before the machine was lost."""
        return self.finishes_at <= self._until(now)

    def used_s(self, now: int) -> int:
        """Return for how long it has existed, without the time in which it was halted."""
        return max(0, self._until(now) - self.launched_at - self._halted_s)
