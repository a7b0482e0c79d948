"""How the daemon and its providers are: status, providers, reconcile."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import anyio

from spotd.api.handlers.context import DaemonAnswers
from spotd.api.handlers.render import usd
from spotd.api.requests import instant, utc_text
from spotd.api.responses import NotFound
from spotd.api.schemas import answers
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.market import ProviderOffers
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import ONE, World
from spotd.core.experience import HostMemory, host_memories, host_of, records_of_host
from spotd.core.metering import machines_of, spent_in_month, spent_on_day
from spotd.core.prepaid import current_balance, spending_rate
from spotd.core.working_copy import forget_host
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.pollers import HourlyRate, ProviderEntry
from spotd.store import Reads
from spotd.words import count
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import InstanceState, Listing, OfferPage, ProviderName, as_usd

# What is odd about a provider that answers: too slowly, or nonsense.
#
# One that fails shows an error. One that answers and cannot be relied on must be named as well, or a person
# searches for the cause of a waiting job everywhere else.


SLOW_REAL_S: Final = 10.0
"""Longer than any of the marketplaces needs for its largest page; half a minute is patience, not health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingAnomalies:
    """Anomalies in words. `is_unusable` when what it lists cannot be worked with, and not only some of it."""

    words: tuple[str, ...] = ()
    is_unusable: bool = False


def anomalies_of(offer_cache: OfferCache, name: ProviderName, clock: Clock, now: datetime) -> ListingAnomalies:
    """Return what a person should know of this provider besides its errors."""
    words: list[str] = []
    unusable = False
    asked_at = offer_cache.asked_since(name)
    waited_s = 0.0 if asked_at is None else clock.real_seconds(now - asked_at)
    took_s = clock.real_seconds(offer_cache.took(name))
    if waited_s >= SLOW_REAL_S:
        words.append(f"has not answered for {waited_s:.0f} s")
    elif took_s >= SLOW_REAL_S:
        words.append(f"answers slowly: the newest answer took {took_s:.0f} s")
    page = offer_cache.page(name)
    if page is not None:
        nonsense = _nonsense(page)
        if nonsense:
            words.append(nonsense)
            unusable = not page.offers and not page.whole
    seen = offer_cache.machines(name)
    if seen.listing is not None and not seen.error:
        if not seen.listing.complete:
            words.append("its list of machines is not complete, and proves no machine's end" + _why(seen.listing))
            unusable = True
        odd = [m for m in seen.listing.instances if m.state is InstanceState.UNKNOWN]
        if odd:
            words.append(
                f"shows {len(odd)} of our machines in no state that is known: {odd[0].detail or 'without a word'}"
            )
    return ListingAnomalies(words=tuple(words), is_unusable=unusable)


def notes_of(offer_cache: OfferCache, clock: Clock) -> dict[ProviderName, str]:
    """Return a sentence for every provider with an anomaly, or that does not list its machines."""
    now = clock.now()
    notes = {}
    for name, provider_offers in offer_cache.snapshot().by_provider.items():
        unlisted = offer_cache.machines(name).error
        words = [f"its machines cannot be listed: {unlisted}"] if unlisted and unlisted != provider_offers.error else []
        notes[name] = "; ".join([*words, *anomalies_of(offer_cache, name, clock, now).words])
    return notes


def _why(listing: Listing) -> str:
    refused = listing.rejected
    return f" ({len(refused)} rows cannot be read: {refused[0].reason})" if refused else ""


def _nonsense(page: OfferPage) -> str:
    if not page.rejected or page.note:
        return page.note or ("" if page.complete else "its answer about prices is cut off or garbled")
    rows = len(page.rejected)
    reason = Counter(row.reason for row in page.rejected).most_common(1)[0][0]
    return f"{rows} of {rows + len(page.offers)} rows about prices cannot be used, most often: {reason}"


CYCLE_DEADLINE_S: Final = 60.0
_NOTES: Final = ("host.note", "provider.", "history.")


