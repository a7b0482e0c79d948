"""How instants, durations and whole values become column values, without losing anything.

Instants are integer microseconds since the epoch: they sort, they compare, and no driver rounds them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.domain.states import InvariantBroken

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TICK: Final = timedelta(microseconds=1)


def instant_out(at: datetime) -> int:
    """Return microseconds since the epoch.

    Raises:
        InvariantBroken: the instant has no time zone.
    """
    if at.tzinfo is None:
        raise InvariantBroken(f"an instant without a time zone cannot be stored: {at.isoformat()}")
    return (at - _EPOCH) // _TICK


def instant_in(stored: int) -> datetime:
    """Return the aware UTC instant."""
    return _EPOCH + timedelta(microseconds=stored)


def duration_out(duration: timedelta) -> int:
    """Return microseconds."""
    return duration // _TICK


def duration_in(stored: int) -> timedelta:
    return timedelta(microseconds=stored)


def words_out(text: str) -> str:
    """Return the text without what some database cannot hold: NUL and lone surrogates become visible escapes.

    Sentences quote providers and hosts, and an odd character of theirs must not keep a state from being written.
    """
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
