"""What machines have cost so far. Segments never cross a UTC midnight, so that a day's spending is a plain sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import (
    NOTHING,
    Charge,
    ChargePart,
    CostSums,
    Intent,
    IntentState,
    Meter,
    sums_of,
    terminate_intent_id,
)
from spotd.core.domain.jobs import HOSTS_MAX, Job, RunTotals, hourly_within
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.states import AttemptState, EndKind, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.pricing import PPM, dollar_words, halted_rate, metered_rate, moved_cost
from spotd_providers.contract.values import Instance, InstanceState, Loss, MicroUsd, MicroUsdPerHour, as_usd, cost

_TICK: Final = timedelta(microseconds=1)
STOPPED: Final = frozenset({InstanceState.PAUSED, InstanceState.ENDING, InstanceState.GONE})


def metered_until(meter: Meter, now: datetime) -> datetime:
    """Return the instant up to which the meter may charge: now, or where the last proof of the machine ends."""
    return now if meter.until is None else min(now, meter.until)


def running_time(meter: Meter, now: datetime) -> timedelta:
    """Machine time on the meter that is not settled yet."""
    if meter.since is None:
        return timedelta(0)
    return max(timedelta(0), metered_until(meter, now) - meter.since)


def accrued(meter: Meter, now: datetime, since: datetime | None = None) -> MicroUsd:
    """Return what runs on the meter and is not settled yet, optionally only the time after `since`."""
    if meter.since is None:
        return meter.traffic
    start = meter.since if since is None else max(meter.since, since)
    return MicroUsd(cost(meter.rate, metered_until(meter, now) - start) + meter.traffic)


def spent(attempt: Attempt, now: datetime) -> MicroUsd:
    """Return what this attempt has cost up to now."""
    return MicroUsd(attempt.meter.settled + accrued(attempt.meter, now))


def stray_cost(intent: Intent, until: datetime, start: datetime | None = None) -> MicroUsd:
    """Return what a machine without an attempt has cost up to this instant, its fee, disk and traffic left out.

    Args:
        start: what it has cost before that is left out.
    """
    if intent.stray_since is None:
        return MicroUsd(0)
    return cost(intent.stray_rate, max(timedelta(0), until - max(intent.stray_since, start or intent.stray_since)))


def with_listed_price(stray: Intent, row: Instance, at: datetime) -> Intent:
    """Return the order to end a machine without an attempt with its price, as the list of this instant states it.

    A price that rises may be a wrong row: it is believed from a second list on. One that halts costs less, and ran.
    """
    rate, first, price = stray.stray_rate, stray.stray_rose_at, MicroUsdPerHour(hourly_within(row.price or 0))
    if price > rate > 0 and (first is None or at <= first):
        first = first or at
    elif price > rate or (price and row.state not in STOPPED):
        rate, first = price, None
    return replace(stray, stray_rate=rate, stray_rose_at=first)


def on_demand_spent(attempt: Attempt, now: datetime) -> MicroUsd:
    """Return what its time would have cost on-demand; its own cost where that price is unknown."""
    return MicroUsd(attempt.on_demand_settled + on_demand_accrued(attempt.meter, now))


def on_demand_accrued(meter: Meter, now: datetime) -> MicroUsd:
    """Return the same for what is not settled yet. Its traffic would have cost as much."""
    rate = meter.rate if meter.on_demand_rate is None else meter.on_demand_rate
    return MicroUsd(cost(rate, running_time(meter, now)) + meter.traffic)


def job_spent(world: World, job: Job, now: datetime) -> MicroUsd:
    """Return what the job has cost up to now, over all attempts."""
    return MicroUsd(job.spent + sum(spent(a, now) for a in world.attempts_of(job.id)))


def day_start(day: date) -> datetime:
    return datetime.combine(day, time(), tzinfo=UTC)


def spent_on_day(world: World, now: datetime) -> MicroUsd:
    """Return what all jobs have cost since the last UTC midnight."""
    today = now.astimezone(UTC).date()
    running = sum(accrued(a.meter, now, day_start(today)) for a in world.attempts.values())
    return MicroUsd(world.spent_by_day.get(today, 0) + running)


def spent_in_month(world: World, now: datetime) -> MicroUsd:
    """Return what all jobs have cost since the first of the UTC month."""
    first = now.astimezone(UTC).date().replace(day=1)
    settled = sum(amount for day, amount in world.spent_by_day.items() if day >= first)
    running = sum(accrued(a.meter, now, day_start(first)) for a in world.attempts.values())
    return MicroUsd(settled + running)


def days_between(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    while start < end:
        midnight = day_start(start.astimezone(UTC).date() + timedelta(days=1))
        yield start, min(end, midnight)
        start = midnight


def booked_back(attempt: Attempt, amount: MicroUsd, now: datetime) -> tuple[Charge, ...]:
    """So much of what is booked up to `now` is taken back, from each day what was booked on it.

    Of the time up to midnight all was booked, of that after it what the machine was seen to run, which may be less.
    """
    began = attempt.meter.since or attempt.launched_at or now
    midnight = day_start(now.astimezone(UTC).date())
    rate = MicroUsdPerHour(max(0, metered_rate(attempt.quote) - halted_rate(attempt.quote)))
    former = min(amount, cost(rate, max(timedelta(0), midnight - began)))
    parts = [(midnight - _TICK, former), (now, amount - former)]
    credit = ChargePart.CREDIT
    return tuple(_charge(attempt, credit, at, at, MicroUsd(-part), NOTHING) for at, part in parts if part > 0)


def with_correction(attempt: Attempt, amount: int) -> Attempt:
    """Return the attempt with so much more settled. On-demand would have cost what it did, where that is known."""
    compared = amount if attempt.quote.on_demand is None else 0
    return replace(
        attempt,
        meter=replace(attempt.meter, settled=MicroUsd(attempt.meter.settled + amount)),
        on_demand_settled=MicroUsd(attempt.on_demand_settled + compared),
    )


def settled(
    attempt: Attempt, now: datetime, rate: MicroUsdPerHour, on_demand_rate: MicroUsdPerHour | None
) -> tuple[Attempt, tuple[Charge, ...]]:
    """Charge everything up to now and run on at the new rates; a rate of 0 stops the meter.

    A meter that begins after now, since the clock was set back, charges no time and begins now. Where nothing proves
    the machine up to now, it runs on from the end of the proof, so that a later one finds the time between.
    """
    meter = attempt.meter
    spans = () if meter.since is None else tuple(days_between(meter.since, metered_until(meter, now)))
    charges: list[Charge] = []
    part = ChargePart.DISK if meter.rate <= halted_rate(attempt.quote) else ChargePart.MACHINE
    on_demand_now = meter.rate if meter.on_demand_rate is None else meter.on_demand_rate
    for start, end in spans:
        amount, on_demand = cost(meter.rate, end - start), cost(on_demand_now, end - start)
        charges.append(_charge(attempt, part, start, end, amount, on_demand))
    if meter.traffic:  # on-demand it would have cost the same
        charges.append(_charge(attempt, ChargePart.TRAFFIC, now, now, meter.traffic, meter.traffic))
    total = MicroUsd(meter.settled + sum(c.amount for c in charges))
    compared = attempt.on_demand_settled + sum(c.amount if c.on_demand is None else c.on_demand for c in charges)
    fresh = Meter(
        settled=total,
        rate=rate,
        on_demand_rate=on_demand_rate,
        since=metered_until(meter, now) if rate > 0 else None,
        until=meter.until if rate > 0 else None,
    )
    return replace(attempt, meter=fresh, on_demand_settled=MicroUsd(compared)), tuple(charges)


def with_least_time(
    before: Attempt, after: Attempt, policy: Policy, now: datetime
) -> tuple[Attempt, tuple[Charge, ...]]:
    """Note since when the machine bills in full; where that ends, charge what its provider bills beyond its time."""
    full = halted_rate(before.quote)
    at = metered_until(before.meter, now)
    if after.meter.rate > full:
        began = before.full_since if before.meter.rate > full and before.meter.since is not None else None
        return replace(after, full_since=began or after.meter.since), ()
    meter, began, rules = before.meter, before.full_since, policy.providers.get(before.provider)
    if began is None or meter.since is None or meter.rate <= full:
        return replace(after, full_since=None), ()
    span = max(timedelta(0), at - began)
    beyond = timedelta(0) if rules is None else rules.billed_time(span) - span
    on_demand_rate = meter.rate if meter.on_demand_rate is None else meter.on_demand_rate
    amount = cost(MicroUsdPerHour(meter.rate - full), beyond)
    compared = cost(MicroUsdPerHour(max(0, on_demand_rate - full)), beyond)
    if not amount:
        return replace(after, full_since=None), ()
    charge = _charge(before, ChargePart.MACHINE, at, at, amount, compared)
    settled_sum = MicroUsd(after.meter.settled + amount)
    compared_sum = MicroUsd(after.on_demand_settled + (amount if charge.on_demand is None else charge.on_demand))
    meter = replace(after.meter, settled=settled_sum)
    return replace(after, meter=meter, on_demand_settled=compared_sum, full_since=None), (charge,)


def unsettled_sums(attempt: Attempt, now: datetime, state: JobState | None = None) -> Mapping[date, CostSums]:
    """Return what would be charged if the meter stopped now, by day, compared as suits a job in this state."""
    found: defaultdict[date, CostSums] = defaultdict(CostSums)
    for charge in settled(attempt, now, MicroUsdPerHour(0), None)[1]:
        is_failed = state is JobState.FAILED
        found[charge.day] += sums_of(replace(charge, on_demand=None) if is_failed else charge)
    return found


def _charge(
    attempt: Attempt, part: ChargePart, start: datetime, end: datetime, amount: MicroUsd, on_demand: MicroUsd
) -> Charge:
    fee_ppm = max(1, attempt.quote.price.fee_ppm)
    is_time = part in {ChargePart.MACHINE, ChargePart.DISK}
    return Charge(
        attempt=attempt.id,
        provider=attempt.provider,
        day=start.astimezone(UTC).date(),
        start=start,
        end=end,
        amount=amount,
        on_demand=None if attempt.quote.on_demand is None else on_demand,
        part=part,
        fee=MicroUsd(amount - amount * PPM // fee_ppm) if is_time else NOTHING,
    )


# How long a machine may live, and bill, after the newest proof that it exists.


UNSEEN_MAX: Final = timedelta(hours=24)
"""Beyond its lease, a machine whose end cannot be confirmed holds its slot and its money for so long."""
FORGOTTEN_MAX: Final = timedelta(days=7)
"""The same once its end was accepted, where its provider left the config and nothing says whether it ends itself."""
FIRST_LIST_WITHIN: Final = timedelta(seconds=30)
"""For so long after its provider can be reached, the end of a machine that nothing proves waits for a list.

