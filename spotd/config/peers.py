"""The tables of whom the daemon talks with: `[notify.NAME]` and `[metrics]`, `[api]`, `[users.NAME]` and `[mcp]`.

Who is notified, of what, and when not; who reads figures; and who but the owner uses the API, from where, and how far.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from spotd.certificates import expiry_words
from spotd.config.credentials import CredentialMissing, CredentialRef, others_may_write, resolve_credential
from spotd.config.values import Money, Section, hinted, named_tables, problems_of, url_parts
from spotd.core.notifications import CHOICES, Severity, Topic
from spotd.core.requests import AGENT
from spotd.tokens import TOKEN_LENGTH_MIN, digest_of
from spotd_jobs.spec.fields import parse_window, parse_zone
from spotd_jobs.spec.problems import BadValue, Problem, key_path, nearest

NOTIFY: Final = "notify"
CHANNELS_MAX: Final = 16
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_PLAIN_SCHEMES: Final = frozenset({"http", "json", "xml", "form"})
"""Of a webhook without TLS: ours, and those of apprise."""
_HINT: Final = '[notify.phone] with url = { env = "SPOTD_NOTIFY_PHONE" } below it'


def _window(text: str) -> str:
    try:
        parse_window(text)
    except BadValue as exc:
        raise hinted(str(exc), 'write quiet = ["22:00-07:30", "Sat,Sun"]') from exc
    return text


def _zone(text: str | None) -> str | None:
    try:
        return None if text is None else parse_zone(text)
    except BadValue as exc:
        raise hinted(str(exc), exc.hint) from exc


def _topic(text: str) -> Topic:
    if text not in CHOICES:
        guess = nearest(text, CHOICES)
        hint = f'did you mean "{guess}"?' if guess else f"there are {', '.join(CHOICES)}"
        raise hinted(f'"{text}" is nothing to be notified of', hint)
    return Topic(text)


def _some(topics: tuple[str, ...]) -> tuple[str, ...]:
    if not topics:
        raise hinted("names nothing to be notified of", "leave it out for everything, or remove the channel")
    return topics


_TopicName = Annotated[str, AfterValidator(_topic)]


class NotifySection(Section):
    """One channel of notifications; docs/how-to/notifications.md."""

    url: Annotated[CredentialRef, Field(examples=[{"env": "SPOTD_NOTIFY_PHONE"}])]
    """Where its address is kept, since that holds its secrets: env, file or credential. An address http(s):// is sent
    JSON; for the others of apprise (mailtos://, ntfys://, slack://, ...) spotd[notify] is needed."""

    on: Annotated[tuple[_TopicName, ...], Field(strict=False), AfterValidator(_some)] = CHOICES
    """What it is notified of."""

    severity: Literal["info", "warning", "urgent"] = "info"
    """What matters less is not sent. A preemption is info, a failure warning, a budget that is spent urgent."""

    quiet: Annotated[tuple[Annotated[str, AfterValidator(_window)], ...], Field(strict=False, max_length=32)] = ()
    """Times of the week in which nothing is sent, like "22:00-07:30" or "Sat,Sun". What came is one summary then."""

    timezone: Annotated[str | None, AfterValidator(_zone), Field(examples=["Europe/Kyiv"])] = None
    """Whose clocks these are. Needed with quiet."""

    urgent: bool = False
    """Whether what is urgent is sent in these times, too."""

    @model_validator(mode="after")
    def _quiet_has_a_zone(self) -> NotifySection:
        if self.quiet and self.timezone is None:
            raise hinted("quiet is times of a zone's clocks", 'write timezone = "Europe/Kyiv" beside it')
        if self.timezone is not None and not self.quiet:
            raise hinted("timezone has no times that it is for", "remove it, or write quiet beside it")
        return self

    @property
    def topics(self) -> frozenset[Topic]:
        return frozenset(map(Topic, self.on))

    @property
    def least(self) -> Severity:
        return Severity(self.severity)


def is_in_the_clear(url: str) -> bool:
    """Whether a webhook goes without encryption to another computer."""
    try:
        parts = urlsplit(url.strip())
        host = parts.hostname or ""
    except ValueError:
        return False  # sending it fails, and says so
    return parts.scheme.lower() in _PLAIN_SCHEMES and not _is_this_computer(host)


def _is_this_computer(host: str) -> bool:
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.endswith(".localhost")


def read_channels(tables: Any, problems: list[Problem]) -> dict[str, NotifySection]:
    """Return every `[notify.NAME]`, understood; what is wrong is added to the problems."""
    if not isinstance(tables, Mapping):
        problems.append(Problem(key=NOTIFY, message="must hold a table for each channel", hint=f"write {_HINT}"))
        return {}
    if len(tables) > CHANNELS_MAX:
        problems.append(Problem(key=NOTIFY, message=f"has more than {CHANNELS_MAX} channels", hint="remove some"))
        return {}
    found: dict[str, NotifySection] = {}
    for name, table in tables.items():
        place = key_path((NOTIFY, name))
        if not isinstance(table, Mapping):
            hint = f"each channel is a table of its own: {_HINT}"
            problems.append(Problem(key=place, message="is no table of a channel", hint=hint))
        elif not _NAME.fullmatch(name):
            hint = "name it with up to 32 of a-z, 0-9, - and _"
            problems.append(Problem(key=place, message="is no name for a channel", hint=hint))
        else:
            try:
                found[name] = NotifySection.model_validate(dict(table))
            except ValidationError as exc:
                problems += problems_of(exc, (NOTIFY, name), NotifySection)
    return found


# The `[metrics]` table: where Prometheus reads the daemon's figures.


HINT: Final = 'write listen = "127.0.0.1:9464"'
_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,253})):([0-9]{1,5})")
_LOOPBACK: Final = re.compile(r"127(\.[0-9]{1,3}){3}|::1|localhost")


