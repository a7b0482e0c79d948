"""The Protocols that a provider implements, and its descriptor.

A provider is opened as an async context manager by its `ProviderPlugin`, holds no module state, and gets everything
that touches the world (HTTP, clock, randomness, logging, threads) through `Services`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol, runtime_checkable

from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Capability,
    CheckLine,
    InstallId,
    Instance,
    InstanceRef,
    Launched,
    LaunchRequest,
    Listing,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    OfferId,
    OfferPage,
    OfferQuery,
    PoolId,
    Power,
    ProviderCharge,
    ProviderName,
    RegistryLogin,
    ShellAddress,
)


class Clock(Protocol):
    """The only source of time. Instants are aware UTC."""

    def now(self) -> datetime: ...

    async def sleep(self, duration: timedelta) -> None: ...

    def real_seconds(self, duration: timedelta) -> float:
        """Return the wall clock's seconds of this duration (they differ in an accelerated local market)."""
        ...


class Logger(Protocol):
    """The part of a structlog logger that an adapter may use: event name plus fields."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The tools that the daemon lends to a provider while it is open.

    Attributes:
        install: owner label; only machines that carry it may be shown or touched.
        state_dir: a folder of this provider's own, kept between starts.
        credential: the resolved secret, or `None`; adapters never read the environment themselves.
        logins: returns the logins of all registries in the config of now, so that a provider that stores them can
            delete what is not used any more.
        date_shown: takes the date of an answer that has just come, by which the daemon judges this computer's clock.
    """

    install: InstallId
    clock: Clock
    rng: Random
    log: Logger
    state_dir: Path
    credential: str | None = field(default=None, repr=False)
    logins: Callable[[], Sequence[RegistryLogin]] = tuple
    date_shown: Callable[[datetime], None] | None = None


class Provider(Protocol):
    """One marketplace. Every method may raise any leaf of `contract.errors` and nothing else."""

    @property
    def name(self) -> ProviderName: ...

    @property
    def capabilities(self) -> Mapping[Power, Capability]: ...

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return the offers on sale now. One malformed row costs that row, never the page."""
        ...

    async def launch(self, request: LaunchRequest) -> Launched:
        """Buy one machine that carries `request.key`, at most once: this call never retries.

        Raises:
            OutcomeUnknown: the answer was lost; the machine may exist.
            NoCapacity, OfferGone, PriceMoved, QuotaExceeded, RequestRejected, NoBalance: it certainly does not.
        """
        ...

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key, in any state but gone; empty if the provider lists none."""
        ...

    async def instances(self) -> Listing:
        """Return every machine under our install label."""
        ...

    async def terminate(self, ref: InstanceRef) -> None:
        """Ask the provider to end this machine; return once it accepted. Succeeds for a machine that does not exist."""
        ...

    async def check(self) -> Sequence[CheckLine]:
        """Check key, permissions, balance, quota and clock, one line each. Never raises for a finding."""
        ...


@runtime_checkable
class ChangesBids(Protocol):
    """`Power.BID_CHANGE`."""

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None: ...


@runtime_checkable
class ReadsLogs(Protocol):
    """`Power.LOGS`: the provider's own log of a machine, for failures before the runner can report."""

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]: ...


@runtime_checkable
class StartsGangs(Protocol):
    """`Power.GANG`: one launch starts several machines that reach each other, all within its time limit or none.

    Each of them runs the start script with `SPOTD_NODE_RANK`, from 0, and `SPOTD_NODE_ADDRESS`, where the others reach
    it. One row stands for all: `find` shows it while any of them exists, and `terminate` ends all of them. A list that
    shows only some of them is not complete.
    """

    @property
    def nodes_max(self) -> int:
        """How many machines one launch starts at most."""
        ...


