"""What was spent, and what is allowed, as JSON."""

from __future__ import annotations

from typing import TypedDict

from spotd.api.schemas.bodies import Answer, Spending


class AttemptCostResponse(Spending):
    """One line of a receipt. `seconds` is metered machine time.

    `free_usd` of it was not billed, as the provider took the machine soon after its launch; it is not in `spent_usd`.
    `traffic_usd` is, for the bytes that were uploaded and restored; `egress_usd` of it is what the owner of the
    checkpoint store asks for those that were restored, which no provider bills.
    `gpu_usd` (the machine while it ran, with its disk), `disk_usd` (of the machine while it did not run) and `fee_usd`
    are the rest of what was booked; `corrected_usd` is what the provider's own bill then added, in `spent_usd`, too.
    `billed_usd` is that bill; null while it is not known. `market` is `own` for an own machine, whose `on_demand_usd`
    is what the best machine to rent at its launch would have cost. In `kept_s` healthy ones of several machines waited
    for another one in the place of a lost one, for `kept_usd` of the cost.
    """

    attempt: int
    provider: str
    host: str
    gpu: str
    gpu_count: int
    nodes: int
    market: str
    effective_usd_h: float
    on_demand_usd_h: float | None
    started_at: str | None
    ended_at: str | None
    seconds: float
    free_usd: float
    on_demand_usd: float
    traffic_usd: float
    egress_usd: float
    uploaded_bytes: int
    restored_bytes: int
    reason: str | None
    gpu_usd: float
    disk_usd: float
    fee_usd: float
    corrected_usd: float
    billed_usd: float | None
    kept_s: float
    kept_usd: float


class FallbackResponse(TypedDict):
    """A checkpoint that `attempt` should have begun from and could not; `next` is what came after it, null for nothing.

    What lies between the two was computed, and paid for, twice.
    """

    attempt: int
    name: str
    reason: str
    next: str | None
    at: str


class ReceiptResponse(Spending):
    """What one job cost and what that saved. `lost_s` is work repeated plus time without a machine.

    `corrections` states, in sentences, where a provider's own bill took the place of what was booked.
    `uncompared_usd` of `spent_usd` is compared with nothing: no on-demand price was known, or the job failed.
    `own_saved_usd` of `saved_usd` is what own machines cost less than the best machine to rent at their launch would
    have: `on_demand_usd` holds that price for them. Null where none was used, or the job failed.
    `summary` sums the job up in a sentence; empty before its end.
    """

    id: str
    name: str
    state: str
    on_demand_usd: float
    saved_usd: float
    own_saved_usd: float | None
    recoveries: int
    lost_s: float
    budget_usd: float | None
    attempts: list[AttemptCostResponse]
    fallbacks: list[FallbackResponse]
    corrections: list[str]
    uncompared_usd: float
    summary: str


class BudgetResponse(TypedDict):
    """`name` is `day`, `month` or `machines` (then counts instead of dollars); `limit` is null without one."""

    name: str
    used: float
    committed: float
    limit: float | None


class StrayResponse(Spending):
    """Machines with our label at one provider that no attempt owned, and what they cost about. No job pays for them."""

    provider: str
    machines: int


class CostGroupResponse(Spending):
    """What one job, day, provider, GPU or host cost; what runs on a meter now is in it.

    `booked_usd` is `gpu_usd` + `disk_usd` + `traffic_usd` + `fee_usd` - `free_usd`, and `spent_usd` is that with
    `corrected_usd`, the difference to providers' own bills as far as they are known: to the micro-dollar.

    Attributes:
        key: the job's id, the day (UTC), the provider, the GPU, or provider and host.
        name: of a job, else empty.
        machines: null by day, since a machine may run for days.
        seconds: metered machine time.
        gpu_usd: of machines while they ran, with their disk, without the fee.
        disk_usd: of machines that did not run.
        free_usd: booked and taken back, since the provider took the machine soon after its launch.
        uncompared_usd: of `spent_usd`, with no known on-demand price or of failed jobs; `on_demand_usd` holds it, too.
    """

    key: str
    name: str
    machines: int | None
    seconds: float
    gpu_usd: float
    disk_usd: float
    traffic_usd: float
    fee_usd: float
    free_usd: float
    booked_usd: float
    corrected_usd: float
    uncompared_usd: float
    on_demand_usd: float
    saved_usd: float


class LedgerResponse(Answer):
    """What everything cost by `job`, `day`, `provider`, `gpu` or `host`, and in all.

    Very many groups end with one named `(others)`.
    """

    by: str
    groups: list[CostGroupResponse]
    total: CostGroupResponse


class CalibrationResponse(TypedDict):
    """What a provider's own bills say of its fee.

    Attributes:
        machines: how many have a bill that is known.
        booked_usd, billed_usd: what was booked for them, before any correction, and what was billed.
        fee_multiplier: the one in force.
        measured: the one that would have made both equal; null where there is too little to say.
        spread: how far the true one may be from it, for 19 of 20 samples.
        suggested: what to write into the config; null where that in force agrees or nothing can be said.
    """

    provider: str
    machines: int
    booked_usd: float
    billed_usd: float
    fee_multiplier: float
    measured: float | None
    spread: float | None
    suggested: float | None
    sentence: str


class CostResponse(Answer, Spending):
    """Receipts of the jobs asked for, their sums, what belongs to no job, and the budgets.

    Of many jobs only the newest have a receipt here; the sums hold the `more` others, too. `uncompared_usd` of
    `spent_usd` is compared with nothing: no on-demand price was known, or the job failed.
    """

    receipts: list[ReceiptResponse]
    more: int
    on_demand_usd: float
    saved_usd: float
    uncompared_usd: float
    recoveries: int
    lost_s: float
    budgets: list[BudgetResponse]
    strays: list[StrayResponse]


# What is for sale now and what it cost before, as JSON.


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
    nodes: int
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
        imported: share of it, from 0 to 1, of which the prices were imported and not polled here.
    """

    at: str
    begins: str
    offers: float
    imported: float
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
        trouble: why prices are not being kept now, or imported ones are left out; empty while all is well.
    """

    since: str
    until: str
    bucket_s: int
    disk_gb: int
    trouble: str
    prices: list[PastPricesResponse]


class PriceImportAnswer(Answer):
    """What was stored of one page of past prices.

    Attributes:
        prices: changes of a price that were stored; those that are too old to be kept are not.
        next: `after` of the next request; empty when there is no more.
        left: how many pages are still to come, where that is known.
    """

    offers: int
    prices: int
    rejected: int
    until: str
    next: str
    left: int | None
