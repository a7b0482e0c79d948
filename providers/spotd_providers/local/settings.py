"""The settings under `[providers.local]`: the hosts of the local market, and how their prices move.

With nothing set there is a market of a dozen hosts. Prices are dollars per hour for the whole machine, as the other
providers list them; times in `events` and price files are virtual, by the daemon's clock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    PlainSerializer,
    model_validator,
)

from spotd_providers.contract.values import NO_GPU, micro_usd
from spotd_providers.kit.boundary import AdapterSettings, duration
from spotd_providers.kit.text import write_atomically
from spotd_providers.local.hosts import REAL_TIME, ScaledClock, read_clock

_NAME: Final = r"^[a-z0-9][a-z0-9.-]{0,62}$"


def _duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError('a duration needs its unit, like "90s", "15m" or "1h30m"')
    return duration(value, example='"90s", "15m" or "1h30m"')


def _no_number(value: Any) -> Any:
    if isinstance(value, int | float):
        raise ValueError('an instant or a duration needs its unit, like "1h30m" or 2026-03-02T14:00:00Z')
    return value


def _money(value: Any) -> Any:
    return micro_usd(value) if isinstance(value, str | float | int) else value


def _as_dollars(value: int) -> str:
    return f"{value // 1_000_000}.{value % 1_000_000:06d}"


def _as_seconds(value: timedelta) -> str:
    return f"{value.total_seconds():f}s"


Duration = Annotated[timedelta, BeforeValidator(_duration), PlainSerializer(_as_seconds)]
Dollars = Annotated[int, BeforeValidator(_money), Field(ge=0), PlainSerializer(_as_dollars)]
"""Read as dollars, held as micro-dollars."""


File = Annotated[Path, AfterValidator(Path.absolute)]
"""The server runs in another folder, so a path must mean the same there."""


class Flavour(StrEnum):
    """The way in which spot machines on a host are taken away."""

    SUDDEN = "sudden"
    """A bid market: you pay your bid. Outbid without warning, a machine is stopped, bills its disk, and may wake up."""
    NOTICE = "notice"
    """A market price: you pay what it is now; a notice two minutes ahead, then the machine is gone."""


class SeededPrice(AdapterSettings):
    """Made-up prices that behave as real ones do: a pure function of seed, host and time."""

    kind: Literal["seeded"] = "seeded"
    base: Dollars = Field(description="what the host costs on an ordinary weekday noon, $ per hour")
    volatility: float = Field(default=0.08, ge=0, le=0.5, description="size of the ordinary ups and downs")
    night: float = Field(default=0.25, ge=0, le=0.8, description="how much cheaper the middle of the night is")
    weekend: float = Field(default=0.12, ge=0, le=0.8, description="how much cheaper weekends are")
    spikes: float = Field(default=0.10, ge=0, le=1, description="chance of a price spike in any six hours")
    stock_outs: float = Field(default=0.05, ge=0, le=1, description="chance of a stock-out in any twelve hours")
    tick: Duration = Field(default=timedelta(minutes=5), ge=timedelta(seconds=1), description="how often it moves")


class FixedPrice(AdapterSettings):
    """One price for ever."""

    kind: Literal["fixed"] = "fixed"
    price: Dollars


class CsvPrice(AdapterSettings):
    """Prices from a file with the columns `time,price` and optionally `available`; each row holds until the next.

    `time` is an instant, or seconds since `start` (by default: since the market was opened first).
    """

    kind: Literal["csv"] = "csv"
    path: File
    start: AwareDatetime | None = None


class TracePrice(AdapterSettings):
    """A recorded trace, replayed; after its end it begins again.

    JSON or .json.gz with `metadata.gap_seconds`, `data` (how many machines could be had) and `prices`.
    """

    kind: Literal["trace"] = "trace"
    path: File
    start: AwareDatetime | None = Field(default=None, description="when the first tick begins; by default as CSV")
    first_tick: int = Field(default=0, ge=0)
    price: Dollars | None = Field(default=None, description="for a trace that recorded no prices")


PriceSpec = Annotated[SeededPrice | FixedPrice | CsvPrice | TracePrice, Field(discriminator="kind")]


class HostSpec(AdapterSettings):
    """One host of the market, or a pool of equal machines (`slots`)."""

    name: str = Field(pattern=_NAME)
    gpu: str = Field(
        min_length=1, max_length=40, description="canonical name, say RTX_4090; CPU for a host without one"
    )
    gpu_count: int = Field(default=1, ge=0, le=16)
    vram_mb: int | None = Field(default=None, gt=0)
    region: str = "local"
    utc_offset_h: float = Field(default=0, ge=-12, le=14, description="where it is night")
    flavour: Flavour = Flavour.SUDDEN
    spot: PriceSpec | None = Field(default=None, description="how the spot price moves; absent: not sold as spot")
    on_demand: Dollars | None = Field(default=None, description="absent: not sold on-demand")
    slots: int = Field(default=1, ge=1, le=1000, description="machines it can run at a time")
    storage_gb_month: Dollars = 100_000
    upload_gb: Dollars = 0
    download_gb: Dollars = 0
    disk_gb_max: int = Field(default=2000, ge=1)
    cpus: float = Field(default=8, gt=0)
    memory_mb: int = Field(default=32_768, gt=0)
    cuda_max: str = "13.0"
    reliability: float = Field(default=0.99, ge=0, le=1)
    upload_mbps: float = Field(default=800, gt=0)
    download_mbps: float = Field(default=800, gt=0)

    @model_validator(mode="after")
    def _has_gpus_or_none(self) -> HostSpec:
        if (self.gpu == NO_GPU) != (self.gpu_count == 0):
            raise ValueError(f'host {self.name}: gpu = "{NO_GPU}" and gpu_count = 0 go together: it has no GPU')
        return self

    @model_validator(mode="after")
    def _is_sold(self) -> HostSpec:
        if self.spot is None and self.on_demand is None:
            raise ValueError(f"host {self.name} is sold neither as spot nor on-demand: give it spot or on_demand")
        return self


class Happening(StrEnum):
    """The effect of a scripted event."""

    PREEMPT = "preempt"
    STOCK_OUT = "stock-out"
    PRICE = "price"
    CRASH = "crash"
    """The host dies: its machines are gone without a word."""


class EventSpec(AdapterSettings):
    """An event at a set time on a host, so that demos and tests have the same preemptions every time."""

    do: Happening
    at: Annotated[AwareDatetime | Duration | None, BeforeValidator(_no_number)] = Field(
        default=None, description="an instant, or since the market was opened"
    )
    after_launch: int | None = Field(
        default=None, ge=1, description="counts launches from 1: of the host, or of the market"
    )
    delay: Duration = Field(default=timedelta(0), description="with after_launch: so long after it")
    host: str | None = Field(default=None, description="by default the host of that launch")
    notice: bool | None = Field(default=None, description="preempt: by default as the host's flavour is")
    lasting: Duration = Field(default=timedelta(minutes=30), description="how long the cause persists")
    price: Dollars | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> EventSpec:
        if (self.at is None) == (self.after_launch is None):
            raise ValueError("an event needs either at or after_launch")
        if self.host is None and self.after_launch is None:
            raise ValueError("an event at a set time needs its host")
        if (self.price is None) == (self.do is Happening.PRICE):
            raise ValueError("price belongs to an event that sets the price, and only to that")
        return self


class MarketSpec(AdapterSettings):
    """The specification of the market, for its server."""

    seed: int = 1
    hosts: tuple[HostSpec, ...] = Field(default=(), description="absent: the built-in dozen")
    events: tuple[EventSpec, ...] = ()
    notice_lead: Duration = Field(default=timedelta(minutes=2), description="time between a notice and the end")
    provisioning: Duration = Field(default=timedelta(0), description="time between a launch and the start script")
    list_lag: Duration = Field(default=timedelta(0), description="time until a new machine shows up in lists")
    machines_max: int = Field(default=1000, ge=1, description="the account's quota")
    keep_gone: Duration = Field(default=timedelta(hours=1), description="how long gone machines are listed")
    keep_directories: bool = Field(default=False, description="keep what gone machines wrote")

    @model_validator(mode="after")
    def _names_are_known(self) -> MarketSpec:
        names = [host.name for host in self.hosts]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two hosts are named {sorted(twice)[0]}")
        if names:
            for event in self.events:
                if event.host is not None and event.host not in names:
                    raise ValueError(f"an event names the host {event.host}, which is not in hosts")
        return self


class LocalSettings(MarketSpec):
    """`[providers.local]`."""

    directory: File | None = Field(default=None, description="where the market lives; by default in the state folder")
    base_url: str | None = Field(
        default=None, description="a market that runs already; its token is the provider's credential"
    )
    idle_exit: Duration = Field(
        default=timedelta(minutes=10), description="real time without machines and calls after which its server ends"
    )

    @model_validator(mode="after")
    def _stays_here(self) -> LocalSettings:
        if self.base_url is not None:
            with suppress(ValueError):
                parts = urlsplit(self.base_url)
                if parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port != 0:
                    return self
            raise ValueError('base_url must be on this computer, like "http://127.0.0.1:8000"')
        return self

    def market(self) -> MarketSpec:
        """Return the part that the market's server needs."""
        return MarketSpec.model_validate({name: getattr(self, name) for name in MarketSpec.model_fields})


