"""What must not grow: launches, rows and time, however long something goes on failing."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import LAUNCHES_PER_HOUR_MAX
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason, JobState
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.values import MicroUsdPerHour, cost
from tests.sim.bills import ALL_STATED_AFTER, BILLS_READ_WITHIN
from tests.sim.hazards import PLANNED, Hazard
from tests.sim.machines import BOOT, gpus_of, most_nodes_of, nodes_of
from tests.sim.money import job_of
from tests.sim.plans import longest_wait
from tests.sim.process import DOWN, KEY_REFUSED
from tests.sim.run import Result

HOUR = timedelta(hours=1)
LAUNCHES_AN_HOUR = 120
"""Of one job: after each refusal of an offer the next one is tried, and there are a dozen."""
MACHINES_IN_VAIN = 12
"""In any hour of a job that never starts, once it has failed for an hour."""
ROWS_AN_HOUR = 1_500
COOLDOWNS = 200
USEFUL_MAX = 3 * BOOT + timedelta(minutes=20)
"""How long a machine must run at the most to have been worth its start."""


def launches_bounded(result: Result) -> Iterator[str]:
    """Whatever goes wrong, a job asks for a bounded number of machines in an hour."""
    calls: defaultdict[JobId, list[datetime]] = defaultdict(list)
    for cloud in result.clouds:
        for call in cloud.launch_calls:
            calls[job_of(call.key)].append(call.at)
    for job, times in sorted(calls.items()):
        most = most_in_an_hour(sorted(times))
        if most > LAUNCHES_AN_HOUR:
            yield f"{job} was launched {most} times in an hour"
    for job, (spec, work) in sorted(result.submitted.items()):
        if work.never is None and not work.no_secrets:
            continue
        for tries in between_retries(result, job):
            for of_one_life in by_life(result, tries):
                for rule in in_vain(spec.spec, of_one_life):
                    yield f"{job} can never start and {rule}"


def by_life(result: Result, tries: list[Attempt]) -> list[list[Attempt]]:
    """A restored state does not know how often the job had failed."""
    found: defaultdict[int, list[Attempt]] = defaultdict(list)
    for item in tries:
        found[sum(at < item.intended_at for _, at in result.daemon.told.restored)].append(item)
    return [*found.values()]


def in_vain(spec: JobSpec, tries: list[Attempt]) -> Iterator[str]:
    """What is bounded of a job that never makes progress, from one order of its user to the next.

    What it fails by itself has a number; what others refuse or take from it, and costs next to nothing, has a pace.
    """
    reasons = [item.end_reason for item in tries if item.end_reason is not None]
    starts = sum(reason.traits.is_failed_start for reason in reasons)
    if starts > spec.retry_starts:
        yield f"failed {starts} starts, {spec.retry_starts} are allowed"
    errors = reasons.count(EndReason.USER_ERROR)
    if errors > spec.retry_errors + 1:
        yield f"failed {errors} times, {spec.retry_errors} retries are allowed"
    late = [
        item.intended_at for item in tries if item.ref is not None and item.intended_at - tries[0].intended_at > HOUR
    ]
    if (most := most_in_an_hour(late)) > MACHINES_IN_VAIN:
        yield f"had {most} machines in an hour"
    own = [item.intended_at for item in tries if not is_refused_to_all(item)]
    if (most := most_in_an_hour(own)) > LAUNCHES_PER_HOUR_MAX:
        yield f"was tried {most} times in an hour"


def is_refused_to_all(item: Attempt) -> bool:
    """Whether the launch would have met any job so: then the provider cools down, and the job does not."""
    return item.end_reason is EndReason.NOT_SENT or item.end_detail in {DOWN, KEY_REFUSED}


def between_retries(result: Result, job: JobId) -> list[list[Attempt]]:
    """The attempts of the job in order, in one part for each order of its user."""
    told = result.daemon.told.retries.get(job, [])
    parts: list[list[Attempt]] = [[] for _ in range(len(told) + 1)]
    for item in sorted(result.daemon.attempts_of.get(job, {}).values(), key=lambda a: a.id.number):
        parts[bisect_right(told, item.intended_at)].append(item)
    return [part for part in parts if part]


def most_in_an_hour(times: list[datetime]) -> int:
    most = first = 0
    for last, at in enumerate(times):
        while at - times[first] > HOUR:
            first += 1
        most = max(most, last - first + 1)
    return most


def rows_bounded(result: Result) -> Iterator[str]:
    """What is written down for a job in an hour has a bound, and so has what is held in memory."""
    for (job, hour), count in sorted(result.daemon.told.rows.items(), key=str):
        if count > ROWS_AN_HOUR:
            yield f"{count} events of {job} in the hour of {hour}"
    world = result.daemon.world
    if len(world.cooldowns) > COOLDOWNS:
        yield f"{len(world.cooldowns)} cooldowns are held"
    for what, rows in (("jobs", world.jobs), ("attempts", world.attempts), ("intents", world.intents)):
        if len(rows) > 10 * max(1, result.shape.jobs):
            yield f"{len(rows)} {what} are open at the end"


def waits_for_a_lower_price(result: Result, job: JobId) -> bool:
    """Whether so little of the job's budget is left that no host of the calm could do useful work for it.

    A price that is a bit lower would do, so that its budget has not ended it, or only once no such price was known.
    """
    held = result.daemon.world.jobs.get(job) or result.daemon.done.get(job)
    if (
        held is None
        or held.state not in {JobState.QUEUED, JobState.WAITING_PRICE, JobState.EXPIRED}
        or held.budget is None
    ):
        return False
    gpus = gpus_of(held.spec)
    hosts = (host.offer for cloud in result.clouds for host in cloud.hosts)
    lowest = min((o.gpu_price for o in hosts if o.gpu_count == gpus), default=MicroUsdPerHour(0))
    return held.budget - held.spent < cost(MicroUsdPerHour(lowest * nodes_of(held.spec)), USEFUL_MAX)


LINE_BYTES_S: Final = 12_500_000


def may_wait_for_ever(result: Result, job: JobId) -> bool:
    """Whether nothing that comes would let the job run: no price, no window, or a job before it of which this is so."""
    held = result.daemon.world.jobs.get(job)
    before = () if held is None or held.chain is None else held.chain.after
    return (
        waits_for_a_lower_price(result, job)
        or waits_for_a_longer_window(result, job)
        or any(may_wait_for_ever(result, one) for one in before)
    )


def waits_for_a_longer_window(result: Result, job: JobId) -> bool:
    """Whether to save the job's terabytes by a line of 100 Mbit/s takes longer than the longest of its windows."""
    held = result.daemon.world.jobs.get(job)
    if held is None or not held.spec.schedule.windows or not held.checkpoints:
        return False
    longest = max((one.end_min - one.start_min) % 1440 or 1440 for one in held.spec.schedule.windows)
    return held.checkpoints[0].bytes / LINE_BYTES_S > 54 * longest  # a tenth of the window is for work


