"""The edge of an adapter: nothing but leaves of the contract's error tree leaves it, and no list without a bound.

Each adapter translates what it expects. What it does not expect (a library's own exception, a defect, an answer of a
shape that was not foreseen) is translated here, once for all of them: a read or an end that fails so is `Unavailable`,
and a launch has an unknown outcome, because the machine may exist. `AdapterPlugin` opens every provider behind it.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

from spotd_providers.contract import errors
from spotd_providers.contract.errors import OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.provider import Provider, ProviderTraits, Services
from spotd_providers.contract.values import (
    MICRO,
    Capability,
    LaunchRequest,
    OfferPage,
    Power,
    ProviderName,
    Secret,
    micro_usd,
)
from spotd_providers.kit.shapes import listed_reasons

LEAVES: Final[tuple[type[ProviderError], ...]] = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ProviderError) and kind is not ProviderError
)
CALLS: Final = (
    "offers", "find", "instances", "terminate", "check", "launch", "change_bid", "logs", "shell", "open_port",
    "account", "balance", "charges",
)  # fmt: skip
_MARK: Final = "_spotd_contract_only"
CAUSES_MAX: Final = 20


def keep_contract(kind: type[Any]) -> None:
    """Make every call of this class of providers raise leaves of the contract only, and bound what it rejects."""
    if _MARK in vars(kind):
        return
    for name in CALLS:
        call = getattr(kind, name, None)
        if call is not None:
            setattr(kind, name, _guarded(call, name))
    setattr(kind, _MARK, True)


def as_leaf(exc: Exception, *, call: str, request: object = None) -> ProviderError:
    """Return the leaf of the contract for an error of a call; the words of a foreign one may hold a secret."""
    if isinstance(exc, ProviderError) and isinstance(exc, LEAVES):
        return exc
    sentence = f"{call} failed with {type(exc).__name__}, which the adapter does not expect"
    if isinstance(request, LaunchRequest):
        return OutcomeUnknown(sentence, key=request.key)
    return Unavailable(sentence)


def _guarded(call: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(call)
    async def asked(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            answer = await call(self, *arguments, **options)
        except Exception as exc:  # an adapter's own defect, too, must not pass for an answer
            request = arguments[0] if arguments else options.get("request")
            if isinstance(request, LaunchRequest) and request.login is not None:
                _hide(exc, request.login.password)
            leaf = as_leaf(exc, call=name, request=request)
            if leaf is exc:
                raise
            raise leaf from exc
        return _bounded(answer)

    return asked


def _hide(exc: BaseException, secret: Secret) -> None:
    """Remove the secret from the texts of an error and of its causes: a refusal may quote what was sent."""
    text, found = secret.reveal(), exc
    for _ in range(CAUSES_MAX):
        found.args = tuple(_without(one, text) for one in found.args)
        for name, value in list(vars(found).items()):
            setattr(found, name, _without(value, text))
        cause = found.__cause__ or found.__context__
        if cause is None:
            return
        found = cause
    found.__cause__ = found.__context__ = None


def _without(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(text, "***") if text else value
    return "***" if text and text in repr(value) else value


def _bounded(answer: Any) -> Any:
    if isinstance(answer, OfferPage):
        reasons = listed_reasons(answer.rejected)
        return answer if reasons == answer.rejected else replace(answer, rejected=reasons)
    return answer


# Settings as users write them: durations, and base URLs that keep a key safe.


class AdapterSettings(BaseModel):
    """A table of the config; an unknown key is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ApiSettings(AdapterSettings):
    """The settings of a provider whose API is in one place: `base_url`, with the real one as its default."""

    version: ClassVar[str] = ""
    """The path before all others, which a user may have written, too."""

    base_url: str

    @field_validator("base_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example=cls.model_fields["base_url"].default).removesuffix(cls.version)


_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def duration(text: str, *, example: str) -> timedelta:
    """Parse days, hours, minutes and seconds with their units.

    Raises:
        ValueError: it is not written so.
    """
    parts = _DURATION.fullmatch(text.strip())
    if parts is None or not any(parts.groups()):
        raise ValueError(f"write it like {example}")
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _money(value: Any) -> Any:
    return micro_usd(value) if isinstance(value, str | float | int) else value


def _span(value: Any) -> Any:
    return duration(value, example='"2m"') if isinstance(value, str) else value


Dollars = Annotated[int, BeforeValidator(_money), Field(ge=0), PlainSerializer(lambda value: value / MICRO)]
"""In an annotation of settings: dollars as a user writes them, kept as micro-dollars."""
Span = Annotated[timedelta, BeforeValidator(_span)]
"""The same of a duration."""


_HOST: Final = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_PLAIN: Final = re.compile(r"[!-~]+")


def is_loopback(url: str) -> bool:
    """Whether this URL names this very computer."""
    host = (urlsplit(url).hostname or "").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def safe_base_url(value: str, *, example: str) -> str:
    """Check a base URL and return it without a final slash.

    Raises:
        ValueError: it is no base URL, or would carry the key in the clear.
    """
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:  # a bracket is missing, or the port is no number
        raise ValueError(f'is no base URL; write it like "{example}"') from None
    if not is_url or parts.query or parts.fragment or "@" in parts.netloc or not _PLAIN.fullmatch(value):
        raise ValueError(f'is no base URL; write it like "{example}"')
    if parts.scheme == "http" and not is_loopback(value):
        raise ValueError("plain http would send the API key in the clear; use https")
    return value.rstrip("/")


# The descriptor of a provider: what an entry point of the group `spotd.providers` names.


S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlugin(Generic[S]):
    """A `ProviderPlugin` whose settings are a pydantic model.

    `powers` is what it can do where all is set for it; a reason beside an available one is what that takes. `tried` is
    what it was run against.
    """

    name: ProviderName
    title: str
    settings_model: type[S]
    needs_credential: bool
    traits_by: Callable[[S], ProviderTraits]
    open_by: Callable[[S, Services], AbstractAsyncContextManager[Provider]]
    powers: Mapping[Power, Capability]
    tried: str = "never run against the live service"

    def traits(self, settings: Any) -> ProviderTraits:
        return self.traits_by(self._validate(settings))

    @asynccontextmanager
    async def open(self, settings: Any, services: Services) -> AsyncIterator[Provider]:
        """Open the provider; every error of it is one of the contract's, whatever went wrong inside."""
        async with self.open_by(self._validate(settings), services) as provider:
            keep_contract(type(provider))
            yield provider

    def _validate(self, settings: Any) -> S:
        return settings if isinstance(settings, self.settings_model) else self.settings_model.model_validate(settings)


def capabilities(*available: Power, missing: Mapping[Power, str]) -> Mapping[Power, Capability]:
    """Declare the powers that are available, and the missing ones with the sentence a user reads."""
    absent = {power: Capability(available=False, reason=reason) for power, reason in missing.items()}
    return {**dict.fromkeys(available, Capability(available=True)), **absent}


def all_but(missing: Mapping[Power, str]) -> Mapping[Power, Capability]:
    """Declare every power as available but these, which have the sentence a user reads."""
    return capabilities(*(power for power in Power if power not in missing), missing=missing)


# The command that adds an optional part to this very installation, found out when it is needed.
#
# spotd is installed in several ways, and each has a command of its own for what is added later. A name on an index is
# never used: what is added is named by the libraries that the optional part consists of, or by the clone.


DISTRIBUTION: Final = "spotd"
_OF_EXTRA: Final = re.compile(r"extra\s*==\s*[\"'](?P<extra>[A-Za-z0-9_.-]+)[\"']")


def install_command(extra: str, *, prefix: Path | None = None, python: str | None = None) -> str:
    """Return the command that installs the libraries of one of spotd's extras where this Python finds them.

    Args:
        extra: its name in `pyproject.toml`.
        prefix: the environment; this one unless given.
        python: its interpreter; this one unless given.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    python = python or sys.executable
    distribution = _distribution()
    clone = None if distribution is None else _clone(distribution)
    libraries = [] if distribution is None else libraries_of(extra, distribution.requires or ())
    quoted = " ".join(shlex.quote(one) for one in libraries) or shlex.quote(f"{DISTRIBUTION}[{extra}]")
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {DISTRIBUTION} {quoted}"
    if (prefix / "uv-receipt.toml").is_file():
        return f"uv pip install --python {shlex.quote(python)} {quoted}"
    if clone is not None:
        return f"{_pip(prefix, python)} install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"{_pip(prefix, python)} install {quoted}"


def libraries_of(extra: str, requirements: Iterable[str]) -> list[str]:
    """Return the requirements of an extra, as pip takes them, without those of the extras that it names itself."""
    found = []
    for line in requirements:
        requirement, _, marker = line.partition(";")
        match = _OF_EXTRA.search(marker)
        if match is not None and match["extra"] == extra:
            found.append(requirement.strip())
    return found


def _distribution(find: Callable[[str], Distribution] = Distribution.from_name) -> Distribution | None:
    try:
        return find(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _clone(distribution: Distribution) -> Path | None:
    """Return the folder that an editable installation reads the program from, as its own record states it."""
    try:
        record = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not record.get("dir_info", {}).get("editable", False):
            return None
        path = Path(unquote(urlsplit(record["url"]).path))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return path if (path / "pyproject.toml").is_file() else None


def _pip(prefix: Path, python: str) -> str:
    beside = prefix / "bin" / "pip"
    return shlex.quote(str(beside)) if beside.is_file() else f"{shlex.quote(python)} -m pip"
