"""Charges from a provider's own records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from spotd_providers.contract.money import MicroUsd, micro_usd
from spotd_providers.contract.values import AttemptKey, InstanceId, ProviderCharge

DOLLARS: Final = "USD"
"""What a row is in that names no currency."""
TOTAL: Final = "total"


def signed_micro_usd(amount: float) -> int:
    """Convert a figure that may be a debt or a refund to micro-dollars, rounded away from zero."""
    return micro_usd(amount) if amount >= 0 else -micro_usd(-amount)


def charges_of(
    key: AttemptKey,
    machine: str,
    start: datetime,
    end: datetime,
    *,
    total: float,
    parts: Sequence[tuple[str, float]],
    rounding: float,
    currency: str | None = None,
) -> list[ProviderCharge]:
    """Return one charge per kind of part, or one `total` where there are no parts or they do not add up to it."""
    adds_up = abs(sum(amount for _, amount in parts) - total) <= max(rounding, abs(total) / 1000)
    by_kind: dict[str, float] = {}
    for kind, amount in parts:
        by_kind[kind] = by_kind.get(kind, 0.0) + amount
    return [
        ProviderCharge(
            key=key,
            instance_id=InstanceId(machine),
            start=start,
            end=end,
            amount=MicroUsd(signed_micro_usd(amount)),
            kind=kind,
            currency=(currency or DOLLARS).upper(),
        )
        for kind, amount in (by_kind.items() if parts and adds_up else [(TOTAL, total)])
    ]
