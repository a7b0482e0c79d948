"""Several machines of which one is lost: the others are kept until another one has its place, or go on without it.

Theory. The attempt goes on, and with it everything that holds for it: one machine to the kernel, one meter, one grant,
one order that stops it. What changes is which machines take part (`Members`). The first machine, of rank 0, says which
of the others it lost; its heartbeat is that of all, so a kept machine is never one that gives no sign of life. The
daemon owes a call that replaces these (`Power.REPLACE`). It costs nothing beyond the price that was agreed for all, it
is numbered, and its provider makes it once for each number however often it is asked. So an answer that was lost is
asked for again, after a crash too, and nothing of it is ever unknown.

Once all are replaced the grant names the next round, which the first machine waits for: all runners start once more.
A machine of an earlier round is not taken in, and finds in the grant that another one has its place.

The wait is bounded three times: by the job's `replace_within` here, after which the others go on without the lost one
where its range allows that, or all are ended; by the same span and a little more in the grant, for a daemon that is
dead; and by the lease. What follows until all run is bounded by a start's time. An order to stop, of whatever reason,
ends all as at any other time. They are kept once more only where the job has saved something since the last time.

The first machine alone may write, so its loss ends the attempt. Where its provider replaces it as well, the others say
that they wait, and go on as the next attempt, in the commit that ends this one: what the first one writes once it is
back lies where nothing is read any more. The next attempt is kept from its begin, with the first one lost. Elsewhere
all are ended, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, bid_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.market import Quote
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.handover import hand_over
from spotd.core.metering import spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import for_fewer, metered_rate, on_demand_rate, part_of, restore_time, span_words
from spotd_jobs.spec.model import Resources
from spotd_providers.contract.values import AttemptKey

SHRINKS_WITHIN: Final = timedelta(minutes=3)
"""Beyond `replace_within`: as long as a provider may take to leave the lost ones out."""
AGAIN_FIRST: Final = timedelta(seconds=5)
AGAIN_MAX: Final = timedelta(minutes=1)
REPLACED_MAX: Final = 100
"""Of one attempt: more are no losses, but a host that reports them."""
_BEFORE_RUN: Final = frozenset({"boot", "code", "setup", "restore"})
"""Phases of a runner that has not met the others yet."""


def replace_intent_id(key: AttemptKey) -> IntentId:
    """Return the one id that all such calls for the machines of an attempt have: there is one at a time."""
    return IntentId(f"replace:{key}")


# What the first machine says.


def note_members(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Record which machines the first one lost while the others wait, and that all of them run again."""
    item, job = builder.attempt(attempt_id), builder.job(attempt_id.job)
    if report.liveness_check or item.stop is not None or not job.spec.replace_within:
        return
    # One that goes on with the machines of the attempt before runs all of them from its first report on.
    begins = item.state is AttemptState.STARTING and item.is_kept and report.gang is not None
    if not (begins or item.state is AttemptState.RUNNING) or (item.members is None and item.quote.offer.nodes == 1):
        return
    known = item.members or Members(since=(0,) * item.quote.offer.nodes)
    if _note_loss_of_first(builder, item, known, report):
        return
    if report.gang is None:
        _note_new_start(builder, item, known, report)
        return
    number, named = report.gang
    if number > known.round or known.is_outdated:
        # The state is a copy from before: what it would replace may be well. The first one ends the next wait itself.
        if not known.is_outdated:
            after = replace(known.going_on(spent(item, builder.now), builder.now, item.intended_at), is_outdated=True)
            builder.put_attempt(replace(item, members=after))
        return
    if number < known.round:
        return
    # One that was replaced since belongs to the next round already.
    lost = tuple(r for r in named if known.first < r < len(known.since) and (known.since[r] or 0) <= number)
    lost = tuple(rank for rank in lost if known.since[rank] is not None)
    if lost and not set(lost) <= set(known.lost):
        _note_loss(builder, item, known, lost)
    elif not named and known.kept_since is not None and report.phase == "run":
        going_on = known.going_on(spent(item, builder.now), builder.now, item.intended_at)
        builder.put_attempt(replace(item, members=replace(going_on, newest=_newest(job))))
        builder.put_job(replace(job, lost=job.lost + unsaved_time(job, item, known.kept_since)))
        span = span_words(max(timedelta(0), builder.now - known.kept_since))
        builder.event("attempt.went_on", f"all machines run the command again, after {span}", attempt=attempt_id)


