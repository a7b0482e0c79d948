"""The part of the backend that knows what prices were."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.api.backend import ApiUnavailable, HistoryQuery, Invalid
from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.name_resolution import known_provider, resolved_gpus
from spotd.api.schemas.prices import HistoryResponse, PastBucketResponse, PastPricesResponse
from spotd.api.timestamps import utc_text
from spotd.history import DISK_GB, Bucket, HistoryUnavailable, PriceGroup, PriceTerms, SeriesQuery, TooManyBuckets
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import Market, ProviderName

RANGE: Final = timedelta(days=7)
ROWS_MAX: Final = 32
LENGTHS_S: Final = tuple(60 * minutes for minutes in (1, 5, 15, 60, 180, 360, 720, 1440, 2880, 7 * 1440, 28 * 1440))
HINT: Final = "jobs go on without it; spotctl doctor says more"


class PriceHistory:
    """Answers from the price history."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    async def history(self, query: HistoryQuery) -> HistoryResponse:
        context = self._context
        known_provider(query.provider, context.providers)
        now = context.clock.now()
        until = min(query.until or now, now)
        since = query.since or _before(until, RANGE)
        if since >= until:
            raise Invalid(
                "the range ends before it begins", hint="--since and --until are spans before now or instants"
            )
        try:
            question = SeriesQuery(
                since=max(0, int(since.timestamp())),
                until=int(until.timestamp()) + 1,
                every_s=_length_s(query, until - since),
                gpus=resolved_gpus(query.gpu, await context.price_recorder.gpus()),
                provider=None if query.provider is None else ProviderName(query.provider),
                market=None if query.market is None else Market(query.market),
                offer=query.offer,
                pool=query.pool,
            )
            rules = context.policy.current.providers
            terms = PriceTerms(fee_ppm={name: rule.fee_ppm for name, rule in rules.items()})
            answer = await context.price_recorder.ask(question, terms)
        except HistoryUnavailable as exc:
            raise ApiUnavailable(str(exc), hint=HINT) from exc
        except TooManyBuckets as exc:
            raise Invalid(str(exc), hint="spotctl history --every 6h") from exc
        return HistoryResponse(
            since=utc_text(since),
            until=utc_text(until),
            bucket_s=answer.bucket_s,
            disk_gb=DISK_GB,
            trouble=context.price_recorder.last_error,
            prices=[_prices(group) for group in answer.groups],
        )


def _length_s(query: HistoryQuery, span: timedelta) -> int | None:
    """As asked for; else one bucket for a look at everything, and a screenful for a look at something."""
    if query.every_s is not None:
        return query.every_s
    if query.gpu is None and query.offer is None and query.pool is None:
        return None
    return next((length for length in LENGTHS_S if span.total_seconds() <= length * ROWS_MAX), LENGTHS_S[-1])


def _before(instant: datetime, span: timedelta) -> datetime:
    return instant - span if instant - datetime(1970, 1, 1, tzinfo=UTC) > span else datetime(1970, 1, 1, tzinfo=UTC)


def _prices(group: PriceGroup) -> PastPricesResponse:
    return PastPricesResponse(
        gpu=group.gpu, market=group.market.value, buckets=[_bucket(bucket) for bucket in group.buckets]
    )


def _bucket(bucket: Bucket) -> PastBucketResponse:
    p10, p25, median, p75, p90 = map(as_usd, bucket.quantiles)
    return PastBucketResponse(
        at=utc_text(datetime.fromtimestamp(bucket.start, tz=UTC)),
        offers=round(bucket.offers, 2),
        low_usd_gpu_h=as_usd(bucket.low),
        p10_usd_gpu_h=p10,
        p25_usd_gpu_h=p25,
        median_usd_gpu_h=median,
        p75_usd_gpu_h=p75,
        p90_usd_gpu_h=p90,
        high_usd_gpu_h=as_usd(bucket.high),
    )
