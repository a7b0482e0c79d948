"""Recording of what changed since the last poll, and of the poll itself.

What is compared with is what was last *committed*, so a poll that could not be written is made good by the next one.
Only offers that are on sale are remembered; one that comes back is found again in the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from spotd.history import file
from spotd.history.file import (
    DAY_S,
    DISK_GB,
    PAGE_BYTES,
    SLOT_S,
    STORAGE,
    FileOfTheFuture,
    FileUnusable,
    Retained,
    pages_used,
    transaction,
    watched_spans,
)
from spotd_providers.contract.values import Offer, ProviderName

BEHIND_MAX_S: Final = DAY_S
"""A clock that has been behind the file for so long is taken to be right."""
QUIET_MAX_S: Final = 3_600
"""A price is taken to have held between two polls that are no further apart than this."""

_Key = tuple[str, str, int]
"""Offer, GPU, count: the id of an offer is its provider's own, and may come to mean another GPU."""


@dataclass(slots=True)
class _Live:
    """An offer on sale, as it was last committed."""

    series: int
    price: int
    storage: int


class Recorder:
    """Knows the newest price of every offer on sale."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._live: dict[ProviderName, dict[_Key, _Live]] = {}
        self._behind_since: int | None = None
        """The first poll that was days before the newest one in the file."""

    def record(
        self,
        provider: ProviderName,
        offers: Iterable[Offer],
        *,
        complete: bool,
        at: int,
        whole: frozenset[tuple[str, int]] = frozenset(),
    ) -> int:
        """Record one poll; return how many points that took. Absence from an incomplete one proves nothing.

        Where `whole` names GPUs and counts (0 for any), absence proves something of these only.

        Raises:
            sqlite3.Error: nothing of it was written.
            FileOfTheFuture: the file's newest poll is days after this one, so the clock was wrong then or is now.
            FileUnusable: the same, for so long that it was wrong then.
        """
        self._require_past(provider, at)
        live = self._live.get(provider)
        if live is None:
            live = _on_sale(self._connection, provider)
        with transaction(self._connection):
            at = _extend_watch(self._connection, provider, at)
            present = {_key(offer): offer for offer in offers}
            changed, fresh = _compare(live, present)
            gone = [key for key in live if key not in present and _is_proof(key, whole, complete=complete)]
            news = _enrol(self._connection, provider, fresh)
            points: list[tuple[int, int | None]] = [
                *((item.series, offer.gpu_price) for item, offer in changed if item.price != offer.gpu_price),
                *((item.series, item.price) for item in news.values()),
                *((live[key].series, None) for key in gone),
            ]
            self._connection.executemany(
                "INSERT INTO points (series, at, price) VALUES (?1, ?3, ?2) "
                "ON CONFLICT DO UPDATE SET price = excluded.price",
                [(series, price, at) for series, price in sorted(points, key=lambda point: point[0])],
            )
            self._connection.executemany(
                "UPDATE series SET storage = ?2 WHERE id = ?1",
                [(item.series, offer.storage_price) for item, offer in changed if item.storage != offer.storage_price],
            )
        for item, offer in changed:
            item.price, item.storage = offer.gpu_price, offer.storage_price
        for key in gone:
            del live[key]
        live.update(news)
        self._live[provider] = live
        return len(points)

    def _require_past(self, provider: ProviderName, at: int) -> None:
        row = self._connection.execute("SELECT max(until) FROM watched WHERE provider = ?", (provider,)).fetchone()
        if row[0] is None or row[0] <= at + 2 * DAY_S:
            self._behind_since = None
            return
        if self._behind_since is None or at < self._behind_since:
            self._behind_since = at
        if at - self._behind_since >= BEHIND_MAX_S:
            raise FileUnusable("its newest prices are of the future: the clock was wrong then")
        raise FileOfTheFuture("its newest prices are of the future: the clock was wrong then, or is now")


def _is_proof(key: _Key, whole: frozenset[tuple[str, int]], *, complete: bool) -> bool:
    """Whether absence means that this is not on sale."""
    _, gpu, count = key
    return (gpu, count) in whole or (gpu, 0) in whole if whole else complete


def _key(offer: Offer) -> _Key:
    return offer.offer_id, offer.gpu, offer.gpu_count


def _compare(
    live: dict[_Key, _Live], present: dict[_Key, Offer]
) -> tuple[list[tuple[_Live, Offer]], dict[_Key, Offer]]:
    """Return the prices that rose or fell, and what has come on sale."""
    changed: list[tuple[_Live, Offer]] = []
    fresh: dict[_Key, Offer] = {}
    for key, offer in present.items():
        item = live.get(key)
        if item is None:
            fresh[key] = offer
        elif item.price != offer.gpu_price or item.storage != offer.storage_price:
            changed.append((item, offer))
    return changed, fresh


def _on_sale(connection: sqlite3.Connection, provider: ProviderName) -> dict[_Key, _Live]:
    """Return what was on sale at the last poll, as the file has it."""
    rows = connection.execute(
        "SELECT s.offer, k.gpu, k.gpu_count, s.id, s.storage,"
        " (SELECT price FROM points WHERE series = s.id ORDER BY at DESC LIMIT 1)"
        " FROM kinds k CROSS JOIN series s ON s.kind = k.id WHERE k.provider = ?",
        (provider,),
    )
    return {
        (offer, gpu, count): _Live(series, price, storage)
        for offer, gpu, count, series, storage, price in rows
        if price is not None
    }


def _enrol(connection: sqlite3.Connection, provider: ProviderName, fresh: dict[_Key, Offer]) -> dict[_Key, _Live]:
    """Return the series of every offer that came on sale, an old one if it was on sale before."""
    if not fresh:
        return {}
    kinds: dict[tuple[str, int, str], int] = {
        (gpu, count, market): number
        for number, gpu, count, market in connection.execute(
            "SELECT id, gpu, gpu_count, market FROM kinds WHERE provider = ?", (provider,)
        )
    }
    rows: list[tuple[int, str, str, int]] = []
    for offer in fresh.values():
        kind = (offer.gpu, offer.gpu_count, offer.market.value)
        if kind not in kinds:
            found = connection.execute(
                "INSERT INTO kinds (provider, gpu, gpu_count, market) VALUES (?, ?, ?, ?) RETURNING id",
                (provider, *kind),
            )
            kinds[kind] = found.fetchone()[0]
        rows.append((kinds[kind], offer.offer_id, offer.pool, offer.storage_price))
    connection.executemany(
        "INSERT INTO series (kind, offer, pool, storage) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET pool = excluded.pool, storage = excluded.storage",
        rows,
    )
    news: dict[_Key, _Live] = {}
    for (key, offer), (kind_id, name, _, _) in zip(fresh.items(), rows, strict=True):
        found = connection.execute("SELECT id FROM series WHERE kind = ? AND offer = ?", (kind_id, name))
        news[key] = _Live(found.fetchone()[0], offer.gpu_price, offer.storage_price)
    return news


def _extend_watch(connection: sqlite3.Connection, provider: ProviderName, at: int) -> int:
    """Extend the watch to this poll. Return its instant, which is never before that of the last one."""
    row = connection.execute(
        "SELECT since, until FROM watched WHERE provider = ? ORDER BY since DESC LIMIT 1", (provider,)
    ).fetchone()
    if row is not None:
        since, until = row
        at = max(at, until - 1)
        if at - until <= QUIET_MAX_S:
            connection.execute(
                "UPDATE watched SET until = ? WHERE provider = ? AND since = ?", (at + 1, provider, since)
            )
            return at
    connection.execute("INSERT INTO watched (provider, since, until) VALUES (?, ?, ?)", (provider, at, at + 1))
    return at


# Rolls the past up and lets the oldest go, a bounded step at a time.
#
# Theory. Time is divided into slots. When one is over, a pass goes once through all series: each gets a row for the
# slot in which it was on offer. Then each kind (one GPU, count, market and provider) gets a row with the distribution
# of the prices of all its series, so that a question about months of a market reads a few thousand rows. Changes are
# kept for a week beside the slots; of older ones only the price that held at the border is left, as a change at the
# border.
#
# What was rolled up is seen in the rows themselves: a series or kind is rolled up to the end of its newest slot, and in
# what follows it was either not on offer or is not rolled up yet. Each step is a transaction that needs to know nothing
# of the others, and a crash loses the place in the pass, nothing else.
#
# Size comes before age: while more than the soft share of the limit is used, every finished pass shortens the week of
# changes, down to one slot, and then the past as a whole; when there is room again, both grow back.


SERIES_PER_STEP: Final = 250
POINTS_PER_STEP: Final = 4_000
_SHRINK: Final = 0.7
_GROW: Final = 1.2
_LEAST_CHANGES_S: Final = SLOT_S
_LEAST_ALL_S: Final = 2 * DAY_S
SOFT, RELAXED = 0.85, 0.6
"""Shares of the size limit above which less is kept, and below which the full ages come back."""


@dataclass(slots=True)
class _Pass:
    """One walk through all series, then all kinds: up to which borders, and how far it is."""

    border: int
    changes_from: int
    oldest_slot: int
    series: int = 0
    kind: int | None = None


class Roller:
    """Bounded steps of rolling up; `step` is called until nothing is due."""

    def __init__(self, connection: sqlite3.Connection, retained: Retained) -> None:
        self._connection = connection
        self._retained = retained
        self._pages_max = retained.bytes_max // PAGE_BYTES
        self.changes_s = retained.changes.total_seconds()
        """Age until which every change is kept now."""
        self.everything_s = retained.everything.total_seconds()
        self._pass: _Pass | None = None
        self._done_for: tuple[int, int, int] | None = None

    def step(self, now: int) -> bool:
        """Whether more is due after this one.

        Raises:
            sqlite3.Error: nothing of this step was written.
        """
        if self._pass is None:
            borders = (
                now // SLOT_S * SLOT_S,
                int(now - self.changes_s) // SLOT_S * SLOT_S,
                int(now - self.everything_s) // SLOT_S,
            )
            if self._done_for == borders:
                return False
            self._pass = _Pass(*borders)
        current = self._pass
        with transaction(self._connection):
            if current.kind is None:
                series, finished = self._walk(current)
                kind = 0 if finished else None
            else:
                series, kind = current.series, self._roll_kind(current)
                finished = kind is None
            if finished and kind is None:
                self._clear(current)
        current.series, current.kind = series, kind
        if finished and kind is None:
            self._pass = None
            self._done_for = (current.border, current.changes_from, current.oldest_slot)
            self._adjust()
        return True

    def _walk(self, current: _Pass) -> tuple[int, bool]:
        """Roll up a few series; return the last of them, and whether it was the last of all."""
        if not current.series:
            self._connection.execute("INSERT OR REPLACE INTO kept VALUES ('changes_from', ?)", (current.changes_from,))
        watches = watched_spans(self._connection)
        rows = self._connection.execute(
            "SELECT s.id, k.provider FROM series s JOIN kinds k ON k.id = s.kind WHERE s.id > ? ORDER BY s.id LIMIT ?",
            (current.series, SERIES_PER_STEP),
        ).fetchall()
        after, room = current.series, POINTS_PER_STEP
        for series, provider in rows:
            taken, all_taken = self._roll(series, watches.get(provider, []), current, room)
            room -= taken
            if not all_taken:
                return after, False
            self._prune(series, current)
            after = series
            if room <= 0:
                return after, False
        return after, len(rows) < SERIES_PER_STEP

    def _roll(self, series: int, watches: list[file.Watch], current: _Pass, room: int) -> tuple[int, bool]:
        """Store the slots of one series up to the border; return how many changes that took, and whether it was all."""
        newest = self._connection.execute("SELECT max(slot) FROM slots WHERE series = ?", (series,)).fetchone()[0]
        since = 0 if newest is None else (newest + 1) * SLOT_S
        border, most = current.border, room
        points = self._points(series, since, border, most + 1)
        complete = len(points) <= room
        if not complete:
            border = points[-1][0] // SLOT_S * SLOT_S
            if points[0][0] >= border:
                # More changes in one slot than a step takes: they are taken alone, whatever their number.
                border += SLOT_S
                points = self._points(series, since, border, -1)
        known = file.spells(points, watches, since=since, until=border)
        self._connection.executemany(
            "INSERT OR REPLACE INTO slots (series, slot, typical, low_by, high_by, offered_s)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            [
                (series, s.number, s.typical, s.typical - s.low, s.high - s.typical, s.offered_s)
                for s in file.slots(known, SLOT_S)
            ],
        )
        return len(points), complete

    def _points(self, series: int, since: int, border: int, most: int) -> list[file.Point]:
        """Return the changes, from the one that held at the beginning."""
        return self._connection.execute(
            "SELECT at, price FROM points WHERE series = ?1 AND at < ?3 AND at >="
            " coalesce((SELECT max(at) FROM points WHERE series = ?1 AND at <= ?2), 0) ORDER BY at LIMIT ?4",
            (series, since, border, most),
        ).fetchall()

    def _prune(self, series: int, current: _Pass) -> None:
        """Delete what is too old of one series, and the series too if nothing is left of it."""
        held = self._connection.execute(
            "SELECT price FROM points WHERE series = ? AND at < ? ORDER BY at DESC LIMIT 1",
            (series, current.changes_from),
        ).fetchone()
        if held is not None:
            self._connection.execute("DELETE FROM points WHERE series = ? AND at < ?", (series, current.changes_from))
            if held[0] is not None:
                row = (series, current.changes_from, held[0])
                self._connection.execute("INSERT OR IGNORE INTO points VALUES (?, ?, ?)", row)
        self._connection.execute("DELETE FROM slots WHERE series = ? AND slot < ?", (series, current.oldest_slot))
        self._connection.execute(
            "DELETE FROM series WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM points WHERE series = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM slots WHERE series = ?1)",
            (series,),
        )

    def _roll_kind(self, current: _Pass) -> int | None:
        """Store the distributions of the next kind's new slots; return which it was, `None` after the last."""
        kind = self._connection.execute("SELECT min(id) FROM kinds WHERE id > ?", (current.kind,)).fetchone()[0]
        if kind is None:
            return None
        newest = self._connection.execute("SELECT max(slot) FROM markets WHERE kind = ?", (kind,)).fetchone()[0]
        rows = self._connection.execute(
            f"SELECT t.slot, t.typical + {STORAGE}, t.offered_s, t.low_by, t.high_by FROM series s"  # noqa: S608 - a constant
            " CROSS JOIN slots t ON t.series = s.id AND t.slot > :newest AND t.slot < :end WHERE s.kind = :kind",
            {
                "kind": kind,
                "newest": -1 if newest is None else newest,
                "end": current.border // SLOT_S,
                "disk": DISK_GB,
            },
        )
        by_slot: dict[int, list[tuple[int, int, int, int]]] = {}
        for slot, *rest in rows:
            by_slot.setdefault(slot, []).append(tuple(rest))
        self._connection.executemany(
            "INSERT OR REPLACE INTO markets (kind, slot, low, high, offered_s, prices) VALUES (?, ?, ?, ?, ?, ?)",
            [(kind, slot, *_market(found)) for slot, found in by_slot.items()],
        )
        self._connection.execute("DELETE FROM markets WHERE kind = ? AND slot < ?", (kind, current.oldest_slot))
        found: int = kind
        return found

    def _clear(self, current: _Pass) -> None:
        self._connection.execute("DELETE FROM watched WHERE until < ?", (current.oldest_slot * SLOT_S,))
        self._connection.execute("DELETE FROM kinds WHERE NOT EXISTS (SELECT 1 FROM series WHERE kind = kinds.id)")
        self._connection.execute("DELETE FROM markets WHERE NOT EXISTS (SELECT 1 FROM kinds WHERE id = markets.kind)")

    def _adjust(self) -> None:
        """Keep less if there is no room for it, more if there is again."""
        ages = (self._retained.changes.total_seconds(), self._retained.everything.total_seconds())
        if pages_used(self._connection) > SOFT * self._pages_max:
            if self.changes_s > _LEAST_CHANGES_S:
                self.changes_s = max(_LEAST_CHANGES_S, self.changes_s * _SHRINK)
            else:
                self.everything_s = max(_LEAST_ALL_S, self.everything_s * _SHRINK)
        elif pages_used(self._connection) < RELAXED * self._pages_max:
            self.everything_s = min(ages[1], self.everything_s * _GROW)
            if self.everything_s == ages[1]:
                self.changes_s = min(ages[0], self.changes_s * _GROW)


def _market(found: list[tuple[int, int, int, int]]) -> tuple[int, int, int, bytes]:
    """Return lowest, highest, seconds on offer and distribution of one kind in one slot."""
    seconds: dict[int, int] = {}
    for price, offered_s, _, _ in found:
        seconds[price] = seconds.get(price, 0) + offered_s
    return (
        min(price - low_by for price, _, low_by, _ in found),
        max(price + high_by for price, _, _, high_by in found),
        sum(seconds.values()),
        file.packed(file.quantiles(seconds, file.MIDDLES_PERMILLE, of=1000)),
    )
