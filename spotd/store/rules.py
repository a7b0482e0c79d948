"""What a plan must obey before it is written, checked against what is stored.

Theory. Every changed state has an event that explains it, in the same plan. A plan may hold two steps of one job when
the first ends in a state that wants a machine (a loss is taken in, then the next machine is placed): each step must be
a row of the table of transitions and have its event. A job has at most one attempt that counts, and none when it is
final. A launch belongs to an attempt that was made for it, and once its outcome is settled it is never open again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, timedelta

from spotd.core.domain.charges import Charge
from spotd.core.domain.ids import AttemptId, IntentId, JobId
from spotd.core.domain.intents import Intent, IntentKind, IntentState
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import (
    JOB_TRANSITIONS,
    AttemptState,
    InvariantBroken,
    JobState,
    check_attempt_transition,
    check_job_transition,
)
from spotd.core.metering.metering import day_start
from spotd.core.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """What the database holds of everything a plan touches: all attempts of its jobs, its jobs, its intents."""

    jobs: Mapping[JobId, JobState]
    attempts: Mapping[AttemptId, tuple[AttemptState, str]]
    """State and key."""
    intents: Mapping[IntentId, IntentState]


def check_plan(plan: Plan, stored: StoredRows) -> None:
    """Raise InvariantBroken unless every rule holds."""
    _check_job_steps(plan, stored)
    _check_attempt_steps(plan, stored)
    _check_counting(plan, stored)
    for intent in plan.intents.values():
        _check_intent(intent, plan, stored)
    for charge in plan.charges:
        _check_charge(charge, plan, stored)


def _check_job_steps(plan: Plan, stored: StoredRows) -> None:
    explained = Counter(event.job for event in plan.events)
    for job in plan.jobs.values():
        before = stored.jobs.get(job.id)
        needed = 1 if before is None else _steps(before, job)
        if explained[job.id] < needed:
            raise InvariantBroken(
                f"job {job.id} goes from {before or 'nothing'} to {job.state} "
                f"with {explained[job.id]} of {needed} events"
            )


def _steps(before: JobState, job: Job) -> int:
    """Return how many rows of the table lead from one state to the other."""
    if before is job.state:
        return 0
    by_way_of = [s for s in JOB_TRANSITIONS[before] if s.may_be_placed and job.state in JOB_TRANSITIONS[s]]
    if job.state not in JOB_TRANSITIONS[before] and by_way_of:
        return 2
    check_job_transition(before, job.state)
    return 1


def _check_attempt_steps(plan: Plan, stored: StoredRows) -> None:
    explained = {(event.job, event.attempt) for event in plan.events}
    for attempt in plan.attempts.values():
        before, key = stored.attempts.get(attempt.id, (None, attempt.key))
        if key != attempt.key:
            raise InvariantBroken(f"attempt {key} cannot change its key to {attempt.key}")
        if before is None and attempt.id.job not in stored.jobs and attempt.id.job not in plan.jobs:
            raise InvariantBroken(f"attempt {attempt.key} has no job")
        if before is not None:
            check_attempt_transition(before, attempt.state)
        if before is not attempt.state and (attempt.id.job, attempt.id.number) not in explained:
            raise InvariantBroken(
                f"attempt {attempt.key} goes from {before or 'nothing'} to {attempt.state} without an event"
            )


def _check_counting(plan: Plan, stored: StoredRows) -> None:
    states = {i: state for i, (state, _) in stored.attempts.items()}
    states.update((i, attempt.state) for i, attempt in plan.attempts.items())
    counting = Counter(i.job for i, state in states.items() if state.counts)
    for job_id, count in counting.items():
        if count > 1:
            raise InvariantBroken(f"job {job_id} would have {count} attempts that count")
        planned = plan.jobs.get(job_id)
        state = stored.jobs[job_id] if planned is None else planned.state
        if state.is_final:
            raise InvariantBroken(f"job {job_id} is {state} but would keep an attempt that counts")


def _check_intent(intent: Intent, plan: Plan, stored: StoredRows) -> None:
    if intent.kind is not IntentKind.LAUNCH:
        return
    before = stored.intents.get(intent.id)
    if before in {IntentState.DONE, IntentState.FAILED} and intent.is_open:
        raise InvariantBroken(f"intent {intent.id} is settled as {before} and cannot be {intent.state} again")
    if intent.attempt is None:
        raise InvariantBroken(f"intent {intent.id} launches a machine for no attempt")
    planned = plan.attempts.get(intent.attempt)
    found = stored.attempts.get(intent.attempt) if planned is None else (planned.state, planned.key)
    if found is None or found[1] != intent.key:
        raise InvariantBroken(f"intent {intent.id} launches a machine whose attempt is not stored")
    if before is None and intent.is_open and found[0] is not AttemptState.INTENDED:
        raise InvariantBroken(f"intent {intent.id} launches a machine for an attempt that is {found[0]} already")


def _check_charge(charge: Charge, plan: Plan, stored: StoredRows) -> None:
    who = f"{charge.attempt.job}-{charge.attempt.number}"
    if charge.attempt not in plan.attempts and charge.attempt not in stored.attempts:
        raise InvariantBroken(f"a charge for attempt {who}, which is not stored")
    next_day = day_start(charge.day + timedelta(days=1))
    if charge.start.astimezone(UTC).date() != charge.day or not charge.start <= charge.end <= next_day:
        raise InvariantBroken(
            f"a charge of attempt {who} from {charge.start} to {charge.end} is not within {charge.day}"
        )
    taken_back = charge.start == charge.end and not charge.on_demand
    if charge.amount < 0 and not taken_back:
        raise InvariantBroken(f"a charge of attempt {who} is negative")
