"""`spotd run`: reads the config, runs the daemon, and ends with a code and a sentence instead of a traceback."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

import anyio

from spotd import paths
from spotd.config.credentials import registry_password, resolve_credential
from spotd.config.load import load
from spotd.config.model import STORE_DEFAULT, BucketSection, Config, ProviderConfig, StoreSection
from spotd.config.peers import NotifySection, parse_address, token_digest
from spotd.config.values import FEE_LEAST, FEE_MOST, ConfigError
from spotd.core.domain.market import FREE_EGRESS, UNKNOWN_REGION, StoreEgress, bucket_egress
from spotd.core.domain.policy import Caller, RegistryRules, Right, names_in_config
from spotd.core.domain.states import InvariantBroken
from spotd.core.notifications import ChannelRules
from spotd.daemon import log as logs
from spotd.daemon.commits import CrashPoints, never
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.hub import HubPlace
from spotd.daemon.install import ALPHABET, BadConfig
from spotd.daemon.log import Redactor
from spotd.daemon.policy import ChannelSettings, ProviderSettings, Settings, User
from spotd.daemon.remote_data import BucketPlace, RemotePlaces
from spotd.paths import write_once
from spotd.service import memory
from spotd.service.accelerated import ClockFileBroken
from spotd.service.composition import App, DaemonEnded
from spotd.service.lifecycle import SocketRefused
from spotd.service.state import place_of, secrets_keys
from spotd.store import StateError
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.objects.s3_client import S3Place
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.problems import BadValue, Problem
from spotd_providers.contract import values
from spotd_providers.kit.boundary import install_command

# What reading the checkpoint store costs: as the config states it, or the list price of the store that it names.
#
# List prices of November 2026, in dollars per decimal gigabyte to the internet. The first 100 GB of a month at AWS and
# Google, and three times what is stored at Backblaze, are free there; that is not counted, since nothing here knows
# what else is read of the account.


FREE: Final = values.MicroUsdPerGb(0)
S3: Final = values.MicroUsdPerGb(90_000)
GOOGLE: Final = values.MicroUsdPerGb(120_000)
BACKBLAZE: Final = values.MicroUsdPerGb(10_000)
LIST_PRICES: Final = (
    ("r2.cloudflarestorage.com", FREE),
    ("backblazeb2.com", BACKBLAZE),
    ("storage.googleapis.com", GOOGLE),
)
"""By the end of the endpoint's name. Of a store that is not recognised nothing is known, and nothing is counted."""
_REGION_OF_ENDPOINT: Final = re.compile(r"s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-[0-9])\.amazonaws\.com(?:\.cn)?")


def store_egress(section: StoreSection) -> StoreEgress:
    """Return the prices of reading the store that is configured."""
    return bucket_egress(*_egress_of(section)) if section.is_bucket else FREE_EGRESS


def _egress_of(section: StoreSection | BucketSection) -> tuple[values.MicroUsdPerGb, str]:
    """Return the price of reading a bucket, and its AWS region as `bucket_egress` takes it."""
    host = (urlsplit(section.endpoint_url).hostname or "").lower() if section.endpoint_url else ""
    is_aws = not host or _ends_with(host, "amazonaws.com") or _ends_with(host, "amazonaws.com.cn")
    listed = S3 if is_aws else next((price for name, price in LIST_PRICES if _ends_with(host, name)), FREE)
    price = listed if section.egress_per_gb is None else values.MicroUsdPerGb(section.egress_per_gb)
    return price, (_region(section, host) or UNKNOWN_REGION) if is_aws else ""


def _region(section: StoreSection | BucketSection, host: str) -> str:
    """Return the region of the bucket; empty where neither the config nor the endpoint states it."""
    found = _REGION_OF_ENDPOINT.fullmatch(host)
    return found[1] if found else (section.region or "")


def _ends_with(host: str, name: str) -> bool:
    return host == name or host.endswith(f".{name}")


# The daemon's settings from the user's config and the environment.


