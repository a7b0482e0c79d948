"""Finding, reading and understanding the configuration.

Plain `tomllib` and pydantic, without pydantic-settings: a refusal has to name the file and line, or the environment
variable, that a value came from, and that knowledge is lost once sources have been merged for us. The environment goes
over the file: `SPOTD_DAEMON__POLL_EVERY=30s` sets `[daemon] poll_every`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError

from spotd import paths
from spotd.config.credentials import (
    REGISTRIES,
    CredentialRef,
    InstalledPlugins,
    Plugins,
    others_may_read,
    others_may_write,
    read_registries,
    read_secrets_key,
    registry_warnings,
    resolve_credential,
)
from spotd.config.model import (
    BUCKETS,
    SECTIONS,
    STORE_DEFAULT,
    CeilingsSection,
    Config,
    ProviderConfig,
    ProviderSection,
    read_buckets,
    source_warnings,
)
from spotd.config.peers import NOTIFY, USERS, is_in_the_clear, read_channels, read_users, team_warnings
from spotd.config.values import ConfigError, known_keys, problems_of
from spotd_jobs.spec.parse import read_toml
from spotd_jobs.spec.problems import BadValue, Problem, key_path, unknown_keys
from spotd_providers.contract.gpus import UnknownGpu, resolve
from spotd_providers.contract.provider import ProviderPlugin
from spotd_providers.contract.values import NO_GPU

DEFAULT_PROVIDER: Final = "local"
BUILT_IN: Final = "the built-in defaults"
_PREFIX: Final = "SPOTD_"
_LEVEL: Final = "__"
_PROVIDERS: Final = "providers"
_HOMES: Final = {key: f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields}
_COMMON: Final = frozenset(ProviderSection.model_fields)

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration that is in order.

    Attributes:
        path: the file it was read from; `None` when there is none and the defaults hold.
        warnings: what is not wrong but should be mended.
    """

    config: Config
    path: Path | None
    warnings: tuple[Problem, ...] = ()


def load(
    explicit: Path | None = None, *, environ: Mapping[str, str] = os.environ, plugins: Plugins | None = None
) -> Loaded:
    """Load the configuration in force: of `--config`, `$SPOTD_CONFIG`, the user's file or the system's, in this order.

    Raises:
        ConfigError: with every problem found, each with its place.
    """
    path = find(explicit, environ=environ)
    _require_own(path)
    data, text = ({}, "") if path is None else read_toml(path, refusal=ConfigError)
    source = BUILT_IN if path is None else str(path)
    overrides = _from_environment(environ)
    try:
        config = understand(_laid_over(data, overrides), source, plugins=plugins or InstalledPlugins())
    except ConfigError as exc:
        raise _with_places(exc, text, overrides) from exc
    return Loaded(config=config, path=path, warnings=tuple(_warnings(config, path, environ)))


