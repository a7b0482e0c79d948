"""What a host is moving now, how fast, and how long it will take, by its heartbeats alone.

A heartbeat states how far the upload or the restore has come. The rate is what lies between the oldest and the newest
of the last few, by the host's own running time, so that chunks which the store had already count as the progress they
are. All of it is what an untrusted host states, and only ever shown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from spotd_jobs.wire.fields import BYTES_MAX
from spotd_jobs.wire.reports import Heartbeat, Phase

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