A process that is started again and again waits each time, but none does a day after the machine was proved.
"""


def lease_and_save(job: Job, policy: Policy) -> timedelta:
    """How long a machine that has no contact to the daemon may work and save."""
    return policy.lease + job.spec.checkpoint.stop_grace + policy.save_allowance


def is_ended_by_order_alone(item: Attempt, policy: Policy) -> bool:
    """Whether a provider that is in the config sells this machine as one that may run until it is ordered to end."""
    rules = policy.providers.get(item.provider)
    return rules is not None and not (rules.ends_itself and item.quote.offer.ends_itself)


def outlives(item: Attempt, job: Job, policy: Policy) -> timedelta | None:
    """How long the machine may live after its last proof; `None` where nothing ends it but an order.

    Of a provider that is not in the config any more only a limit of its meter shows that it ends itself. A meter that
    was stopped has none, so such a machine counts until its end is known.
    """
    rules = policy.providers.get(item.provider)
    if is_ended_by_order_alone(item, policy) or (rules is None and item.ref is not None and item.meter.until is None):
        return None
    starting = timedelta(0)
    if item.heartbeat_seen_at is None and rules is not None:
        starting = rules.provision_timeout
    return lease_and_save(job, policy) + starting


def proven_until(item: Attempt, job: Job, policy: Policy, at: datetime) -> datetime | None:
    """Up to when the machine is booked if nothing shows it after this instant."""
    span = outlives(item, job, policy)
    return None if span is None else at + span


def needs_list(world: World, intent: Intent, since: datetime, now: datetime) -> bool:
    """Whether the end of a machine waits for a list, without which it is not known for how long it was paid.

    Once it is ended no list shows that it outlived its lease. So where nothing proves it any longer, as after hours in
    which its provider was not in the config, the first list goes first, if it comes soon.

    Args:
        since: from when on this process has reached the provider.
    """
    item = None if intent.attempt is None else world.attempts.get(intent.attempt)
    until = None if item is None else item.meter.until
    if item is None or until is None or until > now or (item.missing_since is not None and item.missing_since > until):
        return False
    return now - until < UNSEEN_MAX and timedelta(0) <= now - since < FIRST_LIST_WITHIN


def is_past_lease(item: Attempt, policy: Policy, now: datetime) -> bool:
    """Whether the machine of an attempt that is over was unseen for so long that it is not counted on any more.

    A lease that has run out ends the host's work, and mostly its machine; the day beyond it is for the others. For one
    that nothing ever showed, a lease was waited for before it was given up, so that its job can go on elsewhere. One
    that is paused has no lease and does no work. One that nothing but an order ends is counted until its end is proved.
    """
    if item.state is not AttemptState.ENDING or is_ended_by_order_alone(item, policy):
        return False
    if item.ref is None and item.end_reason is EndReason.LAUNCH_UNKNOWN:
        return True
    last = item.meter.until
    if last is None and item.meter.rate <= halted_rate(item.quote):
        last = item.ended_at
    return last is not None and now > last + UNSEEN_MAX


def with_limit(item: Attempt, job: Job, policy: Policy) -> Attempt:
    """Return the attempt with a limit to its meter, from what is on record where the meter does not hold one.

    A machine that bills in full was running when its meter began.
    """
    meter = item.meter
    if meter.until is not None or meter.since is None or meter.rate <= halted_rate(item.quote):
        return item
    known = [at for at in (meter.since, item.launched_at, item.heartbeat_seen_at, item.listed_at) if at is not None]
    return replace(item, meter=replace(meter, until=proven_until(item, job, policy, max(known))))


# The one line that sums a finished job up: how long it ran, where, and what it cost against on-demand.


_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)
_SECOND: Final = timedelta(seconds=1)


def with_run(totals: RunTotals, item: Attempt, reason: EndReason, now: datetime) -> RunTotals:
    """Return the totals with an attempt that ends now for this reason. What nothing proves of its time is left out."""
    ran, hosts = totals.ran, totals.hosts
    if item.running_at is not None:
        ran += item.command_time(metered_until(item.meter, now))
        host = _host_name(item)
        if host not in hosts and len(hosts) < HOSTS_MAX:
            hosts = (*hosts, host)
    taken = reason.traits.kind is EndKind.TAKEN and item.launched_at is not None
    return replace(totals, ran=ran, hosts=hosts, preemptions=totals.preemptions + (1 if taken else 0))


def with_paid(totals: RunTotals, item: Attempt, paid: int, compared: int) -> RunTotals:
    """Return the totals with what more was paid for an attempt, which may be negative, and what it is compared with."""
    if item.quote.on_demand is None:
        return replace(totals, uncompared=MicroUsd(totals.uncompared + paid))
    if not item.quote.is_own:
        return totals
    return replace(totals, own_saved=MicroUsd((totals.own_saved or 0) + compared - paid))


def with_estimates(totals: RunTotals, more: int) -> RunTotals:
    """Return the totals with so many more attempts whose cost is an estimate, or fewer."""
    return replace(totals, estimated=max(0, totals.estimated + more))


def is_estimate(item: Attempt, spent: MicroUsd) -> bool:
    """Whether so much for this attempt follows from what was observed: its provider's own bill is not known."""
    return item.bill.believed is None and spent != 0


