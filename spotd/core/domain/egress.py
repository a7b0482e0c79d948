"""What the owner of the checkpoint store asks for each gigabyte that a host reads from it.

Theory. A bucket's owner bills what leaves it, by where it goes: nothing or little inside the owner's own cloud, most to
the internet. A host of a marketplace is the internet. What is written into a bucket costs nothing. This price is no
part of a machine's effective price, which is what its provider bills and what ceilings are compared with: a job with a
large checkpoint pays it wherever it goes on, and a ceiling that it broke could never be met again. It counts where
machines are ranked and compared, in what budgets set aside, and in what is booked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spotd_providers.contract.money import MicroUsdPerGb
from spotd_providers.contract.values import Offer, ProviderName

ELSEWHERE: Final = ""
"""Stands for every region of a provider that has no price of its own."""
NO_CHARGE: Final = MicroUsdPerGb(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEgress:
    """Prices of reading the store.

    Attributes:
        per_gb: for hosts anywhere.
        near: for hosts of a provider in a region, or in all others (`ELSEWHERE`), where that differs.
    """

    per_gb: MicroUsdPerGb = NO_CHARGE
    near: Mapping[tuple[ProviderName, str], MicroUsdPerGb] = field(default_factory=dict)

    def price_for(self, offer: Offer) -> MicroUsdPerGb:
        """Return the price for a host of this offer."""
        if not self.near:
            return self.per_gb
        elsewhere = self.near.get((offer.provider, ELSEWHERE), self.per_gb)
        return self.near.get((offer.provider, offer.region), elsewhere)

    @property
    def highest(self) -> MicroUsdPerGb:
        return max([self.per_gb, *self.near.values()])


FREE_EGRESS: Final = StoreEgress()
