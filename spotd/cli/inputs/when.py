"""Spans and instants on the command line, by the daemon's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from spotd.cli.inputs.options import Parsed
from spotd.client.daemon import Daemon

When = timedelta | datetime


def _when(text: str) -> When:
    from spotd_jobs.spec.problems import BadValue
    from spotd_jobs.spec.units import UnitError, parse_duration

    try:
        return parse_duration(text)
    except UnitError:
        pass
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        message = f"{text!r} is neither a span such as 2h nor an instant such as 2026-11-21T10:00"
        raise BadValue(message, hint="") from exc


def _span(text: str) -> timedelta:
    from spotd_jobs.spec.problems import BadValue
    from spotd_jobs.spec.units import parse_duration

    span = parse_duration(text)
    if span < timedelta(minutes=1):
        raise BadValue("the shortest span is 1m", hint="")
    return span


WHEN = Parsed("when", _when)
"""A span before now (`2h`) or an instant; an instant without a zone is local."""
SPAN = Parsed("span", _span)
"""A span such as `6h`, of a minute at least."""


def instants(daemon: Daemon, *moments: When | None) -> list[str | None]:
    """Return the moments as the API reads them; spans count from the daemon's now, which may run ahead of ours."""
    now: datetime | None = None
    found: list[str | None] = []
    for moment in moments:
        if isinstance(moment, timedelta):
            if now is None:
                now = datetime.fromisoformat(daemon.providers()["now"])
            found.append(_before(now, moment).isoformat())
        else:
            found.append(None if moment is None else moment.isoformat())
    return found


def _before(now: datetime, span: timedelta) -> datetime:
    try:
        return now - span
    except OverflowError:
        return datetime(1970, 1, 1, tzinfo=UTC)
