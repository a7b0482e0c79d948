"""What becomes of a launch before its call is made, and what is known of one that cannot be judged.

Theory. A launch is owed from its commit on, but a provider takes few calls at once, so it may wait for its turn for
minutes. Whether its job still wants the machine is asked again at the last moment, in the commit that records that the
call is made now. So after any end of the process an intent that is still OPEN was certainly never sent, and only one
that is SENT has an unknown outcome. Only a state that is older than the store may lack that a launch was sent, so at a
start the store is asked which of those that are OPEN were ever prepared (`spotd.core.recovery`).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, assert_never

from spotd.core.billing import first_meter
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.cooldowns import CooldownScope, refusal_subject, unable_subject
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentState, launch_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import NOTHING_KNOWN, MarketSnapshot
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.quarantine import quarantine
from spotd.core.metering import proven_until
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import (
    PPM,
    gpu_price_limit,
    halted_rate,
    metered_rate,
    on_demand_rate,
    per_gpu_words,
)
from spotd.core.ranking.candidates import ceiling_for
from spotd.core.todays_terms import at_todays_ceiling, at_todays_fee, ceiling_today, words_against_launch
from spotd_providers.contract.values import Instance, MicroUsdPerHour


def follow_terms(builder: PlanBuilder, attempt_id: AttemptId) -> None:
    """Count the costs of a machine by the fee of today from now on, and hold them against the ceiling of today."""
    _follow_fee(builder, builder.attempt(attempt_id))
    before = builder.attempt(attempt_id)
    offer, limit = before.quote.offer, builder.job(attempt_id.job).spec.price
    today = ceiling_for(offer.gpu, offer.gpu_count, limit, builder.policy)
    item = at_todays_ceiling(before, today, builder.now)
    if item is before:
        return
    builder.put_attempt(item)
    builder.list_again(item.provider)
    what = f"its job accepts {per_gpu_words(item.ceiling_now)} from now on, {per_gpu_words(before.ceiling_now)} before"
    builder.event("attempt.ceiling", f"{what}: [ceilings] were changed", attempt=attempt_id)


def _follow_fee(builder: PlanBuilder, before: Attempt) -> None:
    attempt_id, item = before.id, at_todays_fee(before, builder.policy)
    if item is before:
        return
    if item.quote.price.per_gpu > item.ceiling_now and item.over_ceiling_at is None:
        item = replace(item, over_ceiling_at=builder.now)  # the next listing takes it back where that is not so
    builder.put_attempt(item)
    meter, halted = item.meter, halted_rate(before.quote)
    if meter.since is not None and meter.rate in {metered_rate(before.quote), halted}:
        runs = meter.rate != halted or metered_rate(before.quote) == halted
        rate = metered_rate(item.quote) if runs else halted_rate(item.quote)
        builder.set_rate(attempt_id, rate, on_demand_rate(item.quote) if meter.on_demand_rate else meter.on_demand_rate)
    price = per_gpu_words(item.quote.price.per_gpu)
    why = f"the fee at {item.provider} is x{item.quote.price.fee_ppm / PPM:.2f} from now on: the machine costs {price}"
    builder.event("attempt.fee", why, attempt=attempt_id, fee_ppm=item.quote.price.fee_ppm)


RESTARTED: Final = "spotd was restarted before its turn came"


def record_instance(
    builder: PlanBuilder,
    item: Attempt,
    instance: Instance,
    *,
    launched_at: datetime,
    billed_since: datetime,
    found: bool,
) -> None:
    """Record that the launch of this attempt took effect as this instance, known by the provider's answer or `found`.

    Nothing else makes an attempt launched. A machine whose attempt ended meanwhile is ended.
    """
    starts = item.state is AttemptState.INTENDED
    meter = first_meter(item, instance, billed_since, builder)
    builder.put_attempt(
        replace(
            item,
            ref=instance.ref,
            outcome_unknown=False,
            launched_at=launched_at,
            machine=MachineState.LIVE,
            start_deadline=_late_start(builder, item, launched_at),
            state=AttemptState.STARTING if starts else item.state,
            meter=meter,
            proven_at=None,  # what its host wrote before; from here on its meter says what is proven
            full_since=meter.since if meter.rate > halted_rate(item.quote) else None,
        )
    )
    finish_launch(builder, item, instance)
    for subject in (refusal_subject, unable_subject):
        builder.forgive(item.provider, CooldownScope.JOB, subject(item.id.job, item.quote.offer.market))
    kind, sentence = "machine.launched", f"the machine exists at {item.provider}"
    if found:
        kind, sentence = "machine.adopted", "the machine was found by its key"
    builder.event(kind, sentence, attempt=item.id, instance=instance.ref.instance_id, provider=item.provider)
    if starts and builder.job(item.id.job).state is JobState.PROVISIONING:
        builder.move_job(item.id.job, JobState.STARTING, f"the machine starts at {item.provider}")
    if not item.state.counts:
        builder.owe_termination(instance.ref, instance.key, item.id, why="its attempt ended before it was launched")


def _late_start(builder: PlanBuilder, item: Attempt, launched_at: datetime) -> datetime | None:
    """When a machine that is found long after its launch is given up if it does not speak; `None` if that is as usual.

    Its provider was away, so it may have been paused until a moment ago: its time to start begins when it is found.
    """
    if builder.now - launched_at <= builder.policy.list_lag(item.provider):
        return item.start_deadline
    return builder.now + builder.policy.provision_timeout(item.provider)


def finish_launch(builder: PlanBuilder, item: Attempt, instance: Instance) -> None:
    """Record that the launch that was owed has taken effect."""
    intent = builder.intent(launch_intent_id(item.key))
    if intent is not None:
        builder.put_intent(replace(intent, state=IntentState.DONE, ref=instance.ref))


def launch_sent(world: World, attempt_id: AttemptId, now: datetime, market: MarketSnapshot = NOTHING_KNOWN) -> Plan:
    """Record that the call is made now; or that it never is, where its job wants no machine any more."""
    builder = PlanBuilder(world, now)
    item = world.attempts.get(attempt_id)
    intent = None if item is None else builder.intent(launch_intent_id(item.key))
    if item is None or intent is None or intent.state is not IntentState.OPEN:
        return builder.plan()
    job = world.jobs[attempt_id.job]
    waits = world.policy.launches_paused or world.policy.locked.get(job.id)
    if not item.state.counts or job.cancel_requested or job.state.is_final:
        not_sent(builder, item, intent, "its job does not want the machine any more")
    elif unfit := waits or words_against_launch(world, market, item, now):
        not_sent(builder, item, intent, unfit)
    else:
        builder.put_attempt(_within_today(item, job, world.policy))
        builder.put_intent(replace(intent, state=IntentState.SENT))
    return builder.plan()


def _within_today(item: Attempt, job: Job, policy: Policy) -> Attempt:
    """Return the attempt as it is launched: at today's fee, and for no more than is accepted today."""
    item = at_todays_fee(item, policy)
    ceiling = ceiling_today(item, job, policy)
    limit = MicroUsdPerHour(min(item.price_max, max(item.quote.price.gpu, gpu_price_limit(item.quote, ceiling))))
    return replace(item, ceiling=max(ceiling, item.quote.price.per_gpu), ceiling_set=None, price_max=limit)


