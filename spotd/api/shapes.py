"""The JSON of the API, as types: the promise behind `-o json`.

Rules that hold everywhere. Instants are ISO 8601 in UTC ending in `Z`, by the daemon's clock, or null. Money is dollars
as a float: `_usd` an amount, `_usd_h` per hour for the whole machine, `_usd_gpu_h` per hour for one GPU. Spans are
seconds. Keys are always present. A key may be added within one schema; none is removed or given another meaning.

Imports the standard library's `typing` only, so that the client may share it for nothing.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypedDict

SCHEMA: Final = 1


class CheckpointShape(TypedDict):
    """A complete, verified checkpoint; `attempt` wrote it."""

    name: str
    attempt: int
    step: int | None
    bytes: int
    at: str


class TransferShape(TypedDict):
    """A checkpoint on its way between host and store, as the host's heartbeats tell it.

    Attributes:
        kind: `upload` or `restore`.
        bytes_per_s, seconds_left: null while they cannot be told.
        queued: how many more wait for their upload.
        failing: why it does not advance, empty while it does.
    """

    kind: str
    checkpoint: str
    bytes_done: int
    bytes_total: int
    bytes_per_s: int | None
    seconds_left: float | None
    queued: int
    failing: str


class AttemptShape(TypedDict):
    """One machine, one try. `reason` is the EndReason once ended, `detail` its sentence for the user."""

    attempt: int
    state: str
    provider: str
    host: str
    region: str
    market: str
    gpu: str
    gpu_count: int
    effective_usd_h: float
    ceiling_usd_gpu_h: float
    on_demand_usd_h: float | None
    intended_at: str
    launched_at: str | None
    running_at: str | None
    ended_at: str | None
    resumed_from: str | None
    reason: str | None
    detail: str
    exit_code: int | None
    spent_usd: float
    on_demand_usd: float


class JobShape(TypedDict):
    """The JSON job object. `provider` to `effective_usd_h` are those of the machine it has now, null without one.

    `gpu` and `gpu_count` tell what the job asks for while it has no machine (its first alternative).
    `attempt` is the number of the newest attempt, 0 before the first. `verdict` is the newest decision's sentence.
    """

    id: str
    name: str
    state: str
    reason: str
    provider: str | None
    host: str | None
    gpu: str | None
    gpu_count: int
    attempt: int
    attempts: list[AttemptShape]
    effective_usd_h: float | None
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    recoveries: int
    checkpoint: CheckpointShape | None
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    verdict: str
    exit_code: int | None
    transfer: TransferShape | None


class JobDetailShape(TypedDict):
    """What `show` adds to the job object.

    Attributes:
        spec: the job as it was understood, in the shape of a job file; secrets by name only.
        lost_s: work and waiting lost to preemptions.
    """

    job: JobShape
    spec: dict[str, Any]
    code_sha256: str | None
    code_bytes: int
    priority: int
    lost_s: float
    ceiling_usd_gpu_h: float | None
    budget_usd: float | None
    phase: str


class JobPageShape(TypedDict):
    """Jobs, newest submission first. `more` when the limit cut some off."""

    jobs: list[JobShape]
    more: bool


class BreakdownShape(TypedDict):
    """Every term of an effective price, whole machine per hour: total = gpu + storage + fee + upload + restore."""

    gpu_usd_h: float
    storage_usd_h: float
    fee_usd_h: float
    fee_multiplier: float
    upload_usd_h: float
    restore_usd_h: float
    total_usd_h: float
    per_gpu_usd_h: float


class QuoteShape(TypedDict):
    """An offer with its effective price; `ceiling_usd_gpu_h` is the one that applies to it, null when none does.

    Attributes:
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
    on_demand_usd_h: float | None
    ceiling_usd_gpu_h: float | None
    fits: bool
    verdict: str
    breakdown: BreakdownShape
    at: str


class BoardShape(TypedDict):
    """The last poll of one provider. `error` is empty while it answers; `at` is when offers last came.

    `note` says what is odd about a provider that answers: slowly, or with nonsense; empty if nothing is.
    """

    provider: str
    offers: int
    at: str | None
    error: str
    note: str