def compared_cost(state: JobState, spent: MicroUsd, on_demand: MicroUsd) -> MicroUsd:
    """Return what the sum of a job is compared with: itself where it failed, since a failure is worth nothing."""
    return spent if state is JobState.FAILED else on_demand


def _host_name(item: Attempt) -> str:
    """Return what names the host; a machine of a provider that shows no hosts is one of its own."""
    machine = item.ref.instance_id if item.ref is not None else str(item.id.number)
    return f"{item.provider}/{item.quote.offer.host_id or machine}"


def closing_words(totals: RunTotals, spent: MicroUsd, on_demand: MicroUsd, recoveries: int, lost: timedelta) -> str:
    """Return `ran 31.4 h on 4 hosts, $41.20 instead of $118.60 on demand: saved 65 %, 3 preemptions, ...`.

    Empty where nothing ran and nothing was spent. Money without a known on-demand price is compared with nothing.
    """
    if not totals.hosts and not spent:
        return ""
    parts = [_ran_words(totals), _money_words(spent, on_demand, totals)]
    if recoveries:
        parts.append(_count(recoveries, "preemption"))
    if lost > timedelta(0):
        parts.append(f"{_span(lost)} repeated")
    return ", ".join(parts)


def _ran_words(totals: RunTotals) -> str:
    number = len(totals.hosts)
    if not number:
        return "its command never ran"
    hosts = f"{number} or more hosts" if number >= HOSTS_MAX else _count(number, "host")
    return f"ran {_span(totals.ran)} on {hosts}" if totals.ran else f"ran on {hosts}"