def parse_address(text: str, *, hint: str = HINT) -> tuple[str, int]:
    """Return host and port.

    Raises:
        PydanticCustomError: it is no address with a port.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65_536:
        raise hinted("is no address with a port", hint)
    return found[1] or found[2], int(found[3])


def is_loopback(host: str) -> bool:
    """Whether an address of the config is one that only this computer reaches."""
    return _LOOPBACK.fullmatch(host) is not None


def _address(text: str) -> str:
    parse_address(text)
    return text


class MetricsSection(Section):
    """Figures for Prometheus, which needs spotd[metrics]; docs/how-to/monitoring.md."""

    listen: Annotated[str | None, AfterValidator(_address), Field(examples=["127.0.0.1:9464"])] = None
    """Where they are served, at /metrics. Absent: nowhere."""

    remote: bool = False
    """Whether listen may be an address that other computers reach. The figures say what runs and what it costs, and
    have no password."""

    @model_validator(mode="after")
    def _stays_here(self) -> MetricsSection:
        if self.listen is not None and not self.remote and not is_loopback(parse_address(self.listen)[0]):
            raise hinted(
                f"{self.listen} is reached from other computers, and the figures have no password",
                f"{HINT}, or remote = true beside it",
            )
        return self


USERS: Final = "users"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
RENEW_HINT: Final = "renew it in its place, then systemctl reload spotd"
_URL_HINT: Final = 'write url = "https://gpu-a.example.org:7443" or url = "https://[2001:db8::7]:7443"'
_MAKE: Final = "spotd user add NAME makes a token and writes its hash"


def _listen(text: str) -> str:
    parse_address(text, hint='write listen = "0.0.0.0:7443"')
    return text


def _url(text: str) -> str:
    parts = url_parts(text, _URL_HINT)
    if parts.scheme != "https" or not parts.hostname or parts.path not in {"", "/"} or "@" in text:
        raise hinted("is not https:// with a host and a port", _URL_HINT)
    return text


def _digest(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise hinted("is no SHA-256: 64 lower-case hexadecimal digits", _MAKE)
    return text


class ApiSection(Section):
    """The API by TCP, for users with tokens; docs/how-to/team.md."""

    listen: Annotated[str | None, AfterValidator(_listen), Field(examples=["0.0.0.0:7443"])] = None
    """Where it is served, with /metrics beside it. Absent: nowhere. An address that other computers reach needs
    certificate and key."""

    certificate: Annotated[str | None, Field(examples=["/etc/spotd/api.crt"])] = None
    """The file of its certificate in PEM, followed by those between it and its authority."""

    key: Annotated[str | None, Field(examples=["/etc/spotd/api.key"])] = None
    """The file of its key in PEM, which others must not be able to read. SIGHUP has both read again."""

    url: Annotated[str | None, AfterValidator(_url), Field(examples=["https://gpu-a.example.org:7443"])] = None
    """Where other daemons of a state in PostgreSQL reach this one. Absent: listen, with the computer's name."""

    @model_validator(mode="after")
    def _is_encrypted(self) -> ApiSection:
        if (self.certificate is None) != (self.key is None):
            raise hinted("certificate and key need each other", "write both, or neither")
        if self.listen and self.certificate is None and not is_loopback(parse_address(self.listen)[0]):
            raise hinted(
                f"{self.listen} is reached from other computers, and tokens would travel there in the clear",
                'write certificate and key beside it, or listen = "127.0.0.1:7443"',
            )
        return self


