"""The door through which time comes into the daemon.

Two clocks exist. The steady one is what decisions use: it is dated once, by the wall clock, and then counts the
computer's uptime, sleep included, so that no setting of the wall clock changes a span (`core.timeline` states how it
follows). The system's own is for what others compare with their clocks, above all the expiry of signed URLs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import anyio

from spotd.core.bills import BILLED_WITHIN
from spotd.core.domain.policy import Policy
from spotd.core.timeline import Anchor, Dated, dated, redated, wants_new_date
from spotd.store import Store, Tx
from spotd_providers.contract.provider import Logger


def _uptime_s() -> float:
    """Seconds that never go back and go on while the computer sleeps, where the kernel counts that."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _boot_id() -> str:
    """Return what distinguishes one uptime of the computer from the next; empty where nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _wall() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computer:
    """The clocks of the computer that the daemon runs on."""

    wall: Callable[[], datetime] = _wall
    uptime_s: Callable[[], float] = _uptime_s
    boot_id: Callable[[], str] = _boot_id
    compare_every_s: float = 10.0


class SystemClock:
    """Real time."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(max(0.0, duration.total_seconds()))

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()


class SteadyClock(SystemClock):
    """Real time that no setting of the wall clock moves."""

    def __init__(
        self, at: datetime, *, uptime_s: Callable[[], float] = _uptime_s, since_s: float | None = None
    ) -> None:
        """Make a clock that shows `at` when the computer had been up for `since_s`, which is now by default."""
        self._at = at
        self._uptime_s = uptime_s
        self._since_s = uptime_s() if since_s is None else since_s

    def now(self) -> datetime:
        return self._at + timedelta(seconds=self._uptime_s() - self._since_s)


# Dates the daemon's timeline at each of its starts, and notices when the computer's clock is set.
#
# Everything that a running daemon holds in memory is dated by one timeline. Where the wall clock is set, the daemon
# ends in an orderly way and begins anew in the same process: one transaction moves what is stored
# (`core.timeline.redated`), and nothing in memory keeps an old date.


ANCHOR: Final = "clock"
"""The fact in the state that holds the newest anchor."""
SET_ANEW_MIN: Final = timedelta(minutes=2)
"""Between two new dates: a clock that is set all the time must not keep the daemon from its work."""


class Timeline:
    """The timeline of one run of the daemon."""

    def __init__(self, anchor: Anchor, computer: Computer) -> None:
        self._anchor = anchor
        self._computer = computer
        self.clock = SteadyClock(anchor.at, uptime_s=computer.uptime_s, since_s=anchor.boot_s)

    def issued(self) -> datetime:
        """Return an instant that is later than every one that this or an earlier run has issued, whatever the date."""
        return self.clock.now() + self._anchor.issued_ahead

    async def set_anew(self) -> None:
        """Return when the wall clock was set, so that the timeline wants another date."""
        while True:
            await anyio.sleep(self._computer.compare_every_s)
            now = self.clock.now()
            if now - self._anchor.at >= SET_ANEW_MIN and wants_new_date(self._anchor, now, self._computer.wall()):
                return


def begin_timeline(store: Store, policy: Policy, computer: Computer, log: Logger) -> Timeline:
    """Continue the timeline of the state, or begin one, and move what is stored if it wants another date.

    Raises:
        StoreError: nothing was written.
    """

    def work(tx: Tx) -> Dated:
        known = read_anchor(tx.meta(ANCHOR))
        newest = tx.newest_events(limit=1)
        found = dated(
            known,
            newest[-1].event.at if newest else None,
            computer.boot_id(),
            computer.uptime_s(),
            computer.wall(),
        )
        if found.step:
            _move(tx, policy, found)
        tx.set_meta(ANCHOR, write_anchor(found.anchor))
        return found

    found = store.tx(work)
    if found.step:
        log.warning("clock.stepped", by_s=found.step.total_seconds(), now=found.anchor.at.isoformat())
    if found.anchor.unset_since is not None:
        behind = (found.anchor.at - computer.wall()).total_seconds()
        log.warning("clock.behind", behind_s=behind, dated_from=found.anchor.at.isoformat())
    return Timeline(found.anchor, computer)


def _move(tx: Tx, policy: Policy, found: Dated) -> None:
    now = found.anchor.at - found.step
    ended = tx.attempts_of_open_bills(since=now - BILLED_WITHIN)
    plan = redated(tx.world(policy, now), found.step, now, found.only_after, ended)
    tx.forget_cooldowns()
    tx.commit(plan)


def write_anchor(anchor: Anchor) -> str:
    return json.dumps(
        {
            "boot_id": anchor.boot_id,
            "boot_s": anchor.boot_s,
            "at": anchor.at.isoformat(),
            "unset_since": None if anchor.unset_since is None else anchor.unset_since.isoformat(),
            "issued_ahead_s": anchor.issued_ahead.total_seconds(),
        }
    )


def read_anchor(text: str | None) -> Anchor | None:
    """Return the anchor as it was written; `None` where none can be read, and the timeline begins again."""
    if text is None:
        return None
    try:
        data = json.loads(text)
        unset = data["unset_since"]
        anchor = Anchor(
            boot_id=str(data["boot_id"]),
            boot_s=float(data["boot_s"]),
            at=datetime.fromisoformat(data["at"]),
            unset_since=None if unset is None else datetime.fromisoformat(unset),
            issued_ahead=timedelta(seconds=float(data["issued_ahead_s"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if not math.isfinite(anchor.boot_s) or anchor.at.tzinfo is None:
        return None
    return anchor
