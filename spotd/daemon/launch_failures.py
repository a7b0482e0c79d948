"""What each leaf of the providers' error tree means for a launch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from spotd.core.machines.outcomes import LaunchFailure
from spotd_providers.contract import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefusal:
    """The provider certainly made no machine."""

    failure: LaunchFailure
    detail: str
    retry_after: timedelta | None = None
    quota: str = ""


_FAILURES: Final[dict[type[errors.ProviderError], LaunchFailure]] = {
    errors.NoCapacity: LaunchFailure.NO_CAPACITY,
    errors.OfferGone: LaunchFailure.OFFER_GONE,
    errors.PriceMoved: LaunchFailure.PRICE_MOVED,
    errors.QuotaExceeded: LaunchFailure.QUOTA,
    errors.RequestRejected: LaunchFailure.REJECTED,
    errors.NotSupported: LaunchFailure.REJECTED,
    errors.NoBalance: LaunchFailure.NO_BALANCE,
    errors.AuthFailed: LaunchFailure.AUTH,
    errors.RateLimited: LaunchFailure.RATE_LIMITED,
    errors.Unavailable: LaunchFailure.UNAVAILABLE,
    errors.ContractViolation: LaunchFailure.CONTRACT,
}
"""Every leaf but `OutcomeUnknown`; a test holds this to the tree."""


def refusal_of(error: errors.ProviderError) -> LaunchRefusal | None:
    """Return what the error states for certain; `None` when only the machine's key can settle it."""
    failure = _FAILURES.get(type(error))
    if failure is None:
        return None
    wait: timedelta | None = None
    if isinstance(error, errors.RateLimited):
        wait = error.retry_after
    elif isinstance(error, errors.OfferGone):
        wait = error.lasts
    quota = error.quota if isinstance(error, errors.QuotaExceeded) else ""
    return LaunchRefusal(failure=failure, detail=str(error) or type(error).__name__, retry_after=wait, quota=quota)
