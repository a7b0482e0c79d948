"""Which job gets which machine now, which machine must stop, and why every other job waits.

Theory. Running machines come first (`enforcement`): the money that is set aside to end them safely is still there. Then
jobs that want a machine are served (`placement`) in order of priority, lost hosts before newcomers, older before
younger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial

from spotd.core.author import MachineVerdicts
from spotd.core.budgets import BudgetGuard
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.states import JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.enforcement import Enforcement
from spotd.core.machines.bids import hold_words
from spotd.core.machines.host_reports import late_words
from spotd.core.pacer import enforce_deadlines
from spotd.core.placement import JobPlacement
from spotd.core.plan import Plan
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import quote_words, witness_words
from spotd.core.quarantine import guarded, in_words
from spotd.core.relocation import Relocation
from spotd.core.schedule import closing_words, enforce_windows


def decide(world: World, market: MarketSnapshot, now: datetime) -> Plan:
    """Return launches, stop orders and one verdict per job."""
    return guarded(lambda some: _decide(some, market, now), world, now)


def _decide(world: World, market: MarketSnapshot, now: datetime) -> Plan:
    builder, budget_guard = PlanBuilder(world, now), BudgetGuard(world, now)
    machine_verdicts = MachineVerdicts(builder, world, market)
    placement = JobPlacement(builder, world, market, budget_guard, machine_verdicts)
    enforcement = Enforcement(builder, world, budget_guard, machine_verdicts)
    enforcement.enforce_budgets()
    enforcement.enforce_ceilings()
    enforce_windows(builder, world)
    enforce_deadlines(builder, world)
    enforcement.enforce_progress()
    relocation = Relocation(placement)
    relocation.change_bids()
    for job in _serving_order(world.jobs.values()):
        if builder.job(job.id).state.is_final:
            continue  # quarantined by a former step, or over
        if job.state.may_be_placed:
            placement.place(job)
            continue
        item = next((a for a in placement.attempts_by_job[job.id] if a.state.counts), None)
        if not placement.pacer.keep_pace(job, item):
            continue
        if (error := builder.attempted(partial(_explain_running, placement, job, item))) is not None:
            builder.note_contained(f"the verdict on job {job.id}", in_words(error))
    relocation.move_to_cheaper()
    machine_verdicts.finish()
    builder.wake(min([now + world.policy.recheck_every, *placement.catalogue.waits]))
    return replace(builder.plan(), verdicts=placement.verdicts)


def _explain_running(placement: JobPlacement, job: Job, item: Attempt | None) -> None:
    stopping = job.state is JobState.CANCELLING or (item is not None and item.stop is not None)
    is_held = item is not None and item.bidding.held_since is not None
    placement.verdicts[job.id] = Verdict(
        job=job.id,
        kind=VerdictKind.STOPPING if stopping else VerdictKind.HELD if is_held else VerdictKind.RUNNING,
        sentence=job.reason if item is None else _running_words(placement, job, item),
        at=placement.now,
        best=item.quote if item is not None else None,
        ceiling=item.ceiling_now if item is not None else None,
    )


def _running_words(placement: JobPlacement, job: Job, item: Attempt) -> str:
    held = hold_words(item, placement.policy, placement.now)
    words = f"{held or job.reason}; agreed at {quote_words(item.quote)}"
    for note in (
        placement.pacer.words(job),
        placement.machine_verdicts.words(job),
        closing_words(job, item, placement.now),
        witness_words(item, placement.policy, placement.now),
        late_words(item.freshness, job.checkpoints[0].name if job.checkpoints else "", placement.now),
    ):
        if note:
            words = f"{words}; {note}"
    return words


def _serving_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(
        jobs,
        key=lambda j: (-j.spec.priority, j.state is not JobState.RECOVERING, j.submitted_at, j.id),
    )
