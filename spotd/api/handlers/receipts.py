"""Receipts: what jobs cost, what that saved, and where the budgets stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.api.handlers.context import DaemonAnswers
from spotd.api.handlers.render import usd
from spotd.api.requests import instant, utc_text
from spotd.api.schemas import costs as schemas
from spotd.core.budgets import committed
from spotd.core.calibration import BilledMachine, calibration
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, CostSums, Intent, JobId, added_up
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Event
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.core.metering import (
    compared_cost,
    is_estimate,
    machines_in_use,
    on_demand_spent,
    spent,
    spent_in_month,
    spent_on_day,
    stray_cost,
    unsettled_sums,
)
from spotd.core.pricing import PPM, dollar_words, egress_cost, market_word, moved_cost
from spotd.store import CostGroup, CostGrouping, JobView, Reads, Totals
from spotd_providers.contract.values import MicroUsd, Power, ProviderName, as_usd

FALLBACK: Final = "checkpoint.fallback"
BILLED: Final = "attempt.billed"
RECEIPTS_MAX: Final = 50
"""Receipts of one answer; the sums of older jobs are in its totals."""


class ReceiptHandlers(DaemonAnswers):
    async def cost(self, ref: str | None) -> schemas.CostResponse:
        """Return the receipt of one job, or of all, or of an array."""
        now = self._context.clock.now()
        if ref is not None and (array := await self._context.find_array(ref)) is not None:
            return await self._of_array(array, now)
        wanted = None if ref is None else await self._context.find(ref)

        def work(
            reads: Reads,
        ) -> tuple[Sequence[JobView], list[schemas.ReceiptResponse], Totals | None, tuple[Intent, ...]]:
            if wanted is None:
                # Jobs that go on first, since their money is still being spent; last those that had no machine yet.
                open_jobs = reads.jobs(active=True)
                begun = [view for view in open_jobs if view.attempts_made]
                room = max(0, RECEIPTS_MAX - len(begun))
                chosen = [*begun, *(reads.ended_jobs(limit=room) if room else ())]
                chosen = [*chosen, *(view for view in open_jobs if not view.attempts_made)][:RECEIPTS_MAX]
                views = sorted(chosen, key=lambda view: (view.submitted_at, view.id), reverse=True)
                return views, _receipts(reads, views, now), reads.totals(), reads.strays()
            one = reads.job_view(wanted)
            views = [one] if one is not None else []
            return views, _receipts(reads, views, now), None, ()

        views, receipts, totals, strays = await self._context.read(work)
        if totals is None or totals.jobs <= len(receipts):
            return self._answer(receipts, _sums_of(views, now), strays, now)
        return self._answer(receipts, self._with_running(totals, now), strays, now)

    async def _of_array(self, array: JobId, now: datetime) -> schemas.CostResponse:
        """Return the receipts of those jobs of the array that cost most, with the sums of all."""

        def work(reads: Reads) -> tuple[tuple[JobView, ...], list[schemas.ReceiptResponse]]:
            views = reads.array_jobs(array)
            most = sorted(views, key=lambda view: (-view.spent_at(now), view.id))[:RECEIPTS_MAX]
            return views, _receipts(reads, sorted(most, key=lambda view: view.id), now)

        views, receipts = await self._context.read(work)
        return self._answer(receipts, _sums_of(views, now), (), now)

    def _with_running(self, totals: Totals, now: datetime) -> Totals:
        """Return the sums of all jobs: what is booked, and what still runs on a meter."""
        world = self._context.world()
        running = world.attempts.values()
        states = {job.id: job.state for job in world.jobs.values()}
        sums = added_up([s for a in running for s in unsettled_sums(a, now, states.get(a.id.job)).values()])
        return replace(
            totals,
            spent=MicroUsd(totals.spent + sums.amount),
            on_demand=MicroUsd(totals.on_demand + sums.on_demand),
            uncompared=MicroUsd(totals.uncompared + sums.uncompared),
            estimated=totals.estimated + sum(is_estimate(a, spent(a, now)) for a in running),
        )

    def _answer(
        self, receipts: list[schemas.ReceiptResponse], sums: Totals, strays: tuple[Intent, ...], now: datetime
    ) -> schemas.CostResponse:
        return schemas.CostResponse(
            receipts=receipts,
            more=sums.jobs - len(receipts),
            spent_usd=as_usd(sums.spent),
            estimated=sums.estimated > 0 and sums.spent != 0,
            on_demand_usd=as_usd(sums.on_demand),
            saved_usd=as_usd(sums.on_demand - sums.spent),
            uncompared_usd=as_usd(sums.uncompared),
            recoveries=sums.recoveries,
            lost_s=sums.lost.total_seconds(),
            budgets=budget_responses(self._context.world(), now),
            strays=_strays(strays, now),
        )


def _sums_of(views: Sequence[JobView], now: datetime) -> Totals:
    return Totals(
        jobs=len(views),
        spent=MicroUsd(sum(view.spent_at(now) for view in views)),
        on_demand=MicroUsd(sum(view.on_demand_at(now) for view in views)),
        uncompared=MicroUsd(sum(view.uncompared_at(now) for view in views)),
        estimated=sum(view.is_estimated for view in views),
        recoveries=sum(view.recoveries for view in views),
        lost=sum((view.lost for view in views), timedelta()),
    )


def _receipts(reads: Reads, views: Sequence[JobView], now: datetime) -> list[schemas.ReceiptResponse]:
    """Return a receipt for each of these jobs, from a fixed number of queries whatever they cost."""
    ids = [view.id for view in views]
    fallbacks: defaultdict[JobId | None, list[Event]] = defaultdict(list)
    corrected: defaultdict[JobId | None, list[Event]] = defaultdict(list)
    for item in reads.events_of_jobs((FALLBACK, BILLED), ids):
        (fallbacks if item.event.kind == FALLBACK else corrected)[item.event.job].append(item.event)
    attempts, costs, jobs = reads.attempts_of_jobs(ids), reads.attempt_costs(ids), reads.jobs_by_id(ids)
    return [
        _receipt(view, jobs.get(view.id), attempts.get(view.id, ()), costs, fallbacks[view.id], corrected[view.id], now)
        for view in views
    ]


def _strays(ends: Iterable[Intent], now: datetime) -> list[schemas.StrayResponse]:
    """Return what machines cost that no job pays for, by provider."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for end in ends:
        found[end.provider].append(stray_cost(end, end.accepted_at or now))
    return [
        schemas.StrayResponse(provider=provider, machines=len(costs), spent_usd=as_usd(sum(costs)), estimated=True)
        for provider, costs in sorted(found.items())
    ]


