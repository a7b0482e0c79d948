"""Prices that were not polled here: of a provider's own records, or of recorded lists. A file of their own.

Theory. What was polled here is a fact that decisions may rest on, such as when a provider last sold something. What was
imported is the statement of another. So that neither can be taken for the other, the imported prices have a file of the
same format beside the price history, which is read only where prices of the past are shown, proposed or replayed, and
only for time in which the provider was not polled here.

An import is a sequence of statements: from one instant to another, an offer cost this. A statement replaces what was
stated before of that offer and span, and nothing else. So an import that is repeated changes nothing, and one that is
interrupted keeps the statements that it made.

Polled prices pass to another daemon of the same install, which leads after this one, as documents. A document holds
what was polled within one day: for each span in which a provider was polled without a long pause, a page of all that
its offers cost then. The reader writes the pages among its imported prices: they are the statement of another, and
replace only what was stated before of the same offers and spans.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Final

from spotd.history.file import Retained, transaction, watched_spans
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, ProviderName

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


FORMAT: Final = 1
TEXT_BYTES_MAX: Final = 64_000_000
"""Of a document unpacked: a day of five thousand offers with five hundred changes each."""


class BadDocument(Exception):
    """A document that holds no prices. The text states why."""


def pages_of(connection: sqlite3.Connection, since: int, until: int) -> Iterator[PriceHistoryPage]:
    """Yield what was polled in this span, in whole Unix seconds: a page for each time of each provider."""
    for provider, watches in watched_spans(connection).items():
        for opens, closes in watches:
            begins, ends = max(opens, since), min(closes, until)
            if begins < ends and (offers := tuple(_offers_of(connection, provider, begins, ends))):
                yield PriceHistoryPage(offers=offers, since=_instant(begins), until=_instant(ends))


def _offers_of(
    connection: sqlite3.Connection, provider: ProviderName, since: int, until: int
) -> Iterator[OfferPriceHistory]:
    series = connection.execute(
        "SELECT s.id, s.offer, s.pool, s.storage, k.gpu, k.gpu_count, k.market FROM series s JOIN kinds k"
        " ON k.id = s.kind WHERE k.provider = ? ORDER BY s.id",
        (provider,),
    ).fetchall()
    for number, offer, pool, storage, gpu, gpu_count, market in series:
        points = connection.execute(
            "SELECT max(at), price FROM points WHERE series = ?1 AND at <= ?2 HAVING max(at) IS NOT NULL"
            " UNION ALL SELECT at, price FROM points WHERE series = ?1 AND at > ?2 AND at < ?3 ORDER BY 1",
            (number, since, until),
        ).fetchall()
        changes = [(max(at, since), price) for at, price in points]
        if any(price is not None for _, price in changes):
            yield OfferPriceHistory(
                provider=provider,
                offer_id=OfferId(offer),
                pool=PoolId(pool),
                market=Market(market),
                gpu=gpu,
                gpu_count=gpu_count,
                storage_price=MicroUsdPerGbMonth(storage),
                changes=tuple(
                    (_instant(at), None if price is None else MicroUsdPerHour(price)) for at, price in changes
                ),
            )


def encode(pages: Iterable[PriceHistoryPage]) -> bytes:
    """Return the document of these pages, packed; the same bytes for the same pages."""
    found = [
        {
            "since": _second(page.since),
            "until": _second(page.until),
            "offers": [
                [
                    one.provider, one.offer_id, one.pool, one.market.value, one.gpu, one.gpu_count, one.storage_price,
                    [[_second(at), price] for at, price in one.changes],
                ]
                for one in page.offers
            ],
        }
        for page in pages
    ]  # fmt: skip
    return gzip.compress(json.dumps({"schema": FORMAT, "pages": found}).encode(), mtime=0)


def decode(data: bytes) -> list[PriceHistoryPage]:
    """Return the pages of a document.

    Raises:
        BadDocument: it holds anything else, or more than a day can bring.
    """
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as packed:
            text = packed.read(TEXT_BYTES_MAX + 1)
        if len(text) > TEXT_BYTES_MAX:
            raise BadDocument(f"it unpacks to more than {TEXT_BYTES_MAX // 1_000_000} MB")
        found = json.loads(text)
        if found["schema"] != FORMAT:
            raise BadDocument(f"its schema is {found['schema']!r}, and this spotd reads {FORMAT}")
        return [_page(page) for page in found["pages"]]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise BadDocument(f"it cannot be read ({type(error).__name__})") from error


def _page(page: Any) -> PriceHistoryPage:
    return PriceHistoryPage(
        offers=tuple(
            OfferPriceHistory(
                provider=ProviderName(_text(provider)),
                offer_id=OfferId(_text(offer)),
                pool=PoolId(_text(pool)),
                market=Market(market),
                gpu=_text(gpu),
                gpu_count=_number(gpu_count),
                storage_price=MicroUsdPerGbMonth(_number(storage)),
                changes=tuple((_instant(_number(at)), _price(price)) for at, price in changes),
            )
            for provider, offer, pool, market, gpu, gpu_count, storage, changes in page["offers"]
        ),
        since=_instant(_number(page["since"])),
        until=_instant(_number(page["until"])),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is wanted")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a number is wanted")
    return value


def _price(value: Any) -> MicroUsdPerHour | None:
    return None if value is None else MicroUsdPerHour(_number(value))


def _instant(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)
