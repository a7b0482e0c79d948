"""Past prices from a plugin or from a client's list, held to the same types and bounds before they are stored."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from spotd.daemon.market.plugin_fields import (
    ID_CHARS_MAX,
    PRICE_MAX,
    MalformedValue,
    bounded,
    identity,
    instant,
    member,
    price,
    text,
    whole,
    whole_or_none,
)
from spotd.daemon.market.plugin_values import AHEAD_MAX, GPUS_MAX, OFFERS_MAX
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, ProviderName

PAST_CHANGES_MAX: Final = 100_000
"""Of one page of past prices."""
PROVIDER_CHARS_MAX: Final = 64
COUNT_MAX: Final = 2**31


def price_history(value: Any, provider: ProviderName | None, *, now: datetime) -> PriceHistoryPage:
    """Return the offers of a page of past prices that can be used; the others are counted as rejected.

    Args:
        provider: whose they are; `None` where each offer names its own, as recorded lists do.

    Raises:
        Malformed: it is no page, or of no span of the past.
    """
    if not isinstance(value, PriceHistoryPage):
        raise MalformedValue(f"a page of past prices of the type {type(value).__name__}")
    since, until = instant(value.since), instant(value.until)
    if since is None or until is None or not since < until <= now + AHEAD_MAX:
        raise MalformedValue("since, until: not a span of the past")
    rows, more = bounded(value.offers, OFFERS_MAX, what="offers")
    good: list[OfferPriceHistory] = []
    changes_left = PAST_CHANGES_MAX
    rejected = whole_or_none(value.rejected, low=0, high=COUNT_MAX) or 0
    for row in rows:
        try:
            offer = _past_offer(row, provider, changes_left)
        except MalformedValue:
            rejected += 1
            continue
        changes_left -= len(offer.changes)
        good.append(offer)
    return PriceHistoryPage(
        offers=tuple(good),
        since=since,
        until=min(until, now),
        next=text(value.next, chars_max=ID_CHARS_MAX),
        rejected=rejected + more,
        left=whole_or_none(value.left, low=0, high=COUNT_MAX),
    )


def _past_offer(row: Any, provider: ProviderName | None, changes_max: int) -> OfferPriceHistory:
    if not isinstance(row, OfferPriceHistory):
        raise MalformedValue(f"an offer of the past of the type {type(row).__name__}")
    named = identity(row.provider, "provider", chars_max=PROVIDER_CHARS_MAX)
    if provider is not None and named != provider:
        raise MalformedValue("provider: another one")
    market = member(Market, row.market)
    if market is None:
        raise MalformedValue("market: neither spot nor on-demand")
    changes, more = bounded(row.changes, changes_max, what="changes")
    if more:
        raise MalformedValue("changes: too many")
    return OfferPriceHistory(
        provider=ProviderName(named),
        offer_id=OfferId(identity(row.offer_id, "offer_id")),
        pool=PoolId(identity(row.pool, "pool")),
        market=market,
        gpu=identity(row.gpu, "gpu", chars_max=64),
        gpu_count=whole(row.gpu_count, "gpu_count", low=1, high=GPUS_MAX),
        storage_price=MicroUsdPerGbMonth(price(row.storage_price, "storage_price")),
        changes=tuple(_past_change(change) for change in changes),
    )


def _past_change(change: Any) -> tuple[datetime, MicroUsdPerHour | None]:
    """Return one change; a price of 0 is no price that anything was sold for."""
    at = instant(change[0]) if isinstance(change, tuple) and len(change) == 2 else None
    if at is None:
        raise MalformedValue("changes: not pairs of an instant and a price")
    if change[1] is None:
        return at, None
    return at, MicroUsdPerHour(whole(change[1], "price", low=1, high=PRICE_MAX))
