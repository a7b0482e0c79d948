"""What must hold of windows, chains, arrays, priorities, moves, bids and hangs, judged by what really happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final
from zoneinfo import ZoneInfo

from spotd.core.bids import RAISE_HELD_EVERY, SPEAKS_WITHIN
from spotd.core.domain.attempts import SHARE, Attempt
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason
from spotd.core.enforcement import DWELL as VICTIM_DWELL
from spotd.core.host_reports import AHEAD_MAX, LAPSES_AFTER
from spotd.core.plan_builder import PREPARATION
from spotd.core.relocation import DWELL, MARGIN_PERCENT
from spotd_jobs.spec.model import Schedule, Window
from spotd_providers.contract.values import AttemptKey, shares
from tests.sim.daemon import has_succeeded, outputs_of
from tests.sim.hazards import Hazard
from tests.sim.machines import BOOT, Machine
from tests.sim.money import job_of
from tests.sim.run import Result

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
SAVING: Final = frozenset(
    {EndReason.MIGRATED, EndReason.MADE_ROOM, EndReason.WINDOW_CLOSED, EndReason.STALLED, EndReason.CANCELLED}
)
"""Why machines that are well are ordered to save and stop."""
MISDATED: Final = frozenset({Hazard.CLOCK_STEPS, Hazard.RESTORED})
"""With one of these the daemon's dates, or what it remembers, are not what happened."""
HELD_UP: Final = frozenset(
    {Hazard.FULL_DISK, Hazard.SLEEP, Hazard.CLOCK_STEPS, Hazard.RESTORED, Hazard.AWAY_AT_BARGAINS}
)
ENDED_WITHIN: Final = timedelta(minutes=5)
RAISES_AN_HOUR: Final = 60
DECIDED_BEFORE: Final = timedelta(minutes=3)
"""How long a call may have waited for its turn."""


def machines(result: Result) -> Iterator[tuple[JobId, Machine]]:
    for cloud in result.clouds:
        for m in cloud.machines.values():
            job = job_of(m.key)
            if job in result.submitted:
                yield job, m


def attempts(result: Result) -> Iterator[Attempt]:
    """Those that the newest state knows."""
    forgotten = result.daemon.told.forgotten
    yield from (item for i, item in result.daemon.attempts_ever.items() if i not in forgotten)


def machine_of(result: Result, item: Attempt) -> Machine | None:
    found = [m for cloud in result.clouds for m in cloud.by_key.get(item.key, ())]
    return found[0] if len(found) == 1 else None


def is_quiet(result: Result) -> bool:
    """Whether machines can be reached and the daemon is there, so that what it orders happens soon."""
    shape = result.shape
    is_up = not (shape.outages_per_hour or shape.kills_per_hour or shape.crash_rate)
    return shape.reachable and is_up and not shape.hazards & HELD_UP


# --- windows ---


def out_of_window(result: Result) -> Iterator[str]:
    """Nothing is bought outside of a job's windows, and no machine of it computes or bills there for long."""
    policy, told = result.daemon.world.policy, result.daemon.told
    if Hazard.WINDOWS not in result.shape.hazards or Hazard.CLOCK_STEPS in result.shape.hazards:
        return
    for cloud in result.clouds:
        for call in cloud.launch_calls:
            found = result.submitted.get(job_of(call.key))
            if found is not None and not is_open(found[0].spec.schedule, call.at):
                yield f"{call.key} was bought at {call.at}, outside of its windows"
    for job, m in machines(result):
        spec = result.submitted[job][0].spec
        shut = first_shut(spec.schedule, m.born, m.exit_at or m.died or result.ended_at)
        if shut is None:
            continue
        # A host that cannot be told ends itself when its lease is over, and may be uploading then.
        may = policy.lease + spec.checkpoint.stop_grace + policy.save_allowance + ENDED_WITHIN
        may += sum((over - since for since, over in told.full if over > shut), timedelta(0))
        ends = [(begin, min(end, m.exit_at or end)) for begin, end in m.spans]
        computed = [end for begin, end in ends if begin < end]  # one that woke after its end computed nothing
        if computed and max(computed) > shut + may and not is_open(spec.schedule, max(computed) - may):
            yield f"{m.key} computed until {max(computed)}, its window closed {shut}"
        late = (m.died or result.ended_at) - shut
        if is_quiet(result) and late > spec.checkpoint.stop_grace + policy.save_allowance + ENDED_WITHIN:
            yield f"{m.key} billed for {late} after its window had closed {shut}"


def is_open(schedule: Schedule, at: datetime) -> bool:
    """Whether clocks of the zone show a time of a window; around a change of them, an hour ago counts as well."""
    if not schedule.windows:
        return True
    zone = ZoneInfo(schedule.timezone or "UTC")
    shown = [at.astimezone(zone)]
    if (at - 3 * HOUR).astimezone(zone).utcoffset() != (at + 3 * HOUR).astimezone(zone).utcoffset():
        shown += [(at - HOUR).astimezone(zone), (at + HOUR).astimezone(zone)]
    return any(shows(window, local) for window in schedule.windows for local in shown)


