"""Charges from a provider's own records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from spotd_providers.contract.money import MicroUsd, micro_usd
from spotd_providers.contract.values import AttemptKey, InstanceId, ProviderCharge


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
) -> list[ProviderCharge]:
    """Return one charge per part, or one `total` where there are no parts or they do not add up to it."""
    adds_up = abs(sum(amount for _, amount in parts) - total) <= max(rounding, abs(total) / 1000)
    return [
        ProviderCharge(
            key=key,
            instance_id=InstanceId(machine),
            start=start,
            end=end,
            amount=MicroUsd(signed_micro_usd(amount)),
            kind=kind,
        )
        for kind, amount in (parts if parts and adds_up else [("total", total)])
    ]
