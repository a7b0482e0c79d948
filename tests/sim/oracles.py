"""What must hold in every world, judged by the providers' own history and not by what the daemon believes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from itertools import pairwise

from spotd.core.model import JobId
from spotd.core.states import EndReason, JobState
from spotd_providers.contract.money import MicroUsdPerHour, cost
from spotd_providers.contract.values import AttemptKey
from tests.sim.cloud import Cloud
from tests.sim.machines import BOOT, DISK_GB, STORAGE_PER_GB_MONTH, Machine
from tests.sim.run import Result

ENDED_WITHIN = timedelta(minutes=10)
"""A machine nobody needs is gone so long after its provider can be reached."""
HOUR = timedelta(hours=1)


def broken_rules(result: Result) -> list[str]:
    """Every rule that did not hold, in words; empty when all held."""
    checks = (
        said_by_the_core,
        forgotten_machines,
        foreign_machines,
        launches,
        doubles,
        healthy_machines_killed,
        resumes,
        jobs_lost,
        cancels_lost,
        late,
        machines_max,
        ambiguous_cost,
        receipts,
        budgets,
    )
    return [f"{check.__name__}: {rule}" for check in checks for rule in check(result)]


def job_of(key: AttemptKey) -> JobId:
    return JobId(key.split("-")[2])


def said_by_the_core(result: Result) -> Iterator[str]:
    yield from sorted(set(result.daemon.told.broken))


def forgotten_machines(result: Result) -> Iterator[str]:
    """R2. In the calm every provider can be reached, so what nobody needs must go soon."""
    daemon = result.daemon
    for cloud in result.clouds:
        for m in cloud.active.values():
            yield f"{m.key} ({m.state}) is left"
        for m in cloud.machines.values():
            owner = next((a for a in daemon.attempts_of.get(job_of(m.key), {}).values() if a.key == m.key), None)
            if owner is None:
                yield f"{m.key} was bought without a record of it"
                continue
            free = max(result.calm_at, m.born, owner.ended_at or result.ended_at)
            if m.died is not None and m.died - free > ENDED_WITHIN + BOOT:
                yield f"{m.key} lived for {m.died - free} after it was needed"


def foreign_machines(result: Result) -> Iterator[str]:
    """R3."""
    for cloud in result.clouds:
        if cloud.foreign_touched:
            yield f"{len(cloud.foreign_touched)} orders to end machines of others at {cloud.name}"


def launches(result: Result) -> Iterator[str]:
    """Each key is used for one call, of a real offer, and can never cost more than its job allows."""
    for cloud in result.clouds:
        for key, count in Counter(call.key for call in cloud.launch_calls).items():
            if count > 1:
                yield f"{count} launches under one key {key}"
        for call in cloud.launch_calls:
            if call.offered <= 0:
                yield f"{call.key} was bought at a price that is none: {call.offered}"
            ceiling = ceiling_of(result, job_of(call.key))
            if effective(call.price_max, cloud) > ceiling:
                yield f"{call.key} may cost {effective(call.price_max, cloud)} an hour, its ceiling is {ceiling}"


def ceiling_of(result: Result, job: JobId) -> int:
    price = result.submitted[job][0].spec.price
    return 0 if price is None or price.per_gpu_hour is None else price.per_gpu_hour


def effective(gpu: int, cloud: Cloud) -> int:
    return -(-(gpu + STORAGE_PER_GB_MONTH * DISK_GB // 720) * cloud.fee_ppm // 1_000_000)


def doubles(result: Result) -> Iterator[str]:
    """R1. Two machines of one job could compute at once, other than after an end that a provider took and forgot."""
    by_job: defaultdict[JobId, list[tuple[datetime, datetime, AttemptKey]]] = defaultdict(list)
    for cloud in result.clouds:
        for key, start, end in cloud.live_spans():
            if key not in cloud.forgot:
                by_job[job_of(key)].append((start, end, key))
    for spans in by_job.values():
        spans.sort()
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                yield f"{first} and {second} both lived from {start} to {end}"


def healthy_machines_killed(result: Result) -> Iterator[str]:
    """A host is given up as lost only if it fell silent, or a listing that called itself complete lacked it."""
    for attempt in result.daemon.attempts_ever.values():
        if attempt.end_reason is not EndReason.HOST_LOST or attempt.ended_at is None:
            continue
        for m in machines_of(result, attempt.key):
            if m.ended_by_us is not None and not (m.was_silent or m.omitted or m.spans[0][1] < m.ended_by_us):
                yield f"{m.key} was well when it was given up: {attempt.end_detail}"


def machines_of(result: Result, key: AttemptKey) -> list[Machine]:
    return [m for cloud in result.clouds for m in cloud.by_key.get(key, ())]


def resumes(result: Result) -> Iterator[str]:
    """R5."""
    for job, start, best in result.daemon.told.resumes:
        if start != best:
            yield f"{job} resumed at {start}, its newest complete checkpoint was at {best}"


def jobs_lost(result: Result) -> Iterator[str]:
    """R4. Every job ends as it must."""
    daemon = result.daemon
    for identity, (job, work) in sorted(result.submitted.items()):
        end = daemon.done.get(identity)
        if end is None:
            yield f"{identity} never ended: {daemon.world.jobs[identity].state}"
            continue
        may = {JobState.SUCCEEDED} if work.errors <= job.spec.retry_errors else {JobState.FAILED}
        if identity in daemon.told.cancels:
            may |= {JobState.CANCELLED}
        if job.spec.job_budget is not None:
            may |= {JobState.EXPIRED}
        if result.shape.user and work.errors:
            may |= {JobState.SUCCEEDED, JobState.FAILED}  # a retry by the user forgives errors
        if end.state not in may:
            yield f"{identity} ended {end.state}: {end.reason}"


def cancels_lost(result: Result) -> Iterator[str]:
    """What the user was told is done: the job is cancelled, or had come to its own end within the grace."""
    for identity, at in sorted(result.daemon.told.cancels.items()):
        end = result.daemon.done.get(identity)
        if end is None or end.state is JobState.CANCELLED:
            continue
        attempts = result.daemon.attempts_of.get(identity, {}).values()
        if any(a.intended_at > at for a in attempts):
            yield f"{identity} was cancelled at {at} and launched again afterwards"


def late(result: Result) -> Iterator[str]:
    """Liveness: with the faults gone, all jobs are done within three times what they need one after the other."""
    hosts = sum(len(c.hosts) for c in result.clouds)
    rounds = -(-len(result.submitted) // hosts)
    longest = max((w.need for _, w in result.submitted.values()), default=timedelta(0)) + BOOT
    slots = result.daemon.world.policy.machines_max
    if slots < hosts:
        rounds = -(-len(result.submitted) // slots)
    bound = result.calm_at + 3 * rounds * longest + HOUR
    if limited(result):
        return  # a budget of the day holds jobs back until midnight, which is not lateness
    if result.ended_at > bound:
        yield f"the last job was done at {result.ended_at}, the bound is {bound}"


def limited(result: Result) -> bool:
    return result.daemon.world.policy.budget_day is not None


def machines_max(result: Result) -> Iterator[str]:
    most = result.daemon.world.policy.machines_max
    for cloud in result.clouds:
        for call in cloud.launch_calls:
            if call.alive_before >= most:
                yield f"{call.key} was bought while {call.alive_before} machines lived, {most} are allowed"


def ambiguous_cost(result: Result) -> Iterator[str]:
    """R8. A lost answer costs at most time-out, window and reaping at its price, where nothing else went wrong."""
    if result.shape.outages_per_hour or result.shape.kills_per_hour or result.shape.crash_rate:
        return
    daemon = result.daemon
    span = timedelta(seconds=20 + 180 + 60) + 3 * daemon.pace
    for cloud in result.clouds:
        for m in cloud.lost_answers:
            counted = [a for a in daemon.attempts_of[job_of(m.key)].values() if a.key == m.key and a.ref == m.ref]
            allowed = cost(MicroUsdPerHour(effective(m.bid, cloud)), span)
            if not counted and m.key not in cloud.forgot and m.billed > allowed and not stormy_ends(cloud):
                yield f"{m.key} was lost and cost {m.billed}, allowed are {allowed}"


def stormy_ends(cloud: Cloud) -> bool:
    return any(m.ended_by_us is not None and m.died != m.ended_by_us for m in cloud.machines.values())


def receipts(result: Result) -> Iterator[str]:
    """Without outages the receipts cover what the provider billed, but for what no list had shown yet."""
    if result.shape.outages_per_hour or result.shape.kills_per_hour:
        return
    daemon = result.daemon
    allowed = 0
    for cloud in result.clouds:
        top = MicroUsdPerHour(effective(cloud.highest_price, cloud))
        for m in cloud.machines.values():
            counted = any(a.ref == m.ref for a in daemon.attempts_of.get(job_of(m.key), {}).values())
            unseen = 3 * daemon.pace + timedelta(minutes=2 if m.key not in cloud.forgot else 12)
            allowed += m.billed if not counted else cost(top, unseen)
    billed = sum(c.total_billed() for c in result.clouds)
    if billed > daemon.spent() + allowed:
        yield f"billed {billed}, on receipts {daemon.spent()}, explained {allowed}"


def budgets(result: Result) -> Iterator[str]:
    """R8. By the daemon's books and by the providers' own.

    Whoever cannot reach a machine cannot end it either, so this is for worlds where everything can be reached.
    """
    if not result.shape.reachable:
        return
    policy, daemon = result.daemon.world.policy, result.daemon
    booked: defaultdict[date, int] = defaultdict(int)
    for charge in daemon.told.charges:
        booked[charge.day] += charge.amount
    billed: defaultdict[date, int] = defaultdict(int)
    for cloud in result.clouds:
        for m in cloud.machines.values():
            for day, amount in m.billed_by_day.items():
                billed[day] += amount
    if policy.budget_day is not None:
        for day in sorted(booked):
            if booked[day] > policy.budget_day + unit(result):
                yield f"{booked[day]} was spent on {day}, the budget is {policy.budget_day}"
        for day in sorted(billed):
            if billed[day] > policy.budget_day + unit(result) and not result.shape.faults:
                yield f"{billed[day]} was billed on {day}, the budget is {policy.budget_day}"
    for identity, end in sorted(daemon.done.items()):
        budget = end.spec.job_budget
        if budget is not None and end.spent > budget + unit(result):
            yield f"{identity} cost {end.spent}, its budget is {budget}"


def unit(result: Result) -> int:
    """One poll's worth of a machine."""
    most = max((effective(c.highest_price, c) for c in result.clouds), default=0)
    return cost(MicroUsdPerHour(most), result.daemon.pace)