def _note_loss(builder: PlanBuilder, item: Attempt, known: Members, lost: tuple[int, ...]) -> None:
    job, every = builder.job(item.id.job), tuple(sorted({*known.lost, *lost}))
    if known.kept_since is None:
        known = replace(known, kept_since=builder.now, kept_from=spent(item, builder.now))
    builder.put_attempt(replace(item, members=replace(known, lost=every, whole_since=None)))
    if not _gets_on(job, known):
        return
    which = ", ".join(str(rank + 1) for rank in every)
    healthy, all_of_them = len(known.since) - known.since.count(None) - len(every), len(known.since)
    why = (
        f"machine {which} of {all_of_them} is lost: the other {healthy} are kept and bill, for"
        f" {span_words(job.spec.replace_within)} at most, replace_within"
    )
    builder.event("attempt.kept", why, attempt=item.id, lost=which)


def _note_loss_of_first(builder: PlanBuilder, item: Attempt, known: Members, report: HostStatus) -> bool:
    """Whether the first one is lost by the words of the others, which wait: it is silent for as long as a host may be.

    All others that say nothing by then are lost as well. A first one that speaks is believed: it says who is lost.
    One of a later round than is known has its place already: the state is a copy from before.
    """
    if known.first in known.lost:
        return report.gang is None or report.gang[0] <= known.round
    rules = builder.policy.providers.get(item.provider)
    if rules is None or not rules.replaces_first:
        return False  # it asked none of them to wait
    silence, first_at = builder.policy.silence_max, report.first_at
    words = [one for one in report.words if one[0] == known.round and builder.now - one[3] < silence]
    wait = {rank: since for _, rank, since, _ in words}
    others = {rank for rank, came in enumerate(known.since) if came is not None} - {known.first}
    wait = {rank: at for rank, at in wait.items() if rank in others}
    if not wait or first_at is None or known.is_outdated or item.state is not AttemptState.RUNNING:
        return False
    late_at = max(first_at, min(wait.values()) + silence) + silence  # they lose the first one at about the same time
    due = first_at + silence if wait.keys() == others else late_at
    if builder.now < due:
        builder.wake(due)
        return False
    _note_loss(builder, item, known, tuple(sorted({known.first, *(others - wait.keys())})))
    return True


def _note_new_start(builder: PlanBuilder, item: Attempt, known: Members, report: HostStatus) -> None:
    """Record that the first one started anew within a round: its provider started all, so none of them is lost.

    They were outbid and woke before a list showed that.
    """
    if known.lost and report.phase in _BEFORE_RUN:
        after = replace(known, lost=(), shrinks_since=None, given_up="", whole_since=builder.now)
        builder.put_attempt(replace(item, members=after))


def _newest(job: Job) -> str:
    return job.checkpoints[0].manifest_key if job.checkpoints else ""


def _gets_on(job: Job, members: Members) -> bool:
    """Whether the job has saved something since all of them ran again after the last wait."""
    return members.newest is None or members.newest != _newest(job)


# What is decided.


def gangs_to_mend(builder: PlanBuilder) -> list[Attempt]:
    """Return the attempts of which some machines are lost, or have come, and the others wait."""
    return [i for i in builder.attempts() if i.is_kept and _is_wanted(builder, i)]


def mend(builder: PlanBuilder, item: Attempt) -> None:
    """Owe the call that replaces its lost machines, or leaves them out; end all where neither can be."""
    if item.members is None:
        return
    if item.members.first in item.members.lost and item.state is AttemptState.RUNNING:
        _go_on_with_next(builder, item, item.members)
    elif item.members.lost:
        _mend(builder, item, item.members)
    elif late := _words_of_late_start(builder, item, item.members):
        _end(builder, item, late)


