"""Which job gets which machine now, which machine must stop, and why every other job waits.

Theory. Running machines come first: one that would break a budget is ordered to save and stop while the money set aside
for that is still there. Then jobs that want a machine are served in order of priority, lost hosts before newcomers,
older before younger. A launch is admitted only when its price is at or under the job's ceiling and when what has been
spent, plus what every machine still needs to be ended safely, plus a useful run of the new one, stays within every
budget. The launch leaves here as an attempt and an intent; the call is made after both are durable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core.attempts import Attempt
from spotd.core.backoff import pause_left
from spotd.core.billing import words_over_ceiling
from spotd.core.budgets import BudgetGuard, hold, traffic_of_a_run
from spotd.core.candidates import (
    RISK_PREMIUM_PPM_MAX,
    TOO_LITTLE_DISK,
    CandidateCatalogue,
    RequirementKeys,
    ceiling_for,
    is_admissible,
    risk_premium_ppm,
    shape_of,
    total_ceiling,
)
from spotd.core.disk import disk_gb_for
from spotd.core.ids import AttemptId, JobId
from spotd.core.intents import Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.interruption_credit import is_left_to_provider, machines_in_use
from spotd.core.jobs import Job
from spotd.core.keys import attempt_key
from spotd.core.market import MarketSnapshot, ProviderOffers
from spotd.core.plan import Plan
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import PPM, gpu_price_limit, gpu_price_within, repriced, usual_bid
from spotd.core.prospects import plausible_rates
from spotd.core.quarantine import contain, guarded, in_words
from spotd.core.quotes import Quote
from spotd.core.requests import SAVES_NO_MORE, stop_attempt, without_save
from spotd.core.states import AttemptState, EndReason, JobState
from spotd.core.verdicts import Verdict, VerdictKind
from spotd.core.words import passed_over_words, per_gpu_words, quote_words, span_words, wanted_words, witness_words
from spotd.core.world import World
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour, as_usd, per_gpu, whole_machine
from spotd_providers.contract.values import Market, ProviderName

ABOVE_CEILING: Final = "above the ceiling"
NO_CEILING: Final = "no ceiling for this GPU"
NOT_COMPARED: Final = "ranked behind those, not compared"

_WAITS_FOR_PRICE = frozenset(
    {VerdictKind.ABOVE_CEILING, VerdictKind.NO_CEILING, VerdictKind.NO_MATCH, VerdictKind.NO_OFFERS}
)


def decide(world: World, market: MarketSnapshot, now: datetime) -> Plan:
    """Return launches, stop orders and one verdict per job."""
    return guarded(lambda some: _Decision(some, market, now).run(), world, now)


class _Decision:
    """One decision; exists for the length of one call."""

    def __init__(self, world: World, market: MarketSnapshot, now: datetime) -> None:
        self.world = world
        self.now = now
        self.policy = world.policy
        self.builder = PlanBuilder(world, now)
        self.market = market
        self.catalogue = self._catalogue_of(market)
        self.budget_guard = BudgetGuard(world, now)
        self.verdicts: dict[JobId, Verdict] = {}
        self.attempts_by_job: defaultdict[JobId, list[Attempt]] = defaultdict(list)
        for attempt in world.attempts.values():
            self.attempts_by_job[attempt.id.job].append(attempt)
        self.machines = machines_in_use(world, now)
        self.launches = 0
        self._ranks_behind_ppm = (PPM + RISK_PREMIUM_PPM_MAX) * (PPM + world.policy.bid_headroom_ppm) // PPM
        """How far behind its price an offer may rank at most."""

    def run(self) -> Plan:
        self._enforce_budgets()
        self._enforce_ceilings()
        for job in _serving_order(self.world.jobs.values()):
            if self.builder.job(job.id).state.is_final:
                continue  # quarantined by a former step, or over
            if job.state.may_be_placed:
                self._place_alone(job)
            elif (error := self.builder.attempted(partial(self._explain_running, job))) is not None:
                self.builder.note_contained(f"the verdict on job {job.id}", in_words(error))
        self.builder.wake(min([self.now + self.policy.recheck_every, *self.catalogue.waits]))
        return replace(self.builder.plan(), verdicts=self.verdicts)

    # --- machines that run ---

    def _running(self) -> list[Attempt]:
        """Return the attempts that count and were not ordered to stop."""
        return sorted(
            (a for i, a in self.world.attempts.items() if a.state.counts and self.builder.attempt(i).stop is None),
            key=lambda a: (a.id.job, a.id.number),
        )

    def _enforce_ceilings(self) -> None:
        """Stop each machine that costs more than its job accepted, by its price or by what it uploads."""
        for item in self._running():
            contain(self.builder, item.id.job, partial(self._enforce_ceiling, item), "its price cannot be judged")

    def _enforce_ceiling(self, item: Attempt) -> None:
        over = words_over_ceiling(self.builder, item)
        if over:
            stop_attempt(self.builder, item, EndReason.PRICE_ROSE, over)

    def _enforce_budgets(self) -> None:
        running = sorted(self._running(), key=self._saved_at)
        shortage = self.budget_guard.shortage()
        for item in self.world.attempts.values():
            contain(self.builder, item.id.job, partial(self._end_saving, item, shortage), "its stop cannot be judged")
        for item in self._stopped_now():
            contain(self.builder, item.id.job, partial(self._hold_save, item), "its stop cannot be judged")
        for item in running:
            step = partial(self._enforce_budget, item, shortage)
            contain(self.builder, item.id.job, step, "its budget cannot be judged")
        if shortage and running:
            kind, why = shortage
            limit = self.policy.budget_day if kind is VerdictKind.BUDGET_DAY else self.policy.budget_month
            if limit is not None and not self.budget_guard.is_held(kind, limit):
                hold(self.builder, kind, limit, why)
                self.budget_guard.held_now(kind, limit)

    def _saved_at(self, item: Attempt) -> tuple[datetime, JobId]:
        """Up to when its work is safe: the machine with most to lose comes first."""
        own = [c.at for c in self.world.jobs[item.id.job].checkpoints if c.attempt == item.id.number]
        return max(own, default=item.intended_at), item.id.job

    def _stopped_now(self) -> list[Attempt]:
        """Those whose stop was ordered in the reading before this decision, for whatever reason."""
        orders = [a for a in self.world.attempts.values() if a.stop is not None and a.stop.ordered_at == self.now]
        return sorted(orders, key=self._saved_at)

    def _hold_save(self, item: Attempt) -> None:
        """Hold the uploads of a machine that stops to what the budgets have left."""
        stop = item.stop
        if stop is None or not stop.flush or not item.state.counts or self.budget_guard.carries_save(item):
            return
        self.builder.put_attempt(replace(item, stop=without_save(self.builder, stop)))
        self.builder.event("attempt.stopping", f"told to {SAVES_NO_MORE}", attempt=item.id, reason=stop.reason.value)

    def _end_saving(self, item: Attempt, shortage: tuple[VerdictKind, str] | None) -> None:
        """End a save beyond its first deadline unless every budget allows it."""
        stop = item.stop
        if item.state is not AttemptState.STOPPING or stop is None or not stop.progress or stop.deadline <= self.now:
            return
        if shortage or self.budget_guard.job_shortage(self.world.jobs[item.id.job]):
            self.builder.put_attempt(replace(item, stop=replace(stop, deadline=self.now, limit=self.now)))
            self.builder.wake(self.now)

    def _enforce_budget(self, item: Attempt, shortage: tuple[VerdictKind, str] | None) -> None:
        own = self.budget_guard.job_shortage(self.world.jobs[item.id.job])
        if own or shortage:
            reason = EndReason.OVER_BUDGET if own else EndReason.BUDGET_PAUSED
            why = own or (shortage[1] if shortage else "")
            stop_attempt(self.builder, item, reason, why, flush=self.budget_guard.carries_save(item))

    def _explain_running(self, job: Job) -> None:
        item = next((a for a in self.attempts_by_job[job.id] if a.state.counts), None)
        stopping = job.state is JobState.CANCELLING or (item is not None and item.stop is not None)
        self._verdict(
            job,
            VerdictKind.STOPPING if stopping else VerdictKind.RUNNING,
            job.reason if item is None else self._running_words(job, item),
            best=item.quote if item is not None else None,
            ceiling=item.ceiling if item is not None else None,
        )

    def _running_words(self, job: Job, item: Attempt) -> str:
        doubt = witness_words(item, self.policy, self.now)
        return f"{job.reason}; agreed at {quote_words(item.quote)}" + (f"; {doubt}" if doubt else "")

    # --- jobs that want a machine ---

    def _place_alone(self, job: Job) -> None:
        """Place one job. Offers that make this raise are left out; a job that raises without them is at fault."""
        error = self.builder.attempted(partial(self._place, job))
        if error is None:
            return
        self._leave_out_boards_that_raise_for(job)
        contain(self.builder, job.id, partial(self._place, job), "it cannot be placed")

    def _leave_out_boards_that_raise_for(self, job: Job) -> None:
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
            offers = catalogue.list_for(shape_of(job, self.policy))
            for candidate in catalogue.ranked(offers):
                ceiling = ceiling_for(candidate.offer.gpu, candidate.offer.gpu_count, job.spec.price, self.policy)
                self._agree(job, candidate, ceiling or MicroUsdPerGpuHour(0), candidate.price.total)

        return self.builder.attempted(survey)

    def _catalogue_of(self, market: MarketSnapshot) -> CandidateCatalogue:
        world = self.world
        return CandidateCatalogue(market, world.policy, world.cooldowns, self.now, attempts=world.attempts.values())

    def _place(self, job: Job) -> None:
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
            self._wait(job, *self._nothing_fits(job, offers), passed_over=_most_frequent_first(offers.mismatches))
            return
        if best is None:
            passed_over = _most_frequent_first(offers.mismatches + offers.blocked)
            until = self.catalogue.free_at(offers)
            self._wait(job, VerdictKind.COOLING, self._all_blocked(offers), until, passed_over=passed_over)
            return
        compared: defaultdict[str, int] = defaultdict(int)
        chosen, ceiling = self._admissible(job, offers, compared)
        if chosen is None:
            passed_over = self._all_too_expensive(offers, compared)
            self._wait(job, *self._too_expensive(job, best), best=best, ceiling=ceiling, passed_over=passed_over)
            return
        if ceiling is None:
            return
        agreed, price_max = self._agree(job, chosen, ceiling, self._runner_up(job, offers, chosen))
        refusal = self.budget_guard.refusal(job, agreed)
        if refusal is None:
            self._launch(job, agreed, ceiling, price_max)
            return
        for other, accepted in self._with_less_traffic(job, offers, chosen):
            agreed, price_max = self._agree(job, other, accepted, None)
            if self.budget_guard.refusal(job, agreed) is None:
                self._launch(job, agreed, accepted, price_max)
                return
        self._wait(job, *refusal, best=chosen, ceiling=ceiling)

    def _with_less_traffic(
        self, job: Job, offers: RequirementKeys, chosen: Quote
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Other offers under their ceiling, best first, each of which moves its bytes for less than the one before.

        The best offer by the hour may take more for one checkpoint than a budget has left.
        """
        least = traffic_of_a_run(job, chosen.offer)
        for candidate, ceiling in self._admissible_quotes(job, offers, defaultdict(int)):
            if not least:
                return
            traffic = traffic_of_a_run(job, candidate.offer)
            if traffic < least:
                least = traffic
                yield candidate, ceiling

    def _free_offers(self, job: Job) -> tuple[RequirementKeys, Quote | None]:
        """Return what fits the job, and the best of it that is free.

        Where no disk can hold the newest checkpoint, one is enough that holds an older one: the runner takes that.
        """
        offers = self.catalogue.list_for(shape_of(job, self.policy))
        best = self.catalogue.first_free(offers)
        if offers.entries or not offers.mismatches[TOO_LITTLE_DISK] or not job.checkpoints:
            return offers, best
        smallest = disk_gb_for(job, min(saved.bytes for saved in job.checkpoints))
        shape = shape_of(job, self.policy)
        if smallest >= shape.needs.disk_gb:
            return offers, best
        fallback = self.catalogue.list_for(replace(shape, needs=replace(shape.needs, disk_gb=smallest)))
        best = self.catalogue.first_free(fallback)
        return (fallback, best) if fallback.entries else (offers, None)

    def _gate(self, job: Job) -> tuple[VerdictKind, str, datetime | None] | None:
        """Return what keeps any machine from being used for this job, whatever it costs, and until when."""
        if self.policy.launches_paused:
            return VerdictKind.PAUSED, self.policy.launches_paused, None
        if pause := self.catalogue.pause():
            return VerdictKind.PAUSED, f"no launch can be prepared: {pause[0]}", pause[1]
        longest = self.policy.lease + job.spec.checkpoint.stop_grace + self.policy.save_allowance
        left = pause_left(job, self.now, longest)
        if left:
            self.builder.wake(self.now + left)
            return VerdictKind.BACKING_OFF, f"tried again in {span_words(left)}: {job.reason}", self.now + left
        for item in self.attempts_by_job[job.id]:
            # A host may have read its last grant a little after we ended it, and it saves once the lease is over.
            saving = job.spec.checkpoint.stop_grace + self.policy.save_allowance
            released_at = (item.ended_at or item.intended_at) + self.policy.lease + saving
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

    def _admissible(
        self, job: Job, offers: RequirementKeys, passed_over: defaultdict[str, int]
    ) -> tuple[Quote | None, MicroUsdPerGpuHour | None]:
        """Return the cheapest free quote at or under its ceiling; else nothing, and the ceiling of the cheapest."""
        for candidate, ceiling in self._admissible_quotes(job, offers, passed_over):
            return candidate, ceiling
        best = self.catalogue.first_free(offers)
        if best is None:
            return None, None
        return None, ceiling_for(best.offer.gpu, best.offer.gpu_count, job.spec.price, self.policy)

    def _admissible_quotes(
        self, job: Job, offers: RequirementKeys, passed_over: defaultdict[str, int]
    ) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Each free quote at or under its ceiling, best first."""
        highest = self._highest_ceiling(job)
        for candidate in self.catalogue.ranked(offers, passed_over):
            offer = candidate.offer
            ceiling = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, self.policy)
            if ceiling is not None and is_admissible(candidate, ceiling, job.spec.price):
                yield candidate, ceiling
                continue
            passed_over[NO_CEILING if ceiling is None else ABOVE_CEILING] += 1
            if highest is not None and candidate.price.total > highest * self._ranks_behind_ppm // PPM:
                return  # no later one is admissible either, however much it ranks behind its price

    def _highest_ceiling(self, job: Job) -> int | None:
        """No machine that costs more than this per hour can be admitted, so the walk may stop there."""
        price = job.spec.price
        counts = [g.count for g in job.spec.resources.gpu] or [job.spec.resources.gpu_count]
        if price is not None and price.machine_hour is not None:
            return price.machine_hour
        if price is not None and price.per_gpu_hour is not None:
            return price.per_gpu_hour * max(counts)
        known = [*self.policy.ceilings.values()]
        if self.policy.ceiling_default is not None:
            known.append(self.policy.ceiling_default)
        return max(known) * max(counts) if known else 0

    def _agree(
        self, job: Job, chosen: Quote, ceiling: MicroUsdPerGpuHour, next_best: int | None
    ) -> tuple[Quote, MicroUsdPerHour]:
        """Return what to bid or at most to pay for the GPU part, and the quote at that price where we pay what we bid.

        A bid is no higher than leaves this offer the best choice beside the next best, whose rank is given.
        """
        offer = chosen.offer
        allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
        limit = gpu_price_limit(chosen, ceiling)
        if allowed < whole_machine(ceiling, offer.gpu_count):
            limit = min(limit, gpu_price_within(chosen, allowed))
        if offer.market is Market.ON_DEMAND or not offer.pays_bid:
            return chosen, MicroUsdPerHour(max(limit, offer.gpu_price))
        wanted = min(limit, usual_bid(offer, self.policy.bid_headroom_ppm))
        if next_best is not None:
            wanted = min(wanted, gpu_price_within(chosen, next_best * PPM // (PPM + risk_premium_ppm(offer))))
        bid = MicroUsdPerHour(max(offer.gpu_price, wanted))
        return repriced(chosen, bid), bid

    def _runner_up(self, job: Job, offers: RequirementKeys, chosen: Quote) -> int | None:
        """Return what the next best machine under its ceiling counts as per hour, where we pay what we bid."""
        if not chosen.offer.pays_bid:
            return None
        walk = iter(self.catalogue.ranked(offers))
        for candidate in walk:
            if candidate.offer is chosen.offer:
                break
        for candidate in walk:
            offer = candidate.offer
            ceiling = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, self.policy)
            if is_admissible(candidate, ceiling, job.spec.price):
                return self.catalogue.ranked_total(offers, offer)
            if candidate.price.total > chosen.price.total * self._ranks_behind_ppm // PPM:
                return None  # none that follows could limit the bid
        return None

    def _launch(self, job: Job, agreed: Quote, ceiling: MicroUsdPerGpuHour, price_max: MicroUsdPerHour) -> None:
        number = job.attempts_made + 1
        identity = AttemptId(job=job.id, number=number)
        key = attempt_key(self.policy.install, job.id, number, self.policy.identity)
        item = Attempt(
            id=identity,
            key=key,
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
                id=launch_intent_id(key),
                kind=IntentKind.LAUNCH,
                provider=item.provider,
                key=key,
                state=IntentState.OPEN,
                created_at=self.now,
                attempt=identity,
            )
        )
        rate_low = agreed.price.total if job.rate_low is None else min(job.rate_low, agreed.price.total)
        self.builder.put_job(
            replace(self.builder.job(job.id), attempts_made=number, rate_low=MicroUsdPerHour(rate_low))
        )
        sentence = f"launching {quote_words(agreed)}, ceiling {per_gpu_words(ceiling)}: the best that fits now"
        self.builder.move_job(job.id, JobState.PROVISIONING, sentence)
        self.builder.event(
            "attempt.intended",
            sentence,
            attempt=identity,
            provider=item.provider,
            offer=agreed.offer.offer_id,
            price_microusd_h=agreed.price.total,
            ceiling_microusd_gpu_h=ceiling,
        )
        self.catalogue.take(agreed.offer)
        self.budget_guard.commit(job, agreed)
        self.machines += 1
        self.launches += 1
        self._verdict(job, VerdictKind.PLACED, sentence, best=agreed, ceiling=ceiling)

    # --- saying why not ---

    def _wait(
        self,
        job: Job,
        kind: VerdictKind,
        sentence: str,
        until: datetime | None = None,
        *,
        best: Quote | None = None,
        ceiling: MicroUsdPerGpuHour | None = None,
        passed_over: tuple[tuple[str, int], ...] = (),
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
        elif job.state is JobState.RECOVERING:
            return
        else:
            state = JobState.QUEUED
        if state is not job.state:
            self.builder.move_job(job.id, state, sentence)

    def _nothing_fits(self, job: Job, offers: RequirementKeys) -> tuple[VerdictKind, str]:
        silent = "; ".join(f"{name}: {why}" for name, why in sorted(self.catalogue.silent.items()))
        if self.catalogue.size == 0:
            return VerdictKind.NO_OFFERS, "no provider shows offers now" + (f" ({silent})" if silent else "")
        request_counts = passed_over_words(offers.mismatches)
        wanted = wanted_words(job.spec.resources)
        return VerdictKind.NO_MATCH, f"none of {self.catalogue.size} offers fits {wanted}: {request_counts}" + (
            f" ({silent})" if silent else ""
        )

    def _all_blocked(self, offers: RequirementKeys) -> str:
        reasons = sorted({self.catalogue.blocked(offer) for offer in offers.entries})
        return f"all {len(offers.entries)} offers that fit are out for now: {'; '.join(reasons)}"

    def _all_too_expensive(self, offers: RequirementKeys, compared: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """Every offer and why it is not taken; those that rank behind the last one compared are not read at all."""
        counts = dict(offers.mismatches)  # adding counters takes several times as long
        for more in (offers.blocked, compared):
            for why, count in more.items():
                counts[why] = counts.get(why, 0) + count
        unread = self.catalogue.size - sum(counts.values())
        if unread > 0:
            counts[NOT_COMPARED] = unread
        return _most_frequent_first(counts)

    def _too_expensive(self, job: Job, best: Quote) -> tuple[VerdictKind, str]:
        offer = best.offer
        ceiling = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, self.policy)
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

    def _verdict(
        self,
        job: Job,
        kind: VerdictKind,
        sentence: str,
        *,
        best: Quote | None = None,
        ceiling: MicroUsdPerGpuHour | None = None,
    ) -> None:
        self.verdicts[job.id] = Verdict(
            job=job.id, kind=kind, sentence=sentence, at=self.now, best=best, ceiling=ceiling
        )


def _most_frequent_first(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counts.items(), key=lambda row: (-row[1], row[0])))


def _serving_order(jobs: Iterable[Job]) -> list[Job]:
    return sorted(
        jobs,
        key=lambda j: (-j.spec.priority, j.state is not JobState.RECOVERING, j.submitted_at, j.id),
    )
