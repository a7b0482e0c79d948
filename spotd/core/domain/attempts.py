"""An attempt: one machine, one try of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.copies import replace
from spotd.core.domain.intents import NOTHING, AttemptId, Meter
from spotd.core.domain.jobs import Checkpoint, FailedRestore
from spotd.core.domain.market import Quote
from spotd.core.domain.members import Members
from spotd.core.domain.states import AttemptState, EndReason
from spotd_jobs.spec.model import WatchdogPolicy
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceRef,
    MicroUsd,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    ProviderName,
)

# The alarm for checkpoints that come later than the job states in `[checkpoint] every`.
#
# Judged by a full read of what the host wrote, so that a checkpoint that is there is never missed, and by the smaller
# of two spans: the daemon's own, and the host's. A computer that slept and a clock that was stepped cause no alarm.


LATE_AFTER: Final = 2
"""Intervals without a checkpoint."""
UPLOAD_TAKES: Final = timedelta(minutes=2)
"""To settle, and to arrive in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How old the newest checkpoint of an attempt is, or its command where it has none.

    Attributes:
        since: when the daemon took it in.
        up: for how long the host had run then, by its own steady clock.
        every: how often the job saves, as it states.
        late_at: when the alarm was raised; `None` while there is none.
    """

    since: datetime
    up: timedelta
    every: timedelta
    late_at: datetime | None = None


def due_after(every: timedelta) -> timedelta:
    """Return the age from which a checkpoint is late."""
    return LATE_AFTER * every + UPLOAD_TAKES


def is_due(known: Freshness, now: datetime) -> bool:
    """Whether the next checkpoint should have come by now, by the daemon's clock."""
    return now - known.since >= due_after(known.every)


def is_due_there(known: Freshness, up: timedelta) -> bool:
    """Whether the same is so by the host's clock."""
    ran = up - known.up
    # A runner that was started again counts from the beginning.
    return (ran if ran >= timedelta(0) else up) >= due_after(known.every)


# What is known of the bid for one machine: what was bid, and what wins there.
#
# Theory. The lowest winning bid that a marketplace states for a machine that we rent *echoes our own bid*, up to an
# hour late. A loop that raised its bid because of that figure would outbid itself until the ceiling. So a figure that
# equals any bid that was ever placed on this machine, within a tolerance for how a provider rounds, says nothing and
# is ignored.


ECHO_TOLERANCE: Final = 100
"""A figure that differs from a bid by one part in so many is its echo."""
PLACED_MAX: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Bidding:
    """The bids for the GPU part of one machine, and what a single listing states of its price.

    Attributes:
        placed: all of them, oldest first, those that a provider may not have taken too; the newest `PLACED_MAX`.
        changed_at: when the newest change was decided.
        before: what was bid before it, while it is not known whether the provider took it.
        refused: how many changes in a row the provider refused.
        floor: the lowest bid that wins, as far as it is believed; see `with_floor`.
        seen, seen_at: what a listing of then stated instead, until a second one does.
        leapt_at: the listing of then states a price that leaps, which a second one has to state, too.
        held_since: it was outbid then, and is kept.
        held_last: when it was outbid for the newest time and kept, be it that it came back since.
        woke_at: when it was first known to run since, be it that it goes on; no older list says anything of it.
    """

    placed: tuple[MicroUsdPerHour, ...] = ()
    changed_at: datetime | None = None
    before: MicroUsdPerHour | None = None
    refused: int = 0
    floor: MicroUsdPerHour | None = None
    seen: MicroUsdPerHour | None = None
    seen_at: datetime | None = None
    leapt_at: datetime | None = None
    held_since: datetime | None = None
    held_last: datetime | None = None
    woke_at: datetime | None = None


def is_echo(floor: int, placed: tuple[MicroUsdPerHour, ...]) -> bool:
    """Whether the figure is no more than one of our own bids."""
    return any(abs(floor - bid) * ECHO_TOLERANCE <= bid for bid in placed)


