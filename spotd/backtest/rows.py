"""The format of a history that anybody can write: CSV or JSON lines, one change in each line.

    at,provider,offer,gpu,count,price,market,available
    2026-11-01T00:00:00Z,vast,4711,RTX_4090,1,0.31,spot,1

`price` is the GPU part of the whole machine in dollars per hour, before the marketplace's fee; it holds until the next
line of the same offer. `available` 0 takes the offer off the market; the price may then be empty. Further columns:
`on_demand_price` (dollars per hour of the same machine), `storage_price` (dollars per GB and month), `pays_bid` (true
where a machine bills what was bid; absent: true for spot of vast), `region`, `host`.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from spotd.backtest.recorded import GONE, BacktestRefused, Reader, RecordedMarket
from spotd.backtest.run import SeriesKey, series_key
from spotd_jobs.spec.problems import nearest
from spotd_providers.contract import gpus, values

# A recorded market in the making: what every format of a history is read into.


CHANGES_MAX: Final = 20_000_000
"""About half a gigabyte of memory, shared by all processes."""
INSTANT_MAX: Final = 4_102_444_800
"""The year 2100: an instant after it is a mistake, or of another unit."""


class MarketCollector:
    """Collects the series and changes that matter to one job, and from when until when the market was recorded.

    Attributes:
        seen: how many series there were of each GPU and count, wanted or not.
    """

    def __init__(self, is_wanted: Callable[[str, int], bool]) -> None:
        self.is_wanted = is_wanted
        self._series: list[values.Offer] = []
        self._numbers: dict[SeriesKey, int | None] = {}
        self._instants, self._known, self._prices = array("q"), array("q"), array("q")
        self._first: int | None = None
        self._last: int | None = None
        self.seen: dict[tuple[str, int], int] = {}

    def number_of(self, offer: values.Offer) -> int | None:
        """Return the number of the series of this offer, `None` where the job can do nothing with it."""
        key = series_key(offer)
        if key not in self._numbers:
            kind = (offer.gpu, offer.gpu_count)
            self.seen[kind] = self.seen.get(kind, 0) + 1
            wanted = self.is_wanted(*kind)
            self._numbers[key] = len(self._series) if wanted else None
            if wanted:
                self._series.append(offer)
        return self._numbers[key]

    def add(self, at: int, number: int, price: int) -> None:
        """Add a change of a series."""
        if len(self._instants) >= CHANGES_MAX:
            raise BacktestRefused(
                f"the history holds more than {CHANGES_MAX:,} changes of this job's GPUs",
                hint="give a folder with fewer files, or a job that asks for fewer kinds of GPU",
            )
        self._instants.append(at)
        self._known.append(number)
        self._prices.append(price)

    @property
    def has_changes(self) -> bool:
        return bool(self._instants)

    def cover(self, at: int) -> None:
        """Note that the market was recorded at this instant."""
        if self._first is None or at < self._first:
            self._first = at
        if self._last is None or at > self._last:
            self._last = at

    def market(self) -> RecordedMarket:
        """Return everything that was collected, in order of time.

        Raises:
            BacktestRefused: there is nothing to play, or nothing that the job can use.
        """
        if self._first is None or self._last is None:
            raise BacktestRefused("the history is empty", hint="spotctl backtest --help names the formats of a history")
        if self._first == self._last:
            raise BacktestRefused(
                "the history holds one instant only, in which nothing can run",
                hint="record for longer than the job runs, or name another history",
            )
        if not self._series:
            sold = ", ".join(f"{gpu}:{count}" for gpu, count in sorted(self.seen)[:8]) or "nothing"
            raise BacktestRefused(
                "nothing in the history has the GPU that the job asks for",
                hint=f"the history holds {sold}; change gpu in the job, or name another history",
            )
        instants, known, prices = self._instants, self._known, self._prices
        order = range(len(instants))
        if any(instants[place] > instants[place + 1] for place in range(len(instants) - 1)):
            by_time = sorted(order, key=instants.__getitem__)
            instants = array("q", (instants[place] for place in by_time))
            known = array("q", (known[place] for place in by_time))
            prices = array("q", (prices[place] for place in by_time))
        return RecordedMarket(
            series=tuple(self._series),
            instants=instants,
            numbers=known,
            prices=prices,
            begins_at=self._first,
            ends_at=self._last,
        )


REQUIRED: Final = ("at", "provider", "offer", "gpu", "count", "price", "market")
OPTIONAL: Final = ("available", "on_demand_price", "storage_price", "pays_bid", "region", "host")
BIDS: Final = frozenset({"vast"})
"""Providers whose spot machines bill what was bid, where a history does not say."""
PRICE_MAX_USD: Final = 100_000
COUNT_MAX: Final = 1024
TEXT_MAX: Final = 200
_MICRO: Final = 1_000_000
_NAMES: Final = ("provider", "offer", "gpu", "count", "market")
_ONE: Final = frozenset({"1", ""})
_REMEMBERED: Final = 100_000
_TRUE: Final = frozenset({"true", "1", "yes"})
_FALSE: Final = frozenset({"false", "0", "no"})


class _BadCell(ValueError):
    """A value that cannot be used; the message reads on after its place."""


def read_csv(path: Path, reader: Reader, found: MarketCollector) -> None:
    """Read one file.

    Raises:
        BacktestRefused: naming file, line and column.
    """
    lines = _Numbered(reader.lines(path))
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        columns = [name.strip() for name in header]
        _require_columns(path, columns)
        series = _SeriesTable(found)
        width = len(columns)
        names = itemgetter(*(columns.index(name) for name in _NAMES))
        at, price = columns.index("at"), columns.index("price")
        available = columns.index("available") if "available" in columns else None
        for row in rows:
            if len(row) != width:
                if not row:
                    continue
                raise BacktestRefused(
                    f"{path}:{lines.number}: {len(row)} columns where the first line has {width}: the line is cut off",
                    hint="delete or complete the line",
                )
            key = names(row)
            if key not in series.numbers:
                series.enrol(key, dict(zip(columns, row, strict=True)))
            series.add(key, row[at], row[price], "1" if available is None else row[available])
    except csv.Error as exc:
        raise BacktestRefused(f"{path}:{lines.number}: {exc}", hint="delete or complete the line") from exc
    except _BadCell as exc:
        raise BacktestRefused(f"{path}:{lines.number}: {exc}", hint=_WAY_OUT) from exc


def read_json_lines(path: Path, reader: Reader, found: MarketCollector) -> None:
    """Read one file.

    Raises:
        BacktestRefused: naming file, line and key.
    """
    series = _SeriesTable(found)
    for number, text in reader.lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise BacktestRefused(
                f"{path}:{number}: not a JSON object: the line is cut off or damaged",
                hint="delete or complete the line",
            ) from exc
        try:
            if not isinstance(row, dict):
                raise _BadCell("not a JSON object")
            missing = [name for name in REQUIRED if name not in row and name != "price"]
            if missing:
                raise _BadCell(f"{missing[0]} is missing")
            unknown = sorted(set(row) - {*REQUIRED, *OPTIONAL})
            if unknown:
                raise _BadCell(_unknown_words(unknown[0]))
            cells = {key: "" if value is None else _cell(value) for key, value in row.items()}
            key = _key_of(cells)
            if key not in series.numbers:
                series.enrol(key, cells)
            series.add(key, cells["at"], cells.get("price", ""), cells.get("available", "1"))
        except _BadCell as exc:
            raise BacktestRefused(f"{path}:{number}: {exc}", hint=_WAY_OUT) from exc


_WAY_OUT: Final = "docs/how-to/backtest.md shows the format; correct or delete the line"


class _Numbered(Iterator[str]):
    """Lines, with the number of the newest."""

    def __init__(self, lines: Iterator[tuple[int, str]]) -> None:
        self._lines = lines
        self.number = 0

    def __next__(self) -> str:
        self.number, text = next(self._lines)
        return text


_key_of: Final = itemgetter(*_NAMES)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise _BadCell(f"a value is {type(value).__name__}, not text or a number")


def _require_columns(path: Path, columns: list[str]) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in {*REQUIRED, *OPTIONAL}]
    if missing:
        has = f"; it has {', '.join(columns[:12])}" if any(columns) else ""
        raise BacktestRefused(f"{path}:1: the column {missing[0]} is missing{has}", hint=_WAY_OUT)
    if unknown:
        raise BacktestRefused(f"{path}:1: {_unknown_words(unknown[0])}", hint=_WAY_OUT)
    if len(set(columns)) != len(columns):
        raise BacktestRefused(f"{path}:1: a column is there twice", hint=_WAY_OUT)


def _unknown_words(name: str) -> str:
    near = nearest(name, (*REQUIRED, *OPTIONAL))
    return f"{name[:40]!r} is no column of a history" + (f", did you mean {near}?" if near else "")


class _SeriesTable:
    """The rows of one file, in the order of the file; what repeats in them is understood once.

    Attributes:
        numbers: of each series by its names, `None` where the job can do nothing with it.
    """

    def __init__(self, found: MarketCollector) -> None:
        self.numbers: dict[tuple[str, ...], int | None] = {}
        self._found = found
        self._prices: dict[str, int] = {}
        self._newest = ""
        self._last = 0

    def enrol(self, names: tuple[str, ...], row: Mapping[str, str]) -> None:
        """Understand the columns that describe an offer."""
        self.numbers[names] = self._found.number_of(_offer(row))

    def add(self, names: tuple[str, ...], at: str, price: str, available: str) -> None:
        """Add one change."""
        if at != self._newest:
            self._last = self._instant(at)
            self._newest = at
            self._found.cover(self._last)
        number = self.numbers[names]
        if number is None:
            return
        if available not in _ONE and _whole("available", available, most=10**9) == 0:
            self._found.add(self._last, number, GONE)
            return
        amount = self._prices.get(price)
        if amount is None:
            if len(self._prices) > _REMEMBERED:
                self._prices.clear()
            amount = self._prices[price] = micro_dollars("price", price)
        self._found.add(self._last, number, amount)

    def _instant(self, text: str) -> int:
        at = instant_of(text)
        if at < self._last:
            raise _BadCell(f"its instant {text} is before that of a line above: sort the file by it")
        return at


def instant_of(text: str) -> int:
    """Return the Unix second of an ISO 8601 instant with a zone."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _BadCell(f"at {text[:40]!r} is no instant such as 2026-11-01T00:00:00Z") from None
    if at.tzinfo is None:
        raise _BadCell(f"at {text[:40]!r} has no time zone: write 2026-11-01T00:00:00Z") from None
    try:
        seconds = int(at.timestamp() // 1)
    except (OverflowError, ValueError):
        seconds = -1
    if not 0 <= seconds <= INSTANT_MAX:
        raise _BadCell(f"at {text[:40]!r} is not between 1970 and 2100")
    return seconds


def micro_dollars(name: str, text: str) -> int:
    """Return the micro-dollars of a price above 0."""
    try:
        value = float(text)
    except ValueError:
        raise _BadCell(f"{name} {text[:40]!r} is no number of dollars") from None
    if not math.isfinite(value) or not 0 < value <= PRICE_MAX_USD:
        raise _BadCell(f"{name} {text[:40]!r} is not between 0 and {PRICE_MAX_USD:,} dollars per hour")
    return max(1, round(value * _MICRO))


def _whole(name: str, text: str, *, least: int = 0, most: int) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 10 or not least <= int(digits) <= most:
        raise _BadCell(f"{name} {text[:40]!r} is no whole number from {least} to {most:,}")
    return int(digits)


def _text(name: str, text: str) -> str:
    value = text.strip()
    if not value or len(value) > TEXT_MAX:
        raise _BadCell(f"{name} {text[:40]!r} is empty or longer than {TEXT_MAX} characters")
    return value


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in _TRUE | _FALSE:
        raise _BadCell(f"{name} {text[:40]!r} is neither true nor false")
    return value in _TRUE


def _optional(row: Mapping[str, str], name: str, convert: Callable[[str, str], int]) -> int | None:
    text = row.get(name, "").strip()
    return convert(name, text) if text else None


def _offer(row: Mapping[str, str]) -> values.Offer:
    provider, name, gpu = (_text(key, row[key]) for key in ("provider", "offer", "gpu"))
    market = row["market"].strip()
    if market not in {kind.value for kind in values.Market}:
        raise _BadCell(f"market {market[:40]!r} is neither spot nor on-demand")
    is_spot = market == values.Market.SPOT.value
    bids = row.get("pays_bid", "").strip()
    on_demand = _optional(row, "on_demand_price", micro_dollars)
    host = row.get("host", "").strip()
    return recorded_offer(
        provider=provider,
        name=name,
        gpu=gpu,
        count=_whole("count", row["count"], least=0 if gpu == values.NO_GPU else 1, most=COUNT_MAX),
        market=values.Market(market),
        pays_bid=is_spot and (_flag("pays_bid", bids) if bids else provider in BIDS),
        on_demand=on_demand,
        storage=_optional(row, "storage_price", micro_dollars) or 0,
        region=row.get("region", "").strip()[:TEXT_MAX],
        host=_text("host", host) if host else None,
    )


def recorded_offer(
    *,
    provider: str,
    name: str,
    gpu: str,
    count: int,
    market: values.Market,
    pays_bid: bool = False,
    on_demand: int | None = None,
    storage: int = 0,
    region: str = "",
    host: str | None = None,
    pool: str | None = None,
) -> values.Offer:
    """Return the offer of a series; its price is in the changes."""
    canonical = gpus.canonical(provider, gpu)
    info = gpus.gpu_info(canonical)
    return values.Offer(
        provider=values.ProviderName(provider),
        offer_id=values.OfferId(name),
        host_id=None if host is None else values.HostId(host),
        pool=values.PoolId(pool or host or name),
        market=market,
        interruption=values.Interruption.SUDDEN if market is values.Market.SPOT else values.Interruption.NEVER,
        gpu=canonical,
        gpu_count=count,
        gpu_vram_mb=None if info is None else info.vram_gb[0] * 1024,
        gpu_price=values.MicroUsdPerHour(0),
        pays_bid=pays_bid,
        on_demand_price=None if on_demand is None else values.MicroUsdPerHour(on_demand),
        storage_price=values.MicroUsdPerGbMonth(storage),
        region=region,
    )
