"""What the end of an attempt, and the beginning of its command, add to the records, and what is forgotten."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.records import ONE, RecordId, RecordKind, nothing
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.experience.hazards import SLOT_HOURS, exposure, loss_records, slot_of, time_subject
from spotd.core.experience.hosts import fault_record, records_of_host
from spotd.core.experience.starts import ANY_IMAGE, START_MAX, is_slow, start_record
from spotd.core.plans.plan import Event, Plan

if TYPE_CHECKING:
    from spotd.core.plans.working_copy import WorkingCopy

EXPOSURE_MAX: Final = timedelta(days=30)
"""No attempt adds more machine time than this: a clock may have leapt."""
EARLY: Final = timedelta(minutes=30)
"""A machine that is lost so soon after its launch was hardly worth it."""


def learn_from_end(builder: WorkingCopy, item: Attempt, reason: EndReason, *, suspects_job: bool) -> None:
    """Add the machine hours of an attempt that ends now, and its loss if it is one; every other end is censored.

    Args:
        suspects_job: the job failed to start elsewhere just before, so that the host is not to blame.
    """
    spoke, held_since = item.heartbeat_seen_at is not None, item.bidding.held_since
    span = exposure(item, builder.now if held_since is None else min(builder.now, held_since))
    is_loss = reason.traits.is_loss and item.launched_at is not None and spoke and held_since is None
    if span is not None and spoke:
        _add_exposure(builder, item, span, ONE if is_loss else 0)
    _add_faults(builder, item, reason, is_loss=is_loss, suspects_job=suspects_job)


def learn_from_hold(builder: WorkingCopy, item: Attempt) -> None:
    """Add the loss of a machine that was outbid and is kept: its command is dead, whatever becomes of it."""
    offer = item.quote.offer
    time = time_subject(offer.market, slot_of(builder.now))
    of_time = RecordId(kind=RecordKind.LOSSES_TIME, provider=offer.provider, subject=time)
    for identity in (*loss_records(offer), of_time):
        builder.learn(identity, ONE, timedelta(0))


def learn_from_start(builder: WorkingCopy, item: Attempt, image: str) -> None:
    """Add the time from the attempt's launch until now, when its command began to run."""
    if item.launched_at is None:
        return
    took = builder.now - item.launched_at
    if took < timedelta(0):
        return
    if item.quote.offer.host_id is not None and is_slow(builder.experience, item.provider, image, took):
        _add_fault(builder, item, RecordKind.SLOW_STARTS)
    for subject in (image, ANY_IMAGE):
        builder.learn(start_record(item.provider, subject), ONE, min(took, START_MAX))


def _add_exposure(builder: WorkingCopy, item: Attempt, span: tuple[datetime, datetime], losses: int) -> None:
    start, end = max(span[0], span[1] - EXPOSURE_MAX), span[1]
    offer = item.quote.offer
    for identity in loss_records(offer):
        builder.learn(identity, losses, end - start)
    parts: dict[int, timedelta] = {}
    at = start
    while at < end:
        until = min(end, _next_slot(at))
        parts[slot_of(at)] = parts.get(slot_of(at), timedelta(0)) + (until - at)
        at = until
    last = slot_of(end)
    for slot, length in sorted({last: timedelta(0), **parts}.items()):
        identity = RecordId(
            kind=RecordKind.LOSSES_TIME, provider=offer.provider, subject=time_subject(offer.market, slot)
        )
        if length or losses:
            builder.learn(identity, losses if slot == last else 0, length)


def _next_slot(at: datetime) -> datetime:
    begun = at.replace(minute=0, second=0, microsecond=0) - timedelta(hours=at.hour % SLOT_HOURS)
    return begun + timedelta(hours=SLOT_HOURS)


def _add_faults(builder: WorkingCopy, item: Attempt, reason: EndReason, *, is_loss: bool, suspects_job: bool) -> None:
    if item.quote.offer.host_id is None or item.launched_at is None:
        return
    if is_loss and builder.now - item.launched_at < EARLY:
        _add_fault(builder, item, RecordKind.EARLY_LOSSES)
    elif reason.traits.is_host_fault and item.running_at is None and not is_loss and not suspects_job:
        _add_fault(builder, item, RecordKind.FAILED_STARTS)


def _add_fault(builder: WorkingCopy, item: Attempt, kind: RecordKind) -> None:
    host = item.quote.offer.host_id
    if host is not None:
        builder.learn(fault_record(kind, item.provider, host), ONE, timedelta(0))


def forget_host(world: World, host: str, now: datetime) -> Plan:
    """Forget what is remembered of the hosts that a user means by this."""
    gone = records_of_host(world.experience, host)
    if not gone:
        return Plan()
    what = f"what was remembered of host {host} is forgotten: it ranks by its price again"
    return Plan(
        experience={identity: nothing(identity, now) for identity in gone},
        events=(Event(at=now, kind="host.forgotten", message=what),),
    )