def shows(window: Window, local: datetime) -> bool:
    minute = local.hour * 60 + local.minute
    if window.start_min < window.end_min:
        return local.weekday() in window.days and window.start_min <= minute < window.end_min
    begins_today = local.weekday() in window.days and minute >= window.start_min
    return begins_today or ((local.weekday() - 1) % 7 in window.days and minute < window.end_min)


def first_shut(schedule: Schedule, begun: datetime, over: datetime) -> datetime | None:
    """The first minute of the span in which no window is open."""
    at = begun
    while at < over:
        if not is_open(schedule, at):
            return at
        at += MINUTE
    return None


# --- chains, arrays and priorities ---


def successors(result: Result) -> Iterator[str]:
    """No machine is bought for a job before all others have succeeded that it waits for; it reads what they left."""
    for cloud in result.clouds:
        for call in cloud.launch_calls:
            found = result.submitted.get(job_of(call.key))
            chain = None if found is None else found[0].chain
            for before in () if chain is None else chain.after:
                if not any(has_succeeded(m) and m.exit_at and m.exit_at <= call.at for m in of_job(result, before)):
                    yield f"{call.key} was bought at {call.at}, and {before} had not succeeded"
    for at, job in result.daemon.told.inputs:
        read = () if job.chain is None or job.chain.inputs is None else job.chain.inputs
        names = {one.job for one in read}
        for before in () if job.chain is None else job.chain.after:
            left = result.submitted[before][1].outputs
            if bool(left) != (before in names):
                yield f"at {at} {job.id} was to read {sorted(names)}, and {before} had left {left} bytes"
        for one in read:
            if one.sha256 not in {outputs_of(m) for m in of_job(result, one.job) if has_succeeded(m)}:
                yield f"at {at} {job.id} was to read {one.sha256} of {one.job}"


def of_job(result: Result, job: JobId) -> list[Machine]:
    return [m for other, m in machines(result) if other == job]


def arrays(result: Result) -> Iterator[str]:
    """No more jobs of an array have machines at one time than are allowed."""
    if Hazard.RESTORED in result.shape.hazards:
        return  # a state that is put back finds machines that it never counted
    changes: list[tuple[datetime, int]] = []
    most: int | None = None
    for item in attempts(result):
        found = result.submitted.get(item.id.job)
        task = None if found is None else found[0].array
        if task is None or task.at_once is None:
            continue
        most = task.at_once
        changes += [(item.intended_at, 1), (item.ended_at or result.ended_at, -1)]
    held = 0
    for at, change in sorted(changes):
        held += change
        if most is not None and held > most:
            yield f"{held} jobs of the array had machines at {at}, {most} are allowed"


def preempted(result: Result) -> Iterator[str]:
    """A machine is stopped only for a job of higher priority that asks for it, and not soon after its launch."""
    if Hazard.RESTORED in result.shape.hazards:
        return
    stops: defaultdict[JobId, list[datetime]] = defaultdict(list)
    for item in attempts(result):
        stop = item.stop
        if stop is None or stop.reason is not EndReason.MADE_ROOM or item.id.job not in result.submitted:
            continue
        own = result.submitted[item.id.job][0].spec
        name = stop.detail.partition(",")[0]
        of_name = [job.spec for job, _ in result.submitted.values() if job.name == name]
        if not any(spec.priority > own.priority and spec.schedule.preempt for spec in of_name):
            yield f"{item.key}, priority {own.priority}, made room for {stop.detail}"
        if own.schedule.deadline is not None:
            yield f"{item.key} made room and has a deadline"
        if stop.ordered_at - item.intended_at < VICTIM_DWELL:
            yield f"{item.key} made room {stop.ordered_at - item.intended_at} after its launch"
        stops[item.id.job].append(stop.ordered_at)
    for job, at in sorted(stops.items()):
        if any(second - first < VICTIM_DWELL for first, second in pairwise(sorted(at))):
            yield f"{job} made room twice within {VICTIM_DWELL}"


# --- machines that run beside the market ---


def ended_unsaved(result: Result) -> Iterator[str]:
    """A machine that is well and is stopped has saved, or has had its time for that, before it is ended."""
    told = result.daemon.told
    for item in attempts(result):
        stop, m = item.stop, machine_of(result, item)
        if stop is None or m is None or m.ended_by_us is None or stop.reason not in SAVING or not stop.flush:
            continue
        at = m.ended_by_us
        if stop.reason is EndReason.CANCELLED and item.running_at is None:
            continue  # its launch had no answer: nothing of it was known
        if any(at <= back for _, back in told.restored) or m.quiet_spans or m.dumb:
            continue
        went_on = m.exit_at is None or m.exit_at > at
        decided = min(at, item.ended_at or at)  # its end may be tried for a while, and it may begin to work meanwhile
        begins = BOOT + m.measured  # while it is measured nothing of the job is there
        ran = any(start + begins < decided - timedelta(seconds=1) < end for start, end in m.spans)
        if (
            went_on
            and ran
            and at + result.daemon.off < stop.deadline
            and Hazard.CLOCK_STEPS not in result.shape.hazards
        ):
            yield f"{m.key} was ended at {at}, it had until {stop.deadline} to save ({stop.reason})"


