"""What one host may cost the daemon: its share of a read, and its ration of lines in the job's history.

Theory. Everything a host writes is an untrusted host's choice: how many manifests, how large, how often. A read
therefore spends a bounded number of bytes, documents and seconds on each host and goes on where it stopped the next
time, and each host may cause so many events at once and then only a few in an hour; the rest becomes one line.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.grant import BYTES_MAX
from spotd_jobs.wire.reports import Heartbeat, Phase

MANIFESTS_PER_READ: Final = 16
BYTES_PER_READ: Final = 32 * 1024 * 1024
LARGE: Final = 1024 * 1024
"""A manifest beyond this takes a while to parse, so one of them is read of each host at a time."""
SECONDS_PER_READ: Final = 2.0
LINES_AT_ONCE: Final = 50
LINES_PER_HOUR: Final = 6
KINDS_MAX: Final = 32


class HostShare:
    """What one read may spend on one host.

    Args:
        ticks: a clock that only goes forward, in seconds.
        over: whether the read of all hosts has run out of time.
    """

    def __init__(
        self,
        *,
        ticks: Callable[[], float] = time.monotonic,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ticks = ticks
        self._over = over
        self._until = ticks() + SECONDS_PER_READ
        self._has_begun = False
        self._documents = 0
        self._bytes = 0
        self._large = 0
        self.is_spent = False
        """Something was left for the next read."""

    def has_time(self) -> bool:
        """Whether this read may go on; one thing is always done, so that each read comes further than the last."""
        if self._has_begun and (self._over() or self._ticks() >= self._until):
            self.is_spent = True
        self._has_begun = True
        return not self.is_spent

    def take(self, size: int) -> bool:
        """Whether a document of so many bytes may be read now."""
        large = int(size > LARGE)
        fits = self._documents == 0 or (
            self._documents < MANIFESTS_PER_READ
            and self._bytes + size <= BYTES_PER_READ
            and self._large + large <= 1
            and self.has_time()
        )
        if not fits:
            self.is_spent = True
            return False
        self._documents += 1
        self._bytes += size
        self._large += large
        return True


@dataclass(slots=True)
class HostRation:
    """How many lines of each kind one host may add to its job's history."""

    _left: dict[str, float] = field(default_factory=dict)
    _at: dict[str, datetime] = field(default_factory=dict)
    _folded: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, at: datetime) -> bool:
        """Whether one more line of this kind may be added; else it is counted."""
        if kind not in self._left and len(self._left) >= KINDS_MAX:
            kind = "others"
        since = max(timedelta(0), at - self._at.get(kind, at))
        earned = since / timedelta(hours=1) * LINES_PER_HOUR
        left = min(float(LINES_AT_ONCE), self._left.get(kind, LINES_AT_ONCE) + earned)
        self._at[kind] = max(at, self._at.get(kind, at))
        if left < 1:
            self._left[kind] = left
            self._folded[kind] += 1
            return False
        self._left[kind] = left - 1
        return True

    def folded(self, at: datetime, *, is_end: bool = False) -> list[str]:
        """Return the lines for what was only counted, each at its turn, or all of them at the end."""
        lines = []
        for kind, count in sorted(self._folded.items()):
            if is_end or self._is_due(kind, at):
                lines.append(f"and {count:,} more of this kind: {kind}")
                del self._folded[kind]
        return lines

    def _is_due(self, kind: str, at: datetime) -> bool:
        """Whether a line of this kind was not added within the last hour."""
        key = f"folded {kind}"
        if key in self._at and at - self._at[key] < timedelta(hours=1):
            return False
        self._at[key] = at
        return True


# Limits on how much a host writes: its write permission limits the size of an object at most, never their number.
#
# Theory. A host that fills the store harms no data, only the bill. So it is enough to count seldom: everything below an
# attempt's own prefix is listed every few minutes at most, and the listing ends where a limit is passed, which bounds
# what a count can cost. What is billed is counted: every version of an object that was written over, and the parts of
# uploads that were never completed. An attempt that is past a limit is ended with a reason of its own, its grant is
# withdrawn instead of renewed, and its write permission is revoked where the store can do that.


