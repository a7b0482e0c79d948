"""A plugin that breaks its contract: a few of the machines and offers that it returns cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from spotd.daemon.market import plugin_values
from spotd_providers.contract.values import Instance, InstanceRef, Listing, Offer, OfferPage, ProviderName

ELSEWHERE: Final = ProviderName("elsewhere")
RATE: Final = 0.1
"""Of all rows."""
NO_ZONE: Final = datetime(2026, 1, 1)  # noqa: DTZ001  # on purpose

MACHINES: Final[tuple[Mapping[str, Any], ...]] = (
    {"created_at": NO_ZONE},
    {"notice_at": NO_ZONE},
    {"price": 0.4},
    {"price": float("nan")},
    {"price": -5},
    {"price": None},
    {"key": ""},
    {"state": "sleeping"},
    {"created_at": datetime.max.replace(tzinfo=UTC)},
    {"created_at": datetime(1970, 1, 1, tzinfo=UTC)},
)
OFFERS: Final[tuple[Mapping[str, Any], ...]] = (
    {"provider": ELSEWHERE},
    {"offer_id": ""},
    {"pool": None},
    {"host_id": 7},
    {"gpu": None},
    {"gpu_count": 0},
    {"gpu_count": 2.0},
    {"gpu_price": 0.4},
    {"gpu_price": float("nan")},
    {"gpu_price": -5},
    {"gpu_price": None},
    {"gpu_price": True},
    {"gpu_price": 10**30},
    {"market": "sleeping"},
    {"interruption": None},
    {"quotas": "gpu"},
    {"storage_price": None},
    {"upload_price": float("inf")},
    {"disk_gb_max": "much"},
    {"on_demand_price": float("nan")},
    {"duration_max": -1},
    {"hazard_ppm": 0.5},
    {"extra": {"note": None}},
)


class WrongRows:
    """Spoils some rows of one provider, and reads what is left of them as the daemon does."""

    def __init__(self, luck: Random) -> None:
        self._luck = luck

    def machine(self, row: Instance) -> Instance:
        odd = self._odd(({"ref": InstanceRef(provider=ELSEWHERE, instance_id=row.ref.instance_id)}, *MACHINES))
        return replace(row, **odd)

    def checked_listing(self, listing: Listing, provider: ProviderName, now: datetime) -> Listing:
        return plugin_values.listing(listing, provider, now=now)

    def checked_offers(self, offers: tuple[Offer, ...], provider: ProviderName, now: datetime) -> tuple[Offer, ...]:
        rows = tuple(replace(row, **self._odd(OFFERS)) for row in offers)
        return plugin_values.offer_page(OfferPage(offers=rows, at=now), provider, now=now).offers

    def _odd(self, oddities: tuple[Mapping[str, Any], ...]) -> Mapping[str, Any]:
        return self._luck.choice(oddities) if self._luck.random() < RATE else {}
