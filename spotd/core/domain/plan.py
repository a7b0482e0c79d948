"""What a decision or a reconciliation is to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Charge, Intent, IntentId, IntentKind, JobId, launch_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import key_parts
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import Experience, PastJob, UnreadableRow, Verdict, World, awaited, past_job, with_records
from spotd_providers.contract.values import AttemptKey, InstanceRef, MicroUsd, ProviderName


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
    experience: Experience = field(default_factory=dict)
    """A record of nothing is forgotten."""
    charges: tuple[Charge, ...] = ()
    events: tuple[Event, ...] = ()
    verdicts: Mapping[JobId, Verdict] = field(default_factory=dict)
    wake_at: datetime | None = None
    list_again: frozenset[ProviderName] = frozenset()
    """Providers whose machines must be listed again at once, before a large loss is believed."""
    full_reads: frozenset[AttemptId] = frozenset()
    """Attempts about which only a read of all that their hosts wrote can decide."""
    shared_silence: tuple[str, ...] = ()
    """Why silent hosts are not taken for lost at the moment, in words; not written."""
    sealed: tuple[UnreadableRow, ...] = ()
    """Rows that cannot be understood: they are marked as over, as they stand."""
    contained: tuple[Contained, ...] = ()
    """What raised and was left out, so that everything else could go on; not written."""

    @property
    def is_empty(self) -> bool:
        rows = self.jobs or self.attempts or self.intents or self.cooldowns or self.charges or self.events
        return not (rows or self.sealed or self.experience)


# Plans joined, and the world once a plan is written.


def combine(first: Plan, second: Plan) -> Plan:
    """One plan that does both, the second on top of the first."""
    wakes = [wake for wake in (first.wake_at, second.wake_at) if wake is not None]
    return Plan(
        jobs={**first.jobs, **second.jobs},
        attempts={**first.attempts, **second.attempts},
        intents={**first.intents, **second.intents},
        cooldowns=first.cooldowns + second.cooldowns,
        experience={**first.experience, **second.experience},
        charges=first.charges + second.charges,
        events=first.events + second.events,
        verdicts={**first.verdicts, **second.verdicts},
        wake_at=min(wakes, default=None),
        list_again=first.list_again | second.list_again,
        full_reads=first.full_reads | second.full_reads,
        shared_silence=first.shared_silence + second.shared_silence,
        sealed=first.sealed + second.sealed,
        contained=first.contained + second.contained,
    )


def applied(world: World, plan: Plan) -> World:
    """Return the world after the plan's commit, as a fresh load would show it."""
    if plan.is_empty:
        return world
    merged = {**world.attempts, **plan.attempts}
    attempts = {i: a for i, a in merged.items() if a.state is not AttemptState.ENDED}
    with_attempts = {i.job for i in attempts}
    by_day = dict(world.spent_by_day)
    for charge in plan.charges:
        by_day[charge.day] = MicroUsd(by_day.get(charge.day, 0) + charge.amount)
    merged_jobs = {**world.jobs, **plan.jobs}
    jobs = {i: j for i, j in merged_jobs.items() if not j.state.is_final or i in with_attempts}
    return replace(
        world,
        jobs=jobs,
        attempts=attempts,
        intents={i: t for i, t in {**world.intents, **plan.intents}.items() if t.is_open},
        cooldowns=world.cooldowns + plan.cooldowns,
        experience=with_records(world.experience, plan.experience),
        spent_by_day=by_day,
        unreadable=tuple(row for row in world.unreadable if row not in plan.sealed),
        past=_past(world, plan, jobs),
    )


def _past(world: World, plan: Plan, jobs: Mapping[JobId, Job]) -> dict[JobId, PastJob]:
    over = {**world.past, **{i: past_job(job) for i, job in plan.jobs.items() if job.state.is_final}}
    return {i: over[i] for i in awaited(jobs.values()) if i in over and i not in jobs}


# The rules that must hold after every commit, checked on the world alone.
#
# Those that need the providers' side (every billed machine has an owner, liveness) are checked by the simulator and the
# tests, against the providers' own ledgers.


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule that does not hold, and the one job that breaks it."""

    job: JobId
    sentence: str


def broken_rules(world: World) -> tuple[BrokenRule, ...]:
    """Return the broken rules, each with its job; empty when all hold."""
    counting = Counter(a.id.job for a in world.attempts.values() if a.state.counts)
    doubled = [
        BrokenRule(job=job, sentence=f"job {job} has {n} attempts that count")
        for job, n in sorted(counting.items())
        if n > 1
    ]
    ended = {t.key for t in world.intents.values() if t.kind is IntentKind.TERMINATE}
    taken = Counter((a.ref, a.machine_key is not None) for a in world.attempts.values() if a.ref is not None)
    others = [
        BrokenRule(job=identity.job, sentence=f"attempt {identity.number} of job {identity.job} {problem}")
        for identity, problem in sorted(
            ((i, problem) for i, item in world.attempts.items() for problem in _problems(world, item, ended, taken)),
            key=lambda found: (found[0].job, found[0].number),
        )
    ]
    return (*doubled, *others)


def _problems(
    world: World, item: Attempt, ended: set[AttemptKey], taken: Counter[tuple[InstanceRef, bool]]
) -> Iterator[str]:
    job = world.jobs.get(item.id.job)
    if job is None:
        yield "has no job"
        return
    if item.state is AttemptState.ENDING and item.ref is not None and item.carried_key not in ended:
        yield "is over but no order ends its machine"
    is_next = item.machine_key is not None
    if item.ref is not None and (taken[item.ref, True] > is_next or taken[item.ref, False] > 1):
        yield "has the machine of another attempt"
    if job.attempts_made < item.id.number:
        yield "is not counted by its job"
    if job.state.is_final and item.state.counts:
        yield f"counts although its job is {job.state}"
    if item.end_reason is EndReason.QUARANTINED:
        return  # it is ended because one of the others did not hold
    parts = key_parts(world.policy.install, item.key)
    if parts is None or (parts.job, parts.number) != (item.id.job, item.id.number):
        yield f"carries the key {item.key}"
    if any(key and key_parts(world.policy.install, key) is None for key in (item.machine_key, item.former_key)):
        yield f"took over a machine by the keys {item.machine_key} and {item.former_key}"
    if item.quote.price.per_gpu > item.ceiling:
        yield "was agreed above its ceiling"
    if item.state is AttemptState.INTENDED and item.ref is None and launch_intent_id(item.key) not in world.intents:
        yield "is intended without an open intent"
