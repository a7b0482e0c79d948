"""Which job gets which machine now, which machine must stop, and why every other job waits.

Theory. A decision is a list of rules (`RULES`), each of which adds to one plan. Running machines come first: the money
that is set aside to end them safely is still there. Then jobs that want a machine are served (`placement`) in order of
priority, lost hosts before newcomers, older before younger; what keeps a machine from a job is a list, too (`GATES`).
`docs/states.md` shows both lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core import gangs
from spotd.core.author import MachineVerdicts
from spotd.core.bids import hold_words
from spotd.core.budgets import BudgetGuard
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, Quote
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.enforcement import Enforcement
from spotd.core.host_reports import late_words, witness_words
from spotd.core.kernel.quarantine import contain, guarded, in_words
from spotd.core.pacer import enforce_deadlines
from spotd.core.placement import JobPlacement
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import quote_words
from spotd.core.relocation import Relocation
from spotd.core.running import turn_of
from spotd.core.schedule import closing_words, enforce_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the rules of one decision share: each reads it and the plan so far, and adds to the plan."""

    world: World
    builder: PlanBuilder
    machine_verdicts: MachineVerdicts
    placement: JobPlacement
    enforcement: Enforcement
    relocation: Relocation


def keep_budgets(decision: Decision) -> None:
    """Stop what would break a budget, while the money set aside to save is still there."""
    decision.enforcement.enforce_budgets()


def keep_ceilings(decision: Decision) -> None:
    """Stop what costs more than its job accepts today."""
    decision.enforcement.enforce_ceilings()


def keep_windows(decision: Decision) -> None:
    """Stop what has to be saved before its window closes."""
    enforce_windows(decision.builder, decision.world)


def keep_deadlines(decision: Decision) -> None:
    """Stop what is over by its deadline or `max_duration`."""
    enforce_deadlines(decision.builder, decision.world)


def keep_progress(decision: Decision) -> None:
    """Stop what gets nowhere by the limits of `[watchdog]`."""
    decision.enforcement.enforce_progress()


def mend_gangs(decision: Decision) -> None:
    """Replace the machines that a job of several lost, or go on without them, or end all."""
    builder = decision.builder
    for item in gangs.gangs_to_mend(builder):
        what = f"the machines of attempt {item.id.number} cannot be judged"
        contain(builder, item.id.job, partial(gangs.mend, builder, item), what)


def follow_bids(decision: Decision) -> None:
    """Raise bids that are about to lose, lower what is paid too much, end what was held for long enough."""
    decision.relocation.change_bids()


def serve_jobs(decision: Decision) -> None:
    """Place each job that wants a machine, and keep the pace of each that has one, in the order of their turns."""
    builder, placement = decision.builder, decision.placement
    for job in _serving_order(decision.world.jobs.values()):
        if builder.job(job.id).state.is_final:
            continue  # quarantined by a former rule, or over
        if job.state.may_be_placed:
            placement.place(job)
            continue
        item = next((a for a in placement.attempts_by_job[job.id] if a.state.counts), None)
        if placement.pacer.keep_pace(job, item):
            _explain(decision, job, item)


def leave_held(decision: Decision) -> None:
    """Leave outbid machines that are not worth waiting for, unless a job that was not served gets their place."""
    for item in decision.relocation.leave_held():
        if item.id.job in decision.placement.verdicts:
            _explain(decision, decision.world.jobs[item.id.job], item)


def release_machines(decision: Decision) -> None:
    """End machines that wait for a job where something forbids that, or a job lacks their place or their money."""
    decision.placement.waiting.release(decision.placement.verdicts.values())


def move_to_cheaper(decision: Decision) -> None:
    """Stop what goes on elsewhere for clearly less."""
    decision.relocation.move_to_cheaper()


def settle_verdicts(decision: Decision) -> None:
    """Order what was decided about each machine, by the row of its verdict in the table of `running`."""
    decision.machine_verdicts.finish()


Rule = Callable[[Decision], None]
RULES: Final[tuple[Rule, ...]] = (
    keep_budgets,
    keep_ceilings,
    keep_windows,
    keep_deadlines,
    keep_progress,
    mend_gangs,
    follow_bids,
    serve_jobs,
    leave_held,
    release_machines,
    move_to_cheaper,
    settle_verdicts,
)
"""What stops machines comes first: the next rules judge only what goes on, and new machines get what is left."""


def decide(world: World, market: MarketSnapshot, now: datetime) -> Plan:
    """Return launches, stop orders and one verdict per job."""
    return guarded(lambda some: _decide(some, market, now), world, now)


def _decide(world: World, market: MarketSnapshot, now: datetime) -> Plan:
    builder, budget_guard = PlanBuilder(world, now), BudgetGuard(world, now)
    machine_verdicts = MachineVerdicts(builder, world, market)
    placement = JobPlacement(builder, world, market, budget_guard, machine_verdicts)
    decision = Decision(
        world=world,
        builder=builder,
        machine_verdicts=machine_verdicts,
        placement=placement,
        enforcement=Enforcement(builder, world, budget_guard, machine_verdicts),
        relocation=Relocation(placement),
    )
    for rule in RULES:
        rule(decision)
    builder.wake(min([now + world.policy.recheck_every, *placement.catalogue.waits]))
    plan = replace(builder.plan(), verdicts=placement.verdicts)
    placement.end()
    return plan


def _explain(decision: Decision, job: Job, item: Attempt | None) -> None:
    builder = decision.builder
    if (error := builder.attempted(partial(_explain_running, decision.placement, job, item))) is not None:
        builder.note_contained(f"the verdict on job {job.id}", in_words(error))


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
    words = f"{held or job.reason}; agreed at {_agreed_words(item.quote)}"
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


_AGREED_MAX: Final = 2_000
_agreed: dict[int, tuple[Quote, str]] = {}
"""The words on quotes of machines that run, by the identity of the quote, which is kept with them and never changes."""


def _agreed_words(quote: Quote) -> str:
    """Return the quote in words, which a machine has for as long as it lives."""
    known = _agreed.get(id(quote))
    if known is not None and known[0] is quote:
        return known[1]
    if len(_agreed) >= _AGREED_MAX:
        _agreed.clear()
    words = quote_words(quote)
    _agreed[id(quote)] = quote, words
    return words


def _serving_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(jobs, key=turn_of)
