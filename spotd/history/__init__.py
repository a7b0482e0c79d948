"""Every price that was polled, for ninety days: a file of its own, beside the state, that may be lost without harm.

Prices that were imported lie in another one beside it, and are read together with it where prices are asked for.

`History` opens it, writes polls, keeps it small and is asked: synchronous, for one thread at a time. Nothing here is
worth a machine or a decision. So a file that is damaged, of another version or dated in the future is set aside and a
new one begun, but for one that is ahead of the clock only after a day of it, since the clock may be what is wrong; a
disk that is nearly full is left to the state, and every error is one sentence.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from spotd.history.file import (
    DAY_S,
    DISK_GB,
    PAGE_BYTES,
    Bucket,
    FileOfTheFuture,
    FileUnusable,
    PriceGroup,
    PriceTerms,
    Retained,
    SeriesQuery,
    SeriesResult,
    changes_from,
    is_damage,
    open_file,
    pages_used,
    set_aside,
)
from spotd.history.importing import IMPORTED, forget_before, pages_of, write_page
from spotd.history.reading import (
    Gathered,
    Sold,
    TooManyBuckets,
    answer,
    fit,
    gather,
    gather_imports,
    kinds_sold,
    last_offers,
)
from spotd.history.recording import Recorder, Roller
from spotd_providers.contract.provider import PriceHistoryPage
from spotd_providers.contract.values import Offer, ProviderName

__all__ = [
    "DISK_GB",
    "HISTORY_FILE",
    "IMPORTED_FILE",
    "Bucket",
    "History",
    "HistoryUnavailable",
    "PriceGroup",
    "PriceTerms",
    "Retained",
    "SeriesQuery",
    "SeriesResult",
    "TooManyBuckets",
]

T = TypeVar("T")

_FULL: Final = 0.96
"""Share of the size limit from which on changes wait: rolling up needs a little room of its own."""
HISTORY_FILE: Final = "prices.sqlite"
IMPORTED_FILE: Final = "prices-imported.sqlite"
"""Beside it: prices that were not polled here."""
_SHARED_DAY: Final = "shared_day"


class HistoryUnavailable(Exception):
    """It cannot be used now, and nothing of the call was done. The message is a sentence for the user."""


class History:
    """The file is opened when it is first needed, so that no start waits for it.

    Attributes:
        set_aside: why and under which name a file was set aside, newest last; the reader of the list empties it.
        import_error: why what was imported could not be read for the newest answer; empty if it could.
    """

    def __init__(
        self,
        path: Path,
        retained: Retained | None = None,
        *,
        free_bytes: Callable[[Path], int] | None = None,
        imports: Path | None = None,
    ) -> None:
        self.path = path
        self.retained = retained or Retained()
        self._free_bytes = free_bytes or _free_bytes
        self._connection: sqlite3.Connection | None = None
        self._recorder: Recorder | None = None
        self._roller: Roller | None = None
        self.set_aside: list[str] = []
        self.import_error = ""
        self._imports: History | None = None
        if imports is not None:
            self._imports = History(imports, IMPORTED, free_bytes=free_bytes)
            self._imports.set_aside = self.set_aside
        self._forgotten_on = 0

    def record(
        self,
        provider: ProviderName,
        offers: Iterable[Offer],
        *,
        complete: bool,
        at: int,
        whole: frozenset[tuple[str, int]] = frozenset(),
    ) -> int:
        """Record one poll; return how many changes it brought. The next poll makes up for one that fails.

        Raises:
            HistoryUnavailable: nothing was written.
        """
        self._require_disk()

        def work() -> int:
            connection, recorder, _ = self._open()
            if self._is_full(connection):
                raise HistoryUnavailable(f"{self.path} has reached its limit of size until more of it is rolled up")
            return recorder.record(provider, offers, complete=complete, at=at, whole=whole)

        return self._guard(work)

    def take_over(self, page: PriceHistoryPage, *, now: int) -> int:
        """Write prices that were not polled here into their own file; return how many that took.

        Raises:
            HistoryUnavailable: nothing was written.
        """
        if self._imports is None:
            raise HistoryUnavailable("this history has no file for imported prices")
        return self._imports._take_over(page, now)  # noqa: SLF001 - an object of this class

    def _take_over(self, page: PriceHistoryPage, now: int) -> int:
        self._require_disk()

        def work() -> int:
            connection = self._open()[0]
            if self._forgotten_on != now // DAY_S:
                forget_before(connection, now - int(self.retained.everything.total_seconds()))
                self._forgotten_on = now // DAY_S
            if self._is_full(connection):
                size = f"{self.retained.bytes_max // 1_000_000} MB"
                raise HistoryUnavailable(f"{self.path} has reached its limit of {size}; import fewer prices")
            return write_page(connection, page, now=now)

        return self._guard(work)

    def pages(self, since: int, until: int) -> list[PriceHistoryPage]:
        """Return what was polled here in this span, for another daemon.

        Raises:
            HistoryUnavailable
        """
        return self._guard(lambda: [*pages_of(self._open()[0], since, until)])

    def shared_day(self) -> int:
        """Return the day, counted from 1970, up to which the prices of other daemons were read; 0 for none.

        Raises:
            HistoryUnavailable
        """
        return 0 if self._imports is None else self._imports._kept_day()  # noqa: SLF001 - an object of this class

    def _kept_day(self) -> int:
        def work() -> int:
            row = self._open()[0].execute("SELECT value FROM kept WHERE name = ?", (_SHARED_DAY,)).fetchone()
            return 0 if row is None else int(row[0])

        return self._guard(work)

    def note_shared_day(self, day: int) -> None:
        """Note up to which day the prices of other daemons were read.

        Raises:
            HistoryUnavailable
        """
        if self._imports is not None:
            self._imports._keep_day(day)  # noqa: SLF001 - an object of this class

    def _keep_day(self, day: int) -> None:
        self._require_disk()
        self._guard(
            lambda: self._open()[0].execute("REPLACE INTO kept (name, value) VALUES (?, ?)", (_SHARED_DAY, day))
        )

    def _require_disk(self) -> None:
        free = self._free_bytes(self.path.parent)
        if free < self.retained.disk_reserve:
            left = f"only {free // 1_000_000} MB are free on the disk of {self.path}, which are left to the state"
            raise HistoryUnavailable(left)

    def _is_full(self, connection: sqlite3.Connection) -> bool:
        return pages_used(connection) * PAGE_BYTES > _FULL * self.retained.bytes_max

    def step(self, now: int) -> bool:
        """Roll up or delete a little of what is due; return whether more is due.

        Raises:
            HistoryUnavailable: nothing was written.
        """
        return self._guard(lambda: self._open()[2].step(now))

    def ask(self, question: SeriesQuery, terms: PriceTerms) -> SeriesResult:
        """Answer the question, with what was imported where nothing was polled.

        Raises:
            HistoryUnavailable: the file cannot be used now.
            TooManyBuckets: the buckets are too short for the range.
        """

        def own_prices() -> tuple[SeriesQuery, Gathered]:
            connection = self._open()[0]
            asked, coarse = fit(question, changes_from(connection))
            return asked, gather(connection, asked, coarse=coarse)

        asked, own = self._guard(own_prices)
        # Apart from the above: an import that is damaged is no reason to set the polled prices aside.
        imported = self._of_imports(lambda connection: gather_imports(connection, asked, own.watches))
        return answer(asked, terms, [own] if imported is None else [own, imported])

    def gpus(self) -> set[str]:
        """Return every GPU of which there is a price, polled or imported.

        Raises:
            HistoryUnavailable
        """
        own = self._guard(lambda: kinds_sold(self._open()[0]))
        return own | (self._of_imports(kinds_sold) or set())

    def _of_imports(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return what the imported prices answer, `None` where there are none or they cannot be used."""
        imports = self._imports
        self.import_error = ""
        if imports is None or not imports.path.exists():
            return None
        try:
            return imports._guard(lambda: work(imports._open()[0]))  # noqa: SLF001 - an object of this class
        except HistoryUnavailable as exc:
            self.import_error = str(exc)
            return None

    def last_offers(self, providers: Sequence[ProviderName]) -> dict[ProviderName, dict[Sold, int]]:
        """Return when each of these providers last offered each kind of machine, in seconds; polled here, not imported.

        Raises:
            HistoryUnavailable
        """
        return self._guard(lambda: last_offers(self._open()[0], providers))

    def bytes_used(self) -> int:
        """Return the size of the file.

        Raises:
            HistoryUnavailable: the file cannot be used now.
        """
        return self._guard(lambda: pages_used(self._open()[0]) * PAGE_BYTES)

    def close(self) -> None:
        """Close the file; another call opens it again."""
        if self._imports is not None:
            self._imports.close()
        connection, self._connection = self._connection, None
        self._recorder = self._roller = None
        if connection is not None:
            connection.close()

    def _open(self) -> tuple[sqlite3.Connection, Recorder, Roller]:
        if self._connection is None or self._recorder is None or self._roller is None:
            self._connection = open_file(self.path, bytes_max=self.retained.bytes_max)
            self._recorder = Recorder(self._connection)
            self._roller = Roller(self._connection, self.retained)
        return self._connection, self._recorder, self._roller

    def _guard(self, work: Callable[[], T]) -> T:
        """Return the work's result, if need be over a new file."""
        try:
            return self._try(work)
        except FileUnusable as exc:
            self._begin_anew(str(exc))
        try:
            return self._try(work)
        except FileUnusable as exc:
            raise HistoryUnavailable(f"{self.path} cannot be used: {exc}") from exc

    def _try(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except sqlite3.DatabaseError as exc:
            name = getattr(exc, "sqlite_errorname", "") or type(exc).__name__
            if is_damage(exc):
                raise FileUnusable(f"it is damaged ({name})") from exc
            if isinstance(exc, sqlite3.ProgrammingError):
                raise
            self.close()
            raise HistoryUnavailable(f"{self.path} cannot be used now ({name}): {exc}") from exc
        except FileOfTheFuture as exc:
            raise HistoryUnavailable(f"{self.path} is not written: {exc}") from exc
        except OSError as exc:
            raise HistoryUnavailable(f"{self.path} cannot be opened: {exc.strerror}") from exc

    def _begin_anew(self, why: str) -> None:
        self.close()
        try:
            aside = set_aside(self.path)
        except OSError as exc:
            raise HistoryUnavailable(f"{self.path}: {why}, and it cannot be set aside: {exc.strerror}") from exc
        self.set_aside.append(f"the price history was begun anew, because {why}; the old file is {aside}")


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
