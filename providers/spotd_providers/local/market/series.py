"""Price sources: price and availability at any instant, and when they change next.

Theory. A market that restarts must have the same past and the same future, so a price is never the state of a
process: it is a pure function of (seed, host, time). The made-up series is a first-order autoregression of the
logarithm around a daily and weekly shape. Its shocks are hashes of (seed, host, tick), and the sum over past shocks is
cut after they have faded below a thousandth, which makes a value computable from nothing but its tick. Shocks are
bounded, so the deviation is bounded too: prices revert by construction.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from spotd_providers.contract.values import MicroUsdPerHour, micro_usd
from spotd_providers.local.settings import CsvPrice, FixedPrice, Flavour, HostSpec, PriceSpec, SeededPrice, TracePrice

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REVERSION: Final = timedelta(minutes=90)
"""How long it takes until a deviation has faded to a third."""
_FADED: Final = 0.001
_PLENTY: Final = 1_000_000
_SPIKE_WINDOW: Final = timedelta(hours=6)
_STOCK_OUT_WINDOW: Final = timedelta(hours=12)
_SHARE_MIN, _SHARE_MAX = 0.3, 4.0


class BadPriceFile(Exception):
    """A price file that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Price and availability from now until the source changes next."""

    price: MicroUsdPerHour
    available: int


class PriceSource(Protocol):
    """Price and availability of one host's spot machines."""

    def at(self, now: datetime) -> Tick: ...

    def next_change(self, now: datetime) -> datetime | None:
        """Return the first instant after `now` at which the tick may differ; `None` if never."""
        ...


def price_source(spec: PriceSpec, *, seed: int, host: HostSpec, opened_at: datetime) -> PriceSource:
    """Build the source that a price specification describes, for this host.

    Raises:
        BadPriceFile: its file is missing or makes no sense.
    """
    if isinstance(spec, FixedPrice):
        return Steps(times=[opened_at], ticks=[Tick(price=MicroUsdPerHour(spec.price), available=_PLENTY)])
    if isinstance(spec, SeededPrice):
        return Seeded(spec, seed=seed, host=host.name, utc_offset_h=host.utc_offset_h)
    try:
        if isinstance(spec, CsvPrice):
            return _read_csv(spec.path, spec.start or opened_at)
        return _read_trace(spec, opened_at)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as exc:
        raise BadPriceFile(f"price file {spec.path} of host {host.name}: {type(exc).__name__}: {exc}") from exc


