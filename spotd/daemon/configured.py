"""The daemon's settings from the user's config and the environment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from spotd import paths
from spotd.config.credentials import resolve_credential
from spotd.config.load import load
from spotd.config.model import SQLITE_DEFAULT, STORE_DEFAULT, Config, ProviderConfig
from spotd.config.refusals import ConfigError
from spotd.daemon.ids import ALPHABET
from spotd.daemon.lifecycle import BadConfig
from spotd.daemon.settings import ProviderSettings, Settings
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.spec.problems import BadValue, Problem
from spotd_providers.contract.money import MICRO, MicroUsd, MicroUsdPerGpuHour
from spotd_providers.contract.values import InstallId, ProviderName

STATE_FILE: Final = "state.sqlite"
STORE_FOLDER: Final = "store"
INSTALL_FILE: Final = "install"
INSTALL_LENGTH: Final = 8


def load_settings(config_path: str | Path | None, overrides: Mapping[str, str]) -> Settings:
    """What the config in force says; `overrides` are variables laid over the environment.

    Raises:
        BadConfig: with every problem found, each with its place.
    """
    environ = {**os.environ, **overrides}
    try:
        loaded = load(None if config_path is None else Path(config_path), environ=environ)
    except ConfigError as exc:
        raise BadConfig(str(exc)) from exc
    config, state_dir = loaded.config, paths.state_dir(environ)
    store_dir = _store_dir(config, state_dir)
    providers = tuple(_provider(one, config, environ) for one in config.providers)
    return Settings(
        install=InstallId(config.daemon.install or _own_install(state_dir)),
        state_dir=state_dir,
        state_url=state_dir / STATE_FILE if config.daemon.state == SQLITE_DEFAULT else config.daemon.state,
        socket=paths.socket_path(environ),
        store_place=str(store_dir),
        open_objects=partial(FolderStore, store_dir),
        providers=providers,
        ceiling_default=None if config.ceiling_default is None else MicroUsdPerGpuHour(config.ceiling_default),
        ceilings={gpu: MicroUsdPerGpuHour(price) for gpu, price in config.ceilings.items()},
        budget_day=None if config.budget.day is None else MicroUsd(config.budget.day),
        budget_month=None if config.budget.month is None else MicroUsd(config.budget.month),
        machines_max=config.budget.machines,
        config_path=loaded.path,
        clock_scale=config.daemon.time_scale,
        clock_start=config.daemon.time_start,
        secrets=tuple(one.credential for one in providers if one.credential is not None),
        warnings=tuple(_warning(problem, str(loaded.path)) for problem in loaded.warnings),
    )


def _warning(problem: Problem, source: str) -> str:
    sentence = problem.sentence(source)
    return f"{sentence} ({problem.hint})" if problem.hint else sentence


def _store_dir(config: Config, state_dir: Path) -> Path:
    if config.store.url == STORE_DEFAULT:
        return state_dir / STORE_FOLDER
    return Path(unquote(urlsplit(config.store.url).path))


def _provider(one: ProviderConfig, config: Config, environ: Mapping[str, str]) -> ProviderSettings:
    credential, trouble = None, ""
    if one.common.api_key is not None:
        try:
            credential = resolve_credential(one.common.api_key, environ=environ).get_secret_value()
        except BadValue as exc:
            trouble = f"{exc}; {exc.hint}"
    elif one.plugin.needs_credential:
        trouble = f'no key is configured; put api_key = {{ file = "..." }} under [providers.{one.name}]'
    traits = one.plugin.traits(one.settings)
    fee = one.common.fee_multiplier
    return ProviderSettings(
        name=ProviderName(one.name),
        title=one.plugin.title,
        enabled=one.common.enabled,
        fee_ppm=int(Decimal(traits.default_fee_multiplier) * MICRO) if fee is None else fee,
        poll_every=one.common.poll_every or config.daemon.poll_every,
        plugin=one.plugin,
        settings=one.settings,
        credential=credential,
        trouble=trouble,
    )


def _own_install(state_dir: Path) -> str:
    """A label made up once: two daemons that never heard of each other must not own each other's machines."""
    path = state_dir / INSTALL_FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"{INSTALL_FILE}.{os.getpid()}")
        draft.write_text("".join(secrets.choice(ALPHABET) for _ in range(INSTALL_LENGTH)), encoding="ascii")
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        return path.read_text(encoding="ascii").strip()
    except OSError as exc:
        raise BadConfig(
            f"the state folder {state_dir} cannot be used: {exc.strerror}\n\n"
            "hint: set STATE_DIRECTORY to a folder that this user may write"
        ) from exc
