"""Everything that a decision is made from, but for the market."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, JobId, launch_intent_id
from spotd.core.domain.jobs import Job, Outputs
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy, attempt_key
from spotd.core.domain.states import AttemptState, InvariantBroken, JobState
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceRef,
    MicroUsd,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    ProviderName,
)

# Records of what was seen of a provider, a pool, a host or an image: counts and spans that fade.
#
# Theory. A record is a sum over attempts that are over: how many events of one kind, and over how much time. It fades
# by half in each half-life of its kind, so that markets may change and a host that was repaired is taken again. What
# is added to one level is added to every coarser one, too (host, pool, provider), so a record that is dropped because
# it has faded is still part of the coarser sums: this is how the table stays small.
#
# Counts are in millionths of an event, spans in whole microseconds, so that sums do not depend on their order by more
# than a rounding. A clock that was ahead left records of the future: they do not fade before their time, and do not
# grow.


ONE: Final = 1_000_000
"""One event, in millionths."""
COUNT_MAX: Final = 10**12
SPAN_MAX: Final = timedelta(days=36_500)
FADED: Final = ONE // 50
"""A record of fewer events than this, and of less than `FADED_SPAN`, is forgotten."""
FADED_SPAN: Final = timedelta(minutes=10)
KEPT_FOR: Final = timedelta(days=120)
"""No record is kept for longer after it was last added to."""
RECORDS_MAX: Final = 2_000
"""So many are kept of each kind, those that were added to last."""


class RecordKind(StrEnum):
    """What a record counts, and over which time. The strings are stored.

    LOSSES_PROVIDER, LOSSES_POOL, LOSSES_HOST: machines that were lost, over the hours for which they lived.
    LOSSES_TIME: the same of one provider in one part of the week.
    STARTS: machines whose command began to run, over the time that it took since the launch; by image.
    START_TIMES: starts at a provider, by market and by how long they took or when they were given up.
    FAILED_STARTS, SLOW_STARTS, EARLY_LOSSES: of one host, for its memory.
    """

    LOSSES_PROVIDER = "losses_provider"
    LOSSES_POOL = "losses_pool"
    LOSSES_HOST = "losses_host"
    LOSSES_TIME = "losses_time"
    STARTS = "starts"
    START_TIMES = "start_times"
    FAILED_STARTS = "failed_starts"
    SLOW_STARTS = "slow_starts"
    EARLY_LOSSES = "early_losses"


OF_HOSTS: Final = frozenset(
    {RecordKind.LOSSES_HOST, RecordKind.FAILED_STARTS, RecordKind.SLOW_STARTS, RecordKind.EARLY_LOSSES}
)
_HALF_LIFE_OF_LOSSES: Final = timedelta(days=14)
_HALF_LIFE_OF_FAULTS: Final = timedelta(days=3)
HALF_LIFE: Final[Mapping[RecordKind, timedelta]] = {
    kind: _HALF_LIFE_OF_FAULTS
    if kind in {RecordKind.FAILED_STARTS, RecordKind.SLOW_STARTS, RecordKind.EARLY_LOSSES}
    else _HALF_LIFE_OF_LOSSES
    for kind in RecordKind
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordId:
    """Whose record it is: the subject is a host, a pool, an image, a market or a part of the week."""

    kind: RecordKind
    provider: ProviderName
    subject: str

    def __hash__(self) -> int:
        return hash(self.subject) ^ hash(self.provider)  # without a tuple: each offer is ranked by several records


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A sum that fades.

    Attributes:
        count: events, in millionths.
        at: when it was added to last, and as of when it is stated.
    """

    id: RecordId
    count: int
    span: timedelta
    at: datetime


Experience = Mapping[RecordId, Record]
"""Every record, by whose it is."""
NO_EXPERIENCE: Final[Experience] = MappingProxyType({})


def faded(record: Record, now: datetime) -> Record:
    """Return the record as of now."""
    kept = kept_share(record, now)
    if kept == 1:
        return record
    return replace(record, count=int(record.count * kept), span=record.span * kept, at=now)


def kept_share(record: Record, now: datetime) -> float:
    """Return which share of the record has not faded."""
    age = now - record.at
    return 1.0 if age <= timedelta(0) else 0.5 ** min(age / HALF_LIFE[record.id.kind], 60.0)


def added(known: Record | None, identity: RecordId, count: int, span: timedelta, now: datetime) -> Record:
    """Return the record with so much more in it, as of now, within the bounds of what can be stored."""
    before = Record(id=identity, count=0, span=timedelta(0), at=now) if known is None else faded(known, now)
    return replace(
        before,
        count=max(0, min(before.count + count, COUNT_MAX)),
        span=max(timedelta(0), min(before.span + span, SPAN_MAX)),
        at=now,
    )


def with_records(known: Experience, changed: Experience) -> Experience:
    """Return every record, the changed ones as they are now, without those of nothing."""
    if not changed:
        return known
    return {identity: one for identity, one in {**known, **changed}.items() if one.count or one.span}


def nothing(identity: RecordId, now: datetime) -> Record:
    """Return the record that replaces one that is to be forgotten."""
    return Record(id=identity, count=0, span=timedelta(0), at=now)


