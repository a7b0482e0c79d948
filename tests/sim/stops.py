"""What must hold of orders to machines that run, and of paid calls, by what the daemon could know when it gave them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import EndReason
from spotd_providers.contract.values import Loss
from tests.sim.machines import HEARTBEAT, Machine
from tests.sim.money import job_of, learnt
from tests.sim.orders import Ordered
from tests.sim.run import Result
from tests.sim.schedules import is_quiet, machine_of

A_CYCLE: Final = timedelta(seconds=10)
KNOWN_AFTER: Final = timedelta(minutes=3)
"""An outage that is as old is known."""
HELD_AWAY_MAX: Final = timedelta(minutes=34)
"""An outbid machine that was held for so long beyond its time is given up though its provider does not answer."""
IN_VAIN_MAX: Final = 3
"""Voluntary stops for one target that refuses each time, in `IN_VAIN_WITHIN`."""
IN_VAIN_WITHIN: Final = timedelta(hours=8)
FLIPS_AN_HOUR: Final = 12
"""Prices move every five minutes, and each time a job may wait for something else."""
FREED_WITHIN: Final = timedelta(minutes=6)
HOUR: Final = timedelta(hours=1)
LAST_SIGN: Final = 2 * HEARTBEAT
"""A machine may give its last sign of life so long before its end."""


def contradictions(result: Result) -> Iterator[str]:
    """No machine is left while a change of its bid is under way, nor within a cycle of one.

    A copy of the state that was put back since may know nothing of the order (world 9601050).
    """
    back = [at for _, at in result.daemon.told.restored]
    for stop in result.daemon.orders.stops:
        if stop.reason not in {EndReason.MIGRATED, EndReason.OUTBID}:
            continue
        if stop.is_bid_open:
            yield f"{stop.key} was left at {stop.at} while its bid was changed: {stop.detail}"
        elif stop.bid_at is not None and stop.at - stop.bid_at < A_CYCLE:
            yield f"{stop.key} was left {stop.at - stop.bid_at} after its bid was changed: {stop.detail}"
        after = (at for at in result.daemon.orders.bids[stop.key] if at >= stop.at)
        if (at := next(after, None)) is not None and not any(stop.at <= one <= at for one in back):
            yield f"the bid for {stop.key} was changed at {at}, and it was left at {stop.at}"


def of_one_page(result: Result) -> Iterator[str]:
    """No machine that is well is stopped for a price that one page alone has stated."""
    for stop in result.daemon.orders.stops:
        if stop.is_of_one_page and stop.is_well:
            yield f"{stop.key} was stopped at {stop.at} for a price of one page: {stop.detail}"


def of_one_row(result: Result) -> Iterator[str]:
    """No attempt ends as outbid or taken back whose machine computed then, and had never been halted."""
    for item in result.daemon.attempts_ever.values():
        if item.end_reason not in {EndReason.OUTBID, EndReason.PREEMPTED} or item.ended_at is None:
            continue
        m, at = machine_of(result, item), item.ended_at
        if m is None or m.notice_at is not None or item.stop is not None or (m.exit_at is not None and m.exit_at <= at):
            continue
        first = m.spans[0] if m.spans else (m.since, result.ended_at)
        if m.loss is Loss.PREEMPTED and m.died is not None and timedelta(0) <= m.died - at <= LAST_SIGN:
            continue  # it was taken for lost, which is dated by its last sign of life, and corrected later
        if m.alive_at is not None and first[0] <= at < first[1]:
            yield f"{m.key} computed when its attempt ended at {at}: {item.end_reason} {item.end_detail}"


def while_away(result: Result) -> Iterator[str]:
    """No machine that is well is stopped while its job could not save, or its provider could not end it."""
    for stop in result.daemon.orders.stops:
        if not stop.is_well:
            continue
        held_max = result.daemon.world.policy.hold_max + HELD_AWAY_MAX
        is_given_up = stop.held_since is not None and stop.at - stop.held_since >= held_max
        provider_away_since = None if is_given_up else stop.provider_away_since
        for what, since in (("store", stop.store_away_since), ("provider", provider_away_since)):
            if since is not None and stop.at - since >= KNOWN_AFTER:
                yield f"{stop.key} was stopped at {stop.at}, its {what} was away since {since}: {stop.detail}"


def in_vain(result: Result) -> Iterator[str]:
    """Refusals bound how often machines are stopped for the same machine that cannot be had."""
    by_target: defaultdict[tuple[str, str], list[datetime]] = defaultdict(list)
    bought = machines_by_job(result)
    for stop in result.daemon.orders.stops:
        target = target_of(result, stop)
        if target is None or not stop.is_well:
            continue
        job = stop.attempt.job if stop.reason is EndReason.MIGRATED else owner_of_name(result, target)
        is_for_room = stop.reason is EndReason.MADE_ROOM
        if is_for_room and job is not None and any(stop.at < m.born < stop.at + HOUR for m in bought[job]):
            continue  # it got what was freed for it
        by_target[str(stop.attempt.job) if stop.reason is EndReason.MIGRATED else "", target].append(stop.at)
    for (job_name, target), times in sorted(by_target.items()):
        for first, last in zip(times, times[IN_VAIN_MAX:], strict=False):
            if last - first < IN_VAIN_WITHIN:
                who = f"{job_name} was" if job_name else "machines were"
                yield f"{who} stopped {IN_VAIN_MAX + 1} times from {first} to {last} in vain, for {target}"
                break


def target_of(result: Result, stop: Ordered) -> str | None:
    """For what it was stopped, if that is never to be had, or is a job that may get no machine."""
    if stop.reason is EndReason.MADE_ROOM:
        return stop.detail.partition(",")[0]
    if stop.reason is not EndReason.MIGRATED or stop.at >= result.calm_at:
        return None
    if stop.detail.startswith("to on-demand"):
        fixed = [name for name in result.closed if name.startswith("fixed")]
        return "on-demand" if fixed else None
    return stop.target if stop.target in result.closed else None


def owner_of_name(result: Result, name: str) -> JobId | None:
    return next((i for i, (job, _) in result.submitted.items() if job.name == name), None)


def machines_by_job(result: Result) -> defaultdict[JobId, list[Machine]]:
    found: defaultdict[JobId, list[Machine]] = defaultdict(list)
    for cloud in result.clouds:
        for m in cloud.machines.values():
            found[job_of(m.key)].append(m)
    return found


def allowed_calls(result: Result) -> Iterator[str]:
    """Nothing is bought or bid above the ceiling of that moment, by the fee of that moment, or against its budget."""
    for call in result.daemon.orders.calls:
        if call.most > call.ceiling:
            yield f"the call for {call.key} at {call.at} may cost {call.most}, its ceiling was {call.ceiling} then"
        if call.refused:
            yield f"{call.key} was called for at {call.at} although {call.refused}"


def held_and_gone(result: Result) -> Iterator[str]:
    """A held machine that is gone, and that complete lists lack, keeps its job no longer."""
    if not is_quiet(result):
        return
    for item in result.daemon.attempts_ever.values():
        m = machine_of(result, item)
        if m is None or m.vanished_at is None:
            continue
        cloud = result.daemon.clouds[item.provider]
        known = learnt(cloud, m.vanished_at, result.ended_at)
        free = item.ended_at or result.ended_at
        may = FREED_WITHIN + result.daemon.world.policy.silence_max + 3 * result.daemon.pace
        if free - known > may:
            yield f"{m.key} was destroyed at {m.vanished_at}, lists lack it since {known}, and its attempt ended {free}"


def flips(result: Result) -> Iterator[str]:
    """A job that waits does not change again and again what it says that it waits for."""
    for job, times in sorted(result.daemon.orders.flips.items()):
        for first, last in zip(times, times[FLIPS_AN_HOUR:], strict=False):
            if last - first < HOUR:
                yield f"{job} went {FLIPS_AN_HOUR + 1} times from a price back to its turn from {first} to {last}"
                break


STOPS: Final = (
    contradictions,
    of_one_page,
    of_one_row,
    while_away,
    in_vain,
    allowed_calls,
    held_and_gone,
    flips,
)
