"""Which running machines must stop: those that would break a budget, and those that cost more than their job accepts.

A machine that would break a budget is ordered to save and stop while the money set aside for that is still there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial

from spotd.core.billing.billing import words_over_ceiling
from spotd.core.billing.budgets import BudgetGuard, hold
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import JobId
from spotd.core.domain.machine_verdicts import MachineVerdict
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.verdicts import VerdictKind
from spotd.core.domain.world import World
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.plans.stalls import stall_words
from spotd.core.quarantine import contain
from spotd.core.running.author import SAVES_NO_MORE, MachineVerdicts, order_stop, without_save


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
        return sorted(
            (a for a, now in self.builder.before_and_now() if a.state.counts and now.stop is None),
            key=lambda a: (a.id.job, a.id.number),
        )

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
        running = sorted(self._running(), key=self._saved_at)
        orders = [
            a for a in self.world.attempts.values() if a.stop is not None and a.stop.ordered_at == self.builder.now
        ]
        for item in self.world.attempts.values():
            if item.state is AttemptState.STOPPING:
                contain(self.builder, item.id.job, partial(self._end_saving, item), "its stop cannot be judged")
        for item in sorted(orders, key=self._saved_at):
            contain(self.builder, item.id.job, partial(self._hold_save, item), "its stop cannot be judged")
        for item in running:
            if self.shortage or self.world.jobs[item.id.job].budget is not None:
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
