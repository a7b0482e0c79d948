"""How long a machine may live, and bill, after the newest proof that it exists."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.pricing.effective_price import halted_rate

UNSEEN_MAX: Final = timedelta(hours=24)
"""Beyond its lease, a machine whose end cannot be confirmed holds its slot and its money for so long."""


def lease_and_save(job: Job, policy: Policy) -> timedelta:
    """How long a machine that has no contact to the daemon may work and save."""
    return policy.lease + job.spec.checkpoint.stop_grace + policy.save_allowance


def outlives(item: Attempt, job: Job, policy: Policy) -> timedelta | None:
    """How long the machine may live after its last proof; `None` where nothing ends it but an order."""
    rules = policy.providers.get(item.provider)
    if rules is not None and not rules.ends_itself:
        return None
    starting = timedelta(0)
    if item.heartbeat_seen_at is None and rules is not None:
        starting = rules.provision_timeout
    return lease_and_save(job, policy) + starting


def proven_until(item: Attempt, job: Job, policy: Policy, at: datetime) -> datetime | None:
    """Up to when the machine is booked if nothing shows it after this instant."""
    span = outlives(item, job, policy)
    return None if span is None else at + span


def is_past_lease(item: Attempt, now: datetime) -> bool:
    """Whether the machine of an attempt that is over was unseen for so long that it is not counted on any more.

    A lease that has run out ends the host's work, and mostly its machine; the day beyond it is for the others. For one
    that nothing ever showed, a lease was waited for before it was given up, so that its job can go on elsewhere. One
    that is paused has no lease and does no work.
    """
    if item.state is not AttemptState.ENDING:
        return False
    if item.ref is None and item.end_reason is EndReason.LAUNCH_UNKNOWN:
        return True
    last = item.meter.until
    if last is None and item.meter.rate <= halted_rate(item.quote):
        last = item.ended_at
    return last is not None and now > last + UNSEEN_MAX


def with_limit(item: Attempt, job: Job, policy: Policy) -> Attempt:
    """Return the attempt with a limit to its meter, from what is on record where the meter does not hold one.

    A machine that bills in full was running when its meter began.
    """
    meter = item.meter
    if meter.until is not None or meter.since is None or meter.rate <= halted_rate(item.quote):
        return item
    known = [at for at in (meter.since, item.launched_at, item.heartbeat_seen_at, item.listed_at) if at is not None]
    return replace(item, meter=replace(meter, until=proven_until(item, job, policy, max(known))))
