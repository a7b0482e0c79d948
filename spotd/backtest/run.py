"""One run of a job through a recorded market: a world of its own, and the core's own functions on it.

Theory. `reconcile` is given what a provider would list and what the runner would have written, `decide` the market of
the instant, and what they owe is carried out at once. Nothing of what they decide is known here. Which instants matter
is known here (`due`): a run sleeps only through instants of which it is certain that they change nothing, namely while
its machine works undisturbed, or while it waits for a price that no offer has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.backtest.recorded import SPEED_ONE, Assumptions, ReplayedMachine, instant, second_after
from spotd.backtest.relocation_watch import RelocationWatch
from spotd.core import bids, requests
from spotd.core.bids import owed_bid
from spotd.core.budgets import committed
from spotd.core.checkpoints import REMEMBERED, trim
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.cooldowns import is_remembered
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId
from spotd.core.domain.jobs import Checkpoint, new_job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.states import EndReason, InvariantBroken
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel import outcomes
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import job_spent, on_demand_spent
from spotd.core.pricing import PPM
from spotd.core.ranking.remaining_work import machine_speed_ppm
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract import values

SeriesKey = tuple[values.ProviderName, values.OfferId, str, int, values.Market]

JOB: Final = JobId("backtest")
NEVER: Final = timedelta(days=3650)
NEVER_S: Final = 2**62
_NO_CHECK: Final = (0, 0)
START_MAX: Final = timedelta(minutes=20)
"""How long a start may take at the providers that spotd knows, unless every launch of the back-test takes longer."""
ROUNDS_MAX: Final = 8
"""So often at one instant the core is asked again because something was launched or ended."""
_WAITS_FOR_PRICE: Final = frozenset(
    {VerdictKind.ABOVE_CEILING, VerdictKind.NO_CEILING, VerdictKind.NO_MATCH, VerdictKind.NO_OFFERS}
)
_WAITS_FOR_WAKE: Final = frozenset({VerdictKind.COOLING, VerdictKind.BACKING_OFF})


class End(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    CENSORED = "censored"
    """The record ended before the job did."""
    STOPPED = "stopped"
    """spotd gave the job up, as it would in production: its budget was used up, or it failed too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What came of one run.

    Attributes:
        took_s: from its submission to its end, or to the end of the record.
        cost, on_demand: micro-dollars, as the ledger has them.
        preemptions: how often the market took its machine, for good or until its bid won again.
        price_stops: machines that were stopped because their price rose above the ceiling.
        returns: of the preemptions, those after which the job went on with the same machine.
        moves: machines that were left for cheaper ones.
        bids: how often the bid for a machine was changed.
        waiting_s: time without a machine.
        repeated_s: machine time whose work was lost.
        why: for a run that was stopped, the job's own sentence.
    """

    started_at: int
    end: End
    took_s: int
    cost: int
    on_demand: int
    preemptions: int
    price_stops: int
    launches: int
    waiting_s: int
    repeated_s: int
    why: str = ""
    returns: int = 0
    moves: int = 0
    bids: int = 0


def policy_of(terms: Assumptions, providers: Collection[values.ProviderName], *, paced: bool = False) -> Policy:
    """Return the policy of a back-test: as in production, with hosts that always speak and lists that are never late.

    Bids, holds and moves are those of `terms`, as the config of the daemon has them.

    Args:
        paced: the job has a deadline, so that every step is a decision.

    Nothing is read of an undisturbed machine for a while, so nothing may be concluded from silence.
    """
    return Policy(
        install=values.InstallId("backtest"),
        providers={
            name: ProviderPolicy(
                name=name,
                fee_ppm=terms.fee_ppm.get(name, PPM),
                quote_ttl=NEVER,
                reconcile_window=timedelta(minutes=3),
                provision_timeout=max(START_MAX, 2 * timedelta(seconds=terms.restart_s)),
                ends_itself=False,
            )
            for name in providers
        },
        silence_max=NEVER,
        silence_limit=NEVER,
        recheck_every=timedelta(seconds=terms.step_s) if paced else NEVER,
        raise_bids=terms.raise_bids,
        hold_max=terms.hold_max,
        moves_max=terms.moves_max,
        rows_may_be_wrong=False,
    )


def series_key(offer: values.Offer) -> SeriesKey:
    """Return what distinguishes the series of a record: one id may be sold in two markets."""
    return offer.provider, offer.offer_id, offer.gpu, offer.gpu_count, offer.market


class JobRun:
    """One job from its submission to its end. `step` brings it to an instant, `due` says when the next one matters.

    Attributes:
        machine: the one that it has now.
        moves_below: any offer at or under this price may be a reason to leave its machine; `None` where none is.
        is_over: nothing more will change.
        waits_for_price: any offer at or under the ceiling may change the next decision.
    """

    def __init__(
        self, spec: JobSpec, policy: Policy, terms: Assumptions, numbers: Mapping[SeriesKey, int], start: int
    ) -> None:
        at = instant(start)
        self._terms = terms
        self._numbers = numbers
        self._watch = RelocationWatch({(key[2], key[3]) for key in numbers}, terms.step_s)
        self._start = start
        self._job = new_job(JOB, spec, at)
        self._world = World(policy=policy, jobs={}, attempts={}, intents={})
        self._wake: datetime | None = None
        self._verdict: VerdictKind | None = None
        self._saved = 0
        self._used_s = 0
        self._repeated_s = 0
        self._returns = self._bids = 0
        self._finished_at: int | None = None
        self.machine: ReplayedMachine | None = None
        self.is_over = False
        self.waits_for_price = False
        self.moves_below: int | None = None
        self._checks_within = _NO_CHECK
        """When offers are to be compared, and when something else is due."""
        self._apply(requests.submit(self._world, self._job, at), at)

    # --- one instant ---

    def step(self, now: int, market: MarketSnapshot) -> None:
        """Bring the run to this instant."""
        at = instant(now)
        self._wake = None
        for _ in range(ROUNDS_MAX):
            if self._world.attempts:
                self._reconcile(now, at)
            if self._job.state.is_final and not self._world.attempts:
                self.is_over = True
                return
            self._apply(decide(self._world, market, at), at)
            if not self._carry_out(now, at):
                self._watch.note_cheapest(self._world, self._job, self._item, market, instant(now))
                return
        raise InvariantBroken(f"a back-test did not come to rest at {at.isoformat()}: {self._job.reason}")

    def needs_no_decision(self, now: int, market: MarketSnapshot) -> bool:
        """Whether it was woken to see if another machine is worth a move, and none is on sale that may be."""
        first, acts_at = self._checks_within
        if not first <= now < acts_at or self.is_over:
            return False
        item, machine = self._item, self.machine
        if item is None or machine is None:
            return False
        if self._watch.may_lower(self._world.policy, self._job, item, machine, now):
            return False
        self._watch.note_cheapest(self._world, self._job, item, market, instant(now))
        return not self._watch.sells_cheaper

    def due(self, now: int) -> int | None:
        """Return the next instant at which something may change without a change of the market."""
        self.waits_for_price, self.moves_below, self._checks_within = False, None, _NO_CHECK
        if self.is_over:
            return None
        soon = now + self._terms.step_s
        if self._job.spec.schedule.deadline is not None:
            return soon  # its policy weighs the time that is left at every step
        wake = None if self._wake is None else max(soon, second_after(self._wake))
        machine = self.machine
        if machine is not None and not machine.is_gone:
            item = self._item
            if item is None or item.stop is not None or item.over_ceiling_at is not None or not item.state.counts:
                return soon
            if machine.halted_at is not None or item.bidding.held_since is not None or item.over_since is not None:
                return soon
            if item.running_at is None and machine.works_from <= now:
                return soon  # its host has not been read since its command began
            ends = [at for at in (machine.works_from, machine.finishes_at) if at > now]
            if self._pays_for_saves(item):
                ends.append(machine.saved_at(machine.saves(now) + 1))
            ends.extend(at for at in (wake, self._budget_ends(item, now)) if at is not None)
            if self._watch.may_raise(self._world.policy, self._job, item, machine):
                return soon
            checks = self._watch.wakes(self._world.policy, self._job, item, machine, now)
            self.moves_below = self._watch.moves_below
            acts_at = min(ends, default=NEVER_S if checks else soon)
            self._checks_within = min(checks, default=acts_at), acts_at
            return max(soon, min(self._checks_within))
        if self._world.attempts:
            return soon
        if self._verdict in _WAITS_FOR_PRICE:
            self.waits_for_price = True
            return wake
        if self._verdict in _WAITS_FOR_WAKE:
            self.waits_for_price = self._verdict is VerdictKind.COOLING
            return wake
        return soon

    def outcome(self, ends_at: int) -> RunOutcome:
        """Return what has come of the run by the end of the record, at the latest."""
        job, now = self._job, ends_at
        end, why = End.CENSORED, ""
        if self._finished_at is not None:
            end, now = End.FINISHED, self._finished_at
        elif job.state.is_final:
            end, why, now = End.STOPPED, job.reason, self._ended_at(ends_at)
        at = instant(now)
        open_used = 0 if self.machine is None else self.machine.used_s(now)
        returns = self._returns + (0 if self.machine is None else self.machine.returns)
        running = sum(on_demand_spent(a, at) for a in self._world.attempts_of(JOB))
        return RunOutcome(
            started_at=self._start,
            end=end,
            took_s=now - self._start,
            cost=job_spent(self._world, job, at),
            on_demand=job.on_demand + running,
            preemptions=job.totals.preemptions + returns,
            price_stops=job.recoveries - job.totals.preemptions,
            launches=job.attempts_made,
            waiting_s=max(0, now - self._start - self._used_s - open_used),
            repeated_s=self._repeated_s + (0 if self.machine is None else self.machine.repeated_s),
            why=why,
            returns=returns,
            moves=job.moves.count,
            bids=self._bids,
        )

    @property
    def _item(self) -> Attempt | None:
        """The attempt of its machine."""
        return None if self.machine is None else self._world.attempts.get(self.machine.attempt)

    def _ended_at(self, ends_at: int) -> int:
        ended = self._job.ended_at
        return ends_at if ended is None else int(ended.timestamp())

    def _budget_ends(self, item: Attempt, now: int) -> int | None:
        """Return an instant before which what this machine costs cannot bring its job's budget to an end."""
        job = self._job
        if job.budget is None:
            return None
        at = instant(now)
        room = job.budget - job_spent(self._world, job, at) - committed(self._world, item, at)
        rate = max(item.meter.rate, item.quote.price.total, 1)
        return now + max(0, room) * 3600 // rate - self._terms.step_s

    def _pays_for_saves(self, item: Attempt) -> bool:
        return self._terms.checkpoint_bytes > 0 and item.quote.offer.upload_price > 0

    # --- what the core reads ---

    def _reconcile(self, now: int, at: datetime) -> None:
        listings = {
            name: values.Listing(instances=(), complete=True, at=at)
            for name in {a.provider for a in self._world.attempts.values()}
        }
        reports: dict[AttemptId, HostStatus] = {}
        machine = self.machine
        if machine is not None and machine.attempt in self._world.attempts:
            listings[machine.provider] = values.Listing(instances=(_instance(machine),), complete=True, at=at)
            reports[machine.attempt] = self._report(machine, now, at)
        self._apply(reconcile(self._world, listings, reports, at), at)
        if machine is not None and (machine.is_gone or machine.halted_at is not None):
            # A second list, which the daemon asks for at once, says the same.
            listings = {name: replace(one, at=at + timedelta(microseconds=1)) for name, one in listings.items()}
            self._apply(reconcile(self._world, listings, reports, at), at)
        if machine is not None and machine.attempt not in self._world.attempts:
            self._let_go(machine, now)
            self._apply(trim(self._world, (), at), at)

    def _report(self, machine: ReplayedMachine, now: int, at: datetime) -> HostStatus:
        """Return what the runner would have written by now; a machine that is to stop has saved all it did."""
        item = self._world.attempts[machine.attempt]
        stop = item.stop if machine.lost_at is None and machine.halted_at is None else None
        finished = machine.is_finished(now)
        reason = EndReason.DONE if finished else None if stop is None else EndReason.PREEMPTED
        if finished and self._finished_at is None:
            self._finished_at = machine.finishes_at
        if reason is not None and machine.ended_at is None:
            machine.ended_at = machine.finishes_at if finished else now
        halted_at = machine.halted_at if machine.lost_at is None else None
        speaks_at = at if halted_at is None else instant(halted_at)
        if halted_at is None:
            machine.reports += 1
        count = machine.saves(now)
        fresh = [
            *range(max(machine.reported_saves, count - max(REMEMBERED, self._job.spec.checkpoint.keep)) + 1, count + 1)
        ]
        machine.reported_saves = count
        saved = [_checkpoint(machine, number, self._terms) for number in fresh]
        if stop is not None and stop.flush and machine.works_from < now:
            machine.is_saved = True
            saved.append(replace(_checkpoint(machine, count + 1, self._terms), at=at))
        return HostStatus(
            attempt=machine.attempt,
            read_at=at,
            marker_at=speaks_at,
            alive_at=speaks_at,
            seq=machine.reports,
            phase="run" if now >= machine.works_from else "restore",
            checkpoints=tuple(saved),
            resumed_from=self._source(machine),
            exit_reason=reason,
            exit_answers_stop=not finished,
            exit_code=0 if finished else None,
            exit_at=None if machine.ended_at is None else instant(machine.ended_at),
            stored_bytes=count * self._terms.checkpoint_bytes,
        )

    def _source(self, machine: ReplayedMachine) -> str | None:
        """Return what the machine restored."""
        return next((saved.name for saved in self._job.checkpoints if saved.attempt < machine.attempt.number), None)

    # --- what the core owes ---

    def _carry_out(self, now: int, at: datetime) -> bool:
        """Make the calls that are owed; return whether one may change the decision of this instant."""
        ended = False
        for intent in [*self._world.intents.values()]:
            if intent.state is not IntentState.OPEN or (intent.not_before is not None and intent.not_before > at):
                continue
            if intent.kind is IntentKind.LAUNCH:
                self._launch(intent, now, at)
            elif intent.kind is IntentKind.CHANGE_BID:
                self._change_bid(intent, now, at)
            elif intent.kind is IntentKind.TERMINATE:
                if self.machine is not None and self.machine.ref == intent.ref and self.machine.ended_at is None:
                    self.machine.ended_at = now
                self._apply(outcomes.terminate_accepted(self._world, intent.id, at), at)
                ended = True
        return ended

    def _launch(self, intent: Intent, now: int, at: datetime) -> None:
        if intent.attempt is None:
            return
        item = self._world.attempts[intent.attempt]
        if self.machine is not None:
            raise InvariantBroken(f"attempt {item.id.number} was launched beside another machine")
        offer = item.quote.offer
        speed = machine_speed_ppm(self._job, offer.gpu, offer.gpu_count)
        machine = ReplayedMachine(item, self._numbers[series_key(offer)], now, self._saved, speed, self._terms)
        self.machine = machine
        self._apply(outcomes.launched(self._world, item.id, _instance(machine), at), at)

    def _change_bid(self, intent: Intent, now: int, at: datetime) -> None:
        if intent.attempt is None:
            return
        self._apply(bids.bid_sent(self._world, intent.attempt, at), at)
        if self._world.intents[intent.id].state is not IntentState.SENT or self.machine is None:
            return
        self.machine.place_bid(now, owed_bid(self._world.attempts[intent.attempt]))
        self._bids += 1
        self._apply(bids.bid_changed(self._world, intent.attempt, at), at)
        self._reconcile(now, at)  # the daemon lists at once what the change came to

    def _let_go(self, machine: ReplayedMachine, now: int) -> None:
        """Count what the machine did; its attempt is over."""
        done = machine.done(now)
        keeps_all = machine.is_saved or self._finished_at is not None
        self._saved = done if keeps_all else machine.saved(now)
        self._repeated_s += (done - self._saved) // SPEED_ONE + machine.repeated_s
        self._returns += machine.returns
        self._used_s += machine.used_s(now)
        self.machine = None

    # --- the world ---

    def _apply(self, plan: Plan, at: datetime) -> None:
        if plan.wake_at is not None and plan.wake_at - at < NEVER / 2:
            self._wake = plan.wake_at if self._wake is None else min(self._wake, plan.wake_at)
        verdict = plan.verdicts.get(JOB)
        if verdict is not None:
            self._verdict = verdict.kind
        if plan.is_empty:
            return
        self._job = plan.jobs.get(JOB, self._job)
        world = applied(self._world, plan)
        if plan.cooldowns:
            kept = tuple(c for c in world.cooldowns if is_remembered(c, at))
            world = replace(world, cooldowns=kept)
        self._world = world


def _instance(machine: ReplayedMachine) -> values.Instance:
    state = values.InstanceState.RUNNING if machine.halted_at is None else values.InstanceState.PAUSED
    if machine.is_gone:
        state = values.InstanceState.GONE
    return values.Instance(
        ref=machine.ref,
        key=machine.key,
        state=state,
        market=machine.market,
        price=None if machine.price is None else values.MicroUsdPerHour(machine.price),
        created_at=instant(machine.launched_at),
        loss=machine.loss,
        bid_floor=None if machine.floor is None else values.MicroUsdPerHour(machine.floor),
    )


def _checkpoint(machine: ReplayedMachine, number: int, terms: Assumptions) -> Checkpoint:
    name = f"checkpoint-{machine.attempt.number}-{number}"
    return Checkpoint(
        name=name,
        attempt=machine.attempt.number,
        step=None,
        bytes=terms.checkpoint_bytes,
        at=instant(machine.saved_at(number)),
        manifest_key=f"{machine.attempt.number}/{name}",
        sha256="",
    )
