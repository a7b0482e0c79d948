"""Whether it is cheaper for a job to stay on its machine or to go on elsewhere, with every term.

    staying = rate now x time left here
    moving  = rate there x (time left there + start) + rate now x stop + bytes saved and restored
              + losses that a fresh machine suffers more than one of this age, each a start, half a save interval and
                a restore

The time left is the job's own estimate (`remaining_work`), from its newest checkpoint, so that what is not saved counts
as work to be repeated. Where it is not known what is left, the job is taken to go on for as long as it has run on this
machine, and for `HORIZON_MAX` at the most; then, and where the speed of either kind of machine is not known, only
machines of the same kind are compared, since a lower price may buy a slower one. Where a budget stops the machine
before, no more than that time is compared, and the work that is done in it.

A start takes as long as the starts of this image at that provider did (`experience.starts`), as this job's own start on
this machine did, or as `usefulness` estimates, whichever is longest.
The hazard by age is that of recorded spot markets (V100, 2023: 1.27 losses an hour in the first quarter of an hour,
0.10 after eight hours): an old healthy machine is worth keeping. It is raised in proportion for a machine whose own
evidence (`experience.hazards`) is above the table's mean over six hours, and never lowered: a market that was quiet so
far is no reason to start anew for little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.market import Quote
from spotd.core.pricing import DEFAULT_CHECKPOINT_INTERVAL, restore_cost, save_cost, startup
from spotd.core.ranking.remaining_work import PPM, remaining_work, speeds_of, time_on
from spotd_providers.contract.values import Interruption, MicroUsd, MicroUsdPerHour, cost

HORIZON_MAX: Final = timedelta(hours=6)
"""How long a job whose end is not known is taken to go on at most."""
START_MAX: Final = timedelta(hours=1)
"""A start that took longer was held up by something else."""
STOP_TAKES: Final = timedelta(minutes=2)
"""From the order to save to the end of the machine, besides what the job's stop_grace allows."""
_HOUR: Final = timedelta(hours=1)
_TICK: Final = timedelta(microseconds=1)
_HOUR_TICKS: Final = _HOUR // _TICK
_HAZARD: Final = (
    (timedelta(minutes=15), 1_270_000),
    (timedelta(minutes=30), 1_090_000),
    (timedelta(hours=1), 760_000),
    (timedelta(hours=2), 420_000),
    (timedelta(hours=4), 210_000),
    (timedelta(hours=8), 150_000),
)
"""Losses per hour, in millionths, of a machine younger than this."""
_HAZARD_LATER: Final = 100_000
HAZARD_MEAN: Final = 351_667
"""The same, on average over the first six hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What staying and moving cost from now to the end of the job, or over the horizon.

    Attributes:
        left: time left on the machine that the job has.
        is_estimate: the end is the job's own estimate, not a horizon.
        is_paid_for: it is the time after which a budget stops the machine that the job has.
        fixed: what of `moving` the move itself costs.
    """

    left: timedelta
    is_estimate: bool
    is_paid_for: bool
    staying: MicroUsd
    moving: MicroUsd
    fixed: MicroUsd

    @property
    def saving(self) -> int:
        return self.staying - self.moving


