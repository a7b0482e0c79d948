"""Instants as the API writes and reads them."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_text(instant: datetime) -> str:
    """Return ISO 8601 in UTC, ending in `Z`, to the millisecond.

    Raises:
        ValueError: the instant names no time zone.
    """
    if instant.tzinfo is None:
        raise ValueError("an instant without a time zone")
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def instant(at: datetime | None) -> str | None:
    return None if at is None else utc_text(at)


def utc_instant(text: str) -> datetime:
    """Return the aware instant of an ISO 8601 text that names its zone.

    Raises:
        ValueError: not one.
    """
    instant = datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError("an instant without a time zone")
    return instant.astimezone(UTC)
