"""The daemon's settings from the user's config and the environment."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

from spotd import paths
from spotd.config.credentials import resolve_credential
from spotd.config.load import load
from spotd.config.metrics import parse_address
from spotd.config.model import SQLITE_DEFAULT, STORE_DEFAULT, Config, ProviderConfig
from spotd.config.notify import NotifySection
from spotd.config.refusals import ConfigError
from spotd.core.notifications.values import ChannelRules
from spotd.daemon.errors import BadConfig
from spotd.daemon.hosts.flood import FloodLimits
from spotd.daemon.ids import ALPHABET
from spotd.daemon.settings import ChannelSettings, ProviderSettings, Settings
from spotd.files import write_once
from spotd.service.store_egress import store_egress
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.objects.s3 import open_bucket
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.objects.s3_grants import AUTO
from spotd_jobs.spec.problems import BadValue, Problem
from spotd_jobs.spec.windows import parse_window
from spotd_providers.contract.money import MICRO, MicroUsd, MicroUsdPerGpuHour
from spotd_providers.contract.values import InstallId, ProviderName
from spotd_providers.kit.extras import install_command

STATE_FILE: Final = "state.sqlite"
STORE_FOLDER: Final = "store"
INSTALL_FILE: Final = "install"
INSTALL_LENGTH: Final = 8
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
SECRET_PART_MIN: Final = 12
"""Shorter parts of an address are mostly words and host names."""
FEE_LEAST: Final = Decimal("0.5")
FEE_MOST: Final = Decimal(5)


def load_settings(config_path: str | Path | None, overrides: Mapping[str, str]) -> Settings:
    """Load the settings from the config in force; `overrides` are variables laid over the environment.

    Raises:
        BadConfig: with every problem found, each with its place.
    """
    environ = {**os.environ, **overrides}
    try:
        loaded = load(None if config_path is None else Path(config_path), environ=environ)
    except ConfigError as exc:
        raise BadConfig(str(exc)) from exc
    config, state_dir = loaded.config, paths.state_dir(environ)
    place, open_objects, store_secrets = open_store(config, state_dir, environ)
    providers = tuple(provider_settings(one, config, environ) for one in config.providers)
    channels = tuple(_channel(name, one, environ) for name, one in config.notify.items())
    return Settings(
        install=InstallId(config.daemon.install or _own_install(state_dir)),
        state_dir=state_dir,
        state_url=state_dir / STATE_FILE if config.daemon.state == SQLITE_DEFAULT else config.daemon.state,
        socket=paths.socket_path(environ),
        store_place=place,
        open_objects=open_objects,
        providers=providers,
        ceiling_default=None if config.ceiling_default is None else MicroUsdPerGpuHour(config.ceiling_default),
        ceilings={gpu: MicroUsdPerGpuHour(price) for gpu, price in config.ceilings.items()},
        budget_day=None if config.budget.day is None else MicroUsd(config.budget.day),
        budget_month=None if config.budget.month is None else MicroUsd(config.budget.month),
        agent_job_budget=None if config.mcp.job_budget is None else MicroUsd(config.mcp.job_budget),
        agent_day_budget=None if config.mcp.day_budget is None else MicroUsd(config.mcp.day_budget),
        machines_max=config.budget.machines,
        raise_bids=config.bids.raise_running,
        hold_max=config.bids.hold,
        moves_max=config.moves.most,
        egress=store_egress(config.store),
        silence_limit=config.daemon.silence_limit,
        save_limit=config.daemon.save_limit,
        flood=FloodLimits(
            objects_day=config.store.flood_objects,
            bytes_day=config.store.flood_bytes,
            log_bytes_day=config.store.flood_logs,
        ),
        config_path=loaded.path,
        take_over=frozenset(config.daemon.take_over),
        clock_scale=config.daemon.time_scale,
        clock_start=config.daemon.time_start,
        metrics_address=_metrics_address(config),
        channels=channels,
        secrets=(
            *(one.credential for one in providers if one.credential is not None),
            *store_secrets,
            *(part for one in channels for part in _secret_parts(one.url)),
        ),
        warnings=tuple(_warning(problem, str(loaded.path)) for problem in loaded.warnings),
    )


def _metrics_address(config: Config) -> tuple[str, int] | None:
    """Return where the metrics are to be served.

    Raises:
        BadConfig: they are to be, and what makes them is not installed.
    """
    if config.metrics.listen is None:
        return None
    if find_spec("prometheus_client") is None:
        hint = f"{install_command('metrics')}, or remove the key"
        raise BadConfig(f"metrics.listen: the metrics need prometheus-client\n\nhint: {hint}")
    return parse_address(config.metrics.listen)


def _channel(name: str, section: NotifySection, environ: Mapping[str, str]) -> ChannelSettings:
    rules = ChannelRules(
        name=name,
        topics=section.topics,
        least=section.least,
        quiet=tuple(parse_window(text) for text in section.quiet),
        zone=ZoneInfo(section.timezone or "UTC"),
        urgent_passes=section.urgent,
    )
    try:
        url = resolve_credential(section.url, environ=environ).get_secret_value()
    except BadValue as exc:
        return ChannelSettings(rules=rules, error=f"{exc}; {exc.hint}")
    scheme, separator, _ = url.partition("://")
    if not separator:
        return ChannelSettings(rules=rules, error="its url is no address, like https://... or ntfys://...")
    if scheme.lower() not in {"http", "https"} and find_spec("apprise") is None:
        return ChannelSettings(rules=rules, error=f"it needs apprise: {install_command('notify')}, then restart")
    return ChannelSettings(rules=rules, url=url)


def _secret_parts(url: str) -> Iterator[str]:
    """Return the address of a channel and what of it may be a secret, wherever it turns up."""
    yield url
    for part in re.split(r"[/?&=@:,]+", url.partition("://")[2]):
        if len(part) >= SECRET_PART_MIN:
            yield from {part, unquote(part)}


def _warning(problem: Problem, source: str) -> str:
    sentence = problem.sentence(source)
    return f"{sentence} ({problem.hint})" if problem.hint else sentence


def open_store(
    config: Config, state_dir: Path, environ: Mapping[str, str]
) -> tuple[str, Callable[[], ObjectStore], tuple[str, ...]]:
    """Return the checkpoint store's name, how it is opened, and the secrets of it.

    Raises:
        BadConfig: a key of the bucket is not at the place that the config names, or no client of buckets is installed.
    """
    section = config.store
    if not section.is_bucket:
        folder = state_dir / STORE_FOLDER if section.url == STORE_DEFAULT else Path(unquote(urlsplit(section.url).path))
        return str(folder), partial(FolderStore, folder), ()
    if find_spec("boto3") is None:
        hint = f"{install_command('s3')}, or a folder as store"
        raise BadConfig(f"store.url: a store in a bucket needs boto3, which is not installed\n\nhint: {hint}")
    keys: dict[str, str | None] = {}
    for name in ("access_key", "secret_key", "signer_access_key", "signer_secret_key"):
        ref = getattr(section, name)
        try:
            keys[name] = None if ref is None else resolve_credential(ref, environ=environ).get_secret_value()
        except BadValue as exc:
            raise BadConfig(f"store.{name}: {exc}\n\nhint: {exc.hint}") from exc
    url = urlsplit(section.url)
    prefix = url.path.strip("/")
    place = S3Place(
        bucket=url.netloc,
        prefix=f"{prefix}/" if prefix else "",
        endpoint_url=section.endpoint_url,
        region=section.region,
        access_key=keys["access_key"],
        secret_key=keys["secret_key"],
        signer_key=keys["signer_access_key"],
        signer_secret=keys["signer_secret_key"],
        grants=section.grants or AUTO,
        role_arn=section.role_arn,
        account=section.account,
        grants_endpoint_url=section.grants_endpoint_url,
    )
    secret = tuple(key for key in (keys["secret_key"], keys["signer_secret_key"]) if key is not None)
    return str(place), partial(open_bucket, place), secret


def provider_settings(one: ProviderConfig, config: Config, environ: Mapping[str, str]) -> ProviderSettings:
    """Return one provider's settings with its secret; what is wrong with them is in `last_error`."""
    credential, last_error = None, ""
    if one.common.api_key is not None:
        try:
            credential = resolve_credential(one.common.api_key, environ=environ).get_secret_value()
        except BadValue as exc:
            last_error = f"{exc}; {exc.hint}"
    elif one.plugin.needs_credential:
        last_error = f'no key is configured; put api_key = {{ file = "..." }} under [providers.{one.name}]'
    fee = one.common.fee_multiplier
    if fee is None:
        fee, odd = _usual_fee(one)
        last_error = last_error or odd
    return ProviderSettings(
        name=ProviderName(one.name),
        title=one.plugin.title,
        enabled=one.common.enabled,
        fee_ppm=fee,
        poll_every=one.common.poll_every or config.daemon.poll_every,
        machines_every=one.common.machines_every or config.daemon.machines_every,
        plugin=one.plugin,
        settings=one.settings,
        credential=credential,
        last_error=last_error,
    )


