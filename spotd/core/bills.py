"""What a provider's rows say of one machine, added up: nothing is taken twice, and what cannot be added is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import combinations, pairwise
from math import sqrt
from statistics import median
from typing import Final

from spotd.core.domain.attempts import Attempt, ReadBill
from spotd.core.domain.intents import Charge, ChargePart
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.metering import with_correction, with_estimates, with_paid
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import PPM, dollar_words, egress_cost, traffic_cost
from spotd_providers.contract.values import InstanceId, MicroUsd, ProviderCharge, ProviderName, as_usd, cost

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
    """

    amount: MicroUsd
    since: datetime
    until: datetime
    gap: timedelta = timedelta(0)
    is_certain: bool = True
    problem: str = ""


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
# only
# the least that the machine cost. It raises what is booked at any time; it lowers that only where its rows cover the
# machine from its first work to the last proof of its life, without a gap. It is read again for some days, less and
# less
# often, so that what it says later corrects what it said before. What was booked too much is taken back from the last
# days first, as it is the end that was not seen.


_HOUR: Final = timedelta(hours=1)
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
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
    if item.state is not AttemptState.ENDED or not 0 <= item.bill.tries < len(READ_AFTER):
        return False
    return now >= item.ended_at + rules.bill_open_for + READ_AFTER[item.bill.tries]


def compared(world: World, job: Job, item: Attempt, booked: Sequence[Charge], bill: Bill | None, now: datetime) -> Plan:
    """Compare what was booked with what the provider bills, and with what it billed when it was read before."""
    builder = PlanBuilder(replace(world.with_job(job), attempts={**world.attempts, item.id: item}), now)
    tries = _readings_until(item, world.policy, now + APART)
    is_final = _is_final_at_once(world, item)
    refusal = "" if bill is None else _refusal(item, bill, now, is_final=is_final)
    known, note = item.bill.believed, refusal
    if bill is None:
        note = item.bill.note
    elif not refusal and (bill.amount == _booked_there(item) or is_final or bill.amount == item.bill.read):
        is_news = _correct(builder, job, item, booked, bill.amount)
        if item.bill.believed is None and item.meter.settled:
            own = builder.job(job.id)
            builder.put_job(replace(own, totals=with_estimates(own.totals, -1)))
            is_news = is_news or not builder.job(job.id).totals.estimated
        if is_news:
            builder.close_job(job.id)
        known, tries = bill.amount, DONE if is_final else tries
    elif refusal and refusal != item.bill.note:
        builder.event("attempt.bill_refused", f"{refusal}: what was booked stays", attempt=item.id)
    builder.put_attempt(
        replace(
            builder.attempt(item.id),
            bill=ReadBill(
                tries=tries if tries < len(READ_AFTER) else DONE,
                read=item.bill.read if bill is None else bill.amount,
                note=note,
                believed=known,
            ),
        )
    )
    return builder.plan()


def _readings_until(item: Attempt, policy: Policy, at: datetime) -> int:
    """Return how many readings are over by this instant, one more than before at the least."""
    rules = policy.providers.get(item.provider)
    closed = (item.ended_at or at) + (rules.bill_open_for if rules is not None else timedelta(0))
    return max(item.bill.tries + 1, sum(closed + after < at for after in READ_AFTER))


def _booked_there(item: Attempt) -> MicroUsd:
    """Return what is booked and the provider bills: all but what the owner of the checkpoint store asks for."""
    return MicroUsd(item.meter.settled - egress_cost(item.quote, item.restored_bytes))


def _is_final_at_once(world: World, item: Attempt) -> bool:
    rules = world.policy.providers.get(item.provider)
    return rules is not None and not rules.bill_open_for


def _refusal(item: Attempt, bill: Bill, now: datetime, *, is_final: bool) -> str:
    """Return why the bill is not believed whatever it says when it is read again; empty where it may be.

    A bill that its provider calls final at once is whole by that.
    """
    who = f"{item.provider}'s bill for the machine of attempt {item.id.number}"
    if bill.problem:
        return f"{who} {bill.problem}"
    if bill.until - now > AHEAD_MAX:
        return f"{who} is for a time that is yet to come"
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
    if not bill.is_certain or bill.gap > lacks:
        return False
    return (bill.since <= first + lacks and bill.until >= last - lacks) or _is_whole_by_its_length(item, bill, lacks)


def _is_whole_by_its_length(item: Attempt, bill: Bill, lacks: timedelta) -> bool:
    """Whether its rows lie where the machine never was by our clock, and are as long as its life: a clock is wrong.

    A clock that is set is followed, and every instant of an attempt moves with it, so spans are right on either clock.
    Rows that begin and end with an hour may be those of hours or days, whose length is not that of a machine.
    """
    last = item.proven_at or item.heartbeat_seen_at or item.ended_at or item.intended_at
    over = max(item.ended_at or last, last)
    if bill.since >= item.intended_at - lacks and bill.until <= over + lacks:
        return False
    if not (bill.since - _EPOCH) % _HOUR and not (bill.until - _EPOCH) % _HOUR:
        return False
    begun = min(item.launched_at or item.intended_at, item.intended_at + LACKS_MAX)
    return last - begun - lacks <= bill.until - bill.since <= over - item.intended_at + lacks


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


