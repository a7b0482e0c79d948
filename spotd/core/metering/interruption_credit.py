"""Machines that a provider has announced to take, and that are cheaper left to it than ended by us.

Theory. EC2 charges nothing for a machine that it interrupts in its first hour, and every second of one that we end
ourselves, be it a moment earlier. So once the runner has reported its own end, which means that everything is saved and
nothing of ours computes any more, or once EC2 shows that it ends the machine, the order to end it waits until the
announced instant has passed. The next machine of the job does not wait: this is the one overlap of two machines that
spotd means to have. The order is durable from the beginning, and given after all if the machine is not taken.

Until a machine is taken it is not known to be free, so it is booked like any other, budgets and all. Once the
provider says that it took it, what it did not bill is booked back, on the days on which it was booked.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import IntentState, terminate_intent_id
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.metering.billing_limits import is_past_lease
from spotd.core.pricing.effective_price import halted_rate, moved_cost
from spotd_providers.contract.money import MicroUsd, cost
from spotd_providers.contract.values import Instance, Loss

TAKING: Final = timedelta(seconds=30)
"""Between the announced instant and a listing that shows the machine as ending."""
_TAKEN: Final = frozenset({Loss.PREEMPTED, Loss.OUTBID})
LEFT_MAX: Final = timedelta(minutes=3)
"""No notice is longer. Part of what is known of one was written by the host, whose word must not keep it alive."""


UNSEEN_NOTICE: Final = timedelta(minutes=2)
"""How long before it takes a machine EC2 announces that."""


def noticed_at(item: Attempt) -> datetime | None:
    """When the provider takes the machine, as it announced.

    One that was preempted had a notice, be it that none was seen: the runner saved and ended within a second of it, or
    a list showed the machine as ending first.
    """
    if item.notice_at is not None:
        return item.notice_at
    if item.end_reason is EndReason.PREEMPTED and item.ended_at is not None:
        return item.ended_at + UNSEEN_NOTICE
    return None


def _computes_no_more(item: Attempt) -> bool:
    return item.phase == "done" or item.machine is MachineState.HALTED


def taken_by_provider_until(item: Attempt, policy: Policy, now: datetime) -> datetime | None:
    """When the machine's end is owed although the provider takes it; `None` for at once."""
    rules = policy.providers.get(item.provider)
    taken_at = noticed_at(item)
    if rules is None or taken_at is None or item.launched_at is None or not _computes_no_more(item):
        return None
    due = taken_at + TAKING
    is_free = taken_at - item.launched_at < rules.free_if_taken_within
    return due if is_free and now < due <= now + LEFT_MAX else None


def free_of(item: Attempt, mine: Instance, policy: Policy, now: datetime) -> MicroUsd:
    """Return what is booked for this machine and not billed, because its provider took it soon enough; mostly nothing.

    The disk and the traffic cost all the same. What was taken back once is not found again, since what then is booked
    is no more than they cost.
    """
    rules = policy.providers.get(item.provider)
    if rules is None or item.launched_at is None or mine.loss not in _TAKEN:
        return MicroUsd(0)
    ended_at = min(now, mine.ended_at or now)
    taken_at = ended_at  # or when it was announced, where its end is seen late
    if mine.ended_at is None and item.notice_at is not None:
        taken_at = min(now, max(item.notice_at + TAKING, item.heartbeat_seen_at or item.launched_at))
    if taken_at - item.launched_at >= rules.free_if_taken_within:
        return MicroUsd(0)
    owed = cost(halted_rate(item.quote), ended_at - item.intended_at)
    moved = moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes)
    return MicroUsd(max(0, item.meter.settled - owed - moved))


def machines_in_use(world: World, now: datetime) -> int:
    """How many count against the limit on machines.

    One that only waits to be taken does nothing and costs nothing; one that outlived its lease unseen has ended itself.
    """
    return sum(
        item.state.counts
        or (item.machine.may_compute and not is_left_to_provider(item, world) and not is_past_lease(item, now))
        for item in world.attempts.values()
    )


def is_left_to_provider(item: Attempt, world: World) -> bool:
    """Whether the machine only waits to be taken: its runner has ended, and no order to end it was tried yet."""
    taken_at = noticed_at(item)
    if item.state is not AttemptState.ENDING or item.ref is None or taken_at is None or not _computes_no_more(item):
        return False
    intent = world.intents.get(terminate_intent_id(item.ref))
    return (
        intent is not None
        and intent.state is IntentState.OPEN
        and intent.tries == 0
        and intent.not_before == taken_at + TAKING
    )
