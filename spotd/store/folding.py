"""Keeps the state from growing for ever: old events are folded into one line, and rows that nothing asks for go.

Theory. Events tell what happened; nothing is decided by them. The few kinds that receipts are made of are never
folded, and charges, jobs and attempts are never touched: what was spent is always told from them. The newest events
stay whatever their age; the clock may be wrong, a count is not. Folding appends an event that says how many of which
kind are gone, so that numbers of events only rise, and happens a bounded piece at a time. The table's own trigger
refuses every other deletion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, delete, func, insert, or_, select

from spotd.core.model import Event, IntentState
from spotd.core.states import JobState
from spotd.store import rows
from spotd.store.columns import instant_out
from spotd.store.tables import COOLDOWNS, EVENTS, FOLDING_KEY, INTENTS, JOBS, META
from spotd.store.world import chunks

NEVER_FOLDED: Final = ("attempt.billed", "attempt.credited", "checkpoint.fallback", "events.folded")
"""What receipts are made of, and what says what was folded."""
KINDS_SAID: Final = 30
COOLDOWN_KEPT: Final = timedelta(days=7)
"""A cool-down that has run out still says how often its cause came back."""
_FINAL: Final = sorted(state.value for state in JobState if state.is_final)
_SETTLED: Final = (IntentState.DONE.value, IntentState.FAILED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """How much stays.

    Attributes:
        age: what is older may be folded.
        newest: so many events stay however old they are.
        of_a_job: of one job no more stay, however young they are.
        most: of all jobs together no more stay, however young they are.
        piece: so many are folded at once.
        least: fewer are not worth a line of their own.
    """

    age: timedelta = timedelta(days=90)
    newest: int = 10_000
    of_a_job: int = 10_000
    most: int = 250_000
    piece: int = 5_000
    least: int = 500


def fold(connection: Connection, now: datetime, rules: Folding) -> int:
    """Fold one piece of what is too old or too much, if there is any; return how many events are gone."""
    gone = _too_many_of_a_job(connection, rules) or _too_many(connection, rules) or _too_old(connection, now, rules)
    if len(gone) < rules.least:
        return 0
    counts: Counter[str] = Counter()
    for some in chunks(gone):
        query = select(EVENTS.c.kind, func.count()).where(EVENTS.c.seq.in_(some)).group_by(EVENTS.c.kind)
        counts.update(dict(connection.execute(query).all()))
    connection.execute(insert(META).values(key=FOLDING_KEY, value="1"))
    for some in chunks(gone):
        connection.execute(delete(EVENTS).where(EVENTS.c.seq.in_(some)))
    connection.execute(delete(META).where(META.c.key == FOLDING_KEY))
    _append_line(connection, now, counts)
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
    return count + connection.execute(delete(INTENTS).where(settled)).rowcount


def _too_many_of_a_job(connection: Connection, rules: Folding) -> list[int]:
    count = func.count()
    query = (
        select(EVENTS.c.job_id, count)
        .where(EVENTS.c.job_id.is_not(None))
        .group_by(EVENTS.c.job_id)
        .having(count >= rules.of_a_job + rules.least)
        .limit(1)
    )
    for job_id, number in connection.execute(query).all():
        excess = min(rules.piece, number - rules.of_a_job)
        return _numbers(connection, select(EVENTS.c.seq).where(EVENTS.c.job_id == job_id), excess)
    return []


def _too_many(connection: Connection, rules: Folding) -> list[int]:
    number = int(connection.execute(select(func.count()).select_from(EVENTS)).scalar() or 0)
    if number < rules.most + rules.least:
        return []
    return _numbers(connection, select(EVENTS.c.seq), min(rules.piece, number - rules.most))


def _too_old(connection: Connection, now: datetime, rules: Folding) -> list[int]:
    newest = int(connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0)
    old = and_(EVENTS.c.at < instant_out(now - rules.age), EVENTS.c.seq <= newest - rules.newest)
    return _numbers(connection, select(EVENTS.c.seq).where(old), rules.piece)


def _numbers(connection: Connection, query: Select[Any], limit: int) -> list[int]:
    """The oldest of these events that may be folded."""
    found = query.where(EVENTS.c.kind.not_in(NEVER_FOLDED)).order_by(EVENTS.c.seq).limit(limit)
    return [*connection.execute(found).scalars()]


def _append_line(connection: Connection, now: datetime, counts: Counter[str]) -> None:
    number = int(connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0) + 1
    kinds = dict(counts.most_common(KINDS_SAID))
    line = Event(
        at=now,
        kind="events.folded",
        message=f"{counts.total():,} old events are folded into this line",
        data={"events": counts.total(), **kinds},
    )
    connection.execute(insert(EVENTS), [rows.event_out(number, line)])
