"""Fee, ceilings and budgets are those of the moment: at the decision, at the call, and while a machine is held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from spotd.core import bids
from spotd.core.decide import decide
from spotd.core.domain.attempts import Bidding, MachineState
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, bid_intent_id
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.market import MarketSnapshot, ProviderOffers
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import launch_sent
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import PPM, metered_rate, with_fee
from spotd.core.requests import cancel, set_budget, set_ceiling
from spotd.core.todays_terms import at_todays_fee, ceiling_today
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import InstanceState, Loss, Market, MicroUsd, MicroUsdPerGpuHour, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, listing, report, world_with
from tests.unit.core.kernel.test_launch_calls import owed
from tests.unit.core.kernel.test_raised_bids import bid_market, bid_world, usd

SECOND = timedelta(seconds=1)
FIRST = AttemptId(job=JobId("j1"), number=1)
Change = Callable[[World], World]


def with_policy(world: World, **changes: Any) -> World:
    return replace(world, policy=replace(world.policy, **changes))


def fee(ppm: int) -> Change:
    return lambda world: with_policy(world, providers={SHOP: replace(world.policy.providers[SHOP], fee_ppm=ppm)})


def off(world: World) -> World:
    rules = replace(world.policy.providers[SHOP], unusable="shop is disabled in the config")
    return with_policy(world, providers={SHOP: rules})


def ceiling(price: float) -> Change:
    limit = PriceLimit(per_gpu_hour=MicroUsdPerGpuHour(round(price * 1_000_000)))
    return lambda world: applied(world, set_ceiling(world, world.jobs.values(), limit, NOW))


def budget(dollars: float) -> Change:
    amount = MicroUsd(round(dollars * 1_000_000))
    return lambda world: applied(world, set_budget(world, world.jobs[FIRST.job], amount, NOW))


LESS: dict[str, tuple[Change, str]] = {
    "the fee rises": (fee(1_300_000), "it costs $0.52"),
    "the ceiling is cut": (ceiling(0.39), "it costs $0.40"),
    "the ceiling is 0": (ceiling(0), "it costs $0.40"),
    "the job's budget is cut": (budget(0.01), "of the job's $0.01 is spent"),
    "the day's budget is cut": (lambda w: with_policy(w, budget_day=MicroUsd(0)), "of the day's"),
    "the month's budget is cut": (lambda w: with_policy(w, budget_month=MicroUsd(1)), "of the month's"),
    "the provider is switched off": (off, "shop is disabled in the config"),
    "the provider is gone": (lambda w: with_policy(w, providers={}), "shop is not in the config any more"),
    "fewer machines are allowed": (
        lambda w: with_policy(w, machines_max=0),
        "nothing is launched while [budget] machines is 0",
    ),
    "the job is cancelled": (lambda w: applied(w, cancel(w, FIRST.job, NOW)), "does not want the machine any more"),
}


@every(("change", "why"), LESS.values(), ids=LESS)
def test_a_launch_that_fits_no_longer_when_its_turn_comes_is_not_made(change: Change, why: str) -> None:
    world = change(owed())
    plan = launch_sent(world, FIRST, NOW + MINUTE)
    assert [t.state for t in plan.intents.values()] == [IntentState.FAILED]
    assert why in plan.intents[next(iter(plan.intents))].error
    assert (plan.attempts[FIRST].state, plan.attempts[FIRST].machine) == (AttemptState.ENDED, MachineState.GONE)
    assert {**world.jobs, **plan.jobs}[FIRST.job].spent == 0
    assert not applied(world, plan).attempts
    assert not broken_rules(applied(world, plan))


@every("change", [fee(1_200_000), fee(900_000), ceiling(0.45), budget(9), ceiling(9.0)])
def test_a_launch_that_still_fits_is_made_within_what_is_allowed_today(change: Change) -> None:
    world = change(owed())
    after = applied(world, launch_sent(world, FIRST, NOW + MINUTE))
    item = after.attempts[FIRST]
    assert [t.state for t in after.intents.values()] == [IntentState.SENT]
    assert item.quote.price.fee_ppm == after.policy.providers[SHOP].fee_ppm
    most = after.jobs[FIRST.job].spec.price
    assert most is not None
    assert most.per_gpu_hour is not None
    limit = min(500_000, most.per_gpu_hour) * PPM // item.quote.price.fee_ppm
    assert item.quote.offer.gpu_price <= item.price_max <= limit + 1
    assert not broken_rules(after)


# --- the ceilings of the config, while a machine runs -----------------------------------------------------------------


def configured(dollars: float | None, gpu: str = "RTX_4090") -> Change:
    """What the config accepts from now on, under the name of a GPU or as its default."""
    price = None if dollars is None else MicroUsdPerGpuHour(round(dollars * 1_000_000))
    if gpu == "default":
        return lambda world: with_policy(world, ceilings={}, ceiling_default=price)
    return lambda world: with_policy(world, ceilings={} if price is None else {gpu: price}, ceiling_default=None)


def by_config(world: World) -> World:
    """The same job without a price of its own, under a config that accepts $0.50."""
    owner = world.jobs[FIRST.job]
    owner = replace(owner, spec=replace(owner.spec, price=None))
    return configured(0.50)(replace(world, jobs={owner.id: owner}))


def sold_as(**sold: Any) -> World:
    world = world_with(AttemptState.RUNNING, listed_at=NOW - MINUTE)
    item = world.attempts[FIRST]
    quote = replace(item.quote, offer=replace(item.quote.offer, **sold))
    return replace(world, attempts={FIRST: replace(item, quote=quote)})


def polled(world: World, seconds: int, price: float = 0.40) -> World:
    at = NOW + seconds * SECOND
    row = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(round(price * 1_000_000)))
    heard = {i: replace(r, read_at=at) for i, r in report(seq=6 + seconds, phase="run").items()}
    return applied(world, reconcile(world, listing(row, at=at), heard, at))


def stopped(world: World, seconds: int) -> EndReason | None:
    at = NOW + seconds * SECOND
    stop = applied(world, decide(world, bid_market(), at)).attempts[FIRST].stop
    return None if stop is None else stop.reason


KINDS: dict[str, dict[str, Any]] = {"spot": {}, "bid": {"pays_bid": True}, "fixed": {"market": Market.ON_DEMAND}}


@every("gpu", ["RTX_4090", "default"])
@every("sold", KINDS.values(), ids=KINDS)
def test_a_machine_above_a_lowered_ceiling_of_the_config_saves_and_stops_once_a_later_list_shows_it(
    sold: dict[str, Any], gpu: str
) -> None:
    world = configured(0.30, gpu)(by_config(sold_as(**sold)))
    plan = reconcile(world, {}, report(seq=6, phase="run"), NOW)
    [event] = [e for e in plan.events if e.kind == "attempt.ceiling"]
    assert "accepts $0.3000/GPU-h from now on, $0.5000/GPU-h before" in event.message
    assert plan.list_again == {SHOP}
    world = applied(world, plan)
    assert stopped(world, 0) is None, "no list is newer than the config"
    world = polled(world, 5)
    at = NOW + 5 * SECOND
    plan = decide(world, bid_market(), at)
    item = plan.attempts[FIRST]
    assert item.stop is not None
    assert (item.state, item.stop.reason, item.stop.flush) == (AttemptState.STOPPING, EndReason.PRICE_ROSE, True)
    assert item.stop.detail == "$0.4000/GPU-h, accepted are $0.3000/GPU-h"
    assert not broken_rules(applied(world, plan))
    assert "attempt.ceiling" not in [e.kind for e in reconcile(world, {}, {}, at).events], "and it is said once"


def test_a_ceiling_of_the_config_that_is_raised_counts_at_once() -> None:
    world = polled(by_config(sold_as()), 1, price=0.60)
    assert stopped(world, 1) is EndReason.PRICE_ROSE
    world = configured(0.70)(world)
    world = applied(world, reconcile(world, {}, report(seq=8, phase="run"), NOW + 2 * SECOND))
    assert stopped(world, 2) is None
    assert world.attempts[FIRST].ceiling_now == 700_000


def test_a_ceiling_that_was_lowered_and_is_put_back_before_the_next_list_stops_nothing() -> None:
    world = configured(0.10)(by_config(sold_as()))
    world = applied(world, reconcile(world, {}, report(seq=6), NOW))
    world = configured(0.50)(world)
    world = polled(world, 5)
    assert stopped(world, 5) is None
    assert world.attempts[FIRST].over_ceiling_at is None


@every("dollars", [0.0, 0.30, 0.45, 9.0, 1e12])
def test_the_price_that_a_job_states_itself_stays_its_own(dollars: float) -> None:
    world = configured(dollars)(sold_as())
    plan = reconcile(world, {}, report(seq=6), NOW)
    assert applied(world, plan).attempts[FIRST].ceiling_now == 500_000
    assert stopped(polled(applied(world, plan), 5), 5) is None


@every("change", [configured(None), configured(0.10, "H100_SXM")], ids=["none", "of another GPU"])
def test_where_the_config_has_no_ceiling_any_more_a_machine_keeps_the_one_that_it_had(change: Change) -> None:
    world = change(by_config(sold_as()))
    world = polled(world, 5)
    assert world.attempts[FIRST].ceiling_now == 500_000
    assert stopped(world, 5) is None


@every("state", [AttemptState.INTENDED, AttemptState.STARTING, AttemptState.STOPPING])
def test_the_ceiling_of_today_holds_in_every_state_of_a_machine(state: AttemptState) -> None:
    world = configured(0.30)(by_config(world_with(state)))
    after = applied(world, reconcile(world, {}, {}, NOW))
    assert after.attempts[FIRST].ceiling_now == 300_000
    assert not broken_rules(after)
    assert after.attempts[FIRST].state is state


def test_a_clock_that_is_set_back_hours_keeps_no_machine_above_its_ceiling() -> None:
    world = configured(0.30)(by_config(sold_as(pays_bid=True)))
    world = applied(world, reconcile(world, {}, report(seq=6), NOW))
    back = -5 * 3600
    for seconds in (back, back + 60):
        at = NOW + seconds * SECOND
        row = instance(InstanceState.RUNNING)
        world = applied(world, reconcile(world, listing(row, at=at), {}, at))
    assert world.attempts[FIRST].over_ceiling_at == NOW + back * SECOND
    assert stopped(world, back + 60) is EndReason.PRICE_ROSE


def left_there(dollars: float, at: datetime) -> MarketSnapshot:
    known = ProviderOffers(provider=SHOP, at=at, balance=MicroUsd(round(dollars * 1_000_000)), balance_at=at)
    return MarketSnapshot(by_provider={SHOP: known})


def test_a_launch_that_the_balance_carries_no_longer_is_not_made() -> None:
    world, at = owed(), NOW + MINUTE
    plan = launch_sent(world, FIRST, at, left_there(0.01, at))
    [intent] = plan.intents.values()
    assert intent.state is IntentState.FAILED
    assert "the balance at shop leaves $0.01 for a launch" in intent.error
    assert plan.attempts[FIRST].machine is MachineState.GONE
    assert not broken_rules(applied(world, plan))


@every(
    "market",
    [left_there(5, NOW + MINUTE), left_there(0.01, NOW - 31 * MINUTE), MarketSnapshot()],
    ids=["enough", "an old balance", "none known"],
)
def test_a_launch_that_the_balance_carries_is_made(market: MarketSnapshot) -> None:
    [intent] = launch_sent(owed(), FIRST, NOW + MINUTE, market).intents.values()
    assert intent.state is IntentState.SENT


def test_a_machine_is_booked_and_held_against_its_ceiling_by_the_fee_of_today() -> None:
    world = fee(1_200_000)(bid_world(floor=None))
    plan = reconcile(world, {}, report(seq=6), NOW)
    world = applied(world, plan)
    item = world.attempts[FIRST]
    assert (item.quote.price.total, item.meter.rate, item.meter.settled) == (528_000, 528_000, 73_334)
    assert [e.message for e in plan.events if e.kind == "attempt.fee"] == [
        "the fee at shop is x1.20 from now on: the machine costs $0.5280/GPU-h"
    ]
    assert not broken_rules(world)
    row = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(440_000))
    for minutes in (1, 2):
        at = NOW + minutes * MINUTE
        heard = {i: replace(r, read_at=at) for i, r in report(seq=6 + minutes).items()}
        world = applied(world, reconcile(world, listing(row, at=at), heard, at))
        assert "attempt.fee" not in [e.kind for e in reconcile(world, listing(row, at=at), heard, at).events]
    stop = applied(world, decide(world, bid_market(), NOW + 2 * MINUTE)).attempts[FIRST].stop
    assert stop is not None
    assert stop.reason is EndReason.PRICE_ROSE


def test_a_lower_fee_is_booked_too_and_changes_nothing_else() -> None:
    world = bid_world(floor=None)
    before = world.attempts[FIRST]
    assert at_todays_fee(before, world.policy) is before
    world = applied(world, reconcile(fee(900_000)(world), {}, report(seq=6), NOW))
    item = world.attempts[FIRST]
    assert item.meter.rate == metered_rate(item.quote) == 396_000
    assert (item.ceiling, item.ceiling_set, item.stop) == (before.ceiling, None, None)


@every("ppm", [1_000_000, 1_200_000, 1, 10_000_000])
def test_another_fee_and_back_is_the_same_price(ppm: int) -> None:
    quote = bid_world().attempts[FIRST].quote
    assert with_fee(quote, ppm).price.fee_ppm == ppm
    back = with_fee(with_fee(quote, ppm), quote.price.fee_ppm)
    assert back.price == quote.price
    assert back.on_demand is not None
    assert quote.on_demand is not None
    assert abs(back.on_demand - quote.on_demand) <= 1 + PPM // ppm


def raised(world: World) -> World:
    """A decision raises the bid from $0.44 to $0.473 under a ceiling of $0.50."""
    after = applied(world, decide(world, bid_market(), NOW))
    assert after.attempts[FIRST].price_max == usd(0.473)
    return after


AGAINST_RAISE: dict[str, tuple[Change, str]] = {
    "the fee rises": (fee(1_200_000), "it costs $0.5676/GPU-h by now, accepted are $0.5000/GPU-h"),
    "the ceiling is cut": (ceiling(0.45), "it costs $0.4730/GPU-h by now, accepted are $0.4500/GPU-h"),
    "the job's budget is cut": (budget(0.07), "a budget does not carry it any more"),
    "the day's budget is cut": (lambda w: with_policy(w, budget_day=MicroUsd(0)), "a budget does not carry it"),
    "the provider is switched off": (off, "shop is disabled in the config"),
    "the provider is gone": (lambda w: with_policy(w, providers={}), "shop is not in the config any more"),
    "bids are to stay": (lambda w: with_policy(w, raise_bids=False), "bids are not raised any more"),
    "launches are paused": (lambda w: with_policy(w, launches_paused="spotd ends"), "spotd ends"),
    "the job is cancelled": (lambda w: applied(w, cancel(w, FIRST.job, NOW)), "not wanted any more"),
}


@every(("change", "why"), AGAINST_RAISE.values(), ids=AGAINST_RAISE)
def test_a_raise_that_fits_no_longer_when_its_turn_comes_is_not_placed(change: Change, why: str) -> None:
    world = change(raised(bid_world()))
    plan = bids.bid_sent(world, FIRST, NOW)
    [intent] = [t for t in plan.intents.values() if t.id == bid_intent_id(world.attempts[FIRST].key)]
    assert (intent.state, intent.tries) == (IntentState.FAILED, 0)
    assert why in intent.error
    item = plan.attempts[FIRST]
    assert (item.price_max, item.quote.price.gpu, item.bidding.refused) == (usd(0.44), usd(0.44), 0)


def test_a_raise_that_the_balance_carries_no_longer_is_not_placed() -> None:
    world = raised(bid_world())
    plan = bids.bid_sent(world, FIRST, NOW, left_there(0.001, NOW))
    [intent] = [t for t in plan.intents.values() if t.id == bid_intent_id(world.attempts[FIRST].key)]
    assert intent.state is IntentState.FAILED
    assert "the balance at shop does not carry it any more" in intent.error
    enough = bids.bid_sent(world, FIRST, NOW, left_there(9, NOW))
    assert [t.state for t in enough.intents.values()] == [IntentState.SENT]


def test_a_raise_that_still_fits_is_placed() -> None:
    world = fee(1_050_000)(raised(bid_world()))
    plan = bids.bid_sent(world, FIRST, NOW)
    assert [t.state for t in plan.intents.values()] == [IntentState.SENT]


@every("ppm", [1_000_000, 1_050_000, 1_150_000, 2_000_000])
def test_no_bid_is_decided_above_the_ceiling_at_the_fee_of_today(ppm: int) -> None:
    world = fee(ppm)(bid_world(bid=0.40, floor=0.42))
    most = bids.bid_limit(world.attempts[FIRST], world.jobs[FIRST.job], world.policy)
    assert most == 500_000 * PPM // ppm
    plan = decide(world, bid_market(), NOW)
    changed = plan.attempts.get(FIRST)
    assert changed is None or changed.price_max <= most


SAVED = Checkpoint(name="s", attempt=1, step=1, bytes=1, at=NOW - 5 * MINUTE, manifest_key="k", sha256="0" * 64)


def held(**known: Any) -> World:
    world = bid_world(known=Bidding(placed=(usd(0.44),), **known), over_since=NOW - 2 * MINUTE)
    owner = replace(world.jobs[FIRST.job], checkpoints=(SAVED,))
    return replace(with_policy(world, raise_bids=False, hold_max=30 * MINUTE), jobs={owner.id: owner})


def seen(world: World, state: InstanceState, minutes: int = 0) -> Plan:
    at = NOW + minutes * MINUTE
    row = replace(instance(state, loss=Loss.OUTBID if state is InstanceState.PAUSED else None), market=Market.SPOT)
    heard = {i: replace(r, read_at=at) for i, r in report(seq=5, phase="run").items()}
    return reconcile(world, listing(row, at=at), heard, at)


@every("change", [ceiling(0.40), ceiling(0), fee(1_300_000)])
@every("state", [InstanceState.PAUSED, InstanceState.RUNNING], ids=["outbid", "awake"])
def test_a_held_machine_whose_bid_is_above_what_is_accepted_today_is_left(change: Change, state: InstanceState) -> None:
    world = change(held(held_since=NOW - 5 * MINUTE))
    plan = seen(world, state)
    stop = plan.attempts[FIRST].stop
    assert stop is not None
    assert stop.reason is EndReason.PRICE_ROSE
    assert "by now, accepted are" in stop.detail
    assert plan.list_again == {SHOP}
    after = seen(applied(world, plan), InstanceState.PAUSED, minutes=1)
    assert not after.attempts[FIRST].state.counts
    assert [t.state for t in after.intents.values()] == [IntentState.OPEN], "and its machine is ended"


def test_a_machine_that_is_outbid_above_what_is_accepted_today_is_not_held() -> None:
    assert seen(held(), InstanceState.PAUSED).attempts[FIRST].bidding.held_since is not None
    [ended] = seen(with_policy(ceiling(0.40)(held())), InstanceState.PAUSED).attempts.values()
    assert ended.end_reason is EndReason.OUTBID


# --- what a provider refuses, and what a host echoes -----------------------------------------------------------------


def test_a_refused_raise_is_asked_for_ever_more_seldom_and_one_that_is_taken_ends_that() -> None:
    world, calls = bid_world(), []
    for minutes in range(48 * 60):
        now = NOW + minutes * MINUTE
        item = world.attempts[FIRST]
        world = replace(world, attempts={FIRST: replace(item, bidding=replace(item.bidding, floor=usd(0.43)))})
        plan = decide(world, bid_market(), now)
        world = applied(world, replace(plan, verdicts={}))
        if bid_intent_id(item.key) in plan.intents:
            calls.append(minutes)
            world = applied(world, bids.bid_sent(world, FIRST, now))
            world = applied(world, bids.bid_refused(world, FIRST, "no", now))
    gaps = [b - a for a, b in pairwise(calls)]
    assert gaps[:6] == [10, 20, 40, 80, 160, 320]
    assert set(gaps[6:]) == {360}
    assert world.attempts[FIRST].bidding.refused == len(calls)
    known: Intent = Intent(
        id=bid_intent_id(world.attempts[FIRST].key),
        kind=IntentKind.CHANGE_BID,
        provider=SHOP,
        key=world.attempts[FIRST].key,
        state=IntentState.SENT,
        created_at=NOW,
        attempt=FIRST,
    )
    taken = bids.bid_changed(replace(world, intents={known.id: known}), FIRST, NOW)
    assert taken.attempts[FIRST].bidding.refused == 0


@every(("stated", "today"), [(400_000, 400_000), (600_000, 500_000)])
def test_what_a_job_states_today_lowers_what_it_accepted_and_never_raises_it(stated: int, today: int) -> None:
    world = world_with(AttemptState.RUNNING)
    item, job = world.attempts[FIRST], world.jobs[FIRST.job]
    price = PriceLimit(per_gpu_hour=MicroUsdPerGpuHour(stated))
    assert item.ceiling_now == 500_000
    assert ceiling_today(item, replace(job, spec=replace(job.spec, price=price)), world.policy) == today
