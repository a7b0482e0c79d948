"""Which of the offers a job may have now: what fits it, is free, admitted by its ceiling and carried by a balance.

Best first, and found as it is walked over: of ten thousand offers a decision reads the few that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core.budgets import traffic_of_a_run
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, disk_gb_for, sized
from spotd.core.domain.market import MarketSnapshot, Quote
from spotd.core.domain.world import World
from spotd.core.prepaid import PrepaidGuard
from spotd.core.ranking.candidates import (
    CandidateCatalogue,
    ceiling_for,
    ceilings_of_kinds,
    highest_ceiling,
    is_admissible,
)
from spotd.core.ranking.expected_cost import TOO_LITTLE_DISK, RankedOffers, total_at
from spotd_providers.contract.values import MicroUsdPerGpuHour, ProviderName

ABOVE_CEILING: Final = "above the ceiling"
NO_CEILING: Final = "no ceiling for this GPU"


class AdmissibleQuotes:
    """The market of one decision, and the quotes of it that its jobs may have, but for their budgets."""

    def __init__(
        self,
        world: World,
        market: MarketSnapshot,
        now: datetime,
        prepaid_guard: PrepaidGuard,
        attempts_by_job: Mapping[JobId, Sequence[Attempt]],
    ) -> None:
        self._world = world
        self._policy = world.policy
        self._now = now
        self._prepaid_guard = prepaid_guard
        self._attempts_by_job = attempts_by_job
        self.read(market)

    def read(self, market: MarketSnapshot) -> None:
        """Read this market from now on."""
        self.market = market
        self.catalogue = CandidateCatalogue(self._world, market, self._now)

    def ceiling(self, job: Job, candidate: Quote) -> MicroUsdPerGpuHour | None:
        return ceiling_for(candidate.offer.gpu, candidate.offer.gpu_count, job.spec.price, self._policy)

    def needing_less(self, job: Job, offers: RankedOffers, chosen: Quote) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Other offers under their ceiling that need less of a budget than the best one.

        The best by expected cost may be a fast machine, of which a budget carries no useful run although it carries one
        of a slow machine. Then what is cheapest by the hour comes first, as if nothing else were known.
        """
        if not offers.is_by_price:
            offers = self.catalogue.by_price(offers)
            cheapest = next(self.quotes_of(job, offers, defaultdict(int)), None)
            if cheapest is not None:
                yield cheapest
                chosen = cheapest[0]
        yield from self._with_less_traffic(job, offers, chosen)

    def _with_less_traffic(
        self, job: Job, offers: RankedOffers, chosen: Quote
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Other offers under their ceiling, best first, each of which moves its bytes for less than the one before.

        The best offer by the hour may take more for one checkpoint than a budget has left.
        """
        least = traffic_of_a_run(job, chosen)
        for candidate, ceiling in self.quotes_of(job, offers, defaultdict(int)):
            if not least:
                return
            traffic = traffic_of_a_run(job, candidate)
            if traffic < least:
                least = traffic
                yield candidate, ceiling

    def free_offers(self, job: Job) -> tuple[RankedOffers, Quote | None]:
        """Return what fits the job, and the best of it that is free.

        Where no disk can hold the newest checkpoint, one is enough that holds an older one: the runner takes that.
        """
        key = self.catalogue.key_of(job)
        offers = self.catalogue.list_for(key)
        best = self.catalogue.first_free(offers)
        if offers.entries or not offers.mismatches[TOO_LITTLE_DISK] or not job.checkpoints:
            return offers, best
        smallest = disk_gb_for(job, min(saved.bytes for saved in job.checkpoints))
        if smallest >= key.needs.disk_gb:
            return offers, best
        fallback = self.catalogue.list_for(replace(key, needs=replace(key.needs, disk_gb=smallest)))
        best = self.catalogue.first_free(fallback)
        return (fallback, best) if fallback.entries else (offers, None)

    def quotes(self, job: Job) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each of the quotes that would be admitted for this job now, but for its budgets, best first.

        While it runs, of as many machines as it has.
        """
        has = (item.quote.offer.nodes for item in self._attempts_by_job.get(job.id, ()) if item.state.counts)
        job = sized(job, next(has, job.spec.resources.nodes))
        return self.quotes_of(job, self.free_offers(job)[0], defaultdict(int))

    def quotes_of(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each quote of these offers that is under its ceiling and carried by the balance at its provider, if known."""
        under_ceiling = partial(self.under_ceiling, job, passed_over=passed_over)
        return self._prepaid_guard.carried(job, offers, under_ceiling, self.catalogue, passed_over)

    def under_ceiling(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each free quote at or under its ceiling, best first."""
        limit = offers.highest_rank(highest_ceiling(job, self._policy), ceilings_of_kinds(job, offers, self._policy))
        for candidate in self.catalogue.ranked(offers, passed_over, job.id):
            ceiling = self.ceiling(job, candidate)
            if ceiling is not None and is_admissible(candidate, ceiling, job.spec.price):
                yield candidate, ceiling
                continue
            passed_over[NO_CEILING if ceiling is None else ABOVE_CEILING] += 1
            if offers.least_rank(candidate) > limit:
                return  # no later one is admissible either, however much it ranks behind its price

    def runner_up(self, job: Job, offers: RankedOffers, chosen: Quote) -> int | None:
        """Return up to which price it ranks before the next best machine, where we pay what we bid."""
        if not chosen.offer.pays_bid:
            return None
        walk = iter(self.catalogue.ranked(offers))
        for candidate in walk:
            if candidate.offer is chosen.offer:
                break
        for candidate in walk:
            if is_admissible(candidate, self.ceiling(job, candidate), job.spec.price):
                return total_at(self.catalogue.ranked_total(offers, candidate.offer), offers.expect(chosen.offer))
            if offers.least_rank(candidate) > offers.highest_rank(chosen.price.total):
                return None  # none that follows could limit the bid
        return None

    def rank_of_best(self, job: Job) -> tuple[int, ProviderName] | None:
        """Return how the best offer that the job may have now ranks, and who sells it."""
        offers = self.free_offers(job)[0]
        best = next(self.quotes_of(job, offers, defaultdict(int)), None)
        return None if best is None else (self.catalogue.ranked_total(offers, best[0].offer), best[0].offer.provider)
