"""Traces of availability: one JSON document for each place, as published spot traces have it.

    {"metadata": {"gap_seconds": 600, "zone": "us-west-2a", "accelerator": "V100", "gpus": 1,
                  "start_time_utc": "2023-02-15T22:08:16Z", "spot_price_usd_h": 0.97, "on_demand_price_usd_h": 3.06},
     "data": [1, 1, 0, ...], "prices": [0.9731, 0.9731, ...]}

`data[i]` is the number of machines that could be had during tick `i`, `prices[i]` the spot price of one then, in
dollars per hour. Where a trace does not say what it sells or for how much, the user does (`TraceDefaults`), or the name
of the file (`us-west-2a_v100_8.json`). An on-demand machine can be had at any time where its price is known.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from spotd.backtest.collecting import MarketCollector
from spotd.backtest.recorded import GONE
from spotd.backtest.refusals import BacktestRefused
from spotd.backtest.rows import COUNT_MAX, instant_of, micro_dollars, recorded_offer
from spotd.backtest.texts import Reader
from spotd_jobs.spec.model import GpuAlternative
from spotd_providers.contract.values import Market

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


def read_trace(path: Path, reader: Reader, found: MarketCollector, defaults: TraceDefaults) -> list[str]:
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

    def add_to(self, found: MarketCollector) -> list[str]:
        notes: list[str] = []
        gpu = self._gpu()
        zone = str(self._metadata.get("zone") or (self._named["zone"] if self._named else self._path.name))[:100]
        began = self._metadata.get("start_time_utc")
        begins_at = BEGINS_AT
        if began is None:
            notes.append(f"{self._path.name} does not say when it began: taken to be 2020-01-01")
        else:
            begins_at = instant_of(str(began))
        on_demand = self._stated("on_demand_price_usd_h", self._defaults.on_demand_price)
        place = partial(
            recorded_offer, provider=PROVIDER, gpu=gpu.name, count=gpu.count, on_demand=on_demand, region=zone
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
        if not name or not isinstance(count, int) or not 1 <= count <= COUNT_MAX:
            raise BacktestRefused(
                f"{self._path} does not say which GPU it sells, or how many in one machine",
                hint="give it: --sells H100:8",
            )
        return GpuAlternative(name=str(name)[:80], count=count)

    def _stated(self, key: str, default: int | None) -> int | None:
        value = self._metadata.get(key)
        return default if value is None else micro_dollars(key, str(value))

    def _flat_price(self) -> int:
        price = self._stated("spot_price_usd_h", self._defaults.spot_price)
        if price is None:
            raise BacktestRefused(
                f"{self._path} holds no prices", hint="give the price of a machine: --spot-price 0.97"
            )
        return price

    def _price(self, tick: int) -> int:
        prices = self._prices or ()
        return micro_dollars(f"prices[{tick}]", str(prices[tick]))


def _list(document: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = document.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is no list")
    if len(value) > TICKS_MAX:
        raise ValueError(f"{key} holds more than {TICKS_MAX:,} ticks")
    return value
