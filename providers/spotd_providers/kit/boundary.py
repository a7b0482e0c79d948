"""The edge of an adapter: nothing but leaves of the contract's error tree leaves it, and no list without a bound.

Each adapter translates what it expects. What it does not expect (a library's own exception, a defect, an answer of a
shape that was not foreseen) is translated here, once for all of them: a read or an end that fails so is `Unavailable`,
and a launch has an unknown outcome, because the machine may exist. `AdapterPlugin` opens every provider behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from spotd_providers.contract import errors
from spotd_providers.contract.errors import OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.values import LaunchRequest, OfferPage
from spotd_providers.kit.shapes import listed_reasons

LEAVES: Final[tuple[type[ProviderError], ...]] = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ProviderError) and kind is not ProviderError
)
CALLS: Final = (
    "offers", "find", "instances", "terminate", "check", "launch", "change_bid", "logs", "shell", "account", "balance",
    "charges",
)  # fmt: skip
_MARK: Final = "_spotd_contract_only"


def keep_contract(kind: type[Any]) -> None:
    """Make every call of this class of providers raise leaves of the contract only, and bound what it rejects."""
    if _MARK in vars(kind):
        return
    for name in CALLS:
        call = getattr(kind, name, None)
        if call is not None:
            setattr(kind, name, _guarded(call, name))
    setattr(kind, _MARK, True)


def as_leaf(exc: Exception, *, call: str, request: object = None) -> ProviderError:
    """Return the leaf of the contract for an error of a call; the words of a foreign one may hold a secret."""
    if isinstance(exc, ProviderError) and isinstance(exc, LEAVES):
        return exc
    sentence = f"{call} failed with {type(exc).__name__}, which the adapter does not expect"
    if isinstance(request, LaunchRequest):
        return OutcomeUnknown(sentence, key=request.key)
    return Unavailable(sentence)


def _guarded(call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def asked(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            answer = await call(self, *arguments, **options)
        except Exception as exc:
            leaf = as_leaf(exc, call=name, request=arguments[0] if arguments else options.get("request"))
            if leaf is exc:
                raise
            raise leaf from exc
        return _bounded(answer)

    return asked


def _bounded(answer: Any) -> Any:
    if isinstance(answer, OfferPage):
        reasons = listed_reasons(answer.rejected)
        return answer if reasons == answer.rejected else replace(answer, rejected=reasons)
    return answer
