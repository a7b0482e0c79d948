"""The whole past of each offer, for replays: read beside the daemon that writes it, and changing nothing.

As long as changes are kept, a price holds from its change to the next one. In what is rolled up, an offer is taken to
have been on offer from the beginning of each quarter of a day, for as long as it was, at its median price.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from spotd.history import file, spans
from spotd.history.file import APPLICATION_ID, VERSION
from spotd.history.values import SLOT_S, Kind
from spotd_providers.contract.money import MicroUsdPerGbMonth
from spotd_providers.contract.values import Market, ProviderName

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
    spells: Sequence[spans.Spell]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePast:
    """Everything that one file holds of the GPUs that were asked for.

    Attributes:
        watches: spans in which each provider was polled; what lies between two of them is not known.
        exact_from: since when every change is there.
        kinds: every GPU and count of which there is an offer, asked for or not.
    """

    watches: Mapping[ProviderName, Sequence[spans.Watch]]
    exact_from: int
    kinds: frozenset[tuple[str, int]]
    offers: Iterator[OfferPast]


def read_past(path: Path, is_wanted: Callable[[str, int], bool], work: Callable[[WholePast], None]) -> None:
    """Read the file and hand what it holds to `work`, during which nothing of it changes.

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
            work(_past(connection, is_wanted))
    except sqlite3.Error as exc:
        name = getattr(exc, "sqlite_errorname", "") or type(exc).__name__
        raise PastUnreadable(f"it cannot be read ({name}): {exc}") from exc


def _past(connection: sqlite3.Connection, is_wanted: Callable[[str, int], bool]) -> WholePast:
    watches = file.watched_spans(connection)
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
    connection: sqlite3.Connection, kind: Kind, known: Sequence[spans.Watch], exact_from: int
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
        exact = spans.spells(points, known, since=exact_from, until=until)
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
