"""What vast.ai's metrics state: what a GPU cost in the past, and what benchmarks have measured of it.

Past prices are percentiles of its market, hour by hour: vast.ai keeps none of single offers. Each percentile of what
could be had is given as an offer of one GPU, of equal weight, on demand: an approximation of the market that the
figures are of. An account without a machine of its own to rent out may be shown none.

Workers of vast.ai's serverless groups measure the machine that they run on, each with the test of its template, so that
figures of one template can be compared and no others. One host can state anything: a GPU counts where `HOSTS_MIN`
machines measured it, with their median.

Source of benchmarks: `search benchmarks` of vast.ai's official client, and its API reference for the names of the older
version (`name`, `model`, `score` for `template_hash` and `value`). The unit of a figure is nowhere stated; more is
faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median_low
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from spotd_providers.contract.errors import NotSupported, ProviderError
from spotd_providers.contract.gpus import GPUS, canonical
from spotd_providers.contract.provider import Clock, OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import (
    Benchmark,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    OfferId,
    PoolId,
    micro_usd,
)
from spotd_providers.kit.calls import judge_apart, past_page
from spotd_providers.kit.shapes import Lenient, Row, as_model, row_or_none
from spotd_providers.kit.text import clean
from spotd_providers.vastai.client import VastClient, as_json
from spotd_providers.vastai.offers import PROVIDER
from spotd_providers.vastai.wire import BENCHMARKS, METRICS, WHO, Id, Measure, Text

NAMES_AT_ONCE: Final = 8
STEP: Final = timedelta(hours=1)
KEPT: Final = timedelta(days=90)
POINTS_MAX: Final = 10_000
"""Of one GPU: an hourly figure for more than a year."""
PRICE_MAX: Final = 10_000.0
SHARES: Final = ("p10", "median", "p90")
NAMES: Final = tuple(sorted({name for row in GPUS for name in row.vast}))
_Price = Annotated[float | None, Lenient]
_Prices = Annotated[list[_Price], Field(max_length=POINTS_MAX)]


class _Pricing(Row):
    timestamps: Annotated[list[Annotated[int | None, Lenient]], Field(max_length=POINTS_MAX)]
    avail_p10: _Prices = Field(default_factory=list)
    avail_median: _Prices = Field(default_factory=list)
    avail_p90: _Prices = Field(default_factory=list)


class _Metrics(Row):
    pricing: _Pricing


class _HistoryReply(Row):
    needs_machine: bool = False
    gpus: dict[str, Any] | list[Any] = Field(default_factory=dict)


class VastPriceHistory:
    """`Power.PRICE_HISTORY`. A page is a few GPUs; the name of the first is the cursor."""

    _client: VastClient
    _services: Services

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what some GPUs have cost.

        Raises:
            NotSupported: vast.ai shows it only to accounts with a machine.
        """
        now = self._services.clock.now()
        page = past_page(NAMES, since, now, after=after, kept=KEPT, who=WHO, size=NAMES_AT_ONCE)
        params: dict[str, str | int] = {
            "gpu_name": ",".join(page.names),
            "start": int(page.since.timestamp()),
            "end": int(page.until.timestamp()),
            "step": int(STEP.total_seconds()),
        }
        value = await self._client.ask("GET", "/api/v0/metrics/gpu/history/", what=METRICS, params=params)
        reply = as_model(_HistoryReply, value, who=WHO, what="past prices")
        if reply.needs_machine:
            raise NotSupported("vast.ai shows its price history only to accounts that have a machine to rent out")
        return page.answer(*offers_of_past(reply.gpus if isinstance(reply.gpus, dict) else {}))


def offers_of_past(gpus: Mapping[str, Any]) -> tuple[tuple[OfferPriceHistory, ...], int]:
    """Return each percentile of each GPU as an offer, and how many GPUs cannot be used."""
    offers: list[OfferPriceHistory] = []
    rejected = 0
    for name, raw in list(gpus.items())[: len(NAMES)]:
        try:
            # Not row_or_none: three months of hours are more values than any row of an offer has.
            row = _Metrics.model_validate(raw)
        except ValidationError:
            rejected += 1
            continue
        gpu = canonical(PROVIDER, name)
        pricing = row.pricing
        for share, prices in zip(SHARES, (pricing.avail_p10, pricing.avail_median, pricing.avail_p90), strict=True):
            changes = _changes(pricing.timestamps, prices)
            if any(price is not None for _, price in changes):
                offers.append(
                    OfferPriceHistory(
                        provider=PROVIDER,
                        offer_id=OfferId(f"market {share} of {gpu}"),
                        pool=PoolId(f"market of {gpu}"),
                        market=Market.ON_DEMAND,
                        gpu=gpu,
                        gpu_count=1,
                        storage_price=MicroUsdPerGbMonth(0),
                        changes=changes,
                    )
                )
    return tuple(offers), rejected


