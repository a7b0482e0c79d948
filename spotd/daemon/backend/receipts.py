"""What jobs cost, what that saved, and where the budgets stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta

from spotd.api.shapes.costs import (
    AttemptCostShape,
    BudgetShape,
    CostShape,
    FallbackShape,
    ReceiptShape,
    StrayShape,
)
from spotd.api.words import utc_text
from spotd.core.budgets import committed
from spotd.core.metering import on_demand_spent, running_time, spent, spent_in_month, spent_on_day
from spotd.core.model import Attempt, Charge, Event, Intent, JobId, World
from spotd.core.pricing import traffic_cost
from spotd.core.strays import stray_cost
from spotd.core.taking import machines_in_use
from spotd.daemon.backend.parts import Parts
from spotd.daemon.backend.render import instant, usd
from spotd.store import JobView, Reads
from spotd_providers.contract.money import as_usd


class Receipts:
    """The part of the backend that knows money."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def cost(self, ref: str | None) -> CostShape:
        wanted = None if ref is None else await self._parts.find(ref)
        now = self._parts.clock.now()

        def work(reads: Reads) -> list[ReceiptShape]:
            told: defaultdict[JobId | None, list[Event]] = defaultdict(list)
            for item in reads.events_of_kind("checkpoint.fallback", job_id=wanted):
                told[item.event.job].append(item.event)
            corrected: defaultdict[JobId | None, list[Event]] = defaultdict(list)
            for item in reads.events_of_kind("attempt.billed", job_id=wanted):
                corrected[item.event.job].append(item.event)
            if wanted is None:
                views = reads.jobs()
            else:
                one = reads.job_view(wanted)
                views = (one,) if one is not None else ()
            return [_receipt(reads, view, told[view.id], corrected[view.id], now) for view in views]

        receipts = await self._parts.read(work)
        strays = () if wanted is not None else await self._parts.read(lambda reads: reads.strays())
        return CostShape(
            receipts=receipts,
            spent_usd=sum(r["spent_usd"] for r in receipts),
            on_demand_usd=sum(r["on_demand_usd"] for r in receipts),
            saved_usd=sum(r["saved_usd"] for r in receipts),
            recoveries=sum(r["recoveries"] for r in receipts),
            lost_s=sum(r["lost_s"] for r in receipts),
            budgets=budget_shapes(self._parts.world(), now),
            strays=_strays(strays, now),
        )


def _strays(ends: Iterable[Intent], now: datetime) -> list[StrayShape]:
    """What machines cost that no job pays for, by provider."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for end in ends:
        found[end.provider].append(stray_cost(end, end.accepted_at or now))
    return [
        StrayShape(provider=provider, machines=len(costs), spent_usd=as_usd(sum(costs)))
        for provider, costs in sorted(found.items())
    ]


def _receipt(
    reads: Reads, view: JobView, fallbacks: list[Event], corrections: list[Event], now: datetime
) -> ReceiptShape:
    attempts = reads.attempts_of(view.id)
    charges = reads.charges_of(view.id)
    seconds = _billed(charges, attempts, now)
    free: defaultdict[int, int] = defaultdict(int)
    for charge in charges:
        free[charge.attempt.number] += max(0, -charge.amount)
    for event in corrections:
        # Taken back because the provider bills less, not because it took the machine.
        free[event.attempt or 0] += min(0, int(event.data.get("amount_microusd") or 0))
    job = reads.job(view.id)
    total = sum(spent(a, now) for a in attempts)
    compared = sum(on_demand_spent(a, now) for a in attempts)
    return ReceiptShape(
        id=view.id,
        name=view.name,
        state=view.state.value,
        spent_usd=as_usd(total),
        on_demand_usd=as_usd(compared),
        saved_usd=as_usd(compared - total),
        recoveries=view.recoveries,
        lost_s=view.lost.total_seconds(),
        budget_usd=usd(job.budget) if job is not None else None,
        attempts=[_line(item, seconds[item.id.number], free[item.id.number], now) for item in attempts],
        fallbacks=[_fallback(event) for event in fallbacks],
        corrections=[event.message for event in corrections],
    )


def _fallback(event: Event) -> FallbackShape:
    after = event.data.get("next")
    return FallbackShape(
        attempt=event.attempt or 0,
        name=str(event.data.get("name")),
        reason=str(event.data.get("reason")),
        next=None if after is None else str(after),
        at=utc_text(event.at),
    )


def _billed(charges: Iterable[Charge], attempts: tuple[Attempt, ...], now: datetime) -> defaultdict[int, timedelta]:
    """Machine time that was metered, by attempt: what is booked and what still runs."""
    spans: defaultdict[int, timedelta] = defaultdict(timedelta)
    for charge in charges:
        spans[charge.attempt.number] += charge.end - charge.start
    for item in attempts:
        spans[item.id.number] += running_time(item.meter, now)
    return spans


def _line(item: Attempt, billed: timedelta, free: int, now: datetime) -> AttemptCostShape:
    offer = item.quote.offer
    return AttemptCostShape(
        attempt=item.id.number,
        provider=offer.provider,
        host=offer.host_id or offer.offer_id,
        gpu=offer.gpu,
        gpu_count=offer.gpu_count,
        market=offer.market.value,
        effective_usd_h=as_usd(item.quote.price.total),
        on_demand_usd_h=usd(item.quote.on_demand),
        started_at=instant(item.launched_at),
        ended_at=instant(item.ended_at),
        seconds=billed.total_seconds(),
        spent_usd=as_usd(spent(item, now)),
        free_usd=as_usd(free),
        on_demand_usd=as_usd(on_demand_spent(item, now)),
        traffic_usd=as_usd(traffic_cost(offer, item.uploaded_bytes, item.restored_bytes)),
        uploaded_bytes=item.uploaded_bytes,
        restored_bytes=item.restored_bytes,
        reason=None if item.end_reason is None else item.end_reason.value,
    )


def budget_shapes(world: World, now: datetime) -> list[BudgetShape]:
    """The day, the month and the number of machines, each with what is promised on top of what is used."""
    policy = world.policy
    promised = as_usd(sum(committed(world, a, now) for a in world.attempts.values()))
    return [
        BudgetShape(
            name="day", used=as_usd(spent_on_day(world, now)), committed=promised, limit=usd(policy.budget_day)
        ),
        BudgetShape(
            name="month", used=as_usd(spent_in_month(world, now)), committed=promised, limit=usd(policy.budget_month)
        ),
        BudgetShape(
            name="machines", used=float(machines_in_use(world, now)), committed=0.0, limit=float(policy.machines_max)
        ),
    ]