_FEW_CENTS: Final = 100_000


def _money_words(spent: MicroUsd, on_demand: MicroUsd, totals: RunTotals) -> str:
    """Return what was spent; compared with on-demand as far as that price was known at each launch."""
    uncompared = totals.uncompared
    paid, other = spent - uncompared, on_demand - uncompared
    # Two sums of a few cents would read as equal in cents, beside a share that was saved.
    text = _finer_words if max(paid, other) < _FEW_CENTS <= 10 * min(paid, other) else dollar_words
    words = text(spent) + (" (estimated)" if totals.estimated and spent else "")
    if other <= 0:
        return words
    if uncompared:
        words += f", {text(MicroUsd(paid))} of it"
    if paid == other:
        return f"{words} as on demand" if totals.own_saved is None else f"{words} as rented"
    # The machines of an on-demand market would have started and repeated less: these are the hours that were paid for.
    percent = (100 * abs(other - paid) + other // 2) // other
    saved = f"saved {percent} %" if other > paid else f"{percent} % more"
    how = "on demand" if totals.own_saved is None else "on demand, own machines as rented,"
    return f"{words} instead of {text(MicroUsd(other))} {how} for the same machine hours: {saved}"


def _finer_words(amount: MicroUsd) -> str:
    return f"${as_usd(amount):.3f}"


def _span(span: timedelta) -> str:
    """Return `31.4 h`, `14 min` or `40 s` of a span that is not nothing, and is never shown as that."""
    if span >= 2 * _HOUR:
        return f"{span / _HOUR:.1f} h"
    if span >= 2 * _MINUTE:
        return f"{round(span / _MINUTE)} min"
    if span < _SECOND:
        return "less than 1 s"
    return f"{round(span.total_seconds())} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Machines that a provider has announced to take, and that are cheaper left to it than ended by us.
#
# Theory. EC2 charges nothing for a machine that it interrupts in its first hour, and every second of one that we end
# ourselves, be it a moment earlier. So once the runner has reported its own end, which means that everything is saved
# and nothing of ours computes any more, or once EC2 shows that it ends the machine, the order to end it waits until
# the announced instant has passed. The next machine of the job does not wait: this is the one overlap of two machines
# that spotd means to have. The order is durable from the beginning, and given after all if the machine is not taken.
#
# Until a machine is taken it is not known to be free, so it is booked like any other, budgets and all. Once the
# provider says that it took it, what it did not bill is booked back, on the days on which it was booked.


TAKING: Final = timedelta(seconds=30)
"""Between the announced instant and a listing that shows the machine as ending."""
_TAKEN: Final = frozenset({Loss.PREEMPTED, Loss.OUTBID})
LEFT_MAX: Final = timedelta(minutes=3)
"""No notice is longer. Part of what is known of one was written by the host, whose word must not keep it alive."""


UNSEEN_NOTICE: Final = timedelta(minutes=2)
"""How long before it takes a machine EC2 announces that."""


def noticed_at(item: Attempt) -> datetime | None:
    """When the provider takes the machine, as it announced.

    One that was preempted had a notice, be it that none was seen: the runner saved and ended within a second of it, or
    a list showed the machine as ending first.
    """
    if item.notice_at is not None:
        return item.notice_at
    if item.end_reason is EndReason.PREEMPTED and item.ended_at is not None:
        return item.ended_at + UNSEEN_NOTICE
    return None


def _computes_no_more(item: Attempt) -> bool:
    return item.phase == "done" or item.machine is MachineState.HALTED


def taken_by_provider_until(item: Attempt, policy: Policy, now: datetime) -> datetime | None:
    """When the machine's end is owed although the provider takes it; `None` for at once.

    Of several as one an announcement may be for one of them alone: the others would bill, and nothing takes them.
    """
    rules = policy.providers.get(item.provider)
    taken_at = noticed_at(item)
    if rules is None or taken_at is None or item.launched_at is None or not _computes_no_more(item):
        return None
    if _nodes_of(item) > 1:
        return None
    due = taken_at + TAKING
    return due if _is_free(item.launched_at, taken_at, rules) and now < due <= now + LEFT_MAX else None


def _is_free(launched_at: datetime, taken_at: datetime, rules: ProviderPolicy) -> bool:
    """Whether the provider bills no time of a machine that it took back then.

    By the clock of a provider, or where the answer to the launch is late, a machine can end before it was launched.
    """
    free = rules.free_if_taken_within
    return bool(free) and taken_at - launched_at < free


def free_of(item: Attempt, mine: Instance, policy: Policy, now: datetime) -> MicroUsd:
    """Return what is booked for this machine and not billed, because its provider took it soon enough; mostly nothing.

    The disk and the traffic cost all the same. What was taken back once is not found again, since what then is booked
    is no more than they cost.
    """
    rules = policy.providers.get(item.provider)
    if rules is None or item.launched_at is None or mine.loss not in _TAKEN:
        return MicroUsd(0)
    ended_at = min(now, mine.ended_at or now)
    taken_at = ended_at  # or when it was announced, where its end is seen late
    if mine.ended_at is None and item.notice_at is not None:
        taken_at = min(now, max(item.notice_at + TAKING, item.heartbeat_seen_at or item.launched_at))
    if not _is_free(item.launched_at, taken_at, rules):
        return MicroUsd(0)
    owed = cost(halted_rate(item.quote), ended_at - item.intended_at)
    moved = moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes)
    return MicroUsd(max(0, item.meter.settled - owed - moved))


