"""Polled prices pass from the daemon that leads to the one that leads after it, through the store that both have.

Theory. The leader writes what it polled on a day as one object, again each hour until the day is over. A daemon that
begins to lead reads the objects of others once, from the last day that it has read. What is lost in between costs
figures of `history` and nothing else: no decision rests on the prices of another. Objects go with the prices that they
hold, after ninety days. No host may write below the prefix.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from spotd.daemon.commits import Threads
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.market.price_recorder import PriceRecorder
from spotd.daemon.object_keys import shared_prices_prefix
from spotd.history import History, HistoryUnavailable
from spotd.history.file import DAY_S, Retained
from spotd.history.sharing import BadDocument, decode, encode
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge, StoreError
from spotd_providers.contract.provider import Clock, Logger

EVERY: Final = timedelta(hours=1)
KEPT: Final = Retained().everything
OBJECT_BYTES_MAX: Final = 16_000_000
LISTED_MAX: Final = 5_000
"""A day has one object for each computer that led on it."""


class SharedPrices:
    """`reconcile_once` reads what others wrote, the first time, and writes what was polled here."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        recorder: PriceRecorder,
        install: str,
        writer: str,
        clock: Clock,
        log: Logger,
        inline: bool = False,
    ) -> None:
        """Make it. `writer` names this computer's folder of the state; it is the same after a restart."""
        self._objects = objects
        self._recorder = recorder
        self._prefix = shared_prices_prefix(install)
        self._writer = writer
        self._clock = clock
        self._log = log
        self._threads = Threads(inline=inline)
        self._is_read = False
        self._written = 0
        """The last day of which everything that was polled here is in the store."""
        self.controller = Controller(
            "shared-prices",
            self.reconcile_once,
            interval_s=clock.real_seconds(EVERY),
            expected=(StoreError, HistoryUnavailable),
            outage=Outage(log, "shared_prices.held", "shared_prices.back"),
        )

    async def reconcile_once(self) -> None:
        """Read the objects of others, if that was not done; write those of today and of days that were not written.

        Raises:
            StoreError: the object store cannot be used now.
            HistoryUnavailable: the file of prices cannot be used now.
        """
        now = int(self._clock.now().timestamp())
        if not self._is_read:
            await self._read(now)
            self._is_read = True
        today = now // DAY_S
        # The clock may have been set back since.
        for day in range(max(min(self._written, today - 1) + 1, today - 1), today + 1):
            await self._write(day, now)
            self._written = min(day, today - 1)

    async def _write(self, day: int, now: int) -> None:
        pages = await self._recorder.ask(lambda history: history.pages(day * DAY_S, min((day + 1) * DAY_S, now)))
        if pages:
            key = f"{self._prefix}{_date_of(day)}/{self._writer}.json.gz"
            data = await self._threads.run(partial(encode, pages))
            await self._threads.run(lambda: self._objects.put(key, data))

    async def _read(self, now: int) -> None:
        """Take over what others wrote since the last day that was read, oldest first."""
        found = await self._threads.run(self._list)
        # Our clock alone would delete everything when it is ahead: by the store's, too, the objects must be old.
        by_store = max((int(info.modified.timestamp()) for info in found), default=0)
        gone = _date_of(max(0, (min(now, by_store) - int(KEPT.total_seconds())) // DAY_S))
        known_day = min(await self._recorder.ask(History.shared_day), now // DAY_S - 1)
        for info in found:
            day, _, name = info.key.removeprefix(self._prefix).partition("/")
            if day < gone:
                await self._threads.run(partial(self._objects.delete, [info.key]))
            elif name.removesuffix(".json.gz") != self._writer and day >= _date_of(known_day):
                await self._take_over(info, now)
        await self._recorder.ask(lambda history: history.note_shared_day(now // DAY_S - 1))

    def _list(self) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        for info in self._objects.list(self._prefix):
            found.append(info)
            if len(found) >= LISTED_MAX:
                break
        return found

    async def _take_over(self, info: ObjectInfo, now: int) -> None:
        try:
            data = await self._threads.run(lambda: self._objects.get(info.key, bytes_max=OBJECT_BYTES_MAX))
            pages = await self._threads.run(partial(decode, data))
        except (ObjectMissing, ObjectTooLarge, BadDocument) as error:
            self._log.warning("shared_prices.unreadable", key=info.key, error=str(error))
            return
        for page in pages:
            await self._recorder.ask(lambda history, page=page: history.take_over(page, now=now))  # type: ignore[misc]  # mypy cannot type a lambda's defaults


def _date_of(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_S, UTC).date().isoformat()