def with_floor(known: Bidding, floor: MicroUsdPerHour, at: datetime, expected: range | None) -> Bidding:
    """Return what is known after a listing of this instant that states this as the lowest winning bid.

    What lies beyond `expected` may be a wrong row, by which a bid would be lowered under what wins, or raised for
    nothing: of two listings in a row that state such figures, the one nearer to what was expected is believed.
    """
    if is_echo(floor, known.placed):
        return known
    if expected is None or floor in expected:
        return replace(known, floor=floor, seen=None, seen_at=None)
    former = known.seen
    if former is None or known.seen_at is None:
        return replace(known, seen=floor, seen_at=at)
    if at <= known.seen_at:
        return known
    found = replace(known, seen=floor, seen_at=at)
    if min(former, floor) >= expected.stop:
        found = replace(found, floor=min(former, floor))
    elif max(former, floor) < expected.start:
        found = replace(found, floor=max(former, floor))
    return replace(found, seen=None, seen_at=None) if found.floor == floor else found


def with_bid(known: Bidding, before: MicroUsdPerHour, bid: MicroUsdPerHour, now: datetime) -> Bidding:
    """Return what is known once this bid is to be placed; the figure that led to it is used up."""
    placed = known.placed if before in known.placed else (*known.placed, before)
    return replace(known, placed=(*placed, bid)[-PLACED_MAX:], changed_at=now, before=before, floor=None, seen=None)


# For how long a job has shown no progress, as fresh heartbeats of its host show it.
#
# Theory. Only what lies between two heartbeats that were read counts: a host that is silent, a store that does not
# answer and a daemon that was off add nothing. Between them, less time counts than the host and the daemon have
# counted each, and never more than a share of the span that is waited for. So a clock that is stepped, a computer
# that slept for hours and a host that states nonsense each add a little at most, and a stall takes several heartbeats
# to be one.
#
# What the host states can only make its own job stop, or keep it running, which its budget bounds.


SHARE: Final = 5
"""What lies between two heartbeats counts as this part of a limit at the most."""
NO_TIME: Final = timedelta(0)
RUN: Final = "run"
_WATCHED_PHASES: Final = frozenset({"setup", RUN})
"""While its code or its checkpoint arrives, or what it saved last is stored, no progress is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """What one heartbeat states about progress.

    Attributes:
        up: since the start script began, by the host's own steady clock.
        printed: bytes of output so far.
        writes: how often its checkpoint folder was found changed.
        seen: what names the newest complete checkpoint on its disk; empty before the first.
        gpu_time: for how long the use of a GPU was read; `None` where no figure was to be had.
        gpu_busy: the use of the busiest GPU, summed over that time.
    """

    boot: int
    up: timedelta
    phase: str
    printed: int
    writes: int
    seen: str = ""
    gpu_time: timedelta | None = None
    gpu_busy: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is known of an attempt's progress; kept with the attempt, so that no restart forgets it.

    Attributes:
        at: when the newest sample was read.
        quiet: for how long there was no new output, step or checkpoint.
        idle: for how long the busiest GPU was below the limit, without a break.
        idle_busy: its use, summed over that time.
        has_begun: its own work has begun: a GPU was used, or a checkpoint came.
        active: for how long it got on.
    """

    at: datetime
    sample: HostSample
    quiet: timedelta = NO_TIME
    idle: timedelta = NO_TIME
    idle_busy: timedelta = NO_TIME
    has_begun: bool = False
    active: timedelta = NO_TIME