def not_sent(builder: PlanBuilder, item: Attempt, intent: Intent, why: str) -> None:
    """No call was made for this intent, so there is certainly no machine."""
    builder.machine_gone(item.id)
    builder.put_intent(replace(intent, state=IntentState.FAILED, error=f"not sent: {why}"))
    builder.end_attempt(item.id, EndReason.NOT_SENT, why)


def begin_search(builder: PlanBuilder, item: Attempt, what: str) -> None:
    """Begin the search for the machine, and let the job report what it waits for."""
    builder.event("launch.unknown", f"{what}; looking for the machine by its key", attempt=item.id)
    builder.list_again(item.provider)
    job = builder.job(item.id.job)
    if job.state is JobState.PROVISIONING:
        span = int((builder.window_end(item.provider) - builder.now).total_seconds())
        why = f"{what}; for {span} s {item.provider} is searched for the machine, and no other is launched"
        builder.move_job(job.id, job.state, why)


def doubt_launch(builder: PlanBuilder, item: Attempt | None, intent: Intent) -> None:
    """Treat a launch that a former run of the process has sent, or may have, as unknown."""
    not_before = builder.window_end(intent.provider)
    builder.put_intent(replace(intent, state=IntentState.UNKNOWN, error="spotd was restarted", not_before=not_before))
    if item is not None:
        builder.put_attempt(replace(item, outcome_unknown=True))
        begin_search(builder, item, "spotd was restarted during the launch")


class LaunchOutcome(StrEnum):
    """What is known of a launch when what it means for its job cannot be judged."""

    NOT_MADE = "not_made"
    MADE = "made"
    UNKNOWN = "unknown"


def launch_contained(
    world: World, attempt_id: AttemptId, outcome: LaunchOutcome, made: Instance | None, why: str, now: datetime
) -> Plan:
    """Quarantine the job, and end the machine that was made, or may have been."""
    builder = PlanBuilder(world, now)
    item = world.attempts.get(attempt_id)
    if item is None:
        if made is not None:
            builder.owe_termination(made.ref, made.key, None, why="its attempt has ended meanwhile")
        return builder.plan()
    match outcome:
        case LaunchOutcome.NOT_MADE:
            state, changed = IntentState.FAILED, replace(item, machine=MachineState.GONE)
        case LaunchOutcome.MADE:
            ref = item.ref if made is None else made.ref
            limit = item.meter.until or proven_until(item, world.jobs[attempt_id.job], world.policy, now)
            meter = replace(item.meter, rate=item.quote.price.total, since=item.meter.since or now, until=limit)
            made_so = replace(item, ref=ref, machine=MachineState.LIVE, meter=meter)
            state, changed = IntentState.DONE, replace(made_so, full_since=item.full_since or meter.since)
        case LaunchOutcome.UNKNOWN:
            state, changed = IntentState.UNKNOWN, replace(item, outcome_unknown=True)
        case _:
            assert_never(outcome)
    builder.put_attempt(changed)
    intent = builder.intent(launch_intent_id(item.key))
    if intent is not None and intent.is_open:
        due = builder.window_end(item.provider)
        builder.put_intent(replace(intent, state=state, error=why, not_before=due, ref=changed.ref))
    quarantine(builder, attempt_id.job, why)
    return builder.plan()


def end_contained(world: World, intent_id: IntentId, now: datetime) -> Plan:
    """Record that the provider accepted the end, and nothing that would have to be judged."""
    builder = PlanBuilder(world, now)
    intent = world.intents.get(intent_id)
    if intent is not None and intent.state is IntentState.OPEN:
        accepted = replace(intent, state=IntentState.ACCEPTED, accepted_at=now, tries=intent.tries + 1, error="")
        builder.put_intent(accepted)
        builder.list_again(intent.provider)
    return builder.plan()
