"""Keeps the state from growing for ever: old events are folded into one line, and rows that nothing asks for go.

Theory. Events record what happened; nothing is decided by them. The few kinds that receipts are made of are never
folded, and charges, jobs and attempts are never touched: what was spent is computed from them. What matters to money
and machines stays for its age, however much of it there is. Of what each checkpoint adds, a job keeps the newest few;
of what hosts and providers cause otherwise, as many as a reader needs. The newest events stay whatever their age; the
clock may be wrong, a count is not.

The line counts how many of which kind are gone. It stands where the last of them stood, with their time, so that later
events follow it, no reader who follows the events meets it as news, and it is folded in its turn with those around it.
All happens a bounded piece at a time. The table's own trigger refuses every other deletion.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, delete, func, insert, or_, select

from spotd.core.domain.ids import JobId
from spotd.core.domain.intents import IntentState
from spotd.core.domain.states import JobState
from spotd.core.plans.plan import Event
from spotd.store import rows
from spotd.store.columns import instant_in, instant_out
from spotd.store.conditions import chunks
from spotd.store.experience import forget_faded
from spotd.store.tables import COOLDOWNS, EVENTS, FOLDING_KEY, INTENTS, JOBS, META

NEVER_FOLDED: Final = ("attempt.billed", "attempt.credited", "checkpoint.fallback")
"""What receipts are made of."""
ROUTINE: Final = ("checkpoint.accepted", "checkpoint.dropped")
"""What every save of a job adds. What the job may resume from is in its list of checkpoints, not here."""
FOLDED: Final = "events.folded"
KINDS_SAID: Final = 30
COOLDOWN_KEPT: Final = timedelta(days=7)
"""A cool-down that has run out still shows how often its cause came back."""
_BY_AGE_ALONE: Final = ("attempt.", "job.", "launch.", "machine.")
"""What these begin is bounded by what is bought, and matters for as long as it may be asked about."""
_FINAL: Final = sorted(state.value for state in JobState if state.is_final)
_SETTLED: Final = (IntentState.DONE.value, IntentState.FAILED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How much stays.

    Attributes:
        age: what is older may be folded.
        newest: so many events stay however old they are.
        routine: of each kind that every checkpoint adds, so many of one job stay.
        routine_least: fewer of such a kind are not worth a change of the job's line.
        of_a_job: of one job no more stay, however young they are, but for what matters to money and machines.
        most: of all jobs together no more stay, with the same exception.
        piece: about so many are folded at once.
        least: fewer are not worth a line of their own.
    """

    age: timedelta = timedelta(days=90)
    newest: int = 10_000
    routine: int = 100
    routine_least: int = 50
    of_a_job: int = 10_000
    most: int = 250_000
    piece: int = 5_000
    least: int = 500


def fold(connection: Connection, now: datetime, rules: Folding) -> int:
    """Fold one piece of what is too old or too much, if there is any; return how many events are gone."""
    return _fold_routine(connection, rules) or _fold_excess(connection, now, rules)


def _fold_routine(connection: Connection, rules: Folding) -> int:
    """Fold what checkpoints have added to some jobs beyond the newest of each kind, into one line a job."""
    gone: dict[JobId, list[int]] = {}
    count = func.count()
    query = (
        select(EVENTS.c.kind, EVENTS.c.job_id, count)
        .where(EVENTS.c.kind.in_(ROUTINE), EVENTS.c.job_id.is_not(None))
        .group_by(EVENTS.c.kind, EVENTS.c.job_id)
        .having(count >= rules.routine + rules.routine_least)
    )
    total = 0
    for kind, job_id, number in connection.execute(query).all():
        if total >= rules.piece:
            break
        of_kind = select(EVENTS.c.seq).where(EVENTS.c.kind == kind, EVENTS.c.job_id == job_id)
        oldest = of_kind.order_by(EVENTS.c.seq).limit(min(rules.piece, number - rules.routine))
        found = connection.execute(oldest).scalars().all()
        gone.setdefault(job_id, []).extend(found)
        total += len(found)
    for job_id, numbers in gone.items():
        former = select(EVENTS.c.seq).where(EVENTS.c.kind == FOLDED, EVENTS.c.job_id == job_id)
        _replace(connection, [*connection.execute(former).scalars(), *numbers], job_id)
    return total