def _mend(builder: PlanBuilder, item: Attempt, members: Members) -> None:
    job, since = builder.job(item.id.job), members.kept_since or builder.now
    # An instant ahead is by a clock that was set back: what it bounds is over.
    is_over = builder.now >= since + job.spec.replace_within or since > builder.now or members.replaced >= REPLACED_MAX
    if not _gets_on(job, members):
        _end(builder, item, f"machine {_places(members)} is lost, and nothing was saved since one was replaced before")
        return
    if is_over and not members.shrinks:
        members = replace(members, shrinks_since=builder.now)
        builder.put_attempt(replace(item, members=members))
    if members.shrinks_since is not None and (why := _words_of_end(builder, item, members, members.shrinks_since)):
        _end(builder, item, why)
        return
    if not _is_read(builder, item):
        builder.read_in_full(item.id)  # they may run by now
    shrinks_since = members.shrinks_since
    builder.wake(since + job.spec.replace_within if shrinks_since is None else shrinks_since + SHRINKS_WITHIN)
    known, change = builder.intent(replace_intent_id(item.key)), builder.intent(bid_intent_id(item.key))
    if (known is not None and known.is_open) or (change is not None and change.is_open):
        return
    if members.first in members.lost and item.heartbeat_seen_at is not None:
        return  # another one spoke in its place: the state is a copy from before, and what it says is read next
    builder.put_intent(
        Intent(
            id=replace_intent_id(item.key),
            account=item.account,
            kind=IntentKind.REPLACE,
            provider=item.provider,
            key=item.key,
            state=IntentState.OPEN,
            created_at=builder.now,
            attempt=item.id,
            ref=item.ref,
        )
    )


def _go_on_with_next(builder: PlanBuilder, item: Attempt, members: Members) -> None:
    """End the attempt of which the first machine is lost; the others are those of the next one, all in one commit.

    What the lost one writes from now on lies below the prefix of an attempt that is over.
    """
    why = f"machine {_places(members)} is lost, the first one among them"
    if not _gets_on(builder.job(item.id.job), members) or item.ref is None:
        _end(builder, item, f"{why}, and nothing was saved since one was replaced before")
        return
    change = builder.intent(bid_intent_id(item.key))
    if change is not None and change.is_open:
        return
    if not _is_read(builder, item):
        builder.read_in_full(item.id)
        return
    builder.end_attempt(item.id, EndReason.HOST_LOST, why)
    job = builder.job(item.id.job)
    if job.state is not JobState.RECOVERING:
        return  # it was lost too often, or is to end
    following = hand_over(builder, builder.attempt(item.id), job, item.quote, item.ceiling, item.price_max)
    after = Members(
        since=members.since,
        round=members.round + 1,
        lost=members.lost,
        kept_since=members.kept_since,
        replaced=members.replaced,
    )
    meter = replace(following.meter, rate=item.meter.rate, on_demand_rate=item.meter.on_demand_rate)
    following = replace(following, members=after, meter=meter, ceiling_set=item.ceiling_set, save_every=item.save_every)
    builder.put_attempt(following)
    builder.put_job(replace(builder.job(job.id), attempts_made=following.id.number))
    sentence = f"goes on with the {members.healthy} healthy machines, which wait for another first one"
    builder.move_job(job.id, JobState.PROVISIONING, sentence)
    builder.event("attempt.intended", sentence, attempt=following.id, provider=item.provider)


def _end(builder: PlanBuilder, item: Attempt, why: str) -> None:
    if _is_read(builder, item):
        builder.end_attempt(item.id, EndReason.HOST_LOST, why)
    else:
        builder.read_in_full(item.id)  # it may have stored a checkpoint since, which an end would leave out


def _words_of_late_start(builder: PlanBuilder, item: Attempt, members: Members) -> str:
    """Why all are ended although none is missing: they do not run; empty while they may, or the config lacks theirs.

    A new one may take as long as a provider may take to start it, and as all took before their command ran first.
    """
    rules, since = builder.policy.providers.get(item.provider), members.whole_since
    if rules is None or since is None:
        return ""
    first = timedelta(0)
    if item.running_at is not None and item.launched_at is not None:
        first = max(first, item.running_at - item.launched_at)
    span = rules.provision_timeout + restore_time(builder.job(item.id.job), item.quote.offer) + first
    if since <= builder.now < since + span:
        builder.wake(since + span)
        return ""
    return f"the command did not run within {span_words(span)} after no machine was missing any more"


