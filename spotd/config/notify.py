"""The `[notify.NAME]` tables: who is notified, of what, and when not."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError, model_validator

from spotd.config.credentials import CredentialRef
from spotd.config.values import Section, hinted, problems_of
from spotd.core.notifications import CHOICES, Severity, Topic
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
