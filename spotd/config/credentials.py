"""Secrets: how a config names one, and the one function that reads it. A value never enters a message or a repr."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from spotd.config.values import Section, hinted, named_tables
from spotd.core.domain.policy import registry_server
from spotd_jobs.spec.problems import BadValue, Problem, key_path, nearest
from spotd_providers.contract.provider import ProviderPlugin

CREDENTIALS_DIRECTORY: Final = "CREDENTIALS_DIRECTORY"
HINT: Final = 'write { env = "NAME" }, { file = "/path" } or { credential = "name" } (systemd LoadCredential)'

_BYTES_MAX: Final = 65_536
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIAL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CredentialMissing(BadValue):
    """A secret that the config names is not there, or is empty."""


class CredentialRef(BaseModel):
    """Where a secret is kept: exactly one of the four is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    env: str | None = None
    file: str | None = None
    credential: str | None = None
    inline: SecretStr | None = Field(default=None, exclude=True)
    """A secret written into the config itself; works, and is warned of where others can read the file."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_the_secret_itself(cls, data: object) -> object:
        if isinstance(data, str):
            if not data.strip():
                raise hinted("must not be empty", HINT)
            return {"inline": SecretStr(data)}
        if not isinstance(data, Mapping):
            raise hinted("must be a table that says where the secret is kept", HINT)
        given = [key for key in ("env", "file", "credential") if key in data]
        if "inline" in data or len(given) != 1 or len(data) != 1:
            raise hinted("must name exactly one of env, file and credential", HINT)
        name = data[given[0]]
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            raise hinted(f"must name the {given[0]} as text", HINT)
        if given[0] == "env" and not _ENV_NAME.fullmatch(name):
            # not repeated in the message: the secret may have been written where its name belongs
            raise hinted("env must be the name of an environment variable, not the secret", HINT)
        if given[0] == "credential" and not _CREDENTIAL_NAME.fullmatch(name):
            raise hinted("credential must be a plain name without /", HINT)
        return data


def resolve_credential(ref: CredentialRef, *, environ: Mapping[str, str] = os.environ) -> SecretStr:
    """Return the secret, without the line break an editor leaves at its end.

    Raises:
        CredentialMissing: it is not there or empty; names the place that was searched, never what was found.
    """
    if ref.inline is not None:
        return ref.inline
    if ref.env is not None:
        value = environ.get(ref.env, "").strip()
        if not value:
            raise CredentialMissing(
                f"the environment variable {ref.env} is not set",
                hint=f"export {ref.env}, or put Environment or LoadCredential into the unit, then restart",
            )
        return SecretStr(value)
    if ref.file is not None:
        return _from_file(Path(ref.file).expanduser(), "check the path, owner and mode of the file")
    folder = environ.get(CREDENTIALS_DIRECTORY, "")
    if not folder:
        raise CredentialMissing(
            f'the credential "{ref.credential}" needs systemd, and ${CREDENTIALS_DIRECTORY} is not set',
            hint=f"put LoadCredential={ref.credential}:/path/to/the/key into the unit, or use env or file instead",
        )
    hint = f"put LoadCredential={ref.credential}:/path/to/the/key into the unit"
    return _from_file(Path(folder) / str(ref.credential), hint)


def others_may_read(path: Path) -> bool:
    """Whether users other than its owner can read the file."""
    try:
        return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def others_may_write(path: Path) -> bool:
    """Whether users other than its owner can write the file; a group without another member is the owner's own."""
    try:
        found = path.stat()
    except OSError:
        return False
    if not stat.S_ISREG(found.st_mode):
        return False
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_uid, found.st_gid)


def _is_own_group(user_id: int, group_id: int) -> bool:
    """Whether the group is the private one that many systems make for each user, so that its right gives nothing."""
    try:
        user, group = pwd.getpwuid(user_id), grp.getgrgid(group_id)
    except KeyError:
        return user_id == group_id  # in a container without names
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def _from_file(path: Path, hint: str) -> SecretStr:
    try:
        # A pipe would be waited for, and who waits may be the daemon's loop.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CredentialMissing(f"the secret's file {path} is no regular file", hint=hint)
            raw = file.read(_BYTES_MAX + 1)
    except OSError as exc:
        raise CredentialMissing(f"the secret's file {path} cannot be read: {exc.strerror}", hint=hint) from exc
    try:
        value = raw.decode().strip()
    except UnicodeDecodeError:
        value = None
    if value is None or len(raw) > _BYTES_MAX or "\n" in value:
        # the cause is left out on purpose: a decoding error quotes the bytes it met
        raise CredentialMissing(f"the secret's file {path} does not hold one line of text", hint=hint) from None
    if not value:
        raise CredentialMissing(f"the secret's file {path} is empty", hint=hint)
    return SecretStr(value)


# The key that encrypts the secrets of jobs in a state which several computers share.


_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")


