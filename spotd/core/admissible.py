"""Which of the offers a job may have now: what fits it, is free, admitted by its ceiling and carried by a balance.

Best first, and found as it is walked over: of ten thousand offers a decision reads the few that it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Final

from spotd.core.budgets import traffic_of_a_run
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job, disk_gb_for
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy
from spotd.core.prepaid import PrepaidGuard
from spotd.core.ranking.candidates import (
    CandidateCatalogue,
    ceiling_for,
    ceilings_of_kinds,
    highest_ceiling,
    is_admissible,
)
from spotd.core.ranking.expected_cost import TOO_LITTLE_DISK, RankedOffers, total_at
from spotd_providers.contract.values import MicroUsdPerGpuHour

ABOVE_CEILING: Final = "above the ceiling"
NO_CEILING: Final = "no ceiling for this GPU"


class AdmissibleQuotes:
    """The quotes of one decision that its jobs may have, but for their budgets."""

    def __init__(self, policy: Policy, catalogue: CandidateCatalogue, prepaid_guard: PrepaidGuard) -> None:
        self._policy = policy
        self._catalogue = catalogue
        self._prepaid_guard = prepaid_guard

    def ceiling(self, job: Job, candidate: Quote) -> MicroUsdPerGpuHour | None:
        return ceiling_for(candidate.offer.gpu, candidate.offer.gpu_count, job.spec.price, self._policy)

    def needing_less(self, job: Job, offers: RankedOffers, chosen: Quote) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Other offers under their ceiling that need less of a budget than the best one.

        The best by expected cost may be a fast machine, of which a budget carries no useful run although it carries one
        of a slow machine. Then what is cheapest by the hour comes first, as if nothing else were known.
        """
        if not offers.is_by_price:
            offers = self._catalogue.by_price(offers)
            cheapest = next(self.quotes(job, offers, defaultdict(int)), None)
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
        for candidate, ceiling in self.quotes(job, offers, defaultdict(int)):
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
        key = self._catalogue.key_of(job)
        offers = self._catalogue.list_for(key)
        best = self._catalogue.first_free(offers)
        if offers.entries or not offers.mismatches[TOO_LITTLE_DISK] or not job.checkpoints:
            return offers, best
        smallest = disk_gb_for(job, min(saved.bytes for saved in job.checkpoints))
        if smallest >= key.needs.disk_gb:
            return offers, best
        fallback = self._catalogue.list_for(replace(key, needs=replace(key.needs, disk_gb=smallest)))
        best = self._catalogue.first_free(fallback)
        return (fallback, best) if fallback.entries else (offers, None)

    def quotes(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each of the admissible quotes that the balance at its provider carries, where that is known."""
        under_ceiling = partial(self.under_ceiling, job, passed_over=passed_over)
        return self._prepaid_guard.carried(job, offers, under_ceiling, self._catalogue, passed_over)

    def under_ceiling(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each free quote at or under its ceiling, best first."""
        limit = offers.highest_rank(highest_ceiling(job, self._policy), ceilings_of_kinds(job, offers, self._policy))
        for candidate in self._catalogue.ranked(offers, passed_over, job.id):
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
        walk = iter(self._catalogue.ranked(offers))
        for candidate in walk:
            if candidate.offer is chosen.offer:
                break
        for candidate in walk:
            if is_admissible(candidate, self.ceiling(job, candidate), job.spec.price):
                return total_at(self._catalogue.ranked_total(offers, candidate.offer), offers.expect(chosen.offer))
            if offers.least_rank(candidate) > offers.highest_rank(chosen.price.total):
                return None  # none that follows could limit the bid
        return None