def find(explicit: Path | None = None, *, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the configuration file in force, or `None`. One that was asked for by name must exist."""
    if explicit is not None:
        return explicit
    candidates = paths.config_candidates(environ)
    if environ.get("SPOTD_CONFIG", ""):
        return candidates[0]
    return next((path for path in candidates if path.exists()), None)


def append_table(path: Path, table: str) -> None:
    """Write one more table at the end of a configuration that is in order with it.

    Raises:
        ConfigError: it would not be, and nothing was written. OSError
    """
    text = path.read_text(encoding="utf-8")
    added = table if text.endswith("\n") or not text else f"\n{table}"
    try:
        data = tomllib.loads(text + added)
    except tomllib.TOMLDecodeError as exc:
        problem = Problem(key="", message=f"no table can be added: {exc}", hint="write [users.NAME] by hand")
        raise ConfigError(str(path), [problem]) from exc
    understand(data, str(path), plugins=InstalledPlugins())
    # In place, so that owner, mode and links stay.
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        try:
            file.write(added.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def _require_own(path: Path | None) -> None:
    """Refuse a file that other users can change: it names programs, addresses and the money that may be spent.

    Raises:
        ConfigError: they can.
    """
    if path is not None and others_may_write(path):
        message = "other users can write this file, and spotd spends money by what it says"
        raise ConfigError(str(path), [Problem(key="", message=message, hint=f"chmod go-w {path}")])


def understand(data: Mapping[str, Any], source: str, *, plugins: Plugins) -> Config:
    """Return the configuration that the data describe.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[Problem] = []
    known = {*SECTIONS, _PROVIDERS, NOTIFY, REGISTRIES, BUCKETS, USERS}
    problems += unknown_keys(data, known, elsewhere=_HOMES)
    tables: dict[str, Any] = {name: _section(model, data, name, problems) for name, model in SECTIONS.items()}
    ceilings: CeilingsSection = tables.pop("ceilings")
    problems += _unknown_gpus(data.get("ceilings"))
    config = Config(
        **tables,
        ceiling_default=ceilings.default,
        ceilings=_by_gpu(ceilings),
        notify=read_channels(data.get(NOTIFY, {}), problems),
        registries=read_registries(data.get(REGISTRIES, {}), problems),
        buckets=read_buckets(data.get(BUCKETS, {}), tables["store"].url, problems),
        users=read_users(data.get(USERS, {}), problems),
        providers=_providers(data, plugins, problems),
    )
    problems += _contradictions(config)
    if problems:
        raise ConfigError(source, problems)
    return config


def _section(model: type[S], data: Mapping[str, Any], name: str, problems: list[Problem]) -> S:
    """Return the table as its model; the defaults where it is absent or, with its problems kept, wrong."""
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        problems.append(Problem(key=name, message="must be a table", hint=f"write [{name}] on a line of its own"))
        return model()
    try:
        return model.model_validate(dict(value))
    except ValidationError as exc:
        problems += problems_of(exc, (name,), model)
        return model()


def _by_gpu(ceilings: CeilingsSection) -> dict[str, int]:
    """Return each canonical GPU's ceiling; where two keys cover one GPU, the narrower key counts."""
    widths: dict[str, int] = {}
    result: dict[str, int] = {}
    for key, price in (ceilings.__pydantic_extra__ or {}).items():
        gpus = _gpus(key)
        for gpu in sorted(gpus):
            if gpu not in result or (len(gpus), price) < (widths[gpu], result[gpu]):
                result[gpu], widths[gpu] = price, len(gpus)
    return result


def _gpus(key: str) -> frozenset[str]:
    if key == NO_GPU:
        return frozenset({NO_GPU})
    try:
        return resolve(key)
    except UnknownGpu:
        return frozenset()  # reported where the names of all keys are checked


def _unknown_gpus(table: Any) -> list[Problem]:
    """Return a problem for each key that names no GPU, whatever else is wrong in the table."""
    problems = []
    for key in table if isinstance(table, Mapping) else ():
        if key in CeilingsSection.model_fields or key == NO_GPU:
            continue
        try:
            resolve(key)
        except UnknownGpu as exc:
            guess = (
                f"did you mean {' or '.join(exc.nearest)}?" if exc.nearest else "write a name like H100 or RTX_4090;"
            )
            hint = f"{guess} `default` is the ceiling of every other GPU"
            problems.append(Problem(key=key_path(("ceilings", key)), message="no GPU is known by this name", hint=hint))
    return problems


def _providers(data: Mapping[str, Any], plugins: Plugins, problems: list[Problem]) -> tuple[ProviderConfig, ...]:
    tables = data.get(_PROVIDERS, {})
    if not isinstance(tables, Mapping):
        problems.append(
            Problem(key=_PROVIDERS, message="must hold a table for each provider", hint="write [providers.vast]")
        )
        return ()
    if not tables:
        tables = {DEFAULT_PROVIDER: {}}
    found = (_provider(name, table, plugins, problems) for name, table in sorted(tables.items()))
    return tuple(provider for provider in found if provider is not None)


def _provider(name: str, table: Any, plugins: Plugins, problems: list[Problem]) -> ProviderConfig | None:
    place = (_PROVIDERS, name)
    if not isinstance(table, Mapping):
        problems.append(Problem(key=key_path(place), message="must be a table", hint=f"write [{key_path(place)}]"))
        return None
    try:
        plugin = plugins.load(name)
    except BadValue as exc:
        problems.append(Problem(key=key_path(place), message=str(exc), hint=exc.hint))
        return None
    try:
        return _checked_provider(name, table, plugin, problems)
    except Exception as exc:  # noqa: BLE001 - foreign code runs here, and must not hide the other problems
        message = f"the plugin of this provider fails with {type(exc).__name__}, which is a bug in it"
        problems.append(Problem(key=key_path(place), message=message, hint="remove this table, or mend the plugin"))
        return None


def _checked_provider(
    name: str, table: Mapping[str, Any], plugin: ProviderPlugin, problems: list[Problem]
) -> ProviderConfig | None:
    place = (_PROVIDERS, name)
    model: type[BaseModel] = plugin.settings_model
    common: ProviderSection | None = None
    settings: BaseModel | None = None
    try:
        common = ProviderSection.model_validate({key: value for key, value in table.items() if key in _COMMON})
    except ValidationError as exc:
        problems += problems_of(exc, place, ProviderSection)
    known = {*_COMMON, *known_keys(model, ())}
    problems += unknown_keys(table, known, place)
    try:
        settings = model.model_validate({key: value for key, value in table.items() if key in known - _COMMON})
    except ValidationError as exc:
        problems += problems_of(exc, place, model)
    if common is None or settings is None:
        return None
    return ProviderConfig(name=name, common=common, plugin=plugin, settings=settings)


def _contradictions(config: Config) -> list[Problem]:
    return [*_shared_state_problems(config), *_out_of_time(config), *_jobs_as_spotd(config)]


def _shared_state_problems(config: Config) -> list[Problem]:
    """Return what is missing of what several daemons over one database have in common."""
    if not config.daemon.state.startswith("postgresql://"):
        return []
    found = []
    if config.daemon.install is None:
        message = "is missing: the daemons that share a state in PostgreSQL have one label"
        found.append(Problem(key="daemon.install", message=message, hint='write install = "lab" in each config'))
    if config.store.url == STORE_DEFAULT:
        message = "is a folder of this computer: the daemons that share a state in PostgreSQL have one store"
        found.append(Problem(key="store.url", message=message, hint='write url = "s3://bucket/prefix" in each config'))
    return found


def _jobs_as_spotd(config: Config) -> list[Problem]:
    """Return where a user who may only submit could do everything: jobs there can read what spotd keeps."""
    near = [one.name for one in config.providers if one.common.enabled and _shares_files(one)]
    names = [name for name, user in config.users.items() if user.role == "submit"]
    if not near or not names:
        return []
    message = f'is "submit", but jobs at {", ".join(near)} can read the files of this computer, and so do everything'
    hint = f'enabled = false in [providers.{near[0]}], or role = "operate"'
    return [Problem(key=key_path((USERS, name, "role")), message=message, hint=hint) for name in names]


def _out_of_time(config: Config) -> list[Problem]:
    if config.daemon.time_scale == 1:
        return []
    real = [provider.name for provider in config.providers if provider.common.enabled and not _shares_files(provider)]
    if not real:
        return []
    return [
        Problem(
            key="daemon.time_scale",
            message=f"cannot be {config.daemon.time_scale:g} beside {', '.join(real)}, whose time is real",
            hint="remove time_scale, or enable only the local market",
        )
    ]


def out_of_reach(config: Config) -> list[str]:
    """Return the enabled providers whose machines cannot reach the checkpoint store: nothing is launched there."""
    if config.store.is_bucket:
        return []
    enabled = [one for one in config.providers if one.common.enabled]
    return [one.name for one in enabled if not _shares_files(one) and not _no_launches(one)]


def _no_launches(provider: ProviderConfig) -> str:
    try:
        return str(provider.plugin.traits(provider.settings).no_launches)
    except Exception:  # noqa: BLE001 - as below
        return ""


def _shares_files(provider: ProviderConfig) -> bool:
    try:
        return provider.plugin.traits(provider.settings).hosts_share_filesystem is True
    except Exception:  # noqa: BLE001 - the daemon reports what is wrong with this plugin, and continues without it
        return False


def _warnings(config: Config, path: Path | None, environ: Mapping[str, str]) -> list[Problem]:
    """Return what does not stop the daemon: secrets that others can read, enabled providers without a usable key."""
    warnings = [*_open_secrets(config, path), *registry_warnings(config.registries, environ)]
    warnings += source_warnings(config.buckets, config.hub, environ)
    keys: list[bytes] = []
    for name in ("secrets_key", "former_secrets_key"):
        try:
            if (key_ref := getattr(config.daemon, name)) is not None:
                keys.append(read_secrets_key(key_ref, environ=environ))
                if len(keys) > len(set(keys)):
                    raise BadValue("is the same key as secrets_key", hint="name the key that it has replaced")
        except BadValue as exc:
            warnings.append(Problem(key=key_path(("daemon", name)), message=str(exc), hint=exc.hint))
    warnings += team_warnings(config.api, config.users, environ)
    if not config.budget.machines:
        warnings.append(Problem(key="budget.machines", message="is 0, so nothing is launched", hint="write 1 or more"))
    for provider in config.providers:
        ref = provider.common.api_key
        key = key_path((_PROVIDERS, provider.name, "api_key"))
        own = f'{{ env = "{provider.name.upper()}_API_KEY" }}'
        if provider.common.enabled and (why := _no_launches(provider)):
            warnings.append(Problem(key=key_path((_PROVIDERS, provider.name)), message=why))
        if ref is None:
            if provider.common.enabled and provider.plugin.needs_credential:
                hint = f"write api_key = {own}, or enabled = false"
                warnings.append(Problem(key=key, message="is missing, so nothing can be launched there", hint=hint))
            continue
        if provider.common.enabled:
            try:
                resolve_credential(ref, environ=environ)
            except BadValue as exc:
                warnings.append(Problem(key=key, message=str(exc), hint=exc.hint))
    for name, channel in config.notify.items():
        where = key_path((NOTIFY, name, "url"))
        try:
            url = resolve_credential(channel.url, environ=environ).get_secret_value()
        except BadValue as exc:
            warnings.append(Problem(key=where, message=str(exc), hint=exc.hint))
            continue
        if is_in_the_clear(url):
            message = "is sent in the clear: everybody on the way can read the messages and its secret address"
            warnings.append(Problem(key=where, message=message, hint="use the https:// address of the same service"))
    return warnings


def secrets_of(config: Config) -> Iterator[tuple[tuple[str, ...], CredentialRef | SecretStr]]:
    """Yield every secret of the configuration with its key, whichever section names it."""
    for name in SECTIONS:
        yield from _secrets_in(getattr(config, name), (name,))
    for provider in config.providers:
        yield from _secrets_in(provider.common, (_PROVIDERS, provider.name))
        yield from _secrets_in(provider.settings, (_PROVIDERS, provider.name))
    named: tuple[tuple[str, Mapping[str, BaseModel]], ...] = (
        (NOTIFY, config.notify),
        (REGISTRIES, config.registries),
        (BUCKETS, config.buckets),
        (USERS, config.users),
    )
    for kind, tables in named:
        for name, table in tables.items():
            yield from _secrets_in(table, (kind, name))


def _open_secrets(config: Config, path: Path | None) -> list[Problem]:
    """Return a warning for each secret in a file which other users can read."""
    warnings = []
    for where, value in secrets_of(config):
        kept = path if not isinstance(value, CredentialRef) or value.inline is not None else _file_of(value)
        if kept is None or not others_may_read(kept):
            continue
        hint = f"chmod 600 {kept}"
        if kept == path:
            variable = "_".join(where[1:] if where[0] == _PROVIDERS else ("spotd", *where)).upper()
            hint += f', or write {where[-1]} = {{ env = "{variable}" }}'
        message = "is a secret in a file that other users can read"
        warnings.append(Problem(key=key_path(where), message=message, hint=hint))
    return warnings


def _secrets_in(table: object, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], CredentialRef | SecretStr]]:
    for name in type(table).model_fields if isinstance(table, BaseModel) else ():
        value = getattr(table, name)
        if isinstance(value, CredentialRef | SecretStr):
            yield (*place, name), value
        elif isinstance(value, BaseModel):
            yield from _secrets_in(value, (*place, name))