class UserSection(Section):
    """A user of the API by TCP; `spotd user add` writes one. docs/how-to/team.md."""

    role: Annotated[Literal["view", "submit", "operate"], Field(examples=["submit"])]
    """What the user may do: see all jobs, prices and costs; queue jobs and change those, too; or everything."""

    budget_per_day: Annotated[Money | None, Field(examples=[20.0])] = None
    """Most dollars that all jobs of a user of the role submit may cost together: budgets of those that have not ended,
    and what those have cost that ended since midnight UTC."""

    token_sha256: Annotated[str | None, AfterValidator(_digest), Field(examples=["0" * 64])] = None
    """The SHA-256 of the user's token, as `spotd user add` writes it."""

    token: Annotated[CredentialRef | None, Field(examples=[{"env": "SPOTD_TOKEN_ADA"}])] = None
    """In its place: where the token itself is kept (env, file or credential), 43 or more characters drawn at
    random."""

    @field_validator("token")
    @classmethod
    def _token_is_elsewhere(cls, value: CredentialRef | None) -> CredentialRef | None:
        if value is not None and value.inline is not None:
            raise hinted("is not written into the config", f"write its hash as token_sha256; {_MAKE}")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> UserSection:
        if (self.token_sha256 is None) == (self.token is None):
            raise hinted("needs one of token_sha256 and token", _MAKE)
        if self.role == "submit" and self.budget_per_day is None:
            raise hinted("has no budget_per_day, without which nothing may be queued", "write budget_per_day = 20.0")
        if self.role != "submit" and self.budget_per_day is not None:
            raise hinted(f'a user of the role "{self.role}" has no budget', 'remove it, or write role = "submit"')
        return self


class McpSection(Section):
    """What agents may queue through `spotctl mcp`; they may only watch unless both are set. docs/how-to/agents.md."""

    job_budget: Annotated[Money | None, Field(examples=[10.0])] = None
    """Most dollars that one job of an agent may cost; a job that names no budget gets this one."""

    day_budget: Annotated[Money | None, Field(examples=[30.0])] = None
    """Most dollars that all jobs of agents may cost together: budgets of those that have not ended, and what those
    have cost that ended since midnight UTC."""


def read_users(tables: Any, problems: list[Problem]) -> dict[str, UserSection]:
    """Return every `[users.NAME]`, understood; what is wrong is added to the problems."""
    found = named_tables(USERS, tables, UserSection, "[users.ada]", problems)
    if found.pop(AGENT, None) is not None:
        hint = "agents are limited by [mcp]; give the user another name"
        problems.append(Problem(key=key_path((USERS, AGENT)), message="is the name of all agents", hint=hint))
    return found


def token_digest(section: UserSection, *, environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the hash by which the user's token is known.

    Raises:
        CredentialMissing: the token is not where the config says, or is too short.
    """
    if section.token is None:
        return bytes.fromhex(section.token_sha256 or "")
    token = resolve_credential(section.token, environ=environ).get_secret_value()
    if len(token) < TOKEN_LENGTH_MIN or not token.isascii():
        raise CredentialMissing(f"the token has less than {TOKEN_LENGTH_MIN} characters of ASCII", hint=_MAKE)
    return digest_of(token)


def user_table(name: str, role: str, budget_per_day: str, digest: bytes) -> str:
    """Return the table of a user as it stands in a config."""
    budget = f"budget_per_day = {budget_per_day}\n" if budget_per_day else ""
    return f'\n[{USERS}.{name}]\nrole = "{role}"\n{budget}token_sha256 = "{digest.hex()}"\n'


def team_warnings(
    api: ApiSection, users: Mapping[str, UserSection], environ: Mapping[str, str] = os.environ
) -> Iterator[Problem]:
    """Yield what keeps the API from being served by TCP, or a user from using it."""
    if api.key is not None and (why := key_problem(Path(api.key))):
        yield Problem(key="api.key", message=why, hint=f"chmod 600 {api.key}")
    now = datetime.fromtimestamp(time.time(), UTC)
    if api.certificate is not None and (why := expiry_words(Path(api.certificate).expanduser(), now)):
        yield Problem(key="api.certificate", message=why, hint=RENEW_HINT)
    if api.listen is not None and not users:
        message = "is served to no user: there is no [users.NAME]"
        yield Problem(key="api.listen", message=message, hint="spotd user add NAME --role view")
    digests: dict[bytes, str] = {}
    for name, section in users.items():
        try:
            digest = token_digest(section, environ=environ)
        except BadValue as exc:
            yield Problem(key=key_path((USERS, name, "token")), message=str(exc), hint=exc.hint)
            continue
        if (twin := digests.setdefault(digest, name)) != name:
            message = f"has the token of [{USERS}.{twin}], so neither is let in"
            yield Problem(key=key_path((USERS, name)), message=message, hint="give each a token of its own")


def key_problem(path: Path) -> str:
    """Return why the key of a certificate is not used; empty where it may be."""
    try:
        mode = path.expanduser().stat().st_mode
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"
    # Of a group it is that the file of a systemd credential seems to be, whose access list names the service's user.
    if mode & stat.S_IROTH or others_may_write(path):
        return "is a secret in a file that other users can read or change"
    return ""
