"""Machines of this install that no attempt owns: they are ended, and what they cost is estimated by their listing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from spotd.core.domain.bounds import hourly_within
from spotd.core.domain.intents import Intent, IntentKind, IntentState, terminate_intent_id
from spotd.core.domain.keys import is_own_key
from spotd.core.machines.listed import TERMINATE_AGAIN_AFTER
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.quarantine import in_words
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, as_usd, cost
from spotd_providers.contract.values import Instance, InstanceRef, InstanceState, Listing, ProviderName

UNSEEN_MAX: Final = timedelta(days=7)
"""A machine is taken to be no older than this when it is seen first, whatever its provider states."""


def end_orphans(builder: PlanBuilder, listings: Mapping[ProviderName, Listing]) -> None:
    """End machines under our install label that no open attempt owns: a former state bought them, which is lost."""
    owned = {(a.provider, a.key) for a in builder.attempts()}
    kept = {a.ref for a in builder.attempts() if a.ref is not None and a.state.counts}
    for provider in sorted(listings):
        for instance in listings[provider].instances:
            if (provider, instance.key) in owned:
                continue
            error = builder.attempted(partial(_end_if_orphan, builder, instance, kept))
            if error is not None:
                builder.note_contained(f"a machine in the listing of {provider}", in_words(error))
    for intent in builder.intents():
        error = builder.attempted(partial(_settle, builder, intent, listings.get(intent.provider)))
        if error is not None:
            builder.note_contained(f"the end of the machine {intent.key}", in_words(error))


def _end_if_orphan(builder: PlanBuilder, instance: Instance, kept: Collection[InstanceRef]) -> None:
    if instance.state is InstanceState.GONE:
        return
    if not is_own_key(builder.policy, instance.key) or instance.ref in kept:
        return  # however its label reads now, the machine of an attempt that counts is no stray
    if builder.policy.identity_sure:
        builder.owe_termination(instance.ref, instance.key, None, why="no open attempt owns this machine")
        _note_listed(builder, instance)


def _settle(builder: PlanBuilder, intent: Intent, seen: Listing | None) -> None:
    if intent.kind is not IntentKind.TERMINATE or intent.attempt is not None or intent.ref is None:
        return
    if seen is None or not seen.complete or intent.accepted_at is None or seen.at <= intent.accepted_at:
        return
    rules = builder.policy.providers.get(intent.provider)
    if rules is not None and rules.is_other_account(intent.account):
        return
    if not any(i.ref == intent.ref and i.state is not InstanceState.GONE for i in seen.instances):
        builder.put_intent(replace(intent, state=IntentState.DONE))
        total = stray_cost(intent, intent.accepted_at)
        builder.event(
            "machine.gone",
            f"a machine without an attempt is gone; it cost about ${as_usd(total):.4f}, which no job pays",
            key=intent.key,
            provider=intent.provider,
            cost_microusd=total,
        )
    elif builder.now - intent.accepted_at >= TERMINATE_AGAIN_AFTER:
        builder.put_intent(replace(intent, state=IntentState.OPEN, accepted_at=None, not_before=None))


def _note_listed(builder: PlanBuilder, instance: Instance) -> None:
    """Keep what the listing shows of a machine whose end is owed: its account, its price, and since when it exists."""
    intent = builder.intent(terminate_intent_id(instance.ref))
    if intent is None or not intent.is_open or intent.attempt is not None:
        return
    since = intent.stray_since or min(max(instance.created_at or builder.now, builder.now - UNSEEN_MAX), builder.now)
    rate = MicroUsdPerHour(hourly_within(max(intent.stray_rate, instance.price or 0)))
    rules = builder.policy.providers.get(intent.provider)
    account = intent.account if rules is None else rules.account or intent.account
    if (since, rate, account) != (intent.stray_since, intent.stray_rate, intent.account):
        builder.put_intent(replace(intent, stray_since=since, stray_rate=rate, account=account))


def stray_cost(intent: Intent, until: datetime) -> MicroUsd:
    """Return what the machine has cost up to this instant, its fee, disk and traffic left out."""
    if intent.stray_since is None:
        return MicroUsd(0)
    return cost(intent.stray_rate, until - intent.stray_since)
