"""Which running machines must stop: those that would break a budget, and those that cost more than their job accepts.

A machine that would break a budget is ordered to save and stop while the money set aside for that is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core.author import SAVES_NO_MORE, MachineVerdicts, order_stop, without_save
from spotd.core.budgets import BudgetGuard, hold
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, MachineVerdict
from spotd.core.domain.market import LEAP, MarketSnapshot, Quote
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.quarantine import contain
from spotd.core.metering import machines_in_use, machines_of
from spotd.core.plan_builder import PlanBuilder, stall_words
from spotd.core.pricing import PPM, borne_until, per_gpu_words, span_words
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.running import pause_of
from spotd.core.schedule import TurnWait
from spotd_providers.contract.values import Market, MicroUsdPerHour, per_gpu

FIXED_TOLERANCE_PPM: Final = 10_000
"""What a provider may round a bid or an on-demand price up by."""


class Enforcement:
    """Budgets and ceilings, held against what runs, in one decision."""

    def __init__(
        self, builder: PlanBuilder, world: World, budget_guard: BudgetGuard, machine_verdicts: MachineVerdicts
    ) -> None:
        self.builder = builder
        self.machine_verdicts = machine_verdicts
        self.world = world
        self.budget_guard = budget_guard
        self.shortage = budget_guard.shortage()

    def _running(self) -> list[Attempt]:
        """Return the attempts that count and were not ordered to stop."""
        return [a for a, now in self.builder.before_and_now() if a.state.counts and now.stop is None]

    def enforce_ceilings(self) -> None:
        """Stop each machine that costs more than its job accepted, by its price or by what it uploads."""
        for item in self._running():
            contain(self.builder, item.id.job, partial(self._enforce_ceiling, item), "its price cannot be judged")

    def _enforce_ceiling(self, item: Attempt) -> None:
        over = words_over_ceiling(self.builder, item)
        if over:
            order_stop(self.builder, item, EndReason.PRICE_ROSE, over)

    def enforce_progress(self) -> None:
        """Stop each machine on which its job gets nowhere, where its owner wants that watched."""
        for item in self._running():
            if item.watch is not None:
                contain(
                    self.builder, item.id.job, partial(self._enforce_progress, item), "its progress cannot be judged"
                )

    def _enforce_progress(self, item: Attempt) -> None:
        words = stall_words(item, self.world.jobs[item.id.job])
        if words:
            verdict = MachineVerdict.STALL
            self.machine_verdicts.stop(item, verdict, words, reading=f"heartbeat of {item.key}")

    def enforce_budgets(self) -> None:
        """Stop each machine that a budget carries no longer, and buy nothing more on a budget that is used up."""
        running = self._running()
        limited = [a for a in running if self.shortage or self.world.jobs[a.id.job].budget is not None]
        orders = [
            a for a in self.world.attempts.values() if a.stop is not None and a.stop.ordered_at == self.builder.now
        ]
        for item in self.world.attempts.values():
            if item.state is AttemptState.STOPPING:
                contain(self.builder, item.id.job, partial(self._end_saving, item), "its stop cannot be judged")
        for item in sorted(orders, key=self._saved_at):
            contain(self.builder, item.id.job, partial(self._hold_save, item), "its stop cannot be judged")
        for item in sorted(limited, key=self._saved_at):
            contain(self.builder, item.id.job, partial(self._enforce_budget, item), "its budget cannot be judged")
        if self.shortage and running:
            kind, why = self.shortage
            policy = self.world.policy
            limit = policy.budget_day if kind is VerdictKind.BUDGET_DAY else policy.budget_month
            if limit is not None and not self.budget_guard.is_held(kind, limit):
                hold(self.builder, kind, limit, why)
                self.budget_guard.held_now(kind, limit)

    def _saved_at(self, item: Attempt) -> tuple[datetime, JobId]:
        """Return up to when its work is safe: the machine with most to lose comes first."""
        own = self.world.jobs[item.id.job].saved_by(item.id.number)
        return max(own, default=item.intended_at), item.id.job

    def _hold_save(self, item: Attempt) -> None:
        """Hold the uploads of a machine whose stop was ordered a moment ago to what the budgets have left."""
        stop = item.stop
        if stop is None or not stop.flush or not item.state.counts or self.budget_guard.carries_save(item):
            return
        self.builder.put_attempt(replace(item, stop=without_save(self.builder, stop)))
        message = f"ordered to {SAVES_NO_MORE}"
        self.builder.event("attempt.stopping", message, attempt=item.id, reason=stop.reason.value)

    def _end_saving(self, item: Attempt) -> None:
        """End a save beyond its first deadline unless every budget allows it."""
        stop, now = item.stop, self.builder.now
        if stop is None or not stop.progress or stop.deadline <= now:
            return
        if self.shortage or self.budget_guard.job_shortage(self.world.jobs[item.id.job]):
            self.builder.put_attempt(replace(item, stop=replace(stop, deadline=now, limit=now)))
            self.builder.wake(now)

    def _enforce_budget(self, item: Attempt) -> None:
        own = self.budget_guard.job_shortage(self.world.jobs[item.id.job])
        if own or self.shortage:
            reason = EndReason.OVER_BUDGET if own else EndReason.BUDGET_PAUSED
            why = own or (self.shortage[1] if self.shortage else "")
            order_stop(self.builder, item, reason, why, flush=self.budget_guard.carries_save(item))


# What a machine for a job may plausibly be had for soon, whatever the price of this moment is.


PLAUSIBLE_PERCENT: Final = 75
"""Of the lowest price that is known: so much cheaper a machine may become while a job waits."""
UNKNOWN_DROP: Final = 8
"""Where the price of this moment is all that is known, it may be so many times what is usual."""


def plausible_rates(catalogue: CandidateCatalogue, job: Job) -> list[int]:
    """Whole machines per hour: a bit below what is asked now, was asked lately, and was paid for this job before.

    Offers that cool down or were taken a moment ago count, since they come back.
    """
    offers = catalogue.list_for(catalogue.key_of(job))
    known: list[int] = [*catalogue.lows(job.spec.resources)]
    if job.rate_low is not None:
        known.append(job.rate_low)
    if offers.at(0) is not None:
        best = catalogue.quote_at(offers, 0)
        now: int = best.price.total
        if not offers.is_by_price:
            now = min(now, offers.lowest_total_from(best))  # the best need not be the cheapest
        known.append(now if known else now // UNKNOWN_DROP)
    return [rate * PLAUSIBLE_PERCENT // 100 for rate in known]


def used_up(world: World, market: MarketSnapshot, job: Job, now: datetime, *, unspent: bool = False) -> str:
    """Why the next decision would end this job for its budget, were it queued; empty if it would not."""
    if job.budget is None:
        return ""
    rates = plausible_rates(CandidateCatalogue(world, market, now), job)
    return BudgetGuard(world, now).is_hopeless(job, rates, unspent=unspent)


# Machines that jobs of lower priority give up for one that asks for it with `[schedule] preempt`.
#
# Theory. Somebody else's running work is stopped only for a job that would start at once on what becomes free: it has
# an offer under its ceiling, and only `[budget] machines`, or what is promised of a day's or month's budget, is in
# its way. It takes no more than it needs, from jobs of strictly lower priority without a deadline, and nothing while
# machines that end already are enough. What is stopped saves first, as at any other stop. It is served again behind
# the job that it made room for, and a machine is left alone for `DWELL` after its launch, so no pair of jobs can stop
# each other in turn, and prices that rise and fall cost a machine at most a stop in each such span.


DWELL: Final = pause_of(MachineVerdict.MAKE_ROOM)
"""A machine that was launched so recently is not stopped for another job: its start would be paid for nothing."""
_OF_ALL: Final = frozenset({VerdictKind.BUDGET_DAY, VerdictKind.BUDGET_MONTH})


class Preemption:
    """Which machines are stopped for jobs of higher priority, in one decision."""

    def __init__(
        self, builder: PlanBuilder, world: World, budget_guard: BudgetGuard, machine_verdicts: MachineVerdicts
    ) -> None:
        self._builder = builder
        self._machine_verdicts = machine_verdicts
        self._world = world
        self._budget_guard = budget_guard
        self._waiting = 0
        """Jobs of this decision that wait for a machine which is to end."""

    def machine_for(self, job: Job, why: TurnWait, could_start: Callable[[], Quote | None]) -> TurnWait:
        """Stop one machine for the job where all are in use, unless enough of them end already.

        Returns:
            What the job waits for now.
        """
        if why[0] is not VerdictKind.MACHINES or not job.spec.schedule.preempt:
            return why
        target = could_start()
        if target is None:
            return why
        ending = machines_in_use(self._world, self._builder.now) - machines_of(self._running())
        stopped = machines_of(item for item in self._running() if self._builder.attempt(item.id).stop is not None)
        self._waiting += 1
        if ending + stopped >= self._waiting:
            return why[0], f"{why[1]}; it waits for one of those that end", None
        victim = next(iter(self._victims(job)), None)
        return self._make_room(job, [] if victim is None else [victim], target, why)

    def money_for(self, job: Job, quote: Quote, why: TurnWait) -> TurnWait:
        """Stop as many machines as free what the job lacks of a budget of all jobs; none where all do not."""
        lacking = self._budget_guard.lacking(job, quote) if job.spec.schedule.preempt and why[0] in _OF_ALL else None
        if lacking is None:
            return why
        ending = [item for item in self._world.attempts.values() if item.stop is not None and item.state.counts]
        if ending:
            return why[0], f"{why[1]}; it waits for machines that save and stop", why[2]
        chosen: list[Attempt] = []
        left = lacking
        for victim in self._victims(job):
            if left <= 0:
                break
            gain = self._budget_guard.freed_by(victim)
            if gain > 0:
                chosen.append(victim)
                left -= gain
        if left > 0:
            return why
        return self._make_room(job, chosen, quote, why)

    def _goes_on(self, item: Attempt) -> bool:
        return item.state.counts and item.stop is None

    def _running(self) -> Iterable[Attempt]:
        return (item for item in self._world.attempts.values() if self._goes_on(item))

    def _victims(self, job: Job) -> list[Attempt]:
        """Return the machines that may be stopped for the job: lowest priority first, then what loses least work."""

        def rank(item: Attempt) -> tuple[int, float, JobId]:
            owner = self._world.jobs[item.id.job]
            saved_at = max(owner.saved_by(item.id.number), default=item.intended_at)
            return owner.spec.priority, -saved_at.timestamp(), owner.id

        return sorted((item for item in self._running() if self._may_stop(item, job)), key=rank)

    def _may_stop(self, item: Attempt, job: Job) -> bool:
        spec = self._world.jobs[item.id.job].spec
        # A job with a deadline may have no time to lose: its policy decides about that.
        is_lower = spec.priority < job.spec.priority and spec.schedule.deadline is None
        is_locked = item.id.job in self._world.policy.locked
        if not is_lower or is_locked or self._builder.now - item.intended_at < DWELL:
            return False
        return not self._machine_verdicts.held_back(item, MachineVerdict.MAKE_ROOM)

    def _make_room(self, job: Job, victims: list[Attempt], target: Quote, why: TurnWait) -> TurnWait:
        if not victims:
            none = f"no job of lower priority and without a deadline had its machine for {span_words(DWELL)}"
            return why[0], f"{why[1]}; {none}", why[2]
        verdict, verdicts = MachineVerdict.MAKE_ROOM, self._machine_verdicts
        if not verdicts.may_stop_for(job, verdict, target.offer, victims):
            return why[0], f"{why[1]}; {verdicts.words(job)}", why[2]
        names = []
        for item in victims:
            owner = self._world.jobs[item.id.job]
            made = f"{job.name}, priority {job.spec.priority}"
            verdicts.give(item, verdict, made, gains=job, target=target.offer)
            names.append(f"{owner.name} (priority {owner.spec.priority})")
        self._budget_guard.expect(job, target, *victims)
        return why[0], f"{why[1]}; {', '.join(names)} saves and stops to make room", None


def words_over_ceiling(builder: PlanBuilder, item: Attempt) -> str:
    """How far the machine's price is above what its job accepted; empty while it is not, or is borne for a while.

    The price of a spot market moves, so one listing is believed, but for a leap. A bid and an on-demand price do not: a
    second listing must state it, since one may be wrong. One listing must be newer than a ceiling that was lowered, or
    a fee that rose.
    """
    offer, price = item.quote.offer, item.quote.price
    total = item.meter.rate + price.upload + price.restore
    per_gpu_now = per_gpu(MicroUsdPerHour(total), offer.gpu_count)
    if per_gpu_now <= item.ceiling_now:
        return ""
    is_fixed = offer.market is not Market.SPOT or offer.pays_bid
    first, last = item.over_ceiling_at, item.listed_at
    if first is not None and (last is None or last < first):
        return ""  # ceiling or fee were changed since it was listed
    if (is_fixed or total > LEAP * price.total) and (first is None or last is None or last <= first):
        return ""
    if is_fixed and per_gpu_now <= item.ceiling_now + item.ceiling_now * FIXED_TOLERANCE_PPM // PPM:
        return ""
    borne = borne_until(item, builder.job(item.id.job), per_gpu_now, builder.now)
    if borne is not None:
        builder.wake(borne)
        return ""
    return f"{per_gpu_words(per_gpu_now)}, accepted are {per_gpu_words(item.ceiling_now)}"
