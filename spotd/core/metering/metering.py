"""What machines have cost so far. Segments never cross a UTC midnight, so that a day's spending is a plain sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import NOTHING, Charge, ChargePart, CostSums, Meter, sums_of
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.pricing.effective_price import PPM, halted_rate
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, cost

_TICK: Final = timedelta(microseconds=1)


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


def _days(start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    while start < end:
        midnight = day_start(start.astimezone(UTC).date() + timedelta(days=1))
        yield start, min(end, midnight)
        start = midnight


def booked_back(attempt: Attempt, amount: MicroUsd, now: datetime) -> tuple[Charge, ...]:
    """So much of what is booked is taken back, from each day what was booked on it."""
    began = attempt.meter.since or attempt.launched_at or now
    midnight = day_start(now.astimezone(UTC).date())
    former = 0
    if began < midnight:
        former = amount * ((midnight - began) // _TICK) // max(1, (now - began) // _TICK)
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
    spans = () if meter.since is None else tuple(_days(meter.since, metered_until(meter, now)))
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


def unsettled_sums(attempt: Attempt, now: datetime) -> Mapping[date, CostSums]:
    """Return what would be charged if the meter stopped now, by day."""
    found: defaultdict[date, CostSums] = defaultdict(CostSums)
    for charge in settled(attempt, now, MicroUsdPerHour(0), None)[1]:
        found[charge.day] += sums_of(charge)
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
