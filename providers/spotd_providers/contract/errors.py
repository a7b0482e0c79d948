"""The closed tree of a provider's errors; each leaf says what to do next.

Adapters translate every foreign exception into one of these at their edge and keep the cause. No message may hold a
key, a token or a URL with a query.
"""

from __future__ import annotations

from datetime import timedelta


class ProviderError(Exception):
    """The root of the tree; only leaves are raised."""


class RateLimited(ProviderError):
    """Too many calls: wait `retry_after`, then go on."""

    def __init__(self, message: str, *, retry_after: timedelta) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ProviderError):
    """The provider does not answer or answers nonsense; nothing happened. Back off and ask again."""


class AuthFailed(ProviderError):
    """The key is missing, wrong or may not do this: stop calling, alert the user."""


class NoCapacity(ProviderError):
    """Nothing of this kind can be had now: cool the pool down, take the next quote."""


class OfferGone(ProviderError):
    """The offer no longer exists: take the next quote. `lasts`: how long it stays so, where that is known."""

    def __init__(self, message: str, *, lasts: timedelta | None = None) -> None:
        super().__init__(message)
        self.lasts = lasts


class PriceMoved(ProviderError):
    """The price rose above what was agreed at commit: ask for prices again."""


class QuotaExceeded(ProviderError):
    """An account limit of the provider is used up: pause there, name it to the user.

    `quota` names it as the offer's `quotas` do; empty is the first of them.
    """

    def __init__(self, message: str, *, quota: str = "") -> None:
        super().__init__(message)
        self.quota = quota


class RequestRejected(ProviderError):
    """The request itself is wrong and will be wrong again."""

    def __init__(self, message: str, *, field: str, reason: str) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


class NoBalance(ProviderError):
    """The account has no money left: pause the provider, alert the user."""


class OutcomeUnknown(ProviderError):
    """The call may have taken effect. Only `find(key)` settles it; nothing may be launched again before."""

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class ContractViolation(ProviderError):
    """The provider broke a rule the safety of money rests on (say, sold on-demand where we bid)."""


class NotSupported(ProviderError):
    """A power this provider does not have was asked for; the message is the sentence its capability declares."""