class HealthHandlers(DaemonAnswers):
    async def status(self) -> answers.StatusResponse:
        """Return counts of jobs and machines, and what was spent."""
        context = self._context
        counts = await context.read(lambda reads: reads.counts_by_state())
        world, now = context.world(), context.clock.now()
        return answers.StatusResponse(
            version=str(context.facts.get("version", "")),
            install=world.policy.install,
            pid=os.getpid(),
            started_at=utc_text(context.started_at),
            clock_scale=1 / context.clock.real_seconds(timedelta(seconds=1)),
            paused=context.why_paused,
            machines=machines_of(a for a in world.attempts.values() if a.machine.may_compute and a.ref is not None),
            jobs={state.value: count for state, count in counts.items()},
            spent_day_usd=as_usd(spent_on_day(world, now)),
            spent_month_usd=as_usd(spent_in_month(world, now)),
        )

    async def providers(self) -> list[answers.ProviderResponse]:
        return [self._provider(entry) for _, entry in sorted(self._context.providers.items())]

    def _provider(self, entry: ProviderEntry) -> answers.ProviderResponse:
        offer_cache = self._context.offer_cache
        if entry.provider is None:
            return answers.ProviderResponse(
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
        request_counts = HourlyRate() if entry.poller is None else entry.poller.request_counts
        provider_offers = offer_cache.snapshot().by_provider[entry.name]
        seen = offer_cache.machines(entry.name)
        rules = self._context.policy.current.providers.get(entry.name)
        odd = anomalies_of(offer_cache, entry.name, self._context.clock, now)
        last_error = (rules.unusable if rules is not None else "") or provider_offers.error or seen.error
        known = provider_offers.at is not None
        offers = count(provider_offers.offer_index.size, "offer") if known else "no answer yet"
        return answers.ProviderResponse(
            name=entry.name,
            title=entry.title,
            enabled=entry.enabled,
            ok=not last_error and provider_offers.at is not None and not odd.is_unusable,
            detail="; ".join([last_error or offers, *odd.words]),
            offers=provider_offers.offer_index.size,
            machines=self._count(seen.listing),
            last_poll_at=instant(provider_offers.at),
            last_listing_at=instant(seen.listing.at) if seen.listing is not None else None,
            fee_multiplier=(rules.fee_ppm if rules is not None else entry.fee_ppm) / 1_000_000,
            requests_h=request_counts.per_hour(now),
            requests_min=request_counts.last_minute(now),
            **self._account(provider_offers, now),
            capabilities=[
                answers.CapabilityResponse(power=power.value, available=has.available, reason=has.reason)
                for power, has in sorted(entry.provider.capabilities.items())
            ],
        )

    def _account(self, provider_offers: ProviderOffers, now: datetime) -> answers.AccountResponse:
        """Return what is left at a provider that is paid in advance, and how long it lasts."""
        name = provider_offers.provider
        state = self._context.control_loop.state
        attempts = () if state is None else state.world.attempts.values()
        stated = self._context.offer_cache.evidence.stated_balance(name)
        balance = current_balance(provider_offers, now)
        rate = sum(spending_rate(item) for item in attempts if item.provider == name)
        if stated is not None and stated[0].burn is not None:
            rate = max(rate, stated[0].burn)
        return answers.AccountResponse(
            balance_usd=usd(balance),
            balance_at=None if balance is None else instant(provider_offers.balance_at),
            spend_usd_h=as_usd(rate),
            runway_s=None if balance is None or rate <= 0 else balance * 3600 / rate,
        )

    async def reconcile(self) -> answers.ReconcileResponse:
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
        return answers.ReconcileResponse(
            listings=listings,
            actions=[e.event.message for e in events if not e.event.kind.startswith(_NOTES)],
        )

    def _count(self, listing: Listing | None) -> int:
        """Return how many machines a list shows: of several as one, as many as their attempt has."""
        state = self._context.control_loop.state
        known = {} if state is None else {item.carried_key: item for item in state.world.attempts.values()}
        there = () if listing is None else (m for m in listing.instances if m.state is not InstanceState.GONE)
        return sum(machines_of([known[m.key]]) if m.key in known else 1 for m in there)

    def _listing(self, name: ProviderName) -> answers.ListingResponse:
        seen = self._context.offer_cache.machines(name)
        listing = seen.listing
        return answers.ListingResponse(
            provider=name,
            machines=self._count(listing),
            complete=listing is not None and listing.complete and not seen.error,
            error=seen.error,
        )


# What is remembered of hosts, and forgetting it.


HOSTS_MAX: Final = 200
"""So many are shown, the worst first."""


class HostHandlers(DaemonAnswers):
    async def hosts(self) -> answers.HostsResponse:
        """Return what is remembered of each host, the worst first."""
        world, now = self._context.world(), self._context.clock.now()
        known = await self._context.read(lambda reads: reads.experience())
        found = host_memories(known, now)
        cooling = {
            (c.provider, c.subject): c.until for c in world.cooldowns if c.scope is CooldownScope.HOST and c.until > now
        }
        shown = [_response(one, cooling.get((one.provider, one.host))) for one in found[:HOSTS_MAX]]
        return answers.HostsResponse(hosts=shown, more=len(found) > HOSTS_MAX)

    async def forget(self, host: str) -> list[answers.ForgottenHostResponse]:
        """Forget the faults and losses of a host, named `HOST` or `PROVIDER/HOST`.

        Raises:
            NotFound: nothing is remembered of such a host.
        """
        names: set[tuple[str, str]] = set()

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            names.update((i.provider, host_of(i)) for i in records_of_host(world.experience, host))
            if not names:
                raise NotFound(f"nothing is remembered of a host {host!r}", hint="spotctl providers --hosts")
            return forget_host(world, host, now)

        await self._context.commit(decide)
        self._context.log.info("host.forgotten", host=host)
        return [answers.ForgottenHostResponse(provider=provider, host=name) for provider, name in sorted(names)]


def _response(one: HostMemory, cools_until: datetime | None) -> answers.HostResponse:
    return answers.HostResponse(
        provider=one.provider,
        host=one.host,
        failed_starts=round(one.failed_starts / ONE, 2),
        slow_starts=round(one.slow_starts / ONE, 2),
        early_losses=round(one.early_losses / ONE, 2),
        losses=round(one.losses / ONE, 2),
        machine_h=round(one.hours.total_seconds() / 3600, 2),
        ranks_behind=one.malus_ppm / 1_000_000,
        at=utc_text(one.at),
        cools_until=instant(cools_until),
    )