def _usual_fee(one: ProviderConfig) -> tuple[int, str]:
    """Return the fee that the plugin states, or 1 and what is wrong with it: a plugin that fails ends nothing else."""
    try:
        stated: object = one.plugin.traits(one.settings).default_fee_multiplier
        if isinstance(stated, str) and FEE_LEAST <= (fee := Decimal(stated)) <= FEE_MOST:
            return int(fee * MICRO), ""
    except Exception as exc:  # noqa: BLE001 - a plugin that fails ends nothing else
        return MICRO, f"the plugin failed with {type(exc).__name__}, which is a bug in it"
    return MICRO, f"the plugin states a fee that is no text from {FEE_LEAST} to {FEE_MOST}, which is a bug in it"


def _own_install(state_dir: Path) -> str:
    """Make up a label once: two daemons that do not know of each other must not own each other's machines."""
    path = state_dir / INSTALL_FILE
    try:
        if path.exists():
            return path.read_text(encoding="ascii").strip()
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return write_once(path, "".join(secrets.choice(ALPHABET) for _ in range(INSTALL_LENGTH))).strip()
    except OSError as exc:
        if exc.errno in DISK_FULL:
            hint = "free some space there; nothing was half-written"
        else:
            hint = "set STATE_DIRECTORY to a folder that this user may write"
        raise BadConfig(f"the state folder {state_dir} cannot be used: {exc.strerror}\n\nhint: {hint}") from exc
