"""Money as integers of a micro-dollar, with the unit in the type.

Whole-machine and per-GPU prices are different types, so that multiplying by the GPU count twice (or never) is a
type error. Everything is rounded *up* at the edge: an estimate that is a micro-dollar too high costs nothing, one
that is too low breaks a ceiling.
"""

from __future__ import annotations

from datetime import timedelta
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import Final, NewType

MicroUsd = NewType("MicroUsd", int)
"""An amount of money, 1e-6 USD."""
MicroUsdPerHour = NewType("MicroUsdPerHour", int)
"""A price for the whole machine, 1e-6 USD per hour."""
MicroUsdPerGpuHour = NewType("MicroUsdPerGpuHour", int)
"""A price for one GPU of a machine, 1e-6 USD per hour: the unit of ceilings."""
MicroUsdPerGb = NewType("MicroUsdPerGb", int)
"""A traffic price, 1e-6 USD per decimal gigabyte."""
MicroUsdPerGbMonth = NewType("MicroUsdPerGbMonth", int)
"""A storage price, 1e-6 USD per gigabyte and month of 720 hours."""

MICRO: Final = 1_000_000
HOURS_PER_STORAGE_MONTH: Final = 720
_MICROSECONDS_PER_HOUR: Final = 3_600_000_000
_LIMIT_USD: Final = Decimal(10_000_000)


def micro_usd(value: Decimal | int | float | str) -> int:
    """Convert a finite, non-negative dollar figure to micro-dollars, rounded up.

    The caller wraps the result in the type that names its unit.

    Raises:
        ValueError: not a number, not finite, negative or beyond ten million dollars.
    """
    if isinstance(value, bool):
        raise ValueError("a truth value is not a price")
    try:
        exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    except (InvalidOperation, ValueError, TypeError) as exc:
        raise ValueError(f"not a number: {value!r}") from exc
    if not exact.is_finite() or exact < 0 or exact > _LIMIT_USD:
        raise ValueError(f"not a price: {value!r}")
    return int((exact * MICRO).to_integral_value(rounding=ROUND_CEILING))


def cost(price: MicroUsdPerHour, duration: timedelta) -> MicroUsd:
    """Compute the cost of a machine at this price over a duration, rounded up."""
    microseconds = max(0, duration // timedelta(microseconds=1))
    return MicroUsd(-(-price * microseconds // _MICROSECONDS_PER_HOUR))


def shares(gpu_count: int) -> int:
    """Return how many GPUs a price is divided by: a machine without a GPU counts as one."""
    return max(1, gpu_count)


def per_gpu(price: MicroUsdPerHour, gpu_count: int) -> MicroUsdPerGpuHour:
    """Divide a machine's price by its GPUs, rounded up."""
    return MicroUsdPerGpuHour(-(-price // shares(gpu_count)))


def whole_machine(price: MicroUsdPerGpuHour, gpu_count: int) -> MicroUsdPerHour:
    """Multiply a price per GPU by the number of GPUs."""
    return MicroUsdPerHour(price * shares(gpu_count))


def as_usd(amount: int) -> float:
    """Convert micro-dollars to dollars, for display and JSON only."""
    return amount / MICRO
