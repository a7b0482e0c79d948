"""The last value of what each provider sells and of which of our machines it lists.

Pollers write here, the control loop and the API read. Nothing is queued: a newer answer replaces an older one, because
decisions depend on the world as it is and not on how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spotd.core.domain.cooldowns import CooldownEnd
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, Readings, build_offer_index
from spotd.core.plans.plan import Event
from spotd.daemon.market.evidence import Evidence
from spotd.daemon.wake import WakeEvent
from spotd_providers.contract.values import AttemptKey, Listing, Market, Offer, OfferId, OfferPage, ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedInstances:
    """What is known of a provider's machines: the newest listing, and the error of the newest try."""

    listing: Listing | None = None
    error: str = ""
    error_since: datetime | None = None


class OfferCache:
    """The newest offers and listing of each provider; `wake_event` is notified when anything changed."""

    def __init__(
        self, wake_event: WakeEvent, *, keep: Callable[[ProviderName, OfferPage, datetime], None] | None = None
    ) -> None:
        self._wake_event = wake_event
        self._keep = keep
        """Handed every answer with its instant, for the history; must return at once."""
        self._offer_cache: dict[ProviderName, ProviderOffers] = {}
        self._machines: dict[ProviderName, ObservedInstances] = {}
        self._pages: dict[ProviderName, OfferPage] = {}
        self._shown: dict[ProviderName, tuple[Offer, ...]] = {}
        self._bought: dict[tuple[ProviderName, OfferId], tuple[Offer, datetime]] = {}
        self._asked: dict[ProviderName, datetime] = {}
        self._took: dict[ProviderName, timedelta] = {}
        self._away: dict[ProviderName, str] = {}
        self._notes: list[Event] = []
        self.wanted: dict[ProviderName, frozenset[AttemptKey]] = {}
        """Keys whose machines must be searched for one by one, because a launch's outcome is unknown."""
        self.evidence = Evidence()
        self.watched: frozenset[ProviderName] = frozenset()
        """Providers where we have, or may have, machines."""

    def wake(self) -> None:
        """Something is known that may change a decision."""
        self._wake_event.notify()

    def open(self, provider: ProviderName) -> None:
        """Give the provider an empty entry until its first answer."""
        self._offer_cache[provider] = ProviderOffers(provider=provider)
        self._machines[provider] = ObservedInstances()

    def snapshot(self) -> MarketSnapshot:
        offer_cache = {name: self.evidence.on(provider_offers) for name, provider_offers in self._offer_cache.items()}
        readings = Readings(
            listed_at={name: seen.listing.at for name, seen in self._machines.items() if seen.listing is not None},
            away={name: seen.error for name, seen in self._machines.items() if seen.error},
        )
        return MarketSnapshot(offer_cache=offer_cache, lows=self.evidence.lows(), readings=readings)

    def listings(self) -> Mapping[ProviderName, Listing]:
        """Return the newest listing of each provider that ever answered."""
        return {name: seen.listing for name, seen in self._machines.items() if seen.listing is not None}

    def machines(self, provider: ProviderName) -> ObservedInstances:
        return self._machines[provider]

    def page(self, provider: ProviderName) -> OfferPage | None:
        """Return the newest answer as it came, rejected rows included."""
        return self._pages.get(provider)

    def offers_asked(self, provider: ProviderName, *, at: datetime) -> None:
        """Record that a poll is under way since then."""
        self._asked[provider] = at

    def asked_since(self, provider: ProviderName) -> datetime | None:
        """Since when the poll that is under way waits for its answer."""
        return self._asked.get(provider)

    def took(self, provider: ProviderName) -> timedelta:
        """How long the newest answer took."""
        return self._took.get(provider, timedelta(0))

    def offers_answered(self, provider: ProviderName, *, at: datetime) -> None:
        """Record that the poll which was under way is over, well or not."""
        asked_at = self._asked.pop(provider, None)
        self._took[provider] = timedelta(0) if asked_at is None else at - asked_at

    def offers_seen(
        self,
        provider: ProviderName,
        page: OfferPage,
        *,
        asked_at: datetime,
        sells_spot: bool = True,
        changes_bids: bool = False,
    ) -> None:
        self._bought = {k: sale for k, sale in self._bought.items() if k[0] != provider or asked_at <= sale[1]}
        shown = self._unsold(provider, page)
        provider_offers = self._offer_cache[provider]
        changed = (
            self._shown.get(provider) != shown
            or bool(provider_offers.error)
            or provider_offers.sells_spot != sells_spot
        )
        self._pages[provider], self._shown[provider] = page, shown
        offer_index = build_offer_index(shown) if changed else provider_offers.offer_index
        self._offer_cache[provider] = ProviderOffers(
            provider=provider,
            offer_index=offer_index,
            at=asked_at,
            sells_spot=sells_spot,
            changes_bids=changes_bids,
        )
        if changed:
            self.evidence.prices_seen(offer_index, asked_at)
        if changed or CooldownEnd.SHOWN in self.evidence.awaited.get(provider, frozenset()):
            self._wake_event.notify()
        if self._keep is not None:
            self._keep(provider, page, asked_at)

    def bought(self, offer: Offer, *, at: datetime) -> None:
        """Remove this offer until it is asked for again: a machine is sold once.

        Nor does it show the same GPUs of the same host in the other market. Pools, which are no one machine, stay.
        """
        if offer.host_id is None or offer.provider not in self._pages:
            return
        self._bought[offer.provider, offer.offer_id] = offer, at
        shown = self._shown[offer.provider] = self._unsold(offer.provider, self._pages[offer.provider])
        self._offer_cache[offer.provider] = replace(
            self._offer_cache[offer.provider], offer_index=build_offer_index(shown)
        )

    def _unsold(self, provider: ProviderName, page: OfferPage) -> tuple[Offer, ...]:
        sold = [sale for sale, _ in self._bought.values() if sale.provider == provider]
        if not sold:
            return page.offers
        ids = {sale.offer_id for sale in sold}
        twins = {(o.host_id, o.gpu_count, market) for o in sold for market in Market if market is not o.market}
        return tuple(
            o for o in page.offers if o.offer_id not in ids and (o.host_id, o.gpu_count, o.market) not in twins
        )

    def offers_failed(self, provider: ProviderName, error: str, *, at: datetime) -> None:
        """Record the error. The last offers stay until their time-to-live ends."""
        provider_offers = self._offer_cache[provider]
        self._offer_cache[provider] = replace(
            provider_offers, error=error, error_since=provider_offers.error_since or at
        )

    def machines_listed(self, provider: ProviderName, listing: Listing) -> None:
        before = self._machines[provider]
        self._machines[provider] = ObservedInstances(listing=listing)
        same = before.listing is not None and before.listing.instances == listing.instances
        if not same or provider in self.watched:
            self._wake_event.notify()

    def machines_failed(self, provider: ProviderName, error: str, *, at: datetime) -> None:
        """Record the error. The last listing stays: it proves nothing new, and its time shows how old it is."""
        seen = self._machines[provider]
        self._machines[provider] = replace(seen, error=error, error_since=seen.error_since or at)

    def note_away(self, provider: ProviderName, error: str, *, at: datetime) -> bool:
        """Return true once per outage: the caller logs it, and the event is kept for the next commit."""
        if provider in self._away:
            return False
        self._away[provider] = error
        self.note("provider.away", f"{provider} does not answer as it should: {error}", {"provider": provider}, at=at)
        return True

    def note_back(self, provider: ProviderName, *, at: datetime) -> bool:
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