def _fold_excess(connection: Connection, now: datetime, rules: Folding) -> int:
    kinds = set(connection.execute(select(EVENTS.c.kind).distinct()).scalars()).difference(NEVER_FOLDED)
    capped = [kind for kind in kinds if not kind.startswith(_BY_AGE_ALONE)]
    gone = (
        _too_many_of_a_job(connection, capped, rules)
        or _too_many(connection, capped, rules)
        or _too_old(connection, kinds, now, rules)
    )
    if len(gone) < rules.least:
        return 0
    _replace(connection, gone, None)
    return len(gone)


def forget_settled(connection: Connection, now: datetime, rules: Folding) -> int:
    """Delete cool-downs that have run out, and settled calls of jobs that ended long ago; return how many they were."""
    past, long_ago = instant_out(now - COOLDOWN_KEPT), instant_out(now - rules.age)
    ended = select(JOBS.c.id).where(JOBS.c.state.in_(_FINAL), JOBS.c.ended_at < long_ago)
    settled = and_(
        INTENTS.c.state.in_(_SETTLED),
        INTENTS.c.created_at < long_ago,
        or_(INTENTS.c.attempt_job.is_(None), INTENTS.c.attempt_job.in_(ended)),
    )
    count = connection.execute(delete(COOLDOWNS).where(COOLDOWNS.c.until < past)).rowcount
    count += forget_faded(connection, now)
    return count + connection.execute(delete(INTENTS).where(settled)).rowcount


def _too_many_of_a_job(connection: Connection, kinds: Sequence[str], rules: Folding) -> list[int]:
    count, limit = func.count(), rules.of_a_job + rules.least
    of_jobs = select(EVENTS.c.job_id).where(EVENTS.c.job_id.is_not(None)).group_by(EVENTS.c.job_id)
    for job_id in connection.execute(of_jobs.having(count >= limit)).scalars().all():
        some = and_(EVENTS.c.job_id == job_id, EVENTS.c.kind.in_(kinds))
        number = int(connection.execute(select(count).select_from(EVENTS).where(some)).scalar() or 0)
        if number >= limit:
            return _numbers(connection, select(EVENTS.c.seq).where(some), min(rules.piece, number - rules.of_a_job))
    return []


def _too_many(connection: Connection, kinds: Sequence[str], rules: Folding) -> list[int]:
    some = EVENTS.c.kind.in_(kinds)
    number = int(connection.execute(select(func.count()).select_from(EVENTS).where(some)).scalar() or 0)
    if number < rules.most + rules.least:
        return []
    return _numbers(connection, select(EVENTS.c.seq).where(some), min(rules.piece, number - rules.most))


def _too_old(connection: Connection, kinds: Iterable[str], now: datetime, rules: Folding) -> list[int]:
    newest = int(connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0)
    old = and_(EVENTS.c.at < instant_out(now - rules.age), EVENTS.c.seq <= newest - rules.newest)
    return _numbers(connection, select(EVENTS.c.seq).where(old, EVENTS.c.kind.in_([*kinds])), rules.piece)


def _numbers(connection: Connection, query: Select[Any], limit: int) -> list[int]:
    """Return the numbers of the oldest of these events."""
    return [*connection.execute(query.order_by(EVENTS.c.seq).limit(limit)).scalars()]


def _replace(connection: Connection, gone: Sequence[int], job: JobId | None) -> None:
    """Delete these events; one line counts what they were, of the job or of no one job."""
    counts: Counter[str] = Counter()
    total = 0
    for some in chunks(gone):
        for kind, data in connection.execute(select(EVENTS.c.kind, EVENTS.c.data).where(EVENTS.c.seq.in_(some))):
            former = _said(data) if kind == FOLDED else {"events": 1, kind: 1}
            total += former.pop("events", 0)
            counts.update(former)
    last = max(gone)
    at = instant_in(connection.execute(select(EVENTS.c.at).where(EVENTS.c.seq == last)).scalar_one())
    connection.execute(insert(META).values(key=FOLDING_KEY, value="1"))
    for some in chunks(gone):
        connection.execute(delete(EVENTS).where(EVENTS.c.seq.in_(some)))
    connection.execute(delete(META).where(META.c.key == FOLDING_KEY))
    whose = "" if job is None else " of this job"
    line = Event(
        at=at,
        kind=FOLDED,
        message=f"{total:,} older events{whose} are folded into this line",
        job=job,
        data={"events": total, **dict(counts.most_common(KINDS_SAID))},
    )
    connection.execute(insert(EVENTS), [rows.event_out(last, line)])


def _said(data: str) -> dict[str, int]:
    """Return the numbers that a line of this kind holds, as far as they are numbers."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return {k: n for k, n in found.items() if type(n) is int and n > 0} if isinstance(found, dict) else {}
