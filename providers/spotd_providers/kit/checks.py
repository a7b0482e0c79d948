"""Lines of a provider's check that are the same for every provider."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd_providers.contract.values import CheckLine

SKEW_MAX: Final = timedelta(seconds=5)
CLOCK_HINT: Final = "synchronise this computer's clock"


def clock_line(skew: timedelta, *, who: str, hint: str = CLOCK_HINT) -> CheckLine:
    """Compare this computer's clock with the provider's; `skew` is the difference."""
    is_near = skew <= SKEW_MAX
    detail = f"{skew.total_seconds():.0f} s from {who}'s"
    return CheckLine(name="clock", ok=is_near, detail=detail, hint="" if is_near else hint)