class Staying:
    """What a machine costs its job from now on: the side of a comparison that is the same beside every other machine.

    Args:
        rate_here: what the machine would cost, where that is not what was agreed.
        budget_left: what may be spent before a budget stops the machine; `None` where none does.
    """

    def __init__(
        self,
        job: Job,
        item: Attempt,
        now: datetime,
        rate_here: MicroUsdPerHour | None = None,
        budget_left: MicroUsd | None = None,
    ) -> None:
        here = item.quote.offer
        self._job, self._here = job, here
        self._left, self._speeds = remaining_work(job), speeds_of(job)
        self._unsaved = unsaved_time(job, item, now)
        self._age, self._start_took = _age(item, now), _start_took(item)
        if self._left is None:
            self._here_left = min(HORIZON_MAX, item.command_time(now))
        else:
            self._here_left = max(timedelta(0), time_on(job, self._left, here.gpu, here.gpu_count) - self._unsaved)
        rate = running_rate(item.quote) if rate_here is None else rate_here
        self._is_paid_for = budget_left is not None and budget_left < cost(rate, self._here_left)
        if budget_left is not None and self._is_paid_for:
            paid = budget_left * _HOUR / rate
            if self._left is not None:
                part = (paid + self._unsaved) / (self._here_left + self._unsaved)
                self._left = replace(self._left, time=self._left.time * part)
            self._here_left = paid
        self._cost = cost(rate, self._here_left)
        self._ends_for = cost(rate, job.spec.checkpoint.stop_grace + STOP_TAKES) + save_cost(job, here)
        self._repeats = (job.spec.checkpoint.every or DEFAULT_CHECKPOINT_INTERVAL) / 2

    def compare(
        self,
        there: Quote,
        *,
        usual_start: timedelta = timedelta(0),
        hazard_here_ppm: int = 0,
        hazard_there_ppm: int = 0,
    ) -> Comparison | None:
        """Return what staying and moving to this quote cost; `None` where they cannot be compared.

        Args:
            usual_start: how long starts there were seen to take.
            hazard_here_ppm, hazard_there_ppm: losses in a million machine hours, by what was seen.
        """
        job, here, offer, left, speeds = self._job, self._here, there.offer, self._left, self._speeds
        same_kind = (here.gpu, here.gpu_count) == (offer.gpu, offer.gpu_count)
        if not same_kind and (
            left is None or not (speeds.knows(here.gpu, here.gpu_count) and speeds.knows(offer.gpu, offer.gpu_count))
        ):
            return None
        known = None if left is None else time_on(job, left, offer.gpu, offer.gpu_count)
        there_left = self._here_left + self._unsaved if known is None else known
        rate_there = running_rate(there)
        start = max(startup(job, offer), min(START_MAX, max(usual_start, self._start_took)))
        restored = restore_cost(job, there)
        more_losses = 0
        if offer.interruption is not Interruption.NEVER:
            fresh = _raise_losses(expected_losses(timedelta(0), there_left), hazard_there_ppm)
            more_losses = max(0, fresh - _raise_losses(expected_losses(self._age, there_left), hazard_here_ppm))
        each_loss = cost(rate_there, self._repeats + start) + restored
        fixed = self._ends_for + cost(rate_there, start) + restored + more_losses * each_loss // PPM
        return Comparison(
            left=self._here_left,
            is_estimate=left is not None,
            is_paid_for=self._is_paid_for,
            staying=self._cost,
            moving=MicroUsd(cost(rate_there, there_left) + fixed),
            fixed=MicroUsd(fixed),
        )


def running_rate(quote: Quote) -> MicroUsdPerHour:
    """Return what a machine costs per hour while it works: all but what it restores once."""
    return MicroUsdPerHour(quote.price.total - quote.price.restore)


def rate_limit(job: Job, item: Attempt, until: datetime, rate_here: int, margin_percent: int) -> int:
    """Return the highest running rate at which a move can save so much up to an instant: a bound from above.

    It is that of a machine of the same kind; another one that is twice as fast may cost twice as much. Who asks no
    machine above it to be compared misses no move. It never rises where it is known what is left of the job.
    """
    left, here = remaining_work(job), item.quote.offer
    ran = min(HORIZON_MAX, item.command_time(until))
    here_left = ran if left is None else time_on(job, left, here.gpu, here.gpu_count)
    stop = job.spec.checkpoint.stop_grace + STOP_TAKES
    kept = here_left * (100 - margin_percent) / 100 - stop
    whole = here_left + min(START_MAX, _start_took(item))
    if kept <= timedelta(0):
        return 0
    rounded = 1 + _HOUR // whole  # what the sums that are compared are rounded up by, per hour
    return rate_here * (kept // _TICK) // (whole // _TICK) + 1 + rounded


def expected_losses(age: timedelta, span: timedelta) -> int:
    """Return how often a spot machine of this age is lost over so long, in millionths."""
    return _losses_until(age + span) - _losses_until(age)


def _raise_losses(losses: int, hazard_ppm: int) -> int:
    """Return the losses by the table, raised by how far what was seen is above its mean."""
    return losses * max(hazard_ppm, HAZARD_MEAN) // HAZARD_MEAN


def _losses_until(age: timedelta) -> int:
    """Return how often a machine is lost up to this age, in millionths: the hazard, summed."""
    ticks = max(0, age // _TICK)
    begun, rate, before = _SUMMED[bisect_left(_ENDS, ticks)]
    return before + rate * (ticks - begun) // _HOUR_TICKS


def _sums() -> Iterator[tuple[int, int, int]]:
    """Yield each step of the table: when it begins, its hazard, and the losses before it."""
    total, begun = 0, 0
    for ends, rate in _HAZARD:
        yield begun, rate, total
        total += rate * (ends // _TICK - begun) // _HOUR_TICKS
        begun = ends // _TICK
    yield begun, _HAZARD_LATER, total


_SUMMED: Final = tuple(_sums())
"""A machine that may move is compared with many others: the sums are made once."""
_ENDS: Final = tuple(ends // _TICK for ends, _ in _HAZARD)


def _age(item: Attempt, now: datetime) -> timedelta:
    return timedelta(0) if item.launched_at is None else max(timedelta(0), now - item.launched_at)


def _start_took(item: Attempt) -> timedelta:
    if item.running_at is None or item.launched_at is None:
        return timedelta(0)
    return max(timedelta(0), item.running_at - item.launched_at)
