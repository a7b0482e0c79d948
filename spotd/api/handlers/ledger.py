"""What everything cost, added up by job, day, provider, GPU or host: the booked sums, and what runs on meters now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from spotd.api.handlers.context import ContextHandlers
from spotd.api.schemas.costs import CalibrationResponse, CostGroupResponse, LedgerResponse
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import CostSums, added_up
from spotd.core.metering.calibration import BilledMachine, calibration
from spotd.core.metering.metering import unsettled_sums
from spotd.core.pricing.effective_price import PPM
from spotd.store import CostGroup, CostGrouping, Reads
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import Power, ProviderName

GROUPS_MAX: Final = 10_000
BILLS_MAX: Final = 5_000
"""The newest bills, from which a fee is measured."""
OTHERS: Final = "(others)"
"""What the groups beyond the largest are added up to."""


class LedgerHandlers(ContextHandlers):
    async def groups(self, by: CostGrouping) -> LedgerResponse:
        """Return the sums of each group and of all, from two statements however much there is."""
        now = self._context.clock.now()
        return await self._context.read(lambda reads: _ledger(reads, by, now))

    async def calibrations(self) -> list[CalibrationResponse]:
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

    def _calibration(self, name: ProviderName, machines: list[BilledMachine], fee_ppm: int) -> CalibrationResponse:
        found = calibration(machines, fee_ppm)
        return CalibrationResponse(
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


def _ledger(reads: Reads, by: CostGrouping, now: datetime) -> LedgerResponse:
    found = {group.key: group for group in reads.cost_groups(by)}
    for item, name in reads.open_attempts():
        _add_running(found, by, item, name, now)
    groups = _in_order(found.values(), by)
    total = _together("total", groups, by)
    return LedgerResponse(by=by.value, groups=[_response(group) for group in groups], total=_response(total))


def _add_running(found: dict[str, CostGroup], by: CostGrouping, item: Attempt, name: str, now: datetime) -> None:
    """Add what of this attempt is not booked yet; a machine without anything booked is counted here."""
    is_new = item.meter.settled == 0 and item.on_demand_settled == 0
    for day, sums in unsettled_sums(item, now).items():
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


def _response(group: CostGroup) -> CostGroupResponse:
    sums = group.sums
    return CostGroupResponse(
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