# The fee multiplier that would have made what was booked equal to what a provider billed.
#
# Theory. What is booked of a machine is its bare cost b (GPU and disk) times the multiplier m, and its traffic, which
# bears no fee. The provider's own bill without that traffic is y. Beside the multiplier each start may cost something
# that is not booked, c >= 0: the image of the job, where its download is billed. So y = m b + c is fitted in three
# steps.
#
# 1. A line that one bill in four cannot move: m is the median of the slopes between all pairs of machines, c the median
#    of y - m b (Theil and Sen). Bills that lie eight times as far from it as usual (the scaled median distance) are
#    left out. If that is more than one in four, nothing is said.
# 2. Least squares of the others, weighted by 1 / b, as a small machine differs by less. Its interval is Student's for
#    19 of 20 samples, from the residuals of the machines (a sandwich estimate, each residual divided by what its
#    machine leaves to the others), since large ones differ by more. It must be narrow, with all of them and without the
#    one that bears most: machines that all cost the same cannot show which of both it is, nor can one that stands alone
#    against those. Then no figure is printed at all.
# 3. Where c comes out negative it is 0, and m the quotient of the sums. The interval stays that of the free line.


MACHINES_MIN: Final = 5
"""So many bills are needed before anything is said of a fee."""
BARE_MIN: Final = MicroUsd(1_000_000)
"""And so much money, or the cents of roundings decide."""
SPREAD_MAX_PPM: Final = 50_000
"""Of a multiplier whose interval reaches further than this to either side nothing is said."""
FAR: Final = 8
"""A bill that lies so many times further from the others' line than usual is left out."""
FAR_LEAST_PPM: Final = 10_000
"""One that lies within this share of its amount never is: bills are rounded."""
LEFT_OUT_MAX: Final = 4
"""At most one bill in so many is left out."""
PAIRED_MAX: Final = 300
"""Of more machines than these, every second, third ... by cost bears the line that bills are held against."""
START_MIN: Final = 1_000
"""Less than a tenth of a cent for each start is rounding."""
ALIKE: Final = 1e-6
"""Bare costs that differ by less than a thousandth of themselves are the same."""
LEAST_LEFT: Final = 1e-3
SCALED: Final = 1.4826
"""The deviation of a normal distribution in units of its median distance."""
_LEAST_PPM: Final = 500_000
_MOST_PPM: Final = 4_900_000
"""What the config takes."""
_STEP_PPM: Final = 10_000
"""A suggestion is rounded up to hundredths: a price that is a little too high breaks no ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledMachine:
    """One machine whose bill is known: its bare cost, its traffic, both as booked, and its bill."""

    provider: ProviderName
    bare: MicroUsd
    traffic: MicroUsd
    booked: MicroUsd
    billed: MicroUsd


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the bills of one provider say of its fee.

    Attributes:
        measured_ppm: the multiplier that makes the sums equal; `None` where there is too little to say.
        spread_ppm: how far the true one may be from it.
        suggested_ppm: what to write into the config; `None` where the one in force agrees, or nothing can be said.
    """

    machines: int
    booked: MicroUsd
    billed: MicroUsd
    measured_ppm: int | None = None
    spread_ppm: int | None = None
    suggested_ppm: int | None = None
    sentence: str


