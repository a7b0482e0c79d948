"""A state that is older than the store, or lost: what was done since is taken in, and no number is used twice.

Theory. The daemon writes a *launch record* into the store before it buys, once for each number of a job, where no host
can write. A number that the state does not know was therefore used by a former run of this install, whose state was
lost or restored from a backup. The record of the highest one is the newest attempt: it was made only after every
lower one had stopped counting. Its machine may live, so it is taken in exactly as a launch whose answer was lost, and
found by its key; the lower ones count as used, and their machines, if any are left, are strays of ours.

A state that is lost: every job has a *job record* in the store, too, where no host can write: the job as the state held
it a moment ago. It is there before the first machine of the job is bought. So a job that has a record and no row was
lost with a state, and two things are certain of it: what its owner asked for, and by its launch records which numbers
were used. The newest number may have a machine. It is taken in as above: found by its key, or given up after the
provider's lists lack it; nothing else is launched for the job before that. What the job had cost by its record is
booked on one attempt that is over, on the day of the record, the latest that it can be of: so the budgets of this day
and month do not forget it. A job that had ended is taken back as that: nothing runs twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from spotd.core import requests
from spotd.core.billing import ENDING_TAKES, charge_unseen
from spotd.core.checkpoints import with_fresh
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Charge, Intent, IntentKind, IntentState, JobId, Meter, launch_intent_id
from spotd.core.domain.jobs import Checkpoint, Job, Moves, Pacing
from spotd.core.domain.market import Quote
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.policy import Policy, is_own_key, key_parts
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import RESTARTED, doubt_launch, not_sent
from spotd.core.metering import lease_and_save
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import AttemptKey, InstallId, MicroUsdPerGpuHour, MicroUsdPerHour, as_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """What was agreed when a number of a job was used.

    Attributes:
        members: of several machines that go on from the attempt before, which of them are lost.
    """

    key: AttemptKey
    quote: Quote
    ceiling: MicroUsdPerGpuHour
    price_max: MicroUsdPerHour
    intended_at: datetime
    machine_key: AttemptKey | None = None
    former_key: AttemptKey | None = None
    members: Members | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A number that the state does not know. `record` is `None` where it cannot be read."""

    number: int
    record: LaunchRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the store knows of a job beyond the state: numbers ascending, checkpoints of each oldest first.

    Attributes:
        alive_at: when the host of the attempt that counts in this state gave its last sign of life, or came to its end,
            as it stated.
    """

    job: JobId
    unknown: Sequence[Unknown]
    checkpoints: Sequence[Checkpoint] = ()
    alive_at: datetime | None = None


def record_of(item: Attempt) -> LaunchRecord:
    """Return the launch record of an attempt."""
    return LaunchRecord(
        key=item.key,
        quote=item.quote,
        ceiling=item.ceiling,
        price_max=item.price_max,
        intended_at=item.intended_at,
        machine_key=item.machine_key,
        former_key=item.former_key,
        members=item.members,
    )


def attempt_of(policy: Policy, job: JobId, unknown: Unknown) -> Attempt | None:
    """Return the attempt of the record, as one whose launch has an unknown outcome."""
    record = unknown.record
    if record is None:
        return None
    parts = key_parts(policy.install, record.key)
    if parts is None or (parts.job, parts.number) != (job, unknown.number) or not is_own_key(policy, record.key):
        return None
    if record.quote.price.per_gpu > record.ceiling:
        return None
    others = (record.machine_key, record.former_key)
    if any(key is not None and not is_own_key(policy, key) for key in others) or others.count(None) == 1:
        return None
    return Attempt(
        id=AttemptId(job=job, number=unknown.number),
        key=record.key,
        state=AttemptState.INTENDED,
        quote=record.quote,
        ceiling=record.ceiling,
        price_max=record.price_max,
        intended_at=record.intended_at,
        outcome_unknown=True,
        machine_key=record.machine_key,
        former_key=record.former_key,
        members=record.members,
    )


def unsent(world: World) -> frozenset[AttemptId]:
    """Return the attempts whose launch was owed when the process ended, and not sent as far as this state knows."""
    return frozenset(
        t.attempt
        for t in world.intents.values()
        if t.kind is IntentKind.LAUNCH and t.state is IntentState.OPEN
        if t.attempt is not None and t.attempt in world.attempts
    )


def recover(
    world: World, surveys: Sequence[Survey], now: datetime, unsent: Mapping[AttemptId, bool] | None = None
) -> Plan:
    """Numbers go on after the highest that was ever used, newer checkpoints and the newest machine are taken in.

    Args:
        unsent: launches that were not sent as far as this state knows. One that was prepared in some run may have been
            sent by it; the others were never made.
    """
    builder = PlanBuilder(world, now)
    for identity, was_prepared in (unsent or {}).items():
        _settle_unsent(builder, identity, was_prepared=was_prepared)
    for survey in surveys:
        job = world.jobs.get(survey.job)
        fresh = [one for one in survey.unknown if job is not None and one.number > job.attempts_made]
        if job is None or job.state.is_final or not fresh:
            continue
        _recover_job(builder, job, fresh, survey)
    return builder.plan()


def retry(world: World, job: Job, survey: Survey | None, now: datetime) -> Plan:
    """Queue a final job again, with what the store knows of it beyond this state."""
    plan = requests.retry(world, job, now)
    if survey is None:
        return plan
    queued = applied(world.with_job(job), plan)
    return combine(plan, recover(queued, [survey], now))


def _settle_unsent(builder: PlanBuilder, identity: AttemptId, *, was_prepared: bool) -> None:
    item = next((a for a in builder.attempts() if a.id == identity), None)
    intent = None if item is None else builder.intent(launch_intent_id(item.key))
    if item is None or intent is None or intent.state is not IntentState.OPEN:
        return
    if was_prepared:
        doubt_launch(builder, item, intent)
    else:
        not_sent(builder, item, intent, RESTARTED)


def _recover_job(builder: PlanBuilder, job: Job, fresh: Sequence[Unknown], survey: Survey) -> None:
    highest = fresh[-1].number
    counting = next((a for a in builder.attempts() if a.id.job == job.id and a.state.counts), None)
    if counting is not None:
        detail = f"the state is older than the store, which knows attempt {highest}, launched after this one was over"
        _settle_until_next(builder, counting, fresh, survey.alive_at)
        builder.end_attempt(counting.id, EndReason.HOST_LOST, detail)
    known = {c.manifest_key for c in job.checkpoints}
    item = builder.job(job.id)
    for number in sorted({c.attempt for c in survey.checkpoints}):
        mine = [c for c in survey.checkpoints if c.attempt == number and c.manifest_key not in known]
        if mine:
            item = replace(item, checkpoints=with_fresh(item, number, mine))
    count = len(item.checkpoints) - len(job.checkpoints)
    builder.put_job(replace(item, attempts_made=highest))
    builder.event(
        "job.recovered",
        f"the state is older than the store: attempts up to number {highest} were made"
        + (f", and {count} newer checkpoints are taken in" if count > 0 else ""),
        job=job.id,
        attempts_made=highest,
        checkpoints=max(0, count),
    )
    item = builder.job(job.id)
    if item.state.is_final or job.cancel_requested:
        return
    attempt = attempt_of(builder.policy, job.id, fresh[-1])
    if attempt is not None:
        _search_for(builder, attempt)
        return
    # Where its machine is, if it has one, is unknown: no other may compute before its lease is over.
    builder.put_job(replace(item, not_before=builder.now + lease_and_save(item, builder.policy)))


def _settle_until_next(
    builder: PlanBuilder, item: Attempt, fresh: Sequence[Unknown], alive_at: datetime | None
) -> None:
    """Its time ended before the next attempt was launched; if its machine is listed all the same, it billed on.

    What its host wrote until then is newer than this state, and so is what that proves.
    """
    next_at = next((one.record.intended_at for one in fresh if one.record is not None), builder.now)
    lived_until = next_at if alive_at is None else min(alive_at, next_at)
    since, known = item.meter.since, item.meter.until
    if since is None and item.heartbeat_seen_at is not None:
        charge_unseen(builder, item.id, lived_until)
        return
    if since is None or next_at >= builder.now:
        return
    if alive_at is not None:
        proven = max(since, lived_until, item.proven_at or since)
        until = min(next_at, proven + ENDING_TAKES)
        item = replace(item, proven_at=proven)
    elif known is None or next_at < known:
        until = next_at
    else:
        return
    builder.put_attempt(replace(item, meter=replace(item.meter, until=max(until, since))))


def _search_for(builder: PlanBuilder, attempt: Attempt) -> None:
    """Its machine is searched for by its key, as after a launch whose answer was lost."""
    until = builder.window_end(attempt.provider)
    if attempt.members is not None:  # for how long they have waited is by the dates of another run
        attempt = replace(attempt, members=replace(attempt.members, kept_since=builder.now))
    builder.put_attempt(attempt)
    builder.put_intent(
        Intent(
            id=launch_intent_id(attempt.key),
            kind=IntentKind.LAUNCH,
            provider=attempt.provider,
            key=attempt.key,
            state=IntentState.UNKNOWN,
            created_at=attempt.intended_at,
            attempt=attempt.id,
            not_before=until,
            error="the state was restored",
        )
    )
    sentence = (
        f"attempt {attempt.id.number} was launched by a former run of this install; {attempt.provider} is searched"
    )
    builder.event("launch.unknown", sentence, attempt=attempt.id)
    builder.move_job(attempt.id.job, JobState.PROVISIONING, f"{sentence} for its machine")
    builder.list_again(attempt.provider)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as the store keeps it.

    Attributes:
        identity: of the install whose job it is; machines carry it in their keys.
        saved_at: by the clock of the daemon.
    """

    install: InstallId
    identity: str
    saved_at: datetime
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class LostJob:
    """What the store knows of a job that the state does not.

    Attributes:
        survey: numbers whose fate no record shows, and what they saved; `None` for a job that was over, or that never
            had a machine. The job of the record has the attempts before them.
        spent_on: an attempt that is over, and on which what the job has cost is booked.
    """

    record: JobRecord
    survey: Survey | None = None
    spent_on: Unknown | None = None


