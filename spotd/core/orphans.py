"""What a machine costs that no attempt owns: estimated by what its provider lists, for the receipt without a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.bounds import hourly_within
from spotd.core.intents import Intent, terminate_intent_id
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, cost
from spotd_providers.contract.values import Instance

UNSEEN_MAX: Final = timedelta(days=7)
"""A machine is taken to be no older than this when it is seen first, whatever its provider states."""


def note_stray(builder: PlanBuilder, instance: Instance) -> None:
    """Keep what the listing shows of a machine whose end is owed: its price, and since when it exists."""
    intent = builder.intent(terminate_intent_id(instance.ref))
    if intent is None or not intent.is_open or intent.attempt is not None:
        return
    since = intent.stray_since or min(max(instance.created_at or builder.now, builder.now - UNSEEN_MAX), builder.now)
    rate = MicroUsdPerHour(hourly_within(max(intent.stray_rate, instance.price or 0)))
    if (since, rate) != (intent.stray_since, intent.stray_rate):
        builder.put_intent(replace(intent, stray_since=since, stray_rate=rate))


def stray_cost(intent: Intent, until: datetime) -> MicroUsd:
    """Return what the machine has cost up to this instant, its fee, disk and traffic left out."""
    if intent.stray_since is None:
        return MicroUsd(0)
    return cost(intent.stray_rate, until - intent.stray_since)
