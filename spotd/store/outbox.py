"""The queues of the notification channels: what waits, and what was sent lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, desc, func, insert, or_, select, update

from spotd.core.notifications import Notification, Queued, Severity
from spotd.store import tables
from spotd.store.tables import NOTIFICATIONS, chunks, kept
from spotd.store.values import QUEUED, instant_out

SENT_MAX: Final = 2_000
"""So many that were sent are remembered, for their keys."""
KEPT_SHARE: Final = 10
"""One part in so many of a queue is kept for each severity that could be displaced."""
_T: Final = NOTIFICATIONS.c


class _WaitingIds:
    """What waits in one channel's queue, by severity, oldest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[Severity, deque[int]] = {severity: deque() for severity in Severity}

    def hold(self, ident: int, severity: Severity) -> None:
        """Count one that waits."""
        self._ids[severity].append(ident)

    def take(self, ident: int, severity: Severity) -> int | None:
        """Let one more wait; return the one for which there is no room: another, the new one, or `None`."""
        if sum(map(len, self._ids.values())) < self._most:
            self.hold(ident, severity)
            return None
        for lower in Severity:
            if lower.rank >= severity.rank:
                return ident
            if len(self._ids[lower]) > self._most // KEPT_SHARE:
                self.hold(ident, severity)
                return self._ids[lower].popleft()
        return ident


class Outbox:
    """The queues, within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def queued(self, channels: Collection[str]) -> tuple[Queued, ...]:
        """Return what waits and what was sent, in order; a row that cannot be understood is left out."""
        query = select(NOTIFICATIONS).where(_T.channel.in_(channels)).order_by(_T.id)
        return tuple(kept(QUEUED.read, tables.fetch(self._connection, query)))

    def add(self, found: Iterable[tuple[str, Notification]], *, waiting_max: int) -> dict[str, int]:
        """Queue these by channel; return how many each had no room for.

        In a full queue a notification takes the place of the oldest one of the lowest severity below its own, so that a
        thousand preemptions hold back no budget that is spent. A tenth of the queue is kept for each lower severity
        that fills it: what is urgent may come in thousands, too.
        """
        number = int(self._connection.execute(select(func.max(_T.id))).scalar() or 0)
        queues: dict[str, _WaitingIds] = {}
        values: dict[int, dict[str, Any]] = {}
        displaced: list[int] = []
        left_out: dict[str, int] = {}
        for channel, one in found:
            queue = queues.get(channel)
            if queue is None:
                queue = queues[channel] = self._waiting(channel, waiting_max)
            number += 1
            gone = queue.take(number, one.severity)
            if gone is not None:
                left_out[channel] = left_out.get(channel, 0) + 1
                if gone == number:
                    continue
                if values.pop(gone, None) is None:
                    displaced.append(gone)
            values[number] = QUEUED.out(Queued(id=number, channel=channel, notification=one))
        self.remove(displaced)
        if values:
            self._connection.execute(insert(NOTIFICATIONS), list(values.values()))
        return left_out

    def _waiting(self, channel: str, waiting_max: int) -> _WaitingIds:
        waits = (_T.channel == channel) & _T.sent_at.is_(None)
        query = select(_T.id, _T.severity).where(waits).order_by(_T.id)
        queue = _WaitingIds(waiting_max)
        for ident, severity in self._connection.execute(query):
            queue.hold(int(ident), _severity(severity))
        return queue

    def mark_sent(self, ids: Iterable[int], at: datetime) -> None:
        """Note that these were sent."""
        for some in chunks(ids):
            self._connection.execute(update(NOTIFICATIONS).where(_T.id.in_(some)).values(sent_at=instant_out(at)))

    def remove(self, ids: Iterable[int]) -> None:
        """Delete these."""
        for some in chunks(ids):
            self._connection.execute(delete(NOTIFICATIONS).where(_T.id.in_(some)))

    def forget_sent(self, now: datetime) -> None:
        """Delete what was sent and of whose key another may be sent again, and what is more than is remembered."""
        over = _T.sent_at + _T.repeat_after < instant_out(now)
        newest = select(_T.id).where(_T.sent_at.is_not(None)).order_by(desc(_T.sent_at), desc(_T.id)).limit(SENT_MAX)
        excess = and_(_T.sent_at.is_not(None), _T.id.not_in(newest))
        self._connection.execute(delete(NOTIFICATIONS).where(or_(over, excess)))

    def forget_other_channels(self, channels: Collection[str]) -> None:
        """Delete the queues of channels that the config has no more."""
        self._connection.execute(delete(NOTIFICATIONS).where(_T.channel.not_in(channels)))


def _severity(text: str) -> Severity:
    """Return the stored severity; that of a row which cannot be understood is the lowest."""
    try:
        return Severity(text)
    except ValueError:
        return Severity.INFO