def _changes(
    seconds: Sequence[int | None], prices: Sequence[float | None]
) -> tuple[tuple[datetime, MicroUsdPerHour | None], ...]:
    """Return the figures with their instants; where there is none, nothing is known to have been on offer."""
    found: dict[datetime, MicroUsdPerHour | None] = {}
    for second, price in zip(seconds, prices, strict=False):
        if second is not None and 0 <= second < 2**32:
            is_price = price is not None and 0 < price <= PRICE_MAX
            found[datetime.fromtimestamp(second, UTC)] = MicroUsdPerHour(micro_usd(price)) if is_price else None  # type: ignore[arg-type] # it is a price
    return tuple(sorted(found.items(), key=lambda change: change[0]))


BENCHMARKS_EVERY: Final = timedelta(days=1)
AGAIN_AFTER: Final = timedelta(hours=1)
"""It is asked again so long after it did not answer."""
BENCHMARKS_WITHIN_S: Final = 5.0
"""It is asked within a poll of the offers, which must not wait for it."""
BENCHMARK_ROWS_MAX: Final = 2_000
HOSTS_MIN: Final = 3
FOUND_MAX: Final = 500
_Word = Annotated[Text | None, Lenient]


class _Result(Row):
    machine_id: Id
    gpu_name: Annotated[str, Field(min_length=1, max_length=128)]
    num_gpus: Annotated[int, Field(gt=0, le=1024)]
    value: Annotated[Measure | None, Lenient] = None
    score: Annotated[Measure | None, Lenient] = None
    template_hash: _Word = None
    type: _Word = None
    name: _Word = None
    model: _Word = None

    @property
    def test(self) -> str:
        """What was measured; results of the same test can be compared."""
        return clean(" ".join(part for part in (self.template_hash, self.type, self.name, self.model) if part))[:200]


class Benchmarks:
    """The newest results, asked for once a day at most."""

    def __init__(self, client: VastClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._due_at: datetime | None = None
        self._known: tuple[Benchmark, ...] = ()

    async def results(self) -> tuple[Benchmark, ...]:
        """Return what is known; what cannot be asked for now is as it was."""
        now = self._clock.now()
        if self._due_at is None or not timedelta(0) < self._due_at - now <= BENCHMARKS_EVERY:
            self._due_at = now + AGAIN_AFTER
            rows = await self._rows()
            if rows is not None:
                self._known = await judge_apart(lambda: compare_results(rows), rows=len(rows))
                self._due_at = now + BENCHMARKS_EVERY
        return self._known

    async def _rows(self) -> list[Any] | None:
        params = {
            "select_cols": as_json(["*"]),
            "select_filters": as_json({}),
            "order_by": as_json([{"col": "last_update", "dir": "desc"}]),
            "limit": as_json(BENCHMARK_ROWS_MAX),
        }
        try:
            answer = await self._client.send(
                "GET", "/api/v0/benchmarks/", what=BENCHMARKS, params=params, timeout_s=BENCHMARKS_WITHIN_S
            )
            found = answer.json() if answer.status == 200 else None
        except ProviderError:
            return None
        return found[:BENCHMARK_ROWS_MAX] if isinstance(found, list) else None


def compare_results(rows: Iterable[Any]) -> tuple[Benchmark, ...]:
    """Return the median of one GPU of each kind in each test that compares two kinds at least."""
    tests: dict[str, dict[str, dict[int, float]]] = {}
    for raw in rows:
        row = row_or_none(_Result, raw)
        value = None if row is None else row.score if row.value is None else row.value
        if row is None or not value or not row.test:
            continue
        gpu = canonical(PROVIDER, row.gpu_name.replace("_", " "))
        # Newest first: of one machine the newest counts.
        tests.setdefault(row.test, {}).setdefault(gpu, {}).setdefault(row.machine_id, value / row.num_gpus)
    found: list[Benchmark] = []
    for test, by_gpu in sorted(tests.items()):
        scores = {gpu: median_low(hosts.values()) for gpu, hosts in by_gpu.items() if len(hosts) >= HOSTS_MIN}
        if len(scores) > 1:
            found.extend(Benchmark(test=test, gpu=gpu, score=score) for gpu, score in sorted(scores.items()))
    return tuple(found[:FOUND_MAX])
