"""An offer with its effective price."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from spotd.core.domain.egress import NO_CHARGE
from spotd_providers.contract.money import MicroUsdPerGb, MicroUsdPerGpuHour, MicroUsdPerHour
from spotd_providers.contract.values import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBreakdown:
    """Every term of an effective price, whole machine per hour; `total` is what ceilings are compared with.

    total = fee x (gpu + storage) + upload + restore, each term rounded up.
    """

    gpu: MicroUsdPerHour
    storage: MicroUsdPerHour
    fee: MicroUsdPerHour
    """What the multiplier adds to gpu + storage."""
    upload: MicroUsdPerHour
    restore: MicroUsdPerHour
    total: MicroUsdPerHour
    per_gpu: MicroUsdPerGpuHour
    fee_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """An offer with its effective price for one job at one time."""

    offer: Offer
    price: PriceBreakdown
    on_demand: MicroUsdPerHour | None
    """Effective price of the same hardware on-demand, the receipt's comparison."""
    at: datetime
    egress_price: MicroUsdPerGb = NO_CHARGE
    """What the owner of the checkpoint store asks for what a host there reads; in no effective price."""
