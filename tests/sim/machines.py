"""What a simulated cloud is made of: hosts, machines, faults, and what comes over the wire."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

from spotd.core.kernel.outcomes import LaunchFailure
from spotd_jobs.spec.model import JobSpec
from spotd_jobs.wire.grant import CanaryRules
from spotd_jobs.wire.reports import Outcome
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceRef,
    InstanceState,
    Loss,
    MicroUsdPerGbMonth,
    Offer,
    ProviderName,
)

BOOT = timedelta(minutes=3)
CHECKPOINT_EVERY = timedelta(minutes=10)
HEARTBEAT = timedelta(seconds=15)
HOUR = timedelta(hours=1)
FOR_EVER = timedelta(days=365)
OWED_UNIT = HOUR // timedelta(microseconds=1)
DISK_GB = 10
GB = 1_000_000_000
STORAGE_PER_GB_MONTH = MicroUsdPerGbMonth(144_000)
FORGOTTEN_AFTER = timedelta(minutes=5)
FOREIGN = 4


def most_nodes_of(spec: JobSpec) -> int:
    """Return how many machines one attempt of the job has at most."""
    return spec.resources.nodes_max or spec.resources.nodes


def nodes_of(spec: JobSpec) -> int:
    """How many machines it runs on at once."""
    return spec.resources.nodes


def gpus_of(spec: JobSpec) -> int:
    """How many GPUs its machines have."""
    return spec.resources.gpu[0].count if spec.resources.gpu else 0


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
    dumb: float = 0.0
    """A machine that is listed as running, bills, and whose image never speaks."""
    notice_per_hour: float = 0.0
    """Taken back two minutes after it was announced."""
    end_retry_after: timedelta = timedelta(0)
    """How long the provider asks to be left alone when it fails to end a machine."""
    overcharge_per_hour: float = 0.0
    """A machine that bills three times what was agreed, and says so in the list."""
    spike_per_hour: float = 0.0
    """The price of every host is twenty times as high until it moves next."""
    market_moves: bool = False
    cause_lag: timedelta = timedelta(0)
    """From when a machine is gone to when lists say why, at most; they show it for an hour then."""
    half_started: float = 0.0
    """A launch of several machines of which some never come: the provider ends all of them after a while."""
    half_listed: float = 0.0
    """A list that shows some of several machines only, and so is not complete."""


@dataclass(kw_only=True)
class Host:
    name: str
    provider: ProviderName
    price: int
    level: int
    """The price without a momentary spike."""
    base: int
    offer: Offer
    unfit: bool = False
    """It is less than its offer states, which only a canary finds."""


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
    cause: Outcome = Outcome.SUCCEEDED
    """What the runner calls its end."""
    bytes: int = 1000
    """Of each checkpoint."""
    disk_gb: int = DISK_GB
    hangs_at: timedelta | None = None
    """How much work is done when its command gets no further."""
    reuse: timedelta | None = None
    """How long its machine waits for the next job, if it may."""
    keeps: timedelta | None = None
    """How long the others wait for another machine in the place of a lost one."""
    canary: CanaryRules | None = None
    """How it is measured when it starts for the first time."""
    inputs: int = 0
    outputs: int = 0
    """Bytes that it fetches before it works, and leaves when it has succeeded."""


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
    offer: Offer
    """As its buyer knew it: what traffic costs was agreed with it."""
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
    measured: timedelta = timedelta(0)
    """How long its canary takes after `ran_from`; its command begins then."""
    meets: timedelta = timedelta(0)
    """How long it takes after that until all of several have met again."""
    began_once: bool = False
    """Its runner has been at work: one that is started again measures nothing."""
    silent_until: datetime | None = None
    mute_until: datetime | None = None
    """Nothing it wrote before this can have been published before this."""
    leased_until: datetime
    owed: int = 0
    """Micro-dollars an hour times microseconds, so that nothing is lost or gained by rounding on the way."""
    owed_by_day: dict[date, int] = field(default_factory=lambda: defaultdict(int))
    billed_until: datetime
    saved: list[Save] = field(default_factory=list)
    seq: int = -1
    outcome: Outcome | None = None
    exit_at: datetime | None = None
    hung_at: datetime | None = None
    """Since when its command gets no further."""
    hung_seq: int = 0
    alive_at: datetime | None = None
    """When it last wrote a heartbeat."""
    stop_ordered: bool = False
    saves_no_more: bool = False
    """It was told to stop at once and to upload nothing."""
    ended_by_us: datetime | None = None
    end_taken: datetime | None = None
    """When an order to end it was first answered, be it gone already."""
    was_silent: bool = False
    omitted: bool = False
    """A listing that called itself complete and showed others lacked it once."""
    dumb: bool = False
    factor: int = 1
    """How many times what was agreed it bills."""
    notice_at: datetime | None = None
    lapses_at: datetime | None = None
    """Of a notice that its provider states, and that does not come true."""
    misstated_at: datetime | None = None
    """A list has stated what it is not."""
    vanished_at: datetime | None = None
    """When it was destroyed while it was paused, and listed no more."""
    spans: list[tuple[datetime, datetime]] = field(default_factory=list)
    quiet_spans: list[tuple[datetime, datetime]] = field(default_factory=list)
    """When nothing it wrote could arrive, whoever was to blame."""
    lacking: list[datetime] = field(default_factory=list)
    """When lists that called themselves complete lacked it while it was there."""
    rates: list[tuple[datetime, int]] = field(default_factory=list)
    """What it billed per hour from when on, with the fee."""
    traffic: int = 0
    """Billed for bytes."""
    queued_since: datetime | None = None
    """Since when it waits in a queue: it does not compute."""
    is_overdue: bool = False
    """A list has stated that it waited for longer than it may; it may come up a moment later."""
    noticed_at: datetime | None = None
    """When its owner announced that the machine is wanted back."""
    label: AttemptKey | None = None
    """What it carries, where it was made for another attempt than `key`, which has it now."""
    waits: bool = False
    """Its runner has removed all that was the job's, and waits for another one until `waits_until`."""
    waits_until: datetime | None = None
    is_clean: bool = False
    """All that its last job left is removed: secrets, processes, files."""
    awaits: bool = False
    """It was handed over, and its runner does not know of its next attempt yet."""
    next_task: Task | None = None
    given_at: datetime | None = None
    """What that is to do, and since when it can be known."""
    first_bid: int = 0
    """Of a machine that was handed over: what was bid for it then."""
    handed_on: bool = False
    """It went on as the machine of another attempt."""
    member_lost_at: datetime | None = None
    """Of several machines: since when the first one knows that another is lost."""
    member_saves: bool = True
    """Whether it can save then: a command may hang that waits for the lost one."""
    gives_up_at: datetime | None = None
    """When the provider ends all of them, since one is missing."""
    is_half: bool = False
    """Some of them never come."""
    is_empty: bool = False
    """It is to fetch its job, once it has measured itself."""
    round: int = 0
    """Which machines take part, as the first one knows it."""
    granted: int = 0
    offered: timedelta = timedelta(0)
    """The round that its grant names, and what is restored then."""
    kept_at: datetime | None = None
    """Since when the others wait for another one."""
    lost: set[int] = field(default_factory=set)
    """The ranks that the first one lost."""
    gone: set[int] = field(default_factory=set)
    """The ranks that are lost, and not replaced."""
    came: dict[int, int] = field(default_factory=dict)
    """By rank, with which number it was replaced last."""
    dropped: set[int] = field(default_factory=set)
    counts: list[tuple[datetime, int]] = field(default_factory=list)
    """How many GPUs all of them had, each until when, where some were left out."""
    waits_kept: list[tuple[datetime, datetime]] = field(default_factory=list)
    """When the others waited."""
    went_on: int = 0
    seats: tuple[int | None, ...] = ()
    """By rank, in which round its machine came, as the grant says."""
    said: tuple[int, ...] | None = None
    """It was outbid while others waited, and wakes: what its heartbeat names as lost until a newer one is read."""
    odd_calls: list[str] = field(default_factory=list)
    """Calls that no owner of healthy machines makes."""
    first_lost_at: datetime | None = None
    """Since when the others wait for their next attempt, as the first one is lost."""
    worded_at: datetime | None = None
    """When they said so last."""
    is_over_unheard: bool = False
    """They ended without the first one, which alone reports that."""
    without_first: bool = False
    """They have their next attempt, and wait for another first one."""

    @property
    def works_from(self) -> datetime | None:
        """When its command begins, or is to begin."""
        return None if self.ran_from is None else self.ran_from + self.measured + self.meets

    @property
    def first(self) -> int:
        """The rank of the first of several that take part."""
        return next(rank for rank in range(self.offer.nodes + len(self.dropped)) if rank not in self.dropped)

    def waits_without(self, ranks: set[int], now: datetime) -> bool:
        """Whether the others wait for their next attempt if these are lost now."""
        began = self.works_from
        has_begun = began is not None and began <= now and not self.hangs and self.outcome is None
        others = self.offer.nodes - len(ranks)
        return self.task.keeps is not None and self.first in ranks and has_begun and others > 0

    def lose_first(self, ranks: set[int], now: datetime) -> None:
        if self.kept_at is not None:
            self.waits_kept.append((self.kept_at, now))
        self.gone |= ranks
        self.lost |= ranks
        self.kept_at = self.member_lost_at = None
        self.first_lost_at = now

    @property
    def refuses(self) -> bool:
        """Whether its canary ends it before its command begins."""
        rules = self.task.canary
        return bool(self.measured) and self.host.unfit and rules is not None and rules.may_refuse

    @property
    def alive(self) -> bool:
        return self.state is InstanceState.PENDING or self.state is InstanceState.RUNNING

    def wake_whole(self) -> None:
        """Its provider starts all of several machines again, and their runners with them."""
        if self.task.keeps is not None:
            self.said = tuple(sorted(self.lost)) if self.kept_at is not None else None
            if self.kept_at is not None:
                paused = self.spans[-1][1] if self.spans else self.kept_at
                self.waits_kept.append((self.kept_at, max(self.kept_at, paused)))
            self.member_lost_at = self.kept_at = None
            if self.first_lost_at is not None or self.without_first:
                self.is_over_unheard = True  # the first one finds no grant, and the others no first one
            self.first_lost_at, self.without_first = None, False
            self.lost.clear()
            self.gone.clear()

    def gpu_count_at(self, at: datetime) -> int:
        """How many GPUs all of several have then."""
        return next((count for until, count in self.counts if at < until), self.offer.gpu_count)

    @property
    def hangs(self) -> bool:
        """Whether one that came in the place of a lost one never gets as far as its command."""
        return self.meets == FOR_EVER

    @property
    def is_torn(self) -> bool:
        """Whether its grant gives one of the places to another machine than the one that has it."""
        there = ((rank, came) for rank, came in enumerate(self.seats) if rank not in self.dropped)
        return any(came is None or self.came.get(rank, 0) != came for rank, came in there)

    def saved_beyond(self, work: timedelta) -> list[Save]:
        """The checkpoints with more work than this; each holds at least as much as the one before."""
        return self.saved[bisect_right(self.saved, work, key=lambda save: save.work) :]

    @property
    def billed(self) -> int:
        return -(-self.owed // OWED_UNIT) + self.traffic


class LostAnswer(Exception):
    pass


class Refused(Exception):
    """`failure` says why; there is no room unless it says otherwise."""

    def __init__(self, failure: LaunchFailure = LaunchFailure.NO_CAPACITY) -> None:
        super().__init__(failure.value)
        self.failure = failure


class CloudDown(Exception):
    pass


class AccountDead(CloudDown):
    """The key is refused."""


@dataclass(frozen=True, kw_only=True)
class BidCall:
    """What one change of a bid asked for, as the provider saw it."""

    key: AttemptKey
    at: datetime
    price: int
    gpus: int
    disk_gb: int
    fee_ppm: int
    """That the provider took then."""
    on_demand: int


@dataclass(frozen=True, kw_only=True)
class WrongState:
    """What one list states of a machine that runs."""

    state: InstanceState
    loss: Loss | None


@dataclass(frozen=True, kw_only=True)
class LaunchCall:
    """What one launch asked for, as the provider saw it."""

    key: AttemptKey
    at: datetime
    offered: int
    price_max: int
    gpus: int
    disk_gb: int
    fee_ppm: int
    """That the provider took then."""
    real_price: int
    alive_before: int
    nodes: int
