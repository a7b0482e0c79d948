"""Launches and raised bids that a provider's prepaid balance could not carry, which wait until money was added.

Theory. A provider that is paid in advance stops every machine when the balance is used up, so a machine that is bought
with the last of it gets nowhere. What is left for a launch is the balance as its provider stated it, without what its
machines have cost since then and what they still need for a useful run each. Where no balance is known, or the newest
is old, nothing is held back: the provider itself refuses what it does not want to sell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.budgets import still_to_run
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, Quote
from spotd.core.domain.world import World
from spotd.core.pricing import (
    dollar_words,
    quote_words,
    repriced,
    shortest_run,
    useful_run,
    usual_bid,
)
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.ranking.expected_cost import RankedOffers, RequirementKey
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import MicroUsd, MicroUsdPerGpuHour, MicroUsdPerHour, ProviderName, cost

BALANCE_TTL: Final = timedelta(minutes=30)
"""An older balance is not known."""
_MADE_WITHIN: Final = timedelta(seconds=30)
"""A decision has its instant first and takes its snapshot of the market then: a balance may be so much newer."""
NO_BALANCE: Final = "the balance there does not carry a useful run"

_Admitted = tuple[Quote, MicroUsdPerGpuHour]
"""A quote at or under its ceiling, and the ceiling."""


def current_balance(provider_offers: ProviderOffers, now: datetime) -> MicroUsd | None:
    """Return the balance that the provider stated, while that is current."""
    at = provider_offers.balance_at
    if at is None or not -_MADE_WITHIN <= now - at <= BALANCE_TTL:
        return None
    return provider_offers.balance


def spending_rate(item: Attempt) -> MicroUsdPerHour:
    """Return what the attempt takes from the balance per hour now."""
    return item.meter.rate if item.meter.since is not None else MicroUsdPerHour(0)


class PrepaidGuard:
    """The balances during one decision; `commit` is called for each launch.

    What is left only becomes less meanwhile. So a walk over offers that found nothing need not be made again for the
    next job of the same requirements, and a provider that cannot carry its cheapest offer for the shortest of useful
    runs has none for any job of them.

    Attributes:
        short: why no balance carries the best that is admissible for the last job; empty where one does.
    """

    def __init__(self, world: World, market: MarketSnapshot, now: datetime) -> None:
        self._world = world
        self.short = ""
        self._left: dict[ProviderName, int] = {}
        self._barren: dict[tuple[RequirementKey, PriceLimit | None], str] = {}
        since: dict[ProviderName, datetime] = {}
        for name, provider_offers in market.by_provider.items():
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

    def carried(
        self,
        job: Job,
        offers: RankedOffers,
        admissible: Callable[[RankedOffers], Iterator[_Admitted]],
        catalogue: CandidateCatalogue,
        passed_over: defaultdict[str, int],
    ) -> Iterator[_Admitted]:
        """Yield what is admissible of these offers and carried by a balance, or at a provider where none is known."""
        self.short = ""
        if not self._left:
            yield from admissible(offers)
            return
        self.short = self._barren.get((offers.key, job.spec.price), "")
        if self.short:
            return
        found = False
        for candidate, ceiling in self._walk(job, offers, admissible, catalogue, passed_over):
            found = True
            yield candidate, ceiling
        if self.short and not found:
            self._barren[offers.key, job.spec.price] = self.short

    def _walk(
        self,
        job: Job,
        offers: RankedOffers,
        admissible: Callable[[RankedOffers], Iterator[_Admitted]],
        catalogue: CandidateCatalogue,
        passed_over: defaultdict[str, int],
    ) -> Iterator[_Admitted]:
        for candidate, ceiling in admissible(offers):
            provider = candidate.offer.provider
            if self._carries(job, candidate):
                yield candidate, ceiling
                continue
            self.short = self.short or self._shortage(job, candidate)
            passed_over[NO_BALANCE] += 1
            if self._is_exhausted(offers, candidate):
                others = offers.providers - {provider}
                if others:
                    wanted = replace(offers.key.resources, providers=tuple(sorted(others)))
                    rest = catalogue.list_for(replace(offers.key, resources=wanted))
                    yield from self._walk(job, rest, admissible, catalogue, passed_over)
                return

    def _carries(self, job: Job, quote: Quote) -> bool:
        left = self._left.get(quote.offer.provider)
        return left is None or self._needed(job, quote) <= left

    def _is_exhausted(self, offers: RankedOffers, quote: Quote) -> bool:
        """Whether no later offer of this provider costs so little that the balance carries it for any job."""
        lowest = MicroUsdPerHour(offers.lowest_total_from(quote))
        return cost(lowest, shortest_run(self._world.policy)) > self._left.get(quote.offer.provider, 0)

    def _shortage(self, job: Job, quote: Quote) -> str:
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

    def carries_raise(self, job: Job, item: Attempt, rate: MicroUsdPerHour) -> bool:
        """Whether a known balance carries a useful run of this machine at so much per hour; then that is set aside."""
        left = self._left.get(item.provider)
        if left is None:
            return True
        run = useful_run(job, item.quote.offer, self._world.policy)
        more = cost(MicroUsdPerHour(max(0, rate - item.quote.price.total)), run)
        if more > left:
            return False
        self._left[item.provider] = left - more
        return True

    def words_against(self, job: Job, quote: Quote) -> str:
        """Why the balance does not carry this launch; empty where it does, or is not known."""
        return "" if self._carries(job, quote) else self._shortage(job, quote)

    def _needed(self, job: Job, quote: Quote) -> MicroUsd:
        """Return what a useful run costs at the price that is agreed if nothing limits it."""
        policy, offer = self._world.policy, quote.offer
        bid = usual_bid(offer, policy.bid_headroom_ppm)
        total = quote.price.total if bid <= quote.price.gpu else repriced(quote, bid).price.total
        return cost(total, useful_run(job, offer, policy))
