"""When the bid of a running machine is changed, and to what.

Theory. Where we pay what we bid, a bid is as low as wins with some headroom. When the lowest winning bid comes so near
that half of the headroom is used up, the machine will be lost soon, and a raise may be cheaper than a restart. The new
bid is what would be bid for the machine today. It never costs more than the job accepts, and never as much as the same
machine costs on-demand, where no other user can outbid us. It is held against the next best machine with all that a
move costs (`relocating`), and against every budget and balance before it is placed.

Where the lowest winning bid falls, we go on paying what we bid. A lower bid costs less at once and is outbid sooner, so
it is placed only where it pays even if the machine is lost once for it (`relocation`). It is at least half of the bid
before, since a lowest bid that fell by more may be a wrong row.

The intent is durable before the call, one for each machine at a time, and calls are `RAISE_EVERY` apart: the lists that
show what a change did are late. What it came to is settled by the answer, or by a list (`_settle_bid`); until then the
higher of the two bids counts for ceilings and budgets.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.author import order_stop
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState, is_echo, with_floor
from spotd.core.domain.cooldowns import doubled
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentState, bid_intent_id
from spotd.core.domain.jobs import Job, MachineVerdict
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.market import LEAP, NOTHING_KNOWN, MarketSnapshot
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.metering import STOPPED, spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import (
    PPM,
    gpu_price_limit,
    gpu_price_within,
    halted_rate,
    metered_rate,
    on_demand_rate,
    repriced,
    span_words,
    usual_bid,
)
from spotd.core.ranking.candidates import total_ceiling
from spotd.core.running import pause_of
from spotd.core.todays_terms import at_todays_fee, ceiling_today, words_above_ceiling, words_against_raise
from spotd.core.working_copy import learn_from_hold
from spotd_providers.contract.values import (
    Instance,
    InstanceState,
    Listing,
    Loss,
    Market,
    MicroUsdPerHour,
    as_usd,
    shares,
    whole_machine,
)

# Outbid machines that their provider keeps: whether one is waited for, and what is known of it meanwhile.
#
# Theory. Such a machine is paused: its disk bills, its command is dead, and it wakes by itself once its bid wins again.
# It counts as before, so its job gets no other. Its grant offers the newest checkpoints again while it is held, since a
# runner that is started once more must go on from there, and from nothing else. It is held no more once it runs and has
# spoken.


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
    if item.members is not None and item.members.lost:
        return False  # it would wake with machines in the places of the lost ones, or without
    last = item.bidding.held_last
    if last is not None and not any(at > last for at in job.saved_by(item.id.number)):
        return False  # it came back for too short a time to get its job any further
    return not hold_is_over(item, builder.policy, builder.now) and not words_above_ceiling(item, job, builder.policy)


def keep_outbid(builder: PlanBuilder, item: Attempt) -> None:
    """Wait for the machine from now on; `relocation` decides in each decision for how long."""
    known = item.bidding
    if known.held_since is None:
        bidding = replace(known, held_since=builder.now, held_last=builder.now, woke_at=None)
        members = (
            None
            if item.members is None
            else item.members.going_on(spent(item, builder.now), builder.now, item.intended_at)
        )
        builder.put_attempt(replace(item, bidding=bidding, over_since=None, members=members))
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
        # It may have woken hours ago, as while the daemon was dead.
        began = max(known.held_since, item.meter.since or known.held_since, report.script_began_at or builder.now)
        builder.set_rate(item.id, metered_rate(item.quote), on_demand_rate(item.quote), at=min(began, builder.now))


def is_older_than_waking(item: Attempt, mine: Instance, listing: Listing) -> bool:
    """Whether this row shows a machine that was held as it was before it woke, be it that it goes on since."""
    woke_at = item.bidding.woke_at
    return woke_at is not None and mine.state in STOPPED and listing.at <= woke_at


def _go_on(builder: PlanBuilder, item: Attempt, held_since: datetime, woke_at: datetime) -> None:
    job = builder.job(item.id.job)
    repeated = unsaved_time(job, item, held_since)
    away = max(timedelta(0), woke_at - held_since)
    running_at = None if item.running_at is None else min(builder.now, item.running_at + away)
    builder.put_attempt(replace(item, bidding=replace(item.bidding, held_since=None), running_at=running_at))
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


RAISE_EVERY: Final = pause_of(MachineVerdict.RAISE)
RAISE_HELD_EVERY: Final = timedelta(minutes=1)
"""The same for a machine that is outbid already, which only a higher bid brings back."""
REFUSALS_COUNTED: Final = 20
REFUSED_MAX: Final = timedelta(hours=6)
"""The pause doubles with each refusal in a row, up to this."""
ROUNDING_PPM: Final = 2_000
"""What a provider may round a bid by."""


def pays_bid(item: Attempt) -> bool:
    """Whether there is a bid for this machine that can be changed."""
    return item.quote.offer.pays_bid and item.quote.offer.market is Market.SPOT and item.ref is not None


def raised_bid(item: Attempt, job: Job, policy: Policy) -> MicroUsdPerHour | None:
    """Return what to bid for this machine now; `None` where the bid is high enough, or no higher one is allowed."""
    floor, current = item.bidding.floor, item.quote.price.gpu
    if floor is None or not pays_bid(item) or is_echo(floor, item.bidding.placed or (current,)):
        return None
    if floor * (2 * PPM + policy.bid_headroom_ppm) <= current * 2 * PPM:
        return None
    bid = min(
        usual_bid(replace(item.quote.offer, gpu_price=floor), policy.bid_headroom_ppm), bid_limit(item, job, policy)
    )
    return MicroUsdPerHour(bid) if bid > current and bid >= floor else None


def lowered_bid(item: Attempt, job: Job, policy: Policy) -> MicroUsdPerHour | None:
    """Return what less to bid for this machine now; `None` where no lower bid has the usual headroom."""
    floor, current = item.bidding.floor, item.quote.price.gpu
    if not floor or not pays_bid(item) or is_echo(floor, item.bidding.placed or (current,)):
        return None
    usual = usual_bid(replace(item.quote.offer, gpu_price=floor), policy.bid_headroom_ppm)
    bid = min(max(usual, -(-current // 2)), bid_limit(item, job, policy))
    return MicroUsdPerHour(bid) if floor <= bid < current else None


def bid_limit(item: Attempt, job: Job, policy: Policy) -> int:
    """Return the highest bid that the job accepts and that is less than the on-demand price of the same machine."""
    offer = item.quote.offer
    ceiling = ceiling_today(item, job, policy)
    agreed = at_todays_fee(item, policy).quote
    limit = gpu_price_limit(agreed, ceiling)
    allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
    if allowed < whole_machine(ceiling, offer.gpu_count):
        limit = min(limit, gpu_price_within(agreed, allowed))
    return limit if offer.on_demand_price is None else min(limit, offer.on_demand_price - 1)


def may_change(item: Attempt, builder: PlanBuilder) -> bool:
    """Whether its bid was not changed a moment ago. An instant ahead is by another clock."""
    if item.is_kept:
        return False
    changed_at, pause = item.bidding.changed_at, RAISE_EVERY if item.bidding.held_since is None else RAISE_HELD_EVERY
    pause = doubled(pause, item.bidding.refused, REFUSED_MAX)
    return changed_at is None or changed_at > builder.now or builder.now - changed_at >= pause


def owed_bid(item: Attempt) -> MicroUsdPerHour:
    """Return the newest bid, which its provider may not have taken yet; a lower one counts only once it has."""
    return item.bidding.placed[-1] if item.bidding.placed else item.price_max


# --- what became of it -----------------------------------------------------------------------------------------------


def bid_sent(world: World, attempt_id: AttemptId, now: datetime, market: MarketSnapshot = NOTHING_KNOWN) -> Plan:
    """Record that the call is made now; or that it never is, where the machine is not wanted any more."""
    builder = PlanBuilder(world, now)
    item, intent = _bid_change_of(builder, world, attempt_id)
    if item is None or intent is None or intent.state is not IntentState.OPEN:
        return builder.plan()
    paused = world.policy.launches_paused
    job = world.jobs[item.id.job]
    if not item.state.counts or item.stop is not None or job.cancel_requested or paused:
        _give_up(builder, item, intent, f"not sent: {paused or 'the machine is not wanted any more'}")
    elif not _is_lowering(item) and (unfit := words_against_raise(world, market, item, now)):
        _give_up(builder, item, intent, f"not sent: {unfit}")
    else:
        builder.put_intent(replace(intent, state=IntentState.SENT, tries=intent.tries + 1))
    return builder.plan()


def bid_changed(world: World, attempt_id: AttemptId, now: datetime) -> Plan:
    """Record that the provider took the bid."""
    builder = PlanBuilder(world, now)
    item, intent = _bid_change_of(builder, world, attempt_id)
    if item is not None and intent is not None:
        _took_it(builder, item, intent)
        builder.list_again(item.provider)
    return builder.plan()


def bid_refused(world: World, attempt_id: AttemptId, detail: str, now: datetime) -> Plan:
    """Record that the bid is what it was."""
    builder = PlanBuilder(world, now)
    item, intent = _bid_change_of(builder, world, attempt_id)
    if item is not None and intent is not None:
        _give_up(builder, item, intent, detail)
    return builder.plan()


def bid_unknown(world: World, attempt_id: AttemptId, detail: str, now: datetime) -> Plan:
    """Record that only a list can show what the bid is now; the higher one counts until then."""
    builder = PlanBuilder(world, now)
    _, intent = _bid_change_of(builder, world, attempt_id)
    if intent is not None:
        doubt_bid(builder, intent, detail)
    return builder.plan()


def _bid_change_of(builder: PlanBuilder, world: World, attempt_id: AttemptId) -> tuple[Attempt | None, Intent | None]:
    """Return the attempt, and the change of its bid that is not settled yet."""
    item = world.attempts.get(attempt_id)
    intent = None if item is None else builder.intent(bid_intent_id(item.key))
    return item, intent if intent is not None and intent.is_open else None


def doubt_bid(builder: PlanBuilder, intent: Intent, detail: str) -> None:
    """Let the first list after the window settle what the bid is."""
    due = builder.window_end(intent.provider)
    builder.put_intent(replace(intent, state=IntentState.UNKNOWN, error=detail, not_before=due))
    builder.event("bid.unknown", f"the answer to its new bid was lost ({detail}): a list will show it",
                  attempt=intent.attempt)  # fmt: skip
    builder.list_again(intent.provider)


def after_restart(builder: PlanBuilder, item: Attempt | None, intent: Intent) -> None:
    """Give up a change that was not sent; one that was may have taken effect."""
    if item is None:
        builder.put_intent(replace(intent, state=IntentState.FAILED, error="its attempt is over"))
    elif intent.state is IntentState.OPEN:
        _give_up(builder, item, intent, "not sent: spotd was restarted before its turn came")
    elif intent.state is IntentState.SENT:
        doubt_bid(builder, intent, "spotd was restarted during the call")


def note_bid(builder: PlanBuilder, attempt_id: AttemptId, mine: Instance, listing: Listing | None) -> None:
    """Record what a list states of the machine's bid, and settle a change whose answer was lost."""
    item = builder.attempt(attempt_id)
    if not pays_bid(item) or not item.state.counts:
        return
    if mine.bid_floor is not None and (mine.bid_floor != item.bidding.floor or item.bidding.seen is not None):
        placed = item.bidding.placed or (item.quote.price.gpu,)
        known = replace(item.bidding, placed=placed)
        # The price stated for our own machine is our bid, too, be it that a restored state knows no such one.
        stated = () if mine.price is None else (mine.price,)
        if not is_echo(mine.bid_floor, (*stated, *_bids_beside(builder, item))):
            at = builder.now if listing is None else listing.at
            known = with_floor(known, mine.bid_floor, at, _expected_floors(item, mine, builder.policy))
        if replace(known, placed=item.bidding.placed) != item.bidding:
            builder.put_attempt(replace(item, bidding=known))
    note_awake(builder, builder.attempt(attempt_id), mine)
    _settle_bid(builder, builder.attempt(attempt_id), mine, listing)


