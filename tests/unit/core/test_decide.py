"""Who gets a machine, and what everybody else is told."""

from __future__ import annotations

import gc
from dataclasses import replace
from datetime import timedelta
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, Resources
from spotd_providers.contract.values import (
    HostId,
    InstanceState,
    Loss,
    Market,
    MicroUsd,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    Offer,
)
from tests.cases import every
from tests.unit.core.builders import (
    MINUTE,
    NOW,
    SHOP,
    instance,
    job,
    listing,
    market,
    offer,
    report,
    shop_policy,
    world_with,
)

V = VerdictKind


def world(*jobs: Job, policy: Policy | None = None) -> World:
    return World(policy=policy or shop_policy(), jobs={j.id: j for j in jobs}, attempts={}, intents={})


def launched(plan: Plan) -> dict[str, str]:
    return {a.id.job: a.quote.offer.offer_id for a in plan.attempts.values() if a.state is AttemptState.INTENDED}


def test_the_cheapest_offer_at_or_under_the_ceiling_is_bought() -> None:
    plan = decide(world(job(1)), market(offer("dear", price=600_000), offer("a", price=450_000), offer("b")), NOW)
    assert launched(plan) == {"j1": "b"}
    assert plan.jobs[job(1).id].state is JobState.PROVISIONING
    assert plan.verdicts[job(1).id].kind is V.PLACED


def test_a_decision_is_freed_at_its_end_and_not_by_a_search_for_garbage() -> None:
    running = world_with(AttemptState.RUNNING)
    waiting = {item.id: item for item in (job(2), job(3, ceiling=300_000))}
    some = replace(running, jobs={**running.jobs, **waiting})
    decide(some, market(offer("a"), offer("b")), NOW)
    gc.collect()
    gc.disable()
    try:
        decide(some, market(offer("a"), offer("b")), NOW)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_of_pools_at_nearly_one_price_the_one_that_can_be_had_is_tried_first() -> None:
    scarce, ample = offer("a", price=400_000, capacity_score=1), offer("b", price=409_000, capacity_score=9)
    assert launched(decide(world(job(1)), market(scarce, ample), NOW)) == {"j1": "b"}
    much_cheaper = offer("a", price=380_000, capacity_score=1)
    assert launched(decide(world(job(1)), market(much_cheaper, ample), NOW)) == {"j1": "a"}


def test_a_scarce_offer_that_ranks_behind_its_price_is_still_found_under_the_ceiling() -> None:
    ample, scarce = offer("a", price=505_000, capacity_score=10), offer("b", price=499_000, capacity_score=1)
    assert launched(decide(world(job(1, ceiling=500_000)), market(ample, scarce), NOW)) == {"j1": "b"}


def test_an_offer_whose_provider_gives_no_score_is_taken_at_its_price() -> None:
    silent, scored = offer("a", price=401_000), offer("b", price=400_000, capacity_score=9)
    assert launched(decide(world(job(1)), market(silent, scored), NOW)) == {"j1": "a"}


def test_the_ceiling_is_met_exactly_and_not_one_microdollar_above() -> None:
    assert launched(decide(world(job(1)), market(offer(price=500_000)), NOW))
    plan = decide(world(job(1)), market(offer(price=500_001)), NOW)
    assert not launched(plan)
    assert plan.verdicts[job(1).id].kind is V.ABOVE_CEILING
    assert plan.jobs[job(1).id].state is JobState.WAITING_PRICE


def test_storage_counts_towards_the_ceiling() -> None:
    dear_disk = offer("a", price=400_000, storage_price=MicroUsdPerGbMonth(72_000_000))
    cheap_disk = offer("b", price=450_000)
    needs = job(1, resources=Resources(gpu=(GpuAlternative(name="4090", count=1),), disk_gb=10))
    assert launched(decide(world(needs), market(dear_disk, cheap_disk), NOW)) == {"j1": "b"}


def test_a_bid_never_makes_the_price_exceed_the_ceiling() -> None:
    plan = decide(world(job(1)), market(offer(price=480_000, pays_bid=True)), NOW)
    bought = next(iter(plan.attempts.values()))
    assert bought.price_max == 500_000
    assert bought.quote.price.per_gpu == 500_000
    plan = decide(world(job(1)), market(offer(price=400_000, pays_bid=True)), NOW)
    assert next(iter(plan.attempts.values())).price_max == 440_000


