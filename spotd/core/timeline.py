"""Dates for a timeline that the wall clock does not move, and what a new date changes.

Theory. Every span of the daemon is measured on one timeline that only grows, by the computer's own uptime, sleep
included. The wall clock says which date it has. Both agree until the wall clock is set; then the timeline gets another
date: each instant of what is still open is moved by the same step, after its meter was settled, so that every span
stays as it was and only dates change.

The timeline is continued after a restart of the daemon in the same uptime. After a restart of the computer its length
is not known, and the wall clock is taken, unless it is behind what was written down before: such a clock was not set
yet. Then the timeline begins at the last known instant. When the clock is set, what was written before the restart
has its date already, and only what came after it is moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from spotd.core.budgets import redated_hold
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import Charge
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import Quote
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.world import World
from spotd.core.metering import settled
from spotd_jobs.spec.model import JobSpec

_T = TypeVar("_T")

TOLERANCE: Final = timedelta(seconds=10)
"""A wall clock that differs by less from the timeline is in order: no date needs to be better."""
UNSET_FOR: Final = timedelta(minutes=10)
"""A clock that is behind for so long after a start of the computer is believed: then it was ahead before."""
OLDEST: Final = datetime(2025, 1, 1, tzinfo=UTC)
"""No clock that shows an earlier date was ever set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The timeline showed `at` when the computer, in this uptime of its, had been up for `boot_s`.

    Attributes:
        unset_since: the instant at which the timeline began in this uptime, while the wall clock is behind it.
        issued_ahead: how far the instants that only order grants are ahead of the timeline: they never go back.
    """

    boot_id: str
    boot_s: float
    at: datetime
    unset_since: datetime | None = None
    issued_ahead: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """The anchor from now on, and by how much what was written on the old one is moved."""

    anchor: Anchor
    step: timedelta = timedelta(0)
    only_after: datetime | None = None
    """What is dated up to here has its date already."""


def dated(known: Anchor | None, newest: datetime | None, boot_id: str, boot_s: float, wall: datetime) -> Dated:
    """Date the timeline by what was known of it, the newest instant in the state, and the two clocks."""
    if known is not None and boot_id and known.boot_id == boot_id and boot_s >= known.boot_s:
        return _continuation(known, boot_s, wall)
    ahead = timedelta(0) if known is None else known.issued_ahead
    last = max((at for at in (newest, None if known is None else known.at) if at is not None), default=wall)
    if wall >= last - TOLERANCE:
        return Dated(
            anchor=Anchor(boot_id=boot_id, boot_s=boot_s, at=max(wall, last), issued_ahead=ahead),
        )
    return Dated(anchor=Anchor(boot_id=boot_id, boot_s=boot_s, at=last, unset_since=last, issued_ahead=ahead))


def _continuation(known: Anchor, boot_s: float, wall: datetime) -> Dated:
    now = known.at + timedelta(seconds=boot_s - known.boot_s)
    here = replace(known, boot_s=boot_s, at=now)
    step = wall - now
    if abs(step) <= TOLERANCE:
        return Dated(anchor=replace(here, unset_since=None))
    if known.unset_since is not None and step < timedelta(0):
        if now - known.unset_since < UNSET_FOR or wall < OLDEST:
            return Dated(anchor=here)
        return _with_step(here, step, None)
    return _with_step(here, step, known.unset_since)


def _with_step(here: Anchor, step: timedelta, only_after: datetime | None) -> Dated:
    ahead = here.issued_ahead + max(timedelta(0), -step)
    return Dated(
        anchor=replace(here, at=here.at + step, unset_since=None, issued_ahead=ahead), step=step, only_after=only_after
    )


def wants_new_date(anchor: Anchor, now: datetime, wall: datetime) -> bool:
    """Whether the wall clock was set, so that `dated` would move something now."""
    elapsed = (now - anchor.at).total_seconds()
    return _continuation(anchor, anchor.boot_s + elapsed, wall).step != timedelta(0)


def redated(
    world: World,
    step: timedelta,
    now: datetime,
    only_after: datetime | None = None,
    ended: Iterable[Attempt] = (),
) -> Plan:
    """Move every instant of what is open by the step; `now` is the end of the old dates.

    The cooldowns of the plan are all there are, and replace those that were.

    Args:
        ended: attempts whose bill is open: it is read by their dates, and held against them.
    """

    def moved(at: datetime) -> datetime:
        return at if only_after is not None and at <= only_after else _plus(at, step)

    attempts: list[Attempt] = []
    charges: list[Charge] = []
    for item in world.attempts.values():
        after = item
        since = item.meter.since
        if since is not None and (only_after is None or since > only_after):
            # What lists lack may be gone since then: its time is left on the meter, and not booked yet.
            until = now if item.missing_since is None else min(now, max(since, item.missing_since))
            after, booked = settled(item, until, item.meter.rate, item.meter.on_demand_rate)
            charges.extend(booked)
        attempts.append(_shift(after, moved))
    attempts.extend(_shift(item, moved) for item in ended)
    return Plan(
        jobs={job.id: _job(job, moved) for job in world.jobs.values() if not job.state.is_final},
        attempts={item.id: item for item in attempts},
        intents={intent.id: _shift(intent, moved) for intent in world.intents.values()},
        cooldowns=tuple(_cooling(cooldown, moved, _plus(now, step)) for cooldown in world.cooldowns),
        charges=tuple(charges),
        events=(_event(step, now),),
    )


def _shift(value: _T, moved: Callable[[datetime], datetime]) -> _T:
    """Return the value with every instant in it moved, those of a quote and of a job's specification left out."""
    result: Any = value
    if isinstance(value, datetime):
        result = moved(value)
    elif isinstance(value, tuple):
        result = tuple(_shift(one, moved) for one in value)
    elif is_dataclass(value) and not isinstance(value, (type, Quote, JobSpec)):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: after for name, one in held.items() if (after := _shift(one, moved)) != one}
        result = replace(value, **changed) if changed else value
    return result  # type: ignore[no-any-return]  # of the type it was given, which `replace` cannot tell


def _job(job: Job, moved: Callable[[datetime], datetime]) -> Job:
    """Return the job; what it proposed begins anew, since the readings that the proposal rests on keep their dates."""
    if job.moves.proposed is not None:
        job = replace(job, moves=replace(job.moves, proposed=None))
    return _shift(job, moved)


def _cooling(cooldown: Cooldown, moved: Callable[[datetime], datetime], fresh: datetime) -> Cooldown:
    """Return the cool-down: a pause lasts as long as before; a hold on a budget lasts up to a date."""
    after = _shift(cooldown, moved)
    return replace(after, until=redated_hold(cooldown, fresh)) if cooldown.scope is CooldownScope.BUDGET else after


def _plus(at: datetime, step: timedelta) -> datetime:
    try:
        return at + step
    except OverflowError:
        return at


def _event(step: timedelta, now: datetime) -> Event:
    seconds = step.total_seconds()
    way = "ahead" if seconds > 0 else "back"
    shown = timedelta(seconds=round(abs(seconds)))
    fresh = _plus(now, step)
    return Event(
        at=fresh,
        kind="clock.stepped",
        message=f"the computer's clock was set {way} by {shown}: dates follow it, and no span changes",
        data={"old": now.isoformat(), "new": fresh.isoformat(), "by_s": seconds},
    )
