"""Launches that a provider's prepaid balance could not carry, which wait until money was added.

Theory. A provider that is paid in advance stops every machine when the balance is used up, so a machine that is bought
with the last of it gets nowhere. What is left for a launch is the balance as its provider stated it, without what its
machines have cost since then and what they still need for a useful run each. Where no balance is known, or the newest
is old, nothing is held back: the provider itself refuses what it does not want to sell.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.budgets import still_to_run
from spotd.core.jobs import Job
from spotd.core.market import MarketSnapshot, ProviderOffers
from spotd.core.quotes import Quote
from spotd.core.usefulness import useful_run
from spotd.core.words import dollar_words, quote_words
from spotd.core.world import World
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, cost
from spotd_providers.contract.values import ProviderName

BALANCE_TTL: Final = timedelta(minutes=30)
"""An older balance is not known."""


def current_balance(provider_offers: ProviderOffers, now: datetime) -> MicroUsd | None:
    """Return the balance that the provider stated, while that is current."""
    at = provider_offers.balance_at
    if at is None or not timedelta(0) <= now - at <= BALANCE_TTL:
        return None
    return provider_offers.balance


def spending_rate(item: Attempt) -> MicroUsdPerHour:
    """Return what the attempt takes from the balance per hour now."""
    return item.meter.rate if item.meter.since is not None else MicroUsdPerHour(0)


class PrepaidGuard:
    """The balances during one decision; `commit` is called for each launch."""

    def __init__(self, world: World, market: MarketSnapshot, now: datetime) -> None:
        self._world = world
        self._left: dict[ProviderName, int] = {}
        since: dict[ProviderName, datetime] = {}
        for name, provider_offers in market.offer_cache.items():
            balance = current_balance(provider_offers, now)
            if balance is not None and provider_offers.balance_at is not None:
                self._left[name] = balance
                since[name] = provider_offers.balance_at
        if not since:
            return
        for item in world.attempts.values():
            if item.provider in since and item.machine.may_compute:
                began = max(since[item.provider], item.intended_at)
                rate = MicroUsdPerHour(max(item.meter.rate, item.quote.price.total))
                self._left[item.provider] -= cost(rate, now - began) + still_to_run(world, item, now)

    def carries(self, job: Job, quote: Quote) -> bool:
        """Whether the balance carries a useful run of this launch, or is not known."""
        left = self._left.get(quote.offer.provider)
        return left is None or self._needed(job, quote) <= left

    def shortage(self, job: Job, quote: Quote) -> str:
        """Why the balance does not carry this launch."""
        provider = quote.offer.provider
        left, needed = max(0, self._left.get(provider, 0)), dollar_words(self._needed(job, quote))
        return (
            f"the balance at {provider} leaves {dollar_words(MicroUsd(left))} for a launch: a useful run of"
            f" {quote_words(quote)} needs {needed}; add money there"
        )

    def commit(self, job: Job, quote: Quote) -> None:
        """Take what the launch needs from the balance."""
        if quote.offer.provider in self._left:
            self._left[quote.offer.provider] -= self._needed(job, quote)

    def _needed(self, job: Job, quote: Quote) -> MicroUsd:
        return cost(quote.price.total, useful_run(job, quote.offer, self._world.policy))