def test_where_the_market_price_is_billed_the_ceiling_is_the_limit() -> None:
    plan = decide(world(job(1)), market(offer(price=400_000)), NOW)
    bought = next(iter(plan.attempts.values()))
    assert (bought.price_max, bought.quote.price.total) == (500_000, 400_000)


def test_one_host_is_sold_once_per_decision() -> None:
    slices = [offer("a", host_id=HostId("h")), offer("b", host_id=HostId("h"))]
    plan = decide(world(job(1), job(2)), market(*slices), NOW)
    assert launched(plan) == {"j1": "a"}


def test_a_host_with_a_launch_under_way_is_left_to_it_and_the_next_job_takes_the_next_offer() -> None:
    slices = [offer("a", host_id=HostId("h")), offer("a-on-demand", host_id=HostId("h")), offer("b", price=410_000)]
    first = applied(world(job(1)), decide(world(job(1)), market(*slices), NOW))
    later = replace(first, jobs={**first.jobs, job(2).id: job(2)})
    assert launched(decide(later, market(*slices), NOW)) == {"j2": "b"}
    alone = decide(later, market(*slices[:2]), NOW).verdicts[job(2).id]
    assert (alone.kind, "a launch on this host has no answer yet" in alone.sentence) == (V.COOLING, True)


def test_a_pool_without_a_host_is_bought_from_again_at_once() -> None:
    pool = offer("pool", host_id=None)
    first = applied(world(job(1)), decide(world(job(1)), market(pool), NOW))
    later = replace(first, jobs={**first.jobs, job(2).id: job(2)})
    assert launched(decide(later, market(pool), NOW)) == {"j2": "pool"}


def test_an_offer_of_unnamed_hosts_is_sold_to_every_job_that_wants_it() -> None:
    pool = [offer("cheap", host_id=None), offer("dear", price=450_000, host_id=None)]
    plan = decide(world(job(1), job(2)), market(*pool), NOW)
    assert launched(plan) == {"j1": "cheap", "j2": "cheap"}


def test_priority_then_lost_hosts_then_age_decide_who_is_served_first() -> None:
    old, young = job(1), job(2)
    lost = replace(job(3), state=JobState.RECOVERING, attempts_made=1, started_at=NOW)
    urgent = job(4, spec={"priority": 5})
    offer_index = [offer("o1", price=100_000), offer("o2", price=200_000), offer("o3", price=300_000), offer("o4")]
    assert launched(decide(world(old, young, lost, urgent), market(*offer_index), NOW)) == {
        "j4": "o1",
        "j3": "o2",
        "j1": "o3",
        "j2": "o4",
    }


def test_ties_are_broken_by_interruption_provider_and_offer_id() -> None:
    assert launched(decide(world(job(1)), market(offer("b"), offer("a"), offer("c")), NOW)) == {"j1": "a"}


WAITS = {
    "no offers": (job(1), [], {}, V.NO_OFFERS, "no provider shows offers"),
    "another GPU": (job(1), [offer(gpu="H100_SXM")], {}, V.NO_MATCH, "1 offer is another machine"),
    "another count": (job(1), [offer(gpu_count=2)], {}, V.NO_MATCH, "1 offer is another machine"),
    "too little disk": (job(1), [offer(disk_gb_max=5)], {}, V.NO_MATCH, "too little disk"),
    "another region": (
        job(1, resources=Resources(gpu=(GpuAlternative(name="4090", count=1),), regions=("EU",))),
        [offer(region="Texas, US")],
        {},
        V.NO_MATCH,
        "another region",
    ),
    "no ceiling": (job(1, ceiling=None), [offer()], {}, V.NO_CEILING, "no ceiling for RTX_4090"),
    "machines": (job(1), [offer()], {"machines_max": 0}, V.MACHINES, "nothing is launched while"),
    "paused": (job(1), [offer()], {"launches_paused": "shutting down"}, V.PAUSED, "shutting down"),
    "secrets": (job(1), [offer()], {"locked": {JobId("j1"): "no key for its secrets"}}, V.PAUSED, "no key for its"),
    "job budget": (job(1, budget=10_000), [offer()], {}, V.BUDGET_JOB, "job's $0.01"),
    "day budget": (job(1), [offer()], {"budget_day": MicroUsd(10_000)}, V.BUDGET_DAY, "day's $0.01"),
    "month budget": (job(1), [offer()], {"budget_month": MicroUsd(10_000)}, V.BUDGET_MONTH, "month's $0.01"),
}


