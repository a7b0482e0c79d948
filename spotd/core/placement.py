"""A machine for each job that wants one, or why it waits.

Theory. A launch is admitted only when its price is at or under the job's ceiling and when what has been spent, plus
what every machine still needs to be ended safely, plus a useful run of the new one, stays within every budget. The
launch leaves here as an attempt and an intent; the call is made after both are durable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.backoff import pause_left
from spotd.core.billing_limits import lease_and_save
from spotd.core.budgets import BudgetGuard, traffic_of_a_run
from spotd.core.candidates import (
    RISK_PREMIUM_PPM_MAX,
    TOO_LITTLE_DISK,
    CandidateCatalogue,
    RankedOffers,
    requirement_key,
)
from spotd.core.ceilings import agree, ceiling_for, highest_ceiling, is_admissible, total_ceiling
from spotd.core.deadlines.expiry import words_of_expiry
from spotd.core.disk import disk_gb_for
from spotd.core.ids import AttemptId, JobId
from spotd.core.intents import Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.interruption_credit import is_left_to_provider, machines_in_use
from spotd.core.jobs import Job
from spotd.core.keys import attempt_key
from spotd.core.market import MarketSnapshot, ProviderOffers
from spotd.core.plan_builder import PlanBuilder
from spotd.core.prepaid import PrepaidGuard
from spotd.core.pricing import PPM
from spotd.core.prospects import plausible_rates
from spotd.core.quarantine import contain, in_words
from spotd.core.quotes import Quote
from spotd.core.schedule.turn import WAITS_FOR_ITS_TURN, Turns
from spotd.core.states import AttemptState, EndReason, JobState
from spotd.core.verdicts import PassedOver, Verdict, VerdictKind
from spotd.core.words import (
    most_frequent_first,
    passed_over_words,
    per_gpu_words,
    quote_words,
    span_words,
    wanted_words,
)
from spotd.core.world import World
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour, as_usd, per_gpu
from spotd_providers.contract.values import ProviderName

ABOVE_CEILING: Final = "above the ceiling"
NO_CEILING: Final = "no ceiling for this GPU"
NOT_COMPARED: Final = "ranked behind those, not compared"

_WAITS_FOR_PRICE = frozenset(
    {VerdictKind.ABOVE_CEILING, VerdictKind.NO_CEILING, VerdictKind.NO_MATCH, VerdictKind.NO_OFFERS}
)


class JobPlacement:
    """The jobs that want a machine, in one decision; `place` is called for each in its turn."""

    def __init__(self, builder: PlanBuilder, world: World, market: MarketSnapshot, budget_guard: BudgetGuard) -> None:
        self.builder = builder
        self.world = world
        self.now = builder.now
        self.policy = world.policy
        self.market = market
        self.catalogue = self._catalogue_of(market)
        self.budget_guard = budget_guard
        self.prepaid_guard = PrepaidGuard(world, market, builder.now)
        self.turns = Turns(builder, world)
        self.verdicts: dict[JobId, Verdict] = {}
        self.attempts_by_job: defaultdict[JobId, list[Attempt]] = defaultdict(list)
        for attempt in world.attempts.values():
            self.attempts_by_job[attempt.id.job].append(attempt)
        self.machines = machines_in_use(world, self.now)
        self.launches = 0
        self._ranks_behind_ppm = (PPM + RISK_PREMIUM_PPM_MAX) * (PPM + world.policy.bid_headroom_ppm) // PPM
        """How far behind its price an offer may rank at most."""

    def place(self, job: Job) -> None:
        """Place one job. Offers that make this raise are left out; a job that raises without them is at fault."""
        if self.builder.attempted(partial(self._place, job)) is not None:
            self._leave_out_offers_that_raise_for(job)
            contain(self.builder, job.id, partial(self._place, job), "it cannot be placed")

    def _leave_out_offers_that_raise_for(self, job: Job) -> None:
        if self._survey_error(job, {}) is not None:
            return
        offer_cache = dict(self.market.offer_cache)
        for name in sorted(offer_cache):
            error = self._survey_error(job, {name: offer_cache[name]})
            if error is not None:
                self.builder.note_contained(f"the offers of {name}", in_words(error))
                del offer_cache[name]
        self.market = replace(self.market, offer_cache=offer_cache)
        self.catalogue = self._catalogue_of(self.market)

    def _survey_error(self, job: Job, offer_cache: Mapping[ProviderName, ProviderOffers]) -> Exception | None:
        """Return what reading these offers for the job raises, if anything."""

        def survey() -> None:
            catalogue = self._catalogue_of(MarketSnapshot(offer_cache=offer_cache))
            offers = catalogue.list_for(requirement_key(job, self.policy))
            for candidate in catalogue.ranked(offers):
                ceiling = self._ceiling(job, candidate) or MicroUsdPerGpuHour(0)
                agree(job, candidate, ceiling, candidate.price.total, self.policy)

        return self.builder.attempted(survey)

    def _catalogue_of(self, market: MarketSnapshot) -> CandidateCatalogue:
        world = self.world
        return CandidateCatalogue(market, world.policy, world.cooldowns, self.now, attempts=world.attempts.values())

    def _place(self, job: Job) -> None:
        if over := words_of_expiry(job, self.now):
            self.builder.move_job(job.id, JobState.EXPIRED, over)
            self._wait(job, VerdictKind.DEADLINE, over)
            return
        used_up = ""
        if job.budget is not None:
            used_up = self.budget_guard.is_hopeless(job, plausible_rates(self.catalogue, job, self.policy))
        if used_up:
            sentence = f"the job's budget is used up: {used_up}; spotctl budget {job.name} +USD, then spotctl retry"
            self.builder.move_job(job.id, JobState.EXPIRED, sentence)
            self._wait(job, VerdictKind.BUDGET_JOB, sentence)
            return
        gate = self._gate(job)
        if gate is not None:
            self._wait(job, *gate)
            return
        offers, best = self._free_offers(job)
        if not offers.entries:
            self._wait(job, *self._nothing_fits(job, offers), passed_over=most_frequent_first(offers.mismatches))
            return
        if best is None:
            passed_over = most_frequent_first(offers.mismatches + offers.blocked)
            until = self.catalogue.free_at(offers)
            self._wait(job, VerdictKind.COOLING, self._all_blocked(offers), until, passed_over=passed_over)
            return
        compared: defaultdict[str, int] = defaultdict(int)
        chosen, ceiling = next(self._carried_quotes(job, offers, compared), (None, self._ceiling(job, best)))
        if chosen is None or ceiling is None:
            passed_over = self._all_too_expensive(offers, compared)
            short = self.prepaid_guard.short
            why = (VerdictKind.BALANCE, short) if short else self._too_expensive(job, best, ceiling)
            self._wait(job, *why, best=best, ceiling=ceiling, passed_over=passed_over)
            return
        agreed, price_max = agree(job, chosen, ceiling, self._runner_up(job, offers, chosen), self.policy)
        refusal = self.budget_guard.refusal(job, agreed)
        if refusal is None:
            self._launch(job, agreed, ceiling, price_max)
            return
        for other, accepted in self._with_less_traffic(job, offers, chosen):
            agreed, price_max = agree(job, other, accepted, None, self.policy)
            if self.budget_guard.refusal(job, agreed) is None:
                self._launch(job, agreed, accepted, price_max)
                return
        self._wait(job, *refusal, best=chosen, ceiling=ceiling)

    def _ceiling(self, job: Job, candidate: Quote) -> MicroUsdPerGpuHour | None:
        return ceiling_for(candidate.offer.gpu, candidate.offer.gpu_count, job.spec.price, self.policy)

    def _with_less_traffic(
        self, job: Job, offers: RankedOffers, chosen: Quote
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Other offers under their ceiling, best first, each of which moves its bytes for less than the one before.

        The best offer by the hour may take more for one checkpoint than a budget has left.
        """
        least = traffic_of_a_run(job, chosen.offer)
        for candidate, ceiling in self._carried_quotes(job, offers, defaultdict(int)):
            if not least:
                return
            traffic = traffic_of_a_run(job, candidate.offer)
            if traffic < least:
                least = traffic
                yield candidate, ceiling

    def _free_offers(self, job: Job) -> tuple[RankedOffers, Quote | None]:
        """Return what fits the job, and the best of it that is free.

        Where no disk can hold the newest checkpoint, one is enough that holds an older one: the runner takes that.
        """
        key = requirement_key(job, self.policy)
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

    def _gate(self, job: Job) -> tuple[VerdictKind, str, datetime | None] | None:
        """Return what keeps any machine from being used for this job, whatever it costs, and until when."""
        if (turn := self.turns.wait(job)) is not None:
            return turn
        if self.policy.launches_paused:
            return VerdictKind.PAUSED, self.policy.launches_paused, None
        if pause := self.catalogue.pause():
            return VerdictKind.PAUSED, f"no launch can be prepared: {pause[0]}", pause[1]
        # A host may have read its last grant a little after we ended it, and it saves once the lease is over.
        lasts = lease_and_save(job, self.policy)
        left = pause_left(job, self.now, lasts)
        if left:
            self.builder.wake(self.now + left)
            return VerdictKind.BACKING_OFF, f"tried again in {span_words(left)}: {job.reason}", self.now + left
        for item in self.attempts_by_job[job.id]:
            released_at = (item.ended_at or item.intended_at) + lasts
            blocks = item.machine.may_compute and self.now < released_at and not is_left_to_provider(item, self.world)
            if item.end_reason is EndReason.LAUNCH_UNKNOWN:
                continue  # all that could be waited for was waited for before it was given up
            if item.state.counts or blocks:
                return (
                    VerdictKind.RECONCILING,
                    f"waits until {item.provider} confirms that the machine of attempt {item.id.number} has ended",
                    None if item.state.counts else released_at,
                )
        if self.machines >= self.policy.machines_max:
            sentence = f"all {self.policy.machines_max} machines of [budget] machines are in use"
            return VerdictKind.MACHINES, sentence, None
        if self.launches >= self.policy.launches_per_cycle_max:
            return VerdictKind.LAUNCH_LIMIT, f"{self.launches} launches at once are enough; its turn comes next", None
        return None

    def _carried_quotes(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each of the admissible quotes that the balance at its provider carries, where that is known."""
        admissible = partial(self._admissible_quotes, job, passed_over=passed_over)
        return self.prepaid_guard.carried(job, offers, admissible, self.catalogue, passed_over)

    def _admissible_quotes(
        self, job: Job, offers: RankedOffers, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each free quote at or under its ceiling, best first."""
        highest = highest_ceiling(job, self.policy)
        for candidate in self.catalogue.ranked(offers, passed_over):
            ceiling = self._ceiling(job, candidate)
            if ceiling is not None and is_admissible(candidate, ceiling, job.spec.price):
                yield candidate, ceiling
                continue
            passed_over[NO_CEILING if ceiling is None else ABOVE_CEILING] += 1
            if candidate.price.total > highest * self._ranks_behind_ppm // PPM:
                return  # no later one is admissible either, however much it ranks behind its price

    def _runner_up(self, job: Job, offers: RankedOffers, chosen: Quote) -> int | None:
        """Return what the next best machine under its ceiling counts as per hour, where we pay what we bid."""
        if not chosen.offer.pays_bid:
            return None
        walk = iter(self.catalogue.ranked(offers))
        for candidate in walk:
            if candidate.offer is chosen.offer:
                break
        for candidate in walk:
            if is_admissible(candidate, self._ceiling(job, candidate), job.spec.price):
                return self.catalogue.ranked_total(offers, candidate.offer)
            if candidate.price.total > chosen.price.total * self._ranks_behind_ppm // PPM:
                return None  # none that follows could limit the bid
        return None

    def _launch(self, job: Job, agreed: Quote, ceiling: MicroUsdPerGpuHour, price_max: MicroUsdPerHour) -> None:
        number = job.attempts_made + 1
        item = Attempt(
            id=AttemptId(job=job.id, number=number),
            key=attempt_key(self.policy.install, job.id, number, self.policy.identity),
            state=AttemptState.INTENDED,
            quote=agreed,
            ceiling=ceiling,
            price_max=price_max,
            intended_at=self.now,
            account=self.policy.providers[agreed.offer.provider].account,
        )
        self.builder.put_attempt(item)
        self.builder.put_intent(
            Intent(
                id=launch_intent_id(item.key),
                kind=IntentKind.LAUNCH,
                provider=item.provider,
                key=item.key,
                state=IntentState.OPEN,
                created_at=self.now,
                attempt=item.id,
            )
        )
        rate_low = agreed.price.total if job.rate_low is None else min(job.rate_low, agreed.price.total)
        self.builder.put_job(
            replace(self.builder.job(job.id), attempts_made=number, rate_low=MicroUsdPerHour(rate_low))
        )
        sentence = f"launching {quote_words(agreed)}, ceiling {per_gpu_words(ceiling)}: the best that fits now"
        if self.prepaid_guard.short:
            sentence += f", since {self.prepaid_guard.short}"
        self.builder.move_job(job.id, JobState.PROVISIONING, sentence)
        self.builder.event(
            "attempt.intended",
            sentence,
            attempt=item.id,
            provider=item.provider,
            offer=agreed.offer.offer_id,
            price_microusd_h=agreed.price.total,
            ceiling_microusd_gpu_h=ceiling,
        )
        self.catalogue.take(agreed.offer)
        self.budget_guard.commit(job, agreed)
        self.prepaid_guard.commit(job, agreed)
        self.machines += 1
        self.launches += 1
        self.verdicts[job.id] = Verdict(
            job=job.id, kind=VerdictKind.PLACED, sentence=sentence, at=self.now, best=agreed, ceiling=ceiling
        )

    # --- why not ---

    def _wait(
        self,
        job: Job,
        kind: VerdictKind,
        sentence: str,
        until: datetime | None = None,
        *,
        best: Quote | None = None,
        ceiling: MicroUsdPerGpuHour | None = None,
        passed_over: PassedOver = (),
    ) -> None:
        self.verdicts[job.id] = Verdict(
            job=job.id,
            kind=kind,
            sentence=sentence,
            at=self.now,
            best=best,
            ceiling=ceiling,
            passed_over=passed_over,
            until=until,
        )
        if self.builder.job(job.id).state.is_final:
            return
        if kind in _WAITS_FOR_PRICE and not (
            job.state is JobState.RECOVERING and kind is not VerdictKind.ABOVE_CEILING
        ):
            state = JobState.WAITING_PRICE
        elif job.state is JobState.RECOVERING and kind not in WAITS_FOR_ITS_TURN:
            return
        else:
            state = JobState.QUEUED
        if state is not job.state:
            self.builder.move_job(job.id, state, sentence)

    def _nothing_fits(self, job: Job, offers: RankedOffers) -> tuple[VerdictKind, str]:
        silent = "; ".join(f"{name}: {why}" for name, why in sorted(self.catalogue.silent.items()))
        silent = f" ({silent})" if silent else ""
        if self.catalogue.size == 0:
            return VerdictKind.NO_OFFERS, f"no provider shows offers now{silent}"
        why = f"none of {self.catalogue.size} offers fits {wanted_words(job.spec.resources)}"
        return VerdictKind.NO_MATCH, f"{why}: {passed_over_words(offers.mismatches)}{silent}"

    def _all_blocked(self, offers: RankedOffers) -> str:
        reasons = sorted({self.catalogue.blocked(offer) for offer in offers.entries})
        return f"all {len(offers.entries)} offers that fit are out for now: {'; '.join(reasons)}"

    def _all_too_expensive(self, offers: RankedOffers, compared: Mapping[str, int]) -> PassedOver:
        """Return why each offer is not taken; those that rank behind the last one compared are not read at all.

        Many jobs of the same requirements pass over the same offers, so the sums are made once.
        """
        known = (offers.walked, offers.read, *compared.items())
        found = offers.summaries.get(known)
        if found is None:
            counts = offers.mismatches + offers.blocked
            counts.update(compared)
            unread = self.catalogue.size - counts.total()
            if unread > 0:
                counts[NOT_COMPARED] = unread
            found = offers.summaries[known] = most_frequent_first(counts)
        return found

    def _too_expensive(self, job: Job, best: Quote, ceiling: MicroUsdPerGpuHour | None) -> tuple[VerdictKind, str]:
        offer = best.offer
        if ceiling is None:
            return (
                VerdictKind.NO_CEILING,
                f"no ceiling for {offer.gpu}: give max_price in the job or set [ceilings] in the config",
            )
        allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
        over = as_usd(per_gpu(MicroUsdPerHour(best.price.total - allowed), offer.gpu_count))
        return (
            VerdictKind.ABOVE_CEILING,
            f"the cheapest, {quote_words(best)}, is ${over:.4f} above the ceiling of {per_gpu_words(ceiling)}",
        )