def content_of(job: Job) -> Job:
    """Return of a job what its record holds: all but what passes, or is found again by looking."""
    state = job.state if job.state.is_final else JobState.QUEUED
    pacing = Pacing(counted_from=job.pacing.counted_from, ran_before=job.pacing.ran_before, losses=job.pacing.losses)
    return replace(
        job,
        state=state,
        reason=job.reason if state.is_final else "",
        state_since=job.state_since if state.is_final else job.submitted_at,
        not_before=None,
        pacing=pacing,
        moves=Moves(count=job.moves.count),
    )


def must_be_stored_at_once(before: Job | None, after: Job) -> bool:
    """Whether a job that is rebuilt without this would do what its owner forbade, or lose track of a machine."""
    if before is None:
        return True
    return _orders(before) != _orders(after)


def _orders(job: Job) -> tuple[object, ...]:
    return job.state, job.spec, job.attempts_made, job.cancel_requested, job.budget_set, job.errors


def job_of(one: LostJob, policy: Policy, now: datetime) -> Job:
    """Return the job as it is queued again, or as it ended. No instant of it is later than now."""
    job = one.record.job
    # A machine of it may run, and no record says where: none other may compute before its lease is over.
    may_run = job.attempts_made > 0 and one.survey is None and not job.state.is_final
    return replace(
        job,
        reason=job.reason or "its state was lost, and it was rebuilt from its record in the store",
        submitted_at=min(job.submitted_at, now),
        state_since=min(job.state_since, now),
        started_at=None if job.started_at is None else min(job.started_at, now),
        ended_at=None if job.ended_at is None else min(job.ended_at, now),
        not_before=now + lease_and_save(job, policy) if may_run else None,
        cancel_requested=job.cancel_requested and job.state.is_final,
    )