def late(result: Result) -> Iterator[str]:
    """Liveness: with the faults gone, all jobs are done within three times what they need one after the other."""
    if result.daemon.world.policy.budget_day is not None:
        return  # a budget holds jobs back until midnight, which is not lateness
    done_at = last_done(result)
    rounds = max((rounds_of(result, gpus) for gpus in wanted(result)), default=0)
    slots = result.daemon.world.policy.machines_max // max(
        (most_nodes_of(j.spec) for j, _ in result.submitted.values()), default=1
    )
    rounds = max(rounds, -(-len(result.submitted) // slots))
    longest = max((w.need for _, w in result.submitted.values()), default=timedelta(0)) + BOOT
    bound = result.calm_at + 3 * rounds * longest + HOUR
    if Hazard.GPUS in result.shape.hazards:
        bound += 2 * rounds * longest
    if Hazard.REVOKED in result.shape.hazards:  # what is in the account blocks until its owner gives it up
        bound += 33 * HOUR
    if Hazard.TWIN in result.shape.hazards:  # the jobs of the other one need the same hosts
        bound += 4 * (timedelta(minutes=result.shape.need[1]) + BOOT)
    if Hazard.BILLS in result.shape.hazards:
        bound += ALL_STATED_AFTER + BILLS_READ_WITHIN
    bound += planned_waits(result) + waits_for_own(result)
    if done_at > bound:
        yield f"the last job was done at {done_at}, the bound is {bound}"


def waits_for_own(result: Result) -> timedelta:
    """For how long jobs may wait for own machines, one after the other where machines are few."""
    most = result.shape.limits.get("rent_after")
    if not isinstance(most, timedelta):
        return timedelta(0)
    spans = [job.spec.resources.rent_after for job, _ in result.submitted.values()]
    return sum((most if span is None else span for span in spans), timedelta(0))


def last_done(result: Result) -> datetime:
    """When the last job was done, those left out that may wait without end, and the jobs of the other daemon."""
    waits = {job for job in result.submitted if may_wait_for_ever(result, job)}
    ends_with_others = not waits and Hazard.TWIN not in result.shape.hazards
    if ends_with_others or any(job not in waits for job in result.daemon.world.jobs):
        return result.ended_at
    ends = [item.ended_at for item in result.daemon.attempts_ever.values() if item.id.job not in waits]
    return max([result.begun_at, *(at for at in ends if at is not None)])


def planned_waits(result: Result) -> timedelta:
    """What the plans of jobs allow them to wait for, one after the other where they come after each other."""
    hazards, jobs = result.shape.hazards, [*result.submitted.values()]
    if not hazards & PLANNED:
        return timedelta(0)
    waits = [longest_wait(job, work) for job, work in jobs]
    span = sum(waits, timedelta(0)) if hazards & {Hazard.CHAINS, Hazard.ARRAYS, Hazard.PREEMPT} else max(waits)
    if hazards & {Hazard.CHAINS, Hazard.ARRAYS, Hazard.PREEMPT}:
        span += sum((work.need + BOOT + HOUR for _, work in jobs), timedelta(0))
    return span + 2 * HOUR * result.daemon.world.policy.moves_max


def wanted(result: Result) -> Counter[int]:
    return Counter(gpus_of(job.spec) for job, _ in result.submitted.values())


def rounds_of(result: Result, gpus: int) -> int:
    """How often all hosts that fit must be used so that each job of this kind has had one."""
    rented = [c for c in result.clouds if c.revoked is None and not c.trade.owned]
    hosts = sum(1 for c in rented for h in c.hosts if h.offer.gpu_count == gpus)
    return -(-wanted(result)[gpus] // max(1, hosts))
