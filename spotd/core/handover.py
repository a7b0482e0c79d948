"""The machine of a job that is done, taken over by the next job that fits.

Theory. A machine costs minutes before it is of use: it is found, made, and pulls its image. Where `[reuse] wait` is
set, the host of a job that is done removes all that was the job's, says so in its last report, and waits. Nothing new
holds that machine: its attempt is ENDING, as ever, and the order to end it is durable from the same commit on, to be
given when the wait is over (`Intent.not_before`). So whatever crashes, the machine is ended then.

A *handover* is one commit. The former attempt is ENDED, its meter stops, its order is settled; the next attempt begins
as STARTING with that machine, and its meter runs on from the same instant. No call is made, so nothing about it can be
unknown. The machine goes on to carry the key of the attempt for which it was made (`Attempt.machine_key`), by which
lists show it and by which it is found; what they show is the next attempt's from then on. At most one attempt that has
not ended has a machine (`broken_rules`).

A handover has two witnesses beside the state, both in the store, where a backup of the state takes nothing from them:
the launch record of the next attempt, which names the machine (`recovery`), and the object by which the host learns of
it, which is written once for each former attempt and never over another (`grants.builder`). So a state that is older
than a handover takes the next attempt in by the one, and can make no second handover because of the other; until the
store was asked, and while another attempt may have the machine, it is neither handed over nor ended (`is_held_back`).

Until it speaks for
its next attempt the handover is not confirmed: after `CONFIRMED_WITHIN` the attempt ends as NOT_HANDED_OVER, its
machine is ended and its job placed anew. Nothing that the former runner writes counts for the next attempt: it can
write below the former one's prefix only.

A machine waits only where its provider bills by time alone, since no bill could be shared else; while it costs what was
agreed for it; and while nothing else needs its place or its money. It goes to a job of the same owner (a person, or
agents), with the same image and no larger disk, that it fits in every other way as an offer does. The machines of a job
that has several wait for none, since they begin and end together, and such a job takes over none. The healthy ones of
an attempt that lost its first one are handed over to the next attempt of the same job (`gangs`), without a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.bills import DONE
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import (
    AttemptId,
    Intent,
    IntentId,
    IntentState,
    Meter,
    bid_intent_id,
    terminate_intent_id,
)
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy, ProviderPolicy, attempt_key
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.metering import lease_and_save, proven_until
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import machine_words, metered_rate, on_demand_rate, span_words
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    InstanceRef,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    as_usd,
)

CONFIRMED_WITHIN: Final = timedelta(minutes=3)
"""The host asks for its next attempt every few seconds, fetches the runner anew and speaks at once."""
LEAST_LEFT: Final = timedelta(seconds=5)
"""A machine is not handed over so shortly before it is ended: the order may be on its way."""


def words_against_reuse(policy: Policy, rules: ProviderPolicy | None, spec: JobSpec) -> str:
    """Why no machine of this provider passes from this job to another, or to it; empty where it may."""
    if policy.reuse_wait <= timedelta(0):
        return "[reuse] wait is not set"
    if not spec.reuse:
        return "its job says reuse = false"
    if spec.resources.nodes > 1:
        return "its job runs on several machines, which begin and end together"
    if rules is None or rules.unusable:
        return "its provider is not in use"
    if rules.is_own:
        return "an own machine is free for any job at once"
    if rules.bills_at_least or rules.bills_by or rules.free_if_taken_within:
        return f"{rules.name} bills by more than time"
    return ""


def waits_until(builder: PlanBuilder, item: Attempt, report: HostStatus) -> datetime | None:
    """Until when the machine of a job that is done now waits for the next one; `None` where it is ended at once."""
    rules = builder.policy.providers.get(item.provider)
    if not report.waits or words_against_reuse(builder.policy, rules, builder.job(item.id.job).spec):
        return None
    if item.ref is None or item.machine is not MachineState.LIVE or item.stop is not None or item.notice_at is not None:
        return None
    if item.over_since is not None or item.bidding.held_since is not None or builder.job(item.id.job).cancel_requested:
        return None
    # Its host counts from its end, and may have been read long after it.
    since = builder.now if report.exit_at is None else min(report.exit_at, builder.now)
    until = since + builder.policy.reuse_wait
    return until if until > builder.now else None


def waits_order(intent_of: Callable[[IntentId], Intent | None], item: Attempt) -> Intent | None:
    """Return the order to end the machine, which is not given yet, where it waits for another job."""
    if item.state is not AttemptState.ENDING or item.end_reason is not EndReason.DONE or item.ref is None:
        return None
    if item.notice_at is not None:
        return None  # its provider takes it: that is what the order waits for
    order = intent_of(terminate_intent_id(item.ref))
    if order is None or order.state is not IntentState.OPEN or order.tries or order.not_before is None:
        return None
    return order if order.attempt == item.id else None


def is_held_back(world: World, intent: Intent, since: datetime, now: datetime) -> bool:
    """Whether the end of a machine waits until it is known that no run of this install handed it over.

    A state that is older than a handover has the machine as that of the job that is done, and owes its end; the job
    that goes on there is known once the store was asked, and has the machine once a list shows that.

    Args:
        since: the begin of this process. As long after it as a lease lasts, no job needs the machine any more.
    """
    item = None if intent.attempt is None else world.attempts.get(intent.attempt)
    if item is None or item.state is not AttemptState.ENDING or world.jobs.get(item.id.job) is None:
        return False
    job = world.jobs[item.id.job]
    if item.quote.offer.nodes > 1 and now < since + lease_and_save(job, world.policy):
        return any(one.state.counts and one.carried_key == item.carried_key for one in world.attempts.values())
    if item.end_reason is not EndReason.DONE:
        return False
    if world.policy.reuse_wait <= timedelta(0) or now >= since + lease_and_save(job, world.policy):
        return False
    return not world.policy.identity_sure or is_claimed(world.attempts.values(), item)


def is_claimed(attempts: Iterable[Attempt], item: Attempt) -> bool:
    """Whether another attempt that has not ended may have this machine."""
    return any(
        one.carried_key == item.carried_key and one.id != item.id and one.state is not AttemptState.ENDED
        for one in attempts
    )


def waiting_machines(builder: PlanBuilder) -> list[Attempt]:
    """Return the attempts that are done and whose machines wait, those that are ended first before the others."""
    found = []
    for item in builder.attempts():
        if item.state is not AttemptState.ENDING:
            continue  # a thousand machines run, and few wait
        order = waits_order(builder.intent, item)
        if order is not None and order.not_before is not None and order.not_before - builder.now >= LEAST_LEFT:
            found.append((order.not_before, item.id.job, item.id.number, item))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:3])]


def waiting_words(world: World, now: datetime) -> Iterator[str]:
    """Yield a sentence for each machine that waits for another job: what it costs, and until when it can be had."""
    for item in world.attempts.values():
        order = waits_order(world.intents.get, item)
        if order is None or order.not_before is None or order.not_before <= now:
            continue
        offer = item.quote.offer
        owner = world.jobs.get(item.id.job)
        yield (
            f"the machine of job {owner.name if owner else item.id.job}, which is done, waits for the next one that "
            f"fits: {machine_words(offer.gpu, offer.gpu_count)} at {offer.provider}, "
            f"${as_usd(item.quote.price.total):.2f}/h, without a start, for {span_words(order.not_before - now)} more"
        )


def words_against_waiting(builder: PlanBuilder, item: Attempt) -> str:
    """Why the machine may not be handed over any more; empty where it may be."""
    rules = builder.policy.providers.get(item.provider)
    job = builder.job(item.id.job)
    if why := words_against_reuse(builder.policy, rules, job.spec):
        return why
    if not job.state.is_final:
        return "its own job goes on"
    if item.machine is not MachineState.LIVE or item.over_since is not None:
        return "a list shows that it is over"
    if rules is not None and rules.is_other_account(item.account):
        return "it belongs to another account"
    if item.meter.rate != metered_rate(item.quote):
        return "it costs something else than was agreed"
    if is_claimed(builder.attempts(), item):
        return "another attempt may have it"  # a run of this install that the state does not know handed it over
    bid = builder.intent(bid_intent_id(item.key))
    if bid is not None and bid.is_open:
        return "a change of its bid has no answer yet"
    return ""


def words_against_job(former: Job, job: Job, policy: Policy, rules: ProviderPolicy | None) -> str:
    """Why this job may not take over a machine of that one, whatever it costs; empty where it may."""
    if why := words_against_reuse(policy, rules, job.spec):
        return why
    if former.id == job.id:
        return "it is the same job"
    if former.submitted_by != job.submitted_by:
        return "jobs that different users queued share no machine"
    return "" if former.spec.image == job.spec.image else "it has another image"


def disk_gb_of(former: Job, quote: Quote) -> int:
    """Return how large the disk of a machine is at the least, by what was asked for, or by what is paid for it."""
    offer, asked = quote.offer, former.spec.resources.disk_gb
    if offer.storage_price <= 0:
        return asked
    paid = quote.price.storage - offer.storage_fixed
    return max(asked, (paid - 1) * HOURS_PER_STORAGE_MONTH // offer.storage_price + 1)


def release(builder: PlanBuilder, item: Attempt, why: str) -> None:
    """End the machine now: it waits no longer."""
    order = waits_order(builder.intent, item)
    if order is None or order.not_before is None or order.not_before <= builder.now:
        return
    builder.put_intent(replace(order, not_before=builder.now))
    builder.event("machine.released", f"its machine waits for no other job any more: {why}", attempt=item.id)


def leave_machine(builder: PlanBuilder, former: AttemptId, why: str) -> None:
    """Record that an attempt has its machine no more, which goes on; its bill is read with that of the last one."""
    item = builder.attempt(former)
    builder.put_attempt(replace(item, bill=replace(item.bill, tries=DONE)))
    builder.machine_gone(former, why)


def take_from_former(builder: PlanBuilder, item: Attempt, ref: InstanceRef) -> None:
    """Leave the machine to this attempt, which has it by a handover that the state does not know."""
    for other in builder.attempts() if item.machine_key is not None else ():
        if other.ref == ref and other.id != item.id and not other.state.counts:
            leave_machine(builder, other.id, "its machine was handed over in a run that this state does not know")


def hand_over(
    builder: PlanBuilder,
    former: Attempt,
    job: Job,
    quote: Quote,
    ceiling: MicroUsdPerGpuHour,
    price_max: MicroUsdPerHour,
) -> Attempt:
    """Return the next attempt of the job, which has the machine from now on; the former one has none any more."""
    number, policy = job.attempts_made + 1, builder.policy
    item = Attempt(
        id=AttemptId(job=job.id, number=number),
        key=attempt_key(policy.install, job.id, number, policy.identity),
        machine_key=former.carried_key,
        former_key=former.key,
        state=AttemptState.STARTING,
        quote=quote,
        ceiling=ceiling,
        price_max=price_max,
        intended_at=builder.now,
        launched_at=builder.now,
        ref=former.ref,
        account=former.account,
        machine=MachineState.LIVE,
        ever_listed=former.ever_listed,
        bidding=replace(former.bidding, before=None, refused=0, woke_at=None),
        full_since=builder.now,
    )
    leave_machine(builder, former.id, f"job {job.name} goes on with its machine")
    meter = Meter(
        rate=metered_rate(quote),
        on_demand_rate=on_demand_rate(quote),
        since=builder.now,
        until=proven_until(item, job, policy, builder.now),
    )
    item = replace(item, meter=meter)
    builder.put_attempt(item)
    builder.wake(builder.now + CONFIRMED_WITHIN)
    return item