def machines_in_use(world: World, now: datetime) -> int:
    """How many count against the limit on machines.

    One that only waits to be taken does nothing and costs nothing; one that outlived its lease unseen has ended itself.
    """
    return machines_of(
        item
        for item in world.attempts.values()
        if item.state.counts
        or (
            item.machine.may_compute
            and not is_left_to_provider(item, world)
            and not is_past_lease(item, world.policy, now)
        )
    )


def machines_of(items: Iterable[Attempt]) -> int:
    """Return how many machines these attempts have, or are to have."""
    return sum(map(_nodes_of, items))


def _nodes_of(item: Attempt) -> int:
    try:
        return int(item.quote.offer.nodes)
    except Exception:  # noqa: BLE001 - its values are what is at fault, and it counts all the same
        return 1


def is_left_to_provider(item: Attempt, world: World) -> bool:
    """Whether the machine only waits to be taken: its runner has ended, and no order to end it was tried yet."""
    taken_at = noticed_at(item)
    if item.state is not AttemptState.ENDING or item.ref is None or taken_at is None or not _computes_no_more(item):
        return False
    intent = world.intents.get(terminate_intent_id(item.ref))
    return (
        intent is not None
        and intent.state is IntentState.OPEN
        and intent.tries == 0
        and intent.not_before == taken_at + TAKING
    )
