"""Answers questions, coarse ones from what is rolled up and fine ones from the changes.

In spans of whole slots a market is read from the distributions of its kinds, one offer or pool from its own slots, and
either way what is not rolled up yet from the changes. Shorter spans are counted from changes alone, as long as those
are kept. Percentiles weigh each price by the time for which it was on offer, so an offer that came for an hour counts
for an hour. In what is rolled up, an offer counts in each slot with its median, and a market by twenty prices for equal
shares of that time; lowest, highest and the number of offers stay exact.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import quote

from spotd.history import file
from spotd.history.file import (
    APPLICATION_ID,
    DAY_S,
    DISK_GB,
    SHARES_PERCENT,
    SLOT_S,
    STORAGE,
    VERSION,
    Bucket,
    Kind,
    PriceGroup,
    PriceTerms,
    SeriesQuery,
    SeriesResult,
)
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerGpuHour, ProviderName

BUCKETS_MAX: Final = 2_000
Sold = tuple[str, int]
"""A canonical GPU, and how many of them."""
_LAST_OFFERED: Final = """
SELECT kinds.gpu, kinds.gpu_count, MAX(newest.at), MAX(newest.price IS NOT NULL)
FROM kinds JOIN series ON series.kind = kinds.id JOIN (
    SELECT series, MAX(at) AS at, price FROM points GROUP BY series
) AS newest ON newest.series = series.id
WHERE kinds.provider = ? GROUP BY kinds.gpu, kinds.gpu_count
"""
"""SQLite takes the price of the row that holds the highest instant."""
EXACT_S: Final = 2 * DAY_S
"""A range of this length at most is counted from changes to the second when it is to be one bucket."""


class TooManyBuckets(Exception):
    """Buckets that are too short for the range; the message names a length that is long enough."""


@dataclass(slots=True)
class _Tally:
    """One bucket in the making: seconds by price and by provider, and the extremes."""

    low: MicroUsdPerGpuHour
    high: MicroUsdPerGpuHour
    seconds: dict[int, int] = field(default_factory=dict)
    by_provider: dict[ProviderName, int] = field(default_factory=dict)
    imported_s: int = 0


_Watches = Mapping[ProviderName, list[file.Watch]]
_Spans = Mapping[ProviderName, Sequence[file.Watch]]
_Row = tuple[int, int, int, int, int, int]
"""Kind, bucket, price, seconds, lowest, highest; prices of the whole machine with its storage."""


def kinds_sold(connection: sqlite3.Connection) -> set[str]:
    """Return every GPU of which there is a price."""
    return {gpu for (gpu,) in connection.execute("SELECT DISTINCT gpu FROM kinds")}


def last_offers(
    connection: sqlite3.Connection, providers: Sequence[ProviderName]
) -> dict[ProviderName, dict[Sold, int]]:
    """Return when each of these providers last offered each kind of machine, in seconds."""
    watches = file.watched_spans(connection)
    found: dict[ProviderName, dict[Sold, int]] = {}
    for provider in providers:
        watched_until = max((until for _, until in watches.get(provider, ())), default=0)
        for gpu, count, at, is_on_sale in connection.execute(_LAST_OFFERED, (provider,)):
            kinds = found.setdefault(provider, {})
            kinds[gpu, count] = max(at, watched_until if is_on_sale else 0, kinds.get((gpu, count), 0))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What one file holds of a question: the kinds, when their providers were polled, and prices with their time.

    Attributes:
        is_imported: nothing of it was polled here.
    """

    kinds: Mapping[int, Kind]
    watches: _Watches
    rows: Sequence[_Row]
    is_imported: bool = False


def gather(connection: sqlite3.Connection, question: SeriesQuery, *, coarse: bool) -> Gathered:
    """Return what the price history holds of a fitted question."""
    kinds, watches = _kinds_of(connection, question), file.watched_spans(connection)
    chosen = _Chosen(connection, question, tuple(kinds))
    length = question.every_s or 0
    rolled = chosen.rolled(length) if coarse else iter(())
    rows = [*rolled, *_rows_of_changes(chosen, kinds, watches, length, coarse=coarse)]
    return Gathered(kinds=kinds, watches=watches, rows=rows)


