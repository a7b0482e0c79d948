"""The world as spotd knows it: jobs, attempts, intents, money and policy, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Final, NewType

from spotd.core.states import AttemptState, EndReason, InvariantBroken, JobState
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.money import MicroUsd, MicroUsdPerGpuHour, MicroUsdPerHour
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    InstanceRef,
    Offer,
    ProviderName,
)

JobId = NewType("JobId", str)
IntentId = NewType("IntentId", str)
NOTHING: Final = MicroUsd(0)
FREE: Final = MicroUsdPerHour(0)
OF_ANOTHER_JOB: Final = 0
"""The number of no attempt: a checkpoint that the job did not write itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """Which try of which job; attempts count from 1."""

    job: JobId
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint whose manifest the daemon verified and accepted.

    Attributes:
        attempt: which try of the job wrote it; `OF_ANOTHER_JOB` where the job was told to begin from another job's.
        sha256: of the manifest's bytes.
        metric: what the job measured with it, where the job names a metric and the checkpoint tells it.
        pinned: its owner wants it to stay, whatever `keep` says.
        host: where it was written, if the provider names hosts.
        proven_by: the attempt that resumed from it and got further.
        doubted_by: attempts that resumed from it and failed without getting further, oldest first.
    """

    name: str
    attempt: int
    step: int | None
    bytes: int
    at: datetime
    manifest_key: str
    sha256: str
    metric: float | None = None
    pinned: bool = False
    host: str = ""
    proven_by: int | None = None
    doubted_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBreakdown:
    """Every term of an effective price, whole machine per hour; `total` is what ceilings are compared with.

    total = fee x (gpu + storage) + upload + restore, each term rounded up.
    """

    gpu: MicroUsdPerHour
    storage: MicroUsdPerHour
    fee: MicroUsdPerHour
    """What the multiplier adds to gpu + storage."""
    upload: MicroUsdPerHour
    restore: MicroUsdPerHour
    total: MicroUsdPerHour
    per_gpu: MicroUsdPerGpuHour
    fee_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """An offer with its effective price for one job at one time."""

    offer: Offer
    price: PriceBreakdown
    on_demand: MicroUsdPerHour | None
    """Effective price of the same hardware on-demand, the receipt's comparison."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Running cost: `settled` is closed and booked, the rest accrues at `rate` since `since`.

    Attributes:
        on_demand_rate: what the same hardware would have cost on-demand over the same time; `None` where unknown.
        until: time is booked up to here and no further, until something shows that the machine exists after it;
            `None` where it bills until its end is confirmed.
        traffic: measured traffic that is not in `settled` yet.
    """

    settled: MicroUsd = NOTHING
    rate: MicroUsdPerHour = FREE
    on_demand_rate: MicroUsdPerHour | None = None
    since: datetime | None = None
    until: datetime | None = None
    traffic: MicroUsd = NOTHING


class MachineState(StrEnum):
    """What may exist under an attempt's key.

    EXPECTED: the launch may have taken effect. LIVE: it exists and may compute, or wake up and compute. HALTED: the
    provider ends it or accepted its end. GONE: the provider says so.
    """

    EXPECTED = "expected"
    LIVE = "live"
    HALTED = "halted"
    GONE = "gone"

    @property
    def may_compute(self) -> bool:
        return self in {MachineState.EXPECTED, MachineState.LIVE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """The runner was told to save and stop; after `deadline` the machine is ended regardless."""

    reason: EndReason
    detail: str
    ordered_at: datetime
    deadline: datetime
    limit: datetime | None = None
    """Up to when the deadline may move while an upload advances; `None` where it may not."""
    progress: str = ""
    """How far the upload was when the deadline moved last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One machine, one try.

    Attributes:
        quote: what was agreed at commit; its total is the price this attempt may not exceed.
        ceiling: what the job accepted at commit, per GPU.
        ref: the machine, once the provider named it.
        ever_listed: a complete listing showed the machine; only then can absence mean loss quickly.
        missing_since: first of the consecutive complete listings that lack the machine.
        price_max: GPU part of the whole machine given to the launch call; the bid in a bid market.
        heartbeat_seen_at: when the daemon last saw the heartbeat's sequence number move, by its own clock.
        looked_at: the last complete look at what this attempt wrote.
        listed_at: the newest listing that showed the machine, while that matters: it starts, or costs too much.
        over_ceiling_at: the first of the consecutive listings whose price is above the ceiling.
        heard_by: when a machine that never spoke is given up, where that is later than usual; see `starting`.
        uploaded_bytes, restored_bytes: traffic of this attempt that the daemon measured.
        traffic_since, traffic_spent: when it uploaded last, and what then was left of the debt of its uploads.
        bill_tries: how often the provider's own bill was asked for after the end; -1 once it was compared.
    """

    id: AttemptId
    key: AttemptKey
    state: AttemptState
    quote: Quote
    ceiling: MicroUsdPerGpuHour
    price_max: MicroUsdPerHour
    intended_at: datetime
    ref: InstanceRef | None = None
    outcome_unknown: bool = False
    launched_at: datetime | None = None
    running_at: datetime | None = None
    ended_at: datetime | None = None
    meter: Meter = field(default_factory=Meter)
    on_demand_settled: MicroUsd = NOTHING
    ever_listed: bool = False
    missing_since: datetime | None = None
    machine: MachineState = MachineState.EXPECTED
    heartbeat_seq: int = -1
    heartbeat_seen_at: datetime | None = None
    looked_at: datetime | None = None
    phase: str = ""
    resumed_from: str | None = None
    notice_at: datetime | None = None
    stop: StopOrder | None = None
    end_reason: EndReason | None = None
    end_detail: str = ""
    exit_code: int | None = None
    listed_at: datetime | None = None
    over_ceiling_at: datetime | None = None
    heard_by: datetime | None = None
    uploaded_bytes: int = 0
    restored_bytes: int = 0
    traffic_since: datetime | None = None
    traffic_spent: MicroUsd = NOTHING
    bill_tries: int = 0
    account: str = ""
    """At the provider; empty where it does not say."""

    @property
    def provider(self) -> ProviderName:
        return self.quote.offer.provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What was in the store of a job's outputs when the end of the attempt that succeeded was read.

    Attributes:
        sha256: of the manifest's bytes: no other is delivered. `None` where there was none that can be read.
        problem: what of them is not there, in words; empty where all is, or none were asked for.
    """

    attempt: int
    sha256: str | None
    bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user queued, and how far it has come.

    Attributes:
        reason: one sentence, why the job is in this state.
        attempts_made: number of the newest attempt, 0 before the first.
        errors: failures of the user's own code so far.
        image_errors: attempts in a row whose image did not start.
        idle_launches: launches in a row after which the job got nowhere, whatever the reason.
        failed_starts: those of them that may be the job's own fault; `[retry] starts` bounds them.
        not_before: no machine is bought for it earlier.
        budget_set: what its owner changed the budget to; the spec's own counts while this is `None`.
        rate_low: the lowest price of a whole machine at which it was ever launched.
        disk_gb_seen: a disk of less than this was too small for it.
        checkpoints: accepted ones, newest first; the first is what the next attempt resumes from.
        spent, on_demand: of attempts that have ended.
        lost: machine time after the newest checkpoint at each loss: what had to be done again.
        outputs: what the attempt that succeeded left, `None` before one has.
    """

    id: JobId
    name: str
    spec: JobSpec
    code_sha256: str | None
    code_bytes: int
    submitted_at: datetime
    state: JobState
    reason: str
    state_since: datetime
    attempts_made: int = 0
    errors: int = 0
    image_errors: int = 0
    recoveries: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    spent: MicroUsd = NOTHING
    on_demand: MicroUsd = NOTHING
    lost: timedelta = timedelta(0)
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    cancel_requested: bool = False
    outputs: Outputs | None = None
    idle_launches: int = 0
    failed_starts: int = 0
    not_before: datetime | None = None
    budget_set: MicroUsd | None = None
    rate_low: MicroUsdPerHour | None = None
    disk_gb_seen: int = 0

    @property
    def budget(self) -> MicroUsd | None:
        """What all attempts together may cost."""
        if self.budget_set is not None:
            return self.budget_set
        return None if self.spec.job_budget is None else MicroUsd(self.spec.job_budget)


class IntentKind(StrEnum):
    LAUNCH = "launch"
    TERMINATE = "terminate"


class IntentState(StrEnum):
    OPEN = "open"
    """Owed; of a launch: not sent yet, so that it certainly made no machine."""
    SENT = "sent"
    """A launch whose call is made now, or was when the process ended."""
    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    """The provider took a terminate order; the machine is not yet seen to be gone."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A paid call we owe or have made; durable before the call."""

    id: IntentId
    kind: IntentKind
    provider: ProviderName
    key: AttemptKey
    state: IntentState
    created_at: datetime
    attempt: AttemptId | None
    ref: InstanceRef | None = None
    tries: int = 0
    not_before: datetime | None = None
    accepted_at: datetime | None = None
    error: str = ""
    account: str = ""
    """Of the machine at the provider; empty where it does not say."""
    stray_rate: MicroUsdPerHour = FREE
    """Of a machine that no attempt owns: what it costs per hour, as listed when its end was first owed."""
    stray_since: datetime | None = None
    """Of the same: when it was made, as far as it is known."""

    @property
    def is_open(self) -> bool:
        return self.state not in {IntentState.DONE, IntentState.FAILED}


