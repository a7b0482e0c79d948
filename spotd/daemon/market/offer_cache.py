"""The last value of what each provider sells and of which of our machines it lists.

Pollers write here, the control loop and the API read. Nothing is queued: a newer answer replaces an older one, because
decisions depend on the world as it is and not on how it came about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from spotd.core.domain import market
from spotd.core.domain.cooldowns import CooldownEnd, may_wait_for_cause
from spotd.core.domain.jobs import Job, disk_gb_for
from spotd.core.domain.plan import Event
from spotd.core.domain.states import JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.daemon.controllers import INTERVAL_MIN_S, Controller, Pause, WakeEvent
from spotd_providers.contract import values
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited
from spotd_providers.contract.provider import Clock, KnowsBalance, Provider

# What is known of providers beyond their newest lists: whether a cause of refusals is over, and the lowest prices.


LOWS_LAST: Final = timedelta(days=7)
KINDS_MAX: Final = 10_000
HOSTS_MAX: Final = 1_000
Kind = tuple[str, int]


class Evidence:
    """Written by pollers and watches, read with each snapshot of the market."""

    def __init__(self) -> None:
        self.awaited: dict[values.ProviderName, frozenset[CooldownEnd]] = {}
        """What would end the cool-downs of each provider."""
        self.waits_for_balance = False
        """Whether a job waits until money was added at some provider."""
        self._balances: dict[values.ProviderName, values.MicroUsd] = {}
        self._stated: dict[values.ProviderName, tuple[values.Balance, datetime]] = {}
        self._credit_at: dict[values.ProviderName, datetime] = {}
        self._key_at: dict[values.ProviderName, datetime] = {}
        self._lows: dict[Kind, tuple[values.MicroUsdPerHour, datetime]] = {}
        self._seen: dict[values.ProviderName, dict[Kind, datetime]] = {}

    def update(self, world: World, now: datetime, verdicts: Iterable[Verdict] = ()) -> None:
        """Note what the cool-downs of this world, and its jobs, wait for."""
        self.waits_for_balance = any(verdict.kind is VerdictKind.BALANCE for verdict in verdicts)
        awaited: dict[values.ProviderName, set[CooldownEnd]] = {}
        for cooldown in world.cooldowns:
            if cooldown.until > now and cooldown.ends is not CooldownEnd.TIME:
                awaited.setdefault(cooldown.provider, set()).add(cooldown.ends)
        for provider, ends in awaited.items():
            if CooldownEnd.CREDIT in ends and CooldownEnd.CREDIT not in self.awaited.get(provider, ()):
                self._balances.pop(provider, None)  # what was left before this refusal is spent
        self.awaited = {provider: frozenset(ends) for provider, ends in awaited.items()}

    def credit_seen(self, provider: values.ProviderName, balance: values.MicroUsd, at: datetime) -> bool:
        """Whether the balance has risen; the first that is seen counts as risen where anything is left."""
        before = self._balances.get(provider, values.MicroUsd(0))
        self._balances[provider] = balance
        if balance <= before:
            return False
        self._credit_at[provider] = at
        return True

    def balance_stated(self, provider: values.ProviderName, balance: values.Balance, at: datetime) -> bool:
        """Record what is left in the account; return whether that is more than before. A debt is nothing left."""
        before = self._stated.get(provider)
        sane = replace(balance, available=values.MicroUsd(max(0, balance.available)))
        self._stated[provider] = sane, at
        return before is None or sane.available > before[0].available

    def stated_balance(self, provider: values.ProviderName) -> tuple[values.Balance, datetime] | None:
        """Return the newest balance that the provider stated, and when."""
        return self._stated.get(provider)

    def forget_balance(self, provider: values.ProviderName) -> None:
        """Forget what was stated with another key."""
        self._stated.pop(provider, None)

    def key_taken(self, provider: values.ProviderName, at: datetime) -> None:
        """Record an answer that the provider gives to its own users only, or that it was given another key."""
        self._key_at[provider] = at

    def prices_seen(self, offer_index: market.OfferIndex, at: datetime) -> None:
        """Keep the lowest price of each kind of machine."""
        for kind, group in offer_index.by_gpu.items():
            known = self._lows.get(kind)
            price = group[0].gpu_price
            if known is None and len(self._lows) >= KINDS_MAX:
                continue
            if known is None or price <= known[0] or at - known[1] > LOWS_LAST:
                self._lows[kind] = (price, at)

    def note_kinds(self, provider: values.ProviderName, kinds: Iterable[Kind], at: datetime) -> None:
        """Keep when a provider last offered these kinds of machine."""
        seen = self._seen.setdefault(provider, {})
        for kind in kinds:
            if kind in seen or len(seen) < KINDS_MAX:
                seen[kind] = max(at, seen.get(kind, at))

    def last_offers(self) -> Mapping[values.ProviderName, Mapping[Kind, datetime]]:
        return {provider: dict(kinds) for provider, kinds in self._seen.items()}

    def lows(self) -> Mapping[Kind, values.MicroUsdPerHour]:
        return {kind: price for kind, (price, _) in self._lows.items()}

    def on(self, provider_offers: market.ProviderOffers) -> market.ProviderOffers:
        """Return the offers with what is known of their provider's account."""
        name = provider_offers.provider
        credit_at, key_at, stated = self._credit_at.get(name), self._key_at.get(name), self._stated.get(name)
        if credit_at is None and key_at is None and stated is None:
            return provider_offers
        balance, balance_at = (None, None) if stated is None else (stated[0].available, stated[1])
        return replace(provider_offers, credit_at=credit_at, key_at=key_at, balance=balance, balance_at=balance_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedInstances:
    """What is known of a provider's machines: the newest listing, and the error of the newest try."""

    listing: values.Listing | None = None
    error: str = ""
    error_since: datetime | None = None


class OfferCache:
    """The newest offers and listing of each provider; `wake_event` is notified when anything changed."""

    def __init__(
        self,
        wake_event: WakeEvent,
        *,
        keep: Callable[[values.ProviderName, values.OfferPage, datetime], None] | None = None,
    ) -> None:
        self._wake_event = wake_event
        self._keep = keep
        """Handed every answer with its instant, for the history; must return at once."""
        self._by_provider: dict[values.ProviderName, market.ProviderOffers] = {}
        self._machines: dict[values.ProviderName, ObservedInstances] = {}
        self._pages: dict[values.ProviderName, values.OfferPage] = {}
        self._shown: dict[values.ProviderName, tuple[values.Offer, ...]] = {}
        self._bought: dict[tuple[values.ProviderName, values.OfferId], tuple[values.Offer, datetime]] = {}
        self._of_hosts: dict[tuple[values.ProviderName, values.HostId], frozenset[Kind]] = {}
        self._asked: dict[values.ProviderName, datetime] = {}
        self._took: dict[values.ProviderName, timedelta] = {}
        self._away: dict[values.ProviderName, str] = {}
        self._notes: list[Event] = []
        self.wanted: dict[values.ProviderName, frozenset[values.AttemptKey]] = {}
        """Keys whose machines must be searched for one by one, because a launch's outcome is unknown."""
        self.evidence = Evidence()
        self.watched: frozenset[values.ProviderName] = frozenset()
        """Providers where we have, or may have, machines."""
        self.awaits_list: Callable[[values.ProviderName], bool] = lambda provider: provider in self.watched
        """Whether a list says something new that is like the last one, but for its instant."""

    def wake(self) -> None:
        """Something is known that may change a decision."""
        self._wake_event.notify()

    def open(self, provider: values.ProviderName) -> None:
        """Give the provider an empty entry until its first answer."""
        self._by_provider[provider] = market.ProviderOffers(provider=provider)
        self._machines[provider] = ObservedInstances()

    def snapshot(self) -> market.MarketSnapshot:
        by_provider = {name: self.evidence.on(provider_offers) for name, provider_offers in self._by_provider.items()}
        readings = market.Readings(
            listed_at={name: seen.listing.at for name, seen in self._machines.items() if seen.listing is not None},
            away={name: seen.error for name, seen in self._machines.items() if seen.error},
        )
        return market.MarketSnapshot(
            by_provider=by_provider,
            lows=self.evidence.lows(),
            seen=self.evidence.last_offers(),
            of_hosts=dict(self._of_hosts),
            readings=readings,
        )

    def listings(self) -> Mapping[values.ProviderName, values.Listing]:
        """Return the newest listing of each provider that ever answered."""
        return {name: seen.listing for name, seen in self._machines.items() if seen.listing is not None}

    def machines(self, provider: values.ProviderName) -> ObservedInstances:
        return self._machines[provider]

    def page(self, provider: values.ProviderName) -> values.OfferPage | None:
        """Return the newest answer as it came, rejected rows included."""
        return self._pages.get(provider)

    def offers_asked(self, provider: values.ProviderName, *, at: datetime) -> None:
        """Record that a poll is under way since then."""
        self._asked[provider] = at

    def asked_since(self, provider: values.ProviderName) -> datetime | None:
        """Since when the poll that is under way waits for its answer."""
        return self._asked.get(provider)

    def took(self, provider: values.ProviderName) -> timedelta:
        """How long the newest answer took."""
        return self._took.get(provider, timedelta(0))

    def offers_answered(self, provider: values.ProviderName, *, at: datetime) -> None:
        """Record that the poll which was under way is over, well or not."""
        asked_at = self._asked.pop(provider, None)
        self._took[provider] = timedelta(0) if asked_at is None else at - asked_at

    def offers_seen(
        self,
        provider: values.ProviderName,
        page: values.OfferPage,
        *,
        asked_at: datetime,
        sells_spot: bool = True,
        changes_bids: bool = False,
        no_gangs: str = market.NO_GANGS,
        nodes_max: int = market.NODES_MAX,
    ) -> None:
        self._bought = {k: sale for k, sale in self._bought.items() if k[0] != provider or asked_at <= sale[1]}
        shown = self._unsold(provider, page)
        provider_offers = self._by_provider[provider]
        changed = (
            self._shown.get(provider) != shown
            or bool(provider_offers.error)
            or provider_offers.sells_spot != sells_spot
        )
        self._pages[provider], self._shown[provider] = page, shown
        offer_index = market.build_offer_index(shown) if changed else provider_offers.offer_index
        self._by_provider[provider] = market.ProviderOffers(
            provider=provider,
            offer_index=offer_index,
            at=asked_at,
            sells_spot=sells_spot,
            changes_bids=changes_bids,
            no_gangs=no_gangs,
            nodes_max=nodes_max,
            benchmarks=page.benchmarks,
        )
        if changed:
            self.evidence.prices_seen(offer_index, asked_at)
        self.evidence.note_kinds(provider, offer_index.by_gpu, asked_at)
        if changed or CooldownEnd.SHOWN in self.evidence.awaited.get(provider, frozenset()):
            self._wake_event.notify()
        if self._keep is not None:
            self._keep(provider, page, asked_at)

    def bought(self, offer: values.Offer, *, at: datetime) -> None:
        """Remove this offer until it is asked for again: a machine is sold once.

        Nor does it show the same GPUs of the same host in the other market. Pools, which are no one machine, stay.
        """
        if offer.host_id is None or offer.provider not in self._pages:
            return
        self._bought[offer.provider, offer.offer_id] = offer, at
        kinds = {(one.gpu, one.gpu_count) for one in self._pages[offer.provider].offers if one.host_id == offer.host_id}
        known = self._of_hosts.pop((offer.provider, offer.host_id), frozenset())
        self._of_hosts[offer.provider, offer.host_id] = known | kinds
        if len(self._of_hosts) > HOSTS_MAX:
            del self._of_hosts[next(iter(self._of_hosts))]
        shown = self._shown[offer.provider] = self._unsold(offer.provider, self._pages[offer.provider])
        self._by_provider[offer.provider] = replace(
            self._by_provider[offer.provider], offer_index=market.build_offer_index(shown)
        )

    def _unsold(self, provider: values.ProviderName, page: values.OfferPage) -> tuple[values.Offer, ...]:
        sold = [sale for sale, _ in self._bought.values() if sale.provider == provider]
        if not sold:
            return page.offers
        ids = {sale.offer_id for sale in sold}
        twins = {(o.host_id, o.gpu_count, market) for o in sold for market in values.Market if market is not o.market}
        left = _left_on_hosts(page, sold)
        return tuple(
            o
            for o in page.offers
            if o.offer_id not in ids
            and (o.host_id, o.gpu_count, o.market) not in twins
            and o.gpu_count <= left.get((o.host_id, o.gpu), o.gpu_count)
        )

    def offers_failed(self, provider: values.ProviderName, error: str, *, at: datetime) -> None:
        """Record the error. The last offers stay until their time-to-live ends."""
        provider_offers = self._by_provider[provider]
        self._by_provider[provider] = replace(
            provider_offers, error=error, error_since=provider_offers.error_since or at
        )

    def machines_listed(self, provider: values.ProviderName, listing: values.Listing) -> None:
        is_news = self.is_news(provider, listing)
        self._machines[provider] = ObservedInstances(listing=listing)
        if is_news:
            self._wake_event.notify()

    def is_news(self, provider: values.ProviderName, listing: values.Listing) -> bool:
        """Whether a decision by this listing may differ from one by the newest."""
        seen = self._machines[provider]
        if seen.listing is None or seen.error or seen.listing.complete is not listing.complete:
            return True
        return seen.listing.instances != listing.instances or self.awaits_list(provider)

    def machines_failed(self, provider: values.ProviderName, error: str, *, at: datetime) -> None:
        """Record the error. The last listing stays: it proves nothing new, and its time shows how old it is."""
        seen = self._machines[provider]
        self._machines[provider] = replace(seen, error=error, error_since=seen.error_since or at)

    def note_away(self, provider: values.ProviderName, error: str, *, at: datetime) -> bool:
        """Return true once per outage: the caller logs it, and the event is kept for the next commit."""
        if provider in self._away:
            return False
        self._away[provider] = error
        self.note("provider.away", f"{provider} does not answer as it should: {error}", {"provider": provider}, at=at)
        return True

    def note_back(self, provider: values.ProviderName, *, at: datetime) -> bool:
        """Return true once per return."""
        if self._away.pop(provider, None) is None:
            return False
        self.note("provider.back", f"{provider} answers again", {"provider": provider}, at=at)
        return True

    def notes(self) -> tuple[Event, ...]:
        """Events that wait for a commit."""
        return tuple(self._notes)

    def notes_committed(self, notes: Iterable[Event]) -> None:
        done = set(map(id, notes))
        self._notes = [note for note in self._notes if id(note) not in done]

    def note(self, kind: str, message: str, data: Mapping[str, str], *, at: datetime) -> None:
        """Keep an event that goes into the state with the next commit."""
        self._notes.append(Event(at=at, kind=kind, message=message, data=data))
        self._wake_event.notify()


# What the queue needs of any offer of one provider, so that a marketplace with short answers can be asked for it.


GPUS_MAX: Final = 64
_WAITING: Final = frozenset({JobState.WAITING_PRICE, JobState.RECOVERING, JobState.QUEUED})


def offer_query(world: World, provider: values.ProviderName) -> values.OfferQuery:
    """Return the GPUs that jobs wait for (those of running jobs after them), those with a ceiling, and the room."""
    jobs = [job for job in world.jobs.values() if not job.state.is_final and _may_go_to(job, provider)]
    jobs.sort(key=lambda job: job.state not in _WAITING)
    gpus: dict[str, None] = {}
    counts: set[int] = set()
    vram: list[int] = []
    for job in jobs:
        wanted = job.spec.resources
        for one in wanted.gpu:
            counts.add(one.count)
            for name in sorted(market.resolve_gpu(one.name)):
                gpus.setdefault(name)
        if not wanted.gpu and wanted.gpu_count:
            counts.add(wanted.gpu_count)
            vram.append(wanted.min_vram_mb or 0)
    disks = [disk_gb_for(job) for job in jobs]
    watched = tuple(name for name in sorted(world.policy.ceilings) if name not in gpus and name != values.NO_GPU)
    return values.OfferQuery(
        gpus=tuple(gpus)[:GPUS_MAX],
        disk_gb=max(disks, default=values.OfferQuery().disk_gb),
        gpu_counts=tuple(sorted(counts)),
        watched=watched[:GPUS_MAX],
        vram_mb_min=min(vram, default=None),
    )


def _may_go_to(job: Job, provider: values.ProviderName) -> bool:
    named = job.spec.resources.providers
    return not named or provider in named


# Asks a provider about its account: the prepaid balance, seldom, and the cause of its refusals while one lasts.


ASK_EVERY: Final = timedelta(seconds=45)
BALANCE_EVERY: Final = timedelta(minutes=10)
"""From one question for the balance to the next while nothing waits for it."""
ASK_DEADLINE_S: Final = 30.0
REST_MAX: Final = timedelta(minutes=5)
"""A provider that asks for a rest gets it, but no longer one than this."""


class CauseWatch:
    """The account at one provider; makes no call but for its balance while the provider refuses nothing."""

    def __init__(
        self, provider: Provider, *, offer_cache: OfferCache, clock: Clock, ask_again: Callable[[], None]
    ) -> None:
        self._provider = provider
        self._offer_cache = offer_cache
        self._clock = clock
        self._ask_again = ask_again
        """The offers are out of date after a while without a key."""
        self._is_refused = False
        self._is_fresh = True
        self._balance_asked_at: datetime | None = None
        self.controller = Controller(
            f"causes-{provider.name}", self.reconcile_once, interval_s=ASK_EVERY.total_seconds()
        )

    async def reconcile_once(self) -> Pause:
        """Ask about what is awaited."""
        if self._is_fresh:
            # What was wrong with the account may have been set right in the config that it was opened with.
            # It may be another account, too, whose balance is not known yet.
            self._offer_cache.evidence.key_taken(self._provider.name, self._clock.now())
            self._offer_cache.evidence.forget_balance(self._provider.name)
            self._is_fresh = False
        wait = await self.ask()
        return Pause(seconds=max(INTERVAL_MIN_S, self._clock.real_seconds(wait)))

    async def ask(self) -> timedelta:
        """Ask once about each cause that is awaited. Returns the pause until the next time."""
        awaited = self._offer_cache.evidence.awaited.get(self._provider.name, frozenset())
        is_awaited = CooldownEnd.CREDIT in awaited
        try:
            if CooldownEnd.KEY in awaited:
                await self._in_time(self._ask_with_key)
            if is_awaited or self._is_balance_due():
                await self._in_time(partial(self._ask_for_balance, is_awaited=is_awaited))
        except RateLimited as exc:
            return max(ASK_EVERY, min(exc.retry_after, REST_MAX))
        return ASK_EVERY

    async def _in_time(self, question: Callable[[], Awaitable[None]]) -> None:
        """Ask this; a question without an answer is no reason not to ask the next.

        Raises:
            RateLimited: the provider is to be asked nothing more for now.
        """
        try:
            with anyio.move_on_after(ASK_DEADLINE_S):
                await question()
        except RateLimited:
            raise
        except ProviderError:
            pass  # the cause lasts, or the provider is away, of which its poller speaks

    def _is_balance_due(self) -> bool:
        """Whether to ask although no refusal waits for it: at the first time, then seldom, or where a job waits."""
        asked_at = self._balance_asked_at
        if asked_at is None or self._offer_cache.evidence.waits_for_balance:
            return True
        return not timedelta(0) <= self._clock.now() - asked_at < BALANCE_EVERY

    async def _ask_for_balance(self, *, is_awaited: bool) -> None:
        """Ask for the balance; wake the decisions where it is more than before."""
        knows = self._provider.capabilities.get(values.Power.BALANCE)
        if knows is None or not knows.available or not isinstance(self._provider, KnowsBalance):
            return
        self._balance_asked_at = self._clock.now()
        balance = await self._provider.balance()
        evidence, name, now = self._offer_cache.evidence, self._provider.name, self._clock.now()
        has_risen = evidence.balance_stated(name, balance, now)
        if is_awaited:
            has_risen = evidence.credit_seen(name, balance.available, now) or has_risen
        if has_risen:
            self._offer_cache.wake()

    async def _ask_with_key(self) -> None:
        """Only a key that was refused and is taken again says something: some may list and not buy."""
        try:
            await self._provider.instances()
        except AuthFailed:
            self._is_refused = True
            raise
        if self._is_refused:
            self._is_refused = False
            self._offer_cache.evidence.key_taken(self._provider.name, self._clock.now())
            self._ask_again()
            self._offer_cache.wake()


# Where we have, or may have, machines: there the listing is polled; elsewhere a slow sweep is enough.
#
# A provider stays on the list after its last attempt is gone until a complete listing, begun well after that, was
# empty: a launch that was answered wrongly or late shows up in exactly that span.


class WatchedProviders:
    """Remembers when each provider last had a reason to be watched."""

    def __init__(self) -> None:
        self._last: dict[values.ProviderName, datetime] = {}

    def update(
        self, world: World, listings: Mapping[values.ProviderName, values.Listing], now: datetime
    ) -> frozenset[values.ProviderName]:
        """Return the providers to be watched now."""
        for attempt in world.attempts.values():
            self._last[attempt.provider] = now
        for intent in world.intents.values():
            self._last[intent.provider] = now
        for name, listing in listings.items():
            if any(machine.state is not values.InstanceState.GONE for machine in listing.instances):
                self._last[name] = now
        if any(may_wait_for_cause(job, now) for job in world.jobs.values()):
            # Why its machine was lost stands in a list of a provider where nothing else may be left to watch.
            self._last.update({name: now for name, rules in world.policy.providers.items() if rules.causes_within})
        for name, since in list(self._last.items()):
            seen = listings.get(name)
            if since < now and seen is not None and seen.complete and seen.at > since + world.policy.list_lag(name):
                del self._last[name]
        return frozenset(self._last)


def _left_on_hosts(
    page: values.OfferPage, sold: Iterable[values.Offer]
) -> Mapping[tuple[values.HostId | None, str], int]:
    """How many GPUs of a kind are left on each host where something was sold.

    A host is offered by several counts at once, each out of the same GPUs: it has as many as one count of them makes
    together in one market.
    """
    hosts = {(sale.host_id, sale.gpu) for sale in sold}
    shown = Counter((o.host_id, o.gpu, o.market, o.gpu_count) for o in page.offers if (o.host_id, o.gpu) in hosts)
    left: dict[tuple[values.HostId | None, str], int] = {}
    for (host, gpu, _, count), offers in shown.items():
        left[host, gpu] = max(left.get((host, gpu), 0), count * offers)
    for sale in sold:
        if (sale.host_id, sale.gpu) in left:
            left[sale.host_id, sale.gpu] -= sale.gpu_count
    return left
