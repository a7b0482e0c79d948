"""Keeps the price history: takes every poll, writes it in a thread of its own, rolls the past up a little at a time.

Nobody waits for it. A poller hands over its newest answer and goes on; of answers that the file is too slow for, the
newest of each provider counts. A file or disk that fails costs prices, one line in the log, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from spotd.daemon.wake import WakeEvent
from spotd.history import History, HistoryUnavailable, PriceTerms, SeriesQuery, SeriesResult
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import OfferPage, ProviderName

T = TypeVar("T")

BUSY_PAUSE_S: Final = 2.0
"""Between two steps while the past is being rolled up: a step takes milliseconds."""
IDLE_PAUSE_S: Final = 300.0
CLOSE_S: Final = 2.0


class PriceRecorder:
    """`seen` from the pollers, `run` for the task group, `ask` for the API.

    Attributes:
        trouble: why prices are not being kept, empty while they are.
    """

    def __init__(
        self,
        history: History,
        *,
        clock: Clock,
        log: Logger,
        note: Callable[[str, str, datetime], None],
        inline: bool = False,
    ) -> None:
        self._history = history
        self._clock = clock
        self._log = log
        self._note = note
        self._inline = inline
        self._limiter: anyio.CapacityLimiter | None = None
        self._wake_event = WakeEvent()
        self._waiting: dict[ProviderName, tuple[OfferPage, datetime]] = {}
        self.last_error = ""

    def seen(self, provider: ProviderName, page: OfferPage, asked_at: datetime) -> None:
        """The answer will be written as soon as there is time for it."""
        self._waiting[provider] = (page, asked_at)
        self._wake_event.notify()

    async def run(self) -> None:
        """Prices are kept until this is cancelled."""
        try:
            more = False
            while True:
                await self._wake_event.wait(seconds=BUSY_PAUSE_S if more else IDLE_PAUSE_S)
                more = await self.round()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._call(self._history.close)

    async def round(self) -> bool:
        """What waits is written and one step of rolling up is done; whether more of that is due."""
        waiting, self._waiting = self._waiting, {}
        last_errors: list[str] = []
        for provider, (page, asked_at) in waiting.items():
            failed = len(last_errors)
            await self._try(partial(self._record, provider, page, int(asked_at.timestamp())), last_errors)
            if (
                len(last_errors) > failed
            ):  # tried again, unless a newer answer comes first: so trouble lasts until it is over
                self._waiting.setdefault(provider, (page, asked_at))
        # Also when nothing could be written: rolling up is what makes room.
        more = await self._try(partial(self._history.step, int(self._clock.now().timestamp())), last_errors)
        self._tell(last_errors[0] if last_errors else "")
        return bool(more)

    def _record(self, provider: ProviderName, page: OfferPage, at: int) -> int:
        return self._history.record(provider, page.offers, complete=page.complete, at=at, whole=page.whole)

    async def _try(self, work: Callable[[], int], last_errors: list[str]) -> int:
        """What the work returned, or 0 and one trouble more."""
        try:
            return await self._call(work)
        except HistoryUnavailable as exc:
            last_errors.append(str(exc))
        except Exception as exc:  # noqa: BLE001 - the outermost loop: whatever it is, prices must not end the daemon
            if not self.last_error:
                self._log.error("history.failed", exc_info=exc)
            last_errors.append(f"prices are not kept because of an error of spotd's own ({type(exc).__name__})")
        return 0

    async def ask(self, question: SeriesQuery, terms: PriceTerms) -> SeriesResult:
        """Raises: HistoryUnavailable, TooManyBuckets."""
        return await self._call(lambda: self._history.ask(question, terms))

    async def gpus(self) -> set[str]:
        """Every GPU of which there is a price.

        Raises:
            HistoryUnavailable
        """
        return await self._call(self._history.gpus)

    async def bytes_used(self) -> int:
        """Raises: HistoryUnavailable."""
        return await self._call(self._history.bytes_used)

    @property
    def bytes_max(self) -> int:
        return self._history.retained.bytes_max

    async def _call(self, work: Callable[[], T]) -> T:
        """In one thread of its own. A cancelled caller leaves it behind: a transaction is whole or not there."""
        try:
            if self._inline:
                return work()
            if self._limiter is None:
                self._limiter = anyio.CapacityLimiter(1)
            return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        finally:
            for sentence in self._history.set_aside:
                self._log.warning("history.set_aside", reason=sentence)
                self._note("history.set_aside", sentence, self._clock.now())
            self._history.set_aside.clear()

    def _tell(self, last_error: str) -> None:
        """One line when it begins to fail, one when it works again."""
        if last_error and not self.last_error:
            self._log.warning("history.held", error=last_error)
        elif self.last_error and not last_error:
            self._log.info("history.back")
        self.last_error = last_error
