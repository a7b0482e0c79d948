"""Prices that were not polled here: of a provider's own records, or of recorded lists. A file of their own.

Theory. What was polled here is a fact that decisions may rest on, such as when a provider last sold something. What was
imported is the statement of another. So that neither can be taken for the other, the imported prices have a file of the
same format beside the price history, which is read only where prices of the past are shown, proposed or replayed, and
only for time in which the provider was not polled here.

An import is a sequence of statements: from one instant to another, an offer cost this. A statement replaces what was
stated before of that offer and span, and nothing else. So an import that is repeated changes nothing, and one that is
interrupted keeps the statements that it made.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from spotd.history.file import Retained, transaction
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import ProviderName

IMPORTED: Final = Retained(bytes_max=64_000_000)
"""Some two million changes, all of which a question about everything reads."""
_Changes = list[tuple[int, int | None]]


def write_page(connection: sqlite3.Connection, page: PriceHistoryPage, *, now: int) -> int:
    """Write the statements of a page, for as long as prices are kept; return how many prices that took.

    Raises:
        sqlite3.Error: nothing of it was written.
    """
    kept_from = now - int(IMPORTED.everything.total_seconds())
    since, until = max(_second(page.since), kept_from), min(_second(page.until), now)
    if since >= until:
        return 0
    prices = 0
    with transaction(connection):
        for provider in {offer.provider for offer in page.offers}:
            _watch(connection, provider, since, until)
        for offer in page.offers:
            changes = _within(offer.changes, since, until)
            if changes:
                _state(connection, _series(connection, offer), changes, since, until)
                prices += sum(price is not None for _, price in changes)
    return prices


def _second(at: datetime) -> int:
    return int(at.timestamp())


def _within(changes: Sequence[tuple[datetime, int | None]], since: int, until: int) -> _Changes:
    """Return the changes of a span, from the price that held at its beginning: one for a second, each a change."""
    by_second: dict[int, int | None] = {}
    for at, price in sorted(changes, key=lambda change: change[0]):
        second = max(since, _second(at))
        if second < until:
            by_second[second] = None if price is None else int(price)
    found: _Changes = []
    for second, price in by_second.items():
        if not found or found[-1][1] != price:
            found.append((second, price))
    return found


def _series(connection: sqlite3.Connection, offer: OfferPriceHistory) -> int:
    kind = (offer.provider, offer.gpu, offer.gpu_count, offer.market.value)
    connection.execute(
        "INSERT INTO kinds (provider, gpu, gpu_count, market) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", kind
    )
    connection.execute(
        "INSERT INTO series (kind, offer, pool, storage)"
        " SELECT id, ?5, ?6, ?7 FROM kinds WHERE provider = ?1 AND gpu = ?2 AND gpu_count = ?3 AND market = ?4"
        " ON CONFLICT DO UPDATE SET pool = excluded.pool, storage = excluded.storage",
        (*kind, offer.offer_id, offer.pool, offer.storage_price),
    )
    found: int = connection.execute(
        "SELECT s.id FROM series s JOIN kinds k ON k.id = s.kind"
        " WHERE k.provider = ? AND k.gpu = ? AND k.gpu_count = ? AND k.market = ? AND s.offer = ?",
        (*kind, offer.offer_id),
    ).fetchone()[0]
    return found


def _state(connection: sqlite3.Connection, series: int, changes: _Changes, since: int, until: int) -> None:
    """Put these changes in place of those of the span; behind it holds what held there before, or nothing."""
    before = connection.execute(
        "SELECT price FROM points WHERE series = ? AND at <= ? ORDER BY at DESC LIMIT 1", (series, until)
    ).fetchone()
    connection.execute("DELETE FROM points WHERE series = ? AND at >= ? AND at < ?", (series, since, until))
    rows = [(series, *change) for change in changes]
    connection.executemany("INSERT INTO points (series, at, price) VALUES (?, ?, ?)", rows)
    connection.execute(
        "INSERT INTO points (series, at, price) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (series, until, None if before is None else before[0]),
    )


def _watch(connection: sqlite3.Connection, provider: ProviderName, since: int, until: int) -> None:
    """Note that this provider's prices are known in the span, together with the spans that it touches."""
    row = connection.execute(
        "SELECT min(since), max(until) FROM watched WHERE provider = ? AND since <= ? AND until >= ?",
        (provider, until, since),
    ).fetchone()
    if row[0] is not None:
        since, until = min(since, row[0]), max(until, row[1])
    connection.execute("DELETE FROM watched WHERE provider = ? AND since <= ? AND until >= ?", (provider, until, since))
    connection.execute("INSERT INTO watched (provider, since, until) VALUES (?, ?, ?)", (provider, since, until))


def forget_before(connection: sqlite3.Connection, border: int) -> None:
    """Delete what is older, but for the price that held then, which holds from the border on."""
    with transaction(connection):
        connection.execute(
            "INSERT OR IGNORE INTO points (series, at, price) SELECT series, ?1, price FROM ("
            "SELECT series, max(at), price FROM points WHERE at < ?1 GROUP BY series) WHERE price IS NOT NULL",
            (border,),
        )
        connection.execute("DELETE FROM points WHERE at < ?", (border,))
        connection.execute("DELETE FROM watched WHERE until <= ?", (border,))
        connection.execute("UPDATE watched SET since = ?1 WHERE since < ?1", (border,))
        connection.execute("DELETE FROM series WHERE NOT EXISTS (SELECT 1 FROM points WHERE series = series.id)")
        connection.execute("DELETE FROM kinds WHERE NOT EXISTS (SELECT 1 FROM series WHERE kind = kinds.id)")
