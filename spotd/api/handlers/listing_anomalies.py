"""What is odd about a provider that answers: too slowly, or nonsense.

One that fails shows an error. One that answers and cannot be relied on must be named as well, or a person
searches for the cause of a waiting job everywhere else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spotd.daemon.market.offer_cache import OfferCache
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import InstanceState, Listing, OfferPage, ProviderName

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
    for name, provider_offers in offer_cache.snapshot().offer_cache.items():
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
