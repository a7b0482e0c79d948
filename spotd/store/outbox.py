"""The queues of the notification channels: what waits, and what was sent lately."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, and_, delete, desc, func, insert, or_, select, update

from spotd.core.notifications.values import Notification, Queued
from spotd.store import rows
from spotd.store.columns import instant_out
from spotd.store.conditions import chunks
from spotd.store.mapping import RowMap
from spotd.store.readable import kept
from spotd.store.tables import NOTIFICATIONS

SENT_MAX: Final = 2_000
"""So many that were sent are remembered, for their keys."""
_PREFIX: Final = "notification."
_QUEUED: Final = RowMap(
    Queued,
    names={f"{_PREFIX}{name}": name for name in Notification.__dataclass_fields__} | {f"{_PREFIX}job": "job_id"},
    words=(f"{_PREFIX}title", f"{_PREFIX}text", f"{_PREFIX}key"),
)
_T: Final = NOTIFICATIONS.c


class Outbox:
    """The queues, within one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def queued(self, channels: Collection[str]) -> tuple[Queued, ...]:
        """Return what waits and what was sent, in order; a row that cannot be understood is left out."""
        query = select(NOTIFICATIONS).where(_T.channel.in_(channels)).order_by(_T.id)
        return tuple(kept(_QUEUED.read, rows.fetch(self._connection, query)))

    def add(self, found: Iterable[tuple[str, Notification]], *, waiting_max: int) -> dict[str, int]:
        """Queue these by channel; return how many each had no room for."""
        query = select(_T.channel, func.count()).where(_T.sent_at.is_(None)).group_by(_T.channel)
        waiting: dict[str, int] = dict(self._connection.execute(query).all())
        number = int(self._connection.execute(select(func.max(_T.id))).scalar() or 0)
        left_out: dict[str, int] = {}
        values = []
        for channel, one in found:
            waiting[channel] = waiting.get(channel, 0) + 1
            if waiting[channel] > waiting_max:
                left_out[channel] = left_out.get(channel, 0) + 1
                continue
            number += 1
            values.append(_QUEUED.out(Queued(id=number, channel=channel, notification=one)))
        if values:
            self._connection.execute(insert(NOTIFICATIONS), values)
        return left_out

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