def _receipt(
    view: JobView,
    job: Job | None,
    attempts: tuple[Attempt, ...],
    costs: Mapping[AttemptId, CostSums],
    fallbacks: list[Event],
    corrections: list[Event],
    now: datetime,
) -> schemas.ReceiptResponse:
    own = {item.id: _sums(item, costs, now) for item in attempts}
    aside = {i.number: sums for i, sums in costs.items() if i.job == view.id and i not in own}
    total = sum(spent(a, now) for a in attempts) + sum(sums.amount for sums in aside.values())
    on_demand = sum(on_demand_spent(a, now) for a in attempts) + sum(sums.on_demand for sums in aside.values())
    compared = compared_cost(view.state, MicroUsd(total), MicroUsd(on_demand))
    return schemas.ReceiptResponse(
        id=view.id,
        name=view.name,
        state=view.state.value,
        spent_usd=as_usd(total),
        estimated=total != 0 and (view.is_estimated or bool(aside)),
        on_demand_usd=as_usd(compared),
        saved_usd=as_usd(compared - total),
        own_saved_usd=_savings_of_own(view, attempts, now),
        recoveries=view.recoveries,
        lost_s=view.lost.total_seconds(),
        budget_usd=usd(job.budget) if job is not None else None,
        attempts=[_line(item, own[item.id], now) for item in attempts],
        fallbacks=[_fallback(event) for event in fallbacks],
        corrections=[event.message for event in corrections] + [_aside_words(n, s) for n, s in sorted(aside.items())],
        uncompared_usd=as_usd(view.uncompared_at(now)),
        summary=view.closing_words(now),
    )


def _savings_of_own(view: JobView, attempts: Sequence[Attempt], now: datetime) -> float | None:
    """Return what own machines cost less than renting would have; `None` where none was used, or nothing compares."""
    own = [item for item in attempts if item.quote.is_own and item.quote.on_demand is not None]
    if not own or view.state is JobState.FAILED:
        return None
    return as_usd(sum(on_demand_spent(item, now) - spent(item, now) for item in own))


def _sums(item: Attempt, costs: Mapping[AttemptId, CostSums], now: datetime) -> CostSums:
    """Return what is booked for the attempt, and what runs on its meter."""
    return sum(unsettled_sums(item, now).values(), start=costs.get(item.id, CostSums()))


