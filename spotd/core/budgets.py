"""Money that may still be promised.

Theory. Every machine that may compute has money set aside: what it costs until it can be noticed, told to save, and
ended (`commit_horizon` plus the job's stop_grace). As long as spent plus set aside stays within a budget, stopping
everything at that moment keeps the budget; when it no longer does, that moment has come.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

from spotd.core.metering import job_spent, spent_in_month, spent_on_day
from spotd.core.model import Attempt, Job, JobId, Quote, VerdictKind, World
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, as_usd, cost


def committed(world: World, item: Attempt) -> MicroUsd:
    """What is set aside to end this machine safely; nothing for one that can compute no more."""
    if not item.machine.may_compute:
        return MicroUsd(0)
    rate = max(item.meter.rate, item.quote.price.total)
    return cost(MicroUsdPerHour(rate), _horizon(world, world.jobs[item.id.job]))


def _horizon(world: World, job: Job) -> timedelta:
    return world.policy.commit_horizon + job.spec.checkpoint.stop_grace


class Purse:
    """The budgets during one decision; `commit` is told of each launch."""

    def __init__(self, world: World, now: datetime) -> None:
        self._world = world
        self._now = now
        policy = world.policy
        self._day = spent_on_day(world, now) if policy.budget_day is not None else MicroUsd(0)
        self._month = spent_in_month(world, now) if policy.budget_month is not None else MicroUsd(0)
        self._committed = 0
        self._committed_by_job: defaultdict[JobId, int] = defaultdict(int)
        for item in world.attempts.values():
            aside = committed(world, item)
            self._committed += aside
            self._committed_by_job[item.id.job] += aside

    def shortage(self) -> tuple[VerdictKind, str] | None:
        """The budget that would be broken unless every machine is stopped now."""
        policy = self._world.policy
        if policy.budget_day is not None and self._day + self._committed > policy.budget_day:
            return VerdictKind.BUDGET_DAY, _used("day", policy.budget_day, self._day)
        if policy.budget_month is not None and self._month + self._committed > policy.budget_month:
            return VerdictKind.BUDGET_MONTH, _used("month", policy.budget_month, self._month)
        return None

    def job_shortage(self, job: Job) -> str:
        """Why the job's own budget would be broken unless its machine is stopped now; empty if it is not."""
        budget = job.spec.job_budget
        if budget is None:
            return ""
        total = job_spent(self._world, job, self._now)
        if total + self._committed_by_job[job.id] <= budget:
            return ""
        return _used("job", MicroUsd(budget), total)

    def refusal(self, job: Job, quote: Quote) -> tuple[VerdictKind, str, bool] | None:
        """Why this launch may not be made, and whether the job can never be launched again for it."""
        policy = self._world.policy
        needed = cost(quote.price.total, _horizon(self._world, job) + policy.useful_run)
        budget = job.spec.job_budget
        if budget is not None:
            total = job_spent(self._world, job, self._now)
            if total + needed > budget:
                return (
                    VerdictKind.BUDGET_JOB,
                    f"{_used('job', MicroUsd(budget), total)}; a launch needs ${as_usd(needed):.4f} more",
                    total > 0,
                )
        if policy.budget_day is not None and self._day + self._committed + needed > policy.budget_day:
            why = _used("day", policy.budget_day, self._day)
            return (
                VerdictKind.BUDGET_DAY,
                f"{why}, ${as_usd(self._committed):.4f} promised; waits for midnight UTC",
                False,
            )
        if policy.budget_month is not None and self._month + self._committed + needed > policy.budget_month:
            why = _used("month", policy.budget_month, self._month)
            return VerdictKind.BUDGET_MONTH, f"{why}, ${as_usd(self._committed):.4f} promised; waits for the 1st", False
        return None

    def commit(self, job: Job, quote: Quote) -> None:
        """A launch was admitted: its money is promised."""
        aside = cost(quote.price.total, _horizon(self._world, job))
        self._committed += aside
        self._committed_by_job[job.id] += aside


def _used(what: str, budget: MicroUsd, total: MicroUsd) -> str:
    return f"${as_usd(total):.4f} of the {what}'s ${as_usd(budget):.2f} is spent"