def moved(result: Result) -> Iterator[str]:
    """Moves are for less money, rare, and never of a job that has a deadline or windows."""
    told, most = result.daemon.told, result.daemon.world.policy.moves_max
    by_job: defaultdict[JobId, list[datetime]] = defaultdict(list)
    for at, left, here, there in told.moves:
        by_job[left.job].append(at)
        schedule = result.submitted[left.job][0].spec.schedule
        if schedule.deadline is not None or schedule.windows:
            yield f"{left} was moved, and has a plan of its own"
        if there * 100 > here * (100 - MARGIN_PERCENT) and not result.submitted[left.job][0].spec.resources.cpus:
            yield f"{left} was moved from {here} to {there} an hour"
    for job, times in sorted(by_job.items()):
        if Hazard.RESTORED not in result.shape.hazards and len(times) > most:
            yield f"{job} was moved {len(times)} times, {most} are allowed"
        if not result.shape.hazards & MISDATED and any(b - a < DWELL for a, b in pairwise(times)):
            yield f"{job} was moved twice within {DWELL}: {times}"


def bids_bounded(result: Result) -> Iterator[str]:
    """A bid is lowered seldom and by half at the most, and a call for one waits for what the one before did."""
    if result.shape.hazards & MISDATED:
        return
    for cloud in result.clouds:
        calls: defaultdict[AttemptKey, list[datetime]] = defaultdict(list)
        before = {call.key: (call.at, call.price_max, call.gpus) for call in cloud.launch_calls}
        handed = (m for m in cloud.machines.values() if m.first_bid)
        before |= {m.key: (m.born, m.first_bid, shares(m.offer.gpu_count)) for m in handed}
        for call in cloud.bid_calls:
            calls[call.key].append(call.at)
            at, price, gpus = before[call.key]
            price = price * call.gpus // gpus  # of several, some may have been left out since
            if call.price < price and (call.at - at < DWELL - DECIDED_BEFORE or 2 * call.price < price):
                yield f"the bid for {call.key} went from {price} to {call.price} after {call.at - at}"
            before[call.key] = call.at, call.price, call.gpus
        for key, times in sorted(calls.items()):
            if any(b - a < RAISE_HELD_EVERY / 2 for a, b in pairwise(times)):
                yield f"two bids were placed for {key} at once"
            if any(b - a < HOUR for a, b in zip(times, times[RAISES_AN_HOUR:], strict=False)):
                yield f"{len(times)} bids were placed for {key}"


def held(result: Result) -> Iterator[str]:
    """An outbid machine is kept as long as its owner allows, and then for what it takes to end it."""
    policy = result.daemon.world.policy
    if not is_quiet(result):
        return
    most = policy.hold_max + SPEAKS_WITHIN + ENDED_WITHIN + 3 * result.daemon.pace
    for _, m in machines(result):
        ends = [*(start for start, _ in m.spans[1:]), *([m.died] if m.died is not None else [])]
        for (_, paused), again in zip(m.spans, ends, strict=False):
            if again - paused > most:
                yield f"{m.key} was paused from {paused} to {again}"


def hung(result: Result) -> Iterator[str]:
    """A command that gets no further is stopped in time, and none is that gets on."""
    policy = result.daemon.world.policy
    for item in attempts(result):
        m, stop = machine_of(result, item), item.stop
        if (
            m is None
            or stop is None
            or stop.reason is not EndReason.STALLED
            or Hazard.CLOCK_STEPS in result.shape.hazards
        ):
            continue
        rules = result.submitted[item.id.job][0].spec.watchdog
        limits = [rules.no_progress] if rules.no_progress is not None else []
        limits += [rules.window] if rules.min_gpu_util is not None else []
        if m.hung_at is not None and stop.ordered_at - m.hung_at < min(limits) - MINUTE:
            yield f"{m.key} hung since {m.hung_at} and was stopped {stop.ordered_at}: {stop.detail}"
    for job, m in machines(result) if is_quiet(result) else ():
        if m.hung_at is None:
            continue
        rules = result.submitted[job][0].spec.watchdog
        limit = max(
            [*([rules.no_progress] if rules.no_progress else []), *([rules.window] if rules.min_gpu_util else [])]
        )
        # What lies between two reads counts as a share of the limit at the most, and a slow world reads seldom.
        slower = max(1.0, 2 * result.daemon.pace / (limit / SHARE))
        may = slower * PREPARATION * limit + policy.save_allowance + timedelta(minutes=15) + 10 * result.daemon.pace
        if Hazard.LAPSES in result.shape.hazards:
            may += AHEAD_MAX + LAPSES_AFTER  # what is about to be taken is left alone
        spans = m.spans if m.died is not None else [*m.spans, (m.since, result.ended_at)]
        for start, end in spans:  # where it woke, the command began anew
            if end - max(m.hung_at, start) > may:
                yield f"{m.key} hung from {max(m.hung_at, start)} to {end}"


RULES: Final = (
    out_of_window,
    successors,
    arrays,
    preempted,
    ended_unsaved,
    moved,
    bids_bounded,
    held,
    hung,
)