def read_secrets_key(ref: CredentialRef, *, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the 32 bytes of the key.

    Raises:
        CredentialMissing: it is not there, or is none.
    """
    text = resolve_credential(ref, environ=environ).get_secret_value()
    if _KEY.fullmatch(text) is None:
        raise CredentialMissing("it is no key of 64 hexadecimal digits", hint="make one: spotd secrets-key FILE")
    return bytes.fromhex(text)


# Registries of private images: how a machine logs in to them.


REGISTRIES: Final = "registries"
PASSWORD_CHARS: Final = range(8, 4097)
"""A shorter one may be a word of any sentence, so it could not be hidden in logs."""
_SERVER: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")
_USERNAME: Final = re.compile(r"[!-~]{1,255}")
_EXAMPLE: Final = "[registries.ghcr]"


def _server(value: str) -> str:
    is_named = "." in value or ":" in value or value == "localhost"
    if _SERVER.fullmatch(value) is None or not is_named:
        raise hinted("is no server of a registry", 'write it as images name it: server = "ghcr.io"')
    return registry_server(f"{value}/image")


def _username(value: str) -> str:
    if _USERNAME.fullmatch(value) is None:
        raise hinted("is no name to log in with: 1 to 255 characters without blanks", 'write username = "me"')
    return value


class RegistrySection(Section):
    """A registry of private images; docs/how-to/real-marketplaces.md."""

    server: Annotated[str, AfterValidator(_server), Field(examples=["ghcr.io"])]
    """Its server as images name it; every image of it is pulled with this login. "docker.io" is Docker Hub."""

    username: Annotated[str, AfterValidator(_username), Field(examples=["me"])]
    """Whom to log in as."""

    password: Annotated[CredentialRef, Field(examples=[{"env": "SPOTD_REGISTRY_GHCR"}])]
    """Where its password or token is kept: env, file or credential. It should only be able to pull: some providers
    hand it to the host, as `spotctl doctor` says."""


def read_registries(tables: Any, problems: list[Problem]) -> dict[str, RegistrySection]:
    """Return every `[registries.NAME]`, understood; what is wrong is added to the problems."""
    found: dict[str, RegistrySection] = {}
    for name, one in named_tables(REGISTRIES, tables, RegistrySection, _EXAMPLE, problems).items():
        twin = next((other for other, known in found.items() if known.server == one.server), None)
        if twin is not None:
            place = key_path((REGISTRIES, name, "server"))
            message = f"is the server of [{REGISTRIES}.{twin}], too"
            problems.append(Problem(key=place, message=message, hint="a server has one login: remove one"))
        found[name] = one
    return found


def registry_password(section: RegistrySection, *, environ: Mapping[str, str] = os.environ) -> SecretStr:
    """Return the password.

    Raises:
        CredentialMissing: it is not there, or is none.
    """
    password = resolve_credential(section.password, environ=environ)
    if len(password.get_secret_value()) not in PASSWORD_CHARS:
        least, most = PASSWORD_CHARS[0], PASSWORD_CHARS[-1]
        raise CredentialMissing(f"the password has not {least} to {most:,} characters", hint="use an access token")
    return password


def registry_warnings(registries: Mapping[str, RegistrySection], environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what keeps a registry's images from being pulled."""
    for name, section in registries.items():
        try:
            registry_password(section, environ=environ)
        except BadValue as exc:
            yield Problem(key=key_path((REGISTRIES, name, "password")), message=str(exc), hint=exc.hint)


# Providers that are installed, found by entry point and imported only when the config names them.


GROUP: Final = "spotd.providers"
BUNDLED_WITH: Final = "spotd"


class Plugins(Protocol):
    """Where plugins come from; tests give their own."""

    def load(self, name: str) -> ProviderPlugin:
        """Import the plugin.

        Raises:
            BadValue: none of that name is installed, or it cannot be imported.
        """
        ...


class InstalledPlugins:
    """The entry points of this Python environment."""

    def __init__(self) -> None:
        self._found: Mapping[str, EntryPoint] | None = None

    def _entry_points(self) -> Mapping[str, EntryPoint]:
        if self._found is None:
            self._found = {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)}
        return self._found

    def bundled(self) -> tuple[str, ...]:
        """Return those that come with spotd itself, sorted."""
        return tuple(
            name
            for name, entry in self._entry_points().items()
            if entry.dist is not None and entry.dist.name == BUNDLED_WITH
        )

    def load(self, name: str) -> ProviderPlugin:
        entry = self._entry_points().get(name)
        if entry is None:
            raise unknown_provider(name, tuple(self._entry_points()))
        try:
            plugin: ProviderPlugin = entry.load()
        except Exception as exc:  # foreign code runs here, and one broken plugin must not hide the other problems
            raise BadValue(
                f"the plugin of this provider does not load: {type(exc).__name__}: {exc}",
                hint="reinstall it where spotd is installed, or remove this table",
            ) from exc
        return plugin


def unknown_provider(name: str, names: tuple[str, ...]) -> BadValue:
    """Return a refusal that lists what is installed, the likely one first."""
    match = nearest(name, names)
    guess = f'did you mean "{match}"? ' if match else ""
    return BadValue("no such provider is installed", hint=f"{guess}installed: {', '.join(names) or 'none'}")
