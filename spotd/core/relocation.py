"""Running machines beside the market: their bids changed, outbid ones kept or left, healthy ones left for cheaper ones.

Theory. Each is one comparison of staying and moving (`relocating`), with a margin, since prices move, and with bounds:

* A *bid* is raised while staying at the higher bid costs no more than to move to the best other machine. It is lowered
  where even a move to the same machine at the lower bid would be worth it, since the loss of the machine costs that.
* An *outbid* machine that its provider keeps costs its disk. It is held for `hold_max` at the most, as long as no other
  machine costs less than a tenth more than it did, and the lowest bid that wins is not out of the job's reach. It wakes
  by itself, or by a higher bid. Only what was saved survives on it, so a job that has saved nothing is not held.
* A *move* needs a saving of `MARGIN_PERCENT` of what staying costs, a machine that has run for `DWELL`, and as long
  since the last move, and a checkpoint of that machine that is not as old: what was not saved may be lost by it. It is
  an order to save and stop like any other; the job is placed again when its machine has ended, and then it gets the
  best machine of that moment. If that is another one than it moved for, it says so. Jobs with a deadline or windows
  are not moved: their policies decide about time.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from spotd.core.bids import bid_limit, hold_is_over, lowered_bid, may_change, pays_bid, raised_bid
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Job, MachineVerdict
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.kernel.quarantine import contain
from spotd.core.own_first import keeps_own
from spotd.core.placement import JobPlacement
from spotd.core.pricing import dollar_words, machine_words, repriced, span_words, upload_per_hour
from spotd.core.ranking.candidates import agree, words_against_bid
from spotd.core.ranking.relocating import Comparison, Staying, rate_limit, running_rate
from spotd.core.running import pause_of
from spotd.core.starts import usual_start
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, as_usd

MARGIN_PERCENT: Final = 15
SAVING_MIN: Final = 50_000
"""Micro-dollars: less is not worth any disturbance."""
DWELL: Final = pause_of(MachineVerdict.MOVE)
MOVES_AT_ONCE: Final = 4
PROPOSED_AT_ONCE: Final = 16
"""So many moves wait for a second reading; more are compared once those are decided."""
COMPARED_MAX: Final = 20
"""How many of the best other machines are compared."""
REACH_PERCENT: Final = 125
"""A lowest bid above this part of what the job could bid is not waited for: it hardly comes back soon."""
HOLD_PERCENT: Final = 110
"""Another machine is waited for no longer once it costs less than this part of what the outbid one did."""


class Relocation:
    """Machines that run, in one decision."""

    def __init__(self, placement: JobPlacement) -> None:
        self._placement = placement
        self._builder = placement.builder
        self._policy = placement.policy
        self._now = placement.now
        self._moved = self._proposed = 0
        self._verdicts = placement.machine_verdicts
        self._higher: dict[AttemptId, Quote] = {}
        """Held machines that are not bid for again, with the quote of the bid that was considered."""

    def change_bids(self) -> None:
        """Raise the bids that are about to lose, lower what is paid too much, and end what was held for long enough."""
        if not self._policy.raise_bids and not self._policy.hold_max:
            return
        for item in self._running():
            if pays_bid(item) and (item.notice_at is None or item.bidding.held_since is not None):
                contain(self._builder, item.id.job, partial(self._judge_bid, item), "its bid cannot be judged")

    def leave_held(self) -> list[Attempt]:
        """Wait no longer for outbid machines where another one is as good, once it is known which jobs lack a place.

        Returns those that were judged.
        """
        held = [item for item in self._running() if item.bidding.held_since is not None]
        for item in held:
            contain(self._builder, item.id.job, partial(self._leave, item), "its hold cannot be judged")
        return held

    def move_to_cheaper(self) -> None:
        """Order machines to stop whose jobs go on elsewhere for clearly less."""
        if not self._policy.moves_max or self._policy.launches_paused:
            return
        for item in self._running():
            is_full = self._moved >= MOVES_AT_ONCE or self._proposed >= PROPOSED_AT_ONCE
            if not is_full and item.notice_at is None and self._may_move(item):
                contain(self._builder, item.id.job, partial(self._move, item), "its move cannot be judged")

    def _running(self) -> list[Attempt]:
        pairs = self._builder.before_and_now()
        return [now for before, now in pairs if before.state.counts and now.stop is None]

    def _elsewhere(
        self, job: Job, item: Attempt, rate_max: int | None = None, worth_max: int | None = None
    ) -> Iterator[Quote]:
        """Yield the best machines on other hosts that the job accepts, as they would be agreed.

        Up to the first one of the same kind above `rate_max`: the job would not get those that rank behind it.
        Those of the same kind above `worth_max` are left out, without an end to the others.
        """
        here, stays_own = item.quote.offer, keeps_own(job, item, self._policy)
        for count, (candidate, ceiling) in enumerate(self._placement.admissible.quotes(job)):
            if count >= COMPARED_MAX:
                return
            offer = candidate.offer
            if offer.provider == here.provider and (offer.host_id or offer.offer_id) == (here.host_id or here.offer_id):
                continue
            if (
                self._verdicts.refuses(offer)
                or self._verdicts.is_claimed(offer, job)
                or (stays_own and not candidate.is_own)
            ):
                continue
            is_same_kind = (offer.gpu, offer.gpu_count) == (here.gpu, here.gpu_count)
            if rate_max is not None and is_same_kind and running_rate(candidate) > rate_max:
                return
            if worth_max is not None and is_same_kind and running_rate(candidate) > worth_max:
                continue
            yield agree(job, candidate, ceiling, None, self._policy)[0] if offer.pays_bid else candidate

    def _staying(self, job: Job, item: Attempt, rate_here: MicroUsdPerHour | None = None) -> Staying:
        return Staying(job, item, self._now, rate_here, self._placement.budget_guard.left_for(job))

    def _cheapest_move(
        self, job: Job, item: Attempt, rate_here: int, rate_max: int | None = None, worth_max: int | None = None
    ) -> tuple[Quote, Comparison] | None:
        """Return the other machine on which the job ends for the least, and what that costs beside staying."""
        staying: Staying | None = None
        best: tuple[Quote, Comparison] | None = None
        for there in self._elsewhere(job, item, rate_max, worth_max):
            staying = staying or self._staying(job, item, MicroUsdPerHour(rate_here))
            found = self._compare(staying, job, item, there)
            if found is not None and (best is None or found.moving < best[1].moving):
                best = there, found
        return best

    def _compare(self, staying: Staying, job: Job, item: Attempt, there: Quote) -> Comparison | None:
        experience = self._placement.world.experience
        start = usual_start(experience, there.offer.provider, job.spec.image) if experience else timedelta(0)
        hazards = self._placement.catalogue.costing.hazards
        return staying.compare(
            there,
            usual_start=start,
            hazard_here_ppm=hazards.of(item.quote.offer),
            hazard_there_ppm=hazards.of(there.offer),
        )

    # --- bids ---

    def _judge_bid(self, item: Attempt) -> None:
        job = self._builder.job(item.id.job)
        may_follow = self._policy.raise_bids and not self._policy.launches_paused
        may_follow = may_follow and not hold_is_over(item, self._policy, self._now) and may_change(item, self._builder)
        if may_follow and not self._verdicts.held_back(item, MachineVerdict.RAISE):
            sold = self._placement.admissible.market.by_provider.get(item.provider)
            if sold is not None and sold.changes_bids:
                self._follow_floor(job, item)
        item = self._builder.attempt(item.id)
        if item.bidding.held_since is not None and item.stop is None and not self._releases(item):
            self._builder.wake(item.bidding.held_since + self._policy.hold_max)

    def _follow_floor(self, job: Job, item: Attempt) -> None:
        higher = raised_bid(item, job, self._policy)
        if higher is not None:
            self._raise(job, item, higher)
            return
        lower = lowered_bid(item, job, self._policy)
        if lower is not None and self._has_settled(job, item, item.bidding.changed_at):
            self._lower(job, item, lower)

    def _lower(self, job: Job, item: Attempt, bid: MicroUsdPerHour) -> None:
        found = self._compare(self._staying(job, item), job, item, repriced(item.quote, bid))
        if found is None or not _is_worth(found):
            return
        floor, saved = item.bidding.floor or bid, dollar_words(MicroUsd(found.saving))
        why = f"the lowest that wins is ${as_usd(floor):.4f}, and even with a restart that saves {saved}"
        self._verdicts.change_bid(item, bid, f"{why} over the next {span_words(found.left)}")

    def _raise(self, job: Job, item: Attempt, bid: MicroUsdPerHour) -> None:
        higher = repriced(item.quote, bid)
        if words_against_bid(self._placement.admissible.market, higher):
            return
        if item.bidding.held_since is not None and self._why_left(job, replace(item, quote=higher))[0]:
            self._higher[item.id] = higher
            return  # what it would cost from now on is what another machine is held against
        move = self._cheapest_move(job, item, running_rate(higher))
        if move is not None and move[1].saving > 0:
            return
        floor = item.bidding.floor or bid
        why = f"the lowest that wins is ${as_usd(floor):.4f}"
        why += (
            ", and no other machine is cheaper"
            if move is None
            else (f", and to move would cost {dollar_words(move[1].moving)} instead of {dollar_words(move[1].staying)}")
        )
        guards = (self._placement.prepaid_guard, self._placement.budget_guard)
        if all(guard.carries_raise(job, item, higher.price.total) for guard in guards):
            self._verdicts.change_bid(item, bid, why)

    def _releases(self, item: Attempt) -> bool:
        """Whether an outbid machine that has not woken was waited for long enough."""
        over = hold_is_over(item, self._policy, self._now) if item.bidding.woke_at is None else ""
        if over:
            self._give_up(item, MachineVerdict.RELEASE, over, None)
        return bool(over)

    def _leave(self, item: Attempt) -> None:
        """Leave an outbid machine for another one that is as good as what it would cost if it came back."""
        job = self._builder.job(item.id.job)
        why, target = self._why_left(job, replace(item, quote=self._higher.get(item.id, item.quote)))
        if why:
            self._give_up(item, MachineVerdict.LEAVE, why, target)

    def _give_up(self, item: Attempt, verdict: MachineVerdict, why: str, target: Quote | None) -> None:
        """Stop a held machine. It may have woken since it was listed, as after hours of sleep: it is ordered to save.

        It is ended at once where a newer list shows that it is halted.
        """
        if self._verdicts.stop(item, verdict, why, target=None if target is None else target.offer):
            if target is not None:
                self._placement.budget_guard.expect(self._builder.job(item.id.job), target, item)
            self._builder.list_again(item.provider)
            message = f"its outbid machine is not waited for any longer: {why}"
            self._builder.event("attempt.left", message, attempt=item.id)

    def _why_left(self, job: Job, item: Attempt) -> tuple[str, Quote | None]:
        """Why a held machine is not waited for, whatever time is left, and the other one that is meant."""
        if item.bidding.woke_at is not None:
            return hold_is_over(item, self._policy, self._now), None
        floor, limit = item.bidding.floor, bid_limit(item, job, self._policy)
        if floor is not None and floor * 100 > limit * REACH_PERCENT:
            return f"the lowest bid that wins is ${as_usd(floor):.4f}, at most ${as_usd(limit):.4f} may be bid", None
        before = running_rate(item.quote)
        budgets = self._placement.budget_guard
        other = next((one for one in self._elsewhere(job, item) if budgets.carries_instead(job, one, item)), None)
        if other is not None and running_rate(other) * 100 <= before * HOLD_PERCENT:
            words = f"another costs ${as_usd(running_rate(other)):.4f} per hour, this one ${as_usd(before):.4f}"
            return words, other
        return "", None

    # --- moves ---

    def _may_move(self, item: Attempt) -> bool:
        job = self._builder.job(item.id.job)
        return job.moves.count < self._policy.moves_max and self._has_settled(job, item, job.moves.at)

    def _has_settled(self, job: Job, item: Attempt, changed_at: datetime | None) -> bool:
        """Whether the machine works as it is for long enough to be changed for its price alone, and has saved since."""
        if item.state is not AttemptState.RUNNING or item.running_at is None or item.bidding.held_since is not None:
            return False
        schedule = job.spec.schedule
        if job.cancel_requested or item.ends_itself or schedule.deadline is not None or schedule.windows:
            return False
        if unsaved_time(job, item, self._now) >= DWELL:
            return False
        settled_at = settles_at(item, changed_at)
        return settled_at is not None and self._now >= settled_at

    def _move(self, item: Attempt) -> None:
        job = self._builder.job(item.id.job)
        rate_here = rate_now(job, item, self._policy)
        rate_max = rate_here * (100 - MARGIN_PERCENT) // 100
        # What costs more may rank well and still not be worth the move: most machines need not be compared for that.
        worth_max = rate_limit(job, item, self._now, rate_here, MARGIN_PERCENT)
        move = self._cheapest_move(job, item, rate_here, rate_max, worth_max)
        if move is None:
            return
        there, found = move
        if not _is_worth(found):
            return
        if not self._placement.budget_guard.carries_instead(job, there, item):
            return
        words = move_words(there, found, MicroUsdPerHour(rate_here))
        offer = there.offer
        self._placement.catalogue.take(offer)
        if not self._verdicts.stop(item, MachineVerdict.MOVE, words, target=offer):
            self._proposed += 1
            return
        self._placement.budget_guard.expect(job, there, item)
        job = self._builder.job(job.id)
        moves = replace(
            job.moves,
            count=job.moves.count + 1,
            at=self._now,
            attempt=item.id.number,
            provider=offer.provider,
            offer=offer.offer_id,
            host=offer.host_id or "",
            rate=running_rate(there),
        )
        self._builder.put_job(replace(job, moves=moves))
        self._moved += 1


def rate_now(job: Job, item: Attempt, policy: Policy) -> int:
    """Return what a machine costs per hour now, with what it uploads: micro-dollars."""
    return item.meter.rate + upload_per_hour(item.quote.offer, job, policy)


def settles_at(item: Attempt, changed_at: datetime | None) -> datetime | None:
    """Return from when on a machine works as it is for long enough to be changed for its price alone."""
    return None if item.running_at is None else max(item.running_at, changed_at or item.running_at) + DWELL


def _is_worth(found: Comparison) -> bool:
    return found.saving * 100 >= found.staying * MARGIN_PERCENT and found.saving >= SAVING_MIN


def move_words(there: Quote, found: Comparison, rate_here: MicroUsdPerHour) -> str:
    """Return what the move is for, with every figure."""
    offer = there.offer
    span = span_words(found.left)
    left = f"the next {span}, since it is not known what is left"
    if found.is_estimate or found.is_paid_for:
        left = f"the {span} that {'its budget pays for' if found.is_paid_for else 'are left'}"
    price, before = as_usd(running_rate(there)), as_usd(rate_here)
    return (
        f"{machine_words(offer.gpu, offer.gpu_count, offer.nodes)} at"
        f" {offer.provider}/{offer.host_id or offer.offer_id}"
        f" for ${price:.4f} per hour instead of ${before:.4f}: {dollar_words(found.moving)}"
        f" instead of {dollar_words(found.staying)} over {left}, {dollar_words(found.fixed)} of it for the move"
    )