def gather_imports(connection: sqlite3.Connection, question: SeriesQuery, polled: _Watches) -> Gathered:
    """Return what was imported of a fitted question, for the time in which a provider was not polled here."""
    kinds = _kinds_of(connection, question)
    watches = {
        provider: file.without(spans, polled.get(provider, ()))
        for provider, spans in file.watched_spans(connection).items()
    }
    chosen = _Chosen(connection, question, tuple(kinds))
    rows = [*_rows_of_changes(chosen, kinds, watches, question.every_s or 0, coarse=False)]
    return Gathered(kinds=kinds, watches=watches, rows=rows, is_imported=True)


def _kinds_of(connection: sqlite3.Connection, question: SeriesQuery) -> dict[int, Kind]:
    return {
        kind.id: kind
        for kind in file.kinds(connection)
        if (question.gpus is None or kind.gpu in question.gpus)
        and question.provider in {None, kind.provider}
        and question.market in {None, kind.market}
    }


def answer(question: SeriesQuery, terms: PriceTerms, sources: Sequence[Gathered]) -> SeriesResult:
    """Return the prices of a fitted question, from all that was gathered for it."""
    length = question.every_s or 0
    tallies: dict[tuple[str, Market], dict[int, _Tally]] = {}
    watches: dict[ProviderName, list[file.Watch]] = {}
    for source in sources:
        for provider, spans in source.watches.items():
            watches[provider] = sorted([*watches.get(provider, ()), *spans])
        for row in source.rows:
            _add(tallies, source, row, terms)
    bucket_s = length or question.until - question.since
    groups = tuple(
        PriceGroup(
            gpu=gpu,
            market=market,
            buckets=tuple(
                _bucket(item, question, watches, number * length or question.since, bucket_s)
                for number, item in sorted(buckets.items())
            ),
        )
        for (gpu, market), buckets in sorted(tallies.items())
    )
    return SeriesResult(groups=groups, bucket_s=bucket_s)


def _add(tallies: dict[tuple[str, Market], dict[int, _Tally]], source: Gathered, row: _Row, terms: PriceTerms) -> None:
    kind_id, number, base, seconds, low, high = row
    kind = source.kinds[kind_id]
    fee, count = terms.fee_ppm.get(kind.provider, file.PPM), kind.gpu_count
    price = file.effective(base, fee, count)
    group = tallies.setdefault((kind.gpu, kind.market), {})
    tally = group.get(number)
    if tally is None:
        tally = group[number] = _Tally(low=price, high=price)
    tally.seconds[price] = tally.seconds.get(price, 0) + seconds
    tally.by_provider[kind.provider] = tally.by_provider.get(kind.provider, 0) + seconds
    if source.is_imported:
        tally.imported_s += seconds
    tally.low = min(tally.low, price if low == base else file.effective(low, fee, count))
    tally.high = max(tally.high, price if high == base else file.effective(high, fee, count))


def _rows_of_changes(
    chosen: _Chosen, kinds: Mapping[int, Kind], watches: _Watches, length: int, *, coarse: bool
) -> Iterator[_Row]:
    """Return the changes as rows like those that are rolled up; for a coarse question, of what is not rolled up yet."""
    question = chosen.question
    counted: dict[int, dict[tuple[int, int], int]] = {}
    for kind, since, points in chosen.changes(after_rolled=coarse):
        seconds_by = counted.setdefault(kind, {})
        watched = watches.get(kinds[kind].provider, ())
        for number, seconds, base in file.divided(
            file.spells(points, watched, since=since, until=question.until), length
        ):
            key = (number, base)
            seconds_by[key] = seconds_by.get(key, 0) + seconds
    for kind, seconds_by in counted.items():
        for (number, base), seconds in seconds_by.items():
            yield kind, number, base, seconds, base, base


