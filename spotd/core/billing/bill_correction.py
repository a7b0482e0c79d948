"""A provider's own bill of a machine that is gone, and what then is booked.

Theory. What spotd charges follows from what it observed. The bill of a provider that can be asked prevails, to the
micro-dollar: after the end, and only if it says the same twice, since a bill that is still being written shows too
little. A bill is written by the hour or by the day, late, and sometimes in part, so what it adds up to is at first only
the least that the machine cost. It raises what is booked at any time; it lowers that only where its rows cover the
machine from its first work to the last proof of its life, without a gap. It is read again for some days, less and less
often, so that what it says later corrects what it said before. What was booked too much is taken back from the last
days first, as it is the end that was not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.billing.bill import Bill
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import Charge, ChargePart
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.metering.closing import with_estimates, with_paid
from spotd.core.metering.metering import with_correction
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.effective_price import egress_cost, traffic_cost
from spotd_providers.contract.money import MicroUsd, as_usd, cost

_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
READ_AFTER: Final = (
    *(hours * _HOUR for hours in (0, 1, 2, 3, 4, 6, 8, 12)),
    *(days * _DAY for days in (1, 2, 3, 4, 6, 8, 10, 12)),
)
"""When a bill is read, counted from the instant after which it grows no more as its provider states it."""
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


def is_due(item: Attempt, policy: Policy, now: datetime) -> bool:
    """Whether the provider is to be asked for the bill of this attempt now."""
    rules = policy.providers.get(item.provider)
    if rules is None or item.ref is None or item.machine.may_compute or item.ended_at is None:
        return False
    if item.state is not AttemptState.ENDED or not 0 <= item.bill_tries < len(READ_AFTER):
        return False
    return now >= item.ended_at + rules.bill_open_for + READ_AFTER[item.bill_tries]


def compared(world: World, job: Job, item: Attempt, booked: Sequence[Charge], bill: Bill | None, now: datetime) -> Plan:
    """Compare what was booked with what the provider bills, and with what it billed when it was read before."""
    builder = PlanBuilder(replace(world.with_job(job), attempts={**world.attempts, item.id: item}), now)
    tries = _readings_until(item, world.policy, now + APART)
    is_final = _is_final_at_once(world, item)
    refusal = "" if bill is None else _refusal(item, bill, is_final=is_final)
    known, note = item.billed, refusal
    if bill is None:
        note = item.bill_note
    elif not refusal and (bill.amount == _booked_there(item) or is_final or bill.amount == item.bill_read):
        is_news = _correct(builder, job, item, booked, bill.amount)
        if item.billed is None and item.meter.settled:
            own = builder.job(job.id)
            builder.put_job(replace(own, totals=with_estimates(own.totals, -1)))
            is_news = is_news or not builder.job(job.id).totals.estimated
        if is_news:
            builder.close_job(job.id)
        known, tries = bill.amount, DONE if is_final else tries
    elif refusal and refusal != item.bill_note:
        builder.event("attempt.bill_refused", f"{refusal}: what was booked stays", attempt=item.id)
    builder.put_attempt(
        replace(
            builder.attempt(item.id),
            bill_tries=tries if tries < len(READ_AFTER) else DONE,
            bill_read=item.bill_read if bill is None else bill.amount,
            bill_note=note,
            billed=known,
        )
    )
    return builder.plan()


def _readings_until(item: Attempt, policy: Policy, at: datetime) -> int:
    """Return how many readings are over by this instant, one more than before at the least."""
    rules = policy.providers.get(item.provider)
    closed = (item.ended_at or at) + (rules.bill_open_for if rules is not None else timedelta(0))
    return max(item.bill_tries + 1, sum(closed + after < at for after in READ_AFTER))


def _booked_there(item: Attempt) -> MicroUsd:
    """Return what is booked and the provider bills: all but what the owner of the checkpoint store asks for."""
    return MicroUsd(item.meter.settled - egress_cost(item.quote, item.restored_bytes))


def _is_final_at_once(world: World, item: Attempt) -> bool:
    rules = world.policy.providers.get(item.provider)
    return rules is not None and not rules.bill_open_for


def _refusal(item: Attempt, bill: Bill, *, is_final: bool) -> str:
    """Return why the bill is not believed whatever it says when it is read again; empty where it may be.

    A bill that its provider calls final at once is whole by that.
    """
    who = f"{item.provider}'s bill for the machine of attempt {item.id.number}"
    if bill.problem:
        return f"{who} {bill.problem}"
    if bill.amount <= 0:
        return f"{who} adds up to ${as_usd(bill.amount):.4f}, which no machine costs"
    if bill.amount > _most(item):
        return f"{who} is ${as_usd(bill.amount):.4f}, more than {PLAUSIBLE} times what was agreed"
    if not is_final and bill.amount < _booked_there(item) and not _is_whole(item, bill):
        return f"{who} is lower than what was booked and does not cover all of its time"
    return ""


def _is_whole(item: Attempt, bill: Bill) -> bool:
    """Whether the rows cover the machine from its first work to the last proof of its life."""
    last = item.proven_at or item.heartbeat_seen_at or item.ended_at or item.intended_at
    first = min(item.running_at or last, last)
    lacks = min(LACKS_MAX, max(LACKS_MIN, (last - first) / 10))
    return bill.is_certain and bill.since <= first + lacks and bill.until >= last - lacks and bill.gap <= lacks


def _most(item: Attempt) -> int:
    ended = item.ended_at or item.intended_at
    time = cost(item.quote.price.total, ended + _HOUR - item.intended_at)
    return PLAUSIBLE * (time + traffic_cost(item.quote.offer, item.uploaded_bytes, item.restored_bytes))


def _correct(builder: PlanBuilder, job: Job, item: Attempt, booked: Sequence[Charge], billed: MicroUsd) -> bool:
    """Charge what is missing, and take back what is too much; return whether that is worth a line."""
    settled = _booked_there(item)
    missing = billed - settled
    # A correction stands beside a charge of its day; one that was moved over midnight to be apart cannot bear it.
    own = sorted(
        (one for one in booked if one.attempt == item.id and one.start.astimezone(UTC).date() == one.day),
        key=lambda charge: charge.start,
    )
    if missing > 0:
        builder.add_charge(_again(own[-1], missing) if own else _first(item, missing))
    left = -missing
    for day in sorted({charge.day for charge in own}, reverse=True):
        on_day = [charge for charge in own if charge.day == day]
        part = min(left, sum(charge.amount for charge in on_day))
        if part > 0:
            builder.add_charge(_again(on_day[-1], -part))
            left -= part
    missing += max(0, left)
    billed = MicroUsd(settled + missing)
    corrected = with_correction(item, missing)
    builder.put_attempt(corrected)
    builder.put_job(
        replace(
            job,
            spent=MicroUsd(job.spent + missing),
            on_demand=MicroUsd(job.on_demand + corrected.on_demand_settled - item.on_demand_settled),
            totals=with_paid(job.totals, item, missing),
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