def calibration(machines: Sequence[BilledMachine], fee_ppm: int) -> Calibration:
    """Compare the bills of one provider with what was booked, beside the multiplier that is in force now."""
    count, bare = len(machines), sum(one.bare for one in machines)
    booked = MicroUsd(sum(one.booked for one in machines))
    billed = MicroUsd(sum(one.billed for one in machines))
    if count < MACHINES_MIN or bare < BARE_MIN:
        few = f"{count} machine{'' if count == 1 else 's'} with a bill, {dollar_words(MicroUsd(bare))} without fee"
        least = f"{MACHINES_MIN} machines and {dollar_words(BARE_MIN)} are the least"
        return Calibration(machines=count, booked=booked, billed=billed, sentence=f"too little to say: {few}; {least}")
    points = [(float(one.bare), float(one.billed - one.traffic)) for one in machines if one.bare > 0]
    near = _without_outliers(points)
    fit = _fit(near)
    left_out = len(points) - len(near)
    why = _why_undetermined(near, fit, left_out, len(points))
    if fit is None or why:
        words = f"the bills of {count} machines cannot tell a fee from a cost of each start: {why} to suggest anything"
        return Calibration(machines=count, booked=booked, billed=billed, sentence=words)
    measured, spread = _ppm(fit.factor), _ppm(fit.factor_spread) + 1
    low, high = measured - spread, measured + spread
    words = f"the bills of {count} machines make it x{_factor(measured)}, between x{_factor(low)} and x{_factor(high)}"
    if left_out:
        words += f" without {left_out} that {'differs' if left_out == 1 else 'differ'} from all others"
    if fit.start > fit.start_spread and fit.start >= START_MIN:
        words += f", and {dollar_words(MicroUsd(round(fit.start)))} more for each start"
    suggested = None
    rounded = -(-measured // _STEP_PPM) * _STEP_PPM
    if not _LEAST_PPM <= measured <= _MOST_PPM:
        words += ": no fee is like that, so something else differs"
    elif low <= fee_ppm <= high or fee_ppm == rounded:
        words += f"; x{_factor(fee_ppm)} is in force and agrees"
    else:
        suggested = rounded
        words += f"; x{_factor(fee_ppm)} is in force"
    return Calibration(
        machines=count,
        booked=booked,
        billed=billed,
        measured_ppm=measured,
        spread_ppm=spread,
        suggested_ppm=suggested,
        sentence=words,
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """The multiplier, what each start costs beside it in micro-dollars, and how far the true ones may be from both.

    `bears_most` is the index of the machine that the line depends on most.
    """

    factor: float
    factor_spread: float
    start: float
    start_spread: float
    bears_most: int


_Point = tuple[float, float]
"""The bare cost of a machine and its bill without traffic, in micro-dollars."""


def _without_outliers(points: Sequence[_Point]) -> list[_Point]:
    """Return the bills that lie near the line of most; all of them where no two machines differ in cost."""
    ordered = sorted(points)
    bearing = ordered[:: -(-len(ordered) // PAIRED_MAX) or 1]
    slopes = [(y - x) / (b - a) for (a, x), (b, y) in combinations(bearing, 2) if b - a > LEAST_LEFT * a]
    if not slopes:
        return ordered
    factor = median(slopes)
    start = median(y - factor * b for b, y in bearing)
    distances = [abs(y - factor * b - start) / sqrt(b) for b, y in ordered]
    usual = SCALED * median(distances)
    return [
        (b, y)
        for (b, y), distance in zip(ordered, distances, strict=True)
        if distance <= FAR * usual or distance * sqrt(b) <= CENT + abs(y) * FAR_LEAST_PPM / PPM
    ]


def _why_undetermined(near: Sequence[_Point], fit: _Fit | None, left_out: int, count: int) -> str:
    """Return why the bills do not determine both figures, empty where they do: with each of them and without one."""
    if left_out * LEFT_OUT_MAX > count:
        return "too uncertain"
    others = None if fit is None else _fit([point for n, point in enumerate(near) if n != fit.bears_most])
    if fit is None or others is None or len(near) < MACHINES_MIN:
        return "too alike"
    spreads = _ppm(fit.factor_spread), _ppm(others.factor_spread)
    if max(spreads) > SPREAD_MAX_PPM or abs(_ppm(fit.factor - others.factor)) > sum(spreads) + 1:
        return "too uncertain"
    return ""


def _fit(points: Sequence[_Point]) -> _Fit | None:
    """Fit bill = factor x bare + start; `None` where too few machines, or too similar ones, show which is which."""
    count = len(points)
    if count <= 2:
        return None
    bares, inverses = sum(b for b, _ in points), sum(1 / b for b, _ in points)
    room = bares * inverses - count * count
    if room <= ALIKE * count * count:
        return None
    bills, ratios = sum(y for _, y in points), sum(y / b for b, y in points)
    factor, start = (bills * inverses - count * ratios) / room, (bares * ratios - count * bills) / room
    of_factor = of_start = 0.0
    shares: list[float] = []
    for b, y in points:
        to_factor, to_start = (inverses - count / b) / room, (bares / b - count) / room
        shares.append(to_factor * b + to_start)
        error = (y - factor * b - start) / max(LEAST_LEFT, 1 - shares[-1])
        of_factor += (to_factor * error) ** 2
        of_start += (to_start * error) ** 2
    student = _student_thousandths(count - 2) / 1000
    if start < 0:
        factor, start = bills / bares, 0.0
    return _Fit(factor, student * sqrt(of_factor), start, student * sqrt(of_start), shares.index(max(shares)))


def _ppm(value: float) -> int:
    return round(value * PPM)


def _student_thousandths(freedom: int) -> int:
    """Return the 97.5 % point of Student's distribution in thousandths, right to a hundredth from 4 degrees on."""
    return 1960 + 2400 // freedom + 3300 // freedom**2


def _factor(ppm: int) -> str:
    return f"{ppm / PPM:.3f}"
