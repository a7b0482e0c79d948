"""What must not grow: launches, rows and time, however long something goes on failing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from spotd.core.model import JobId
from tests.sim.hazards import Hazard
from tests.sim.machines import BOOT
from tests.sim.money import job_of
from tests.sim.run import Result

HOUR = timedelta(hours=1)
LAUNCHES_AN_HOUR = 120
"""Of one job: after each refusal of an offer the next one is tried, and there are a dozen."""
LAUNCHES_IN_VAIN = 12
"""In any hour of a job that never starts, once it has failed for an hour."""
ROWS_AN_HOUR = 1_500
COOLDOWNS = 200


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
    for job, made in attempts_an_hour(result).items():
        work = result.submitted[job][1]
        if (work.never is not None or work.no_secrets) and len(made) > 0:
            late = [at for at in made if at - made[0] > HOUR]
            if (most := most_in_an_hour(late)) > LAUNCHES_IN_VAIN:
                yield f"{job} can never start and was tried {most} times in an hour"


def attempts_an_hour(result: Result) -> dict[JobId, list[datetime]]:
    found = {
        job: sorted(a.intended_at for a in attempts.values()) for job, attempts in result.daemon.attempts_of.items()
    }
    return dict(sorted(found.items()))


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


def late(result: Result) -> Iterator[str]:
    """Liveness: with the faults gone, all jobs are done within three times what they need one after the other."""
    if result.daemon.world.policy.budget_day is not None:
        return  # a budget holds jobs back until midnight, which is not lateness
    rounds = max((rounds_of(result, gpus) for gpus in wanted(result)), default=0)
    slots = result.daemon.world.policy.machines_max
    rounds = max(rounds, -(-len(result.submitted) // slots))
    longest = max((w.need for _, w in result.submitted.values()), default=timedelta(0)) + BOOT
    bound = result.calm_at + 3 * rounds * longest + HOUR
    if Hazard.GPUS in result.shape.hazards:
        bound += 2 * rounds * longest
    if Hazard.TWIN in result.shape.hazards:  # the jobs of the other one need the same hosts
        bound += 4 * (timedelta(minutes=result.shape.need[1]) + BOOT)
    if result.ended_at > bound:
        yield f"the last job was done at {result.ended_at}, the bound is {bound}"


def wanted(result: Result) -> Counter[int]:
    return Counter(job.spec.resources.gpu[0].count for job, _ in result.submitted.values())


def rounds_of(result: Result, gpus: int) -> int:
    """How often all hosts that fit must be used so that each job of this kind has had one."""
    hosts = sum(1 for c in result.clouds for h in c.hosts if h.offer.gpu_count == gpus)
    return -(-wanted(result)[gpus] // max(1, hosts))
