"""Machines that their owner gives up without having seen their end: the account is dead, or nothing lists them.

What was given up holds no slot and no budget any more. It is remembered all the same: whatever carries the key of an
attempt that is over is ended as a stray as soon as any list shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.intents import Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import World
from spotd.core.machines.host_reports import absorb, exited
from spotd.core.metering.billing_limits import lease_and_save
from spotd.core.plans.plan import Plan
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.values import InstanceState, Listing, ProviderName

_GIVEN_UP = "its owner gave it up without seeing its end; if it is ever listed again, it is ended"


def find_machine(world: World, text: str) -> AttemptId | Intent | None:
    """Return what a user means by an instance's id, a key or `JOB-NUMBER`: a machine, with an attempt or without."""
    for identity, item in world.attempts.items():
        names = {item.key, f"{identity.job}-{identity.number}", f"{identity.job}@{identity.number}"}
        if text in names or (item.ref is not None and text == item.ref.instance_id):
            return identity
    for intent in world.intents.values():
        if intent.kind is not IntentKind.TERMINATE or intent.attempt is not None or intent.ref is None:
            continue
        if text in {intent.key, intent.ref.instance_id, intent.id}:
            return intent
    return None


def refusal(
    world: World,
    found: AttemptId | Intent,
    listings: Mapping[ProviderName, Listing],
    errors: Mapping[ProviderName, str],
) -> str:
    """Why this machine must not be given up, since it can be seen and ended; empty if it may be."""
    item = found if isinstance(found, Intent) else world.attempts[found]
    launch = world.intents.get(launch_intent_id(item.key))
    if launch is not None and launch.state in {IntentState.OPEN, IntentState.SENT}:
        return "its launch is under way; ask again when it has an answer"
    listing = listings.get(item.provider)
    if item.provider not in world.policy.providers or listing is None or errors.get(item.provider):
        return ""
    shown = [i for i in listing.instances if (i.key == item.key or i.ref == item.ref) and i.state is not _GONE]
    if shown:
        return f"{item.provider} lists it as {shown[0].state.value}, so it can be ended and need not be given up"
    if (
        isinstance(item, Attempt)
        and not item.ever_listed
        and listing.at < (item.launched_at or item.intended_at) + world.policy.list_lag(item.provider)
    ):
        return f"it was rented just now and the lists of {item.provider} may lack it yet; ask again in some minutes"
    if isinstance(item, Attempt) and item.state.counts and item.ever_listed and not listing.complete:
        return f"the newest list of {item.provider} is not complete; ask again in a minute"
    return ""


def forget(world: World, found: AttemptId | Intent, now: datetime, report: HostStatus | None = None) -> Plan:
    """Give the machine up; its job goes on elsewhere once no lease can keep it alive.

    Args:
        report: all that its host wrote until now: of an attempt that is over nothing more is read.
    """
    builder = PlanBuilder(world, now)
    if isinstance(found, Intent):
        builder.put_intent(replace(found, state=IntentState.DONE))
        builder.event("machine.forgotten", f"a machine without an attempt: {_GIVEN_UP}", key=found.key)
        return builder.plan()
    item = builder.attempt(found)
    cannot_compute_from = item.ended_at or now
    builder.event("machine.forgotten", _GIVEN_UP, attempt=found, provider=item.provider, key=item.key)
    if report is not None:
        absorb(builder, found, report)
        if builder.attempt(found).state.counts and report.exit_cause is not None:
            exited(builder, found, report)
    builder.end_attempt(found, EndReason.FORGOTTEN, f"{item.provider} does not show it")
    job = builder.job(found.job)
    not_before = cannot_compute_from + lease_and_save(job, builder.policy)
    if item.machine.may_compute and not job.state.is_final and not_before > now:
        builder.put_job(replace(job, not_before=not_before))
    builder.machine_gone(found, "nothing more is booked for it")
    return builder.plan()


_GONE = InstanceState.GONE
