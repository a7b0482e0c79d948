"""Values that cross the border between spotd and a provider.

Theory. A provider sells *offers*. A launch turns one offer into one *instance*, which carries our *key* (label, name
or tag), so that the key alone suffices to find it again. A *listing* is what the provider says exists under our
install label; an incomplete listing proves that something exists, never that something is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from enum import StrEnum
from typing import Final, NewType, NoReturn

# Money as integers of a micro-dollar, with the unit in the type.
#
# Whole-machine and per-GPU prices are different types, so that multiplying by the GPU count twice (or never) is a
# type error. Everything is rounded *up* at the edge: an estimate that is a micro-dollar too high costs nothing, one
# that is too low breaks a ceiling.


MicroUsd = NewType("MicroUsd", int)
"""An amount of money, 1e-6 USD."""
MicroUsdPerHour = NewType("MicroUsdPerHour", int)
"""A price for the whole machine, 1e-6 USD per hour."""
MicroUsdPerGpuHour = NewType("MicroUsdPerGpuHour", int)
"""A price for one GPU of a machine, 1e-6 USD per hour: the unit of ceilings."""
MicroUsdPerGb = NewType("MicroUsdPerGb", int)
"""A traffic price, 1e-6 USD per decimal gigabyte."""
MicroUsdPerGbMonth = NewType("MicroUsdPerGbMonth", int)
"""A storage price, 1e-6 USD per gigabyte and month of 720 hours."""

MICRO: Final = 1_000_000
HOURS_PER_STORAGE_MONTH: Final = 720
_MICROSECONDS_PER_HOUR: Final = 3_600_000_000
_LIMIT_USD: Final = Decimal(10_000_000)


def micro_usd(value: Decimal | int | float | str) -> int:
    """Convert a finite, non-negative dollar figure to micro-dollars, rounded up.

    The caller wraps the result in the type that names its unit.

    Raises:
        ValueError: not a number, not finite, negative or beyond ten million dollars.
    """
    if isinstance(value, bool):
        raise ValueError("a truth value is not a price")
    try:
        exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    except (InvalidOperation, ValueError, TypeError) as exc:
        raise ValueError(f"not a number: {value!r}") from exc
    if not exact.is_finite() or exact < 0 or exact > _LIMIT_USD:
        raise ValueError(f"not a price: {value!r}")
    return int((exact * MICRO).to_integral_value(rounding=ROUND_CEILING))


def cost(price: MicroUsdPerHour, duration: timedelta) -> MicroUsd:
    """Compute the cost of a machine at this price over a duration, rounded up."""
    microseconds = max(0, duration // timedelta(microseconds=1))
    return MicroUsd(-(-price * microseconds // _MICROSECONDS_PER_HOUR))


def shares(gpu_count: int) -> int:
    """Return how many GPUs a price is divided by: a machine without a GPU counts as one."""
    return max(1, gpu_count)


def per_gpu(price: MicroUsdPerHour, gpu_count: int) -> MicroUsdPerGpuHour:
    """Divide a machine's price by its GPUs, rounded up."""
    return MicroUsdPerGpuHour(-(-price // shares(gpu_count)))


def whole_machine(price: MicroUsdPerGpuHour, gpu_count: int) -> MicroUsdPerHour:
    """Multiply a price per GPU by the number of GPUs."""
    return MicroUsdPerHour(price * shares(gpu_count))


def as_usd(amount: int) -> float:
    """Convert micro-dollars to dollars, for display and JSON only."""
    return amount / MICRO


ProviderName = NewType("ProviderName", str)
OfferId = NewType("OfferId", str)
HostId = NewType("HostId", str)
PoolId = NewType("PoolId", str)
QuotaId = NewType("QuotaId", str)
InstanceId = NewType("InstanceId", str)
InstallId = NewType("InstallId", str)
AttemptKey = NewType("AttemptKey", str)
"""`spotd-<label>.<identity>-<job>-<attempt>`: idempotency key of a launch and name of the machine.

At most 64 characters of a-z, 0-9, `-` and one `.`. An adapter shows every machine of its label; whose identity it
carries is the daemon's business."""

CAPACITY_SCORE_MAX: Final = 10
NO_GPU: Final = "CPU"
"""Stands for the name of a GPU in an offer of a machine without one."""
FREE_STORAGE: Final = MicroUsdPerGbMonth(0)
NOTHING_FIXED: Final = MicroUsdPerHour(0)
FREE_TRAFFIC: Final = MicroUsdPerGb(0)


class Market(StrEnum):
    """How a machine is sold."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"


class Interruption(StrEnum):
    """How a machine is taken away, mildest first."""

    NEVER = "never"
    NOTICE = "notice"
    SUDDEN = "sudden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One thing a provider sells now.

    Attributes:
        offer_id: the provider's handle, stable between polls while the same thing is sold.
        host_id: the physical machine, where the provider shows it; a loss there cools down every offer of that host.
        pool: offers that are lost together (an AWS type in a zone, a vast machine); the unit of capacity cooldowns.
        quotas: limits of the account that a machine of this offer counts against, the one that is used up soonest
            first; offers that share one are not tried in vain while it is used up.
        gpu: canonical name (`spotd_providers.contract.gpus`), or the provider's own spelling if unknown; `NO_GPU` with
            a `gpu_count` of 0 for a machine that has none.
        gpu_price: whole machine, GPU part only, before the marketplace's fee. For a bid market: the bid to place.
        on_demand_price: GPU part of the same hardware sold on-demand, where known (the receipt's comparison).
        pays_bid: in a bid market, whether a machine bills what was bid (vast.ai) or the market's price (AWS).
        storage_fixed: what is billed with the disk whatever its size, from launch to end: the disk that a machine
            image takes itself, an address.
        disk_gb_max: largest disk that can be asked for; `None` where there is no limit worth naming.
        capacity_score: 1 to 10, how likely the provider says a launch is to succeed now; `None` where it does not say.
        hazard_ppm: how many machines of this kind are taken away in a million hours, where somebody says; a prior.
        speed_score: of a benchmark that the provider ran on this machine, more is faster; comparable with its other
            offers alone.
        duration_max: how long this machine can be kept at most, where the provider says so.
        nodes: how many machines that reach each other are bought as one (`Power.GANG`). A provider offers 1; with more,
            `gpu_count`, all prices and what is billed are those of all of them, everything else is of each.
        nodes_min, nodes_max: how many of it may be bought as one, where that differs from one to all that the provider
            starts: more than 1 at least is no offer of a single machine, and 1 at most is one of nothing else.
        ends_itself: whether the runner certainly ends it, where the provider's machines end themselves at all.
        extra: what only `launch` reads. Never a secret.
    """

    provider: ProviderName
    offer_id: OfferId
    host_id: HostId | None = None
    pool: PoolId
    quotas: tuple[QuotaId, ...] = ()
    market: Market
    interruption: Interruption
    gpu: str
    gpu_count: int
    gpu_vram_mb: int | None = None
    gpu_price: MicroUsdPerHour
    pays_bid: bool = False
    on_demand_price: MicroUsdPerHour | None = None
    storage_price: MicroUsdPerGbMonth = FREE_STORAGE
    storage_fixed: MicroUsdPerHour = NOTHING_FIXED
    upload_price: MicroUsdPerGb = FREE_TRAFFIC
    download_price: MicroUsdPerGb = FREE_TRAFFIC
    region: str = ""
    cpus: float | None = None
    memory_mb: int | None = None
    disk_gb_max: int | None = None
    cuda_max: str | None = None
    reliability: float | None = None
    upload_mbps: float | None = None
    download_mbps: float | None = None
    duration_max: timedelta | None = None
    capacity_score: int | None = None
    hazard_ppm: int | None = None
    speed_score: float | None = None
    nodes: int = 1
    nodes_min: int = 1
    nodes_max: int | None = None
    ends_itself: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An offer row that could not be priced, and why, so that nothing vanishes silently."""

    offer_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferQuery:
    """The needs of the queue, so that a provider can narrow its search. Empty tuples mean anything.

    A provider may answer with more than was asked for. One whose answers are short (a marketplace that cuts a search
    off) asks for `gpus` first and says `complete` only of an answer that holds every offer of them.

    Attributes:
        gpus: canonical names that jobs wait for, the most urgent first.
        gpu_counts: how many GPUs in one machine those jobs ask for.
        watched: canonical names that only a ceiling of the config names: no job waits for them now.
        vram_mb_min: least memory of a GPU for jobs that name none; `None` when there is no such job.
    """

    gpus: tuple[str, ...] = ()
    disk_gb: int = 10
    markets: tuple[Market, ...] = (Market.SPOT, Market.ON_DEMAND)
    gpu_counts: tuple[int, ...] = ()
    watched: tuple[str, ...] = ()
    vram_mb_min: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """How fast one GPU of a kind is in one test, by what a provider measured; figures of one test can be compared."""

    test: str
    gpu: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPage:
    """All offers of one poll. `complete` is false when the provider cut or garbled the answer.

    Attributes:
        whole: canonical GPUs and counts (0 for any count) of which this holds every offer, where it does not hold the
            whole market: absence proves something of these only. Empty: what `complete` says holds for every GPU.
        note: what a person should know of an answer that does not hold the whole market.
        benchmarks: what the provider measured of GPUs, beside the scores of its offers.
    """

    offers: tuple[Offer, ...]
    rejected: tuple[Rejected, ...] = ()
    complete: bool = True
    whole: frozenset[tuple[str, int]] = frozenset()
    note: str = ""
    benchmarks: tuple[Benchmark, ...] = ()
    at: datetime


class Secret:
    """A text that only `reveal` shows: it is hidden where it is printed, and it is never pickled or copied deeply."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not written anywhere")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """What a registry asks for before it gives a private image. `server` as images name it, say `ghcr.io`."""

    server: str
    username: str
    password: Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One machine to be bought once.

    Attributes:
        price_max: GPU part of the whole machine; the provider call must not cost more than this per hour. In a bid
            market this is the bid.
        start_script: POSIX shell, within the provider's limit; runs as root when the machine is up.
        login: of the image's registry, where the image is private. Only a provider whose traits say so gets one
            (`ProviderTraits.private_images`); another one raises `NotSupported` and buys nothing.
    """

    key: AttemptKey
    install: InstallId
    offer: Offer
    price_max: MicroUsdPerHour
    image: str
    disk_gb: int
    start_script: str
    login: RegistryLogin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRef:
    """The handle of a machine: its id, and where to ask (`scope` is an AWS region; empty elsewhere)."""

    provider: ProviderName
    instance_id: InstanceId
    scope: str = ""

    def __hash__(self) -> int:
        return hash(self.instance_id)  # without a tuple: each decision finds each machine by it several times


class InstanceState(StrEnum):
    """The state of a machine by its provider, translated once at the edge.

    `PAUSED` is a machine that does not run but still exists and bills storage (vast outbid, RunPod exited): it may
    wake up by itself. `GONE` is the provider's own word that it exists no more.
    """

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    ENDING = "ending"
    GONE = "gone"
    UNKNOWN = "unknown"


class Billing(StrEnum):
    """What a provider bills of a machine at the moment, as it states or documents it for what its row shows.

    UNKNOWN: nothing is stated, so it follows from the state: all of a machine that runs, the disk of one that is
    `PAUSED` or is not billed before it is `RUNNING`, nothing of one that is `ENDING` or `GONE`.
    """

    FULL = "full"
    DISK = "disk"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


class Loss(StrEnum):
    """The reason why a machine stopped, as far as the provider states it."""

    PREEMPTED = "preempted"
    OUTBID = "outbid"
    HOST_LOST = "host_lost"
    PROVISION_FAILED = "provision_failed"
    NO_CAPACITY = "no_capacity"
    """It waited for a place and got none: nothing ran, and neither its host nor the job is at fault."""
    IMAGE_ERROR = "image_error"
    BALANCE = "balance"
    EXPIRED = "expired"
    SELF = "self"
    """The machine ended itself (the runner is done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One machine under our install label, as the provider shows it.

    Attributes:
        key: the label it carries; `None` never occurs in what an adapter returns, since unlabelled machines are not
            ours and are never shown.
        price: what it bills per hour now, GPU part of the whole machine, where the provider says so.
        bid_floor: in a bid market the lowest bid that keeps or gets it now, GPU part of the whole machine, where the
            provider says so. It may echo our own bid.
        notice_at: when the provider will take it away, where it already said so.
        loss: why it stopped, for `PAUSED`, `ENDING` and `GONE`.
        billing: what of it is billed now: a host that is out of reach may be listed, and cost nothing.
        ended_at: since when it does not run, for the same states, where the provider says so.
        detail: the provider's own words, for the user; never a secret.
        past_prices: since when it billed which `price`, oldest first, where the provider states it also of a time that
            passed unwatched. What lies before the newest price that is known is ignored.
    """

    ref: InstanceRef
    key: AttemptKey
    state: InstanceState
    market: Market | None = None
    host_id: HostId | None = None
    price: MicroUsdPerHour | None = None
    created_at: datetime | None = None
    notice_at: datetime | None = None
    loss: Loss | None = None
    detail: str = ""
    bid_floor: MicroUsdPerHour | None = None
    billing: Billing = Billing.UNKNOWN
    ended_at: datetime | None = None
    past_prices: tuple[tuple[datetime, MicroUsdPerHour], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The machines under our install label. Absence from an incomplete listing means nothing.

    Attributes:
        rejected: rows that could not be read as machines, and why; they make the listing incomplete.
    """

    instances: tuple[Instance, ...]
    complete: bool
    at: datetime
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A machine that exists, by the provider's answer."""

    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One line of `spotctl doctor`: what was checked, whether it is fine, and the way out if not."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellAddress:
    """Where ssh reaches a machine, with a key that the user registered in the provider's account.

    Attributes:
        host: empty where `command` is run on the user's own computer.
        command: what leads from there into the machine, as words; empty where ssh itself does.
        no_ports: why ssh carries no ports to the machine, for the user; empty where it does.
    """

    host: str
    port: int
    user: str
    command: tuple[str, ...] = ()
    no_ports: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The money left in an account that is paid in advance, and its spending per hour if known.

    A launch that it could not carry for a useful while is not made, so an account that is billed later has none.
    """

    available: MicroUsd
    burn: MicroUsdPerHour | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderCharge:
    """A charge of the provider's own records for one machine over a span.

    Attributes:
        start, end: the time that is paid for, `end` not included: a row for the 3rd of a month ends with the 4th. A sum
            that is lower than what was booked is believed only where these spans reach the end of the machine.
        amount: in `currency`, and not converted.
        kind: what it is for, one word for the same thing in every row: `total`, `gpu`, `disk` ... Two rows of one kind
            are for different times.
        currency: as ISO 4217 writes it. A charge in any other than USD is refused with a sentence.
    """

    key: AttemptKey | None
    instance_id: InstanceId
    start: datetime
    end: datetime
    amount: MicroUsd
    kind: str = "total"
    currency: str = "USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The declaration of an optional power; `reason` is the sentence that a user reads if it is missing."""

    available: bool
    reason: str = ""


class Power(StrEnum):
    """Optional powers, each with its own Protocol in `provider`."""

    BID_CHANGE = "bid_change"
    NOTICES = "notices"
    LOGS = "logs"
    BALANCE = "balance"
    BILLING = "billing"
    STOP_RESUME = "stop_resume"
    SPOT = "spot"
    HOST_IDENTITY = "host_identity"
    SELF_TERMINATE = "self_terminate"
    CAPACITY_SCORES = "capacity_scores"
    SHELL = "shell"
    PORTS = "ports"
    PRICE_HISTORY = "price_history"
    GANG = "gang"
    """`launch` buys an offer of several `nodes`: all of them within its time limit, or none."""
    REPLACE = "replace"
    """Lost ones of these are replaced, and the others go on."""