@every(("wants", "offer_index", "limits", "kind", "words"), WAITS.values(), ids=WAITS.keys())
def test_a_job_that_waits_is_told_why(
    wants: Job, offer_index: list[Offer], limits: dict[str, object], kind: VerdictKind, words: str
) -> None:
    plan = decide(world(wants, policy=shop_policy(**limits)), market(*offer_index), NOW)
    assert not plan.attempts
    assert plan.verdicts[wants.id].kind is kind
    assert words in plan.verdicts[wants.id].sentence


@every(
    ("choice", "bought"),
    [(None, "bid"), (MarketChoice.SPOT, "bid"), (MarketChoice.AUTO, "fixed"), (MarketChoice.ON_DEMAND, "fixed")],
)
def test_on_demand_is_bought_beside_spot_only_by_jobs_that_accept_it(choice: MarketChoice | None, bought: str) -> None:
    wanted = Resources(gpu=(GpuAlternative(name="4090", count=1),), market=choice)
    sold = market(offer("fixed", price=300_000, market=Market.ON_DEMAND), offer("bid", price=400_000))
    assert launched(decide(world(job(1, resources=wanted)), sold, NOW)) == {"j1": bought}


@every(
    ("choice", "sells_spot", "bought"),
    [
        (None, False, True),
        (None, True, False),
        (MarketChoice.SPOT, False, False),
        (MarketChoice.AUTO, True, True),
        (MarketChoice.ON_DEMAND, True, True),
    ],
)
def test_a_job_that_names_no_market_takes_on_demand_where_there_is_no_spot_market_and_not_where_it_is_sold_out(
    choice: MarketChoice | None, sells_spot: bool, bought: bool
) -> None:
    wanted = Resources(gpu=(GpuAlternative(name="4090", count=1),), market=choice)
    sold = market(offer(market=Market.ON_DEMAND), sells_spot=sells_spot)
    plan = decide(world(job(1, resources=wanted)), sold, NOW)
    assert bool(launched(plan)) is bought


def test_an_old_board_sells_nothing_and_is_named() -> None:
    plan = decide(world(job(1)), market(offer(), at=NOW - timedelta(minutes=6)), NOW)
    assert "shop: prices are 360 s old" in plan.verdicts[job(1).id].sentence


def test_a_host_that_cools_down_is_passed_over() -> None:
    cooling = Cooldown(
        provider=SHOP, scope=CooldownScope.HOST, subject="host-a", until=NOW + timedelta(minutes=1), reason="lost"
    )
    stage = replace(world(job(1)), cooldowns=(cooling,))
    assert launched(decide(stage, market(offer("a", price=1), offer("b")), NOW)) == {"j1": "b"}
    assert decide(stage, market(offer("a")), NOW).verdicts[job(1).id].kind is V.COOLING
    assert launched(decide(stage, market(offer("a", price=1)), NOW + timedelta(minutes=2))) == {"j1": "a"}


@every(
    ("reason", "after"),
    [
        pytest.param(EndReason.OUTBID, timedelta(minutes=4), id="outbid"),
        pytest.param(EndReason.PREEMPTED, timedelta(minutes=4), id="preempted"),
        pytest.param(EndReason.IMAGE_ERROR, timedelta(minutes=4), id="image"),
        pytest.param(EndReason.HOST_LOST, timedelta(minutes=31), id="lost"),
    ],
)
def test_a_host_that_only_cost_more_for_a_while_is_back_long_before_one_that_failed(
    reason: EndReason, after: timedelta
) -> None:
    """A market of one host: an outbid job must not wait half an hour beside an offer under its ceiling."""
    stage = world_with(AttemptState.RUNNING)
    builder = PlanBuilder(stage, NOW)
    builder.end_attempt(next(iter(stage.attempts)), reason, "")
    stage = applied(stage, builder.plan())
    stage = replace(stage, attempts={i: replace(a, machine=MachineState.GONE) for i, a in stage.attempts.items()})
    soon = NOW + timedelta(minutes=2)
    assert not launched(decide(stage, market(offer(), at=soon), soon))
    later = NOW + after
    assert launched(decide(stage, market(offer(), at=later), later)) == {"j1": "o1"}