def _aside_words(number: int, sums: CostSums) -> str:
    booked = dollar_words(sums.amount)
    return f"the row of attempt {number} cannot be understood: {booked} booked for it is in the sum, its line left out"


def _fallback(event: Event) -> schemas.FallbackResponse:
    after = event.data.get("next")
    return schemas.FallbackResponse(
        attempt=event.attempt or 0,
        name=str(event.data.get("name")),
        reason=str(event.data.get("reason")),
        next=None if after is None else str(after),
        at=utc_text(event.at),
    )


def _line(item: Attempt, sums: CostSums, now: datetime) -> schemas.AttemptCostResponse:
    offer = item.quote.offer
    kept = None if item.members is None else item.members.going_on(spent(item, now), now, item.intended_at)
    return schemas.AttemptCostResponse(
        attempt=item.id.number,
        provider=offer.provider,
        host=offer.host_id or offer.offer_id,
        gpu=offer.gpu,
        gpu_count=offer.gpu_count,
        nodes=offer.nodes,
        market=market_word(item.quote),
        effective_usd_h=as_usd(item.quote.price.total),
        on_demand_usd_h=usd(item.quote.on_demand),
        started_at=instant(item.launched_at),
        ended_at=instant(item.ended_at),
        seconds=sums.billed.total_seconds(),
        spent_usd=as_usd(spent(item, now)),
        estimated=is_estimate(item, spent(item, now)),
        free_usd=as_usd(sums.free),
        on_demand_usd=as_usd(on_demand_spent(item, now)),
        traffic_usd=as_usd(moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes)),
        egress_usd=as_usd(egress_cost(item.quote, item.restored_bytes)),
        uploaded_bytes=item.uploaded_bytes,
        restored_bytes=item.restored_bytes,
        reason=None if item.end_reason is None else item.end_reason.value,
        gpu_usd=as_usd(sums.gpu),
        disk_usd=as_usd(sums.disk),
        fee_usd=as_usd(sums.fee),
        corrected_usd=as_usd(sums.corrected),
        billed_usd=usd(item.bill.believed),
        kept_s=0.0 if kept is None else kept.kept_for.total_seconds(),
        kept_usd=0.0 if kept is None else as_usd(kept.kept_cost),
    )


def budget_responses(world: World, now: datetime) -> list[schemas.BudgetResponse]:
    """Return the day, the month and the number of machines, each with what is promised on top of what is used."""
    policy = world.policy
    promised = as_usd(sum(committed(world, a, now) for a in world.attempts.values()))
    return [
        schemas.BudgetResponse(
            name="day", used=as_usd(spent_on_day(world, now)), committed=promised, limit=usd(policy.budget_day)
        ),
        schemas.BudgetResponse(
            name="month", used=as_usd(spent_in_month(world, now)), committed=promised, limit=usd(policy.budget_month)
        ),
        schemas.BudgetResponse(
            name="machines", used=float(machines_in_use(world, now)), committed=0.0, limit=float(policy.machines_max)
        ),
    ]


# What everything cost, added up by job, day, provider, GPU or host: the booked sums, and what runs on meters now.


GROUPS_MAX: Final = 10_000
BILLS_MAX: Final = 5_000
"""The newest bills, from which a fee is measured."""
OTHERS: Final = "(others)"
"""What the groups beyond the largest are added up to."""


class LedgerHandlers(DaemonAnswers):
    async def groups(self, by: CostGrouping) -> schemas.LedgerResponse:
        """Return the sums of each group and of all, from two statements however much there is."""
        now = self._context.clock.now()
        return await self._context.read(lambda reads: _ledger(reads, by, now))

    async def calibrations(self) -> list[schemas.CalibrationResponse]:
        """Return what the bills of each provider say of its fee, or why nothing can be said."""
        machines = await self._context.read(lambda reads: reads.billed_machines(limit=BILLS_MAX))
        by_provider: defaultdict[ProviderName, list[BilledMachine]] = defaultdict(list)
        for one in machines:
            by_provider[one.provider].append(one)
        policy = self._context.policy.current
        entries = self._context.providers
        fees = {name: entry.fee_ppm for name, entry in entries.items() if entry.enabled or name in by_provider}
        fees |= {name: rules.fee_ppm for name, rules in policy.providers.items() if name in fees}
        return [self._calibration(name, by_provider[name], fee_ppm) for name, fee_ppm in sorted(fees.items())]

    def _calibration(
        self, name: ProviderName, machines: list[BilledMachine], fee_ppm: int
    ) -> schemas.CalibrationResponse:
        found = calibration(machines, fee_ppm)
        return schemas.CalibrationResponse(
            provider=name,
            machines=found.machines,
            booked_usd=as_usd(found.booked),
            billed_usd=as_usd(found.billed),
            fee_multiplier=fee_ppm / PPM,
            measured=None if found.measured_ppm is None else found.measured_ppm / PPM,
            spread=None if found.spread_ppm is None else found.spread_ppm / PPM,
            suggested=None if found.suggested_ppm is None else found.suggested_ppm / PPM,
            sentence=found.sentence if machines else self._why_no_bills(name) or found.sentence,
        )

    def _why_no_bills(self, name: ProviderName) -> str:
        provider = self._context.providers[name].provider
        power = None if provider is None else provider.capabilities.get(Power.BILLING)
        return "" if power is None or power.available else power.reason


