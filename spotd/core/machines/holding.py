"""Outbid machines that their provider keeps: whether one is waited for, and what is known of it meanwhile.

Theory. Such a machine is paused: its disk bills, its command is dead, and it wakes by itself once its bid wins again.
It counts as before, so its job gets no other. Its grant offers the newest checkpoints again while it is held, since a
runner that is started once more must go on from there, and from nothing else. It is held no more once it runs and has
spoken.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.machines.todays_terms import words_above_ceiling
from spotd.core.plans.learning import learn_from_hold
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.effective_price import halted_rate, metered_rate, on_demand_rate
from spotd.core.pricing.words import span_words
from spotd.core.running.author import order_stop
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import Instance, InstanceState, Listing, Loss

SPEAKS_WITHIN: Final = timedelta(minutes=15)
"""From the first listing in which it runs again to its first heartbeat."""


def is_kept(builder: PlanBuilder, item: Attempt, mine: Instance) -> bool:
    """Whether this outbid machine is waited for; a job that has saved nothing has nothing to go on from there."""
    if not builder.policy.hold_max or mine.state is not InstanceState.PAUSED or mine.loss is not Loss.OUTBID:
        return False
    job = builder.job(item.id.job)
    if not item.quote.offer.pays_bid or item.state is not AttemptState.RUNNING:
        return False
    if not job.checkpoints or job.cancel_requested:
        return False
    if item.bidding.held_since is not None:
        return True
    return not hold_is_over(item, builder.policy, builder.now) and not words_above_ceiling(item, job, builder.policy)


def keep_outbid(builder: PlanBuilder, item: Attempt) -> None:
    """Wait for the machine from now on; `relocation` decides in each decision for how long."""
    known = item.bidding
    if known.held_since is None:
        bidding = replace(known, held_since=builder.now, woke_at=None)
        builder.put_attempt(replace(item, bidding=bidding, over_since=None))
        learn_from_hold(builder, item)
        disk = f"${as_usd(halted_rate(item.quote)):.4f} per hour for its disk"
        why = f"somebody bid more for the machine; it is kept for now, at {disk}"
        builder.event("attempt.held", why, attempt=item.id)
    elif leave_above_ceiling(builder, item):
        return
    elif known.woke_at is not None:
        builder.put_attempt(replace(item, bidding=replace(known, woke_at=None)))


def leave_above_ceiling(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether the bid would cost more than is accepted today: a machine that woke by it would be billed so.

    Then it is waited for no longer. It may have woken since it was listed, so it is ordered to save and stop.
    """
    why = words_above_ceiling(item, builder.job(item.id.job), builder.policy)
    if not why or item.stop is not None:
        return False
    order_stop(builder, item, EndReason.PRICE_ROSE, why)
    builder.list_again(item.provider)
    builder.event("attempt.left", f"its outbid machine is not waited for any longer: {why}", attempt=item.id)
    return True


def note_awake(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
    """Record that a machine which was outbid runs again, and let it go on once its host has spoken."""
    known = item.bidding
    if known.held_since is None or mine.state is not InstanceState.RUNNING or leave_above_ceiling(builder, item):
        return
    if known.woke_at is None:
        builder.put_attempt(replace(item, bidding=replace(known, woke_at=builder.now)))
        builder.event("attempt.woke", "the machine runs again, by its bid", attempt=item.id)
    elif item.heartbeat_seen_at is not None and item.heartbeat_seen_at > known.woke_at:
        _go_on(builder, item, known.held_since, known.woke_at)


def note_sign_of_life(builder: PlanBuilder, item: Attempt, report: HostStatus, listing: Listing | None) -> None:
    """Record that the host of a held machine spoke since the newest list: it runs again, whatever that list shows.

    Its provider may be away, and a machine that computes is neither left nor waited for.
    """
    known, spoke = item.bidding, item.heartbeat_seen_at
    if known.held_since is None or spoke is None or spoke <= (known.woke_at or known.held_since):
        return
    if spoke != report.read_at or (listing is not None and listing.at >= spoke):
        return
    if leave_above_ceiling(builder, item):
        return
    if known.woke_at is None:
        builder.put_attempt(replace(item, bidding=replace(known, woke_at=builder.now)))
        builder.event("attempt.woke", "its host gives signs of life again", attempt=item.id)
    else:
        _go_on(builder, item, known.held_since, known.woke_at)
    item = builder.attempt(item.id)
    if item.meter.rate <= halted_rate(item.quote):
        builder.set_rate(item.id, metered_rate(item.quote), on_demand_rate(item.quote))


def is_older_than_waking(item: Attempt, mine: Instance, listing: Listing) -> bool:
    """Whether this row shows a held machine as it was before it woke."""
    woke_at = item.bidding.woke_at
    return woke_at is not None and mine.state is InstanceState.PAUSED and listing.at <= woke_at


def _go_on(builder: PlanBuilder, item: Attempt, held_since: datetime, woke_at: datetime) -> None:
    job = builder.job(item.id.job)
    repeated = unsaved_time(job, item, held_since)
    away = max(timedelta(0), woke_at - held_since)
    running_at = None if item.running_at is None else min(builder.now, item.running_at + away)
    bidding = replace(item.bidding, held_since=None, woke_at=None)
    builder.put_attempt(replace(item, bidding=bidding, running_at=running_at))
    builder.put_job(replace(builder.job(item.id.job), lost=job.lost + repeated))
    newest = job.checkpoints[0].name if job.checkpoints else "the beginning"
    why = f"its outbid machine came back after {span_words(away)}: it goes on there from checkpoint {newest}"
    builder.event("attempt.resumed", why, attempt=item.id, name=newest)


def hold_is_over(item: Attempt, policy: Policy, now: datetime) -> str:
    """Why an outbid machine is waited for no longer, in words; empty while it is. A clock that was set back ends it."""
    known = item.bidding
    if known.held_since is None:
        return ""
    if known.woke_at is not None:
        late = not timedelta(0) <= now - known.woke_at < SPEAKS_WITHIN
        return f"it runs again and gave no sign of life for {span_words(SPEAKS_WITHIN)}" if late else ""
    if timedelta(0) <= now - known.held_since < policy.hold_max:
        return ""
    return f"it was kept for {span_words(policy.hold_max)}"


def hold_words(item: Attempt, policy: Policy, now: datetime) -> str:
    """Return why an outbid machine is kept, and until when; empty for any other."""
    since = item.bidding.held_since
    if since is None:
        return ""
    left = max(timedelta(0), since + policy.hold_max - now)
    floor = item.bidding.floor
    ours, disk = as_usd(item.price_max), as_usd(halted_rate(item.quote))
    wins = "" if floor is None else f"; the lowest bid that wins is ${as_usd(floor):.4f}, ours ${ours:.4f}"
    return (
        f"outbid: it is kept for {span_words(left)} more at ${disk:.4f} per hour for its disk,"
        f" since no other machine is as cheap{wins}"
    )
