"""What must hold of money in every world, judged by what the simulated clouds billed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from itertools import pairwise

from spotd.core.billing import GAP
from spotd.core.canary import CANARY
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import JobState
from spotd.core.pricing import DWELL_MAX
from spotd_providers.contract.values import AttemptKey, InstanceState, MicroUsdPerHour, cost, shares
from tests.sim.cloud import Cloud
from tests.sim.hazards import Hazard
from tests.sim.machines import DISK_GB, GB, OWED_UNIT, Machine, gpus_of, nodes_of
from tests.sim.run import Result

UNIT = timedelta(minutes=1)
"""What a marketplace bills at least for; the books may be off by so much for each attempt."""
HOUR = timedelta(hours=1)
OLD = timedelta(minutes=5)
"""So old a list may be that a decision rests on, beside the pace of polls."""
UNREAD = frozenset({Hazard.SLEEP, Hazard.FULL_DISK, Hazard.ONE_SIDED, Hazard.READ_ONLY, Hazard.SILENCE})
"""With one of these a heartbeat may be read long after it was written."""


def job_of(key: AttemptKey) -> JobId:
    return JobId(key.split("-")[-2])


def effective(gpu: int, cloud: Cloud, disk_gb: int = DISK_GB, fee_ppm: int | None = None) -> int:
    fee = cloud.fee_ppm if fee_ppm is None else fee_ppm
    return -(-(gpu + -(-cloud.trade.storage_price * disk_gb // 720)) * fee // 1_000_000)


def ceiling_of(result: Result, job: JobId) -> int:
    """Per GPU and hour; the highest that its config ever states where it states none itself."""
    return max(accepted for _, accepted in ceilings_of(result, job))


def ceilings_of(result: Result, job: JobId) -> list[tuple[datetime, int]]:
    """What it accepts per GPU and hour, each from when on."""
    price = result.submitted[job][0].spec.price
    if price is None:
        return result.daemon.orders.ceilings
    return [(result.begun_at, 0 if price.per_gpu_hour is None else price.per_gpu_hour)]


def matched(result: Result) -> Iterator[tuple[Attempt, Machine, Cloud]]:
    """Each attempt with the machine that it says is its own."""
    for cloud in result.clouds:
        for m in cloud.machines.values():
            for item in result.daemon.attempts_of.get(job_of(m.key), {}).values():
                unnamed = item.ref is None and item.key == m.key and len(cloud.by_key[m.key]) == 1
                is_own = item.key == m.key or m.ref not in cloud.shared
                if (item.ref == m.ref and is_own) or unnamed:
                    yield item, m, cloud


def booked_by_attempt(result: Result) -> dict[AttemptId, int]:
    booked: defaultdict[AttemptId, int] = defaultdict(int)
    for charge in result.daemon.told.charges:
        booked[charge.attempt] += charge.amount
    return booked


def learnt(cloud: Cloud, at: datetime, end: datetime) -> datetime:
    """When the daemon had decided on a true list that was begun after this."""
    i = bisect_right(cloud.read, at, key=lambda reading: reading[0])
    return cloud.read[i][1] if i < len(cloud.read) else end


def doubt(result: Result, item: Attempt, m: Machine, cloud: Cloud, *, unseen: bool = True) -> int:
    """By how much the books of one attempt may differ from the bill: one unit, and what nobody could know yet."""
    daemon = result.daemon
    confirm = daemon.world.policy.silence_max + 3 * daemon.pace
    total: int = cost(MicroUsdPerHour(max(rate for _, rate in m.rates)), UNIT)
    former: int = item.quote.price.total
    if m.exit_at is not None:
        # Its runner told its end before a list showed that the machine outlived it (9603175: the daemon was away then,
        # and the next list lacked the machine).
        shown = learnt(cloud, max(m.exit_at, m.visible_at), result.ended_at)
        total += cost(MicroUsdPerHour(max(rate for _, rate in m.rates)), shown - m.exit_at)
    for at, rate in m.rates:
        if not unseen and (not cloud.read or at >= cloud.read[-1][0]):
            break
        late = learnt(cloud, max(at, m.visible_at), result.ended_at) - at
        if rate == 0:  # what lists lack is believed once something else says so, too
            late = max(late, (m.end_taken or at) - at) + confirm
            former = max(item.quote.price.total, *(other for _, other in m.rates))
        total += cost(MicroUsdPerHour(abs(rate - former)), late)
        former = rate
    return total


def spending(result: Result) -> Iterator[str]:
    """Each attempt is booked as it was billed, and so are all together."""
    booked = booked_by_attempt(result)
    difference = allowed = 0
    for item, m, cloud in matched(result):
        if item.id in result.daemon.told.forgotten:
            continue
        may = doubt(result, item, m, cloud)
        if cloud.revoked is not None:
            yield from booked_unseen(result, item, m, cloud, booked[item.id])
            continue
        back = [at for _, at in result.daemon.told.restored if m.born < at]
        may += cost(MicroUsdPerHour(max(rate for _, rate in m.rates)), ran_as_stray(m, cloud, result.ended_at))
        may += cost(MicroUsdPerHour(max(rate for _, rate in m.rates)), ran_unheard(m, cloud, back))
        if item.phase == CANARY:
            may += m.traffic  # what it fetched since its newest word that was read
        off = booked[item.id] - m.billed
        if abs(off) > may:
            yield f"{m.key} was billed {m.billed} and booked {booked[item.id]}, which may differ by {may}"
        difference += off
        allowed += may
    if abs(difference) > allowed:
        yield f"all receipts differ by {difference} from what was billed, explained is {allowed}"
    known = {item.id for item, _, _ in matched(result)}
    for identity, amount in sorted(booked.items(), key=lambda kv: (kv[0].job, kv[0].number)):
        item = result.daemon.attempts_ever[identity]
        if amount > 0 and identity not in known:
            yield f"{item.key} is booked at {amount} and has no machine"


def ran_unheard(m: Machine, cloud: Cloud, back: list[datetime]) -> timedelta:
    """For how long a machine that is paused or gone had written nothing, while no true list showed it either.

    What it is booked for ends at its newest sign of life (world 2000098: no host could write and its provider gave no
    lists for 46 minutes; world 9602419: it was outbid in such a time). Where an old copy of the state was put back
    since, only the life that is forgotten has read the lists (world 74022).
    """
    disk = effective(0, cloud, m.task.disk_gb)
    stops = [at for at, rate in m.rates if rate <= disk and at != m.died]
    return max((_unheard_before(at, m, cloud, back) for at in (*stops, m.died) if at is not None), default=timedelta(0))


def _unheard_before(stopped: datetime, m: Machine, cloud: Cloud, back: list[datetime]) -> timedelta:
    if m.alive_at is None:
        return timedelta(0)
    before = bisect_left(cloud.read, stopped, key=lambda reading: reading[0])
    is_forgotten = before == 0 or any(stopped <= at for at in back)
    shown = m.alive_at if is_forgotten else max(m.alive_at, cloud.read[before - 1][0])
    return max(timedelta(0), stopped - shown)


def ran_as_stray(m: Machine, cloud: Cloud, end: datetime) -> timedelta:
    """For how long it ran on after its provider had taken and forgotten its end, and a wrong list had lacked it.

    Both together prove an end. When it is listed again it belongs to no attempt: its cost is told as a stray machine's.
    """
    if m.key not in cloud.forgot or m.ended_by_us is None:
        return timedelta(0)
    lacked = next((at for at in m.lacking if at > m.ended_by_us), None)
    return timedelta(0) if lacked is None else max(timedelta(0), (m.died or end) - lacked)


def booked_unseen(result: Result, item: Attempt, m: Machine, cloud: Cloud, booked: int) -> Iterator[str]:
    """What runs where nobody can look is booked until its owner gives it up, or its lease must have ended it."""
    policy, owner = result.daemon.world.policy, result.submitted[item.id.job][0]
    top = MicroUsdPerHour(max(item.quote.price.total, *(rate for _, rate in m.rates)))
    until = result.daemon.told.given_up.get(m.key, result.ended_at)
    may = doubt(result, item, m, cloud, unseen=False)
    if cloud.trade.ends_itself:  # it is not counted on beyond its lease
        until = min(until, m.died or until)
        lasts = policy.lease + owner.spec.checkpoint.stop_grace + policy.save_allowance
        if item.heartbeat_seen_at is None:
            lasts += policy.providers[item.provider].provision_timeout
        may += cost(top, lasts + 3 * result.daemon.pace)
    blind = max([m.born, *(begun for begun, _ in cloud.read[-1:])])
    least = owed_until(m, blind)
    most = least + cost(top, max(timedelta(0), until - blind))  # what became of its price, nobody could know
    if item.launched_at is not None:  # a call that took long may have made it at once
        most += cost(top, max(timedelta(0), m.born - item.launched_at))
    if not least - may <= booked <= most + may:
        yield f"{m.key}, whose account is dead, owed {least} to {most} and was booked {booked}, it may differ by {may}"


def owed_until(m: Machine, at: datetime) -> int:
    owed = m.traffic
    for (since, rate), (until, _) in pairwise([*m.rates, (at, 0)]):
        owed += cost(MicroUsdPerHour(rate), max(timedelta(0), min(until, at) - since))
    return owed


def above_ceiling(result: Result) -> Iterator[str]:
    """No machine bills more than its job accepted for longer than it takes to see that, to save and to end it."""
    if not result.shape.reachable:
        return
    daemon = result.daemon
    policy = daemon.world.policy
    for item, m, cloud in matched(result):
        owner = result.submitted[item.id.job][0]
        accepted, rates = ceilings_of(result, item.id.job), [*m.rates, (result.ended_at, 0)]
        allowed = timedelta(minutes=5) + (DWELL_MAX if len(accepted) > 1 else timedelta(0))
        over: datetime | None = None
        for at in sorted({at for at, _ in rates} | {at for at, _ in accepted if at > rates[0][0]}):
            rate, most = in_force(rates, at), in_force(accepted, at) * shares(m.gpu_count_at(at))
            if over is not None and rate <= most:
                seen = learnt(cloud, over, result.ended_at)
                end = seen + owner.spec.checkpoint.stop_grace + policy.save_allowance + 3 * daemon.pace
                if at > end + allowed:
                    yield f"{m.key} billed above its ceiling of {most} from {over} to {at}"
                over = None
            elif over is None and rate > most:
                over = at


def in_force(steps: list[tuple[datetime, int]], at: datetime) -> int:
    return steps[max(0, bisect_right(steps, at, key=lambda step: step[0]) - 1)][1]


def below_ceiling(result: Result) -> Iterator[str]:
    """No machine is stopped for its price that is not above what its job accepts then, however old its list may be."""
    hazards = result.shape.hazards
    if not result.shape.reachable or Hazard.TRAFFIC in hazards:
        return
    machines = {item.id: m for item, m, _ in matched(result)}
    for at, identity, detail, accepted in result.daemon.orders.for_price:
        m = machines.get(identity)
        if m is None:
            continue
        since = at - 3 * result.daemon.pace - OLD
        most = max([in_force(m.rates, since), *(rate for when, rate in m.rates if since <= when <= at)])
        if most == 0 and all(begun == over for begun, over in m.spans):
            continue  # it costs nothing while it waits for its place, and what it would cost is not accepted any more
        if most <= accepted:
            yield f"{m.key} was stopped at {at} although {most} is no more than the {accepted} accepted: {detail}"


def ambiguous_cost(result: Result) -> Iterator[str]:
    """R8. A lost answer costs at most time-out, window and reaping at its price, where nothing else went wrong.

    Unless its attempt uses the machine all the same: then it is booked.
    """
    if result.shape.outages_per_hour or result.shape.kills_per_hour or result.shape.crash_rate:
        return
    if result.daemon.told.restored or any(c.revoked is not None for c in result.clouds):
        return
    daemon = result.daemon
    window = max(r.reconcile_window for r in daemon.world.policy.providers.values())
    span = timedelta(seconds=20 + 60) + window + 3 * daemon.pace
    for cloud in result.clouds:
        for m in cloud.lost_answers:
            of_key = [a for a in daemon.attempts_of[job_of(m.key)].values() if a.key == m.key]
            counted = [a for a in of_key if a.ref == m.ref or works_unlisted(a, cloud)]
            allowed = cost(MicroUsdPerHour(effective(m.bid, cloud, m.task.disk_gb)), span)
            if not counted and m.key not in cloud.forgot and m.billed > allowed and not stormy_ends(cloud):
                yield f"{m.key} was lost and cost {m.billed}, allowed are {allowed}"
            for item in of_key if not result.shape.hazards & UNREAD else ():
                yield from hardly_booked(result, item, m, cloud)


def hardly_booked(result: Result, item: Attempt, m: Machine, cloud: Cloud) -> Iterator[str]:
    """What an attempt used by its heartbeats alone is booked up to the last of them, whatever clock dates them."""
    if not works_unlisted(item, cloud) or m.alive_at is None or item.ended_at is None:
        return
    until = min(m.alive_at, item.ended_at)
    spans = [*m.spans, (m.since, until)] if m.alive else m.spans  # while it was paused it was not used
    ran = sum((min(end, until) - begun for begun, end in spans if begun < until), timedelta(0))
    used = ran - GAP - 3 * result.daemon.pace
    booked = booked_by_attempt(result)[item.id]
    if booked < cost(item.quote.price.total, max(timedelta(0), used)):
        yield f"{m.key} was used for {used} by its heartbeats and is booked at {booked}"


def works_unlisted(item: Attempt, cloud: Cloud) -> bool:
    """Whether its only machine is known by its heartbeats alone: while lists do not come, its attempt uses it."""
    return item.ref is None and item.heartbeat_seen_at is not None and len(cloud.by_key[item.key]) == 1


def stormy_ends(cloud: Cloud) -> bool:
    return any(m.ended_by_us is not None and m.died != m.ended_by_us for m in cloud.machines.values())


def budgets(result: Result) -> Iterator[str]:
    """R8. By the daemon's books and by the providers' own.

    Whoever cannot reach a machine cannot end it either, so this is for worlds where everything can be reached. Nor can
    anybody know what the first checkpoint of a job costs before it is there.
    """
    if not result.shape.reachable:
        return
    daemon, limits = result.daemon, result.shape.limits
    lifted = Hazard.SIZES in result.shape.hazards
    unknown = first_uploads(result)
    by_day: defaultdict[date, int] = defaultdict(int)
    by_month: defaultdict[date, int] = defaultdict(int)
    for charge in daemon.told.charges:
        in_time = charge.end <= result.calm_at  # in the calm its owner lets it go on
        if in_time or not lifted:
            by_day[charge.day] += charge.amount
        if in_time:
            by_month[charge.day.replace(day=1)] += charge.amount
    for name, budget, booked in (
        ("day", limits.get("budget_day"), by_day),
        ("month", limits.get("budget_month"), by_month),
    ):
        if not isinstance(budget, int):
            continue
        for day, amount in sorted(booked.items()):
            month = name == "month"
            surprise = sum(cost for _, at, cost in unknown if reaches(at, day, result.daemon.pace, month=month))
            if amount > budget + unit(result) + surprise:
                yield f"{amount} was spent in the {name} of {day}, the budget is {budget}"
        for day, amount in sorted(billed_by_day(result).items()):
            if lifted and day >= result.calm_at.date():
                continue
            surprise = sum(cost for _, at, cost in unknown if reaches(at, day, result.daemon.pace, month=False))
            if amount > budget + unit(result) + surprise and not result.shape.faults:
                yield f"{amount} was billed on {day}, the budget of the {name} is {budget}"
    for identity, end in sorted(daemon.done.items()):
        own = end.spec.job_budget
        surprise = sum(cost for job, _, cost in unknown if job == identity)
        if own is not None and end.spent > own + unit(result) + surprise:
            yield f"{identity} cost {end.spent}, its budget is {own}"


def first_uploads(result: Result) -> list[tuple[JobId, datetime, int]]:
    """When each job uploaded anything up to its first complete checkpoint, and what that cost."""
    first: dict[JobId, datetime] = {}
    saves = []
    for cloud in result.clouds:
        for m in cloud.machines.values():
            for save in m.saved:
                saves.append((job_of(m.key), save.at, -(-m.offer.upload_price * m.task.bytes // GB)))
                if save.sound:
                    first[job_of(m.key)] = min(save.at, first.get(job_of(m.key), save.at))
    return [(job, at, cost) for job, at, cost in saves if job not in first or at <= first[job]]


def reaches(at: datetime, day: date, pace: timedelta, *, month: bool) -> bool:
    """Whether what was uploaded then is booked in this day, or in the month that begins with it."""
    days = {at.date(), (at + 3 * pace).date()}
    return day in ({other.replace(day=1) for other in days} if month else days)


def expired_too_soon(result: Result) -> Iterator[str]:
    """A budget ends no job whose rest would buy two hours of the dearest machine that the job accepts."""
    for identity, end in sorted(result.daemon.done.items()):
        budget = end.spec.job_budget
        if end.state is JobState.EXPIRED and budget is not None:
            gpus = shares(gpus_of(end.spec)) * nodes_of(end.spec)
            useful = 2 * ceiling_of(result, identity) * gpus
            if budget - end.spent > useful:
                yield f"{identity} has EXPIRED with {budget - end.spent} of {budget} left"


def billed_by_day(result: Result) -> dict[date, int]:
    owed: defaultdict[date, int] = defaultdict(int)
    for cloud in result.clouds:
        for m in cloud.machines.values():
            for day, amount in m.owed_by_day.items():
                owed[day] += amount
    return {day: amount // OWED_UNIT for day, amount in owed.items()}


def unit(result: Result) -> int:
    """One poll's worth of a machine."""
    most = max((effective(c.highest_price, c) for c in result.clouds), default=0)
    return cost(MicroUsdPerHour(most), result.daemon.pace)


def paid_for_nothing(result: Result) -> Iterator[str]:
    """What is not on a receipt was never shown to the daemon, or was taken from it before it could know."""
    known = {m.ref for _, m, _ in matched(result)}
    for cloud in result.clouds:
        for m in cloud.machines.values():
            if m.ref in known or m.state is not InstanceState.GONE or m.died is None:
                continue
            shown = learnt(cloud, m.visible_at, result.ended_at)
            top = MicroUsdPerHour(max(rate for _, rate in m.rates))
            may = cost(top, max(timedelta(0), shown - m.born) + 3 * result.daemon.pace + timedelta(minutes=12))
            if m.billed > may:
                yield f"{m.key} is on no receipt and was billed {m.billed}, explained is {may}"