STORE_FOLDER: Final = "store"
INSTALL_FILE: Final = "install"
INSTALL_LENGTH: Final = 8
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
SECRET_PART_MIN: Final = 12
"""Shorter parts of an address are mostly words and host names."""


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
    registries, logins = _registries(config, environ)
    remote, remote_secrets = _remote(config, environ)
    keys, key_texts = secrets_keys(config, environ)
    return Settings(
        install=values.InstallId(config.daemon.install or _own_install(state_dir)),
        state_dir=state_dir,
        state_url=place_of(config.daemon.state, state_dir),
        secrets_keys=keys,
        socket=paths.socket_path(environ),
        store_place=place,
        open_objects=open_objects,
        providers=providers,
        ceiling_default=None if config.ceiling_default is None else values.MicroUsdPerGpuHour(config.ceiling_default),
        ceilings={gpu: values.MicroUsdPerGpuHour(price) for gpu, price in config.ceilings.items()},
        egress=store_egress(config.store),
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
        api_address=None if config.api.listen is None else parse_address(config.api.listen),
        api_files=_api_files(config),
        api_url=config.api.url or "",
        users=_users(config, environ),
        channels=channels,
        registries=registries,
        logins=logins,
        remote=remote,
        **_plain_limits(config),
        secrets=(
            *remote_secrets,
            *key_texts,
            *(one.password.reveal() for one in logins.values()),
            *(one.credential for one in providers if one.credential is not None),
            *store_secrets,
            *(part for one in channels for part in _secret_parts(one.url)),
        ),
        warnings=tuple(_warning(problem, str(loaded.path)) for problem in loaded.warnings),
    )


_READ_ON_THEIR_OWN: Final = frozenset({"ceilings", "ceiling_default", "egress", "registries"})


def _plain_limits(config: Config) -> dict[str, Any]:
    """Return each limit that is the value of one key of the config."""
    limits = {}
    for name, words in names_in_config().items():
        if name not in _READ_ON_THEIR_OWN:
            section, _, key = words.removeprefix("[").partition("] ")
            limits[name] = getattr(getattr(config, section), key)
    return limits


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


def _api_files(config: Config) -> tuple[Path, Path] | None:
    certificate, key = config.api.certificate, config.api.key
    return None if certificate is None or key is None else (Path(certificate), Path(key))


def _users(config: Config, environ: Mapping[str, str]) -> tuple[User, ...]:
    """Return the users whose token is known, and is that of no other; the config's warnings have the rest."""
    found: list[User] = []
    for name, one in config.users.items():
        budget = None if one.budget_per_day is None else values.MicroUsd(one.budget_per_day)
        caller = Caller(name=name, right=Right[one.role.upper()], budget_per_day=budget)
        with suppress(BadValue):
            found.append(User(caller=caller, digest=token_digest(one, environ=environ)))
    counts = Counter(user.digest for user in found)
    return tuple(user for user in found if counts[user.digest] == 1)


def _registries(
    config: Config, environ: Mapping[str, str]
) -> tuple[dict[str, RegistryRules], dict[str, values.RegistryLogin]]:
    """Return, by server, which registries are configured, and their logins where the password is known."""
    rules: dict[str, RegistryRules] = {}
    logins: dict[str, values.RegistryLogin] = {}
    for name, one in config.registries.items():
        error = ""
        try:
            password = values.Secret(registry_password(one, environ=environ).get_secret_value())
            logins[one.server] = values.RegistryLogin(server=one.server, username=one.username, password=password)
        except BadValue as exc:
            error = f"[registries.{name}] password: {exc}; {exc.hint}"
        rules[one.server] = RegistryRules(name=name, error=error)
    return rules, logins