@every(
    ("loss", "reason", "span"),
    [
        (Loss.PREEMPTED, EndReason.PREEMPTED, 3 * MINUTE),
        (Loss.OUTBID, EndReason.OUTBID, 3 * MINUTE),
        (Loss.IMAGE_ERROR, EndReason.IMAGE_ERROR, 3 * MINUTE),
        (Loss.PROVISION_FAILED, EndReason.HOST_LOST, 30 * MINUTE),
        (Loss.HOST_LOST, EndReason.HOST_LOST, 30 * MINUTE),
        (Loss.EXPIRED, EndReason.HOST_LOST, 30 * MINUTE),
        (None, EndReason.HOST_LOST, 30 * MINUTE),
    ],
)
def test_what_a_provider_says_of_a_paused_machine_decides_for_how_long_its_host_cools_down(
    loss: Loss | None, reason: EndReason, span: timedelta
) -> None:
    """A host on which a machine cannot start is as broken as one that fails later."""
    stage = world_with(AttemptState.STARTING, over_since=NOW - MINUTE)
    plan = reconcile(stage, listing(instance(InstanceState.PAUSED, loss=loss)), report(), NOW)
    (ended,) = plan.attempts.values()
    assert ended.end_reason is reason
    assert [(c.scope, c.subject, c.until - NOW) for c in plan.cooldowns] == [(CooldownScope.HOST, "host-o1", span)]


@every(
    ("failure", "sentence"),
    [
        pytest.param(LaunchFailure.AUTH, "shop is left alone for a while: the key was refused", id="key"),
        pytest.param(LaunchFailure.NO_BALANCE, "shop is left alone for a while: the key was refused", id="balance"),
        pytest.param(LaunchFailure.PRICE_MOVED, "offer was refused a moment ago", id="price"),
    ],
)
def test_a_job_whose_launch_was_refused_is_told_why_and_nothing_else_cools_down(
    failure: LaunchFailure, sentence: str
) -> None:
    before = world_with(AttemptState.INTENDED)
    refused = launch_refused(before, next(iter(before.attempts)), failure, "the key was refused", NOW)
    stage = applied(before, refused)
    assert "no machine was made for this attempt; it cost nothing" in [e.message for e in refused.events]
    told = decide(stage, market(offer()), NOW).verdicts[job(1).id]
    assert told.sentence == f"all 1 offers that fit are out for now: {sentence}"
    again = NOW + timedelta(seconds=31)
    sold = launched(decide(stage, market(offer(), at=again), again))
    assert sold == ({"j1": "o1"} if failure is LaunchFailure.PRICE_MOVED else {})


def test_a_provider_that_never_opened_is_named_with_its_reason() -> None:
    broken = replace(shop_policy().providers[SHOP], unusable="the secret's file is empty")
    stage = world(job(1), policy=shop_policy(providers={SHOP: broken}))
    told = decide(stage, MarketSnapshot(), NOW).verdicts[job(1).id].sentence
    assert told == "no provider shows offers now (shop: the secret's file is empty)"


def test_nothing_is_bought_while_the_last_machine_may_still_compute() -> None:
    stage = world_with(AttemptState.ENDING)
    assert next(iter(stage.attempts.values())).machine is MachineState.LIVE
    plan = decide(stage, market(offer("z")), NOW)
    assert plan.verdicts[job(1).id].kind is V.RECONCILING
    halted = {i: replace(a, machine=MachineState.HALTED) for i, a in stage.attempts.items()}
    assert launched(decide(replace(stage, attempts=halted), market(offer("z")), NOW)) == {"j1": "z"}


def test_an_unreachable_machine_is_waited_for_until_its_lease_and_the_saving_after_it_are_over() -> None:
    stage = world_with(AttemptState.ENDING)
    ended = next(a.ended_at for a in stage.attempts.values() if a.ended_at is not None)
    expired = ended + shop_policy().lease
    soon, later = expired + timedelta(minutes=3), expired + timedelta(minutes=4)
    assert decide(stage, market(offer("z"), at=soon), soon).verdicts[job(1).id].kind is V.RECONCILING
    assert launched(decide(stage, market(offer("z"), at=later), later)) == {"j1": "z"}