def adopt(world: World, lost: Sequence[LostJob], known: Collection[JobId], now: datetime) -> Plan:
    """Take back every job that the state does not know, with its machine if it has one.

    Args:
        known: jobs of these that the state knows, those that are over too.
    """
    taken = [one for one in lost if one.record.job.id not in known and one.record.job.id not in world.jobs]
    builder = PlanBuilder(world, now)
    for one in taken:
        _rebuild(builder, one)
    plan = builder.plan()
    surveys = [one.survey for one in taken if one.survey is not None]
    plan = combine(plan, recover(applied(world, plan), surveys, now))
    cancelled = [
        one.record.job.id for one in taken if one.record.job.cancel_requested and not one.record.job.state.is_final
    ]
    return combine(plan, requests.cancel_all(applied(world, plan), cancelled, now)) if cancelled else plan


def _rebuild(builder: PlanBuilder, one: LostJob) -> None:
    job = job_of(one, builder.policy, builder.now)
    builder.put_job(job)
    ended = f"it had ended as {job.state}" if job.state.is_final else "it goes on"
    builder.event(
        "job.adopted",
        "the state was lost; the job is rebuilt from its record in the store of"
        f" {one.record.saved_at:%Y-%m-%d %H:%M} UTC, and {ended}",
        job=job.id,
        attempts_made=job.attempts_made,
        checkpoints=len(job.checkpoints),
    )
    _charge(builder, job, one)


def _charge(builder: PlanBuilder, job: Job, one: LostJob) -> None:
    """Charge what the job has cost by its record: budgets of days and months are made of charges, which are lost."""
    item = None if one.spent_on is None else attempt_of(builder.policy, job.id, one.spent_on)
    if item is None:
        return
    at = min(one.record.saved_at, builder.now).astimezone(UTC)
    if item.id.number <= job.attempts_made:
        builder.put_attempt(_over(item, job, at))
        builder.event(
            f"attempt.{EndReason.HOST_LOST.value}",
            f"it was over when the state was lost; what the job has cost until then, ${as_usd(job.spent):.4f}, is"
            " booked on it",
            attempt=item.id,
        )
    elif one.survey is None:
        return
    builder.add_charge(
        Charge(
            attempt=item.id,
            provider=item.provider,
            day=at.date(),
            start=at,
            end=at,
            amount=job.spent,
            on_demand=job.on_demand or None,
        )
    )


def _over(item: Attempt, job: Job, at: datetime) -> Attempt:
    return replace(
        item,
        state=AttemptState.ENDED,
        machine=MachineState.GONE,
        outcome_unknown=False,
        ended_at=at,
        end_reason=EndReason.HOST_LOST,
        end_detail="rebuilt from the store",
        meter=Meter(settled=job.spent),
        on_demand_settled=job.on_demand,
    )


def is_ours(record: JobRecord, policy: Policy) -> bool:
    """Whether the job was queued with this install, and not with another that has the same store, or the same label."""
    return record.install == policy.install and record.identity in {policy.identity, *policy.identities}