class PricesShape(TypedDict):
    """Quotes, cheapest effective price per GPU first, and the boards they come from. `more` when the limit cut some."""

    quotes: list[QuoteShape]
    boards: list[BoardShape]
    more: bool


class PastBucketShape(TypedDict):
    """Effective prices of one GPU-hour in one span, weighed by the time for which they were on offer.

    Attributes:
        at: when the span begins.
        offers: how many were on offer on average while their providers were polled.
    """

    at: str
    offers: float
    low_usd_gpu_h: float
    p10_usd_gpu_h: float
    p25_usd_gpu_h: float
    median_usd_gpu_h: float
    p75_usd_gpu_h: float
    p90_usd_gpu_h: float
    high_usd_gpu_h: float


class PastPricesShape(TypedDict):
    """One GPU in one market, oldest span first. A span in which nothing was on offer, or nobody looked, is left out."""

    gpu: str
    market: str
    buckets: list[PastBucketShape]


class HistoryShape(TypedDict):
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
    prices: list[PastPricesShape]


class PassedOverShape(TypedDict):
    reason: str
    offers: int


class OriginShape(TypedDict):
    """A checkpoint of another job: `job` is the id of the job that has it."""

    job: str
    name: str
    step: int | None
    bytes: int
    at: str


class PlanShape(TypedDict):
    """What `submit` would do, decided by the same code that will decide.

    Attributes:
        spec: the job as it was understood, in the shape of a job file, defaults filled in.
        run: the command for a person to read.
        workdir: absolute path on the submitting machine to be packed, or null.
        secrets: names whose values `submit` must bring.
        ceilings: the effective $ per GPU-hour that applies, by canonical GPU name.
        resume_from: the checkpoint of another job that this one would begin from, null without one.
        candidates: cheapest first by expected cost to finish, those that fit and the best that do not, at most 20.
        verdict_kind: a VerdictKind value; `placed` means it would start now.
        fits: at least one candidate is at or under the ceiling.
        warnings: sentences worth a look that refuse nothing.
    """

    name: str
    spec: dict[str, Any]
    run: str
    image: str
    workdir: str | None
    secrets: list[str]
    ceilings: dict[str, float]
    budget_usd: float | None
    resume_from: OriginShape | None
    candidates: list[QuoteShape]
    passed_over: list[PassedOverShape]
    boards: list[BoardShape]
    fits: bool
    verdict_kind: str
    verdict: str
    warnings: list[str]


class CodeShape(TypedDict):
    """A packed workdir that is in the store."""

    sha256: str
    bytes: int


class WhyShape(TypedDict):
    """The answer to `why`, never empty. `kind` is a VerdictKind value or null for a final job."""

    id: str
    name: str
    state: str
    sentence: str
    kind: str | None
    at: str | None
    until: str | None
    ceiling_usd_gpu_h: float | None
    best: QuoteShape | None
    passed_over: list[PassedOverShape]
    boards: list[BoardShape]
    events: list[EventShape]


class LogShape(TypedDict):
    """A piece of a job's log stream.

    Attributes:
        kind: `log` is output of the user's command (`text` as it was written, line ends included);
            `attempt` is a marker before the first output of an attempt (`text` a sentence, say where it runs);
            `gap` says that output is missing here; `transfer` tells in a sentence how far a checkpoint has come that
            takes a while, where the log is followed; `end` is the last record of an ended stream.
        cursor: give it back as `after` to go on behind this record.
        state, exit_code: of the job, in `end` only, else null.
    """

    kind: Literal["log", "attempt", "gap", "transfer", "end"]
    cursor: str
    attempt: int
    at: str | None
    text: str
    state: str | None
    exit_code: int | None


class EventShape(TypedDict):
    """Something happened, and why. `id` grows; give it back as `after`."""

    id: int
    at: str
    kind: str
    message: str
    job: str | None
    job_name: str | None
    attempt: int | None
    data: dict[str, str | int | float | bool | None]


