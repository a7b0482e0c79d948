"""Recording of what changed since the last poll, and of the poll itself.

What is compared with is what was last *committed*, so a poll that could not be written is made good by the next one.
Only offers that are on sale are remembered; one that comes back is found again in the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from spotd.history.file import FileOfTheFuture, FileUnusable, transaction
from spotd.history.values import DAY_S
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
            changed, fresh = _compared(live, present)
            gone = [key for key in live if key not in present and _is_proof(key, whole, complete=complete)]
            news = _enrolled(self._connection, provider, fresh)
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


def _compared(
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


def _enrolled(connection: sqlite3.Connection, provider: ProviderName, fresh: dict[_Key, Offer]) -> dict[_Key, _Live]:
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
