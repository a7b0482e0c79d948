"""When the bid for a machine of a run may change, or another machine may be worth a move: instants, and a price.

Theory. The core decides both; here it is only known when it cannot decide anything new. A bid changes where the lowest
one that wins does, or a pause is over. A move needs a machine of at most `rate_limit`, so a run sleeps until one is on
sale. While one is, what a move is worth falls from one checkpoint to the next, since what is not saved would be
repeated: it is asked again at each. A job that is taken to go on for as long as it ran gains time as it runs, twice of
which is to be paid there until the next checkpoint, so that only half the price is worth more from step to step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.backtest.recorded import ReplayedMachine, instant, second_after
from spotd.core.bids import lowered_bid, pays_bid, raised_bid
from spotd.core.domain.attempts import Attempt, with_floor
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.pricing import PPM, repriced
from spotd.core.ranking.relocating import HORIZON_MAX, rate_limit, running_rate
from spotd.core.ranking.remaining_work import machine_speed_ppm, remaining_work, speeds_of
from spotd.core.relocation import MARGIN_PERCENT, rate_now, settles_at
from spotd_providers.contract.values import MicroUsdPerHour, shares

AHEAD_S: Final = 3600
"""So far ahead it is judged whether a move may be worth it, while what is left of a job is taken to grow."""
_Kind = tuple[str, int]


class RelocationWatch:
    """The machine of one run beside the market.

    Attributes:
        moves_below: an offer at or under this price, in the unit of the ceiling, may be worth a move; `None`: none is.
    """

    def __init__(self, kinds: Collection[_Kind], step_s: int) -> None:
        self._kinds = kinds
        self._step_s = step_s
        self._cheapest: int | None = None
        self.moves_below: int | None = None

    def note_cheapest(self, world: World, job: Job, item: Attempt | None, market: MarketSnapshot, at: datetime) -> None:
        """Note the lowest rate of another machine on sale that may be worth a move."""
        self._cheapest = None
        if item is None or not item.state.counts or not _may_move(world.policy, job):
            return
        settled = settles_at(item, job.moves.at)
        if settled is None or settled > at:
            return
        here, limits = item.quote.offer, self._limits(world.policy, job, item, at)
        for name, sold in market.by_provider.items():
            fee = world.policy.providers[name].fee_ppm
            for kind, limit in limits.items():
                for offer in sold.offer_index.by_gpu.get(kind, ()):
                    rate = offer.gpu_price * fee // PPM
                    if rate > limit:
                        break
                    if (offer.provider, offer.offer_id) != (here.provider, here.offer_id):
                        self._cheapest = rate if self._cheapest is None else min(rate, self._cheapest)
                        break

    @property
    def sells_cheaper(self) -> bool:
        """Whether a machine was on sale that may be worth a move, when that was noted last."""
        return self._cheapest is not None

    def wakes(self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine, now: int) -> list[int]:
        """Return instants at which a lower bid or another machine may be worth it, and set `moves_below`."""
        return [
            *self._bid_wakes(policy, job, item, machine, now),
            *self._move_wakes(policy, job, item, machine, now),
        ]

    def may_raise(self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine) -> bool:
        """Whether more may be bid for the machine, be it that something holds that back for now."""
        if not policy.raise_bids or not pays_bid(item):
            return False
        return raised_bid(_after_listing(item, machine), job, policy) is not None

    def may_lower(self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine, now: int) -> bool:
        """Whether less may be bid for it now."""
        settled = settles_at(item, item.bidding.changed_at)
        lower_rate = self._lower_rate(policy, job, item, machine, now)
        return lower_rate is not None and settled is not None and settled <= instant(now)

    def _lower_rate(
        self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine, now: int
    ) -> MicroUsdPerHour | None:
        """Return what the machine would cost by a lower bid that may be worth the loss which it may bring."""
        if not policy.raise_bids or not pays_bid(item):
            return None
        lower = lowered_bid(_after_listing(item, machine), job, policy)
        if lower is None:
            return None
        until = instant(_grows_until(job, item, now))
        rate = running_rate(repriced(item.quote, lower))
        limit = rate_limit(job, item, until, running_rate(item.quote), MARGIN_PERCENT)
        return rate if rate <= limit else None

    def _bid_wakes(self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine, now: int) -> list[int]:
        settled = settles_at(item, item.bidding.changed_at)
        if settled is None or not policy.raise_bids or not pays_bid(item):
            return []
        if settled > instant(now):
            return [second_after(settled)]
        until, check = _grows_until(job, item, now), machine.saved_at(machine.saves(now) + 1)
        lower_rate = self._lower_rate(policy, job, item, machine, now)
        return self._asked_again(now, until, check, running_rate(item.quote), lower_rate)

    def _move_wakes(self, policy: Policy, job: Job, item: Attempt, machine: ReplayedMachine, now: int) -> list[int]:
        self.moves_below = None
        check = machine.saved_at(machine.saves(now) + 1)
        settled = settles_at(item, job.moves.at)
        if settled is None or not _may_move(policy, job):
            return []
        if settled > instant(now):
            return [second_after(settled)]
        limits, is_per_gpu = self._limits(policy, job, item, instant(now)), _is_per_gpu(job)
        self.moves_below = max(-(-most // (shares(count) if is_per_gpu else 1)) for (_, count), most in limits.items())
        found = self._asked_again(now, _grows_until(job, item, now), check, rate_now(job, item, policy), self._cheapest)
        not_before = job.moves.not_before
        return found if not_before is None or not_before <= instant(now) else [*found, second_after(not_before)]

    def _asked_again(self, now: int, until: int, check: int, rate: int, other: int | None) -> list[int]:
        grows = [until] if until > now else []
        if other is None:
            return grows
        if grows and other * 200 < rate * (100 - MARGIN_PERCENT):
            return [now + self._step_s]
        return [check, *grows]

    def _limits(self, policy: Policy, job: Job, item: Attempt, at: datetime) -> dict[_Kind, int]:
        """Return the highest rate of each kind of machine for which a move may be worth it."""
        here = item.quote.offer
        until = instant(_grows_until(job, item, int(at.timestamp())))
        limit = rate_limit(job, item, until, rate_now(job, item, policy), MARGIN_PERCENT)
        own, speeds = (here.gpu, here.gpu_count), speeds_of(job)
        found = {own: limit}
        if len(self._kinds) > 1 and remaining_work(job) is not None and speeds.knows(*own):
            speed = machine_speed_ppm(job, *own)
            for kind in self._kinds:
                if kind != own and speeds.knows(*kind):
                    found[kind] = max(limit, -(-limit * machine_speed_ppm(job, *kind) // speed))
        return found


def _after_listing(item: Attempt, machine: ReplayedMachine) -> Attempt:
    """Return the attempt as it is once the next listing has stated the lowest bid that wins."""
    if machine.floor is None:
        return item
    return replace(item, bidding=with_floor(item.bidding, MicroUsdPerHour(machine.floor), item.intended_at, None))


def _may_move(policy: Policy, job: Job) -> bool:
    schedule = job.spec.schedule
    return job.moves.count < policy.moves_max and schedule.deadline is None and not schedule.windows


def _is_per_gpu(job: Job) -> bool:
    return job.spec.price is None or job.spec.price.per_gpu_hour is not None


def _grows_until(job: Job, item: Attempt, now: int) -> int:
    """Return up to when what is left is taken to grow, at most `AHEAD_S` from now; now, where it does not."""
    if item.running_at is None or remaining_work(job) is not None:
        return now
    return max(now, min(second_after(item.running_at + HORIZON_MAX), now + AHEAD_S))