def _ledger(reads: Reads, by: CostGrouping, now: datetime) -> schemas.LedgerResponse:
    found = {group.key: group for group in reads.cost_groups(by)}
    for item, name, state in reads.open_attempts():
        _add_running(found, by, item, name, state, now)
    groups = _in_order(found.values(), by)
    total = _together("total", groups, by)
    return schemas.LedgerResponse(by=by.value, groups=[_response(group) for group in groups], total=_response(total))


def _add_running(
    found: dict[str, CostGroup], by: CostGrouping, item: Attempt, name: str, state: JobState, now: datetime
) -> None:
    """Add what of this attempt is not booked yet; a machine without anything booked is counted here."""
    is_new = item.meter.settled == 0 and item.on_demand_settled == 0
    for day, sums in unsettled_sums(item, now, state).items():
        key = day.isoformat() if by is CostGrouping.DAY else _key_of(item, by)
        before = found.get(key)
        if before is None:
            label = name if by is CostGrouping.JOB else ""
            before = CostGroup(key=key, name=label, attempts=None if by is CostGrouping.DAY else 0, sums=CostSums())
        attempts = before.attempts if before.attempts is None else before.attempts + is_new
        is_estimated = before.is_estimated or sums.amount != 0
        found[key] = replace(before, attempts=attempts, is_estimated=is_estimated, sums=before.sums + sums)
        is_new = False


def _key_of(item: Attempt, by: CostGrouping) -> str:
    offer = item.quote.offer
    if by is CostGrouping.JOB:
        return item.id.job
    if by is CostGrouping.GPU:
        return offer.gpu
    return f"{offer.provider}/{offer.host_id or offer.offer_id}" if by is CostGrouping.HOST else offer.provider


def _in_order(found: Iterable[CostGroup], by: CostGrouping) -> list[CostGroup]:
    """Return the groups, days in order and the rest by what they cost; beyond a bound they are one."""
    groups = sorted(found, key=lambda group: (-group.sums.amount, group.key))
    if len(groups) > GROUPS_MAX:
        groups = [*groups[: GROUPS_MAX - 1], _together(OTHERS, groups[GROUPS_MAX - 1 :], by)]
    return sorted(groups, key=lambda group: group.key) if by is CostGrouping.DAY else groups


def _together(key: str, groups: Sequence[CostGroup], by: CostGrouping) -> CostGroup:
    attempts = None if by is CostGrouping.DAY else sum(group.attempts or 0 for group in groups)
    is_estimated = any(group.is_estimated for group in groups)
    sums = added_up([group.sums for group in groups])
    return CostGroup(key=key, attempts=attempts, is_estimated=is_estimated, sums=sums)


def _response(group: CostGroup) -> schemas.CostGroupResponse:
    sums = group.sums
    return schemas.CostGroupResponse(
        key=group.key,
        name=group.name,
        machines=group.attempts,
        seconds=sums.billed.total_seconds(),
        gpu_usd=as_usd(sums.gpu),
        disk_usd=as_usd(sums.disk),
        traffic_usd=as_usd(sums.traffic),
        fee_usd=as_usd(sums.fee),
        free_usd=as_usd(sums.free),
        booked_usd=as_usd(sums.booked),
        corrected_usd=as_usd(sums.corrected),
        spent_usd=as_usd(sums.amount),
        estimated=group.is_estimated,
        uncompared_usd=as_usd(sums.uncompared),
        on_demand_usd=as_usd(sums.on_demand),
        saved_usd=as_usd(sums.on_demand - sums.amount),
    )
