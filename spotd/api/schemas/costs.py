"""What was spent, and what is allowed, as JSON."""

from __future__ import annotations

from typing import TypedDict


class AttemptCostResponse(TypedDict):
    """One line of a receipt. `seconds` is metered machine time.

    `free_usd` of it was not billed, as the provider took the machine soon after its launch; it is not in `spent_usd`.
    `traffic_usd` is, for the bytes that were uploaded and restored.
    """

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
    free_usd: float
    on_demand_usd: float
    traffic_usd: float
    uploaded_bytes: int
    restored_bytes: int
    reason: str | None


class FallbackResponse(TypedDict):
    """A checkpoint that `attempt` should have begun from and could not; `next` is what came after it, null for nothing.

    What lies between the two was computed, and paid for, twice.
    """

    attempt: int
    name: str
    reason: str
    next: str | None
    at: str


class ReceiptResponse(TypedDict):
    """What one job cost and what that saved. `lost_s` is work repeated plus time without a machine.

    `corrections` states, in sentences, where a provider's own bill took the place of what was booked.
    `uncompared_usd` of `spent_usd` was paid for hosts with no known on-demand price; it is in `on_demand_usd` as it is.
    `summary` sums the job up in a sentence; empty before its end.
    """

    id: str
    name: str
    state: str
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
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


class StrayResponse(TypedDict):
    """Machines with our label at one provider that no attempt owned, and what they cost about. No job pays for them."""

    provider: str
    machines: int
    spent_usd: float


class CostResponse(TypedDict):
    """Receipts of the jobs asked for, their sums, what belongs to no job, and the budgets.

    Of many jobs only the newest have a receipt here; the sums hold the `more` others, too.
    """

    receipts: list[ReceiptResponse]
    more: int
    spent_usd: float
    on_demand_usd: float
    saved_usd: float
    recoveries: int
    lost_s: float
    budgets: list[BudgetResponse]
    strays: list[StrayResponse]
