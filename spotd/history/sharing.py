"""Polled prices as documents that another daemon of the same install can read, which leads after this one.

A document holds what was polled within one day: for each span in which a provider was polled without a long pause, a
page of all that its offers cost then. The reader writes the pages among its imported prices (`importing`): they are the
statement of another, and replace only what was stated before of the same offers and spans.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Final

from spotd.history.file import watched_spans
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, ProviderName

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


def _second(at: datetime) -> int:
    return int(at.timestamp())
