"""Machines that jobs of lower priority give up for one that asks for it with `[schedule] preempt`.

Theory. Somebody else's running work is stopped only for a job that would start at once on what becomes free: it has an
offer under its ceiling, and only `[budget] machines`, or what is promised of a day's or month's budget, is in its way.
It takes no more than it needs, from jobs of strictly lower priority without a deadline, and nothing while machines that
end already are enough. What is stopped saves first, as at any other stop. It is served again behind the job that it
made room for, and a machine is left alone for `DWELL` after its launch, so no pair of jobs can stop each other in turn,
and prices that rise and fall cost a machine at most a stop in each such span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from spotd.core.billing.budgets import BudgetGuard
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.machine_verdicts import MachineVerdict
from spotd.core.domain.quotes import Quote
from spotd.core.domain.verdicts import VerdictKind
from spotd.core.domain.world import World
from spotd.core.metering.interruption_credit import machines_in_use
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import span_words
from spotd.core.running.author import MachineVerdicts
from spotd.core.running.table import pause_of
from spotd.core.schedule.turn import TurnWait

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
        self._freed = 0
        """Micro-dollars that were freed for jobs of this decision."""

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
        ending = machines_in_use(self._world, self._builder.now) - len(list(self._running()))
        stopped = sum(self._builder.attempt(item.id).stop is not None for item in self._running())
        self._waiting += 1
        if ending + stopped >= self._waiting:
            return why[0], f"{why[1]}; it waits for one of those that end", None
        victim = next(iter(self._victims(job)), None)
        return self._stopped(job, [] if victim is None else [victim], target, why)

    def money_for(self, job: Job, quote: Quote, why: TurnWait) -> TurnWait:
        """Stop as many machines as free what the job lacks of a budget of all jobs; none where all do not."""
        lacking = self._budget_guard.lacking(job, quote) if job.spec.schedule.preempt and why[0] in _OF_ALL else None
        if lacking is None:
            return why
        ending = [item for item in self._world.attempts.values() if item.stop is not None and item.state.counts]
        if ending:
            return why[0], f"{why[1]}; it waits for machines that save and stop", why[2]
        chosen: list[Attempt] = []
        left = lacking + self._freed
        for victim in self._victims(job):
            if left <= 0:
                break
            gain = self._budget_guard.freed_by(victim)
            if gain > 0:
                chosen.append(victim)
                left -= gain
        if left > 0:
            return why
        self._freed += lacking
        return self._stopped(job, chosen, quote, why)

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
        if not is_lower or self._builder.now - item.intended_at < DWELL:
            return False
        return not self._machine_verdicts.held_back(item, MachineVerdict.MAKE_ROOM)

    def _stopped(self, job: Job, victims: list[Attempt], target: Quote, why: TurnWait) -> TurnWait:
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
        return why[0], f"{why[1]}; {', '.join(names)} saves and stops to make room", None