def _file_of(ref: CredentialRef) -> Path | None:
    return None if ref.file is None else Path(ref.file).expanduser()


def _from_environment(environ: Mapping[str, str]) -> dict[tuple[str, ...], tuple[str, Any]]:
    """Return the name and value of every variable that sets a key, by the key's path."""
    found: dict[tuple[str, ...], tuple[str, Any]] = {}
    for name in sorted(environ):
        parts = name.removeprefix(_PREFIX).split(_LEVEL)
        if name.startswith(_PREFIX) and len(parts) > 1 and all(parts):
            found[tuple(part.lower() for part in parts)] = (name, _as_toml(environ[name]))
    return found


def _as_toml(text: str) -> Any:
    """Return the value as TOML would read it; plain text where it is no TOML, so that no value needs two quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


def _laid_over(data: Mapping[str, Any], overrides: Mapping[tuple[str, ...], tuple[str, Any]]) -> dict[str, Any]:
    result = dict(data)
    for path, (_, value) in overrides.items():
        table = result
        for key in path[:-1]:
            inner = table.get(key, {})
            if not isinstance(inner, Mapping):
                break  # the file is wrong here, and that is reported when it is understood
            table[key] = dict(inner)
            table = table[key]
        else:
            table[path[-1]] = value
    return result


def _with_places(error: ConfigError, text: str, overrides: Mapping[tuple[str, ...], tuple[str, Any]]) -> ConfigError:
    """Return the same refusal, each problem with the line it stands on or the variable that set it."""
    names = {key_path(path): name for path, (name, _) in overrides.items()}

    def placed(problem: Problem) -> Problem:
        for key, name in names.items():
            if problem.key == key or problem.key.startswith((f"{key}.", f"{key}[")):
                return replace(problem, message=f"{problem.message} (from ${name})", line=0)
        return problem

    located = ConfigError(error.source, [placed(problem) for problem in error.problems]).located(text)
    return ConfigError(located.source, [replace(p, line=p.line or None) for p in located.problems])
