"""What must hold of own machines: for how long they are waited for, what is taken, and how they are left."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.deadlines import waiting_time
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import GOT_SOMEWHERE
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import VerdictKind
from tests.sim.hazards import Hazard
from tests.sim.machines import LaunchCall
from tests.sim.own import OwnCloud
from tests.sim.run import Result
from tests.sim.schedules import DECIDED_BEFORE, MISDATED, attempts, machine_of

SECOND: Final = timedelta(seconds=1)
BOOTED: Final = timedelta(minutes=4)
GATED: Final = frozenset(
    {
        VerdictKind.PAUSED,
        VerdictKind.BACKING_OFF,
        VerdictKind.RECONCILING,
        VerdictKind.MACHINES,
        VerdictKind.LAUNCH_LIMIT,
        VerdictKind.WINDOW,
        VerdictKind.AFTER,
        VerdictKind.ARRAY,
        VerdictKind.DEADLINE,
        VerdictKind.BUDGET_JOB,
        VerdictKind.RUNNING,
        VerdictKind.STOPPING,
        VerdictKind.HELD,
    }
)
"""What keeps any machine from a job, so that it does not wait for an own one."""


def own_clouds_of(result: Result) -> list[OwnCloud]:
    return [cloud for cloud in result.clouds if isinstance(cloud, OwnCloud)]


def is_judged(result: Result) -> bool:
    """Whether the daemon's dates and what it remembers are what happened."""
    return Hazard.OWN in result.shape.hazards and not result.shape.hazards & MISDATED


# --- the wait ---


def rented_too_soon(result: Result) -> Iterator[str]:
    """Nothing is rented before the job has waited in full for an own machine that it could expect."""
    if not is_judged(result):
        return
    for one in result.daemon.own.rented:
        job = result.submitted[one.attempt.job][0]
        if one.limit <= timedelta(0) or not one.expected or job.spec.schedule.deadline is not None:
            continue
        ids = [one.attempt.job]
        if job.array is not None:
            ids = [i for i, (other, _) in result.submitted.items() if other.array is not None]
        begun = [at for i in ids if (at := waits_since(result, i, one.at)) is not None]
        waited = max((waiting_time(job, at, one.at) for at in begun), default=timedelta(0))
        if waited < one.limit - SECOND:
            yield f"{one.attempt} was rented at {one.at} after {waited} of {one.limit}, and {one.expected}"


def waits_since(result: Result, job: JobId, until: datetime) -> datetime | None:
    """Since when the job waits: as long as those of its array that waited when it first did.

    An own machine that gets one of them further afterwards begins the wait of that one anew (world 9602036).
    """
    begun = wait_begun(result, job, until)
    is_first = not any(at <= until for at in progress(result, job, certain=True))
    if begun is None or begun >= until or not is_first or result.submitted[job][0].array is None:
        return begun
    others = [i for i, (other, _) in result.submitted.items() if other.array is not None and i != job]
    return min([begun, *(at for i in others if (at := waits_since(result, i, begun)) is not None)])


def wait_begun(result: Result, job: JobId, until: datetime) -> datetime | None:
    """The first moment since which nothing but the market may have kept a machine from the job."""
    begun = max([result.begun_at, *(at for at in progress(result, job, certain=True) if at <= until)])
    for span in result.daemon.own.verdicts[job]:
        if span.until >= begun and span.kind not in GATED:
            return max(begun, span.since)
    return None


def progress(result: Result, job: JobId, *, certain: bool) -> list[datetime]:
    """When the wait was to begin anew: after an own machine got the job further, and after a retry by its user."""
    found = list(result.daemon.told.retries.get(job, ()))
    own = (item for item in result.daemon.attempts_of.get(job, {}).values() if item.quote.is_own)
    found += [item.ended_at for item in own if item.ended_at and got_further(result, item, certain=certain)]
    return sorted(found)


def got_further(result: Result, item: Attempt, *, certain: bool) -> bool:
    if item.running_at is not None and item.ended_at is not None and item.ended_at - item.running_at >= GOT_SOMEWHERE:
        return True
    m = machine_of(result, item)
    return not certain and m is not None and bool(m.saved)


def waited_too_long(result: Result) -> Iterator[str]:
    """No job waits for an own machine for longer than is stated, over launches that come to nothing."""
    if not is_judged(result):
        return
    for job, spans in sorted(result.daemon.own.verdicts.items()):
        begun: datetime | None = None
        again = progress(result, job, certain=False)
        for span in spans:
            if span.kind is not VerdictKind.OWN:
                continue
            done = again[: bisect_right(again, span.until)]
            if begun is None or (done and done[-1] >= begun):
                begun = span.since if not done else max(span.since, done[-1])
            waited = waiting_time(result.submitted[job][0], begun, span.until)
            if waited >= max(span.limit, SECOND) or span.limit <= timedelta(0):
                yield f"{job} waited {waited} for an own machine until {span.until}, {span.limit} are allowed"


# --- what is taken and left ---


