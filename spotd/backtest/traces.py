"""Traces of availability: one JSON document for each place, as published spot traces have it.

    {"metadata": {"gap_seconds": 600, "zone": "us-west-2a", "accelerator": "V100", "gpus": 1,
                  "start_time_utc": "2023-02-15T22:08:16Z", "spot_price_usd_h": 0.97, "on_demand_price_usd_h": 3.06},
     "data": [1, 1, 0, ...], "prices": [0.9731, 0.9731, ...]}

`data[i]` is the number of machines that could be had during tick `i`, `prices[i]` the spot price of one then, in
dollars per hour. Where a trace does not say what it sells or for how much, the user does (`TraceDefaults`), or the name
of the file (`us-west-2a_v100_8.json`). An on-demand machine can be had at any time where its price is known.

Recorded lists, traces among them, are also statements that the price history takes over (`read_lists`): what each offer
cost in the span of the list. The readers are those of a back-test, and so are their bounds and sentences. What is older
than prices are kept, or dated after now, is left out and counted.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from spotd.backtest import rows
from spotd.backtest.recorded import BYTES_MAX, GONE, UNKNOWN, BacktestRefused, Reader, RecordedMarket, instant
from spotd.backtest.rows import MarketCollector
from spotd.history import HISTORY_FILE, IMPORTED_FILE
from spotd.history.file import Spell, Watch
from spotd.history.reading import PastUnreadable, WholePast, read_past
from spotd_jobs.spec.model import GpuAlternative
from spotd_providers.contract.values import Market, Offer, ProviderName

PROVIDER: Final = "trace"
TICKS_MAX: Final = 10_000_000
GAP_MAX_S: Final = 86_400
BEGINS_AT: Final = 1_577_836_800
"""2020-01-01, where a trace does not say when it began."""
_NAMED: Final = re.compile(r"(?P<zone>.+)_(?P<gpu>[A-Za-z0-9-]+)_(?P<count>[0-9]{1,2})")
_MACHINE_GPUS: Final = re.compile(r"-(?P<count>[0-9]{1,2})g$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDefaults:
    """What the user says of traces that do not say it: what is sold, and its prices in micro-dollars per hour."""

    sells: GpuAlternative | None = None
    spot_price: int | None = None
    on_demand_price: int | None = None


def read_trace(path: Path, reader: Reader, found: rows.MarketCollector, defaults: TraceDefaults) -> list[str]:
    """Read one file; return what had to be assumed, in sentences.

    Raises:
        BacktestRefused: naming the file and the key.
    """
    try:
        document = json.loads(reader.document(path))
    except (ValueError, RecursionError) as exc:
        raise BacktestRefused(f"{path}: not JSON: the file is cut off or damaged", hint="copy it again") from exc
    try:
        return _Trace(path, document, defaults).add_to(found)
    except ValueError as exc:
        raise BacktestRefused(f"{path}: {exc}", hint="docs/how-to/backtest.md shows what a trace holds") from exc


class _Trace:
    def __init__(self, path: Path, document: Any, defaults: TraceDefaults) -> None:
        if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
            raise ValueError("no trace: it has no metadata")
        self._metadata: Mapping[str, Any] = document["metadata"]
        self._path = path
        self._defaults = defaults
        self._named = _NAMED.fullmatch(path.name.removesuffix(".gz").removesuffix(".json"))
        self._data = _list(document, "data")
        self._prices = _list(document, "prices") if "prices" in document else None
        if self._prices is not None and len(self._prices) != len(self._data):
            raise ValueError(f"prices has {len(self._prices)} ticks, data has {len(self._data)}")
        gap = self._metadata.get("gap_seconds")
        if isinstance(gap, bool) or not isinstance(gap, int | float) or not 0 < gap <= GAP_MAX_S:
            raise ValueError(f"gap_seconds {gap!r} is no number of seconds from 1 to {GAP_MAX_S:,}")
        self._gap = float(gap)
        if not self._data:
            raise ValueError("data is empty")

    def add_to(self, found: rows.MarketCollector) -> list[str]:
        notes: list[str] = []
        gpu = self._gpu()
        zone = str(self._metadata.get("zone") or (self._named["zone"] if self._named else self._path.name))[:100]
        began = self._metadata.get("start_time_utc")
        begins_at = BEGINS_AT
        if began is None:
            notes.append(f"{self._path.name} does not say when it began: taken to be 2020-01-01")
        else:
            begins_at = rows.instant_of(str(began))
        on_demand = self._amount_at("on_demand_price_usd_h", self._defaults.on_demand_price)
        place = partial(
            rows.recorded_offer, provider=PROVIDER, gpu=gpu.name, count=gpu.count, on_demand=on_demand, region=zone
        )
        spot = found.number_of(place(name=f"{zone} spot", market=Market.SPOT, pool=zone))
        last = begins_at
        before: int | None = None
        flat = None if self._prices is not None else self._flat_price()
        for tick, available in enumerate(self._data):
            if isinstance(available, bool) or not isinstance(available, int) or available < 0:
                raise ValueError(f"data[{tick}] {available!r} is no number of machines")
            last = begins_at + math.floor(tick * self._gap)
            price = GONE
            if available:
                price = flat if flat is not None else self._price(tick)
            if price != before and spot is not None:
                found.add(last, spot, price)
            before = price
        found.cover(begins_at)
        found.cover(begins_at + math.floor(len(self._data) * self._gap))
        if on_demand is not None:
            always = found.number_of(place(name=f"{zone} on-demand", market=Market.ON_DEMAND))
            if always is not None:
                found.add(begins_at, always, on_demand)
        return notes

    def _gpu(self) -> GpuAlternative:
        if self._defaults.sells is not None:
            return self._defaults.sells
        name = self._metadata.get("accelerator") or (self._named and self._named["gpu"])
        count = self._metadata.get("gpus") or (self._named and int(self._named["count"]))
        machine = _MACHINE_GPUS.search(str(self._metadata.get("machine_type_priced", "")))
        if not count and machine:
            count = int(machine["count"])
        if not name or not isinstance(count, int) or not 1 <= count <= rows.COUNT_MAX:
            raise BacktestRefused(
                f"{self._path} does not say which GPU it sells, or how many in one machine",
                hint="give it: --sells H100:8",
            )
        return GpuAlternative(name=str(name)[:80], count=count)

    def _amount_at(self, key: str, default: int | None) -> int | None:
        value = self._metadata.get(key)
        return default if value is None else rows.micro_dollars(key, str(value))

    def _flat_price(self) -> int:
        price = self._amount_at("spot_price_usd_h", self._defaults.spot_price)
        if price is None:
            raise BacktestRefused(
                f"{self._path} holds no prices", hint="give the price of a machine: --spot-price 0.97"
            )
        return price

    def _price(self, tick: int) -> int:
        prices = self._prices or ()
        return rows.micro_dollars(f"prices[{tick}]", str(prices[tick]))


def _list(document: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    if len(value) > TICKS_MAX:
        raise ValueError(f"{key} holds more than {TICKS_MAX:,} ticks")
    return value


# The daemon's own price history as a recorded market.
#
# What was not polled is not known: nothing can be launched then, and what runs goes on. An offer that is not there when
# polling resumes has gone meanwhile.


def _read_imports(path: Path, found: rows.MarketCollector) -> list[str]:
    """Read what was imported beside the daemon's own prices, for the time in which it did not poll."""
    imports = path.with_name(IMPORTED_FILE)
    if not imports.exists():
        return []
    polled: dict[ProviderName, Sequence[Watch]] = {}
    read_past(path, lambda _gpu, _count: False, lambda past: polled.update(past.watches))
    return [
        *read_price_history(imports, found, apart_from=polled),
        f"what {path.name} does not hold is taken from {imports.name}: these prices were imported",
    ]


