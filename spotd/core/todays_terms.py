"""What a machine, or a bid for it, costs by the fee, the ceilings, the budgets and the balances of today.

Theory. What was agreed holds for the moment at which it was decided. The call comes later: it waits for its turn and
for the store, and meanwhile a config is reloaded, a ceiling or a budget is cut, a balance is used up, a provider is
switched off. So each call that spends money asks here once more, in the commit that records that it is made now, and
what fits no longer is given up with its sentence before any money is spent. A machine that runs follows the config,
too: its costs are counted by what is known of the fee today, and held against what its job accepts today, be that its
own `max_price` or `[ceilings]`.
"""

from __future__ import annotations

from datetime import datetime

from spotd.core.budgets import BudgetGuard
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.metering import machines_in_use
from spotd.core.plan_builder import PlanBuilder
from spotd.core.prepaid import PrepaidGuard
from spotd.core.pricing import per_gpu_words, repriced, with_fee
from spotd.core.ranking.candidates import ceiling_for, is_admissible, words_against_bid
from spotd_providers.contract.values import MicroUsdPerGpuHour


def at_todays_fee(item: Attempt, policy: Policy) -> Attempt:
    """Return the attempt with its price by the fee of today; what its job accepts is what it was.

    A provider that is not in the config any more has the fee that it had.
    """
    rules = policy.providers.get(item.provider)
    if rules is None or rules.fee_ppm == item.quote.price.fee_ppm:
        return item
    quote = with_fee(item.quote, rules.fee_ppm)
    if quote.price.per_gpu <= item.ceiling:
        return replace(item, quote=quote)
    return replace(item, quote=quote, ceiling=quote.price.per_gpu, ceiling_set=item.ceiling_now)


def at_todays_ceiling(item: Attempt, ceiling: MicroUsdPerGpuHour | None, now: datetime) -> Attempt:
    """Return the attempt as it is judged where its job accepts this from now on.

    A lowered ceiling is a price that rose. Where there is none any more, no other machine is bought, and this one keeps
    the one that it had.
    """
    if ceiling is None or ceiling == item.ceiling_now:
        return item
    changed = replace(item, ceiling=max(item.ceiling, ceiling), ceiling_set=ceiling)
    if ceiling < item.ceiling_now and item.over_ceiling_at is None:
        changed = replace(changed, over_ceiling_at=now)  # the next listing takes it back where that is not so
    return changed


def ceiling_today(item: Attempt, job: Job, policy: Policy) -> MicroUsdPerGpuHour:
    """Return what may be agreed for this machine now: what its job accepted, and no more than what it would today."""
    offer = item.quote.offer
    today = ceiling_for(offer.gpu, offer.gpu_count, job.spec.price, policy)
    return item.ceiling_now if today is None else MicroUsdPerGpuHour(min(item.ceiling_now, today))


def words_above_ceiling(item: Attempt, job: Job, policy: Policy) -> str:
    """Why this machine may not be agreed at its price by today's fee and ceiling; empty if it may."""
    price, ceiling = at_todays_fee(item, policy).quote, ceiling_today(item, job, policy)
    if is_admissible(price, ceiling, job.spec.price):
        return ""
    return f"it costs {per_gpu_words(price.price.per_gpu)} by now, accepted are {per_gpu_words(ceiling)}"


def words_against_launch(world: World, market: MarketSnapshot, item: Attempt, now: datetime) -> str:
    """Why the launch of this attempt is not to be made after all; empty if it is.

    Of the market only the balances count, which may be newer than the decision.
    """
    job, policy = world.jobs[item.id.job], world.policy
    rules = policy.providers.get(item.provider)
    if rules is None or rules.unusable:
        return f"{item.provider} is not in the config any more" if rules is None else rules.unusable
    if image := policy.words_against_image(rules, job.spec.image):
        return image
    if ceiling_for(item.quote.offer.gpu, item.quote.offer.gpu_count, job.spec.price, policy) is None:
        return f"there is no ceiling for {item.quote.offer.gpu} any more"
    if above := words_above_ceiling(item, job, policy):
        return above
    if machines_in_use(world, now) > policy.machines_max:
        return policy.machines_full
    others = replace(world, attempts={i: a for i, a in world.attempts.items() if i != item.id})
    quote = at_todays_fee(item, policy).quote
    refusal = BudgetGuard(others, now).refusal(job, quote)
    return PrepaidGuard(others, market, now).words_against(job, quote) if refusal is None else refusal[1]


def words_against_raise(world: World, market: MarketSnapshot, item: Attempt, now: datetime) -> str:
    """Why the higher bid for this machine, at which its quote is, is not to be placed after all; empty if it is."""
    job, policy = world.jobs[item.id.job], world.policy
    rules = policy.providers.get(item.provider)
    if rules is None or rules.unusable:
        return f"{item.provider} is not in the config any more" if rules is None else rules.unusable
    if not policy.raise_bids:
        return "bids are not raised any more"
    if above := words_above_ceiling(item, job, policy) or words_against_bid(market, item.quote):
        return above
    at_fee = at_todays_fee(item, policy)
    with_it = replace(world, attempts={**world.attempts, item.id: at_fee})
    if not BudgetGuard(with_it, now).carries_raise(job, at_fee, at_fee.quote.price.total):
        return "a budget does not carry it any more"
    placed = at_fee.bidding.placed
    before = at_fee if len(placed) < 2 else replace(at_fee, quote=repriced(at_fee.quote, placed[-2]))
    as_it_is = replace(world, attempts={**world.attempts, item.id: before})
    if not PrepaidGuard(as_it_is, market, now).carries_raise(job, before, at_fee.quote.price.total):
        return f"the balance at {item.provider} does not carry it any more"
    return ""


def note_ceiling(builder: PlanBuilder, attempt: AttemptId, at: datetime, *, is_over: bool) -> None:
    """Record whether a listing states a price above the ceiling."""
    item = builder.attempt(attempt)
    since = item.over_ceiling_at
    if is_over and (since is None or since > builder.now):  # by a clock that was set back since
        builder.put_attempt(replace(item, over_ceiling_at=at))
    elif not is_over and since is not None:
        builder.put_attempt(replace(item, over_ceiling_at=None))