_DAY: Final = timedelta(days=1)
_LOGS: Final = "log/"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodLimits:
    """What one attempt may have written for each day, or part of one, that it has lasted; `[store]` in the config.

    Attributes:
        bytes_day: as much as a line of 1 Gbit/s carries in a day.
        log_bytes_day: more than twice what a runner of ours sends.
        audit_every: of the wall clock.
    """

    objects_day: int = 1_000_000
    bytes_day: int = 11 * 1000**4
    log_bytes_day: int = 1000**3
    audit_every: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one host wrote: the bytes, and what of it is too much, in words; empty while it is within its limits."""

    bytes: int
    flood: str


def count(objects: ObjectStore, attempt: Attempt, limits: FloodLimits, *, at: datetime) -> Count:
    """Count what the host wrote, up to the first limit that it is past.

    Raises:
        StoreError
    """
    days = max(1, -(-(at - attempt.intended_at) // _DAY))
    prefix = object_keys.prefix_of(attempt.id)
    size = logs = 0
    for number, info in enumerate(objects.stored(prefix), start=1):
        size += info.size
        if info.key.startswith(_LOGS, len(prefix)):
            logs += info.size
        for what, found, limit in (
            ("objects", number, limits.objects_day),
            ("bytes", size, limits.bytes_day),
            ("bytes of logs", logs, limits.log_bytes_day),
        ):
            if found > limit * days:
                words = f"more than {limit * days} {what} in {days} day{'s' if days > 1 else ''}"
                return Count(bytes=size, flood=words)
    return Count(bytes=size, flood="")


# What a host is moving now, how fast, and how long it will take, by its heartbeats alone.
#
# A heartbeat states how far the upload or the restore has come. The rate is what lies between the oldest and the newest
# of the last few, by the host's own running time, so that chunks which the store had already count as the progress they
# are. All of it is what an untrusted host states, and only ever shown.


SAMPLES: Final = 10
LEFT_S_MAX: Final = 10 * 366 * 86400.0
SPAN_S_MIN: Final = 0.001
_BEFORE_RESTORE: Final = frozenset({Phase.BOOT, Phase.CODE, Phase.SETUP})


class TransferKind(StrEnum):
    """Which way the bytes go. The strings are part of the JSON output."""

    UPLOAD = "upload"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTransfer:
    """One checkpoint on its way.

    Attributes:
        rate: bytes per second, `None` before a second heartbeat.
        left_s: seconds until it is done, `None` while that is unknown.
        queued: how many more wait for their upload.
        failing: why it does not advance, empty while it does.
    """

    kind: TransferKind
    name: str
    done: int
    total: int
    rate: int | None
    left_s: float | None
    queued: int = 0
    failing: str = ""


@dataclass(slots=True)
class TransferMeter:
    """The last few heartbeats of one transfer; `now` is what the newest of them states."""

    now: HostTransfer | None = None
    _key: tuple[str, ...] = ()
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def take(self, heartbeat: Heartbeat) -> None:
        """Take in the newest heartbeat."""
        bare = _bare(heartbeat)
        if bare is None:
            self.now, self._key = None, ()
            return
        key = (bare.kind, bare.name, str(heartbeat.boot))
        if key != self._key or (self._samples and bare.done < self._samples[-1][1]):
            self._key = key
            self._samples.clear()
        if not self._samples or heartbeat.up_s > self._samples[-1][0]:
            self._samples.append((heartbeat.up_s, bare.done))
        self.now = self._with_rate(bare)

    def _with_rate(self, bare: HostTransfer) -> HostTransfer:
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        rate = bare.rate
        if last_s > first_s:
            rate = min(int((last - first) / max(last_s - first_s, SPAN_S_MIN)), BYTES_MAX)
        left = max(0, bare.total - bare.done)
        left_s = None if not rate else min(left / rate, LEFT_S_MAX)
        return replace(bare, done=min(bare.done, bare.total), rate=rate, left_s=left_s)


def _bare(heartbeat: Heartbeat) -> HostTransfer | None:
    """Return the transfer under way, as far as one heartbeat shows it."""
    if heartbeat.exit is not None:
        return None
    data = heartbeat.data
    if data is not None and heartbeat.phase in _BEFORE_RESTORE and data.bytes_done < data.bytes_total:
        return HostTransfer(
            kind=TransferKind.RESTORE,
            name=data.name,
            done=data.bytes_done,
            total=data.bytes_total,
            rate=None,
            left_s=None,
        )
    at = heartbeat.restore
    # The code is fetched and set-up runs while a restore is under way.
    early = heartbeat.phase in _BEFORE_RESTORE and at is not None and at.bytes_done < at.bytes_total
    if at is not None and (early or heartbeat.phase is Phase.RESTORE):
        return HostTransfer(
            kind=TransferKind.RESTORE, name=at.name, done=at.bytes_done, total=at.bytes_total, rate=None, left_s=None
        )
    up = heartbeat.upload
    if up.name is None:
        return None
    return HostTransfer(
        kind=TransferKind.UPLOAD,
        name=up.name,
        done=up.bytes_done,
        total=up.bytes_total,
        rate=up.bytes_per_s or None,
        left_s=None,
        queued=up.queued,
        failing=up.failing or "",
    )
