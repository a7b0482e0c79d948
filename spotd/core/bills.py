"""What a provider's rows say of one machine, added up: nothing is taken twice, and what cannot be added is named."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import accumulate, pairwise
from typing import Final

from spotd.core.domain.attempts import Attempt, ReadBill
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import Charge, ChargePart
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.metering import days_between, with_correction, with_estimates, with_paid
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import egress_cost, traffic_cost
from spotd_providers.contract.values import InstanceId, MicroUsd, ProviderCharge, as_usd, cost

CURRENCY: Final = "USD"
TOTAL: Final = "total"
AHEAD_MAX: Final = timedelta(days=32)
"""A row ends with its day or its month, which may not be over; one that ends later proves nothing of a whole bill."""
ROUNDED: Final = timedelta(minutes=1)
"""Spans that overlap by less than this were rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The rows of one machine.

    Attributes:
        since: begin of the first row that costs something.
        until: up to where the machine itself is billed; rows of its disk or its traffic alone may go further.
        gap: the longest time between them that no row covers.
        is_certain: no row was repeated, so that the sum is all that the rows say and not only the least.
        problem: why the rows cannot be added up, in words that follow "the bill"; empty where they can.
        paid: the rows that cost something, by their begin.
    """

    amount: MicroUsd
    since: datetime
    until: datetime
    gap: timedelta = timedelta(0)
    is_certain: bool = True
    problem: str = ""
    paid: tuple[ProviderCharge, ...] = ()


def bill_of(machine: InstanceId, charges: Iterable[ProviderCharge]) -> Bill | None:
    """Add up the rows of this machine; `None` where no row names it."""
    own = [row for row in charges if row.instance_id == machine]
    if not own:
        return None
    rows = sorted(set(own), key=lambda row: (row.start, row.end, row.kind, row.amount))
    paid = [row for row in rows if row.amount > 0]
    return Bill(
        amount=MicroUsd(sum(row.amount for row in rows)),
        since=min(row.start for row in paid or rows),
        until=_machine_until(paid or rows),
        gap=_longest_gap(paid),
        is_certain=len(rows) == len(own),
        problem=_problem(rows, paid),
        paid=tuple(paid),
    )


def _problem(rows: Sequence[ProviderCharge], paid: Sequence[ProviderCharge]) -> str:
    foreign = sorted({row.currency for row in rows} - {CURRENCY})
    if foreign:
        return f"is in {', '.join(foreign)}, and only {CURRENCY} is understood"
    by_kind: defaultdict[str, list[ProviderCharge]] = defaultdict(list)
    for row in paid:
        by_kind[row.kind].append(row)
    for kind, own in by_kind.items():
        if any(before.end - after.start >= ROUNDED for before, after in pairwise(own)):
            return f"has different rows for the same time ({kind})"
    return ""


def _machine_until(rows: Sequence[ProviderCharge]) -> datetime:
    """Return the end of what is billed of the machine itself: in total, or of the kind that costs most."""
    sums: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        sums[row.kind] += row.amount
    main = {TOTAL, max(sums, key=lambda kind: (sums[kind], kind))}
    return max(row.end for row in rows if row.kind in main)


def _longest_gap(rows: Sequence[ProviderCharge]) -> timedelta:
    """Return the longest time between the rows, which are sorted by their begin, that none of them covers."""
    longest, reached = timedelta(0), None
    for row in rows:
        if reached is not None:
            longest = max(longest, row.start - reached)
        reached = row.end if reached is None else max(reached, row.end)
    return longest


# A provider's own bill of a machine that is gone, and what then is booked.
#
# Theory. What spotd charges follows from what it observed. The bill of a provider that can be asked prevails, to the
# micro-dollar: after the end, and only if it says the same twice, since a bill that is still being written shows too
# little. A bill is written by the hour or by the day, late, and sometimes in part, so what it adds up to is at first
# only the least that the machine cost. It raises what is booked at any time; it lowers that only where its rows cover
# the machine from its first work to the last proof of its life, without a gap; a row that ends with an hour ends with
# its hour, day or month, so that it covers nothing later, be it seconds. It is read again for some days, less
# and less often, so that what it says later corrects what it said before. Where its rows cover the machine, each day is
# corrected to what they say of it, since budgets are of days; else what was booked too much is taken back from the last
# days first, as it is the end that was not seen.
#
# Attempts that had one machine after the other have one bill. It is read once all of them have ended, and divided.


_TICK: Final = timedelta(microseconds=1)
_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
READ_AFTER: Final = (
    *(hours * _HOUR for hours in (0, 1, 2, 3, 4, 6, 8, 12)),
    *(days * _DAY for days in (1, 2, 3, 4, 6, 8, 10, 12)),
)
"""When a bill is read, counted from the instant after which it grows no more as its provider states it."""
BILLED_WITHIN: Final = timedelta(days=16)
"""What ended longer ago is left as it was booked."""
APART: Final = _HOUR
"""Two readings are so far apart at the least, or the second proves nothing."""
DONE: Final = -1
CENT: Final = 10_000
"""A smaller correction is not worth a line."""
PLAUSIBLE: Final = 10
"""How many times its agreed price a machine may have cost for its bill to be believed."""
LACKS_MIN: Final = timedelta(minutes=1)
LACKS_MAX: Final = timedelta(minutes=5)
"""What the rows of a bill may lack of a machine's life, a tenth of it within these: clocks differ, signs come late."""
NEXT_ROW_WITHIN: Final = timedelta(days=2)
"""From the end of a day's row until that of the next day is written."""


