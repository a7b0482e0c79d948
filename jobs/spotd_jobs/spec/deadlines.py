"""Deadlines as people write them, to exact values and back: a span from the submission, or an instant with its zone."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd_jobs.spec.fields import kind, shown
from spotd_jobs.spec.model import Deadline
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import UnitError, format_duration, parse_duration

DEADLINE_HINT: Final = 'write deadline = "36h", or an instant with its zone: deadline = 2026-11-24T08:00:00+02:00'
SPAN_MIN: Final = timedelta(minutes=1)
LATEST: Final = datetime(2100, 1, 1, tzinfo=UTC)
_INSTANT: Final = re.compile(r"\s*[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ].*)?")
_TEXT_MAX: Final = 64


def parse_deadline(value: object) -> Deadline:
    """Return the deadline that a text like `36h` or `2026-11-24T08:00+02:00` names.

    Raises:
        BadValue: neither of them, an instant without a zone, or one that no job can mean.
    """
    if isinstance(value, datetime):
        return Deadline(at=_checked(value, value.isoformat()))
    if not isinstance(value, str):
        raise BadValue(f"must be text, not {kind(value)}", hint=DEADLINE_HINT)
    if len(value) <= _TEXT_MAX and _INSTANT.fullmatch(value):
        try:
            at = datetime.fromisoformat(value.strip().upper())
        except ValueError as exc:
            raise BadValue(f"{shown(value)} is no instant that a calendar has", hint=DEADLINE_HINT) from exc
        return Deadline(at=_checked(at, value))
    try:
        span = parse_duration(value)
    except UnitError as exc:
        raise BadValue(str(exc), hint=DEADLINE_HINT) from exc
    if span < SPAN_MIN:
        raise BadValue(f"{shown(value)} is shorter than a minute", hint=DEADLINE_HINT)
    return Deadline(span=span)


def _checked(at: datetime, written: str) -> datetime:
    if at.tzinfo is None:
        raise BadValue(f"{shown(written)} has no time zone", hint=DEADLINE_HINT)
    try:
        at = at.astimezone(UTC)
    except OverflowError as exc:
        raise BadValue(f"{shown(written)} is no instant that a calendar has", hint=DEADLINE_HINT) from exc
    if at >= LATEST:
        raise BadValue(f"{shown(written)} is after {LATEST:%Y}: no job waits so long", hint="leave the deadline out")
    return at


def deadline_words(deadline: Deadline | None) -> str | None:
    """Return the deadline as a job file has it."""
    if deadline is None:
        return None
    if deadline.at is not None:
        return deadline.at.isoformat()
    return None if deadline.span is None else format_duration(deadline.span)
