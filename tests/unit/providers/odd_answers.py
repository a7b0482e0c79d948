"""Readings of answers that no documentation knows, the same for every cloud."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Bills, KnowsBalance, Provider
from spotd_providers.contract.values import AttemptKey, InstanceRef, OfferQuery
from spotd_providers.testkit.harness import Harness
from spotd_providers.testkit.serve import Call, Canned

REPEATS = 20
"""More than any client tries again."""


async def readings(h: Harness, provider: Provider, odd: Canned) -> list[tuple[Call, Any]]:
    """Make every read meet this answer; returns what was read in spite of it. Only errors of the contract pass."""
    asks: list[tuple[Call, Callable[[], Awaitable[Any]]]] = [
        (Call.OFFERS, lambda: provider.offers(OfferQuery())),
        (Call.LIST, provider.instances),
        (Call.LIST, lambda: provider.find(AttemptKey("spotd-lab-7f3a-1"))),
    ]
    if isinstance(provider, KnowsBalance):
        asks.append((Call.ACCOUNT, provider.balance))
    if isinstance(provider, Bills):
        now = h.clock.now()
        asks.append((Call.ACCOUNT, lambda: provider.charges(now - timedelta(days=1), now)))
    found = []
    for call, ask in asks:
        h.faults.answer(call, odd, times=REPEATS)
        try:
            found.append((call, await ask()))
        except ProviderError:
            continue
        finally:
            h.faults.clear()
    return found


def absence_proofs(found: list[tuple[Call, Any]]) -> list[Any]:
    """The lists among these readings that claim to be complete."""
    return [answer for call, answer in found if call is Call.LIST and getattr(answer, "complete", True)]


async def end_after(
    h: Harness, provider: Provider, ref: InstanceRef, throttle: Canned, error: type[Exception]
) -> timedelta:
    """End the machine while ends are throttled, and again afterwards; returns how long the second call took."""
    h.faults.answer(Call.TERMINATE, throttle, times=REPEATS)
    try:
        await provider.terminate(ref)
    except error:
        pass
    else:
        raise AssertionError("a throttled end was called done")
    finally:
        h.faults.clear()
    began = h.clock.now()
    await provider.terminate(ref)
    return h.clock.now() - began
