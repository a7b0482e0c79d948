"""Charges from a provider's own records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.money import MicroUsd, micro_usd
from spotd_providers.contract.values import AttemptKey, InstanceId, ProviderCharge

DOLLARS: Final = "USD"
"""What a row is in that names no currency."""
CHARGE_ROWS_MAX: Final = 50_000
TOTAL: Final = "total"


def require_few_charges(rows: int, *, who: str) -> None:
    """Require that a bill has no more rows than are judged: of a part of it nothing could be concluded.

    Raises:
        Unavailable: it has more.
    """
    if rows > CHARGE_ROWS_MAX:
        raise Unavailable(f"{who} answered with a bill of more than {CHARGE_ROWS_MAX:,} rows, which no account has")


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
