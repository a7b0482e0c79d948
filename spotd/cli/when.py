"""Spans and instants on the command line, by the daemon's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from spotd.client.daemon import Daemon

When = timedelta | datetime


class WhenType(click.ParamType[When]):
    """A span before now (`2h`) or an instant; an instant without a zone is local."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from spotd_jobs.spec.units import UnitError, parse_duration

        try:
            return parse_duration(value)
        except UnitError:
            pass
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither a span such as 2h nor an instant such as 2026-11-21T10:00", param, ctx)


class SpanType(click.ParamType[timedelta]):
    """A span such as `6h`, of a minute at least."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from spotd_jobs.spec.units import UnitError, parse_duration

        try:
            span = parse_duration(value)
        except UnitError as exc:
            self.fail(f"{exc}; {exc.hint}" if exc.hint else str(exc), param, ctx)
        if span < timedelta(minutes=1):
            self.fail("the shortest span is 1m", param, ctx)
        return span


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