def _places(members: Members) -> str:
    return ", ".join(str(rank + 1) for rank in members.lost)


def _words_of_end(builder: PlanBuilder, item: Attempt, members: Members, shrinks_since: datetime) -> str:
    """Why all are ended now that none is replaced any more; empty where the others may go on without the lost ones."""
    since, now = members.kept_since or builder.now, builder.now
    waited = span_words(max(timedelta(0), now - since))
    why = members.given_up or words_against_fewer(item, members, builder.job(item.id.job).spec.resources)
    if why:
        return f"machine {_places(members)} was not replaced within {waited}, and {why}"
    is_late = now >= shrinks_since + SHRINKS_WITHIN or max(since, shrinks_since) > now
    return f"{item.provider} did not leave the lost machines out in time" if is_late else ""


def _is_read(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether all that its host wrote was read a moment ago; an instant ahead is by a clock that was set back."""
    return item.read_at is not None and builder.now - item.read_at <= builder.policy.silence_max


def words_against_fewer(item: Attempt, members: Members, wanted: Resources) -> str:
    """Why the job does not go on on the machines that are left; empty where it does."""
    if wanted.nodes_max is None:
        return f"it runs on {wanted.nodes}"
    if members.healthy < wanted.nodes:
        return f"{members.healthy} are fewer than its {wanted.nodes_words}"
    # What the first one uploads is shared by fewer.
    fits = for_fewer(item.quote, members.healthy).price.per_gpu <= min(item.ceiling, item.ceiling_now)
    return "" if fits else f"{members.healthy} would cost more per GPU than it accepts"


def _is_wanted(builder: PlanBuilder, item: Attempt) -> bool:
    """Whether its machines may go on; what is taken away ends by the reason that its provider gives."""
    job = builder.job(item.id.job)
    is_taken = item.bidding.held_since is not None or item.notice_at is not None
    # One that goes on with the machines of the attempt before runs once none of them is missing.
    counts = item.state is AttemptState.RUNNING or (
        item.state is AttemptState.STARTING and item.machine_key is not None
    )
    return counts and item.stop is None and not is_taken and not job.cancel_requested


# What is called, and what came of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """One call that replaces machines, or leaves them out.

    Attributes:
        number: of the round from which on the new ones take part.
    """

    item: Attempt
    ranks: tuple[int, ...]
    number: int
    shrinks: bool


def mending_of(world: World, attempt_id: AttemptId, now: datetime) -> Mending | None:
    """Return the call that is to be made now."""
    item, intent = world.attempts.get(attempt_id), None
    if item is not None:
        intent = world.intents.get(replace_intent_id(item.key))
    if item is None or item.members is None or intent is None or intent.state is not IntentState.OPEN:
        return None
    members = item.members
    if not members.lost or (intent.not_before is not None and intent.not_before > now):
        return None
    return Mending(item=item, ranks=members.lost, number=members.round + 1, shrinks=members.shrinks)


def begin_mending(world: World, attempt_id: AttemptId, now: datetime) -> Plan:
    """Record that the call is made now; or that it is not, where the machines are not wanted any more."""
    builder = PlanBuilder(world, now)
    item = world.attempts.get(attempt_id)
    intent = None if item is None else builder.intent(replace_intent_id(item.key))
    if item is None or intent is None or intent.state is not IntentState.OPEN:
        return builder.plan()
    paused = "" if item.members is not None and item.members.shrinks else world.policy.launches_paused
    if not _is_wanted(builder, item) or item.members is None or not item.members.lost:
        builder.put_intent(replace(intent, state=IntentState.FAILED, error="the machines are not wanted any more"))
    elif paused or not _is_read(builder, item):
        builder.put_intent(_again(intent, paused or "what its host wrote is not read", now))
    else:
        builder.put_intent(replace(intent, tries=intent.tries + 1, not_before=None))
    return builder.plan()


def record_mending(world: World, done: Mending, now: datetime) -> Plan:
    """Record that the provider did what was asked; the next round begins once no machine is missing."""
    builder = PlanBuilder(world, now)
    item = world.attempts.get(done.item.id)
    if item is None or item.members is None or not item.state.counts:
        return builder.plan()
    members, ranks = item.members, set(done.ranks)
    if members.round + 1 != done.number or not ranks <= set(members.lost):
        return builder.plan()
    intent = builder.intent(replace_intent_id(item.key))
    if intent is not None:
        builder.put_intent(replace(intent, state=IntentState.DONE, error=""))
    came = None if done.shrinks else done.number
    since = tuple(came if rank in ranks else known for rank, known in enumerate(members.since))
    lost = tuple(rank for rank in members.lost if rank not in ranks)
    replaced = members.replaced + (0 if done.shrinks else len(ranks))
    number = members.round if lost else done.number
    if done.shrinks:
        job = builder.job(item.id.job)
        if why := words_against_fewer(item, members, job.spec.resources):
            builder.put_attempt(replace(item, members=replace(members, given_up=why)))  # the terms changed meanwhile
            return builder.plan()
        _bill_fewer(builder, item, item.quote.offer.nodes - len(ranks))
        item = builder.attempt(item.id)
    whole_since = None if lost else now
    after = replace(members, since=since, lost=lost, round=number, replaced=replaced, whole_since=whole_since)
    builder.put_attempt(replace(item, members=after))
    which = ", ".join(str(rank + 1) for rank in sorted(ranks))
    what = f"goes on without machine {which}" if done.shrinks else f"machine {which} is replaced"
    builder.event("attempt.shrunk" if done.shrinks else "attempt.replaced", what, attempt=item.id)
    builder.list_again(item.provider)
    return builder.plan()


def fail_mending(
    world: World, done: Mending, detail: str, now: datetime, *, is_final: bool, wait: timedelta | None = None
) -> Plan:
    """Record that it is not done, or that this is not known: it is asked for again, unless it cannot be had at all."""
    builder = PlanBuilder(world, now)
    item = world.attempts.get(done.item.id)
    intent = None if item is None else builder.intent(replace_intent_id(item.key))
    if item is None or item.members is None or intent is None or intent.state is not IntentState.OPEN:
        return builder.plan()
    builder.list_again(item.provider)
    if intent.tries <= 1 or is_final:
        what = "left out" if done.shrinks else "replaced"
        builder.event("attempt.not_replaced", f"the lost machines are not {what}: {detail}", attempt=item.id)
    if not is_final:
        again = _again(intent, detail, now, wait)
        builder.put_intent(again)
        builder.wake(again.not_before or now)
        return builder.plan()
    builder.put_intent(replace(intent, state=IntentState.FAILED, error=detail))
    given_up = f"the lost machines are not left out: {detail}" if done.shrinks else ""
    known = replace(item.members, shrinks_since=item.members.shrinks_since or now, given_up=given_up)
    builder.put_attempt(replace(item, members=known))
    return builder.plan()


def _again(intent: Intent, detail: str, now: datetime, wait: timedelta | None = None) -> Intent:
    pause = min(max(AGAIN_FIRST * 2 ** min(max(intent.tries - 1, 0), 10), wait or timedelta(0)), AGAIN_MAX)
    return replace(intent, not_before=now + pause, error=detail)


def _bill_fewer(builder: PlanBuilder, item: Attempt, nodes: int) -> None:
    """From now on so many machines are what was agreed, and what is billed."""
    before = item.quote.offer.nodes
    agreed: Quote = for_fewer(item.quote, nodes)
    known = item.bidding
    builder.put_attempt(
        replace(
            item,
            quote=agreed,
            price_max=part_of(item.price_max, nodes, before),
            bidding=replace(
                known, placed=tuple(part_of(bid, nodes, before) for bid in known.placed), floor=None, seen=None
            ),
        )
    )
    builder.set_rate(
        item.id, min(part_of(item.meter.rate, nodes, before), metered_rate(agreed)), on_demand_rate(agreed)
    )
