"""A machine for each job that wants one, or why it waits.

Theory. A launch is admitted only when its price is at or under the job's ceiling and when what has been spent, plus
what every machine still needs to be ended safely, plus a useful run of the new one, stays within every budget. The
launch leaves here as an attempt and an intent; the call is made after both are durable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Final

from spotd.core.admissible import AdmissibleQuotes
from spotd.core.author import MachineVerdicts
from spotd.core.budgets import BudgetGuard
from spotd.core.checkpoints import advice_at_launch
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import pause_left
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, sized, target_words
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, Quote
from spotd.core.domain.states import EndReason, JobState
from spotd.core.domain.world import RENTING, TAKING, PassedOver, Verdict, VerdictKind, World, launch_rows
from spotd.core.enforcement import Preemption, plausible_rates
from spotd.core.kernel.quarantine import contain, in_words
from spotd.core.metering import is_left_to_provider, lease_and_save
from spotd.core.own_first import OwnFirst
from spotd.core.pacer import Pacer, words_of_expiry
from spotd.core.plan_builder import PlanBuilder
from spotd.core.prepaid import PrepaidGuard
from spotd.core.pricing import most_frequent_first, per_gpu_words, quote_words, span_words
from spotd.core.ranking.candidates import (
    CandidateCatalogue,
    agree,
    all_blocked,
    all_too_expensive,
    nothing_fits,
    too_expensive,
)
from spotd.core.reuse import WaitingMachines
from spotd.core.schedule import Turns, TurnWait
from spotd.core.wait_reasons import BEFORE_MARKET, FROM_MARKET, state_of_waiting
from spotd_providers.contract.values import MicroUsdPerGpuHour, MicroUsdPerHour, ProviderName

_LIMITS_OF_LAUNCHES: Final = frozenset({VerdictKind.MACHINES, VerdictKind.LAUNCH_LIMIT})
"""What keeps a job from another machine, but not from one that waits for it."""


class JobPlacement:
    """The jobs that want a machine, in one decision; `place` is called for each in its turn."""

    def __init__(
        self,
        builder: PlanBuilder,
        world: World,
        market: MarketSnapshot,
        budget_guard: BudgetGuard,
        machine_verdicts: MachineVerdicts,
    ) -> None:
        self.builder = builder
        self.machine_verdicts = machine_verdicts
        self.world = world
        self.now = builder.now
        self.policy = world.policy
        self.budget_guard = budget_guard
        self.prepaid_guard = PrepaidGuard(world, market, builder.now)
        self.attempts_by_job: defaultdict[JobId, list[Attempt]] = defaultdict(list)
        for attempt in world.attempts.values():
            self.attempts_by_job[attempt.id.job].append(attempt)
        self.admissible = AdmissibleQuotes(world, market, self.now, self.prepaid_guard, self.attempts_by_job)
        self.turns = Turns(builder, world)
        self.preemption = Preemption(builder, world, budget_guard, machine_verdicts)
        self.pacer = Pacer(builder, world, self.admissible, budget_guard, machine_verdicts)
        self.own_first = OwnFirst(builder, world, market, self.pacer.time_to_wait)
        self.verdicts: dict[JobId, Verdict] = {}
        self.machines = machine_verdicts.machines_in_use
        self.launches = 0
        self.waiting = WaitingMachines(builder, world, market, budget_guard, self.prepaid_guard, self.admissible)

    @property
    def catalogue(self) -> CandidateCatalogue:
        """The offers of the market that are read now."""
        return self.admissible.catalogue

    def end(self) -> None:
        """Let go of everything: parts of this refer back to it, and only a search for garbage frees such a circle.

        A world and its attempts as they were would stay until then, for each decision of a thousand jobs.
        """
        vars(self).clear()

    def place(self, job: Job) -> None:
        """Place one job. Offers that make this raise are left out; a job that raises without them is at fault."""
        if self.builder.attempted(partial(self._place, job)) is not None:
            self._leave_out_offers_that_raise_for(job)
            contain(self.builder, job.id, partial(self._place, job), "it cannot be placed")

    def _leave_out_offers_that_raise_for(self, job: Job) -> None:
        if self._survey_error(job, {}) is not None:
            return
        by_provider = dict(self.admissible.market.by_provider)
        for name in sorted(by_provider):
            error = self._survey_error(job, {name: by_provider[name]})
            if error is not None:
                self.builder.note_contained(f"the offers of {name}", in_words(error))
                del by_provider[name]
        self.admissible.read(replace(self.admissible.market, by_provider=by_provider))

    def _survey_error(self, job: Job, by_provider: Mapping[ProviderName, ProviderOffers]) -> Exception | None:
        """Return what reading these offers for the job raises, if anything."""

        def survey() -> None:
            catalogue = CandidateCatalogue(self.world, MarketSnapshot(by_provider=by_provider), self.now)
            offers = catalogue.list_for(catalogue.key_of(job))
            for candidate in catalogue.ranked(offers):
                ceiling = self.admissible.ceiling(job, candidate) or MicroUsdPerGpuHour(0)
                agree(job, candidate, ceiling, candidate.price.total, self.policy)

        return self.builder.attempted(survey)

    def _place(self, job: Job) -> None:
        if over := words_of_expiry(job, self.now):
            self.builder.move_job(job.id, JobState.EXPIRED, over)
            self._wait(job, VerdictKind.DEADLINE, over)
            return
        job = self.turns.with_inputs(job)
        used_up = ""
        if job.budget is not None:
            used_up = self.budget_guard.is_hopeless(job, plausible_rates(self.catalogue, job))
        if used_up:
            sentence = f"the job's budget is used up: {used_up}; spotctl budget {job.name} +USD, then spotctl retry"
            self.builder.move_job(job.id, JobState.EXPIRED, sentence)
            self._wait(job, VerdictKind.BUDGET_JOB, sentence)
            return
        gate = self._gate(job)
        if self._takes_over(job, gate):
            return
        if gate is not None:
            self.pacer.watch(job)
            if not self.waiting.machines:  # else the place of one of these is free in a moment
                if gate[0] is VerdictKind.MACHINES:
                    self.machine_verdicts.note_waiting(job, partial(self._would_start, job))
                gate = self.preemption.machine_for(job, gate, lambda: self._could_start(job, unclaimed=True))
            self._wait(job, *gate)
            return
        if not self._is_pressed(job):
            self._choose(self._with_most_machines(job))
            return
        with self.catalogue.pressed():
            self._choose(self._with_most_machines(job))

    def _with_most_machines(self, job: Job) -> Job:
        """Return the job with as many machines of its range as it could have now; with the fewest if none could.

        While it waits for own machines, fewer of those come before more that are rented. A job that left its machines
        for cheaper ones gets as many as it had: with more it could pay more than before.
        """
        fewest = sized(job, job.spec.resources.nodes)
        if fewest is job:
            return job
        own = self.own_first.wait(fewest, self.catalogue, begins=False)
        claim = job.moves.claim
        first = () if claim is None or not claim.nodes else (claim.nodes,)
        for nodes in (*first, *job.spec.resources.sizes):
            other = sized(job, nodes)
            if own is not None and self.own_first.wait(other, self.catalogue, begins=False) is None:
                continue
            if machines_in_use_limit(self, other) is not None or self.catalogue.is_scarce(nodes):
                continue
            if self._could_start(other) is not None:
                return other
        return fewest

    def _takes_over(self, job: Job, gate: TurnWait | None) -> bool:
        """Whether the job gets a machine that waits for one; that has its place among the machines in use already."""
        is_limited = gate is not None and gate[0] in _LIMITS_OF_LAUNCHES
        if not self.waiting.machines or (gate is not None and not is_limited):
            return False
        own = self.own_first.wait(job, self.catalogue, begins=False)
        paced = self.pacer.paced(job) if own is None else own.job
        chosen = None if paced is None else self.waiting.best_for(paced, compares=not is_limited)
        if paced is None or chosen is None:
            return False
        item, sentence = self.waiting.hand_over(paced, chosen)
        self._note_placement(paced, item, item.quote, item.ceiling, self._with_words(sentence, paced))
        return True

    def _is_pressed(self, job: Job) -> bool:
        """Whether the deadline cannot be met without a host that was lost a while ago."""
        if job.spec.schedule.deadline is None or not self.catalogue.has_lost_hosts:
            return False
        if next(self.admissible.quotes(job), None) is not None:
            return False
        free_at = self.catalogue.free_at(self.admissible.free_offers(job)[0])
        with self.catalogue.pressed():
            return free_at is not None and self.pacer.is_pressed(job, free_at)

    def _choose(self, job: Job) -> None:
        found: Job | TurnWait | None = None
        for part in MARKET_PARTS:
            if (found := part(self, job)) is not None:
                break
        if isinstance(found, tuple):
            self._wait(job, *found)
            return
        job = found or job
        offers, best = self.admissible.free_offers(job)
        if not offers.entries:
            self._wait(
                job, *nothing_fits(self.catalogue, job, offers), passed_over=most_frequent_first(offers.mismatches)
            )
            return
        if best is None:
            passed_over = most_frequent_first(offers.mismatches + offers.blocked)
            until = self.catalogue.free_at(offers)
            self._wait(job, VerdictKind.COOLING, all_blocked(self.catalogue, offers), until, passed_over=passed_over)
            return
        compared: defaultdict[str, int] = defaultdict(int)
        chosen, ceiling = next(
            self.admissible.quotes_of(job, offers, compared), (None, self.admissible.ceiling(job, best))
        )
        if chosen is None or ceiling is None:
            passed_over = all_too_expensive(self.catalogue, offers, compared)
            short = self.prepaid_guard.short
            why = (VerdictKind.BALANCE, short) if short else self.catalogue.refusal_of(job, best.offer)
            why = why or too_expensive(job, offers, best, ceiling)
            self._wait(job, *why, best=best, ceiling=ceiling, passed_over=passed_over)
            return
        agreed, price_max = agree(job, chosen, ceiling, self.admissible.runner_up(job, offers, chosen), self.policy)
        refusal = self.budget_guard.refusal(job, agreed)
        if refusal is None:
            self._launch(job, agreed, ceiling, price_max)
            return
        for other, accepted in self.admissible.needing_less(job, offers, chosen):
            agreed, price_max = agree(job, other, accepted, None, self.policy)
            if self.budget_guard.refusal(job, agreed) is None:
                self._launch(job, agreed, accepted, price_max)
                return
        self._wait(job, *self.preemption.money_for(job, agreed, refusal), best=chosen, ceiling=ceiling)

    def _could_start(self, job: Job, *, unclaimed: bool = False) -> Quote | None:
        """Return the machine that price, pace and budgets would let the job have at once, were one free.

        Args:
            unclaimed: another machine is to be stopped for it, so one that another job is to get is none.
        """
        own = self.own_first.wait(job, self.catalogue, begins=False)
        if (paced := self.pacer.paced(job) if own is None else own.job) is None:
            return None
        offers = self.admissible.free_offers(paced)[0]
        carried = self.admissible.quotes_of(paced, offers, defaultdict(int))
        chosen = next((one for one in carried if not unclaimed or not self._is_claimed(one[0], job)), None)
        others = () if chosen is None else (chosen, *self.admissible.needing_less(paced, offers, chosen[0]))
        agreed = (agree(paced, one, ceiling, None, self.policy)[0] for one, ceiling in others)
        free = (one for one in agreed if not unclaimed or not self._is_claimed(one, job))
        return next((one for one in free if self.budget_guard.refusal(paced, one) is None), None)

    def _is_claimed(self, quote: Quote, job: Job) -> bool:
        return self.machine_verdicts.is_claimed(quote.offer, job)

    def _would_start(self, job: Job) -> bool:
        """Whether one more place would be used for this job at once; offers that make this raise are no reason."""
        found: list[Quote | None] = []
        error = self.builder.attempted(lambda: found.append(self._could_start(job)))
        return error is None and found[0] is not None

    def _gate(self, job: Job) -> TurnWait | None:
        """Return what keeps any machine from being used for this job, whatever it costs, and until when."""
        for gate in GATES:
            if (wait := gate(self, job)) is not None:
                return wait
        return None

    def _launch(self, job: Job, agreed: Quote, ceiling: MicroUsdPerGpuHour, price_max: MicroUsdPerHour) -> None:
        self.pacer.note_spot_wait(job, is_market=True)
        known = self.builder.job(job.id)
        if agreed.is_own:
            alike = sized(known, agreed.offer.nodes)
            agreed = replace(agreed, on_demand=self.own_first.rent_beside(alike, agreed, self.catalogue))
        item, intent = launch_rows(job, agreed, ceiling, price_max, self.policy, self.now)
        item = replace(item, save_every=advice_at_launch(job, agreed.offer, self.world, self.now))
        self.builder.put_attempt(item)
        self.builder.put_intent(intent)
        begins, wanted = TAKING if agreed.is_own else RENTING, known.spec.resources
        sentence = f"{begins}{quote_words(agreed)}, ceiling {per_gpu_words(ceiling)}: the best that fits now"
        if wanted.nodes_max and agreed.offer.nodes < wanted.nodes_max:
            sentence += f"; no more of {wanted.nodes_words} machines fit price, budgets and what is free"
        sentence += target_words(job.moves, job.attempts_made, agreed) + self.catalogue.hurry_words(agreed.offer)
        if self.prepaid_guard.short:
            sentence += f", since {self.prepaid_guard.short}"
        self._note_placement(job, item, agreed, ceiling, self._with_words(sentence, job))
        self.catalogue.take(agreed.offer)
        self.machines += agreed.offer.nodes
        self.launches += 1

    def _note_placement(
        self, job: Job, item: Attempt, agreed: Quote, ceiling: MicroUsdPerGpuHour, sentence: str
    ) -> None:
        """Record that the job has this machine, and promise its money."""
        known = self.builder.job(job.id)
        fewest = agreed.price.total * known.spec.resources.nodes // agreed.offer.nodes
        rate_low = MicroUsdPerHour(fewest if job.rate_low is None else min(job.rate_low, fewest))
        self.builder.put_job(replace(known, attempts_made=item.id.number, rate_low=rate_low))
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
        self.budget_guard.commit(job, agreed)
        self.prepaid_guard.commit(job, agreed)
        self.turns.note_launch(job)
        self.verdicts[job.id] = Verdict(
            job=job.id, kind=VerdictKind.PLACED, sentence=sentence, at=self.now, best=agreed, ceiling=ceiling
        )

    def _with_words(self, sentence: str, job: Job) -> str:
        """Return the sentence with what is to be said of own machines and of the deadline."""
        return self.pacer.joined(self.own_first.with_words(sentence, job), job)

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
        is_over = self.builder.job(job.id).state.is_final
        self.verdicts[job.id] = Verdict(
            job=job.id,
            kind=kind,
            sentence=sentence if is_over else self._with_words(sentence, job),
            at=self.now,
            best=best,
            ceiling=ceiling,
            passed_over=passed_over,
            until=until,
        )
        if is_over:
            return
        if kind in FROM_MARKET or kind in BEFORE_MARKET:
            self.pacer.note_spot_wait(job, is_market=kind in FROM_MARKET)
        self.turns.note_wait(job, sentence)
        state = state_of_waiting(job, kind, self.now)
        if state is not job.state:
            self.builder.move_job(job.id, state, sentence)


# What keeps every machine from a job, one function for each reason.


def its_turn(placement: JobPlacement, job: Job) -> TurnWait | None:
    """Wait for its window, the jobs before it, or a place in its array."""
    return placement.turns.wait(job)


def launches_paused(placement: JobPlacement, _job: Job) -> TurnWait | None:
    """Wait while launches are paused as a whole: without a store, or without the lease of the install."""
    paused = placement.policy.launches_paused
    return (VerdictKind.PAUSED, paused, None) if paused else None


def locked_secrets(placement: JobPlacement, job: Job) -> TurnWait | None:
    """Wait for the key that its secrets were encrypted with: without them it is started nowhere."""
    locked = placement.policy.locked.get(job.id)
    return (VerdictKind.PAUSED, locked, None) if locked else None


def nothing_prepared(placement: JobPlacement, _job: Job) -> TurnWait | None:
    """Wait a moment: the last launch could not be prepared."""
    pause = placement.catalogue.pause
    return (VerdictKind.PAUSED, f"no launch can be prepared: {pause[0]}", pause[1]) if pause else None


def backing_off(placement: JobPlacement, job: Job) -> TurnWait | None:
    """Wait for the end of the pause after its last launches failed."""
    if job.not_before is None:
        return None
    left = pause_left(job, placement.now, lease_and_save(job, placement.policy))
    if not left:
        return None
    placement.builder.wake(placement.now + left)
    return VerdictKind.BACKING_OFF, f"tried again in {span_words(left)}: {job.reason}", placement.now + left


def former_machine(placement: JobPlacement, job: Job) -> TurnWait | None:
    """Wait until its former machine cannot compute: its provider confirmed the end, or its lease has run out."""
    # A host may have read its last grant a little after we ended it, and it saves once the lease is over.
    attempts = placement.attempts_by_job.get(job.id)
    if not attempts:
        return None
    lasts = lease_and_save(job, placement.policy)
    for item in attempts:
        released_at = (item.ended_at or item.intended_at) + lasts
        may_compute = item.machine.may_compute and placement.now < released_at
        if item.end_reason is EndReason.LAUNCH_UNKNOWN:
            continue  # all that could be waited for was waited for before it was given up
        if item.state.counts or (may_compute and not is_left_to_provider(item, placement.world)):
            return (
                VerdictKind.RECONCILING,
                f"waits until {item.provider} confirms that the machine of attempt {item.id.number} has ended",
                None if item.state.counts else released_at,
            )
    return None


def machines_in_use_limit(placement: JobPlacement, job: Job) -> TurnWait | None:
    """Wait for one of the machines that `[budget] machines` allows, or for as many as the job runs on."""
    nodes, most = job.spec.resources.nodes, placement.policy.machines_max
    if placement.machines + nodes <= most:
        return None
    if placement.machines >= most:
        return VerdictKind.MACHINES, placement.policy.machines_full, None
    in_use = f"{placement.machines} of the {most} machines of [budget] machines are in use"
    return VerdictKind.MACHINES, f"it needs {nodes} at once, and {in_use}", None


def launches_at_once(placement: JobPlacement, _job: Job) -> TurnWait | None:
    """Wait for the next decision: enough launches leave in this one."""
    if placement.launches < placement.policy.launches_per_cycle_max:
        return None
    sentence = f"{placement.launches} launches at once are enough; its turn comes next"
    return VerdictKind.LAUNCH_LIMIT, sentence, None


Gate = Callable[[JobPlacement, Job], TurnWait | None]
GATES: Final[tuple[Gate, ...]] = (
    its_turn,
    launches_paused,
    locked_secrets,
    nothing_prepared,
    backing_off,
    former_machine,
    machines_in_use_limit,
    launches_at_once,
)
"""The first that applies is the reason why the job waits; after them come pace, offers, price, balance and budgets."""


# Which part of the market a job may have a machine of now, one function for each reason.


def own_machines_first(placement: JobPlacement, job: Job) -> Job | TurnWait | None:
    """Own machines alone while the job waits for one of them (`own_first`)."""
    if not placement.own_first.providers:
        return None
    own = placement.own_first.wait(job, placement.catalogue)
    if own is None:
        return None
    placement.pacer.watch(job)
    if next(placement.admissible.quotes(own.job), None) is None:
        return VerdictKind.OWN, own.sentence, own.until
    return own.job


def market_in_time(placement: JobPlacement, job: Job) -> Job | TurnWait | None:
    """Spot, on-demand or nothing yet, as its policy says of its deadline, or while it waits for spot (`pacer`)."""
    return placement.pacer.paced(job) or (VerdictKind.PACED, placement.pacer.reason, None)


MARKET_PARTS: Final = (own_machines_first, market_in_time)
"""The first that says something decides: the job as it asks for that part alone, or why it waits."""