def launch_intent_id(key: AttemptKey) -> IntentId:
    return IntentId(f"launch:{key}")


def terminate_intent_id(ref: InstanceRef) -> IntentId:
    return IntentId(f"terminate:{ref.provider}:{ref.scope}:{ref.instance_id}")


class CooldownScope(StrEnum):
    HOST = "host"
    POOL = "pool"
    QUOTA = "quota"
    """A limit of the account at the provider, shared by many offers."""
    OFFER = "offer"
    PROVIDER = "provider"
    STORE = "store"
    """No launch can be prepared anywhere, since the checkpoint store takes no grant."""
    BUDGET = "budget"
    """A budget of all jobs together is used up for its day or month."""


EVERYWHERE: Final = ProviderName("")
"""The provider of a cool-down that concerns all of them."""


class CooldownEnd(StrEnum):
    """What ends a cool-down before its time.

    TIME: nothing. SHOWN: a list of offers that was asked for after the refusal and shows the offer again. CREDIT: the
    account's balance rose. KEY: the provider took the key again.
    """

    TIME = "time"
    SHOWN = "shown"
    CREDIT = "credit"
    KEY = "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """Something not to be bought before `until`, or before what ended it is known.

    Attributes:
        since: when it was refused last; `None` in rows of an older spotd.
        strikes: how often in a row it had been refused before.
    """

    provider: ProviderName
    scope: CooldownScope
    subject: str
    until: datetime
    reason: str
    since: datetime | None = None
    strikes: int = 0
    ends: CooldownEnd = CooldownEnd.TIME


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A settled piece of running cost, never across a UTC midnight; or what of it is taken back, which has no length.

    What is taken back is negative, and would have cost on-demand all the same.
    """

    attempt: AttemptId
    provider: ProviderName
    day: date
    start: datetime
    end: datetime
    amount: MicroUsd
    on_demand: MicroUsd | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Settled spending of this UTC month by day, over all jobs."""

    by_day: Mapping[date, MicroUsd] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something happened, and why. Committed with the state it explains."""

    at: datetime
    kind: str
    message: str
    job: JobId | None = None
    attempt: int | None = None
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPolicy:
    """How the daemon treats one provider.

    Attributes:
        fee_ppm: fee multiplier in parts per million; 1.20 is 1_200_000.
        unusable: a sentence when nothing may be launched there (no key, the store cannot reach its hosts).
        free_if_taken_within: a machine that the provider takes back this soon after its launch costs nothing.
        bills_from_running: a machine that only starts costs its disk and nothing else.
        bills_from_script: it runs from the moment in which its start script begins.
        ends_itself: the runner can end its own machine, so one without a lease is billed no longer than that takes.
    """

    name: ProviderName
    fee_ppm: int
    quote_ttl: timedelta
    reconcile_window: timedelta
    provision_timeout: timedelta
    unusable: str = ""
    free_if_taken_within: timedelta = timedelta(0)
    bills_from_running: bool = False
    bills_from_script: bool = False
    ends_itself: bool = True
    account: str = ""
    """What names the account of the key in use; empty where the provider does not say, or has not yet."""

    def is_other_account(self, account: str) -> bool:
        """Whether a machine of this account is out of the sight of the key in use."""
        return bool(account) and bool(self.account) and account != self.account


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The user's limits and the daemon's own rules.

    Attributes:
        identity: of this install, in the keys of the machines that it buys; empty before it has one.
        identities: of lost installs with the same label, whose machines are this one's by its user's word.
        identity_sure: no other daemon may be acting under this identity; until then no stray machine is ended.
    """

    install: InstallId
    identity: str = ""
    identities: frozenset[str] = frozenset()
    identity_sure: bool = True
    providers: Mapping[ProviderName, ProviderPolicy]
    ceiling_default: MicroUsdPerGpuHour | None = None
    ceilings: Mapping[str, MicroUsdPerGpuHour] = field(default_factory=dict)
    """By canonical GPU name."""
    budget_day: MicroUsd | None = None
    budget_month: MicroUsd | None = None
    machines_max: int = 8
    launches_per_cycle_max: int = 16
    silence_max: timedelta = timedelta(seconds=45)
    """No sign of life from a running host for so long, and its provider lists it no more: then it is lost."""
    silence_limit: timedelta = timedelta(minutes=35)
    """How long a silence alone is borne; a little longer than the lease, after which the host has ended itself."""
    commit_horizon: timedelta = timedelta(minutes=5)
    """How much running cost is set aside for each machine: detecting, saving and ending take that long at most."""
    useful_run: timedelta = timedelta(minutes=5)
    """A launch that the budget would not let run for at least so long is not made."""
    save_allowance: timedelta = timedelta(minutes=2)
    """Time beyond stop_grace that a stopping host may take for uploading."""
    save_limit: timedelta = timedelta(hours=1)
    """How long a stopping host may go on uploading after its stop_grace, as long as its upload advances."""
    expected_stay: timedelta = timedelta(hours=6)
    host_cooldown: timedelta = timedelta(minutes=30)
    pool_cooldown: timedelta = timedelta(minutes=3)
    recheck_every: timedelta = timedelta(seconds=60)
    lease: timedelta = timedelta(minutes=30)
    """A host that cannot hear from us for so long ends itself: the outer bound on an unreachable machine."""
    bid_headroom_ppm: int = 100_000
    """How far above the lowest winning bid to bid, where we pay what we bid; never above the ceiling."""
    image_errors_max: int = 3
    launches_paused: str = ""
    """A sentence while nothing may be launched (shutting down, the store does not answer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRow:
    """A row of the state that holds a value nothing can be made of, with what of it can still be read.

    Attributes:
        attempt: the number of the attempt whose row it is, or whose job's row it is; `None` for the job's own row.
        ref: the machine, where the row names one.
    """

    job: JobId
    attempt: int | None
    error: str
    key: AttemptKey | None = None
    ref: InstanceRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything the core needs to decide.

    Attributes:
        jobs: those that are not final, and those with an attempt that has not ended.
        attempts: those that have not ended.
        intents: the open ones.
        unreadable: rows that are part of no other field, since they cannot be understood.
    """

    policy: Policy
    jobs: Mapping[JobId, Job]
    attempts: Mapping[AttemptId, Attempt]
    intents: Mapping[IntentId, Intent]
    cooldowns: tuple[Cooldown, ...] = ()
    spending: Spending = field(default_factory=Spending)
    unreadable: tuple[UnreadableRow, ...] = ()

    def attempts_of(self, job: JobId) -> tuple[Attempt, ...]:
        return tuple(a for i, a in self.attempts.items() if i.job == job)

    def counting_attempt(self, job: JobId) -> Attempt | None:
        """The one attempt of the job whose machine may live and whose writing counts."""
        found = [a for a in self.attempts_of(job) if a.state.counts]
        if len(found) > 1:
            raise InvariantBroken(f"job {job} has {len(found)} attempts that count")
        return found[0] if found else None


class ExitCause(StrEnum):
    """Why the runner came to its end, in its own words."""

    FINISHED = "finished"
    STOPPED = "stopped"
    NOTICE = "notice"
    LEASE = "lease"
    SETUP_FAILED = "setup_failed"
    CODE_UNUSABLE = "code_unusable"
    DISK_FULL = "disk_full"
    RUNNER_FAILED = "runner_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRestore:
    """A checkpoint that an attempt should have begun from and could not. `next` is what came after it, if anything."""

    name: str
    reason: str
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """What one look at an attempt's part of the store told; everything in it is already validated.

    Attributes:
        glance: nothing of the attempt's own was read: this is what is known since the last complete look. A glance
            can show that a host lives, never that it is lost.
        beat_at: when it was last seen to give a sign of life, whatever `seq` says.
        seq: of the heartbeat, -1 before the first.
        checkpoints: newly accepted ones, oldest first.
        exit_cause: set once the runner reported its end.
        notes: sentences for the event log (a checkpoint refused, a disk nearly full).
        fallbacks: what could not be restored, newest first.
        alive_at: when the host gave its newest sign of life, by its own clock, never after the look.
        exit_at: when the runner reported its end, by the same clock.
        script_began_at: when the start script began, by the same clock, never after the look less its stated age.
        uploads: bytes that each of `checkpoints` added to the store, by manifest key; all of its bytes where absent.
        stored_bytes: all that the host wrote and the store still bills, when it was last counted.
        restored_bytes: what the host has downloaded of its checkpoint so far.
    """

    attempt: AttemptId
    looked_at: datetime
    liveness_check: bool = False
    beat_at: datetime | None = None
    seq: int = -1
    phase: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    resumed_from: str | None = None
    exit_cause: ExitCause | None = None
    exit_code: int | None = None
    exit_detail: str = ""
    notice_at: datetime | None = None
    notes: tuple[str, ...] = ()
    upload_progress: str = ""
    """How far the upload under way has come; differs whenever it has advanced."""
    store_takes_no_writes: bool = False
    """The daemon itself cannot write to the store, so that no host's silence says anything."""
    flood: str = ""
    """What the host wrote too much of, in words; empty while it is within its limits."""
    fallbacks: tuple[FallbackRestore, ...] = ()
    untold: frozenset[str] = frozenset()
    """Keys of manifests among `checkpoints` that get no line of their own in the job's history."""
    outputs_sha256: str | None = None
    outputs_bytes: int = 0
    outputs_problem: str = ""
    """What of the outputs is not there, in words."""
    outputs_lost: int = 0
    """How many files of them the host could not store."""
    alive_at: datetime | None = None
    exit_at: datetime | None = None
    script_began_at: datetime | None = None
    uploads: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    restored_bytes: int = 0


class VerdictKind(StrEnum):
    PLACED = "placed"
    RUNNING = "running"
    STOPPING = "stopping"
    ABOVE_CEILING = "above_ceiling"
    NO_CEILING = "no_ceiling"
    NO_MATCH = "no_match"
    NO_OFFERS = "no_offers"
    TAKEN = "taken"
    COOLING = "cooling"
    BACKING_OFF = "backing_off"
    BUDGET_JOB = "budget_job"
    BUDGET_DAY = "budget_day"
    BUDGET_MONTH = "budget_month"
    MACHINES = "machines"
    LAUNCH_LIMIT = "launch_limit"
    PAUSED = "paused"
    RECONCILING = "reconciling"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a job was or was not placed in one decision.

    Attributes:
        sentence: what `spotctl why` prints.
        passed_over: reason and number of offers, most frequent first.
        until: when the answer can change by itself.
    """

    job: JobId
    kind: VerdictKind
    sentence: str
    at: datetime
    best: Quote | None = None
    ceiling: MicroUsdPerGpuHour | None = None
    passed_over: tuple[tuple[str, int], ...] = ()
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contained:
    """A failure that was kept from everything else.

    Attributes:
        subject: what could not be judged: an attempt, a job, a provider's listing or offers.
        error: the exception, in words.
    """

    subject: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written in one commit. Rows replace their former values by id."""

    jobs: Mapping[JobId, Job] = field(default_factory=dict)
    attempts: Mapping[AttemptId, Attempt] = field(default_factory=dict)
    intents: Mapping[IntentId, Intent] = field(default_factory=dict)
    cooldowns: tuple[Cooldown, ...] = ()
    charges: tuple[Charge, ...] = ()
    events: tuple[Event, ...] = ()
    verdicts: Mapping[JobId, Verdict] = field(default_factory=dict)
    wake_at: datetime | None = None
    look_again: frozenset[ProviderName] = frozenset()
    """Providers whose machines must be listed again at once, before a large loss is believed."""
    look_closer: frozenset[AttemptId] = frozenset()
    """Attempts about which only a look at all that their hosts wrote can decide."""
    doubts: tuple[str, ...] = ()
    """Readings that are not believed at the moment, in words; not written."""
    sealed: tuple[UnreadableRow, ...] = ()
    """Rows that cannot be understood: they are marked as over, as they stand."""
    contained: tuple[Contained, ...] = ()
    """What raised and was left out, so that everything else could go on; not written."""

    @property
    def is_empty(self) -> bool:
        rows = self.jobs or self.attempts or self.intents or self.cooldowns or self.charges or self.events
        return not (rows or self.sealed)