def event_time(event: EventSpec, opened_at: datetime) -> datetime | None:
    """Return the instant of an event with a set time."""
    if isinstance(event.at, timedelta):
        return opened_at + event.at
    return event.at


# What the server answers with; here, since its customers import nothing of the market itself.


START_SCRIPT_BYTES_MAX: Final = 4096


class Refusal(StrEnum):
    """The code on the wire; each is one leaf of the contract's error tree."""

    UNAUTHORISED = "unauthorised"
    NO_OFFER = "no-offer"
    NO_CAPACITY = "no-capacity"
    PRICE_MOVED = "price-moved"
    REJECTED = "rejected"
    QUOTA = "quota"
    NO_MACHINE = "no-machine"
    INTERNAL = "internal"


# The files of a local market's folder, which its server and its customers share.
#
# `lock` is held while a server lives, so there is never a second one. `server.json` (only this user can read it) says
# where it listens and holds the token that opens its door; after a crash it may be stale, which shows when nothing
# answers there. `spec.json` and `clock.json` are written by the process that starts the server.


class AlreadyServed(Exception):
    """Another server holds this market."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEndpoint:
    """The address of a market's server, and the token for it."""

    url: str
    token: str = field(repr=False)


def find_endpoint(folder: Path) -> ServedEndpoint | None:
    """Return the address of this market's last server, which may have ended."""
    try:
        content = json.loads((folder / "server.json").read_text())
        return ServedEndpoint(url=content["url"], token=content["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def announce(folder: Path, url: str) -> str:
    """Write where the server listens; return the token for its clients.

    Every server has a new one: a process that takes a dead server's port, and is sent its token, has nothing.
    """
    token = secrets.token_urlsafe(32)
    write_atomically(folder / "server.json", json.dumps({"url": url, "pid": os.getpid(), "token": token}), mode=0o600)
    return token


def withdraw(folder: Path) -> None:
    """Delete the file by which clients find the server."""
    (folder / "server.json").unlink(missing_ok=True)


def clock_of(folder: Path) -> ScaledClock:
    file = folder / "clock.json"
    return read_clock(file) if file.exists() else REAL_TIME


def spec_of(folder: Path) -> tuple[MarketSpec, str]:
    """Return the market's specification, and the hash of its text."""
    try:
        text = (folder / "spec.json").read_text()
    except FileNotFoundError:
        return MarketSpec(), ""
    return MarketSpec.model_validate_json(text), spec_hash(text)


def spec_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def take(folder: Path) -> int:
    """Lock the market until the returned descriptor is closed, or the process has ended.

    Raises:
        AlreadyServed: another one has it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise AlreadyServed(f"another server has the market in {folder}") from exc
    return descriptor


def still_ours(folder: Path, descriptor: int) -> bool:
    """Whether the market that was taken is still the one in this folder; its files may have been removed since."""
    try:
        return os.path.samestat((folder / "lock").stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
