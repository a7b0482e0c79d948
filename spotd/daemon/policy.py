"""The settings of the daemon, what a reload changes of them, and the core's policy from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from spotd.core.domain.policy import Caller, Policy, ProviderPolicy, UserLimits, names_in_config
from spotd.core.notifications import ChannelRules
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.remote_data import RemotePlaces
from spotd.store import SecretsKeys
from spotd_jobs.objects.api import ObjectStore
from spotd_providers.contract.provider import ProviderPlugin, ProviderTraits
from spotd_providers.contract.values import MICRO, InstallId, ProviderName, RegistryLogin

# Settings of the daemon at its start, and again on a reload: plain values, whatever file they came from.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """One `[providers.NAME]`.

    Attributes:
        settings: a value of the plugin's own settings model.
        owned: whether its machines are the user's own; `None` where the plugin says it.
        last_error: why it cannot be opened (no key, no such plugin), empty when nothing is known against it.
    """

    name: ProviderName
    title: str
    enabled: bool
    fee_ppm: int
    poll_every: timedelta
    machines_every: timedelta = timedelta(seconds=12)
    owned: bool | None = None
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
class User:
    """One `[users.NAME]`, known by the hash of a token."""

    caller: Caller
    digest: bytes = field(repr=False)


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
    api_address: tuple[str, int] | None = None
    api_files: tuple[Path, Path] | None = None
    """Certificate and key."""
    api_url: str = ""
    """Where daemons that wait reach it; empty where the address says it."""
    users: tuple[User, ...] = ()
    channels: tuple[ChannelSettings, ...] = ()
    logins: Mapping[str, RegistryLogin] = field(default_factory=dict)
    """Of registries with private images, by server."""
    remote: RemotePlaces = field(default_factory=RemotePlaces)
    secrets_keys: SecretsKeys = field(default_factory=SecretsKeys)
    """What encrypts the secrets of jobs in a state that several computers share."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    """What is not wrong but should be mended, for the log."""


_AT_ONCE: Final = (
    *names_in_config().items(),
    ("logins", "the logins of [registries]"),
    ("remote", "[buckets] and [hub]"),
    ("secrets_keys", "[daemon] secrets_key"),
    ("users", "[users]"),
    ("api_files", "[api] certificate and key"),
    ("api_url", "[api] url"),
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
    ("api_address", "[api] listen"),
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
    return one.enabled, one.fee_ppm, one.poll_every, one.machines_every, one.owned


NO_LOGIN: Final = "it takes no login of a registry"
SILENCE: Final = timedelta(seconds=45)
SAVE: Final = timedelta(minutes=2)
COMMIT_HORIZON: Final = timedelta(minutes=5)
RECHECK: Final = timedelta(seconds=60)
LEASE: Final = timedelta(minutes=30)


def build_policy(settings: Settings, traits: Mapping[ProviderName, ProviderTraits], *, store_shared_by: str) -> Policy:
    """Return the limits of the config and the daemon's own rules, for the providers whose traits are known."""
    limits: dict[str, Any] = {one.name: getattr(settings, one.name) for one in fields(UserLimits)}
    return Policy(
        install=settings.install,
        providers={
            one.name: _provider(one, traits[one.name], store_shared_by)
            for one in settings.providers
            if one.name in traits
        },
        silence_max=SILENCE,
        save_allowance=SAVE,
        commit_horizon=COMMIT_HORIZON,
        recheck_every=RECHECK,
        lease=LEASE,
        **limits,
    )


def _provider(one: ProviderSettings, traits: ProviderTraits, store_shared_by: str) -> ProviderPolicy:
    unusable = one.last_error
    if not one.enabled:
        unusable = f"{one.name} is disabled in the config"
    elif not unusable and traits.no_launches:
        unusable = traits.no_launches
    elif not unusable and store_shared_by == "filesystem" and not traits.hosts_share_filesystem:
        unusable = (
            f"the checkpoint store is a folder on this computer, which hosts at {one.name} cannot reach;"
            " set [store] url to a bucket"
        )
    return ProviderPolicy(
        name=one.name,
        fee_ppm=one.fee_ppm,
        quote_ttl=max(traits.quote_ttl, 3 * one.poll_every),
        reconcile_window=traits.reconcile_window,
        provision_timeout=traits.provision_timeout,
        unusable=unusable,
        free_if_taken_within=traits.free_if_taken_within,
        bills_from_running=traits.bills_from_running,
        bills_from_script=traits.bills_from_script,
        bill_open_for=traits.bill_open_for,
        bills_at_least=traits.bills_at_least,
        causes_within=traits.causes_within,
        bills_by=traits.bills_by,
        ends_itself=bool(traits.ends_itself_by),
        is_own=traits.owned if one.owned is None else one.owned,
        replaces_first=traits.replaces_first,
        runs_images=traits.runs_images,
        no_login="" if traits.private_images.available else traits.private_images.reason or NO_LOGIN,
    )


def may_be_own(policy: Policy, traits: Mapping[ProviderName, ProviderTraits]) -> tuple[ProviderName, ...]:
    """Return the providers of own machines, with those whose machines a reload of the config may make own ones."""
    return tuple(sorted({*policy.own_providers, *(name for name, known in traits.items() if known.owned)}))


def fee_ppm(multiplier: float | str) -> int:
    """Return a fee multiplier such as 1.20 in parts per million."""
    return round(float(multiplier) * MICRO)
