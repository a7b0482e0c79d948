"""What is for sale now and what it cost before, as JSON."""

from __future__ import annotations

from typing import TypedDict

from spotd.api.schemas.envelope import Answer


class BreakdownResponse(TypedDict):
    """Every term of an effective price, whole machine per hour: total = gpu + storage + fee + upload + restore."""

    gpu_usd_h: float
    storage_usd_h: float
    fee_usd_h: float
    fee_multiplier: float
    upload_usd_h: float
    restore_usd_h: float
    total_usd_h: float
    per_gpu_usd_h: float


class QuoteResponse(TypedDict):
    """An offer with its effective price; `ceiling_usd_gpu_h` is the one that applies to it, null when none does.

    Attributes:
        floor_usd_gpu_h, bid_usd_gpu_h: in a market of bids, the effective price at the lowest bid that wins now, and
            at the one that would be placed or was; both null elsewhere.
        fits: it is under the ceiling and nothing else speaks against it.
        verdict: why not (`above the ceiling`, `cooling down until ...`), or `ok`.
    """

    provider: str
    offer: str
    host: str
    region: str
    market: str
    interruption: str
    gpu: str
    gpu_count: int
    gpu_vram_gb: float | None
    reliability: float | None
    effective_usd_h: float
    effective_usd_gpu_h: float
    floor_usd_gpu_h: float | None
    bid_usd_gpu_h: float | None
    on_demand_usd_h: float | None
    ceiling_usd_gpu_h: float | None
    fits: bool
    verdict: str
    breakdown: BreakdownResponse
    at: str


class PollResponse(TypedDict):
    """The last poll of one provider. `error` is empty while it answers; `at` is when offers last came.

    `note` states what is odd about a provider that answers: slowly, or with nonsense; empty if nothing is.
    """

    provider: str
    offers: int
    at: str | None
    error: str
    note: str


class PricesResponse(Answer):
    """Quotes, cheapest effective price per GPU first, and the providers they come from. `more`: the limit cut some.

    `costs` are sentences on what finishing the job is expected to cost for which they were asked, if any.
    """

    quotes: list[QuoteResponse]
    costs: list[str]
    offers: list[PollResponse]
    more: bool


class PastBucketResponse(TypedDict):
    """Effective prices of one GPU-hour in one span, weighed by the time for which they were on offer.

    Attributes:
        at: when the span begins.
        begins: from when on in it prices are known: later than `at` where polling began in the middle of it.
        offers: how many were on offer on average while their providers were polled.
    """

    at: str
    begins: str
    offers: float
    low_usd_gpu_h: float
    p10_usd_gpu_h: float
    p25_usd_gpu_h: float
    median_usd_gpu_h: float
    p75_usd_gpu_h: float
    p90_usd_gpu_h: float
    high_usd_gpu_h: float


class PastPricesResponse(TypedDict):
    """One GPU in one market, oldest span first. A span in which nothing was on offer or polled is left out."""

    gpu: str
    market: str
    buckets: list[PastBucketResponse]


class HistoryResponse(Answer):
    """What prices were, with today's fee multipliers and a disk of `disk_gb`.

    Attributes:
        bucket_s: length of a span; longer than what was asked for where the past is rolled up.
        trouble: why prices are not being kept now, empty while they are.
    """

    since: str
    until: str
    bucket_s: int
    disk_gb: int
    trouble: str
    prices: list[PastPricesResponse]
