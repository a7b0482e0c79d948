"""The door to the file: its settings, its tables, and what its errors mean.

One connection writes, reads and checkpoints. `synchronous=NORMAL` loses the last commits in a power cut and never
corrupts: prices come again at the next poll. `max_page_count` makes SQLite itself refuse to grow beyond the limit.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from struct import Struct
from typing import Final

from spotd_providers.contract.values import Market, MicroUsdPerGpuHour, ProviderName

# From changes of a price to how long each price held, and from that to slots, buckets and quantiles. Pure.
#
# Theory. A *point* states that from `at` on an offer cost `price`, or was not on offer (`None`). It holds until the
# next point, but only while the provider was polled: a *watch* is a span in which it was polled without a long pause.
# What lies between two watches is not known and counts for nothing.


Point = tuple[int, int | None]
Watch = tuple[int, int]
Spell = tuple[int, int, int]
"""From, until, price."""

PPM: Final = 1_000_000
PARTS: Final = 20
"""A kept distribution is so many prices, each standing for an equal share of the time."""
MIDDLES_PERMILLE: Final = tuple(range(500 // PARTS, 1000, 1000 // PARTS))
_PACKED: Final = Struct(f">{PARTS}q")


def spells(points: Sequence[Point], watches: Sequence[Watch], *, since: int, until: int) -> Iterator[Spell]:
    """Yield the spans in which the price is known. Points and watches come in order; watches do not overlap."""
    first = 0
    last = len(points) - 1
    for index, (at, price) in enumerate(points):
        if price is None:
            continue
        start = at if at > since else since
        end = points[index + 1][0] if index < last else until
        if end > until:
            end = until
        while first < len(watches) and watches[first][1] <= start:
            first += 1
        place = first
        while start < end and place < len(watches):
            opens, closes = watches[place]
            begins = start if start > opens else opens
            ends = end if end < closes else closes
            if begins < ends:
                yield begins, ends, price
            start, place = closes, place + 1


def divided(found: Iterable[Spell], length: int) -> Iterator[tuple[int, int, int]]:
    """Yield number of the span of this length, seconds in it, price. Without a length all of time is span 0."""
    for start, end, price in found:
        if not length:
            yield 0, end - start, price
            continue
        number, last = start // length, (end - 1) // length
        if number == last:
            yield number, end - start, price
            continue
        yield number, (number + 1) * length - start, price
        for between in range(number + 1, last):
            yield between, length, price
        yield last, end - last * length, price


@dataclass(frozen=True, slots=True)
class Slot:
    """One offer over one slot; `typical` is its median by time."""

    number: int
    low: int
    typical: int
    high: int
    offered_s: int


def slots(found: Iterable[Spell], length: int) -> list[Slot]:
    """Yield what is kept of an offer's past: one row for each slot in which it was on offer."""
    by_slot: dict[int, dict[int, int]] = {}
    for number, seconds, price in divided(found, length):
        prices = by_slot.setdefault(number, {})
        prices[price] = prices.get(price, 0) + seconds
    return [
        Slot(number, min(prices), quantiles(prices, (50,))[0], max(prices), sum(prices.values()))
        for number, prices in sorted(by_slot.items())
    ]


def quantiles(seconds_by_price: Mapping[int, int], shares: Sequence[int], *, of: int = 100) -> tuple[int, ...]:
    """Return the least price at or under which each share of the time was; there must be a price, shares ascend."""
    total = sum(seconds_by_price.values())
    found: list[int] = []
    passed = 0
    for price, seconds in sorted(seconds_by_price.items()):
        passed += seconds
        while len(found) < len(shares) and passed * of >= shares[len(found)] * total:
            found.append(price)
    return tuple(found)


def packed(prices: Sequence[int]) -> bytes:
    return _PACKED.pack(*prices)


def unpacked(blob: bytes) -> tuple[int, ...]:
    return _PACKED.unpack(blob)


def first_watched(watches: Sequence[Watch], since: int, until: int) -> int:
    """Return when the provider was first polled in this span; its beginning where no poll is on record."""
    return next((max(since, opens) for opens, closes in watches if closes > since and opens < until), since)


def watched_s(watches: Sequence[Watch], start: int, end: int) -> int:
    """Return for how many seconds of the span the provider was polled."""
    return sum(max(0, min(end, until) - max(start, since)) for since, until in watches)