def watched(before: Watch | None, sample: HostSample, rules: WatchdogPolicy, at: datetime) -> Watch:
    """Return what is known after a heartbeat that was read at this instant and never before."""
    if before is None:
        return Watch(at=at, sample=sample, has_begun=bool(sample.seen))
    last = before.sample
    if sample.boot != last.boot or sample.phase != last.phase or sample.phase not in _WATCHED_PHASES:
        # Another runner, or another part of its work: what it counts begins anew, and what is known stays.
        quiet = NO_TIME if sample.phase != last.phase else before.quiet
        return replace(before, at=at, sample=sample, quiet=quiet, has_begun=before.has_begun or bool(sample.seen))
    span = max(NO_TIME, min(sample.up - last.up, at - before.at))
    is_saving, is_new = sample.writes != last.writes, sample.seen not in {"", last.seen}
    gets_on = is_saving or is_new or sample.printed != last.printed
    now = replace(before, at=at, sample=sample, has_begun=before.has_begun or bool(sample.seen))
    if gets_on:
        now = replace(now, quiet=NO_TIME, active=now.active + span)
    elif rules.no_progress is not None:
        now = replace(now, quiet=now.quiet + min(span, rules.no_progress / SHARE))
    return now if rules.min_gpu_util is None else _with_gpu(now, last, rules, span, is_saving=is_saving)


def _with_gpu(now: Watch, last: HostSample, rules: WatchdogPolicy, span: timedelta, *, is_saving: bool) -> Watch:
    """Count the time in which the GPUs were hardly used; without a figure, nothing is known of them."""
    sample, limit = now.sample, rules.min_gpu_util
    if limit is None or sample.gpu_time is None or last.gpu_time is None:
        return now
    read = min(sample.gpu_time - last.gpu_time, span)
    if read <= NO_TIME:
        return now
    busy = max(NO_TIME, min((sample.gpu_busy or NO_TIME) - (last.gpu_busy or NO_TIME), read))
    if busy * 100 >= read * limit:
        return replace(now, idle=NO_TIME, idle_busy=NO_TIME, has_begun=True)
    if is_saving:
        return now  # a job that writes a checkpoint needs no GPU for that
    counted = min(read, rules.window / SHARE)
    return replace(now, idle=now.idle + counted, idle_busy=now.idle_busy + busy * (counted / read))