def _expected_floors(item: Attempt, mine: Instance, policy: Policy) -> range | None:
    """Return the lowest winning bids that one listing is believed for; `None`: each.

    A machine that runs is not outbid, and a bid that is near its end is raised before it loses. All else can wait. So
    can a leap of what wins where it is outbid: one wrong row would put it out of reach.
    """
    bid, floor = item.quote.price.gpu, item.bidding.floor or item.quote.price.gpu
    if not policy.rows_may_be_wrong:
        return None
    if mine.state is not InstanceState.RUNNING or item.bidding.held_since is not None:
        return range(min(bid, floor) // LEAP, LEAP * max(bid, floor) + 1)
    at_launch = bid * (PPM - ROUNDING_PPM) // (PPM + policy.bid_headroom_ppm)
    return range(at_launch if item.bidding.floor is None else min(item.bidding.floor, bid), bid + 1)


def _bids_beside(builder: PlanBuilder, item: Attempt) -> tuple[MicroUsdPerHour, ...]:
    """Return our bids for other machines of the same host, as if for this one: the host may state them as its floor.

    Those of machines that are being ended or are gone, too: what a host states is up to an hour old.
    """
    here = item.quote.offer
    if here.host_id is None:
        return ()
    found = [
        MicroUsdPerHour(bid * shares(here.gpu_count) // shares(gpus))
        for gpus, bid in builder.former_bids(here.provider, here.host_id)
    ]
    for other in builder.attempts_on(here.provider, here.host_id):
        offer = other.quote.offer
        if other.id != item.id and offer.pays_bid:
            bids = other.bidding.placed or (other.quote.price.gpu,)
            found += [MicroUsdPerHour(bid * shares(here.gpu_count) // shares(offer.gpu_count)) for bid in bids]
    return tuple(found)


def _settle_bid(builder: PlanBuilder, item: Attempt, mine: Instance, listing: Listing | None) -> None:
    intent = builder.intent(bid_intent_id(item.key))
    if intent is None or intent.state is not IntentState.UNKNOWN or intent.not_before is None:
        return
    if mine.price is not None and _is_near(mine.price, owed_bid(item)):
        _took_it(builder, item, intent)
    elif listing is not None and listing.at > intent.not_before and builder.now >= intent.not_before:
        if mine.price is not None and (item.bidding.before is not None or _is_lowering(item)):
            _give_up(builder, item, intent, f"{item.provider} shows ${as_usd(mine.price):.4f} per hour")
        elif _is_lowering(item):  # nothing contradicts the higher bid, which costs more
            _give_up(builder, item, intent, f"{item.provider} does not show it")
        else:
            _took_it(builder, item, intent)


def _is_near(price: int, bid: int) -> bool:
    return abs(price - bid) * PPM <= bid * ROUNDING_PPM


def _is_lowering(item: Attempt) -> bool:
    return owed_bid(item) < item.quote.price.gpu


def _took_it(builder: PlanBuilder, item: Attempt, intent: Intent) -> None:
    kind, bid = "bid.lowered" if _is_lowering(item) else "bid.raised", owed_bid(item)
    taken_at = _taken_at(item, intent, builder.now)
    builder.put_intent(replace(intent, state=IntentState.DONE, error=""))
    known = replace(item.bidding, before=None, refused=0)
    former = item.quote if item.bidding.before is None else repriced(item.quote, item.bidding.before)
    item = replace(item, quote=repriced(item.quote, bid), price_max=bid, bidding=known)
    builder.put_attempt(item)
    if item.machine is MachineState.LIVE and item.bidding.held_since is None and item.meter.since is not None:
        builder.set_rate(
            item.id, metered_rate(item.quote), on_demand_rate(item.quote), at=max(taken_at, item.meter.since)
        )
    # Of the whole machine: what a picture of its price over time is drawn of.
    builder.event(kind, f"its bid is ${as_usd(bid):.4f} per hour now", attempt=item.id,
                  before_usd_h=as_usd(former.price.total), usd_h=as_usd(item.quote.price.total))  # fmt: skip


def _taken_at(item: Attempt, intent: Intent, now: datetime) -> datetime:
    """Return since when a bid is billed: now, or earlier where its answer was lost, and a list shows it later.

    A higher one from when it was decided, a lower one from when it must have taken effect: what is booked is not less
    than what is billed.
    """
    known = intent.not_before if _is_lowering(item) else item.bidding.changed_at
    return now if known is None or intent.state is not IntentState.UNKNOWN else min(known, now)


def _give_up(builder: PlanBuilder, item: Attempt, intent: Intent, why: str) -> None:
    """Go back to the former bid, or stay at it; each call in a row that changed nothing makes the next one rarer."""
    builder.put_intent(replace(intent, state=IntentState.FAILED, error=why))
    is_lowering = _is_lowering(item)
    if intent.tries:
        refused = min(item.bidding.refused, REFUSALS_COUNTED) + 1
        item = replace(item, bidding=replace(item.bidding, refused=refused))
        builder.put_attempt(item)
    before = item.quote.price.gpu if is_lowering else item.bidding.before
    if before is None:
        return
    bidding = replace(item.bidding, before=None)
    builder.put_attempt(replace(item, quote=repriced(item.quote, before), price_max=before, bidding=bidding))
    kind = "bid.not_lowered" if is_lowering else "bid.not_raised"
    builder.event(kind, f"its bid stays ${as_usd(before):.4f} per hour: {why}", attempt=item.id)
