"""Settings of the daemon at its start, and again on a reload: plain values, whatever file they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from spotd.core.domain.policy import UserLimits
from spotd.core.notifications.values import ChannelRules
from spotd.daemon.hosts.flood import FloodLimits
from spotd_jobs.objects.api import ObjectStore
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import InstallId, ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """One `[providers.NAME]`.

    Attributes:
        settings: a value of the plugin's own settings model.
        last_error: why it cannot be opened (no key, no such plugin), empty when nothing is known against it.
    """

    name: ProviderName
    title: str
    enabled: bool
    fee_ppm: int
    poll_every: timedelta
    machines_every: timedelta = timedelta(seconds=12)
    plugin: ProviderPlugin | None = None
    settings: Any = None
    credential: str | None = field(default=None, repr=False)
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """One `[notify.NAME]`. `error`: why its address is not known, empty where it is."""

    rules: ChannelRules
    url: str = field(default="", repr=False)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(UserLimits):
    """Everything about this daemon that is not decided while it runs.

    Attributes:
        store_place: how the checkpoint store is called in messages; compared on a reload.
        secrets: values that must never be logged.
    """

    install: InstallId
    state_dir: Path
    state_url: str | Path
    socket: Path
    store_place: str
    open_objects: Callable[[], ObjectStore]
    providers: tuple[ProviderSettings, ...]
    flood: FloodLimits = field(default_factory=FloodLimits)
    config_path: Path | None = None
    take_over: frozenset[str] = frozenset()
    clock_scale: float = 1.0
    clock_start: datetime | None = None
    metrics_address: tuple[str, int] | None = None
    channels: tuple[ChannelSettings, ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    """What is not wrong but should be mended, for the log."""


_AT_ONCE: Final = (
    ("ceiling_default", "[ceilings] default"),
    ("ceilings", "[ceilings]"),
    ("budget_day", "[budget] day"),
    ("budget_month", "[budget] month"),
    ("agent_job_budget", "[mcp] job_budget"),
    ("agent_day_budget", "[mcp] day_budget"),
    ("machines_max", "[budget] machines"),
    ("raise_bids", "[bids] raise_running"),
    ("hold_max", "[bids] hold"),
    ("moves_max", "[moves] most"),
    ("egress", "[store] egress_per_gb"),
    ("silence_limit", "[daemon] silence_limit"),
    ("save_limit", "[daemon] save_limit"),
)
"""What a reload changes at once, and its name in the config."""
_AT_RESTART: Final = (
    ("install", "[daemon] install"),
    ("take_over", "[daemon] take_over"),
    ("state_url", "[daemon] state"),
    ("socket", "the socket's path"),
    ("store_place", "[store]"),
    ("flood", "[store] flood limits"),
    ("clock_scale", "the speed of the clock"),
    ("metrics_address", "[metrics]"),
    ("channels", "[notify]"),
)


def changes(old: Settings, new: Settings) -> tuple[list[str], list[str]]:
    """Return what a reload changes at once, and what only a restart can change, in words."""
    at_once, restart = (
        [words for name, words in table if getattr(old, name) != getattr(new, name)]
        for table in (_AT_ONCE, _AT_RESTART)
    )
    before = {p.name: p for p in old.providers}
    after = {p.name: p for p in new.providers}
    for name in sorted(before.keys() | after.keys()):
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            restart.append(f"[providers.{name}]")
            continue
        if _soft(one) != _soft(two):
            at_once.append(f"[providers.{name}]")
        if one.settings != two.settings or one.credential != two.credential:
            restart.append(f"[providers.{name}] settings")
    return at_once, restart


def _soft(one: ProviderSettings) -> tuple[object, ...]:
    """Return what a reload changes while the provider stays open."""
    return one.enabled, one.fee_ppm, one.poll_every, one.machines_every