_ENDS_ITSELF: Final = frozenset({"upload", "done"})
"""Phases of a host whose command has ended."""


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
    """The order to the runner to save and stop; after `deadline` the machine is ended regardless."""

    reason: EndReason
    detail: str
    ordered_at: datetime
    deadline: datetime
    limit: datetime | None = None
    """Up to when the deadline may move while an upload advances; `None` where it may not."""
    progress: str = ""
    """How far the upload was when the deadline moved last."""
    flush: bool = True
    """Whether it saves once more; not where that upload would cost more than a budget has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDebt:
    """What uploads cost before an hour of them was paid: when it grew last, and what then was left of it."""

    since: datetime | None = None
    spent: MicroUsd = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBill:
    """What a provider's own bill says of one machine.

    Attributes:
        tries: how often it was read after the end; -1 once it is read no more.
        read: what it said when it was read last.
        note: why that was not believed, in a sentence; empty where it was, or may be when it says so again.
        believed: what it says, once it was believed.
    """

    tries: int = 0
    read: MicroUsd | None = None
    note: str = ""
    believed: MicroUsd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LapsedNotices:
    """Interruption notices that did not come true: how many, and the instant that the newest of them named."""

    count: int = 0
    named: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One machine, one try.

    Attributes:
        quote: what was agreed at commit; its total is the price this attempt may not exceed.
        ceiling: the highest that the job accepted for this machine, at commit or since, per GPU.
        ceiling_set: what it accepts since its owner changed that; `ceiling` counts while this is `None`.
        ref: the machine, once the provider named it.
        ever_listed: a complete listing showed the machine; only then can absence mean loss quickly.
        missing_since: first of the consecutive complete listings that lack the machine.
        price_max: GPU part of the whole machine given to the launch call; the bid in a bid market.
        heartbeat_seen_at: when the daemon last saw the heartbeat's sequence number move, by its own clock.
        read_at: the last full read of what this attempt wrote.
        listed_at: the newest listing that showed the machine, while that matters: it starts, or costs too much.
        over_ceiling_at: the first of the consecutive listings whose price is above the ceiling.
        start_deadline: when a machine that never spoke is given up, where that is later than usual; see `starting`.
        uploaded_bytes, restored_bytes: traffic of this attempt that the daemon measured.
        debt: of its uploads, which traffic pays off (`core.billing`).
        bill: what its provider's own bill says of it (`core.bills`).
        full_since: since when its machine has billed in full, without a pause.
        proven_at: when something showed last that the machine runs, to within a few minutes (`core.billing`).
        watch: what is known of its progress, where its job is watched.
        bidding: the bids for its machine, where a bid is paid.
        freshness: how old its newest checkpoint is, where its job states how often it saves.
        over_since: the first of the consecutive listings which state that the machine is over, or another one.
        lapsed: the interruption notices that did not come true (`core.host_reports`).
        machine_key: what its machine carries, where it took over that of another attempt; `None`: `key`.
        former_key: the attempt that had that machine before it.
        began_there_s: when its start script began, by the host's own clock: seconds since 1970.
        members: of several machines, once one of them was lost and the others were kept (`core.gangs`).
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
    read_at: datetime | None = None
    phase: str = ""
    resumed_from: str | None = None
    notice_at: datetime | None = None
    stop: StopOrder | None = None
    end_reason: EndReason | None = None
    end_detail: str = ""
    exit_code: int | None = None
    listed_at: datetime | None = None
    over_ceiling_at: datetime | None = None
    start_deadline: datetime | None = None
    uploaded_bytes: int = 0
    restored_bytes: int = 0
    debt: TrafficDebt = TrafficDebt()
    bill: ReadBill = ReadBill()
    full_since: datetime | None = None
    proven_at: datetime | None = None
    save_every: timedelta | None = None
    """How often it is advised to save, where its owner states nothing."""
    account: str = ""
    """At the provider; empty where it does not state one."""
    watch: Watch | None = None
    freshness: Freshness | None = None
    bidding: Bidding = field(default_factory=Bidding)
    ceiling_set: MicroUsdPerGpuHour | None = None
    over_since: datetime | None = None
    lapsed: LapsedNotices = LapsedNotices()
    machine_key: AttemptKey | None = None
    former_key: AttemptKey | None = None
    members: Members | None = None
    began_there_s: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether its machines wait for others in the places of lost ones."""
        return self.members is not None and self.members.kept_since is not None

    @property
    def carried_key(self) -> AttemptKey:
        """The key that its machine carries, by which lists show it."""
        return self.machine_key or self.key

    @property
    def awaits_handover(self) -> bool:
        """Whether it took over a machine whose host has not spoken for it yet."""
        return self.machine_key is not None and self.heartbeat_seen_at is None

    @property
    def speaks_at_once(self) -> bool:
        """Whether the host of the machine that it took over has nothing to wait for, and has not spoken for it yet."""
        return self.awaits_handover and self.members is None

    def comes_since(self, launched_at: datetime, within: timedelta, now: datetime) -> datetime:
        """Return since when its machine is on its way: where one of several is replaced, not before none is missing.

        Args:
            within: for how long the others may wait for that.
        """
        known = self.members
        if known is None or known.kept_since is None:
            return launched_at
        return known.whole_since or min(now, max(launched_at, known.kept_since) + within)

    @property
    def provider(self) -> ProviderName:
        return self.quote.offer.provider

    def command_time(self, until: datetime) -> timedelta:
        """Return how long its command has run up to this instant.

        It does not while its machine is outbid and held, nor since lists state that the machine is over.
        """
        if self.running_at is None:
            return timedelta(0)
        last = min(until, self.bidding.held_since or until, self.over_since or until)
        return max(timedelta(0), last - self.running_at)

    @property
    def ceiling_now(self) -> MicroUsdPerGpuHour:
        """What the job accepts to pay for this machine from now on."""
        return self.ceiling if self.ceiling_set is None else self.ceiling_set

    @property
    def ends_itself(self) -> bool:
        """Whether its command has ended, as its host states: it stores what is left, and reports how it ended."""
        return self.phase in _ENDS_ITSELF