def read_price_history(
    path: Path, found: rows.MarketCollector, *, apart_from: Mapping[ProviderName, Sequence[Watch]] | None = None
) -> list[str]:
    """Read the file; return what is coarser than it was, in sentences.

    Raises:
        BacktestRefused: naming the file.
    """
    notes: list[str] = []

    def take(past: WholePast) -> None:
        for spans in past.watches.values():
            for since, until in spans:
                found.cover(since)
                found.cover(until)
        for gpu, count in past.kinds:
            found.seen.setdefault((gpu, count), 1)
        is_coarse = False
        for one in past.offers:
            is_spot = one.market is Market.SPOT
            number = found.number_of(
                rows.recorded_offer(
                    provider=one.provider,
                    name=one.offer,
                    gpu=one.gpu,
                    count=one.gpu_count,
                    market=one.market,
                    pays_bid=is_spot and one.provider in rows.BIDS,
                    storage=one.storage,
                    pool=one.pool,
                )
            )
            if number is None:
                continue
            is_coarse = is_coarse or any(since < past.exact_from for since, _, _ in one.spells)
            for at, price in changes_of(one.spells, past.watches.get(one.provider, ())):
                found.add(at, number, price)
        if is_coarse:
            exact = datetime.fromtimestamp(past.exact_from, UTC)
            notes.append(
                f"before {exact:%Y-%m-%d %H:%M} UTC {path.name} holds one price for each offer and quarter of a day"
            )

    try:
        read_past(path, found.is_wanted, take, apart_from=apart_from)
    except PastUnreadable as exc:
        raise BacktestRefused(f"{path}: {exc}", hint="spotctl doctor, or another --history") from exc
    return notes


