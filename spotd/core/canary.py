"""Which rented machines are measured before their job starts, and when one that refused itself is believed.

Theory. What a host measures can only end its own attempt: it buys nothing and stops no other machine. That it is less
than was sold spares it the record of a loss, so it is believed only of a machine that was measured, that might refuse
itself, and whose command never ran; any other that says so is lost.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd_providers.contract.values import Offer

REFUSALS_MAX: Final = 3
"""A job has so many machines refused in all of its life: a figure that is too strict costs no more than that."""
CANARY: Final = "canary"
"""The phase of a host that measures itself."""
_BEFORE_RUN: Final = frozenset({"boot", CANARY, "code", "restore", "setup"})
_MIG: Final = "_MIG_"


def canary_time(offer: Offer, policy: Policy) -> timedelta:
    """Return for how long a machine of this offer is measured at most; nothing where it is not."""
    rules = policy.providers.get(offer.provider)
    is_whole = offer.gpu_count and offer.nodes == 1 and _MIG not in offer.gpu
    return policy.canary if is_whole and not (rules is not None and rules.is_own) else timedelta(0)


def canary_time_of(quote: Quote, policy: Policy) -> timedelta:
    """Return the same for a machine at its price: one that costs nothing is not measured."""
    return canary_time(quote.offer, policy) if quote.price.total > 0 and not quote.is_own else timedelta(0)


def measuring_time(item: Attempt, policy: Policy) -> timedelta:
    """Return for how long the machine of this attempt may measure itself; one that was taken over does not."""
    return canary_time_of(item.quote, policy) if item.machine_key is None else timedelta(0)


def may_refuse(job: Job) -> bool:
    """Whether a machine of this job may still refuse itself."""
    return (job.machines_refused or 0) < REFUSALS_MAX


def never_ran(report: HostStatus) -> bool:
    """Whether the end that the host states came before its command."""
    return report.exit_phase in _BEFORE_RUN


def believed_reason(item: Attempt, job: Job, policy: Policy, report: HostStatus) -> EndReason | None:
    """Return why the attempt ends, as far as its host is believed."""
    if report.exit_reason is not EndReason.CONTRACT_BROKEN:
        return report.exit_reason
    was_measured = measuring_time(item, policy) and item.running_at is None
    is_refusal = was_measured and report.exit_phase == CANARY and may_refuse(job)
    return EndReason.CONTRACT_BROKEN if is_refusal else EndReason.HOST_LOST
