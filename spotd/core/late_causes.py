"""The reason of an attempt's end, corrected once its provider states that it had taken the machine back.

Theory. The log in which some providers name an eviction is minutes late. An eviction whose notice did not arrive ends
its attempt before that as lost, which counts as a start that failed, against the host, and for long. What the log says
then is true of that end, so the end becomes what it was: its reason, what the job and the market are counted for it,
and what is not billed. It goes this way only, and not for an end that we ordered or that the host reported; a machine
that was taken only after its attempt had ended was lost for another reason. An attempt that is corrected is never
correctable again, so a row that is listed for an hour, or again after a restart, changes nothing more.

A job that has failed meanwhile stays failed, as others may have acted on that: `spotctl retry` goes on with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import (
    STARTS_FAILED,
    Cooldown,
    CooldownEnd,
    CooldownScope,
    did_start,
    has_saved,
    is_failed_start,
    is_mute_start,
    setback,
)
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import RecordId, World, faded
from spotd.core.metering import free_of, with_paid
from spotd.core.plan_builder import PlanBuilder
from spotd.core.working_copy import learn_from_end
from spotd_providers.contract.values import Instance, Loss, MicroUsd, as_usd

STATED_LATE: Final = "; as machines were taken back, which was stated later, "
CORRECTED_WITHIN: Final = timedelta(hours=1)
"""So long after its end the reason of an attempt may change."""


def is_correctable(item: Attempt, now: datetime) -> bool:
    """Whether the attempt ended as lost, a short time ago, without an order of ours or a report of its host."""
    return (
        item.end_reason is EndReason.HOST_LOST
        and item.stop is None
        and item.phase != "done"
        and item.launched_at is not None
        and item.ended_at is not None
        and item.ended_at <= now <= item.ended_at + CORRECTED_WITHIN
    )


def correct_end(
    world: World, job: Job, attempts: Sequence[Attempt], item: Attempt, row: Instance, now: datetime
) -> Plan:
    """Return what changes where the row states that the machine of this attempt had been taken back; mostly nothing.

    Args:
        attempts: all of the job, as they are stored.
    """
    over_at = min((at for at in (row.ended_at, item.over_since) if at is not None), default=None)
    if not is_correctable(item, now) or row.loss is not Loss.PREEMPTED or row.ref != item.ref:
        return Plan()
    if item.ended_at is None or over_at is None or over_at > item.ended_at:
        return Plan()
    builder = PlanBuilder(replace(world.with_job(job), attempts={**world.attempts, item.id: item}), now)
    builder.event(
        "attempt.corrected",
        f"{item.provider} states late that it took the machine of attempt {item.id.number} back: preempted, not lost",
        attempt=item.id,
        reason=EndReason.PREEMPTED.value,
    )
    later = [one for one in attempts if one.id.number > item.id.number]
    _count_again(builder, job, item, later, item.ended_at)
    _cool_again(builder, world.cooldowns, item, item.ended_at)
    builder.put_attempt(replace(item, end_reason=EndReason.PREEMPTED, end_detail=""))
    _take_back(builder, builder.attempt(item.id), replace(row, ended_at=over_at))
    return builder.plan()


def _count_again(builder: PlanBuilder, job: Job, item: Attempt, later: Sequence[Attempt], ended_at: datetime) -> None:
    """Count the end for the job, and for what is remembered of hosts and starts, as one that is not its fault."""
    started = did_start(item, job, ended_at)
    since = job.pacing.counted_from  # its owner's retry, which counts anew
    is_counted = not started and (since is None or since <= ended_at)
    is_counted = is_counted and not any(one.ended_at and did_start(one, job, one.ended_at) for one in later)
    starts = max(0, job.failed_starts - is_counted)
    is_mute = is_counted and is_mute_start(item, job, EndReason.HOST_LOST)
    mute = max(0, (job.mute_starts or 0) - is_mute) or None
    before = starts - sum(one.end_reason is not None and is_failed_start(one, one.end_reason) for one in later)
    _learn_again(builder, item, ended_at, suspects_job=before > 0 and not started)
    not_before, is_newest = job.not_before, job.attempts_made == item.id.number
    if is_newest and not_before is not None:
        idle = max(0, job.idle_launches - 1)
        then = setback(
            replace(job, failed_starts=starts, mute_starts=mute, idle_launches=idle),
            item,
            EndReason.PREEMPTED,
            ended_at,
        )
        not_before = None if then.not_before is None else min(not_before, then.not_before)
    lost, taken = EndReason.HOST_LOST.sentence(item.end_detail), EndReason.PREEMPTED.sentence("")
    reason = taken + job.reason.removeprefix(lost) if is_newest and job.reason.startswith(lost) else job.reason
    if is_newest and not job.state.is_final and STARTS_FAILED in reason:
        reason = taken  # it waited for this before it would have failed
    elif job.state is JobState.FAILED and is_counted and STARTS_FAILED in reason:
        late = f"{STATED_LATE}{starts} of them count; spotctl retry {job.name} goes on"
        reason = reason.partition(STATED_LATE)[0] + late
    totals = replace(job.totals, preemptions=job.totals.preemptions + 1)
    builder.put_job(
        replace(job, failed_starts=starts, mute_starts=mute, not_before=not_before, reason=reason, totals=totals)
    )


def _learn_again(builder: PlanBuilder, item: Attempt, ended_at: datetime, *, suspects_job: bool) -> None:
    """Replace what the end added to the records, as far as it has not faded since."""
    counts: Counter[RecordId] = Counter()
    spans: dict[RecordId, timedelta] = {}
    for sign, reason in ((-1, EndReason.HOST_LOST), (1, EndReason.PREEMPTED)):
        then = PlanBuilder(World(policy=builder.policy, jobs={}, attempts={}, intents={}), ended_at)
        learn_from_end(then, item, reason, suspects_job=suspects_job)
        for identity, record in then.experience.items():
            left = faded(record, builder.now)
            counts[identity] += sign * left.count
            spans[identity] = spans.get(identity, timedelta(0)) + sign * left.span
    for identity, span in spans.items():
        if counts[identity] or span:
            builder.learn(identity, counts[identity], span)


def _cool_again(builder: PlanBuilder, known: Sequence[Cooldown], item: Attempt, ended_at: datetime) -> None:
    """Let the host cool down as briefly as one that was taken back, or its pool where hosts have no names."""
    offer, why = item.quote.offer, EndReason.PREEMPTED.sentence("")
    until = ended_at + builder.policy.pool_cooldown
    if offer.host_id is not None:
        for one in known[::-1]:
            if (one.provider, one.scope, one.subject) == (offer.provider, CooldownScope.HOST, offer.host_id):
                if one.since == ended_at:
                    builder.shorten(replace(one, until=min(one.until, until), reason=why, ends=CooldownEnd.TIME))
                return
    elif has_saved(item, builder.job(item.id.job)) and until > builder.now:
        # A pool is not blamed for the loss of one of its hosts, but for taking machines back.
        builder.cool(offer.provider, CooldownScope.POOL, str(offer.pool), until - builder.now, why)


def _take_back(builder: PlanBuilder, item: Attempt, row: Instance) -> None:
    """Credit what the provider does not bill of a machine that it took so soon; of one still listed, its row does."""
    if item.state is not AttemptState.ENDED or item.bill.believed is not None:
        return
    free = free_of(item, row, builder.policy, builder.now)
    if free <= 0:
        return
    why = f"{item.provider} took the machine so soon that its time is free: ${as_usd(free):.4f}"
    builder.credit(item.id, free, why, ended_at=row.ended_at)
    after, job = builder.attempt(item.id), builder.job(item.id.job)
    paid = after.meter.settled - item.meter.settled
    compared = after.on_demand_settled - item.on_demand_settled
    sums = MicroUsd(job.spent + paid), MicroUsd(job.on_demand + compared)
    builder.put_job(replace(job, spent=sums[0], on_demand=sums[1], totals=with_paid(job.totals, item, paid, compared)))
    builder.close_job(job.id)