def is_due(item: Attempt, policy: Policy, now: datetime) -> bool:
    """Whether the provider is to be asked for the bill of this attempt now."""
    rules = policy.providers.get(item.provider)
    if rules is None or item.ref is None or item.machine.may_compute or item.ended_at is None:
        return False
    if item.state is not AttemptState.ENDED or not 0 <= item.bill.tries < len(READ_AFTER):
        return False
    return now >= item.ended_at + rules.bill_open_for + READ_AFTER[item.bill.tries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """An attempt that had the machine of a bill, with its job and all that is booked for that job."""

    job: Job
    item: Attempt
    booked: Sequence[Charge]


def compared(world: World, sharers: Sequence[Sharer], bill: Bill | None, now: datetime) -> Plan:
    """Compare what was booked with what the provider bills, and with what it billed when it was read before.

    Args:
        sharers: those that had the machine one after the other; the last one holds what was read of its bill.
    """
    for one in sharers:
        world = world.with_job(one.job)
    items = [one.item for one in sharers]
    builder = PlanBuilder(replace(world, attempts={**world.attempts, **{item.id: item for item in items}}), now)
    last = items[-1]
    tries = _readings_until(last, world.policy, now + APART)
    is_final = _is_final_at_once(world, last)
    refusal = "" if bill is None else _refusal(items, bill, now, is_final=is_final)
    note, read, believed = refusal, None if bill is None else bill.amount, False
    if bill is None:
        note, read = last.bill.note, last.bill.read
    elif not refusal and (bill.amount == _booked_of_all(items) or is_final or bill.amount == last.bill.read):
        believed = True
        rows = bill.paid if _is_whole(items, bill, now) else ()
        for one, share in zip(sharers, shares(sharers, bill.amount), strict=True):
            _believe(builder, one, share, rows)
        tries = DONE if is_final else tries
    elif refusal and refusal != last.bill.note:
        builder.event("attempt.bill_refused", f"{refusal}: what was booked stays", attempt=last.id)
    for item in items:
        stored = builder.attempt(item.id)
        left = tries if item is last and tries < len(READ_AFTER) else DONE
        known = stored.bill.believed if believed else item.bill.believed
        builder.put_attempt(replace(stored, bill=ReadBill(tries=left, read=read, note=note, believed=known)))
    return builder.plan()


def leave_to_last(world: World, job: Job, item: Attempt, now: datetime) -> Plan:
    """Read the bill no more for an attempt whose machine went on with another one, which reads it for both."""
    builder = PlanBuilder(replace(world.with_job(job), attempts={**world.attempts, item.id: item}), now)
    builder.put_attempt(replace(item, bill=replace(item.bill, tries=DONE)))
    return builder.plan()


def shares(sharers: Sequence[Sharer], billed: MicroUsd) -> list[MicroUsd]:
    """Divide the bill of a machine: each attempt bears its own traffic, and of the rest its part by its metered time.

    Time counts at what it cost, since an hour of a disk alone is not one of a machine. Corrections of former readings
    are not metered, so the same bill is divided in the same way each time. The shares add up to the bill.
    """
    traffic = [min(_time_cost(one, {ChargePart.TRAFFIC}) - _egress(one.item), billed) for one in sharers]
    time = [_time_cost(one, {ChargePart.MACHINE, ChargePart.DISK}) for one in sharers]
    if billed < sum(traffic) or not any(time):
        time, traffic = [sum(parts) for parts in zip(time, traffic, strict=True)], [0] * len(sharers)
    if not any(time):
        time[-1] = 1
    rest, whole = billed - sum(traffic), sum(time)
    # The part up to here less that before it: nothing is lost by rounding, and nothing is given twice.
    upto = [rest * part // whole for part in accumulate(time)]
    return [MicroUsd(own + now - before) for own, now, before in zip(traffic, upto, [0, *upto], strict=False)]


def _time_cost(one: Sharer, parts: Collection[ChargePart]) -> int:
    return sum(charge.amount for charge in one.booked if charge.attempt == one.item.id and charge.part in parts)


def _egress(item: Attempt) -> MicroUsd:
    """Return what the owner of the checkpoint store asks for what was restored, which no provider bills."""
    return egress_cost(item.quote, item.restored_bytes)


def _believe(builder: PlanBuilder, one: Sharer, share: MicroUsd, rows: Sequence[ProviderCharge]) -> None:
    """Charge what the provider bills of an attempt, in place of what was metered."""
    job, item = builder.job(one.job.id), one.item
    is_news = _correct(builder, one, share, rows)
    if item.bill.believed is None and item.meter.settled:
        own = builder.job(job.id)
        builder.put_job(replace(own, totals=with_estimates(own.totals, -1)))
        is_news = is_news or not builder.job(job.id).totals.estimated
    if is_news:
        builder.close_job(job.id)
    stored = builder.attempt(item.id)
    builder.put_attempt(replace(stored, bill=replace(stored.bill, believed=share)))


def _readings_until(item: Attempt, policy: Policy, at: datetime) -> int:
    """Return how many readings are over by this instant, one more than before at the least."""
    rules = policy.providers.get(item.provider)
    closed = (item.ended_at or at) + (rules.bill_open_for if rules is not None else timedelta(0))
    return max(item.bill.tries + 1, sum(closed + after < at for after in READ_AFTER))


def _booked_there(item: Attempt) -> MicroUsd:
    """Return what is booked and the provider bills: all but what the owner of the checkpoint store asks for."""
    return MicroUsd(item.meter.settled - _egress(item))


def _booked_of_all(items: Sequence[Attempt]) -> MicroUsd:
    return MicroUsd(sum(map(_booked_there, items)))


def _is_final_at_once(world: World, item: Attempt) -> bool:
    rules = world.policy.providers.get(item.provider)
    return rules is not None and not rules.bill_open_for


def _refusal(items: Sequence[Attempt], bill: Bill, now: datetime, *, is_final: bool) -> str:
    """Return why the bill is not believed whatever it says when it is read again; empty where it may be.

    A bill that its provider calls final at once is whole by that.
    """
    last = items[-1]
    who = f"{last.provider}'s bill for the machine of attempt {last.id.number}"
    if len(items) > 1:
        who += f", which {len(items)} jobs had,"
    if bill.problem:
        return f"{who} {bill.problem}"
    if bill.until - now > AHEAD_MAX:
        return f"{who} is for a time that is yet to come"
    if bill.amount <= 0:
        return f"{who} adds up to ${as_usd(bill.amount):.4f}, which no machine costs"
    if bill.amount > sum(map(_most, items)):
        return f"{who} is ${as_usd(bill.amount):.4f}, more than {PLAUSIBLE} times what was agreed"
    if not is_final and bill.amount < _booked_of_all(items) and not _is_whole(items, bill, now):
        return f"{who} is lower than what was booked and does not cover all of its time"
    return ""


def _is_whole(items: Sequence[Attempt], bill: Bill, now: datetime) -> bool:
    """Whether the rows cover the machine from its first work to the last proof of its life."""
    last = _last_proof(items)
    first = min(items[0].running_at or last, last)
    lacks = min(LACKS_MAX, max(LACKS_MIN, (last - first) / 10))
    if not bill.is_certain or bill.gap > lacks:
        return False
    is_reached = bill.since <= first + lacks and _reaches_end(items, bill.until, now, lacks)
    return is_reached or _is_whole_by_its_length(items, bill, lacks)


def _reaches_end(items: Sequence[Attempt], until: datetime, now: datetime, lacks: timedelta) -> bool:
    """Whether rows up to this instant reach the machine's end.

    Rows that end with an hour may end with their hour, day or month and not with the machine: what is left of it then
    stands in a row that may not be written yet, be it of seconds.
    """
    last = _last_proof(items)
    if not _is_on_the_hour(until):
        return until >= last - lacks
    over = max(one.ended_at or last for one in items)
    return until >= last and (until >= over or now - until >= NEXT_ROW_WITHIN)


def _is_on_the_hour(at: datetime) -> bool:
    return not (at - _EPOCH) % _HOUR


def _last_proof(items: Sequence[Attempt]) -> datetime:
    """Return the last proof of life of the machine that these attempts had."""
    return max(item.proven_at or item.heartbeat_seen_at or item.ended_at or item.intended_at for item in items)


def _is_whole_by_its_length(items: Sequence[Attempt], bill: Bill, lacks: timedelta) -> bool:
    """Whether its rows lie where the machine never was by our clock, and are as long as its life: a clock is wrong.

    A clock that is set is followed, and every instant of an attempt moves with it, so spans are right on either clock.
    Rows that begin or end with an hour may be those of hours or days, whose length is not that of a machine.
    """
    item, last = items[0], _last_proof(items)
    over = max(last, *(one.ended_at or last for one in items))
    if bill.since >= item.intended_at - lacks and bill.until <= over + lacks:
        return False
    if _is_on_the_hour(bill.since) or _is_on_the_hour(bill.until):
        return False
    begun = min(item.launched_at or item.intended_at, item.intended_at + LACKS_MAX)
    return last - begun - lacks <= bill.until - bill.since <= over - item.intended_at + lacks


def _most(item: Attempt) -> int:
    ended = item.ended_at or item.intended_at
    time = cost(item.quote.price.total, ended + _HOUR - item.intended_at)
    return PLAUSIBLE * (time + traffic_cost(item.quote.offer, item.uploaded_bytes, item.restored_bytes))


def _correct(builder: PlanBuilder, one: Sharer, billed: MicroUsd, rows: Sequence[ProviderCharge]) -> bool:
    """Charge what is missing, and take back what is too much; return whether that is worth a line."""
    job, item = builder.job(one.job.id), one.item
    settled = _booked_there(item)
    missing = billed - settled
    # A correction stands beside a charge of its day; one that was moved over midnight to be apart cannot bear it.
    beside = {
        charge.day: charge
        for charge in sorted(one.booked, key=lambda charge: charge.start)
        if charge.attempt == item.id and charge.start.astimezone(UTC).date() == charge.day
    }
    booked = Counter[date]()
    for charge in one.booked:
        if charge.attempt == item.id and charge.day in beside:
            booked[charge.day] += charge.amount
    more = _moved_by_day(booked, missing, _billed_by_day(one.booked, item, rows))
    for day, amount in more.items():
        builder.add_charge(_again(beside[day], amount))
    if not beside and missing > 0:
        builder.add_charge(_first(item, missing))
        more[item.intended_at.date()] = missing
    missing = sum(more.values())
    billed = MicroUsd(settled + missing)
    corrected = with_correction(item, missing)
    compared = corrected.on_demand_settled - item.on_demand_settled
    builder.put_attempt(corrected)
    builder.put_job(
        replace(
            job,
            spent=MicroUsd(job.spent + missing),
            on_demand=MicroUsd(job.on_demand + compared),
            totals=with_paid(job.totals, item, missing, compared),
        )
    )
    if abs(missing) < CENT:
        return False
    way = "more was booked than that" if missing < 0 else "less was booked than that"
    builder.event(
        "attempt.billed",
        f"{item.provider} bills ${as_usd(billed):.4f} for the machine of attempt {item.id.number}: {way}, "
        f"by ${as_usd(abs(missing)):.4f}, and is corrected",
        attempt=item.id,
        amount_microusd=missing,
    )
    return True


def _billed_by_day(booked: Iterable[Charge], item: Attempt, rows: Iterable[ProviderCharge]) -> Counter[date]:
    """Return in what proportion the rows bill the days of the attempt: each is for the time that it shares with it."""
    own = [charge for charge in booked if charge.attempt == item.id]
    found = Counter[date]()
    for row in rows:
        begin = max(row.start, min((charge.start for charge in own), default=row.start))
        end = min(row.end, max((charge.end for charge in own), default=row.end))
        for start, until in days_between(begin, end):
            found[start.astimezone(UTC).date()] += row.amount * ((until - start) // _TICK) // ((end - begin) // _TICK)
    return found


def _moved_by_day(booked: Mapping[date, int], missing: int, billed: Mapping[date, int]) -> dict[date, int]:
    """Return by how much each day is corrected, so that no day is below zero; all together it is what is missing.

    Args:
        billed: in what proportion the days are billed; empty where that is not known.
    """
    days, total = sorted(booked), sum(booked.values()) + missing
    whole = sum(billed.get(day, 0) for day in days)
    if whole and total >= 0:
        upto = [total * part // whole for part in accumulate(billed.get(day, 0) for day in days)]
        found = {day: now - before - booked[day] for day, now, before in zip(days, upto, [0, *upto], strict=False)}
        return {day: amount for day, amount in found.items() if amount}
    if missing > 0:
        return {days[-1]: missing} if days else {}
    found, left = {}, -missing
    for day in reversed(days):
        if (part := min(left, booked[day])) > 0:
            found[day] = -part
            left -= part
    return found


def _first(item: Attempt, amount: int) -> Charge:
    """Return the whole bill as a charge, for a machine of which nothing was booked."""
    at = item.launched_at or item.intended_at
    return Charge(
        attempt=item.id,
        provider=item.provider,
        day=at.astimezone(UTC).date(),
        start=at,
        end=at,
        amount=MicroUsd(amount),
        on_demand=None if item.quote.on_demand is None else MicroUsd(0),
        part=ChargePart.BILL,
    )


def _again(like: Charge, amount: int) -> Charge:
    """Return a correction beside this charge, which has no length."""
    compared = None if like.on_demand is None else MicroUsd(0)
    return replace(
        like, end=like.start, amount=MicroUsd(amount), on_demand=compared, part=ChargePart.BILL, fee=MicroUsd(0)
    )
