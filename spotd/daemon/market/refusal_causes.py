"""Asks a provider about the cause of its refusals while one lasts: the account's balance, or the key."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import anyio

from spotd.core.cooldowns import CooldownEnd
from spotd.daemon.clock import real_seconds_at_least
from spotd.daemon.controllers import Controller, Pause
from spotd.daemon.market.offer_cache import OfferCache
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited
from spotd_providers.contract.provider import Clock, KnowsBalance, Provider
from spotd_providers.contract.values import Power

ASK_EVERY: Final = timedelta(seconds=45)
ASK_FLOOR_REAL_S: Final = 0.2
ASK_DEADLINE_S: Final = 30.0
REST_MAX: Final = timedelta(minutes=5)
"""A provider that asks for a rest gets it, but no longer one than this."""


class CauseWatch:
    """The causes of one provider's refusals; makes no call while it refuses nothing."""

    def __init__(
        self, provider: Provider, *, offer_cache: OfferCache, clock: Clock, ask_again: Callable[[], None]
    ) -> None:
        self._provider = provider
        self._offer_cache = offer_cache
        self._clock = clock
        self._ask_again = ask_again
        """The offers are out of date after a while without a key."""
        self._is_refused = False
        self._is_fresh = True
        self.controller = Controller(
            f"causes-{provider.name}", self.reconcile_once, interval_s=ASK_EVERY.total_seconds()
        )

    async def reconcile_once(self) -> Pause:
        """Ask about what is awaited."""
        if self._is_fresh:
            # What was wrong with the account may have been set right in the config that it was opened with.
            self._offer_cache.evidence.key_taken(self._provider.name, self._clock.now())
            self._is_fresh = False
        wait = await self.ask()
        return Pause(seconds=real_seconds_at_least(self._clock, wait, real_s=ASK_FLOOR_REAL_S))

    async def ask(self) -> timedelta:
        """Ask once about each cause that is awaited. Returns the pause until the next time."""
        awaited = self._offer_cache.evidence.awaited.get(self._provider.name, frozenset())
        wait = ASK_EVERY
        try:
            with anyio.move_on_after(ASK_DEADLINE_S):
                if CooldownEnd.CREDIT in awaited:
                    await self._ask_for_credit()
                if CooldownEnd.KEY in awaited:
                    await self._ask_with_key()
        except RateLimited as exc:
            wait = max(wait, min(exc.retry_after, REST_MAX))
        except ProviderError:
            pass  # the cause lasts, or the provider is away, of which its poller speaks
        return wait

    async def _ask_for_credit(self) -> None:
        knows = self._provider.capabilities.get(Power.BALANCE)
        if knows is None or not knows.available or not isinstance(self._provider, KnowsBalance):
            return
        balance = await self._provider.balance()
        if self._offer_cache.evidence.credit_seen(self._provider.name, balance.available, self._clock.now()):
            self._offer_cache.wake()

    async def _ask_with_key(self) -> None:
        """Only a key that was refused and is taken again says something: some may list and not buy."""
        try:
            await self._provider.instances()
        except AuthFailed:
            self._is_refused = True
            raise
        if self._is_refused:
            self._is_refused = False
            self._offer_cache.evidence.key_taken(self._provider.name, self._clock.now())
            self._ask_again()
            self._offer_cache.wake()