def left_for_a_price(result: Result) -> Iterator[str]:
    """A job on an own machine is not moved to a rented one while it waits for own ones at all."""
    own = {cloud.name for cloud in own_clouds_of(result)}
    for left in result.daemon.own.left:
        is_move = left.reason in {EndReason.MIGRATED, EndReason.OUTBID}
        if is_move and left.limit > timedelta(0) and left.target not in own:
            yield f"{left.attempt} was left at {left.at} for {left.target or left.detail}"


def own_launches(result: Result) -> Iterator[str]:
    """No launch is sent to what somebody else has from the first moment, its owner wants, or our own job has."""
    for cloud in own_clouds_of(result):
        rules = result.daemon.world.policy.providers.get(cloud.name)
        for call in cloud.launch_calls:
            item = attempt_of(result, call)
            if item is None or rules is None:
                continue
            one, _ = cloud.place_of(item.quote.offer)
            if one.is_taken:
                yield f"{call.key} was sent to {one.name}, which others have without end"
            may = rules.quote_ttl + DECIDED_BEFORE
            for name, begun, over in cloud.hours:
                if name == one.name and begun + may < call.at < min(over, result.calm_at):
                    yield f"{call.key} was sent to {one.name} at {call.at}, its owner's since {begun}"
            if cloud.trade.queue_wait is None and not result.shape.hazards & MISDATED:
                yield from doubled_place(result, cloud, call, item)


def attempt_of(result: Result, call: LaunchCall) -> Attempt | None:
    found = result.daemon.attempts_ever.values()
    return next((item for item in found if item.key == call.key and item.quote.offer.gpu_price == call.offered), None)


def doubled_place(result: Result, cloud: OwnCloud, call: LaunchCall, item: Attempt) -> Iterator[str]:
    """Whether the places that it asks for are those that our jobs have, as far as the daemon knew."""
    one, count = cloud.place_of(item.quote.offer)
    held = []
    for other in attempts(result):
        if other.provider != cloud.name or other.id == item.id or cloud.place_of(other.quote.offer)[0] is not one:
            continue
        m = machine_of(result, other)
        ends = [other.ended_at, None if m is None else m.exit_at or m.died]
        over = min((at for at in ends if at is not None), default=None)
        if other.intended_at <= item.intended_at and (over is None or over > call.at):
            held.append(other)
    used = sum(other.quote.offer.gpu_count for other in held)
    if used + count > one.places:
        yield f"{call.key} asked for {count} of {one.places} places of {one.name}, and {used} are had by {held[0].key}"


def owners_hours(result: Result) -> Iterator[str]:
    """What is announced leaves our jobs their time to save, and nothing computes once its owner has the computer."""
    told = result.daemon.told
    for cloud in own_clouds_of(result):
        for m in cloud.machines.values():
            for name, begun, over in cloud.hours:
                late = [end for start, end in m.spans if start < min(over, result.calm_at) and end > begun + SECOND]
                if cloud.computer_of(m).name == name and late and m.queued_since is None and m.born < begun:
                    yield f"{m.key} computed until {late[0]}, its owner had {name} from {begun}"
        for item in attempts(result):
            own = machine_of(result, item)
            if own is None or own.noticed_at is None or own.ended_by_us is None or item.provider != cloud.name:
                continue
            at, due = own.ended_by_us, own.notice_at or own.ended_by_us
            worked = any(start + BOOTED < at < end + SECOND for start, end in own.spans)
            went_on = own.exit_at is None or own.exit_at > at
            is_ordered = item.stop is not None or item.id.job in told.cancels or item.end_reason is EndReason.CANCELLED
            forgot = any(at <= back for _, back in told.restored) or item.id in told.forgotten
            if (
                own.noticed_at <= at < due
                and worked
                and went_on
                and not (is_ordered or forgot or own.quiet_spans or own.dumb)
            ):
                yield f"{own.key} was ended at {at}, it had from {own.noticed_at} to {due} to save"


def own_prices(result: Result) -> Iterator[str]:
    """An own machine is booked and quoted at its owner's price, as own, and with nothing on top."""
    for cloud in own_clouds_of(result):
        for item in attempts(result):
            if item.provider != cloud.name:
                continue
            one, count = cloud.place_of(item.quote.offer)
            if item.quote.price.total < one.price * count or item.quote.price.gpu != one.price * count:
                yield f"{item.key} was agreed at {item.quote.price.total}, its owner asks {one.price * count}"
            is_toggled = Hazard.OWN_RELOADS in result.shape.hazards
            if not item.quote.is_own and not is_toggled:
                yield f"{item.key} is an own machine, and was taken as a rented one"
        for other in attempts(result):
            if other.quote.is_own and not result.daemon.clouds[other.provider].trade.owned:
                yield f"{other.key} is a rented machine, and was taken as an own one"


OWN_RULES: Final = (
    rented_too_soon,
    waited_too_long,
    left_for_a_price,
    own_launches,
    owners_hours,
    own_prices,
)
