"""Time-outs of a machine that seems to exist: of its order to stop, of its silence, of its start.

Without a read of its host since, silence is the daemon's and not the host's, and a checkpoint may lie unseen in the
store. Where only the host's liveness was checked, a full read is asked for first.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.billing.billing import charge_unseen, last_lived
from spotd.core.domain.attempts import Attempt, MachineState, StopOrder
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.states import EndReason
from spotd.core.machines.absence import settle_until_missing
from spotd.core.machines.host_reports import last_sign_of_life
from spotd.core.machines.loss_evidence import LossEvidence
from spotd.core.machines.starting import start_deadline
from spotd.core.plans.plan_builder import PlanBuilder

READ_WITHIN: Final = timedelta(hours=24)
"""For so long after its machine was ended an attempt waits until what it saved last can be read."""

LATE_PARTS: Final = 3
LATE_WHOLE: Final = 5
"""A host is late after this part of the silence that would end it: well before two heartbeats were missed."""
LATE_FOR: Final = timedelta(minutes=2)


def watch_timeouts(
    builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus | None, patience: timedelta, evidence: LossEvidence
) -> None:
    """End the attempt once one of its time-outs has passed, or wake for the next of them."""
    item = builder.attempt(attempt_id)
    rules = builder.policy.providers.get(item.provider)

    def end(reason: EndReason, detail: str = "") -> None:
        if report is not None and report.liveness_check:
            builder.read_in_full(attempt_id)
        else:
            if item.ref is None and item.heartbeat_seen_at is not None:
                charge_unseen(builder, attempt_id, last_lived(item, item.heartbeat_seen_at, report))
            settle_until_missing(builder, item)
            builder.end_attempt(attempt_id, reason, detail)

    if item.stop is not None and (builder.now >= item.stop.deadline or _never_spoke(item, item.stop, report)):
        if report is None and builder.now < item.stop.deadline + READ_WITHIN:
            _end_unread(builder, item, item.stop)
        else:
            end(item.stop.reason, item.stop.detail)
        return
    if item.stop is not None:
        builder.wake(item.stop.deadline)
    if report is None or (item.launched_at is None and item.heartbeat_seen_at is None):
        return
    if item.heartbeat_seen_at is not None:
        seen_at = last_sign_of_life(item.heartbeat_seen_at, report)
        lost_at = seen_at + patience
        if builder.now >= lost_at and evidence.is_silent(item):
            end(EndReason.HOST_LOST, f"no sign of life for {int((builder.now - seen_at).total_seconds())} s")
        else:
            silent_at = seen_at + builder.policy.silence_max
            builder.wake(next((at for at in (silent_at, lost_at) if at > builder.now), lost_at))
        _list_when_late(builder, item, seen_at)
    elif rules is not None and item.launched_at is not None:
        late_at = start_deadline(builder, item, rules, evidence, item.launched_at)
        if builder.now >= late_at:
            end(EndReason.PROVISION_TIMEOUT)
        else:
            builder.wake(late_at)


def _never_spoke(item: Attempt, stop: StopOrder, report: HostStatus | None) -> bool:
    """Whether a full read since the order found that there is nothing to wait for."""
    if report is None or report.liveness_check or report.read_at < stop.ordered_at:
        return False
    return item.running_at is None and item.heartbeat_seen_at is None


def _end_unread(builder: PlanBuilder, item: Attempt, stop: StopOrder) -> None:
    """End the machine now, which needs the provider only, and the attempt once what it saved last can be read.

    Nothing else can begin for its job meanwhile: a launch needs the store, too.
    """
    if item.ref is None or item.machine is MachineState.GONE:
        return
    intent = builder.end_order(item)
    if intent is None or not intent.is_open:
        reason = stop.reason.sentence(stop.detail)
        why = f"its time to save is over ({reason}); what it saved last is read once the checkpoint store answers"
        builder.owe_termination(item.ref, item.key, item.id, why=why)
        job = builder.job(item.id.job)
        builder.move_job(job.id, job.state, why)


def _list_when_late(builder: PlanBuilder, item: Attempt, seen_at: datetime) -> None:
    """Ask the provider about a late heartbeat, now and for a while: it may know that the machine is gone.

    The poller bounds the requests; later its usual pace is enough.
    """
    late_at = seen_at + builder.policy.silence_max * LATE_PARTS // LATE_WHOLE
    if builder.now < late_at:
        builder.wake(late_at)
    elif builder.now < late_at + LATE_FOR:
        builder.list_again(item.provider)
