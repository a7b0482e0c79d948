"""How the daemon and its providers are: status, providers, reconcile."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Final

import anyio

from spotd.api.handlers.context import ContextHandlers
from spotd.api.handlers.listing_anomalies import anomalies_of
from spotd.api.handlers.render import usd
from spotd.api.schemas.health import (
    AccountResponse,
    CapabilityResponse,
    ListingResponse,
    ProviderResponse,
    ReconcileResponse,
    StatusResponse,
)
from spotd.api.timestamps import instant, utc_text
from spotd.core.billing.prepaid import current_balance, spending_rate
from spotd.core.domain.market import ProviderOffers
from spotd.core.metering.metering import spent_in_month, spent_on_day
from spotd.daemon.market.provider_entry import ProviderEntry
from spotd.daemon.market.request_counts import RequestCounts
from spotd.store import Reads
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import InstanceState, ProviderName

CYCLE_DEADLINE_S: Final = 60.0
_NOTES: Final = ("host.note", "provider.", "history.")


class HealthHandlers(ContextHandlers):
    async def status(self) -> StatusResponse:
        """Return counts of jobs and machines, and what was spent."""
        context = self._context
        counts = await context.read(lambda reads: reads.counts_by_state())
        world, now = context.world(), context.clock.now()
        return StatusResponse(
            version=str(context.facts.get("version", "")),
            install=world.policy.install,
            pid=os.getpid(),
            started_at=utc_text(context.started_at),
            clock_scale=1 / context.clock.real_seconds(timedelta(seconds=1)),
            paused=context.why_paused,
            machines=sum(1 for a in world.attempts.values() if a.machine.may_compute and a.ref is not None),
            jobs={state.value: count for state, count in counts.items()},
            spent_day_usd=as_usd(spent_on_day(world, now)),
            spent_month_usd=as_usd(spent_in_month(world, now)),
        )

    async def providers(self) -> list[ProviderResponse]:
        return [self._provider(entry) for _, entry in sorted(self._context.providers.items())]

    def _provider(self, entry: ProviderEntry) -> ProviderResponse:
        offer_cache = self._context.offer_cache
        if entry.provider is None:
            return ProviderResponse(
                name=entry.name,
                title=entry.title,
                enabled=entry.enabled,
                ok=False,
                detail=entry.last_error or "disabled in the config",
                offers=0,
                machines=0,
                last_poll_at=None,
                last_listing_at=None,
                fee_multiplier=entry.fee_ppm / 1_000_000,
                requests_h=0,
                requests_min=0,
                balance_usd=None,
                balance_at=None,
                spend_usd_h=0.0,
                runway_s=None,
                capabilities=[],
            )
        now = self._context.clock.now()
        request_counts = RequestCounts() if entry.poller is None else entry.poller.request_counts
        provider_offers = offer_cache.snapshot().offer_cache[entry.name]
        seen = offer_cache.machines(entry.name)
        machines = 0 if seen.listing is None else sum(m.state is not InstanceState.GONE for m in seen.listing.instances)
        rules = self._context.policy.current.providers.get(entry.name)
        odd = anomalies_of(offer_cache, entry.name, self._context.clock, now)
        last_error = (rules.unusable if rules is not None else "") or provider_offers.error or seen.error
        offers = f"{provider_offers.offer_index.size} offers" if provider_offers.at is not None else "no answer yet"
        return ProviderResponse(
            name=entry.name,
            title=entry.title,
            enabled=entry.enabled,
            ok=not last_error and provider_offers.at is not None and not odd.is_unusable,
            detail="; ".join([last_error or offers, *odd.words]),
            offers=provider_offers.offer_index.size,
            machines=machines,
            last_poll_at=instant(provider_offers.at),
            last_listing_at=instant(seen.listing.at) if seen.listing is not None else None,
            fee_multiplier=(rules.fee_ppm if rules is not None else entry.fee_ppm) / 1_000_000,
            requests_h=request_counts.per_hour(now),
            requests_min=request_counts.last_minute(now),
            **self._account(provider_offers, now),
            capabilities=[
                CapabilityResponse(power=power.value, available=has.available, reason=has.reason)
                for power, has in sorted(entry.provider.capabilities.items())
            ],
        )

    def _account(self, provider_offers: ProviderOffers, now: datetime) -> AccountResponse:
        """Return what is left at a provider that is paid in advance, and how long it lasts."""
        name = provider_offers.provider
        state = self._context.control_loop.state
        attempts = () if state is None else state.world.attempts.values()
        stated = self._context.offer_cache.evidence.stated_balance(name)
        balance = current_balance(provider_offers, now)
        rate = sum(spending_rate(item) for item in attempts if item.provider == name)
        if stated is not None and stated[0].burn is not None:
            rate = max(rate, stated[0].burn)
        return AccountResponse(
            balance_usd=usd(balance),
            balance_at=None if balance is None else instant(provider_offers.balance_at),
            spend_usd_h=as_usd(rate),
            runway_s=None if balance is None or rate <= 0 else balance * 3600 / rate,
        )

    async def reconcile(self) -> ReconcileResponse:
        """List the machines of every provider now, and commit what follows."""
        context = self._context
        last = await context.read(Reads.last_event)
        running = {name: entry.poller for name, entry in context.providers.items() if entry.poller is not None}
        async with anyio.create_task_group() as group:
            for name, poller in sorted(running.items()):
                group.start_soon(poller.poll_machines, name=f"reconcile-{name}")
        listings = [self._listing(name) for name in sorted(running)]
        await context.control_loop.whole_cycle(seconds=CYCLE_DEADLINE_S)
        events = await context.read(lambda reads: reads.events(since=last))
        return ReconcileResponse(
            listings=listings,
            actions=[e.event.message for e in events if not e.event.kind.startswith(_NOTES)],
        )

    def _listing(self, name: ProviderName) -> ListingResponse:
        seen = self._context.offer_cache.machines(name)
        listing = seen.listing
        machines = () if listing is None else tuple(m for m in listing.instances if m.state is not InstanceState.GONE)
        return ListingResponse(
            provider=name,
            machines=len(machines),
            complete=listing is not None and listing.complete and not seen.error,
            error=seen.error,
        )
