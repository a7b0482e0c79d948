"""Time as a rented host may trust it: durations from the kernel, instants from the store's `Date` where it has one."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
_SKEW_IGNORED_S = 2.0
_START_TOOK_MAX_S = 3600.0
"""The start script gives up long before."""


def steady() -> float:
    """Seconds that never go back, and go on while the machine is suspended where the kernel counts that."""
    if _BOOTTIME is None:
        return time.monotonic()
    return time.clock_gettime(_BOOTTIME)


def process_began() -> float:
    """When this process was made, by `steady`; it was the shell of the start script before it became the runner."""
    now = steady()
    try:
        with open("/proc/self/stat", "rb") as file:
            # Behind the name, which may hold anything, the start is the 22nd figure of all, in ticks since the boot.
            ticks = int(file.read(4096).rpartition(b")")[2].split()[19])
        began = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    # Where a container has its own idea of the time since the boot, the two figures cannot be compared.
    return began if _BOOTTIME is not None and now - _START_TOOK_MAX_S <= began <= now else now


class Backoff:
    """Pauses between tries, each twice as long as the one before, up to a limit."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._next_s = first_s
        self._most_s = most_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._most_s)
        return pause_s


class _StoreClock:
    """The wall clock, corrected by the dates of the store's answers. A host's own clock may be hours off."""

    def __init__(self) -> None:
        self._offset_s = 0.0

    def learn(self, date_header: str) -> None:
        """Corrects the offset by one `Date` header; nonsense is ignored."""
        from email.utils import parsedate_to_datetime

        try:
            stated = parsedate_to_datetime(date_header).timestamp()
        except (TypeError, ValueError, OverflowError):
            return
        offset_s = stated - time.time()
        # The header has whole seconds and travelled for a while: small differences are noise.
        self._offset_s = offset_s if abs(offset_s) > _SKEW_IGNORED_S else 0.0

    def now(self) -> float:
        return time.time() + self._offset_s


CLOCK = _StoreClock()


def now_text() -> str:
    """Return the present instant as it is written into documents."""
    return as_text(CLOCK.now())


def as_text(epoch_s: float) -> str:
    """Return an instant in UTC, ISO 8601 with `Z`."""
    moment = datetime.fromtimestamp(epoch_s, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


def as_epoch(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 instant; one without an offset is taken as UTC.

    Raises:
        ValueError: it is none.
    """
    if text.endswith(("Z", "z")):
        text = text[:-1] + "+00:00"
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()
