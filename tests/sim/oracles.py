"""What must hold in every world, judged by the providers' own history and not by what the daemon believes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from spotd.core.deadlines import due_at
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason, JobState
from spotd_providers.contract.values import AttemptKey
from tests.sim.bounds import late, launches_bounded, may_wait_for_ever, rows_bounded
from tests.sim.daemon import CALL_TIMEOUT
from tests.sim.hazards import Hazard
from tests.sim.kept import kept_machines, was_kept
from tests.sim.machines import BOOT, Machine
from tests.sim.money import (
    above_ceiling,
    ambiguous_cost,
    below_ceiling,
    budgets,
    ceiling_of,
    effective,
    expired_too_soon,
    job_of,
    matched,
    paid_for_nothing,
    spending,
)
from tests.sim.own_rules import OWN_RULES
from tests.sim.receipts import RECEIPTS
from tests.sim.reuse import REUSE
from tests.sim.run import Result
from tests.sim.schedules import RULES
from tests.sim.stops import STOPS
from tests.sim.unfit import UNFIT

SECOND = timedelta(seconds=1)
CALL = timedelta(minutes=1)
"""What a provider may take to answer."""
GIVEN_UP = frozenset({EndReason.HOST_LOST, EndReason.PROVISION_TIMEOUT, EndReason.LEASE_EXPIRED})
ENDED_WITHIN = timedelta(minutes=10)
"""A machine nobody needs is gone so long after its provider can be reached."""


def broken_rules(result: Result) -> list[str]:
    """Every rule that did not hold, in words; empty when all held."""
    found = [f"{check.__name__}: {rule}" for check in CHECKS for rule in check(result)]
    return found if result.twin is None else found + broken_rules(result.twin)


def said_by_the_core(result: Result) -> Iterator[str]:
    yield from sorted(set(result.daemon.told.broken))


def forgotten_machines(result: Result) -> Iterator[str]:
    """R2. In the calm every provider can be reached, so what nobody needs must go soon."""
    daemon = result.daemon
    for cloud in result.clouds:
        for m in cloud.active.values():
            if cloud.revoked is None or not out_of_mind(result, m):
                yield f"{m.key} ({m.state}) is left"
        for m in cloud.machines.values() if cloud.revoked is None else ():
            owner = next((a for a in daemon.attempts_of.get(job_of(m.key), {}).values() if a.key == m.key), None)
            if owner is None:
                yield f"{m.key} was bought without a record of it"
                continue
            free = max(result.calm_at, m.born, owner.ended_at or result.ended_at)
            waits = daemon.world.policy.reuse_wait  # for another job, once its own is done
            if m.died is not None and m.died - free > ENDED_WITHIN + BOOT + waits:
                yield f"{m.key} lived for {m.died - free} after it was needed"


def out_of_mind(result: Result, m: Machine) -> bool:
    """Whether its owner gave it up, or no state knows it."""
    told, job = result.daemon.told, job_of(m.key)
    forgotten = any(result.daemon.attempts_ever[i].key == m.key for i in told.forgotten)
    return m.key in told.given_up or job in told.lost_jobs or forgotten


def needed_machines_ended(result: Result) -> Iterator[str]:
    """R1. No machine that lives and works is ended before its attempt is over, whatever the state remembers of it."""
    daemon = result.daemon
    for cloud in result.clouds:
        for m in cloud.machines.values():
            at = m.ended_by_us
            if (
                at is None
                or not lived(m, at - SECOND)
                or job_of(m.key) in daemon.told.lost_jobs
                or len(cloud.by_key[m.key]) > 1
            ):
                continue
            if any(at <= back for _, back in daemon.told.restored) or any(
                a <= at <= b + CALL for a, b in daemon.told.full
            ):
                continue  # a life that is forgotten ended it, or nothing could be written when the call was begun
            unwanted = daemon.told.unwanted.get(m.key)
            if unwanted is not None and not any(
                unwanted <= again <= at for again in daemon.told.retries[job_of(m.key)]
            ):
                continue  # its job was over by the state that was put back, and was not queued again before
            owner = next((a for a in daemon.attempts_of.get(job_of(m.key), {}).values() if a.key == m.key), None)
            if owner is not None and owner.stop is not None and owner.stop.deadline <= at:
                continue  # it was told to save and to stop, and had its time for that
            if owner is None or owner.ended_at is None or owner.ended_at > at:
                yield f"{m.key} was ended at {at} although its attempt went on"


def foreign_machines(result: Result) -> Iterator[str]:
    """R3."""
    for key in result.daemon.told.not_ours:
        yield f"{key} of another install was ended"
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
            if call.offered <= 0 and not cloud.trade.owned:
                yield f"{call.key} was bought at a price that is none: {call.offered}"
            ceiling = ceiling_of(result, job_of(call.key))
            most = effective(call.price_max, cloud, call.disk_gb, call.fee_ppm)
            if most > ceiling * call.gpus:
                yield f"{call.key} may cost {most} an hour, its ceiling is {ceiling} a GPU"


def raised_bids(result: Result) -> Iterator[str]:
    """No bid for a machine can cost more than its job allows, or as much as the same machine on-demand."""
    for cloud in result.clouds:
        for call in cloud.bid_calls:
            ceiling = ceiling_of(result, job_of(call.key)) * call.gpus
            most = effective(call.price, cloud, call.disk_gb, call.fee_ppm)
            if most > ceiling:
                yield f"the bid for {call.key} may cost {most} an hour, its ceiling is {ceiling}"
            if call.price >= call.on_demand:
                yield f"the bid for {call.key} is {call.price}, and on-demand costs {call.on_demand}"


def stalls(result: Result) -> Iterator[str]:
    """None is stopped for a stall whose command gets on, if only by writing a checkpoint."""
    for attempt in result.daemon.attempts_ever.values():
        if attempt.end_reason is EndReason.STALLED and not any(m.hung_at for m in machines_of(result, attempt.key)):
            yield f"{attempt.key} was stopped although it got on: {attempt.end_detail}"


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
    """A machine that lives and works is given up as lost only once two witnesses, or a very long silence, say so."""
    for attempt in result.daemon.attempts_ever.values():
        if attempt.end_reason not in GIVEN_UP or attempt.ended_at is None:
            continue
        for m in machines_of(result, attempt.key):
            if m.is_overdue:
                continue
            if (
                attempt.end_reason is EndReason.PROVISION_TIMEOUT
                and m.quiet_spans
                and attempt.heartbeat_seen_at is None
            ):
                continue  # it never spoke, since what it wrote could not arrive
            if attempt.end_reason is EndReason.PROVISION_TIMEOUT and started_too_late(result, m, attempt):
                continue
            if m.ended_by_us is not None and lived(m, attempt.ended_at) and not excused(result, m, attempt.ended_at):
                yield f"{m.key} was well when it was given up: {attempt.end_detail}"


def started_too_late(result: Result, m: Machine, attempt: Attempt) -> bool:
    """Whether its time for a start was over before it had come up, which it had to do anew after each pause.

    A pause that no list showed, as while its provider does not answer, is part of that time.
    """
    at, rules = attempt.ended_at or result.ended_at, result.daemon.world.policy.providers[attempt.provider]
    came_up = any(min(end, at) - start >= BOOT for start, end in m.spans)
    return not came_up and at - m.born >= rules.provision_timeout


def lived(m: Machine, at: datetime) -> bool:
    """Whether it existed, could compute, had a lease, and its runner had not come to its end."""
    if m.exit_at is not None and m.exit_at <= at:
        return False
    return any(start <= at < end for start, end in m.spans)


def excused(result: Result, m: Machine, at: datetime) -> bool:
    """Whether the daemon was right to give it up: it never spoke, or was silent for long, or silent and not listed."""
    policy, pace = result.daemon.world.policy, result.daemon.pace
    if m.dumb or m.hangs or was_kept(m, at):
        return True
    slack = timedelta(seconds=30) + 2 * pace
    for begun, over in silences(m):
        if not begun <= at <= over + policy.silence_max + slack:
            continue
        # A row that says it is over is a witness beside the silence, although it is wrong.
        others = m.lacking if m.misstated_at is None else [*m.lacking, m.misstated_at]
        not_listed = any(begun - slack <= seen <= at for seen in others)
        if over - begun + slack >= (policy.silence_max if not_listed else policy.silence_limit):
            return True
    return False


def silences(m: Machine) -> list[tuple[datetime, datetime]]:
    """When it could not be heard: what it wrote did not arrive, or it was paused and had not come up again.

    A list that shows a machine which woke up says nothing of how long it was paused while its provider was away.
    """
    paused = [(end, start + BOOT) for (_, end), (start, _) in pairwise(m.spans)]
    found: list[tuple[datetime, datetime]] = []
    for begun, over in sorted([*m.quiet_spans, *paused]):
        if found and begun <= found[-1][1]:
            found[-1] = (found[-1][0], max(over, found[-1][1]))
        else:
            found.append((begun, over))
    return found


def machines_of(result: Result, key: AttemptKey) -> list[Machine]:
    return [m for cloud in result.clouds for m in cloud.by_key.get(key, ())]


def resumes(result: Result) -> Iterator[str]:
    """R5."""
    for job, start, best, most in result.daemon.told.resumes:
        if not best <= start <= most:
            yield f"{job} resumed at {start}, its newest complete checkpoint was at {best}"


def jobs_lost(result: Result) -> Iterator[str]:
    """R4. Every job ends as it must."""
    daemon = result.daemon
    for identity, (job, work) in sorted(result.submitted.items()):
        if identity in daemon.told.lost_jobs:
            continue
        end = daemon.done.get(identity)
        if end is None and may_wait_for_ever(result, identity):
            continue
        if end is None:
            yield f"{identity} never ended: {daemon.world.jobs[identity].state}"
            continue
        may = {JobState.SUCCEEDED} if work.errors <= job.spec.retry_errors else {JobState.FAILED}
        if work.never is not None or work.no_secrets:
            may = {JobState.FAILED}
        if work.hangs is not None:
            may |= {JobState.FAILED}
        if identity in daemon.told.cancels:
            may |= {JobState.CANCELLED}
        schedule = job.spec.schedule
        if job.spec.job_budget is not None or schedule.deadline is not None or schedule.max_duration is not None:
            may |= {JobState.EXPIRED}
        if result.shape.user and work.errors:
            may |= {JobState.SUCCEEDED, JobState.FAILED}  # a retry by the user forgives errors
        if mute_to_the_last(result, job):
            may |= {JobState.FAILED}
        if Hazard.REFUSALS in result.shape.hazards and end.reason.startswith("the image did not start: rejected"):
            may |= {JobState.FAILED}
        if (
            job.spec.resources.nodes_max or job.spec.resources.nodes
        ) > 1 and "starts in a row failed, [retry] starts" in end.reason:
            may |= {JobState.FAILED}  # one machine of four that is lost before its command runs is a failed start
        if end.state not in may:
            yield f"{identity} ended {end.state}: {end.reason}"


def deadlines_that_were_not_kept(result: Result) -> Iterator[str]:
    """No machine is bought for a job that was due, and none expires for that before it was."""
    daemon = result.daemon
    for identity, key, at, was_due in daemon.orders.overdue:
        if not daemon.told.retries.get(identity):
            yield f"{key} was bought at {at}, and its job was due {was_due}"
    for identity, end in sorted(daemon.done.items()):
        due, schedule = due_at(end), end.spec.schedule
        if due is None or daemon.told.retries.get(identity):
            continue
        by_deadline = end.spec.job_budget is None and schedule.max_duration is None
        if end.state is JobState.EXPIRED and by_deadline and (end.ended_at is None or end.ended_at < due):
            yield f"{identity} has EXPIRED at {end.ended_at}, and was due {due}"


def mute_to_the_last(result: Result, job: Job) -> bool:
    """Whether the job saved nothing on any machine, and as many as it may try in a row could not be heard.

    While spotd's own computer sleeps none is heard.
    """
    made = result.daemon.attempts_of.get(job.id, {}).values()
    had = [m for item in sorted(made, key=lambda a: a.id.number) for m in machines_of(result, item.key)]
    last = had[-job.spec.retry_starts :]
    asleep = Hazard.SLEEP in result.shape.hazards
    return not any(m.saved for m in had) and all(m.dumb or m.quiet_spans or asleep for m in last)


def cancels_lost(result: Result) -> Iterator[str]:
    """What the user was told is done: the job is cancelled, or had come to its own end within the grace."""
    for identity, at in sorted(result.daemon.told.cancels.items()):
        end = result.daemon.done.get(identity)
        if end is None:
            continue
        if any(sent > at for attempt, sent in result.daemon.told.sent.items() if attempt.job == identity):
            yield f"{identity} was cancelled at {at} and launched afterwards"


def full_disk(result: Result) -> Iterator[str]:
    """While nothing can be saved nothing is bought, and what has come to its end is ended all the same."""
    shape = result.shape
    quiet = not shape.faults and not shape.outages_per_hour and not shape.crash_rate and not shape.kills_per_hour
    for begun, over in result.daemon.told.full:
        for cloud in result.clouds:
            for call in cloud.launch_calls:
                if begun + CALL_TIMEOUT + timedelta(seconds=10) < call.at < over:
                    yield f"{call.key} was bought at {call.at}, and nothing could be saved from {begun} to {over}"
            for m in cloud.machines.values() if quiet and shape.hazards == {Hazard.FULL_DISK} else ():
                late = m.exit_at is not None and begun < m.exit_at < min(over, m.died or over) - ENDED_WITHIN
                if late:
                    yield f"{m.key} came to its end at {m.exit_at}, on a full disk, and was left until {m.died}"


def machines_max(result: Result) -> Iterator[str]:
    most = result.daemon.world.policy.machines_max
    told = result.daemon.told
    for cloud in result.clouds:
        unknown = [m for m in cloud.machines.values() if told.restored and out_of_mind(result, m)]
        for call in cloud.launch_calls:
            lived = (m for m in unknown if m.born < call.at and (m.died is None or call.at <= m.died))
            if call.alive_before - sum(m.offer.nodes for m in lived) + call.nodes > most:
                yield f"{call.key} was bought while {call.alive_before} machines lived, {most} are allowed"


def gang_sizes(result: Result) -> Iterator[str]:
    """Each launch is of as many machines as its job accepts, and its attempt was agreed for just as many."""
    for cloud in result.clouds:
        for call in cloud.launch_calls:
            wanted = result.submitted[job_of(call.key)][0].spec.resources
            if not wanted.nodes <= call.nodes <= (wanted.nodes_max or wanted.nodes):
                yield f"{call.key} was bought with {call.nodes} machines, {wanted.nodes_words} were asked for"
    for attempt, machine, _ in matched(result):
        before = {gpus for _, gpus in machine.counts}  # an attempt that is over learns of no further one
        is_unheard = attempt.quote.offer.gpu_count in before and not attempt.state.counts
        if attempt.quote.offer.nodes != machine.offer.nodes and not is_unheard:
            yield f"{attempt.key} has {machine.offer.nodes} machines, {attempt.quote.offer.nodes} were agreed"


CHECKS: Final = (
    said_by_the_core,
    forgotten_machines,
    foreign_machines,
    launches,
    raised_bids,
    stalls,
    doubles,
    healthy_machines_killed,
    needed_machines_ended,
    resumes,
    jobs_lost,
    deadlines_that_were_not_kept,
    cancels_lost,
    late,
    machines_max,
    gang_sizes,
    kept_machines,
    launches_bounded,
    rows_bounded,
    ambiguous_cost,
    spending,
    paid_for_nothing,
    above_ceiling,
    below_ceiling,
    budgets,
    expired_too_soon,
    full_disk,
    *RULES,
    *STOPS,
    *RECEIPTS,
    *OWN_RULES,
    *REUSE,
    *UNFIT,
)
