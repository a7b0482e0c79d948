"""What is known of providers beyond their newest lists: whether a cause of refusals is over, and the lowest prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.cooldowns import CooldownEnd
from spotd.core.domain.market import OfferIndex, ProviderOffers
from spotd.core.domain.verdicts import Verdict, VerdictKind
from spotd.core.domain.world import World
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour
from spotd_providers.contract.values import Balance, ProviderName

LOWS_LAST: Final = timedelta(days=7)
KINDS_MAX: Final = 10_000
Kind = tuple[str, int]


class Evidence:
    """Written by pollers and watches, read with each snapshot of the market."""

    def __init__(self) -> None:
        self.awaited: dict[ProviderName, frozenset[CooldownEnd]] = {}
        """What would end the cool-downs of each provider."""
        self.waits_for_balance = False
        """Whether a job waits until money was added at some provider."""
        self._balances: dict[ProviderName, MicroUsd] = {}
        self._stated: dict[ProviderName, tuple[Balance, datetime]] = {}
        self._credit_at: dict[ProviderName, datetime] = {}
        self._key_at: dict[ProviderName, datetime] = {}
        self._lows: dict[Kind, tuple[MicroUsdPerHour, datetime]] = {}

    def update(self, world: World, now: datetime, verdicts: Iterable[Verdict] = ()) -> None:
        """Note what the cool-downs of this world, and its jobs, wait for."""
        self.waits_for_balance = any(verdict.kind is VerdictKind.BALANCE for verdict in verdicts)
        awaited: dict[ProviderName, set[CooldownEnd]] = {}
        for cooldown in world.cooldowns:
            if cooldown.until > now and cooldown.ends is not CooldownEnd.TIME:
                awaited.setdefault(cooldown.provider, set()).add(cooldown.ends)
        for provider, ends in awaited.items():
            if CooldownEnd.CREDIT in ends and CooldownEnd.CREDIT not in self.awaited.get(provider, ()):
                self._balances.pop(provider, None)  # what was left before this refusal is spent
        self.awaited = {provider: frozenset(ends) for provider, ends in awaited.items()}

    def credit_seen(self, provider: ProviderName, balance: MicroUsd, at: datetime) -> bool:
        """Whether the balance has risen; the first that is seen counts as risen where anything is left."""
        before = self._balances.get(provider, MicroUsd(0))
        self._balances[provider] = balance
        if balance <= before:
            return False
        self._credit_at[provider] = at
        return True

    def balance_stated(self, provider: ProviderName, balance: Balance, at: datetime) -> bool:
        """Record what is left in the account; return whether that is more than before. A debt is nothing left."""
        before = self._stated.get(provider)
        sane = replace(balance, available=MicroUsd(max(0, balance.available)))
        self._stated[provider] = sane, at
        return before is None or sane.available > before[0].available

    def stated_balance(self, provider: ProviderName) -> tuple[Balance, datetime] | None:
        """Return the newest balance that the provider stated, and when."""
        return self._stated.get(provider)

    def forget_balance(self, provider: ProviderName) -> None:
        """Forget what was stated with another key."""
        self._stated.pop(provider, None)

    def key_taken(self, provider: ProviderName, at: datetime) -> None:
        """Record an answer that the provider gives to its own users only, or that it was given another key."""
        self._key_at[provider] = at

    def prices_seen(self, offer_index: OfferIndex, at: datetime) -> None:
        """Keep the lowest price of each kind of machine."""
        for kind, group in offer_index.by_gpu.items():
            known = self._lows.get(kind)
            price = group[0].gpu_price
            if known is None and len(self._lows) >= KINDS_MAX:
                continue
            if known is None or price <= known[0] or at - known[1] > LOWS_LAST:
                self._lows[kind] = (price, at)

    def lows(self) -> Mapping[Kind, MicroUsdPerHour]:
        return {kind: price for kind, (price, _) in self._lows.items()}

    def on(self, provider_offers: ProviderOffers) -> ProviderOffers:
        """Return the offers with what is known of their provider's account."""
        name = provider_offers.provider
        credit_at, key_at, stated = self._credit_at.get(name), self._key_at.get(name), self._stated.get(name)
        if credit_at is None and key_at is None and stated is None:
            return provider_offers
        balance, balance_at = (None, None) if stated is None else (stated[0].available, stated[1])
        return replace(provider_offers, credit_at=credit_at, key_at=key_at, balance=balance, balance_at=balance_at)
