"""What is so rather than happens: budgets, balances, providers that are away, and GPUs that are hardly used.

Each is stated as long as it is so, always by the same key. That a person hears of it once is the queue's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.billing.prepaid import current_balance, spending_rate
from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.market import MarketSnapshot, ProviderOffers
from spotd.core.domain.world import World
from spotd.core.metering.metering import spent, spent_in_month, spent_on_day
from spotd.core.notifications.values import Notification, Severity, Topic, notification
from spotd.core.pricing.words import dollar_words, span_words
from spotd_providers.contract.money import MicroUsd

BUDGET_PERCENT: Final = ((100, Severity.URGENT), (80, Severity.WARNING))
RUNWAYS: Final = ((timedelta(hours=1), Severity.URGENT), (timedelta(hours=6), Severity.WARNING))
AWAY_FOR: Final = timedelta(minutes=10)
LOW_USE: Final = 0.1
LOW_FOR: Final = timedelta(minutes=30)
_MONTH: Final = timedelta(days=32)
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowUse:
    """Since when the GPUs of a machine are hardly used, and how much they are used now."""

    since: datetime
    use: float


def low_uses(
    known: Mapping[AttemptId, LowUse], uses: Mapping[AttemptId, float | None], now: datetime
) -> dict[AttemptId, LowUse]:
    """Return which machines are hardly used now; where the use is not known, what was known of it stays."""
    found: dict[AttemptId, LowUse] = {}
    for attempt, use in uses.items():
        before = known.get(attempt)
        if use is None and before is not None:
            found[attempt] = before
        elif use is not None and use < LOW_USE:
            since = now if before is None or before.since > now else before.since
            found[attempt] = LowUse(since=since, use=use)
    return found


def conditions(
    world: World, market: MarketSnapshot, low: Mapping[AttemptId, LowUse], now: datetime
) -> Iterator[Notification]:
    """Yield everything that a person should know of at this moment."""
    yield from _budgets(world, now)
    for shown in market.offer_cache.values():
        yield from _balance(world, shown, now)
        yield from _away(shown, now)
    yield from _hardly_used(world, low, now)


def _budgets(world: World, now: datetime) -> Iterator[Notification]:
    today = now.astimezone(UTC).date()
    policy = world.policy
    whole = (
        (f"day:{today}", "today's budget", policy.budget_day, spent_on_day(world, now)),
        (f"month:{today:%Y-%m}", "this month's budget", policy.budget_month, spent_in_month(world, now)),
    )
    for key, what, limit, amount in whole:
        yield from _budget(key, what, limit, amount, now, "at its end running jobs save and stop")
    running: Counter[JobId] = Counter()
    for item in world.attempts.values():
        running[item.id.job] += spent(item, now)
    for job in world.jobs.values():
        if job.budget is None or job.state.is_final:
            continue
        then = f"at its end the job saves and stops; spotctl budget {job.name} changes it"
        cost = MicroUsd(job.spent + running[job.id])
        yield from _budget(f"job:{job.id}", f"the budget of {job.name}", job.budget, cost, now, then)


def _budget(
    key: str, what: str, limit: MicroUsd | None, amount: MicroUsd, now: datetime, then: str
) -> Iterator[Notification]:
    for percent, severity in BUDGET_PERCENT if limit else ():
        if limit is not None and amount * 100 >= limit * percent:
            share = "all" if percent == 100 else f"{percent} %"
            title = f"{share} of {what} is spent"
            text = f"{dollar_words(amount)} of {dollar_words(limit)}: {then}"
            yield notification(f"budget:{key}:{limit}:{percent}", Topic.BUDGET, severity, now, title, text,
                               repeat_after=_MONTH)  # fmt: skip
            return


def _balance(world: World, shown: ProviderOffers, now: datetime) -> Iterator[Notification]:
    balance = current_balance(shown, now)
    name = shown.provider
    rate = sum(spending_rate(item) for item in world.attempts.values() if item.provider == name)
    if balance is None or rate <= 0:
        return
    left = timedelta(hours=min(balance / rate, 10_000.0)) if balance > 0 else timedelta(0)
    for runway, severity in RUNWAYS:
        if left < runway:
            title = f"the balance at {name} lasts {span_words(left)}"
            text = f"{dollar_words(MicroUsd(max(0, balance)))} are left; at its end {name} stops every machine"
            key = f"balance:{name}:{runway // timedelta(hours=1)}"
            yield notification(key, Topic.BALANCE, severity, now, title, text, repeat_after=_DAY)
            return


def _away(shown: ProviderOffers, now: datetime) -> Iterator[Notification]:
    since, name = shown.error_since, shown.provider
    if not shown.error or since is None or now - since < AWAY_FOR:
        return
    title = f"{name} has not answered for {span_words(now - since)}"
    text = f"{shown.error}\nits machines run on, and nothing is rented there; spotctl providers"
    yield notification(f"provider:{name}", Topic.PROVIDER, Severity.WARNING, now, title, text, repeat_after=_DAY)


def _hardly_used(world: World, low: Mapping[AttemptId, LowUse], now: datetime) -> Iterator[Notification]:
    for attempt, one in low.items():
        job = world.jobs.get(attempt.job)
        if job is None or now - one.since < LOW_FOR:
            continue
        title = f"{job.name} uses its GPUs at {100 * one.use:.0f} %"
        text = (
            f"for {span_words(now - one.since)}. It may wait for its data: more workers of the data loader, or the data"
            f" on the machine's own disk. spotctl logs {job.name}; [watchdog] min_gpu_util ends such a job by itself"
        )
        key = f"gpu:{attempt.job}:{attempt.number}"
        yield notification(key, Topic.GPU, Severity.WARNING, now, title, text, job=job.id, repeat_after=_MONTH)
