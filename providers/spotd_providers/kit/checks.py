"""Lines of a provider's check that are the same for every provider."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final

from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.answers import DefiniteRefusal

SKEW_MAX: Final = timedelta(seconds=5)
CLOCK_HINT: Final = "synchronise this computer's clock"


def clock_line(skew: timedelta, *, who: str, hint: str = CLOCK_HINT) -> CheckLine:
    """Compare this computer's clock with the provider's; `skew` is the difference."""
    is_near = skew <= SKEW_MAX
    detail = f"{skew.total_seconds():.0f} s from {who}'s"
    return CheckLine(name="clock", ok=is_near, detail=detail, hint="" if is_near else hint)


async def check_line(
    name: str, ask: Callable[[], Awaitable[str]], *, hint: str, refused: str = "", unanswered: str = ""
) -> CheckLine:
    """Run one check. `refused` and `unanswered` are the hints where the key is refused or nothing was found out."""
    try:
        return CheckLine(name=name, ok=True, detail=await ask())
    except AuthFailed as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=refused or hint)
    except (RateLimited, Unavailable) as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=unanswered or hint)
    except (ProviderError, DefiniteRefusal) as exc:
        return CheckLine(name=name, ok=False, detail=str(exc), hint=hint)
