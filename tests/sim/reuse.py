"""What must hold of machines that pass from a job that is done to the next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, ChargePart
from spotd.core.domain.states import EndReason
from spotd.core.handover import CONFIRMED_WITHIN
from spotd_providers.contract.values import InstanceRef
from tests.sim.hazards import Hazard
from tests.sim.machines import Machine
from tests.sim.run import Result

ENDED_WITHIN: Final = timedelta(minutes=10)
"""A machine that waited long enough is gone so long afterwards, where everything can be reached."""
TIME: Final = frozenset({ChargePart.MACHINE, ChargePart.DISK})


def one_at_a_time(result: Result) -> Iterator[str]:
    """No instant of a machine is booked for two attempts."""
    spans: defaultdict[InstanceRef, list[tuple[datetime, datetime, AttemptId]]] = defaultdict(list)
    shared = {taken.next for taken in result.daemon.told.handovers}
    refs = {item.ref for i, item in result.daemon.attempts_ever.items() if i in shared}
    for charge in result.daemon.told.charges:
        item = result.daemon.attempts_ever[charge.attempt]
        if item.ref in refs and item.ref is not None and charge.part in TIME and charge.start < charge.end:
            spans[item.ref].append((charge.start, charge.end, charge.attempt))
    if result.daemon.told.restored or Hazard.CLOCK_STEPS in result.shape.hazards:
        return  # what a former life booked is not on record any more, or by other dates
    for ref, found in spans.items():
        for (_, end, first), (start, _, second) in pairwise(sorted(found, key=lambda span: span[:2])):
            if start < end and first != second:
                yield f"{ref.instance_id} is booked for {first} and {second} from {start} to {end}"


def waiting_bounded(result: Result) -> Iterator[str]:
    """No machine waits longer than its owner allows, or for a job that may not take it over."""
    if not result.shape.reachable:
        return
    most = result.daemon.world.policy.reuse_wait + ENDED_WITHIN + 3 * result.daemon.pace
    for cloud in result.clouds:
        for m in cloud.machines.values():
            if m.exit_at is not None and m.died is not None and m.task.reuse is not None and m.died - m.exit_at > most:
                yield f"{m.key} came to its end at {m.exit_at} and was there until {m.died}"


def handed_to_whom_it_fits(result: Result) -> Iterator[str]:
    """A machine goes to another job of the same owner and image that takes it, has room, and accepts its price."""
    daemon = result.daemon
    for taken in daemon.told.handovers:
        item = daemon.attempts_ever[taken.next]
        job = result.submitted[taken.next.job][0]
        if taken.former is not None and taken.former.job == taken.next.job and job.spec.replace_within:
            continue  # its healthy machines go on without their first one
        if not job.spec.reuse:
            yield f"{item.key} took over a machine, which its job forbids"
        if item.quote.price.per_gpu > item.ceiling:
            yield f"{item.key} took over a machine above its ceiling"
        if taken.disk_gb < job.spec.resources.disk_gb:
            yield f"{item.key} asks for {job.spec.resources.disk_gb} GB of disk, its machine has {taken.disk_gb}"
        if not taken.is_clean:
            yield f"{item.key} took over a machine on which its former job left something"
        if taken.former is None:
            yield f"{item.key} took over a machine that no attempt had"
            continue
        former = result.submitted[taken.former.job][0]
        same = (job.spec.image, job.submitted_by) == (former.spec.image, former.submitted_by)
        if not same or not former.spec.reuse or former.id == job.id:
            yield f"{item.key} took over the machine of {taken.former}, which is not for it"


def confirmed(result: Result) -> Iterator[str]:
    """A handover counts as failed only where the host did not speak in time, and is not waited for without end."""
    limit = result.daemon.world.policy.silence_max + CONFIRMED_WITHIN
    for item in result.daemon.attempts_ever.values():
        if item.machine_key is None or item.end_reason is not EndReason.NOT_HANDED_OVER or item.ended_at is None:
            continue
        m = machine_of(result, item)
        began = None if m is None else m.ran_from
        blind = m is None or m.quiet_spans or m.was_silent or result.daemon.told.full or result.daemon.told.restored
        if began is not None and not blind and began + limit < item.ended_at:
            yield f"{item.key} spoke from {began} on and was given up at {item.ended_at}: {item.end_detail}"


def machine_of(result: Result, item: Attempt) -> Machine | None:
    return next((m for cloud in result.clouds for m in cloud.by_key.get(item.key, ())), None)


REUSE: Final = (one_at_a_time, waiting_bounded, handed_to_whom_it_fits, confirmed)