# What one reading of an attempt's part of the store showed.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """What one read of an attempt's part of the store showed; everything in it is already validated.

    Attributes:
        liveness_check: nothing of the attempt's own was read: this is what is known since the last full read. It can
            show that a host lives, never that it is lost.
        marker_at: when its liveness marker, or the word of one of several machines that wait without the first one, was
            last seen to have been written again, whatever `seq` is.
        seq: of the heartbeat, -1 before the first.
        checkpoints: newly accepted ones, oldest first.
        exit_reason: why the attempt ends, set once the runner reported its end.
        exit_phase: the phase in which it ended, known as soon as any end is.
        exit_answers_stop: the reason is that of the stop order, where there is one.
        notes: sentences for the event log (a checkpoint refused, a disk nearly full).
        fallbacks: what could not be restored, newest first.
        alive_at: when the host gave its newest sign of life, by its own clock, never after the read.
        exit_at: when the runner reported its end, by the same clock.
        script_began_at: when the start script began, by the same clock, never after the read less its stated age.
        uploads: bytes that each of `checkpoints` added to the store, by manifest key; all of its bytes where absent.
        stored_bytes: all that the host wrote and the store still bills, when it was last counted.
        restored_bytes: what the host has downloaded of its checkpoint so far.
    """

    attempt: AttemptId
    read_at: datetime
    liveness_check: bool = False
    marker_at: datetime | None = None
    seq: int = -1
    phase: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    older: tuple[tuple[Checkpoint, str], ...] = ()
    """Checkpoints that were found after newer ones, each with the manifest key of the next newer one."""
    resumed_from: str | None = None
    exit_reason: EndReason | None = None
    exit_phase: str = ""
    exit_answers_stop: bool = False
    exit_code: int | None = None
    exit_detail: str = ""
    notice_at: datetime | None = None
    notes: tuple[str, ...] = ()
    upload_progress: str = ""
    """How far the upload under way has come; differs whenever it has advanced."""
    waits: bool = False
    """It has come to its end, removed all that was its job's, and waits for the next one."""
    store_takes_no_writes: bool = False
    """The daemon itself cannot write to the store, so that no host's silence says anything."""
    flood: str = ""
    """What the host wrote too much of, in words; empty while it is within its limits."""
    fallbacks: tuple[FailedRestore, ...] = ()
    unannounced: frozenset[str] = frozenset()
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
    began_there_s: int | None = None
    """The same by the host's own clock, whatever it shows: seconds since 1970."""
    uploads: Mapping[str, int] = field(default_factory=dict)
    stored_bytes: int = 0
    restored_bytes: int = 0
    data_bytes: int = 0
    """What it has downloaded of its job's datasets so far, as it states."""
    save_time: timedelta | None = None
    """How long the upload of its newest checkpoint took, as it states."""
    up: timedelta | None = None
    """For how long the host has run when it wrote its newest heartbeat, by its own steady clock."""
    sample: HostSample | None = None
    """What that heartbeat states of progress; only where the job is watched."""
    gang: tuple[int, tuple[int, ...]] | None = None
    """Of several machines, once they run: their round, and the ranks of those that are lost while the others wait."""
    first_at: datetime | None = None
    """When the newest sign of life of the first of them, or of the only one, was read."""
    words: tuple[tuple[int, int, datetime, datetime], ...] = ()
    """Of several machines that wait without the first one: round, rank, and when their words were seen first and last.

    One that is written once proves nothing: a first word is one that was written over another.
    """
