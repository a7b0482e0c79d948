"""What a simulated cloud is made of: hosts, machines, faults, and what comes over the wire."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

from spotd.core.model import ExitCause
from spotd_providers.contract.money import MicroUsdPerGbMonth, MicroUsdPerHour
from spotd_providers.contract.values import AttemptKey, InstanceRef, InstanceState, Loss, Offer, ProviderName

BOOT = timedelta(minutes=3)
CHECKPOINT_EVERY = timedelta(minutes=10)
HEARTBEAT = timedelta(seconds=15)
HOUR = timedelta(hours=1)
DISK_GB = 10
STORAGE_PER_GB_MONTH = MicroUsdPerGbMonth(144_000)
STORAGE = MicroUsdPerHour(STORAGE_PER_GB_MONTH * DISK_GB // 720)
FORGOTTEN_AFTER = timedelta(minutes=5)
FOREIGN = 10


@dataclass(kw_only=True)
class Faults:
    """Rates per call unless named otherwise; all zero in the healing phase."""

    lose_launch_after: float = 0.0
    lose_launch_before: float = 0.0
    refuse_launch: float = 0.0
    slow_launch: float = 0.0
    fail_listing: float = 0.0
    cut_listing: float = 0.0
    lie_listing: float = 0.0
    """A listing that calls itself complete and lacks half of the machines, or all; never twice in a row."""
    bad_price: float = 0.0
    """A row of the market whose price is no price."""
    fail_terminate: float = 0.0
    forget_terminate: float = 0.0
    preempt_per_hour: float = 0.0
    silence_per_hour: float = 0.0
    list_lag: timedelta = timedelta(0)
    store_down: float = 0.0
    """A look at the store that fails."""
    bad_manifest: float = 0.0
    """A published checkpoint that is not complete."""
    market_moves: bool = False


@dataclass(kw_only=True)
class Host:
    name: str
    provider: ProviderName
    price: int
    base: int
    offer: Offer


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the market as it came over the wire: the price may be anything."""

    offer: Offer
    price: object


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a machine was given to do."""

    resume_at: timedelta
    need: timedelta
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint in the machine's own part of the store."""

    work: timedelta
    at: datetime
    sound: bool


@dataclass(kw_only=True)
class Machine:
    """One machine and what runs on it. `saved` is what its store prefix holds; it outlives the machine."""

    ref: InstanceRef
    key: AttemptKey
    host: Host
    bid: int
    born: datetime
    visible_at: datetime
    task: Task
    state: InstanceState = InstanceState.PENDING
    since: datetime
    """When it was born or woken."""
    loss: Loss | None = None
    died: datetime | None = None
    ran_from: datetime | None = None
    ran_work: timedelta = timedelta(0)
    silent_until: datetime | None = None
    mute_until: datetime | None = None
    """Nothing it wrote before this can have been published before this."""
    leased_until: datetime
    billed: int = 0
    billed_until: datetime
    billed_by_day: dict[date, int] = field(default_factory=lambda: defaultdict(int))
    saved: list[Save] = field(default_factory=list)
    seq: int = -1
    exit_cause: ExitCause | None = None
    stop_ordered: bool = False
    ended_by_us: datetime | None = None
    was_silent: bool = False
    omitted: bool = False
    """A listing that called itself complete and showed others lacked it once."""
    spans: list[tuple[datetime, datetime]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.state is InstanceState.PENDING or self.state is InstanceState.RUNNING


class LostAnswer(Exception):
    pass


class Refused(Exception):
    pass


class CloudDown(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class LaunchCall:
    """What one launch asked for, as the provider saw it."""

    key: AttemptKey
    at: datetime
    offered: int
    price_max: int
    real_price: int
    alive_before: int
