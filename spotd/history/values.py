"""What is asked of the history and what it answers. Instants inside this package are whole Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from spotd_providers.contract.money import MicroUsdPerGpuHour
from spotd_providers.contract.values import Market, ProviderName

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
    """

    start: int
    begins: int
    low: MicroUsdPerGpuHour
    quantiles: tuple[MicroUsdPerGpuHour, ...]
    high: MicroUsdPerGpuHour
    offers: float


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
