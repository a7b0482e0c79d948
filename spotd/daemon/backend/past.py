"""The part of the backend that knows what prices were."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.api.backend import HistoryQuery, Invalid, Unavailable
from spotd.api.shapes.prices import HistoryShape, PastBucketShape, PastPricesShape
from spotd.api.words import utc_text
from spotd.daemon.backend.meant import gpus_meant, known_provider
from spotd.daemon.backend.parts import Parts
from spotd.history import DISK_GB, Bucket, Group, HistoryUnavailable, Question, Terms, TooManyBuckets
from spotd_providers.contract.money import as_usd
from spotd_providers.contract.values import Market, ProviderName

RANGE: Final = timedelta(days=7)
ROWS_MAX: Final = 32
LENGTHS_S: Final = tuple(60 * minutes for minutes in (1, 5, 15, 60, 180, 360, 720, 1440, 2880, 7 * 1440, 28 * 1440))
HINT: Final = "jobs go on without it; spotctl doctor says more"


class Past:
    """Answers from the price history."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def history(self, query: HistoryQuery) -> HistoryShape:
        parts = self._parts
        known_provider(query.provider, parts.providers)
        now = parts.clock.now()
        until = min(query.until or now, now)
        since = query.since or _before(until, RANGE)
        if since >= until:
            raise Invalid(
                "the range ends before it begins", hint="--since and --until are spans before now or instants"
            )
        try:
            question = Question(
                since=max(0, int(since.timestamp())),
                until=int(until.timestamp()) + 1,
                every_s=_length_s(query, until - since),
                gpus=gpus_meant(query.gpu, await parts.historian.gpus()),
                provider=None if query.provider is None else ProviderName(query.provider),
                market=None if query.market is None else Market(query.market),
                offer=query.offer,
                pool=query.pool,
            )
            rules = parts.policy.current.providers
            terms = Terms(fee_ppm={name: rule.fee_ppm for name, rule in rules.items()})
            answer = await parts.historian.ask(question, terms)
        except HistoryUnavailable as exc:
            raise Unavailable(str(exc), hint=HINT) from exc
        except TooManyBuckets as exc:
            raise Invalid(str(exc), hint="spotctl history --every 6h") from exc
        return HistoryShape(
            since=utc_text(since),
            until=utc_text(until),
            bucket_s=answer.bucket_s,
            disk_gb=DISK_GB,
            trouble=parts.historian.trouble,
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


def _prices(group: Group) -> PastPricesShape:
    return PastPricesShape(
        gpu=group.gpu, market=group.market.value, buckets=[_bucket(bucket) for bucket in group.buckets]
    )


def _bucket(bucket: Bucket) -> PastBucketShape:
    p10, p25, median, p75, p90 = map(as_usd, bucket.quantiles)
    return PastBucketShape(
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
