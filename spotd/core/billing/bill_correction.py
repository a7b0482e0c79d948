"""A provider's own bill of a machine that is gone, and what then is booked.

Theory. What spotd charges follows from what it observed. The bill of a provider that can be asked prevails, to the
micro-dollar: after the end, once its bill is closed, and only if it says the same twice, since a bill that is still
being written shows too little. What was booked too much is taken back from the last days first, as it is the end that
was not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import Charge, ChargePart
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.metering.closing import with_paid
from spotd.core.metering.metering import with_correction
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.effective_price import traffic_cost
from spotd_providers.contract.money import MicroUsd, as_usd, cost

AGAIN_AFTER: Final = timedelta(hours=1)
TRIES_MAX: Final = 4
DONE: Final = -1
CENT: Final = 10_000
"""A smaller correction is not worth a line."""
PLAUSIBLE: Final = 10
"""How many times its agreed price a machine may have cost for its bill to be believed."""


def is_due(item: Attempt, policy: Policy, now: datetime) -> bool:
    """Whether the provider is to be asked for the bill of this attempt now."""
    rules = policy.providers.get(item.provider)
    if rules is None or item.ref is None or item.machine.may_compute or item.ended_at is None:
        return False
    if item.state is not AttemptState.ENDED or not 0 <= item.bill_tries < TRIES_MAX:
        return False
    return now >= item.ended_at + rules.bill_open_for + item.bill_tries * AGAIN_AFTER


def compared(
    world: World,
    job: Job,
    item: Attempt,
    booked: Sequence[Charge],
    billed: MicroUsd | None,
    former: MicroUsd | None,
    now: datetime,
) -> Plan:
    """Compare what was booked with what the provider bills, and with what it billed before."""
    builder = PlanBuilder(replace(world.with_job(job), attempts={**world.attempts, item.id: item}), now)
    tries = item.bill_tries + 1
    if billed is not None and billed == item.meter.settled:
        tries = DONE
    elif billed is not None and (billed == former or _is_final_at_once(world, item)) and billed <= _most(item):
        _correct(builder, job, item, booked, billed)
        tries = DONE
    known = billed if tries == DONE else None
    tries = DONE if tries >= TRIES_MAX else tries
    builder.put_attempt(replace(builder.attempt(item.id), bill_tries=tries, billed=known))
    return builder.plan()


def _is_final_at_once(world: World, item: Attempt) -> bool:
    rules = world.policy.providers.get(item.provider)
    return rules is not None and not rules.bill_open_for


def _most(item: Attempt) -> int:
    ended = item.ended_at or item.intended_at
    time = cost(item.quote.price.total, ended + timedelta(hours=1) - item.intended_at)
    return PLAUSIBLE * (time + traffic_cost(item.quote.offer, item.uploaded_bytes, item.restored_bytes))


def _correct(builder: PlanBuilder, job: Job, item: Attempt, booked: Sequence[Charge], billed: MicroUsd) -> None:
    settled = item.meter.settled
    missing = billed - settled
    # A correction stands beside a charge of its day; one that was moved over midnight to be apart cannot bear it.
    own = sorted(
        (one for one in booked if one.attempt == item.id and one.start.astimezone(UTC).date() == one.day),
        key=lambda charge: charge.start,
    )
    if not own:
        return
    if missing > 0:
        builder.add_charge(_again(own[-1], missing))
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
        return
    way = "more was booked than that" if missing < 0 else "less was booked than that"
    builder.event(
        "attempt.billed",
        f"{item.provider} bills ${as_usd(billed):.4f} for the machine of attempt {item.id.number}: {way}, "
        f"by ${as_usd(abs(missing)):.4f}, and is corrected",
        attempt=item.id,
        amount_microusd=missing,
    )
    builder.close_job(job.id)


def _again(like: Charge, amount: int) -> Charge:
    """Return a correction beside this charge, which has no length."""
    compared = None if like.on_demand is None else MicroUsd(0)
    return replace(
        like, end=like.start, amount=MicroUsd(amount), on_demand=compared, part=ChargePart.BILL, fee=MicroUsd(0)
    )