def without(watches: Sequence[Watch], other: Sequence[Watch]) -> list[Watch]:
    """Return what these spans cover and the others do not. Both come in order and do not overlap among themselves."""
    left: list[Watch] = []
    for since, until in watches:
        for opens, closes in other:
            if closes <= since:
                continue
            if opens >= until:
                break
            if opens > since:
                left.append((since, opens))
            since = closes
        if since < until:
            left.append((since, until))
    return left


def effective(base: int, fee_ppm: int, gpu_count: int) -> MicroUsdPerGpuHour:
    """Return the price per GPU-hour with the fee, rounded as `spotd.core.pricing` does; `base` is GPU and storage."""
    total = base + -(-base * (fee_ppm - PPM) // PPM)
    return MicroUsdPerGpuHour(-(-total // gpu_count))


# What is asked of the history and what it answers. Instants inside this package are whole Unix seconds.


DAY_S: Final = 86_400
SLOT_S: Final = DAY_S // 4
"""The past is rolled up into quarters of a day: a row for each offer, and one for all offers of a kind together."""
DISK_GB: Final = 10
"""The disk for which prices are shown where no job states how much it needs."""
STORAGE: Final = "(s.storage * :disk + 719) / 720"
"""In SQL: what the disk of a series costs an hour, rounded up, a month being 720 hours."""
SHARES_PERCENT: Final = (10, 25, 50, 75, 90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """How much is kept; the size limits win over the ages.

    Attributes:
        changes: age until which every change is kept.
        everything: age at which the rolled-up rows go too.
        bytes_max: the database file never grows beyond this.
        disk_reserve: nothing is written while less than this is free on the disk, which is left to the state.
    """

    changes: timedelta = timedelta(days=7)
    everything: timedelta = timedelta(days=90)
    bytes_max: int = 190_000_000
    disk_reserve: int = 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is compared with each other."""

    id: int
    provider: ProviderName
    gpu: str
    gpu_count: int
    market: Market


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTerms:
    """What turns a stored price into an effective one: fee multipliers in parts per million."""

    fee_ppm: Mapping[ProviderName, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesQuery:
    """Which prices, from when until when (Unix seconds). What is `None` is not narrowed.

    Attributes:
        gpus: canonical names.
        every_s: length of a bucket; `None` is one bucket for the whole range.
    """

    since: int
    until: int
    every_s: int | None = None
    gpus: frozenset[str] | None = None
    provider: ProviderName | None = None
    market: Market | None = None
    offer: str | None = None
    pool: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Effective prices of one GPU-hour over one span, weighed by the time for which they were on offer.

    Attributes:
        quantiles: at each of `SHARES_PERCENT`.
        offers: how many were on offer on average while their providers were polled.
        begins: from when on in this span prices are known: its start, or the first poll in it.
        imported: share of that time, from 0 to 1, of which the prices were imported and not polled here.
    """

    start: int
    begins: int
    low: MicroUsdPerGpuHour
    quantiles: tuple[MicroUsdPerGpuHour, ...]
    high: MicroUsdPerGpuHour
    offers: float
    imported: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceGroup:
    """One GPU in one market."""

    gpu: str
    market: Market
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesResult:
    """What was found.

    Attributes:
        bucket_s: the length that was used: a rolled-up past has no finer one than its slots.
    """

    groups: tuple[PriceGroup, ...]
    bucket_s: int


APPLICATION_ID: Final = 0x73706F74
VERSION: Final = 1
PAGE_BYTES: Final = 4096
_WAL_PAGES: Final = 500
_CODE_MASK: Final = 0xFF
_TABLES: Final = """
CREATE TABLE kinds (
    id INTEGER PRIMARY KEY, provider TEXT NOT NULL, gpu TEXT NOT NULL, gpu_count INTEGER NOT NULL, market TEXT NOT NULL,
    UNIQUE (provider, gpu, gpu_count, market)
);
-- storage: newest price of a GB-month seen, since it hardly ever changes
CREATE TABLE series (
    id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, offer TEXT NOT NULL, pool TEXT NOT NULL, storage INTEGER NOT NULL,
    UNIQUE (kind, offer)
);
-- price: GPU part of the whole machine before the fee; null from when the offer was gone
CREATE TABLE points (
    series INTEGER NOT NULL, at INTEGER NOT NULL, price INTEGER, PRIMARY KEY (series, at)
) WITHOUT ROWID;
-- low_by and high_by: how far the extremes of the slot were from the typical price
CREATE TABLE slots (
    series INTEGER NOT NULL, slot INTEGER NOT NULL, typical INTEGER NOT NULL, low_by INTEGER NOT NULL,
    high_by INTEGER NOT NULL, offered_s INTEGER NOT NULL, PRIMARY KEY (series, slot)
) WITHOUT ROWID;
-- all offers of a kind in one slot: prices at equal shares of the time on offer, as big-endian 64-bit integers
CREATE TABLE markets (
    kind INTEGER NOT NULL, slot INTEGER NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL,
    offered_s INTEGER NOT NULL, prices BLOB NOT NULL, PRIMARY KEY (kind, slot)
) WITHOUT ROWID;
-- changes_from: since when every change is there
CREATE TABLE kept (name TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE watched (
    provider TEXT NOT NULL, since INTEGER NOT NULL, until INTEGER NOT NULL, PRIMARY KEY (provider, since)
) WITHOUT ROWID;
"""


class FileUnusable(Exception):
    """The file can never be used again: damaged, not ours, or of another version. It is to be set aside."""


class FileOfTheFuture(Exception):
    """The file cannot be used at this instant. Nothing is wrong with it once the clock is right."""


def open_file(path: Path, *, bytes_max: int) -> sqlite3.Connection:
    """Open a connection to the file, which is made if it is not there, for its owner only.

    Raises:
        FileUnusable, sqlite3.Error, OSError
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(str(path), isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        is_new = _is_new(connection)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise sqlite3.OperationalError("the folder cannot hold a write-ahead log")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * PAGE_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        if is_new:
            _make_tables(connection)
        connection.execute(f"PRAGMA max_page_count = {bytes_max // PAGE_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_new(connection: sqlite3.Connection) -> bool:
    """Whether there are no tables yet; asked before anything is changed, since the file may not be ours."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if (found, version) == (APPLICATION_ID, VERSION):
        return False
    if (found, version) != (0, 0) or connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
        raise FileUnusable(f"it is not a price history of version {VERSION}")
    return True


def _make_tables(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        for statement in _TABLES.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Write all of the block, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite rolls back by itself after some errors
            connection.execute("ROLLBACK")
        raise


def has_own_tables(connection: sqlite3.Connection) -> bool:
    """Whether the file holds the tables of a price history and nothing else.

    A file from elsewhere may call a view `points` that never ends, or a column what takes a gigabyte to compute.
    """
    blank = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _make_tables(blank)
        return _schema(connection) <= _schema(blank)
    finally:
        blank.close()


def _schema(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = connection.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_schema LIMIT 100")
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows}


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is wrong, and not its disk or the moment."""
    return getattr(error, "sqlite_errorcode", 0) & _CODE_MASK in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def pages_used(connection: sqlite3.Connection) -> int:
    """Return how many pages hold something; the file may be longer by pages that are free again."""
    total: int = connection.execute("PRAGMA page_count").fetchone()[0]
    free: int = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return total - free


def watched_spans(connection: sqlite3.Connection) -> dict[ProviderName, list[Watch]]:
    """Return the spans in which each provider was polled without a long pause, in order."""
    found: dict[ProviderName, list[Watch]] = {}
    rows = connection.execute("SELECT provider, since, until FROM watched ORDER BY provider, since")
    for provider, since, until in rows:
        found.setdefault(ProviderName(provider), []).append((since, until))
    return found


def kinds(connection: sqlite3.Connection) -> Iterator[Kind]:
    """Yield every kind of machine of which there is a price."""
    rows = connection.execute("SELECT id, provider, gpu, gpu_count, market FROM kinds")
    for number, provider, gpu, count, market in rows:
        yield Kind(id=number, provider=ProviderName(provider), gpu=gpu, gpu_count=count, market=Market(market))


def changes_from(connection: sqlite3.Connection) -> int:
    """Return since when every change is there."""
    row = connection.execute("SELECT value FROM kept WHERE name = 'changes_from'").fetchone()
    return 0 if row is None else row[0]


def set_aside(path: Path) -> Path:
    """Rename the file; at most one is kept under that name, so that a bad disk does not fill itself.

    Raises:
        OSError
    """
    aside = path.with_name(path.name + ".damaged")
    path.replace(aside)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    return aside