@runtime_checkable
class ReplacesMembers(Protocol):
    """`Power.REPLACE`: of several machines that were launched as one, some are replaced or left out; the others go on.

    Both calls may be made again and again. Neither may start a machine once an end of all was accepted.
    """

    async def replace_members(
        self, request: LaunchRequest, ref: InstanceRef, ranks: Sequence[int], number: int
    ) -> None:
        """End what is left of these, and start others in their places, under the same key, at the price agreed for all.

        Each of the others runs the start script of the request with its rank, its address, and `SPOTD_NODE_ROUND`,
        which is `number`. One that was started with this number before and lives is left as it is. The price, the row
        and the reference of all stay what they are.

        Args:
            request: as it was launched, with a start script of now.
            ranks: the first, of rank 0, only where its traits say that it is replaced as well (`replaces_first`).
            number: it grows from call to call for other losses.

        Raises:
            NoCapacity, OfferGone, QuotaExceeded: not all of them are there. Those that are stay.
            RequestRejected: it does not run.
        """
        ...

    async def drop_members(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        """End these, and bill the others alone from now on: so many of the equal parts of the price as are left.

        Raises:
            RequestRejected: it does not run.
        """
        ...


@runtime_checkable
class GivesShell(Protocol):
    """`Power.SHELL`."""

    async def shell(self, ref: InstanceRef) -> ShellAddress:
        """Return where the machine's shell is reached.

        Raises:
            Unavailable: nowhere now, for instance because the machine still starts.
        """
        ...


class PortConnection(Protocol):
    """One connection to a port of a machine. Every call may raise `Unavailable` where the way there broke."""

    async def receive(self) -> bytes:
        """Return what arrived; empty once the program there has sent its last."""
        ...

    async def send(self, data: bytes) -> None: ...

    async def send_eof(self) -> None:
        """Say that nothing more is sent, where the way there can carry that."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class OpensPorts(Protocol):
    """`Power.PORTS`: the provider's own way into a machine carries connections, without a key of the user."""

    async def open_port(self, ref: InstanceRef, port: int) -> PortConnection:
        """Connect to this port of the machine's loopback address, within half a minute.

        Raises:
            Unavailable: nothing listens there, or the machine does not run.
        """
        ...


@runtime_checkable
class KnowsAccount(Protocol):
    """The name of the machines' account: without it, a key of another account makes every machine appear gone."""

    async def account(self) -> str:
        """Return a name of this key's account, the same for every key of it where the provider states one.

        It is never a secret. A name of the key alone is enough: a machine that the next key lists takes its name.

        Raises:
            AuthFailed: the key may not ask for it.
        """
        ...


@runtime_checkable
class KnowsBalance(Protocol):
    """`Power.BALANCE`."""

    async def balance(self) -> Balance: ...


@runtime_checkable
class Bills(Protocol):
    """`Power.BILLING`: the provider's own billing records."""

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPriceHistory:
    """What one offer cost in a span of the past.

    Attributes:
        offer_id: that of the offer itself where it can still be on sale, so that its past and present are one series.
        changes: since when the GPU part of the whole machine cost how much per hour, before any fee, oldest first;
            `None` is off the market. A price holds until the next change, the last one until the end of the span.
    """

    provider: ProviderName
    offer_id: OfferId
    pool: PoolId
    market: Market
    gpu: str
    gpu_count: int
    storage_price: MicroUsdPerGbMonth
    changes: tuple[tuple[datetime, MicroUsdPerHour | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceHistoryPage:
    """Everything that these offers cost from `since` until `until`.

    Attributes:
        next: what the call for the next page is given; empty after the last one.
        rejected: how many rows could not be used.
        left: how many pages are still to come, where that is known.
    """

    offers: tuple[OfferPriceHistory, ...]
    since: datetime
    until: datetime
    next: str = ""
    rejected: int = 0
    left: int | None = None


@runtime_checkable
class KnowsPastPrices(Protocol):
    """`Power.PRICE_HISTORY`: what its offers cost before anybody polled them."""

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return a page of what offers have cost since then, or since the provider knows it; `after` is empty at first.

        Raises:
            NotSupported: this account is shown none.
        """
        ...


@runtime_checkable
class CountsRequests(Protocol):
    """The number of requests sent since the provider was opened, for `spotctl providers`. Optional."""

    @property
    def requests_sent(self) -> int: ...


NO_PRIVATE_IMAGES: Final = Capability(available=False, reason="its adapter takes no login of a registry")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderTraits:
    """Facts about a provider that the daemon's own rules depend on.

    Attributes:
        start_script_bytes_max: limit of what `LaunchRequest.start_script` may hold.
        reconcile_window: request time-out plus worst list lag; nothing is launched again under an unknown outcome
            before it has passed.
        provision_timeout: how long a machine may take from launch to the runner's first heartbeat.
        quote_ttl: an offer older than this does not exist.
        offers_every_min: the provider answers no more frequent questions for offers; a shorter `poll_every` counts
            as this one there, so that polls come evenly instead of in bursts with a pause. Machines are not meant.
        machines_every_min: machines are not listed more often than this. While any runs they are listed every 12
            seconds; give more where a list costs several requests or the provider counts them.
        hosts_share_filesystem: the machines can read this computer's files (the local market, fakes on loopback), so
            a folder store can serve them.
        runs_images: a machine runs the job's container image; where it does not, the plan of a job says so.
        private_images: whether `LaunchRequest.login` is taken. The reason says who can read the password on its way to
            the machine, or why none is taken: a user reads it in both cases.
        default_fee_multiplier: marketplace fee on top of the listed price, as a decimal string.
        ends_itself_by: how the runner on a machine may end it: `file`, `shutdown`, `vast` or `runpod`; empty where
            the provider gives no instance-scoped way.
        ends_itself_at: base URL of the API that `vast` and `runpod` call; empty is the real one.
        notice_imds: base URL of a metadata service on the machines that warns of preemption; empty for none.
        free_if_taken_within: a machine that the provider itself takes back this soon after its launch costs nothing,
            and costs something when we end it; it is then left to the provider. Once a listing says that it was
            (`Loss.PREEMPTED`, `Loss.OUTBID`), what was booked for it is booked back, apart from disk and traffic.
        bills_from_running: only its disk is billed until a listing shows the machine as `RUNNING`.
        bills_from_script: the same, and it is `RUNNING` from the moment in which the start script begins, as where that
            is the first process of a container: then the runner's own age says since when.
        bills_at_least: what the GPU part of each start is billed for however short it was: EC2 bills a minute.
        bills_by: the unit to which that time is rounded up: a second, or an hour where hours are sold; 0 for none.
        bill_open_for: how long after its end a machine's bill (`Bills`) may still grow; 0 where it is final at once,
            and is believed without being read twice.
        causes_within: how late a list may state that a machine had been taken back, as where a log says so; until then
            a job does not fail for a start whose spot machine was lost.
        replaces_first: of several machines the first one is replaced or left out like any other, while the row goes on
            (`Power.REPLACE`); else the loss of the first is the end of all.
        owned: its machines are the user's own or come from a cluster that they may use, and are not rented in a market;
            a user may say otherwise in the config.
        no_launches: why nothing can be launched there, for the user, though prices are read; empty where it can.
    """

    start_script_bytes_max: int
    reconcile_window: timedelta = timedelta(seconds=180)
    provision_timeout: timedelta = timedelta(minutes=20)
    quote_ttl: timedelta = timedelta(minutes=5)
    offers_every_min: timedelta = timedelta(0)
    machines_every_min: timedelta = timedelta(0)
    hosts_share_filesystem: bool = False
    runs_images: bool = True
    private_images: Capability = NO_PRIVATE_IMAGES
    default_fee_multiplier: str = "1.00"
    ends_itself_by: str = ""
    ends_itself_at: str = ""
    notice_imds: str = ""
    free_if_taken_within: timedelta = timedelta(0)
    bills_from_running: bool = False
    bills_from_script: bool = False
    bills_at_least: timedelta = timedelta(0)
    bills_by: timedelta = timedelta(0)
    bill_open_for: timedelta = timedelta(hours=2)
    causes_within: timedelta = timedelta(0)
    replaces_first: bool = False
    owned: bool = False
    no_launches: str = ""


class ProviderPlugin(Protocol):
    """The descriptor of a provider, which an entry point of the group `spotd.providers` names.

    `settings_model` is a pydantic model (extra keys forbidden) of this provider's own keys under `[providers.NAME]`;
    the keys common to all (`enabled`, `api_key`, `fee_multiplier`, `poll_every`) are the daemon's and are not in it.
    """

    @property
    def name(self) -> ProviderName: ...

    @property
    def title(self) -> str:
        """How a person writes it, say `vast.ai`."""
        ...

    @property
    def settings_model(self) -> type[Any]: ...

    @property
    def needs_credential(self) -> bool: ...

    def traits(self, settings: Any) -> ProviderTraits: ...

    def open(self, settings: Any, services: Services) -> AbstractAsyncContextManager[Provider]: ...
