"""The core's policy from the settings, with floors where an accelerated clock would outrun real processes.

Virtual time may run a thousand times as fast as the wall, but a host still takes real milliseconds to start, to send
a heartbeat and to upload. Every span that waits for a real process is therefore at least so many seconds on the wall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final

from spotd.core.domain.policy import Policy, ProviderPolicy, UserLimits
from spotd.daemon.clock import virtual_at_least
from spotd.daemon.settings import ProviderSettings, Settings
from spotd_providers.contract.money import MICRO
from spotd_providers.contract.provider import Clock, ProviderTraits
from spotd_providers.contract.values import ProviderName

SILENCE: Final = (timedelta(seconds=45), 10.0)
SAVE: Final = (timedelta(minutes=2), 8.0)
COMMIT_HORIZON: Final = (timedelta(minutes=5), 5.0)
RECHECK: Final = (timedelta(seconds=60), 0.5)
LEASE: Final = (timedelta(minutes=30), 30.0)
SILENCE_LIMIT_FLOOR_S: Final = 35.0
SAVE_LIMIT_FLOOR_S: Final = 30.0
PROVISION_FLOOR_S: Final = 30.0
RECONCILE_FLOOR_S: Final = 5.0
QUOTE_FLOOR_S: Final = 5.0
"""Each pair: how long, and how many real seconds at the least."""


def build_policy(
    settings: Settings, traits: Mapping[ProviderName, ProviderTraits], *, store_shared_by: str, clock: Clock
) -> Policy:
    """Return the limits of the config and the daemon's own rules, for the providers whose traits are known."""

    def span(rule: tuple[timedelta, float]) -> timedelta:
        return virtual_at_least(clock, rule[0], real_s=rule[1])

    limits: dict[str, Any] = {one.name: getattr(settings, one.name) for one in fields(UserLimits)}
    limits["silence_limit"] = span((settings.silence_limit, SILENCE_LIMIT_FLOOR_S))
    limits["save_limit"] = span((settings.save_limit, SAVE_LIMIT_FLOOR_S))
    return Policy(
        install=settings.install,
        providers={
            one.name: _provider(one, traits[one.name], store_shared_by, clock)
            for one in settings.providers
            if one.name in traits
        },
        silence_max=span(SILENCE),
        save_allowance=span(SAVE),
        commit_horizon=span(COMMIT_HORIZON),
        recheck_every=span(RECHECK),
        lease=span(LEASE),
        **limits,
    )


def _provider(one: ProviderSettings, traits: ProviderTraits, store_shared_by: str, clock: Clock) -> ProviderPolicy:
    unusable = one.last_error
    if not one.enabled:
        unusable = f"{one.name} is disabled in the config"
    elif not unusable and store_shared_by == "filesystem" and not traits.hosts_share_filesystem:
        unusable = (
            f"the checkpoint store is a folder on this computer, which hosts at {one.name} cannot reach;"
            " set [store] url to a bucket"
        )
    return ProviderPolicy(
        name=one.name,
        fee_ppm=one.fee_ppm,
        quote_ttl=virtual_at_least(clock, max(traits.quote_ttl, 3 * one.poll_every), real_s=QUOTE_FLOOR_S),
        reconcile_window=virtual_at_least(clock, traits.reconcile_window, real_s=RECONCILE_FLOOR_S),
        provision_timeout=virtual_at_least(clock, traits.provision_timeout, real_s=PROVISION_FLOOR_S),
        unusable=unusable,
        free_if_taken_within=traits.free_if_taken_within,
        bills_from_running=traits.bills_from_running,
        bills_from_script=traits.bills_from_script,
        bill_open_for=traits.bill_open_for,
        bills_at_least=traits.bills_at_least,
        bills_by=traits.bills_by,
        ends_itself=bool(traits.ends_itself_by),
        runs_images=traits.runs_images,
    )


def fee_ppm(multiplier: float | str) -> int:
    """Return a fee multiplier such as 1.20 in parts per million."""
    return round(float(multiplier) * MICRO)