def _remote(config: Config, environ: Mapping[str, str]) -> tuple[RemotePlaces, tuple[str, ...]]:
    """Return where data of jobs may lie beside the store, and the secrets of these places."""
    secrets: list[str] = []
    buckets = []
    for name, section in config.buckets.items():
        error = ""
        keys: dict[str, str | None] = {}
        for key in ("access_key", "secret_key"):
            ref = getattr(section, key)
            try:
                keys[key] = None if ref is None else resolve_credential(ref, environ=environ).get_secret_value()
            except BadValue as exc:
                error = f"[buckets.{name}] {key}: {exc}; {exc.hint}"
        if not error and find_spec("boto3") is None:
            error = f"a bucket needs boto3, which is not installed: {install_command('s3')}"
        secrets += [key for key in (keys.get("secret_key"),) if key]
        url = urlsplit(section.url)
        prefix = f"{url.path.strip('/')}/" if url.path.strip("/") else ""
        egress, near = _egress_of(section)
        place = S3Place(
            bucket=url.netloc,
            prefix=prefix,
            endpoint_url=section.endpoint_url,
            region=section.region,
            access_key=keys.get("access_key"),
            secret_key=keys.get("secret_key"),
        )
        buckets.append(
            BucketPlace(
                name=name,
                bucket=url.netloc,
                prefix=prefix,
                place=None if error else place,
                error=error,
                egress=egress,
                near=near,
            )
        )
    token, error = "", ""
    try:
        if config.hub.token is not None:
            token = resolve_credential(config.hub.token, environ=environ).get_secret_value()
            secrets.append(token)
    except BadValue as exc:
        error = f"[hub] token: {exc}; {exc.hint}"
    hub = HubPlace(url=config.hub.url, token=token, error=error)
    return RemotePlaces(buckets=tuple(buckets), hub=hub), tuple(secrets)


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
    from spotd_jobs.objects.s3 import open_bucket  # a store in a folder needs none of it
    from spotd_jobs.objects.s3_grants import AUTO

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
        name=values.ProviderName(one.name),
        title=one.plugin.title,
        enabled=one.common.enabled,
        fee_ppm=fee,
        poll_every=one.common.poll_every or config.daemon.poll_every,
        machines_every=one.common.machines_every or config.daemon.machines_every,
        owned=one.common.owned,
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
            return int(fee * values.MICRO), ""
    except Exception as exc:  # noqa: BLE001 - a plugin that fails ends nothing else
        return values.MICRO, f"the plugin failed with {type(exc).__name__}, which is a bug in it"
    return values.MICRO, f"the plugin states a fee that is no text from {FEE_LEAST} to {FEE_MOST}, which is a bug in it"


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


OK: Final = 0
CANNOT_START: Final = 1
BAD_CONFIG: Final = 2
BROKEN: Final = 70


def run(config_path: str | Path | None, overrides: Mapping[str, str], *, crash: CrashPoints = never) -> int:
    """Run the daemon until a signal ends it; return the exit code.

    `overrides` are variables laid over the environment, in force on every reload too: `STATE_DIRECTORY`,
    `SPOTD_SOCKET`, and any key of the config (`SPOTD_DAEMON__POLL_EVERY`).
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a crash of the interpreter leaves its stacks in the log of the service
    memory.share_one_pool()
    redactor = Redactor()
    logs.configure(redactor)
    load = partial(load_settings, config_path, overrides)
    try:
        settings = load()
        redactor.register(settings.secrets)
        app = App(settings, load=load, redactor=redactor, crash=crash)
        while (ended := anyio.run(app.run)) is not DaemonEnded.BY_SIGNAL:
            has_led = ended is DaemonEnded.LEAD_LOST
            app = App(app.reloaded, load=load, redactor=redactor, crash=crash, has_led=has_led)
    except BadConfig as exc:
        return _fail(str(exc), BAD_CONFIG)
    except KeyboardInterrupt:
        return OK
    except BaseException as exc:
        known = [_words(one) for one in _leaves(exc)]
        if any(words is None for words in known):
            logs.get("daemon").critical("daemon.crashed", exc_info=exc)
            raise
        return _fail("\n".join(dict.fromkeys(words for words in known if words)), _code(exc))
    return OK


def _code(error: BaseException) -> int:
    """Return the exit code of a known failure: the gravest of several."""
    leaves = tuple(_leaves(error))
    if any(isinstance(one, InvariantBroken) for one in leaves):
        return BROKEN
    return BAD_CONFIG if any(isinstance(one, BadConfig) for one in leaves) else CANNOT_START


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Return what really went wrong, below the groups that task groups wrap it in."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _words(error: BaseException) -> str | None:
    """Return the message for the user, or `None` for an unexpected error."""
    match error:
        case SocketRefused() | StateError():
            return f"{error.message}\n\nhint: {error.hint}"
        case ClockFileBroken() | ObjectsError():
            return str(error)
        case BadConfig():
            return str(error)
        case OSError() if error.filename is not None:
            # The disk of the state folder is full, or a folder cannot be written: nothing that is wrong with spotd.
            full = error.errno in DISK_FULL
            hint = "free some space there" if full else "check its owner, its mode and its disk"
            return f"{error.filename}: {error.strerror}\n\nhint: {hint}"
        case InvariantBroken():
            return f"spotd stopped to be safe: {error}\n\nhint: nothing was written; report this with the log"
        case _:
            return None


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code