def is_faded(record: Record, now: datetime) -> bool:
    """Whether nothing that matters is left of the record."""
    left = faded(record, now)
    return (left.count < FADED and left.span < FADED_SPAN) or now - record.at > KEPT_FOR


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
class PastJob:
    """As much of a job that is over as others that wait for it have to know."""

    id: JobId
    name: str
    state: JobState
    reason: str
    outputs: Outputs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything the core needs to decide.

    Attributes:
        jobs: those that are not final, and those with an attempt that has not ended.
        attempts: those that have not ended.
        intents: the open ones.
        spent_by_day: what is settled of this UTC month, over all jobs.
        unreadable: rows that are part of no other field, since they cannot be understood.
        past: jobs that are over and that others of the world wait for.
    """

    policy: Policy
    jobs: Mapping[JobId, Job]
    attempts: Mapping[AttemptId, Attempt]
    intents: Mapping[IntentId, Intent]
    cooldowns: tuple[Cooldown, ...] = ()
    experience: Experience = field(default_factory=dict)
    spent_by_day: Mapping[date, MicroUsd] = field(default_factory=dict)
    unreadable: tuple[UnreadableRow, ...] = ()
    past: Mapping[JobId, PastJob] = field(default_factory=dict)

    def with_job(self, job: Job) -> World:
        """Return the world with this job, which may be over and no part of it."""
        return replace(self, jobs={**self.jobs, job.id: job})

    def attempts_of(self, job: JobId) -> tuple[Attempt, ...]:
        return tuple(a for i, a in self.attempts.items() if i.job == job)

    def counting_attempt(self, job: JobId) -> Attempt | None:
        """Return the one attempt of the job whose machine may live and whose writing counts."""
        found = [a for a in self.attempts_of(job) if a.state.counts]
        if len(found) > 1:
            raise InvariantBroken(f"job {job} has {len(found)} attempts that count")
        return found[0] if found else None


def past_job(job: Job) -> PastJob:
    """Return what is to be known of a job that is over."""
    return PastJob(id=job.id, name=job.name, state=job.state, reason=job.reason, outputs=job.outputs)


def awaited(jobs: Iterable[Job]) -> set[JobId]:
    """Return which jobs these wait for."""
    return {
        before
        for job in jobs
        if job.chain is not None and job.chain.inputs is None and not job.state.is_final
        for before in job.chain.after
    }


# Why a job was or was not placed.


PassedOver = tuple[tuple[str, int], ...]
"""Why offers were not taken, and how many, most frequent first."""


RENTING: Final = "renting "
TAKING: Final = "taking "
"""How the sentence of a placed job begins; the second one where the machine is the user's own."""


class VerdictKind(StrEnum):
    PLACED = "placed"
    RUNNING = "running"
    STOPPING = "stopping"
    HELD = "held"
    """Its machine is outbid, and waited for."""
    ABOVE_CEILING = "above_ceiling"
    NO_CEILING = "no_ceiling"
    NO_MATCH = "no_match"
    NO_OFFERS = "no_offers"
    COOLING = "cooling"
    BACKING_OFF = "backing_off"
    BUDGET_JOB = "budget_job"
    BUDGET_DAY = "budget_day"
    BUDGET_MONTH = "budget_month"
    BALANCE = "balance"
    MACHINES = "machines"
    LAUNCH_LIMIT = "launch_limit"
    PAUSED = "paused"
    RECONCILING = "reconciling"
    WINDOW = "window"
    DEADLINE = "deadline"
    PACED = "paced"
    OWN = "own"
    """An own machine is waited for before one is rented."""
    AFTER = "after"
    ARRAY = "array"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a job was or was not placed in one decision.

    Attributes:
        sentence: what `spotctl why` prints.
        passed_over: why offers were not taken and how many, most frequent first; empty where none were compared.
        until: when what the job waits for ends by itself; `None` where no time is known.
    """

    job: JobId
    kind: VerdictKind
    sentence: str
    at: datetime
    best: Quote | None = None
    ceiling: MicroUsdPerGpuHour | None = None
    passed_over: PassedOver = ()
    until: datetime | None = None


# The attempt and the intent of a launch that was admitted.


def launch_rows(
    job: Job,
    agreed: Quote,
    ceiling: MicroUsdPerGpuHour,
    price_max: MicroUsdPerHour,
    policy: Policy,
    now: datetime,
) -> tuple[Attempt, Intent]:
    """Return the next attempt of the job, and the paid call that is owed for it."""
    number = job.attempts_made + 1
    item = Attempt(
        id=AttemptId(job=job.id, number=number),
        key=attempt_key(policy.install, job.id, number, policy.identity),
        state=AttemptState.INTENDED,
        quote=agreed,
        ceiling=ceiling,
        price_max=price_max,
        intended_at=now,
        account=policy.providers[agreed.offer.provider].account,
    )
    intent = Intent(
        id=launch_intent_id(item.key),
        kind=IntentKind.LAUNCH,
        provider=item.provider,
        key=item.key,
        state=IntentState.OPEN,
        created_at=now,
        attempt=item.id,
    )
    return item, intent