class Seeded:
    """The made-up series."""

    def __init__(self, spec: SeededPrice, *, seed: int, host: str, utc_offset_h: float = 0) -> None:
        self._spec = spec
        self._name = f"{seed}/{host}"
        self._offset = timedelta(hours=utc_offset_h)
        self._tick = spec.tick
        self._decay = math.exp(-spec.tick / _REVERSION)
        self._memory = max(1, math.ceil(math.log(_FADED) / math.log(self._decay)))
        fading = math.sqrt(1 - self._decay**2)
        self._weights = [fading * self._decay**age for age in range(self._memory)]
        self._tick_at = lru_cache(maxsize=512)(self._compute)
        # Neighbouring ticks share all but one of their shocks.
        self._shock_at = lru_cache(maxsize=1024)(self._shock)

    def at(self, now: datetime) -> Tick:
        return self._tick_at((now - _EPOCH) // self._tick)

    def next_change(self, now: datetime) -> datetime:
        return _EPOCH + ((now - _EPOCH) // self._tick + 1) * self._tick

    def deviation(self, number: int) -> float:
        """Compute the autoregression at a tick, in standard deviations."""
        return sum(weight * self._shock_at(number - age) for age, weight in enumerate(self._weights))

    def shape(self, now: datetime) -> float:
        """Compute the part of the price that clock and calendar explain: 1 on a weekday noon."""
        local = now + self._offset
        hour = local.hour + local.minute / 60
        # Deepest at 03:30 local time, nothing at 15:30.
        night = (1 + math.cos((hour - 3.5) / 24 * 2 * math.pi)) / 2
        weekend = self._spec.weekend if local.weekday() >= 5 else 0.0
        return (1 - self._spec.night * night) * (1 - weekend)

    def _compute(self, number: int) -> Tick:
        now = _EPOCH + number * self._tick
        share = self.shape(now) * math.exp(self._spec.volatility * self.deviation(number))
        share *= 1 + self._burst("spike", self._spec.spikes, _SPIKE_WINDOW, now)
        out = self._burst("stock-out", self._spec.stock_outs, _STOCK_OUT_WINDOW, now)
        price = math.ceil(self._spec.base * min(max(share, _SHARE_MIN), _SHARE_MAX) / 100) * 100
        return Tick(price=MicroUsdPerHour(price), available=0 if out else _PLENTY)

    def _burst(self, kind: str, chance: float, window: timedelta, now: datetime) -> float:
        """Return the strength of the burst that this window may hold, if it is on now; else 0."""
        number = (now - _EPOCH) // window
        if self._uniform(kind, number) >= chance:
            return 0.0
        length = window * (0.04 + 0.18 * self._uniform(f"{kind} length", number))
        begins = _EPOCH + number * window + (window - length) * self._uniform(f"{kind} start", number)
        if not begins <= now < begins + length:
            return 0.0
        return 0.5 + 1.5 * self._uniform(f"{kind} height", number)

    def _shock(self, number: int) -> float:
        """Return a uniform shock with mean 0 and variance 1, so a bounded one."""
        return (self._uniform("shock", number) - 0.5) * math.sqrt(12)

    def _uniform(self, what: str, number: int) -> float:
        digest = hashlib.blake2b(f"{self._name}/{what}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


class Steps:
    """A list of instants from which on something else holds."""

    def __init__(self, *, times: list[datetime], ticks: list[Tick]) -> None:
        self._times = times
        self._ticks = ticks

    def at(self, now: datetime) -> Tick:
        return self._ticks[max(0, bisect_right(self._times, now) - 1)]

    def next_change(self, now: datetime) -> datetime | None:
        index = bisect_right(self._times, now)
        return self._times[index] if index < len(self._times) else None


class Replay:
    """A recorded trace that begins at `start` and begins again after its end."""

    def __init__(self, *, start: datetime, gap: timedelta, ticks: list[Tick]) -> None:
        self._start = start
        self._gap = gap
        self._ticks = ticks
        # Where the recording says something new, so that no task wakes up for a tick that changes nothing.
        self._changes = [0, *(number for number, (a, b) in enumerate(pairwise(ticks), start=1) if a != b)]

    def at(self, now: datetime) -> Tick:
        return self._ticks[((now - self._start) // self._gap) % len(self._ticks)]

    def next_change(self, now: datetime) -> datetime:
        turn, number = divmod((now - self._start) // self._gap, len(self._ticks))
        index = bisect_right(self._changes, number)
        ahead = self._changes[index] if index < len(self._changes) else len(self._ticks)
        return self._start + (turn * len(self._ticks) + ahead) * self._gap


def _read_csv(path: Path, start: datetime) -> Steps:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if not rows:
        raise ValueError("no rows below the header")
    times: list[datetime] = []
    ticks: list[Tick] = []
    for row in rows:
        times.append(_csv_time(row["time"], start))
        available = row.get("available")
        ticks.append(
            Tick(
                price=MicroUsdPerHour(micro_usd(row["price"])),
                available=int(available) if available not in (None, "") else _PLENTY,
            )
        )
    if any(later <= earlier for earlier, later in pairwise(times)):
        raise ValueError("the times do not grow from row to row")
    return Steps(times=times, ticks=ticks)


def _csv_time(text: str, start: datetime) -> datetime:
    try:
        return start + timedelta(seconds=float(text))
    except ValueError:
        instant = datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return instant.astimezone(UTC)


def _read_trace(spec: TracePrice, opened_at: datetime) -> Replay:
    raw = spec.path.read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(raw) if spec.path.suffix == ".gz" else raw)
    metadata, counts = content["metadata"], content["data"]
    gap = timedelta(seconds=metadata["gap_seconds"])
    prices = content.get("prices")
    if prices is None:
        constant = metadata.get("spot_price_usd_h")
        if spec.price is None and constant is None:
            raise ValueError("it holds no prices; give the host's spot a price")
        micro = spec.price if spec.price is not None else micro_usd(constant)
        ticks = [Tick(price=MicroUsdPerHour(micro), available=int(count)) for count in counts]
    else:
        ticks = [
            Tick(price=MicroUsdPerHour(micro_usd(price)), available=int(count))
            for price, count in zip(prices, counts, strict=True)
        ]
    if not ticks or gap <= timedelta(0) or any(tick.available < 0 for tick in ticks):
        raise ValueError("it holds no ticks, no length of a tick, or a negative count")
    start = (spec.start or opened_at) - spec.first_tick * gap
    return Replay(start=start, gap=gap, ticks=ticks)


# The hosts of a market without a configuration, similar to what is really sold.


def _marketplace(name: str, gpu: str, vram_gb: int, base: float, **more: Any) -> HostSpec:
    """Build a host of a bid market: cheap, sudden, with prices on traffic."""
    return HostSpec(
        name=name,
        gpu=gpu,
        vram_mb=vram_gb * 1024,
        flavour=Flavour.SUDDEN,
        spot=SeededPrice(base=base),
        on_demand=round(base * 1.7, 4),
        storage_gb_month=0.15,
        upload_gb=0.004,
        download_gb=0.002,
        **more,
    )


def _cloud(name: str, gpu: str, vram_gb: int, base: float, on_demand: float, **more: Any) -> HostSpec:
    """Build a pool of a large cloud: higher prices, fewer interruptions, two minutes of notice."""
    return HostSpec(
        name=name,
        gpu=gpu,
        vram_mb=vram_gb * 1024,
        flavour=Flavour.NOTICE,
        spot=SeededPrice(base=base, volatility=0.04, night=0.12, weekend=0.06, spikes=0.05),
        on_demand=on_demand,
        storage_gb_month=0.08,
        upload_gb=0.02,
        reliability=0.999,
        **more,
    )


BUILTIN_HOSTS: Final[tuple[HostSpec, ...]] = (
    _marketplace("kyiv-4090", "RTX_4090", 24, 0.29, region="eu-ua", utc_offset_h=2),
    _marketplace("oslo-4090", "RTX_4090", 24, 0.34, region="eu-no", utc_offset_h=1, reliability=0.995),
    _marketplace("taipei-4090x4", "RTX_4090", 24, 1.26, gpu_count=4, region="asia-tw", utc_offset_h=8),
    _marketplace("texas-3090", "RTX_3090", 24, 0.16, region="us-tx", utc_offset_h=-6, reliability=0.97),
    _marketplace("lyon-5090", "RTX_5090", 32, 0.46, region="eu-fr", utc_offset_h=1),
    _marketplace("quebec-a100", "A100_SXM_80", 80, 0.82, region="ca-qc", utc_offset_h=-5, reliability=0.995),
    _marketplace("utah-h100", "H100_SXM", 80, 1.72, region="us-ut", utc_offset_h=-7),
    _marketplace("frankfurt-h100x8", "H100_SXM", 80, 14.2, gpu_count=8, region="eu-de", utc_offset_h=1, cpus=128),
    _cloud("us-east-1a-l4", "L4", 24, 0.33, 0.80, region="us-east-1", utc_offset_h=-5, slots=4),
    _cloud("us-east-1b-a10g", "A10G", 24, 0.44, 1.01, region="us-east-1", utc_offset_h=-5, slots=4),
    _cloud("us-west-2a-l40s", "L40S", 48, 0.79, 1.86, region="us-west-2", utc_offset_h=-8, slots=2),
    _cloud("eu-north-1a-h100", "H100_SXM", 80, 2.35, 4.33, region="eu-north-1", utc_offset_h=1, slots=2),
)
