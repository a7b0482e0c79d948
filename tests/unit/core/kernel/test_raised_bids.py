"""Bids of running machines: changed in time, within each limit, once at a time, and never because of their own echo."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core import bids
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, Bidding
from spotd.core.domain.cooldowns import ECHO_LASTS, ECHOES_MAX, CooldownScope, bid_subject
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, bid_intent_id
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel import outcomes
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import needs_of, quote, repriced
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd_providers.contract.values import Instance, InstanceState, Market, MicroUsd, MicroUsdPerHour, Offer
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, job, listing, market, offer, shop_policy, world_with

HOUR = timedelta(hours=1)
FIRST = AttemptId(job=job().id, number=1)


def usd(dollars: float) -> MicroUsdPerHour:
    return MicroUsdPerHour(round(dollars * 1_000_000))


def bid_world(
    floor: float | None = 0.43,
    *,
    bid: float = 0.44,
    on_demand: float | None = 1.0,
    budget: float | None = None,
    known: Bidding | None = None,
    **changes: Any,
) -> World:
    """A machine for which $0.44 is bid, under a ceiling of $0.50, and a floor that has come near."""
    world = world_with(AttemptState.RUNNING)
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    sold = offer(pays_bid=True, on_demand_price=None if on_demand is None else usd(on_demand))
    agreed = repriced(quote(sold, needs_of(owner, shop_policy()), 1_000_000, NOW), usd(bid))
    bidding = known or Bidding(placed=(usd(bid),), floor=None if floor is None else usd(floor))
    item = replace(item, quote=agreed, price_max=usd(bid), bidding=bidding, **changes)
    item = replace(item, meter=replace(item.meter, rate=agreed.price.total))
    owner = replace(owner, budget_set=None if budget is None else MicroUsd(round(budget * 1_000_000)))
    policy = shop_policy(raise_bids=True)
    return replace(world, policy=policy, jobs={owner.id: owner}, attempts={FIRST: item})


def bid_market(*offers: Offer) -> MarketSnapshot:
    shown = market(*offers)
    return replace(shown, by_provider={SHOP: replace(shown.by_provider[SHOP], changes_bids=True)})


def raised(world: World, *offers: Offer) -> tuple[MicroUsdPerHour | None, Plan]:
    """What is bid after a decision, where that is new."""
    plan = decide(world, bid_market(*offers), NOW)
    intent = plan.intents.get(bid_intent_id(world.attempts[FIRST].key))
    return (None if intent is None else plan.attempts[FIRST].price_max), plan


def test_a_bid_is_raised_when_the_floor_has_come_near() -> None:
    bid, plan = raised(bid_world())
    assert bid == usd(0.473)  # the floor and a tenth
    intent = plan.intents[bid_intent_id(bid_world().attempts[FIRST].key)]
    assert (intent.kind, intent.state) == (IntentKind.CHANGE_BID, IntentState.OPEN)
    [event] = [e for e in plan.events if e.kind == "bid.raising"]
    assert event.message == (
        "its bid goes from $0.4400 to $0.4730 per hour:"
        " the lowest that wins is $0.4300, and no other machine is cheaper"
    )


@every(
    "world",
    [
        pytest.param(bid_world(0.41), id="the floor is far below"),
        pytest.param(bid_world(0.44), id="the floor is our own bid"),
        pytest.param(bid_world(0.4415), id="the floor is our own bid, rounded"),
        pytest.param(
            bid_world(0.47, known=Bidding(placed=(usd(0.47), usd(0.44)), floor=usd(0.47))), id="an earlier bid of ours"
        ),
        pytest.param(bid_world(None), id="the floor is not known"),
        pytest.param(bid_world(0.60), id="the floor is above the ceiling"),
        pytest.param(bid_world(on_demand=0.44), id="on-demand costs no more"),
        pytest.param(bid_world(budget=0.125), id="the budget does not carry it"),
        pytest.param(bid_world(stop=world_with(AttemptState.STOPPING).attempts[FIRST].stop), id="it is being stopped"),
        pytest.param(
            bid_world(known=Bidding(placed=(usd(0.44),), floor=usd(0.43), changed_at=NOW - MINUTE)), id="a moment ago"
        ),
    ],
)
def test_a_bid_is_left_as_it_is(world: World) -> None:
    assert raised(world)[0] is None


def test_a_bid_is_left_where_a_move_is_cheaper_or_the_provider_changes_none_or_its_user_wants_none() -> None:
    world = bid_world(running_at=NOW - timedelta(hours=9))
    assert raised(world, offer("o2", price=50_000))[0] is None
    assert raised(world, offer("o2", price=450_000))[0] == usd(0.473)
    assert bid_intent_id(world.attempts[FIRST].key) not in decide(world, market(), NOW).intents
    off = replace(bid_world(), policy=shop_policy())
    assert raised(off)[0] is None


@every(
    ("beside", "bid"),
    [
        pytest.param(offer("o1", price=470_000, market=Market.ON_DEMAND), None, id="its host costs no more on-demand"),
        pytest.param(offer("o1", price=480_000, market=Market.ON_DEMAND), 0.473, id="its host costs more on-demand"),
        pytest.param(offer("o2", price=470_000, market=Market.ON_DEMAND), 0.473, id="another host"),
    ],
)
def test_no_raise_reaches_what_the_same_host_costs_on_demand_now(beside: Offer, bid: float | None) -> None:
    assert raised(bid_world(), beside)[0] == (None if bid is None else usd(bid))


def test_a_raise_stops_below_the_on_demand_price_and_at_the_ceiling() -> None:
    assert raised(bid_world(on_demand=0.46))[0] == usd(0.46) - 1
    assert raised(bid_world(0.48))[0] == usd(0.50)


@given(
    floor=st.floats(0.01, 2.0),
    bid=st.floats(0.01, 0.5),
    on_demand=st.none() | st.floats(0.01, 2.0),
    fee=st.integers(1_000_000, 2_000_000),
)
def test_no_bid_ever_breaks_a_limit(floor: float, bid: float, on_demand: float | None, fee: int) -> None:
    world = bid_world(floor, bid=bid, on_demand=on_demand)
    item = world.attempts[FIRST]
    price = replace(item.quote.price, fee_ppm=fee)
    item = replace(item, quote=repriced(replace(item.quote, price=price), item.quote.price.gpu))
    rules = replace(world.policy.providers[SHOP], fee_ppm=fee)
    found = bids.raised_bid(item, world.jobs[FIRST.job], replace(world.policy, providers={SHOP: rules}))
    if found is None:
        return
    assert found > item.quote.price.gpu
    assert found >= usd(floor)
    assert repriced(item.quote, found).price.per_gpu <= item.ceiling
    assert on_demand is None or found < usd(on_demand)


@every(("balance", "bid"), [(None, 0.473), (1, 0.473), (0.001, None)])
def test_a_raise_that_a_known_balance_does_not_carry_is_not_made(balance: float | None, bid: float | None) -> None:
    shown = bid_market()
    shop = replace(shown.by_provider[SHOP], balance_at=NOW, balance=None if balance is None else MicroUsd(usd(balance)))
    plan = decide(
        bid_world(running_at=NOW - 2 * HOUR, intended_at=NOW - 2 * HOUR), replace(shown, by_provider={SHOP: shop}), NOW
    )
    assert [item.price_max for item in plan.attempts.values()] == ([] if bid is None else [usd(bid)])


# --- lowered ---


def settled_world(floor: float, *, ran: float = 3, **changes: Any) -> World:
    world = bid_world(floor, running_at=NOW - ran * HOUR, heartbeat_seen_at=NOW, **changes)
    saved = Checkpoint(name="s", attempt=1, step=1, bytes=1, at=NOW - MINUTE, manifest_key="k", sha256="0" * 64)
    owner = replace(world.jobs[FIRST.job], checkpoints=(saved,))
    return replace(world, jobs={owner.id: owner}, policy=replace(world.policy, hold_max=HOUR))


def lowered(world: World) -> tuple[MicroUsdPerHour | None, Plan]:
    """What less is bid after a decision."""
    plan = decide(world, bid_market(), NOW)
    return (bids.owed_bid(plan.attempts[FIRST]) if FIRST in plan.attempts else None), plan


def test_a_bid_is_lowered_when_the_floor_fell_and_the_old_one_counts_until_the_provider_took_it() -> None:
    bid, plan = lowered(settled_world(0.25))
    assert bid == usd(0.275)  # the floor and a tenth
    assert bid_of(plan.attempts[FIRST]) == (usd(0.44), usd(0.44))
    [event] = [e for e in plan.events if e.kind == "bid.lowering"]
    assert event.message == (
        "its bid goes from $0.4400 to $0.2750 per hour: the lowest that wins is $0.2500,"
        " and even with a restart that saves $0.44 over the next 3 h 0 min"
    )
    world = applied(settled_world(0.25), plan)
    world = applied(world, bids.bid_sent(world, FIRST, NOW))
    after = bids.bid_changed(world, FIRST, NOW)
    assert bid_of(after.attempts[FIRST]) == (usd(0.275), usd(0.275))
    assert after.attempts[FIRST].meter.rate == usd(0.275)
    assert [e.kind for e in after.events] == ["bid.lowered"]


def test_a_bid_is_never_lowered_to_less_than_half_at_once() -> None:
    assert lowered(settled_world(0.01))[0] == usd(0.22)


@every(
    "world",
    [
        pytest.param(settled_world(0.38), id="too little is saved"),
        pytest.param(settled_world(0.0), id="nothing is sold for nothing"),
        pytest.param(settled_world(0.25, ran=0.9), id="its machine runs for less than an hour"),
        pytest.param(
            settled_world(0.0, known=Bidding(placed=(usd(0.44),), floor=usd(0.25), changed_at=NOW - 50 * MINUTE)),
            id="its bid was changed within the hour",
        ),
        pytest.param(settled_world(0.0, known=Bidding(placed=(usd(0.25), usd(0.44)), floor=usd(0.25))), id="an echo"),
        pytest.param(settled_world(0.25, notice_at=NOW), id="its machine is being taken"),
        pytest.param(
            settled_world(0.25, known=Bidding(placed=(usd(0.44),), floor=usd(0.25), held_since=NOW)), id="it is outbid"
        ),
    ],
)
def test_a_bid_is_not_lowered(world: World) -> None:
    assert FIRST not in decide(world, bid_market(), NOW).attempts


@given(floor=st.floats(0.001, 2.0), bid=st.floats(0.01, 0.5), on_demand=st.none() | st.floats(0.01, 2.0))
def test_no_lowered_bid_is_below_the_floor_or_above_any_limit(
    floor: float, bid: float, on_demand: float | None
) -> None:
    world = bid_world(floor, bid=bid, on_demand=on_demand)
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    found = bids.lowered_bid(item, owner, world.policy)
    if found is not None:
        assert usd(floor) <= found < item.quote.price.gpu <= 2 * found
        assert found <= bids.bid_limit(item, owner, world.policy)
        assert bids.raised_bid(item, owner, world.policy) is None


@every(
    ("price", "bid", "kind"),
    [
        pytest.param(0.275, 0.275, "bid.lowered", id="the list shows the new bid"),
        pytest.param(0.44, 0.44, "bid.not_lowered", id="the list still shows the old one"),
        pytest.param(None, 0.44, "bid.not_lowered", id="without a price the higher bid counts"),
    ],
)
def test_an_unknown_lowering_is_settled_by_a_list(price: float | None, bid: float, kind: str) -> None:
    world = settled_world(0.25)
    world = applied(world, lowered(world)[1])
    world = applied(world, bids.bid_sent(world, FIRST, NOW))
    world = applied(world, bids.bid_unknown(world, FIRST, "no answer", NOW))
    plan = listed(world, price, minutes=4)
    assert kind in [e.kind for e in plan.events]
    assert bid_of(applied(world, plan).attempts[FIRST]) == (usd(bid), usd(bid))


# --- what became of it ---


def owed() -> World:
    world = bid_world()
    return applied(world, decide(world, bid_market(), NOW))


def sent() -> World:
    return applied(owed(), bids.bid_sent(owed(), FIRST, NOW))


def intent_state(world: World, plan: Plan) -> IntentState:
    return plan.intents[bid_intent_id(world.attempts[FIRST].key)].state


def listed(world: World, price: float | None, *, minutes: float, floor: float | None = None) -> Plan:
    at = NOW + timedelta(minutes=minutes)
    mine: Instance = replace(
        instance(InstanceState.RUNNING),
        market=Market.SPOT,
        price=None if price is None else usd(price),
        bid_floor=None if floor is None else usd(floor),
    )
    return reconcile(world, listing(mine, at=at), {}, at)


def bid_of(item: Attempt) -> tuple[MicroUsdPerHour, MicroUsdPerHour]:
    return item.price_max, item.quote.price.gpu


def test_budgets_and_ceiling_count_the_new_bid_before_the_call() -> None:
    assert bid_of(owed().attempts[FIRST]) == (usd(0.473), usd(0.473))
    later = owed()
    item = later.attempts[FIRST]
    near = replace(item.bidding, floor=usd(0.47), changed_at=NOW - 10 * MINUTE)
    again = replace(later, attempts={FIRST: replace(item, bidding=replace(near, placed=(usd(0.44),)))})
    assert raised(again)[1].attempts == {}, "one at a time"


def test_an_accepted_bid_is_billed() -> None:
    world = sent()
    assert intent_state(world, bids.bid_sent(owed(), FIRST, NOW)) is IntentState.SENT
    plan = bids.bid_changed(world, FIRST, NOW)
    assert intent_state(world, plan) is IntentState.DONE
    assert plan.attempts[FIRST].meter.rate == usd(0.473)


def test_a_refused_bid_is_what_it_was() -> None:
    plan = bids.bid_refused(sent(), FIRST, "too high", NOW)
    assert intent_state(sent(), plan) is IntentState.FAILED
    assert bid_of(plan.attempts[FIRST]) == (usd(0.44), usd(0.44))


@every(
    ("price", "minutes", "state", "bid"),
    [
        pytest.param(0.473, 1, IntentState.DONE, 0.473, id="the list shows the new bid"),
        pytest.param(0.44, 4, IntentState.FAILED, 0.44, id="the list still shows the old one after the window"),
        pytest.param(0.44, 1, IntentState.UNKNOWN, 0.473, id="within the window a list proves nothing"),
        pytest.param(None, 4, IntentState.DONE, 0.473, id="without a price the higher bid counts"),
    ],
)
def test_an_unknown_outcome_is_settled_by_a_list(
    price: float | None, minutes: int, state: IntentState, bid: float
) -> None:
    world = applied(sent(), bids.bid_unknown(sent(), FIRST, "no answer", NOW))
    after = applied(world, listed(world, price, minutes=minutes))
    found = after.intents.get(bid_intent_id(world.attempts[FIRST].key))
    assert (found.state if found is not None and found.is_open else state) is state
    assert bid_of(after.attempts[FIRST])[0] == usd(bid)


@every(("world", "state", "bid"), [(owed(), "failed", 0.44), (sent(), "unknown", 0.473)])
def test_after_a_restart_what_was_not_sent_never_is(world: World, state: str, bid: float) -> None:
    plan = outcomes.after_restart(world, NOW)
    assert intent_state(world, plan) == state
    assert applied(world, plan).attempts[FIRST].price_max == usd(bid)


def test_a_machine_that_is_stopped_meanwhile_gets_no_new_bid() -> None:
    world = owed()
    stop = world_with(AttemptState.STOPPING).attempts[FIRST].stop
    stopped = replace(world, attempts={FIRST: replace(world.attempts[FIRST], stop=stop, state=AttemptState.STOPPING)})
    assert intent_state(world, bids.bid_sent(stopped, FIRST, NOW)) is IntentState.FAILED


def test_the_echo_of_a_list_is_not_taken_for_the_floor() -> None:
    world = bid_world(None)
    assert listed(world, 0.44, minutes=0, floor=0.44).attempts == {}
    assert listed(world, 0.44, minutes=0, floor=0.42).attempts[FIRST].bidding.floor == usd(0.42)


def test_a_provider_whose_offers_are_unknown_costs_no_job_its_machine() -> None:
    assert decide(bid_world(), MarketSnapshot(), NOW).contained == ()


def test_what_a_list_states_as_the_price_of_our_machine_is_no_other_bid() -> None:
    """A state that was restored does not know the newest bids."""
    world = bid_world(None)
    mine = replace(instance(InstanceState.RUNNING), market=Market.SPOT, price=usd(0.48), bid_floor=usd(0.481))
    after = applied(world, reconcile(world, listing(mine), {}, NOW))
    assert after.attempts[FIRST].bidding.floor is None


def test_the_bid_for_another_machine_of_ours_on_the_same_host_is_no_floor() -> None:
    """Two of our machines would outbid each other up to their ceilings."""
    world = bid_world(None)
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    second = AttemptId(job=job(2).id, number=1)
    twin = replace(item, id=second, key="spotd-lab-j2-1", price_max=usd(0.473))  # type: ignore[arg-type]  # a key
    twin = replace(twin, ref=None, bidding=Bidding(placed=(usd(0.44), usd(0.473))))
    mine = replace(instance(InstanceState.RUNNING), market=Market.SPOT, price=usd(0.44), bid_floor=usd(0.473))
    jobs = {**world.jobs, second.job: replace(owner, id=second.job, name="job2")}

    def floor_beside(other: Attempt) -> MicroUsdPerHour | None:
        return _floor_by_two_lists(replace(world, jobs=jobs, attempts={FIRST: item, second: other}), mine)

    assert floor_beside(twin) is None
    elsewhere = replace(twin.quote, offer=replace(twin.quote.offer, host_id="another"))  # type: ignore[arg-type]  # an id
    assert floor_beside(replace(twin, quote=elsewhere)) == usd(0.473)


def ended_beside(*placed: float, ago: timedelta = timedelta(0), **sold: Any) -> MicroUsdPerHour | None:
    """What counts as the floor of our machine, which another of ours on the same host left to be stated: $0.473."""
    world = bid_world(None)
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    second = AttemptId(job=job(2).id, number=1)
    other = replace(item, id=second, key="spotd-lab-j2-1", state=AttemptState.ENDING)  # type: ignore[arg-type]  # a key
    offered = replace(other.quote.offer, **sold)
    other = replace(other, quote=replace(other.quote, offer=offered), bidding=Bidding(placed=tuple(map(usd, placed))))
    jobs = {**world.jobs, second.job: replace(owner, id=second.job, name="job2")}
    before = replace(world, jobs=jobs, attempts={FIRST: item, second: other})
    builder = PlanBuilder(before, NOW - ago)
    builder.machine_gone(second)
    after = applied(before, builder.plan())
    assert second not in after.attempts
    mine = replace(instance(InstanceState.RUNNING), market=Market.SPOT, price=usd(0.44), bid_floor=usd(0.473))
    return _floor_by_two_lists(after, mine)


def _floor_by_two_lists(world: World, mine: Instance) -> MicroUsdPerHour | None:
    """What is believed where two lists state more than is bid for a machine that runs."""
    for at in (NOW, NOW + MINUTE):
        world = applied(world, reconcile(world, listing(mine, at=at), {}, at))
    return world.attempts[FIRST].bidding.floor


@every("ago", [timedelta(0), 59 * MINUTE])
def test_the_bid_for_our_machine_that_is_gone_is_no_floor_while_its_host_may_still_state_it(ago: timedelta) -> None:
    assert ended_beside(0.44, 0.473, ago=ago) is None
    assert ended_beside(0.473, 0.44, ago=ago) is None, "be it an older one"
    assert ended_beside(ago=ago) == usd(0.473), "it bid something else"
    assert ended_beside(0.946, ago=ago, gpu_count=2) is None, "a machine of two GPUs there"


def test_what_was_bid_for_a_machine_that_is_gone_is_remembered_for_an_hour_and_by_host() -> None:
    assert ended_beside(0.473, ago=ECHO_LASTS) == usd(0.473)
    assert ended_beside(0.473, host_id="elsewhere") == usd(0.473)
    assert ended_beside(0.473, provider="elsewhere") == usd(0.473)
    assert ended_beside(0.473, pays_bid=False) == usd(0.473)


def test_of_a_machine_that_is_gone_a_bounded_number_of_bids_is_remembered() -> None:
    many = [0.3 + n / 1000 for n in range(50)]
    assert ended_beside(0.473, *many) == usd(0.473)
    assert ended_beside(*many, 0.473, *many[: ECHOES_MAX - 1]) is None


@every("scope", [CooldownScope.BID, CooldownScope.POOL])
def test_a_bid_that_is_remembered_holds_nothing_back_so_no_decision_waits_for_its_end(scope: CooldownScope) -> None:
    builder = PlanBuilder(bid_world(None), NOW)
    builder.cool(SHOP, scope, bid_subject("h1", 1, usd(0.44)), ECHO_LASTS, "why")
    after = applied(bid_world(None), builder.plan())
    waits = CandidateCatalogue(after, market(), NOW).waits
    assert waits == ([] if scope is CooldownScope.BID else [NOW + ECHO_LASTS])


# --- figures that one list states alone ---


def floors(world: World, *stated: float, bid: float = 0.44) -> list[MicroUsdPerHour | None]:
    """What is believed after each of these lists, a minute apart."""
    found = []
    for minute, floor in enumerate(stated):
        world = applied(world, listed(world, bid, minutes=minute, floor=floor))
        found.append(world.attempts[FIRST].bidding.floor)
    return found


@every(
    ("stated", "believed"),
    [
        pytest.param((0.42, 0.43), (0.42, 0.43), id="rises under the bid: at once"),
        pytest.param((0.004, 0.41, 0.004, 0.41), (0.4, 0.41, 0.41, 0.41), id="a hundredth, every other list"),
        pytest.param((0.6, 0.41, 0.6, 0.41), (0.4, 0.41, 0.41, 0.41), id="above the bid of a machine that runs"),
        pytest.param((0.6, 0.5, 0.5), (0.4, 0.5, 0.5), id="above it twice: the nearer one"),
        pytest.param((0.2, 0.3, 0.3), (0.4, 0.3, 0.3), id="below twice: the nearer one"),
        pytest.param((0.6, 0.2, 0.6, 0.2), (0.4,) * 4, id="lists that contradict one another"),
        pytest.param((0.3, 0.29, 0.28), (0.4, 0.3, 0.29), id="falls step by step: a list later"),
    ],
)
def test_a_floor_by_which_a_healthy_machine_could_be_lost_is_stated_by_two_lists(
    stated: tuple[float, ...], believed: tuple[float, ...]
) -> None:
    assert floors(bid_world(0.4), *stated) == [usd(floor) for floor in believed]


def test_a_list_that_is_judged_again_is_no_second_one() -> None:
    world = bid_world(0.4)
    for _ in range(3):
        world = applied(world, listed(world, 0.44, minutes=1, floor=0.004))
    assert world.attempts[FIRST].bidding.floor == usd(0.4)
