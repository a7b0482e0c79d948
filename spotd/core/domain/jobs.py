"""A job as the user queued it, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.copies import replace
from spotd.core.domain.intents import FREE, NOTHING, JobId
from spotd.core.domain.market import Quote
from spotd.core.domain.states import EndReason, JobState
from spotd_jobs.spec.model import GpuSpeed, JobSpec
from spotd_providers.contract.values import Market, MicroUsd, MicroUsdPerHour, Offer, as_usd

# What connects a job with others: the jobs that come before it, what it reads of theirs, and its array.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """Outputs of another job that this one reads: a manifest, known by the hash of its bytes.

    Attributes:
        name: of the other job, and of the folder in which its outputs are read.
    """

    job: JobId
    name: str
    attempt: int
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The jobs that must have succeeded before this one runs.

    Attributes:
        inputs: what they left, known from the moment at which all of them had succeeded; `None` until then.
    """

    after: tuple[JobId, ...]
    inputs: tuple[JobInput, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTask:
    """The place of a job in its array.

    Attributes:
        id, name: of the array; the job's own name is this one and its index.
        count: how many jobs the array has.
        at_once: how many of them may have a machine at one time; `None` for no limit.
    """

    id: JobId
    name: str
    index: int
    count: int
    at_once: int | None = None


# A checkpoint as the daemon accepted it.


OF_ANOTHER_JOB: Final = 0
"""The number of no attempt: a checkpoint that the job did not write itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint whose manifest the daemon verified and accepted.

    Attributes:
        attempt: which try of the job wrote it; `OF_ANOTHER_JOB` where the job begins from another job's.
        sha256: of the manifest's bytes.
        metric: what the job measured with it, where the job names a metric and the checkpoint holds it.
        pinned: its owner keeps it, whatever `keep` is.
        worked: the work in it, as time on a machine of speed 1.0, where the job's owner states how much there is.
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
    worked: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRestore:
    """A checkpoint that an attempt should have begun from and could not. `next` is what came after it, if anything."""

    name: str
    reason: str
    next: str | None


# What may be done to a machine that runs; `running.table` says when.


class MachineVerdict(StrEnum):
    """What one decision does to one machine.

    END: it is lost, or its outcome is known. STOP: a limit of its owner. RELEASE: it is outbid,
    and was held for long enough. STALL: its job gets nowhere. LEAVE: it is
    outbid, and not waited for any longer. RAISE, LOWER: its bid. GO_ON_DEMAND, BACK_TO_SPOT: the other market, for a
    deadline. MAKE_ROOM: for a job of higher priority. MOVE: for a cheaper machine. HOLD: it is outbid, and waited for.
    """

    END = "end"
    STOP = "stop and save"
    RELEASE = "release"
    STALL = "give up a stall"
    LEAVE = "leave"
    RAISE = "raise"
    LOWER = "lower"
    MAKE_ROOM = "make room"
    GO_ON_DEMAND = "go on-demand"
    BACK_TO_SPOT = "back to spot"
    MOVE = "move"
    HOLD = "hold"
    KEEP = "keep"


# What a job's changes to other machines came to; kept with the job.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A stop of a healthy machine that every decision since has proposed, and that waits for a second reading.

    Attributes:
        attempt: the newest of the job that is to get another machine.
        readings: what the proposal rests on, each with the instant of the first reading that said so.
    """

    verdict: MachineVerdict
    attempt: int
    since: datetime
    readings: tuple[tuple[str, datetime], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A healthy machine was stopped so that this job gets another one, which it does not have yet.

    Attributes:
        attempt: the newest of the job at that time.
        provider, subject, market: of the machine that it is to get; see `running.claims`.
        nodes: how many machines at once it is to get, 0 where that is not known.
        rate: per hour of the machine that was left, 0 where that was another job's.
    """

    verdict: MachineVerdict
    at: datetime
    attempt: int
    provider: str = ""
    subject: str = ""
    market: Market | None = None
    nodes: int = 0
    rate: MicroUsdPerHour = FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How often a job was moved, what the newest move was for, and what came of stops of healthy machines for it.

    Attributes:
        at: when its machine was ordered to stop for the newest move.
        attempt: that was ordered to stop.
        provider, offer, host: of the machine that it is to get.
        rate: what that machine was to cost per hour.
        proposed: what the newest decision proposed.
        claim: the newest stop whose outcome is not known.
        refusals: how many such stops in a row got the job no other machine.
        not_before: no healthy machine is stopped for this job earlier.
    """

    count: int = 0
    at: datetime | None = None
    attempt: int = 0
    provider: str = ""
    offer: str = ""
    host: str = ""
    rate: MicroUsdPerHour = FREE
    proposed: Proposal | None = None
    claim: Claim | None = None
    refusals: int = 0
    not_before: datetime | None = None


def target_words(moves: Moves, attempts_made: int, chosen: Quote) -> str:
    """Return that the machine which the job moved for is gone; empty where it is the one that it gets now."""
    if not moves.offer or moves.attempt != attempts_made:
        return ""
    offer = chosen.offer
    same_host = bool(moves.host) and (offer.provider, offer.host_id or "") == (moves.provider, moves.host)
    if same_host or (offer.provider, offer.offer_id) == (moves.provider, moves.offer):
        return ""
    return (
        f"; the one at {moves.provider}/{moves.host or moves.offer} for ${as_usd(moves.rate):.4f} per hour,"
        " for which it was moved, is gone"
    )


HOSTS_MAX: Final = 100
"""More hosts of one job are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What the attempts of a job that are over add up to.

    Attributes:
        ran: time in which its command ran.
        hosts: names of the hosts on which it ran, `HOSTS_MAX` of them at most.
        preemptions: those of the recoveries where the provider took the machine back.
        uncompared: what of `spent` was paid for hosts whose on-demand price was not known at the launch.
        estimated: how many attempts cost something whose provider's own bill is not known.
        own_saved: what own machines cost less than renting the best machine of the moment of their launch would have;
            `None` where none was used, or nothing was to be rented.
    """

    ran: timedelta = timedelta(0)
    hosts: tuple[str, ...] = ()
    preemptions: int = 0
    uncompared: MicroUsd = NOTHING
    estimated: int = 0
    own_saved: MicroUsd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSample:
    """How many steps one attempt made, by its checkpoints, in how much time of its command."""

    attempt: int
    gpu: str
    gpu_count: int
    steps: int
    span: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """What a job with a deadline or a longest duration remembers from one decision to the next.

    Attributes:
        counted_from: since when its deadline is counted, where it was retried; else since its submission.
        ran_before: how long its command had run at its newest retry.
        up_since: since when a spot machine can be had, or is held, without a break; `None` while none can.
        past_up, past_runs: how long, and how often, that was so before.
        losses: of its recoveries those that have ended such a run already.
        is_slipping: its owner was warned that the deadline may not be met.
        spot_wanted_since: since when a job that may take on-demand later waits for spot; `None` while it does not, as
            while something else than the market keeps it from a machine.
        spot_waited: how long it waited so before that; `None` where it did not.
        own_wanted_since: since when a job that may rent later waits for an own machine; `None` while it does not.
    """

    counted_from: datetime | None = None
    ran_before: timedelta = timedelta(0)
    up_since: datetime | None = None
    past_up: timedelta = timedelta(0)
    past_runs: int = 0
    losses: int = 0
    is_slipping: bool = False
    spot_wanted_since: datetime | None = None
    spot_waited: timedelta | None = None
    own_wanted_since: datetime | None = None

    @property
    def waits(self) -> bool:
        """Whether anything is remembered of a wait for spot or for an own machine."""
        return any(one is not None for one in (self.spot_wanted_since, self.spot_waited, self.own_wanted_since))


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
        mute_starts: those of these without a sign of life, once it had saved; `None` while there are none.
        not_before: no machine is bought for it earlier.
        budget_set: what its owner changed the budget to; the spec's own counts while this is `None`.
        rate_low: the lowest price of a whole machine at which it was ever launched.
        disk_gb_seen: a disk of less than this was too small for it.
        checkpoints: accepted ones, newest first; the first is what the next attempt resumes from.
        spent, on_demand: of attempts that have ended; what has no known on-demand price counts as its own cost.
        lost: machine time after the newest checkpoint at each loss: what had to be done again.
        learnt: the speed of one GPU of each kind as others measured it, by what was known at the job's submission.
        save_time: how long the upload of a checkpoint takes, as its hosts state, newer ones counting for more.
        paces: of its newest attempts, oldest first, one for each.
        outputs: what the attempt that succeeded left, `None` before one has.
        moves: to cheaper machines.
        stalls: machines in a row on which the watchdog saw no progress.
        chain: the jobs that come before it, `None` where none do.
        array: its place among the jobs of one submission, `None` for one that came alone.
        submitted_by: the name of the user who queued it, `agent` for an agent, empty for the owner of spotd.
        machines_refused: how many machines their canaries refused, in all of its life; `None` before the first.
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
    totals: RunTotals = field(default_factory=RunTotals)
    pacing: Pacing = field(default_factory=Pacing)
    paces: tuple[PaceSample, ...] = ()
    learnt: tuple[GpuSpeed, ...] | None = None
    save_time: timedelta | None = None
    stalls: int = 0
    chain: Chain | None = None
    array: ArrayTask | None = None
    moves: Moves = field(default_factory=Moves)
    submitted_by: str = ""
    machines_refused: int | None = None
    mute_starts: int | None = None

    @property
    def delivered_bytes(self) -> int:
        """What each of its machines fetches before it works, apart from a checkpoint: code, inputs and datasets."""
        if self.chain is None and not self.spec.data:
            return self.code_bytes
        return self.code_bytes + self.input_bytes + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """How large the datasets are that it reads."""
        return sum(one.bytes for one in self.spec.data) if self.spec.data else 0

    @property
    def url_bytes(self) -> int:
        """How much of its data machines read elsewhere than of the store."""
        return sum(one.bytes for one in self.spec.data if one.is_elsewhere)

    @property
    def input_bytes(self) -> int:
        """How large the outputs of other jobs are that it reads."""
        return 0 if self.chain is None else sum(one.bytes for one in self.chain.inputs or ())

    def saved_by(self, attempt: int) -> list[datetime]:
        """Return when this attempt saved what the list has of it, newest first."""
        return [one.at for one in self.checkpoints if one.attempt == attempt]

    @property
    def budget(self) -> MicroUsd | None:
        """What all attempts together may cost."""
        if self.budget_set is not None:
            return self.budget_set
        return None if self.spec.job_budget is None else MicroUsd(self.spec.job_budget)


def new_job(job_id: JobId, spec: JobSpec, now: datetime, *, code_sha256: str | None = None, code_bytes: int = 0) -> Job:
    """Return a job as it is at its submission."""
    return Job(
        id=job_id,
        name=spec.name,
        spec=spec,
        code_sha256=code_sha256,
        code_bytes=code_bytes,
        submitted_at=now,
        state=JobState.QUEUED,
        reason="just submitted",
        state_since=now,
    )


# The range that values from outside are held to before they are added, multiplied or stored.
#
# Theory. A host, a provider or a user can state any number. The parsers refuse most; whatever passes them is held here
# to a range in which sums fit 64 bits and instants stay in the calendar. A value at its bound is wrong by little that
# matters: no checkpoint is larger, no machine more expensive, no notice longer.


BYTES_MAX: Final = 10**15
"""Ten times the largest checkpoint that is promised to work."""
MOVED_MAX: Final = 2**62
"""Bytes that one machine can have moved in all."""
MOVED_COST_MAX: Final = 10**15
"""Micro-dollars for them: a thousand million dollars."""
HOURLY_MAX: Final = 10**12
"""Micro-dollars per hour for one machine: a million dollars."""
COOLDOWN_MAX: Final = timedelta(hours=24)
NOTICE_PAST_MAX: Final = timedelta(days=1)
NOTICE_AHEAD_MAX: Final = timedelta(days=1)
_TICK: Final = timedelta(microseconds=1)
_TICKS_PER_HOUR: Final = timedelta(hours=1) // _TICK


def bytes_within(size: int) -> int:
    """Return the size, held to what a checkpoint can have."""
    return size if 0 <= size <= BYTES_MAX else min(max(size, 0), BYTES_MAX)


def hourly_within(amount: int) -> int:
    """Return the price per hour, held to what a machine can cost."""
    return amount if 0 <= amount <= HOURLY_MAX else min(max(amount, 0), HOURLY_MAX)


def per_hour(amount: int, span: timedelta) -> int:
    """Return an amount in each span as an amount per hour; in integers, which no size overflows."""
    return amount * _TICKS_PER_HOUR // max(1, span // _TICK)


def span_within(span: timedelta, most: timedelta) -> timedelta:
    """Return the span, neither negative nor longer than `most`."""
    return min(max(span, timedelta(0)), most)


def notice_within(at: datetime, now: datetime) -> datetime:
    """Return the instant of an interruption notice, close enough to now to be added to."""
    return min(max(at, now - NOTICE_PAST_MAX), now + NOTICE_AHEAD_MAX)


# How large a disk a job needs: what its owner asked for, and what is known of it since.
#
# A machine on which the newest checkpoint cannot be restored is money for nothing, so it is no candidate. Asking for
# more disk than the job file states is better than that, since its price is part of the quote and of the ceiling.


GB: Final = 1_000_000_000
CODE_COPIES: Final = 2
"""The archive of the code, and what is unpacked from it."""
DATA_BLOCK: Final = 4096
"""What a small file takes up on a disk beside its bytes."""
FILES_MAX: Final = 10**9
MARGIN_PERCENT: Final = 10
GROWTH_PERCENT: Final = 50
"""A disk that was full is followed by one that is larger by so much."""
DISK_GB_MAX: Final = 1_000_000


def sized(job: Job, nodes: int) -> Job:
    """Return the job as if it asked for exactly so many machines, where it accepts a range of them."""
    wanted = job.spec.resources
    return job if wanted.nodes_max is None else replace(job, spec=replace(job.spec, resources=wanted.of(nodes)))


def disk_gb_for(job: Job, checkpoint_bytes: int | None = None) -> int:
    """Return what to ask for, when the newest checkpoint, or one of so many bytes, is to be restored."""
    newest = job.checkpoints[0].bytes if job.checkpoints else 0
    stored = bytes_within(newest if checkpoint_bytes is None else checkpoint_bytes)
    stored += CODE_COPIES * bytes_within(job.code_bytes)
    if job.chain is not None:
        stored += bytes_within(job.input_bytes)
    if job.spec.data:
        stored += bytes_within(job.data_bytes) + DATA_BLOCK * min(sum(one.files for one in job.spec.data), FILES_MAX)
    restored = 0 if stored == 0 else -(-stored * (100 + MARGIN_PERCENT) // (100 * GB))
    return max(job.spec.resources.disk_gb, restored, job.disk_gb_seen)


def disk_gb_on(job: Job, offer: Offer) -> int:
    """Return what to ask for on this machine, which may hold an older checkpoint only."""
    wanted, most = disk_gb_for(job), offer.disk_gb_max
    if most is None or wanted <= most or not job.checkpoints:
        return wanted
    return disk_gb_for(job, min(saved.bytes for saved in job.checkpoints))


def disk_gb_after(job: Job, reason: EndReason) -> int:
    """Return what is known to be too small once an attempt of the job has ended."""
    if reason is not EndReason.DISK_FULL:
        return job.disk_gb_seen
    return min(DISK_GB_MAX, -(-disk_gb_for(job) * (100 + GROWTH_PERCENT) // 100))