def test_a_job_whose_budget_runs_out_is_told_to_save_and_stop() -> None:
    stage = world_with(AttemptState.RUNNING)
    owner = replace(stage.jobs[job(1).id], spec=replace(job(1).spec, job_budget=70_000))
    plan = decide(replace(stage, jobs={owner.id: owner}), market(), NOW)
    stopped = next(iter(plan.attempts.values()))
    assert stopped.state is AttemptState.STOPPING
    assert stopped.stop is not None
    assert stopped.stop.reason is EndReason.OVER_BUDGET


def test_the_day_budget_stops_running_machines_before_it_is_broken() -> None:
    stage = world_with(AttemptState.RUNNING)
    tight = replace(
        stage,
        policy=shop_policy(budget_day=MicroUsd(1_000_000)),
        spent_by_day={NOW.date(): MicroUsd(900_000)},
    )
    plan = decide(tight, market(), NOW)
    stopped = next(iter(plan.attempts.values()))
    assert stopped.stop is not None
    assert stopped.stop.reason is EndReason.BUDGET_PAUSED


def test_config_ceilings_apply_per_gpu_where_the_job_sets_none() -> None:
    rules = shop_policy(ceiling_default=MicroUsdPerGpuHour(100_000), ceilings={"RTX_4090": MicroUsdPerGpuHour(450_000)})
    assert launched(decide(world(job(1, ceiling=None), policy=rules), market(offer()), NOW))


@given(st.data())
def test_permuting_jobs_and_offers_changes_nothing_and_no_launch_breaks_a_rule(data: st.DataObject) -> None:
    offers = [
        offer(
            f"o{i}",
            price=data.draw(st.integers(1, 900_000)),
            pays_bid=data.draw(st.booleans()),
            storage_price=MicroUsdPerGbMonth(data.draw(st.integers(0, 10_000_000))),
        )
        for i in range(data.draw(st.integers(0, 5)))
    ]
    jobs = [
        job(i, ceiling=data.draw(st.integers(1, 900_000)), spec={"priority": data.draw(st.integers(-1, 1))})
        for i in range(data.draw(st.integers(0, 5)))
    ]
    budget = MicroUsd(data.draw(st.integers(0, 1_000_000)))
    rules = shop_policy(budget_day=budget, machines_max=data.draw(st.integers(0, 6)))
    plans = [
        decide(world(*some_jobs, policy=rules), market(*some_offers), NOW)
        for some_jobs, some_offers in zip(list(permutations(jobs))[:3], list(permutations(offers))[-3:], strict=False)
    ]
    assert all(launched(p) == launched(plans[0]) for p in plans)
    for plan in plans:
        assert all(a.quote.price.per_gpu <= a.ceiling for a in plan.attempts.values())
        assert sum(a.quote.price.total for a in plan.attempts.values()) // 12 <= budget
        assert len(plan.attempts) <= rules.machines_max
        assert broken_rules(applied(world(*jobs, policy=rules), plan)) == ()


def test_machines_that_its_owner_has_are_named_where_the_market_has_no_other() -> None:
    held = world_with(AttemptState.RUNNING)
    item = replace(job(2), id=JobId("waits"), name="waits")
    stage = replace(held, jobs={**held.jobs, item.id: item})
    sentence = decide(stage, market(offer("o1", gpu_count=4)), NOW).verdicts[item.id].sentence
    assert sentence == (
        "no 1 x RTX_4090 is on offer now (1 offer is another machine, your own jobs have 1 such machine)"
    )


def test_a_job_that_nothing_fits_is_told_what_it_asked_for() -> None:
    wanted = Resources(gpu=(GpuAlternative(name="H100", count=8), GpuAlternative(name="A100_80GB", count=4)))
    item = job(resources=wanted)
    verdict = decide(world(item), market(offer("o1")), NOW).verdicts[item.id]
    assert verdict.sentence == "no 8 x H100 or 4 x A100_80GB is on offer now (1 offer is another machine)"