class AttemptCostShape(TypedDict):
    """One line of a receipt. `seconds` is billed machine time."""

    attempt: int
    provider: str
    host: str
    gpu: str
    gpu_count: int
    market: str
    effective_usd_h: float
    on_demand_usd_h: float | None
    started_at: str | None
    ended_at: str | None
    seconds: float
    spent_usd: float
    on_demand_usd: float
    reason: str | None


class FallbackShape(TypedDict):
    """A checkpoint that `attempt` should have begun from and could not; `next` is what came after it, null for nothing.

    What lies between the two was computed, and paid for, twice.
    """

    attempt: int
    name: str
    reason: str
    next: str | None
    at: str


class ReceiptShape(TypedDict):
    """What one job cost and what that saved. `lost_s` is work repeated plus time without a machine."""

    id: str
    name: str
    state: str
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    recoveries: int
    lost_s: float
    budget_usd: float | None
    attempts: list[AttemptCostShape]
    fallbacks: list[FallbackShape]


class BudgetShape(TypedDict):
    """`name` is `day`, `month` or `machines` (then counts instead of dollars); `limit` is null without one."""

    name: str
    used: float
    committed: float
    limit: float | None


class CostShape(TypedDict):
    """Receipts of the jobs asked for, their sums, and the budgets."""

    receipts: list[ReceiptShape]
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    recoveries: int
    lost_s: float
    budgets: list[BudgetShape]


class FileShape(TypedDict):
    """One path of a checkpoint or of the outputs. `mode` holds the permission bits.

    A `dir` is listed only where it is empty. `target` is a `link`'s, relative and inside the folder, else null.
    """

    path: str
    kind: Literal["file", "dir", "link"]
    bytes: int
    mode: int
    target: str | None


class FilesShape(TypedDict):
    """What `pull` can fetch: `kind` is `outputs` or `checkpoint`, `name` the checkpoint's, `attempt` who wrote it."""

    id: str
    kind: Literal["outputs", "checkpoint"]
    name: str
    attempt: int
    files: list[FileShape]
    bytes: int


class CapabilityShape(TypedDict):
    """`reason` is the sentence for a power that is missing."""

    power: str
    available: bool
    reason: str


class ProviderShape(TypedDict):
    """Health of one provider. `detail` says in one line what is wrong, or how many offers it shows."""

    name: str
    title: str
    enabled: bool
    ok: bool
    detail: str
    offers: int
    machines: int
    last_poll_at: str | None
    last_listing_at: str | None
    fee_multiplier: float
    capabilities: list[CapabilityShape]


class CheckShape(TypedDict):
    """One finding of `doctor`. `area` is `daemon`, `store` or the provider's name.

    One that is `ok` and has a hint is a warning.
    """

    area: str
    name: str
    ok: bool
    detail: str
    hint: str


class DoctorShape(TypedDict):
    ok: bool
    checks: list[CheckShape]


class ListingShape(TypedDict):
    """What one provider lists as ours. `error` is empty when it answered completely."""

    provider: str
    machines: int
    complete: bool
    error: str


class ReconcileShape(TypedDict):
    """The machines were listed and compared at once; `actions` says what follows, empty when all is in order."""

    listings: list[ListingShape]
    actions: list[str]


class StatusShape(TypedDict):
    """The daemon at a glance. `clock_scale` is above 1 in an accelerated local market.

    Attributes:
        paused: a sentence while nothing may be launched, else empty.
        jobs: number of jobs by state.
    """

    version: str
    install: str
    pid: int
    started_at: str
    clock_scale: float
    paused: str
    machines: int
    jobs: dict[str, int]
    spent_day_usd: float
    spent_month_usd: float


class ProblemShape(TypedDict):
    """One thing wrong in what the user wrote. `key` is the dotted key of the job file, empty for the whole."""

    key: str
    message: str
    hint: str


class ErrorShape(TypedDict):
    code: str
    message: str
    hint: str
    problems: list[ProblemShape]
