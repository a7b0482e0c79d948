"""Rolls the past up and lets the oldest go, a bounded step at a time.

Theory. Time is divided into slots. When one is over, a pass goes once through all series: each gets a row for the slot
in which it was on offer. Then each kind (one GPU, count, market and provider) gets a row with the distribution of the
prices of all its series, so that a question about months of a market reads a few thousand rows. Changes are kept for a
week beside the slots; of older ones only the price that held at the border is left, as a change at the border.

What was rolled up is seen in the rows themselves: a series or kind is rolled up to the end of its newest slot, and in
what follows it was either not on offer or is not rolled up yet. Each step is a transaction that needs to know nothing
of the others, and a crash loses the place in the pass, nothing else.

Size comes before age: while more than the soft share of the limit is used, every finished pass shortens the week of
changes, down to one slot, and then the past as a whole; when there is room again, both grow back.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final

from spotd.history import spans
from spotd.history.file import PAGE_BYTES, pages_used, transaction, watched_spans
from spotd.history.values import DAY_S, DISK_GB, SLOT_S, STORAGE, Retained

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

    def _roll(self, series: int, watches: list[spans.Watch], current: _Pass, room: int) -> tuple[int, bool]:
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
        known = spans.spells(points, watches, since=since, until=border)
        self._connection.executemany(
            "INSERT OR REPLACE INTO slots (series, slot, typical, low_by, high_by, offered_s)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            [
                (series, s.number, s.typical, s.typical - s.low, s.high - s.typical, s.offered_s)
                for s in spans.slots(known, SLOT_S)
            ],
        )
        return len(points), complete

    def _points(self, series: int, since: int, border: int, most: int) -> list[spans.Point]:
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
        spans.packed(spans.quantiles(seconds, spans.MIDDLES_PERMILLE, of=1000)),
    )