def changes_of(spells: Sequence[Spell], watches: Sequence[Watch]) -> Iterator[tuple[int, int]]:
    """Yield instant and price of each change of an offer, where what was not watched is unknown."""
    starts = [since for since, _, _ in spells]
    for since, until in watches:
        place = bisect_left(starts, since)
        if place and spells[place - 1][1] > since:
            place -= 1
        at = since
        while place < len(spells) and spells[place][0] < until:
            begins, ends, price = spells[place]
            if begins > at:
                yield at, GONE
            yield max(begins, at), price
            at = min(ends, until)
            place += 1
        if at < until:
            yield at, GONE
        yield until, UNKNOWN


# A folder or file with a history, in whichever of the formats it is.


FILES_MAX: Final = 10_000
_FORMATS: Final = ".csv, .jsonl, .json (a trace), each also as .gz, or .sqlite (a price history of spotd)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRead:
    """A recorded market, and what a reader of its results must know of how it was read."""

    market: RecordedMarket
    notes: tuple[str, ...]


def read_history(place: Path, is_wanted: Callable[[str, int], bool], defaults: TraceDefaults) -> HistoryRead:
    """Read everything of one folder, or one file.

    Raises:
        BacktestRefused: naming what is wrong, its place and a way out.
    """
    found = rows.MarketCollector(is_wanted)
    notes = read_into(place, found, defaults)
    return HistoryRead(market=found.market(), notes=tuple(notes))


def read_into(place: Path, found: rows.MarketCollector, defaults: TraceDefaults) -> list[str]:
    """Read everything of one folder, or one file; return what had to be assumed, in sentences.

    Raises:
        BacktestRefused: naming what is wrong, its place and a way out.
    """
    reader = Reader()
    notes: list[str] = []
    files = _files(place)
    traces = [path for path in files if _kind(path) == ".json"]
    for path in files:
        kind = _kind(path)
        if kind == ".csv":
            try:
                rows.read_csv(path, reader, found)
            except BacktestRefused as exc:
                if not traces or ":1: the column" not in exc.message:
                    raise
                notes.append(f"{path.name} is left out: it has not the columns of a history")
        elif kind == ".jsonl":
            rows.read_json_lines(path, reader, found)
        elif kind == ".sqlite":
            if path == place and path.name == HISTORY_FILE:
                notes.extend(_read_imports(path, found))
            notes.extend(read_price_history(path, found))
        else:
            notes.extend(read_trace(path, reader, found, defaults))
    return notes


def _files(place: Path) -> list[Path]:
    try:
        if place.is_dir():
            files = sorted(path for path in place.iterdir() if _kind(path) and path.is_file())
            _require_no_way_out(place, files)
        elif place.exists():
            files = [place] if _kind(place) and place.is_file() else []
        else:
            raise BacktestRefused(f"{place} does not exist", hint="--history DIR, or --history own")
        size = sum(path.stat().st_size for path in files)
    except OSError as exc:
        raise BacktestRefused(f"{place}: {exc.strerror}", hint="check the folder and its permissions") from exc
    if not files:
        raise BacktestRefused(f"{place} holds no history", hint=f"a history is a file that ends in {_FORMATS}")
    if size > BYTES_MAX:
        raise BacktestRefused(
            f"{place} holds {size / 10**9:.1f} GB, more than the {BYTES_MAX // 10**9} GB that are read",
            hint="give a folder with fewer files, such as the last month",
        )
    if len(files) > FILES_MAX:
        raise BacktestRefused(f"{place} holds {len(files):,} files", hint=f"put them into at most {FILES_MAX:,}")
    return files


def _require_no_way_out(place: Path, files: list[Path]) -> None:
    """Require that no link leads out of the folder: an error shows a piece of the line that it is about.

    Raises:
        BacktestRefused: one does.
    """
    inside = place.resolve()
    for path in files:
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise BacktestRefused(f"{path} is a link that leads out of the folder", hint="put the file itself there")


