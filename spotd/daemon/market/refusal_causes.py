"""Asks a provider about its account: the prepaid balance, seldom, and the cause of its refusals while one lasts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from spotd.core.domain.cooldowns import CooldownEnd
from spotd.daemon.clock import real_seconds_at_least
from spotd.daemon.controllers import Controller, Pause
from spotd.daemon.market.offer_cache import OfferCache
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited
from spotd_providers.contract.provider import Clock, KnowsBalance, Provider
from spotd_providers.contract.values import Power

ASK_EVERY: Final = timedelta(seconds=45)
BALANCE_EVERY: Final = timedelta(minutes=10)
"""From one question for the balance to the next while nothing waits for it."""
ASK_FLOOR_REAL_S: Final = 0.2
ASK_DEADLINE_S: Final = 30.0
REST_MAX: Final = timedelta(minutes=5)
"""A provider that asks for a rest gets it, but no longer one than this."""


class CauseWatch:
    """The account at one provider; makes no call but for its balance while the provider refuses nothing."""

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
        self._balance_asked_at: datetime | None = None
        self.controller = Controller(
            f"causes-{provider.name}", self.reconcile_once, interval_s=ASK_EVERY.total_seconds()
        )

    async def reconcile_once(self) -> Pause:
        """Ask about what is awaited."""
        if self._is_fresh:
            # What was wrong with the account may have been set right in the config that it was opened with.
            # It may be another account, too, whose balance is not known yet.
            self._offer_cache.evidence.key_taken(self._provider.name, self._clock.now())
            self._offer_cache.evidence.forget_balance(self._provider.name)
            self._is_fresh = False
        wait = await self.ask()
        return Pause(seconds=real_seconds_at_least(self._clock, wait, real_s=ASK_FLOOR_REAL_S))

    async def ask(self) -> timedelta:
        """Ask once about each cause that is awaited. Returns the pause until the next time."""
        awaited = self._offer_cache.evidence.awaited.get(self._provider.name, frozenset())
        is_awaited = CooldownEnd.CREDIT in awaited
        try:
            if CooldownEnd.KEY in awaited:
                await self._in_time(self._ask_with_key)
            if is_awaited or self._is_balance_due():
                await self._in_time(partial(self._ask_for_balance, is_awaited=is_awaited))
        except RateLimited as exc:
            return max(ASK_EVERY, min(exc.retry_after, REST_MAX))
        return ASK_EVERY

    async def _in_time(self, question: Callable[[], Awaitable[None]]) -> None:
        """Ask this; a question without an answer is no reason not to ask the next.

        Raises:
            RateLimited: the provider is to be asked nothing more for now.
        """
        try:
            with anyio.move_on_after(ASK_DEADLINE_S):
                await question()
        except RateLimited:
            raise
        except ProviderError:
            pass  # the cause lasts, or the provider is away, of which its poller speaks

    def _is_balance_due(self) -> bool:
        """Whether to ask although no refusal waits for it: at the first time, then seldom, or where a job waits."""
        asked_at = self._balance_asked_at
        if asked_at is None or self._offer_cache.evidence.waits_for_balance:
            return True
        return not timedelta(0) <= self._clock.now() - asked_at < BALANCE_EVERY

    async def _ask_for_balance(self, *, is_awaited: bool) -> None:
        """Ask for the balance; wake the decisions where it is more than before."""
        knows = self._provider.capabilities.get(Power.BALANCE)
        if knows is None or not knows.available or not isinstance(self._provider, KnowsBalance):
            return
        self._balance_asked_at = self._clock.now()
        balance = await self._provider.balance()
        evidence, name, now = self._offer_cache.evidence, self._provider.name, self._clock.now()
        has_risen = evidence.balance_stated(name, balance, now)
        if is_awaited:
            has_risen = evidence.credit_seen(name, balance.available, now) or has_risen
        if has_risen:
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