def fit(question: SeriesQuery, changes_from: int) -> tuple[SeriesQuery, bool]:
    """Return the question in spans that can be had, and whether those are whole slots.

    Raises:
        TooManyBuckets
    """
    wanted, span = question.every_s, question.until - question.since
    coarse = question.since < changes_from or (span > EXACT_S if wanted is None else wanted % SLOT_S == 0)
    if coarse:
        # A slot is all or nothing, so the range begins with one; its end is where it was, as the newest is open.
        question = replace(question, since=question.since // SLOT_S * SLOT_S)
        if question.until <= changes_from:
            question = replace(question, until=-(-question.until // SLOT_S) * SLOT_S)
        if wanted is not None:
            question = replace(question, every_s=-(-wanted // SLOT_S) * SLOT_S)
    if question.every_s is not None and span > question.every_s * BUCKETS_MAX:
        least = -(-span // BUCKETS_MAX // 60)
        raise TooManyBuckets(f"the range has more than {BUCKETS_MAX} spans of this length; take at least {least}m")
    return question, coarse


def _bucket(item: _Tally, question: SeriesQuery, watches: _Watches, start: int, length: int) -> Bucket:
    first, end = max(start, question.since), min(start + length, question.until)
    offers = 0.0
    for provider, seconds in item.by_provider.items():
        offers += seconds / max(1, file.watched_s(watches.get(provider, ()), first, end))
    return Bucket(
        start=start,
        begins=min(file.first_watched(watches.get(provider, ()), first, end) for provider in item.by_provider),
        low=item.low,
        quantiles=tuple(MicroUsdPerGpuHour(price) for price in file.quantiles(item.seconds, SHARES_PERCENT)),
        high=item.high,
        offers=offers,
        imported=item.imported_s / max(1, sum(item.seconds.values())),
    )


class _Chosen:
    """The series that a question is about, and their rows."""

    def __init__(self, connection: sqlite3.Connection, question: SeriesQuery, kinds: tuple[int, ...]) -> None:
        self._connection = connection
        self.question = question
        # Numbers of our own rows, and as many as there are kinds: no text of a user goes into a statement.
        self._kinds = f"IN ({','.join(map(str, kinds))})"
        self._by_series = question.offer is not None or question.pool is not None
        self._where = f"s.kind {self._kinds}"
        if question.offer is not None:
            self._where += " AND s.offer = :offer"
        if question.pool is not None:
            self._where += " AND s.pool = :pool"
        self._values = {
            "disk": DISK_GB,
            "offer": question.offer,
            "pool": question.pool,
            "since": question.since,
            "until": question.until,
            "first": question.since // SLOT_S,
            "end": -(-question.until // SLOT_S),
        }

    def rolled(self, length: int) -> Iterator[_Row]:
        """Yield what the rolled-up past holds."""
        number = f"t.slot / {length // SLOT_S}" if length else "0"
        if self._by_series:
            yield from self._connection.execute(
                f"SELECT s.kind, {number}, t.typical + {STORAGE}, t.offered_s,"  # noqa: S608 - only our numbers
                f" t.typical - t.low_by + {STORAGE}, t.typical + t.high_by + {STORAGE}"
                " FROM series s CROSS JOIN slots t ON t.series = s.id AND t.slot >= :first AND t.slot < :end"
                f" WHERE {self._where}",
                self._values,
            )
            return
        rows = self._connection.execute(
            f"SELECT kind, {number}, low, high, offered_s, prices FROM markets t"  # noqa: S608 - as above
            f" WHERE kind {self._kinds} AND slot >= :first AND slot < :end",
            self._values,
        )
        for kind, bucket, low, high, offered_s, blob in rows:
            prices = file.unpacked(blob)
            share, rest = divmod(offered_s, file.PARTS)
            yield kind, bucket, prices[0], share + rest, low, high
            for price in prices[1:]:
                yield kind, bucket, price, share, price, price

    def changes(self, *, after_rolled: bool) -> Iterator[tuple[int, int, list[file.Point]]]:
        """Yield kind, beginning and changes of each series, from the one that held then; prices with their storage."""
        since = ":since"
        if after_rolled:
            newest = (
                "(SELECT max(slot) FROM slots WHERE series = s.id)"
                if self._by_series
                else "(SELECT max(slot) FROM markets WHERE kind = s.kind)"
            )
            since = f"max(:since, coalesce(({newest} + 1) * {SLOT_S}, 0))"
        found: dict[int, tuple[int, int, list[file.Point]]] = {}
        rows = self._connection.execute(
            f"SELECT b.id, b.kind, b.since, p.at, p.price + b.disk FROM (SELECT s.id, s.kind, {STORAGE} AS disk,"  # noqa: S608 - as above
            f" {since} AS since FROM series s WHERE {self._where}) b CROSS JOIN points p"
            " ON p.series = b.id AND p.at < :until AND p.at >="
            " coalesce((SELECT max(at) FROM points WHERE series = b.id AND at <= b.since), 0)",
            self._values,
        )
        for series, kind, begins, at, price in rows:
            entry = found.get(series)
            if entry is None:
                entry = found[series] = (kind, begins, [])
            entry[2].append((at, price))
        for kind, begins, points in found.values():
            points.sort(key=lambda point: point[0])
            yield kind, begins, points


# The whole past of each offer, for replays: read beside the daemon that writes it, and changing nothing.
#
# As long as changes are kept, a price holds from its change to the next one. In what is rolled up, an offer is taken to
# have been on offer from the beginning of each quarter of a day, for as long as it was, at its median price.


_BUSY_S: Final = 10.0
TEXT_BYTES_MAX: Final = 1_000_000
"""Of one value; the longest that spotd writes is a name."""
POINTS_MAX: Final = 2_000_000
"""Of one offer: a change in each minute for four years."""


class PastUnreadable(Exception):
    """The file cannot be read. The message is a clause that reads on after its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPast:
    """One offer, and when it was on offer for which price of its GPU part; in order of time, never overlapping."""

    provider: ProviderName
    gpu: str
    gpu_count: int
    market: Market
    offer: str
    pool: str
    storage: MicroUsdPerGbMonth
    spells: Sequence[file.Spell]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePast:
    """Everything that one file holds of the GPUs that were asked for.

    Attributes:
        watches: spans in which each provider was polled; what lies between two of them is not known.
        exact_from: since when every change is there.
        kinds: every GPU and count of which there is an offer, asked for or not.
    """

    watches: _Spans
    exact_from: int
    kinds: frozenset[tuple[str, int]]
    offers: Iterator[OfferPast]


def read_past(
    path: Path,
    is_wanted: Callable[[str, int], bool],
    work: Callable[[WholePast], None],
    *,
    apart_from: _Spans | None = None,
) -> None:
    """Read the file and hand what it holds to `work`, during which nothing of it changes.

    Args:
        apart_from: spans of each provider that are better known from another file, and are not taken from this one.

    Raises:
        PastUnreadable
    """
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=_BUSY_S)
        ) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, TEXT_BYTES_MAX)
            connection.execute("PRAGMA trusted_schema = OFF")
            found = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if (found, version) != (APPLICATION_ID, VERSION):
                raise PastUnreadable(f"it is not a price history of version {VERSION}")
            connection.execute("BEGIN")
            if not file.has_own_tables(connection):
                raise PastUnreadable("it holds other tables or views than a price history does")
            work(_past(connection, is_wanted, apart_from or {}))
    except sqlite3.Error as exc:
        name = getattr(exc, "sqlite_errorname", "") or type(exc).__name__
        raise PastUnreadable(f"it cannot be read ({name}): {exc}") from exc


def _past(
    connection: sqlite3.Connection,
    is_wanted: Callable[[str, int], bool],
    apart_from: _Spans,
) -> WholePast:
    watches = {
        provider: file.without(spans, apart_from.get(provider, ()))
        for provider, spans in file.watched_spans(connection).items()
    }
    exact_from = file.changes_from(connection)
    kinds = tuple(file.kinds(connection))
    return WholePast(
        watches=watches,
        exact_from=exact_from,
        kinds=frozenset((kind.gpu, kind.gpu_count) for kind in kinds),
        offers=(
            past
            for kind in kinds
            if is_wanted(kind.gpu, kind.gpu_count)
            for past in _of_kind(connection, kind, watches.get(kind.provider, ()), exact_from)
        ),
    )


def _of_kind(
    connection: sqlite3.Connection, kind: Kind, known: Sequence[file.Watch], exact_from: int
) -> Iterator[OfferPast]:
    until = max((end for _, end in known), default=0)
    for series, offer, pool, storage in connection.execute(
        "SELECT id, offer, pool, storage FROM series WHERE kind = ? ORDER BY offer", (kind.id,)
    ).fetchall():
        rolled = [
            (slot * SLOT_S, slot * SLOT_S + min(offered_s, SLOT_S), typical)
            for slot, typical, offered_s in connection.execute(
                "SELECT slot, typical, offered_s FROM slots WHERE series = ? AND slot < ? ORDER BY slot",
                (series, exact_from // SLOT_S),
            )
        ]
        limited = "SELECT at, price FROM points WHERE series = ? ORDER BY at LIMIT ?"
        points = connection.execute(limited, (series, POINTS_MAX + 1)).fetchall()
        if len(points) > POINTS_MAX:
            raise PastUnreadable(f"one of its offers has more than {POINTS_MAX:,} changes")
        exact = file.spells(points, known, since=exact_from, until=until)
        yield OfferPast(
            provider=kind.provider,
            gpu=kind.gpu,
            gpu_count=kind.gpu_count,
            market=kind.market,
            offer=offer,
            pool=pool,
            storage=MicroUsdPerGbMonth(storage),
            spells=[*rolled, *exact],
        )