def _kind(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    ending = Path(name).suffix
    return ending if ending in {".csv", ".jsonl", ".json", ".sqlite"} and not name.startswith(".") else ""


OFFERS_AT_ONCE: Final = 500
CHANGES_AT_ONCE: Final = 20_000
"""Of one request: half a megabyte of JSON."""


class _Recent(MarketCollector):
    """Collects the changes of a span; of those before it only the price that holds at its beginning.

    Attributes:
        too_old, ahead: lines that were left out, as they are before the span or after it.
        newest: the second of the last line that is not after it, -1 before there is one.
    """

    def __init__(self, since: int, now: int) -> None:
        super().__init__(lambda _gpu, count: count > 0)
        self._since = since
        self._now = now
        self._newest: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self.too_old = self.ahead = 0
        self.newest = -1

    def add(self, at: int, number: int, price: int) -> None:
        """Add a change; what changes nothing costs no memory."""
        if at >= self._now:
            self.ahead += 1
            return
        self.newest = max(self.newest, at)
        if at < self._since:
            self.too_old += 1
            self._held[number] = price
            return
        if number in self._held:
            self._put(self._since, number, self._held.pop(number))
        self._put(at, number, price)

    def _put(self, at: int, number: int, price: int) -> None:
        if self._newest.get(number) != price:
            self._newest[number] = price
            super().add(at, number, price)

    def finish(self) -> None:
        """Add what held from the beginning on and never changed after it."""
        for number, price in self._held.items():
            self._put(self._since, number, price)
        self._held.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrices:
    """What was read of recorded lists.

    Attributes:
        notes: what a reader of the result must know, in sentences.
        prices: how many changes the requests hold.
        requests: bodies for the daemon, each whole for its offers.
    """

    notes: tuple[str, ...]
    prices: int
    since: int
    until: int
    offers: tuple[Offer, ...]
    _changes: Mapping[int, list[tuple[int, int]]] = field(repr=False)

    def requests(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each body, and how many changes it holds."""
        rows: list[dict[str, Any]] = []
        size = 0
        for number, changes in self._changes.items():
            if rows and (len(rows) >= OFFERS_AT_ONCE or size + len(changes) > CHANGES_AT_ONCE):
                yield {"since_s": self.since, "until_s": self.until, "offers": rows}, size
                rows, size = [], 0
            if len(changes) > CHANGES_AT_ONCE:
                yield from self._parts(number, changes)
                continue
            rows.append(_row(self.offers[number], changes))
            size += len(changes)
        if rows:
            yield {"since_s": self.since, "until_s": self.until, "offers": rows}, size

    def _parts(self, number: int, changes: list[tuple[int, int]]) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield an offer with very many changes in spans, one after another."""
        for start in range(0, len(changes), CHANGES_AT_ONCE):
            some = changes[start : start + CHANGES_AT_ONCE]
            rest = changes[start + CHANGES_AT_ONCE : start + CHANGES_AT_ONCE + 1]
            since = self.since if start == 0 else some[0][0]
            until = rest[0][0] if rest else self.until
            yield {"since_s": since, "until_s": until, "offers": [_row(self.offers[number], some)]}, len(some)


def _row(offer: Offer, changes: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "provider": offer.provider,
        "offer": offer.offer_id,
        "pool": offer.pool,
        "gpu": offer.gpu,
        "count": offer.gpu_count,
        "market": offer.market.value,
        "storage_microusd_gb_month": offer.storage_price,
        "changes": [[at, price if price > 0 else None] for at, price in changes],
    }


def read_lists(place: Path, *, since: int, now: int, defaults: TraceDefaults) -> RecordedPrices:
    """Read a folder or a file of recorded prices, from an instant on.

    Raises:
        BacktestRefused: naming what is wrong, its place and a way out.
    """
    found = _Recent(since, now)
    notes = read_into(place, found, defaults)
    if found.too_old and found.newest < since:
        raise BacktestRefused(
            f"{place} ends on {instant(found.newest):%Y-%m-%d}, before the time to import, which begins on "
            f"{instant(since):%Y-%m-%d}",
            hint="prices are kept for 90 days; spotctl backtest --history reads older lists as they are",
        )
    found.finish()
    if found.too_old:
        notes.append(f"{found.too_old:,} changes are older than prices are kept, and left out")
    if found.ahead:
        notes.append(f"{found.ahead:,} changes are dated after now, and left out")
    if not found.has_changes:
        return RecordedPrices(notes=tuple(notes), prices=0, since=since, until=now, offers=(), _changes={})
    market = found.market()
    changes: dict[int, dict[int, int]] = {}
    for at, number, price in zip(market.instants, market.numbers, market.prices, strict=True):
        changes.setdefault(number, {})[at] = price  # of several in one second the last holds
    by_series = {number: list(own.items()) for number, own in changes.items()}
    return RecordedPrices(
        notes=tuple(notes),
        prices=sum(map(len, by_series.values())),
        since=max(market.begins_at, since),
        until=min(market.ends_at + 1, now),
        offers=market.series,
        _changes=by_series,
    )
