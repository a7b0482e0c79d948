"""Machines of jobs that are done, which wait for the next job: who may take them over, at what price.

What a handover is and why it forgets no machine is the theory of `handover`. Here it is decided. A machine
that waits is compared with the best offer by the one ranking. It costs what it cost the former job, and has made its
start: an offer is first paid for the time of a start without work, which is known for this image at that provider
(`starts.usual_start`), spread over a usual stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

from spotd.core.admissible import AdmissibleQuotes
from spotd.core.budgets import BudgetGuard
from spotd.core.checkpoints import advice_at_launch
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, Quote, build_offer_index
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.handover import (
    disk_gb_of,
    hand_over,
    release,
    waiting_machines,
    words_against_job,
    words_against_waiting,
)
from spotd.core.kernel.quarantine import in_words
from spotd.core.plan_builder import PlanBuilder
from spotd.core.prepaid import PrepaidGuard
from spotd.core.pricing import gpu_price_limit, per_gpu_words, quote_words, span_words
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, is_admissible
from spotd.core.starts import usual_start
from spotd_providers.contract.values import MicroUsdPerGpuHour, MicroUsdPerHour

_LACKS_ROOM: Final = frozenset(
    {VerdictKind.MACHINES, VerdictKind.BUDGET_DAY, VerdictKind.BUDGET_MONTH, VerdictKind.BALANCE}
)
"""What a machine that waits can be in the way of."""
_MINUTE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A machine that waits, at what it costs one job."""

    former: Attempt
    quote: Quote
    ceiling: MicroUsdPerGpuHour
    rank: int
    saved: timedelta = timedelta(0)
    """What the start of the best other machine would take; nothing where there is none."""


class WaitingMachines:
    """The machines that wait, in one decision."""

    def __init__(
        self,
        builder: PlanBuilder,
        world: World,
        market: MarketSnapshot,
        budget_guard: BudgetGuard,
        prepaid_guard: PrepaidGuard,
        admissible: AdmissibleQuotes,
    ) -> None:
        self._builder = builder
        self._world = world
        self._policy = world.policy
        self._market = market
        self._budget_guard = budget_guard
        self._prepaid_guard = prepaid_guard
        self._admissible = admissible
        self.machines = waiting_machines(builder)

    def best_for(self, job: Job, *, compares: bool) -> Handover | None:
        """Return the machine that this job takes over, `None` where none fits or an offer is better.

        Args:
            compares: it may have another machine now.
        """
        found = [one for former in self.machines if (one := self._fitting(former, job)) is not None]
        if not found:
            return None
        best = min(found, key=lambda one: (one.rank, one.former.id.job, one.former.id.number))
        if compares and (other := self._admissible.rank_of_best(job)) is not None:
            start = usual_start(self._world.experience, other[1], job.spec.image)
            wasted = start / max(self._policy.expected_stay, start, _MINUTE)
            if best.rank > other[0] + int(other[0] * wasted):
                return None
            best = replace(best, saved=start)
        if self._budget_guard.refusal(job, best.quote) or self._prepaid_guard.words_against(job, best.quote):
            return None
        return best

    def _fitting(self, former: Attempt, job: Job) -> Handover | None:
        rules, last = self._policy.providers.get(former.provider), self._builder.job(former.id.job)
        if words_against_waiting(self._builder, former) or words_against_job(last, job, self._policy, rules):
            return None
        # At what was bid for it: nothing above that is needed any more.
        offer = replace(former.quote.offer, gpu_price=former.quote.price.gpu, pays_bid=False)
        known = self._market.by_provider.get(former.provider)
        alone = ProviderOffers(
            provider=offer.provider,
            offer_index=build_offer_index((offer,)),
            at=self._builder.now,
            sells_spot=known is None or known.sells_spot,
        )
        market = MarketSnapshot(by_provider={offer.provider: alone})
        catalogue = CandidateCatalogue(self._world, market, self._builder.now)
        key, disk_gb = catalogue.key_of(job), disk_gb_of(last, former.quote)
        if key.needs.disk_gb > disk_gb:
            return None
        offers = catalogue.list_for(replace(key, needs=replace(key.needs, disk_gb=disk_gb)))
        found = next(catalogue.ranked(offers), None)
        ceiling = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, self._policy)
        if found is None or ceiling is None or not is_admissible(found, ceiling, job.spec.price):
            return None
        agreed = replace(found, offer=former.quote.offer)
        rank = catalogue.ranked_total(offers, offer)
        return Handover(former=former, quote=agreed, ceiling=ceiling, rank=rank)

    def hand_over(self, job: Job, chosen: Handover) -> tuple[Attempt, str]:
        """Return the attempt of the job that has the machine now, and the sentence for its owner."""
        former, agreed = chosen.former, chosen.quote
        self.machines.remove(former)
        bid = agreed.price.gpu
        limit = bid if agreed.offer.pays_bid else max(gpu_price_limit(agreed, chosen.ceiling), bid)
        item = hand_over(self._builder, former, job, agreed, chosen.ceiling, MicroUsdPerHour(limit))
        item = replace(item, save_every=advice_at_launch(job, agreed.offer, self._world, self._builder.now))
        self._builder.put_attempt(item)
        words = f"job {job.name} takes over its machine"
        self._builder.event("machine.handed_over", words, attempt=former.id, to=item.key)
        sentence = (
            f"takes over the machine of job {self._builder.job(former.id.job).name}, which is done: "
            f"{quote_words(agreed)}, ceiling {per_gpu_words(chosen.ceiling)}"
        )
        return item, f"{sentence}; it saves a start of {span_words(chosen.saved)}" if chosen.saved else sentence

    def release(self, verdicts: Iterable[Verdict]) -> None:
        """End each machine that may not be taken over any more, or that is in the way of a job."""
        if not self.machines:
            return
        lacking = next((one for one in verdicts if one.kind in _LACKS_ROOM), None)
        for item in self.machines:
            error = self._builder.attempted(partial(self._release, item, lacking))
            if error is not None:
                self._builder.note_contained(f"the machine of {item.key} that waits", in_words(error))

    def _release(self, item: Attempt, lacking: Verdict | None) -> None:
        why = words_against_waiting(self._builder, item)
        if not why and self._budget_guard.shortage() is not None:
            why = "a budget is used up"
        if not why:
            why = self._budget_guard.job_shortage(self._builder.job(item.id.job))
        if not why and lacking is not None:
            why = f"job {self._builder.job(lacking.job).name} waits: {lacking.sentence}"
        if why:
            release(self._builder, item, why)
