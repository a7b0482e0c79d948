"""A job of several machines: what they cost together, who sells them, and what they count against."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import CooldownScope, pool_subject
from spotd.core.domain.intents import IntentState, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot, StoreEgress, gang_of
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd.core.domain.states import EndReason
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.kernel.launch_calls import launch_sent
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd.core.metering import machines_in_use
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import egress_cost, traffic_cost
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import (
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    ProviderName,
    QuotaId,
)
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy

GB = 1_000_000_000
OTHER = ProviderName("other")


def gang_job(number: int = 1, *, nodes: int = 4, gpus: int = 1, **changes: object) -> Job:
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=gpus),), nodes=nodes)
    return job(number, resources=wanted, **changes)  # type: ignore[arg-type]  # handed on as they are


def world_of(*jobs: Job, policy: Policy | None = None) -> World:
    return World(policy=policy or shop_policy(), jobs={one.id: one for one in jobs}, attempts={}, intents={})


def selling(*offers: Offer, no_gangs: str = "") -> MarketSnapshot:
    found = market(*offers)
    return MarketSnapshot(by_provider={SHOP: replace(found.by_provider[SHOP], no_gangs=no_gangs)})


def bought(plan: Plan) -> list[Attempt]:
    return [item for item in plan.attempts.values() if item.state.counts]


def verdict(plan: Plan, number: int = 1) -> Verdict:
    return plan.verdicts[JobId(f"j{number}")]


def test_the_offer_of_a_gang_is_of_all_its_machines() -> None:
    one = offer(
        gpu_count=8,
        storage_price=MicroUsdPerGbMonth(7_200),
        storage_fixed=MicroUsdPerHour(500),
        upload_price=MicroUsdPerGb(10),
        download_price=MicroUsdPerGb(20),
    )
    four = gang_of(one, 4)
    assert (four.nodes, four.gpu_count, four.gpu_price, four.on_demand_price) == (4, 32, 1_600_000, 4_000_000)
    assert (four.storage_price, four.storage_fixed) == (28_800, 2_000)
    # The first machine alone uploads; each of them reads what the job goes on from.
    assert traffic_cost(four, GB, GB) == 10 + 4 * 20
    assert StoreEgress(per_gb=MicroUsdPerGb(50)).price_for(four) == 4 * 50
    assert gang_of(one, 1) == one


def test_a_gang_is_one_attempt_at_the_price_of_all_and_a_ceiling_per_gpu() -> None:
    world = world_of(gang_job(gpus=2, ceiling=400_000))
    plan = decide(world, selling(offer(gpu_count=2, price=800_000)), NOW)
    (item,) = bought(plan)
    assert item.quote.offer.nodes == 4
    assert item.quote.price.total == 4 * 800_000
    assert item.quote.price.per_gpu == 400_000
    assert item.price_max >= 4 * 800_000
    above = decide(world, selling(offer(gpu_count=2, price=800_001)), NOW)
    assert not bought(above)
    assert verdict(above).kind is VerdictKind.ABOVE_CEILING
    sent = launch_sent(applied(world, plan), item.id, NOW, selling())
    assert [intent.state for intent in sent.intents.values()] == [IntentState.SENT]


def test_a_budget_carries_all_machines_or_none() -> None:
    held = gang_job(budget=200_000)
    assert bought(decide(world_of(gang_job(nodes=1, budget=200_000)), selling(offer()), NOW))
    refused = decide(world_of(held), selling(offer()), NOW)
    assert not bought(refused)
    assert verdict(refused).kind is VerdictKind.BUDGET_JOB
    day = shop_policy(budget_day=MicroUsd(200_000))
    assert verdict(decide(world_of(gang_job(), policy=day), selling(offer()), NOW)).kind is VerdictKind.BUDGET_DAY


def test_each_machine_counts_against_the_limit_on_machines() -> None:
    five = shop_policy(machines_max=5)
    world = world_of(gang_job(1), gang_job(2), gang_job(3, nodes=1), policy=five)
    plan = decide(world, selling(*(offer(f"o{n}") for n in range(4))), NOW)
    assert sorted(item.quote.offer.nodes for item in bought(plan)) == [1, 4]
    assert verdict(plan, 2).kind is VerdictKind.MACHINES
    assert machines_in_use(applied(world, plan), NOW) == 5
    alone = decide(world_of(gang_job(), policy=shop_policy(machines_max=3)), selling(offer()), NOW)
    assert verdict(alone).sentence == "it needs 4 at once, and 0 of the 3 machines of [budget] machines are in use"


def test_why_says_that_no_provider_starts_several_machines_and_the_reason_of_each() -> None:
    rules = shop_policy().providers[SHOP]
    policy = shop_policy(providers={SHOP: rules, OTHER: replace(rules, name=OTHER)})
    shown = selling(offer(), no_gangs="it sells one by one")
    second = replace(selling(replace(offer(), provider=OTHER)).by_provider[SHOP], provider=OTHER, no_gangs="no network")
    both = MarketSnapshot(by_provider={**shown.by_provider, OTHER: second})
    found = verdict(decide(world_of(gang_job(), policy=policy), both, NOW))
    assert found.kind is VerdictKind.NO_MATCH
    assert found.sentence == (
        "no provider in the config can start 4 machines that reach each other: other: no network; "
        "shop: it sells one by one"
    )
    one = decide(world_of(gang_job(nodes=1), policy=policy), both, NOW)
    assert [item.quote.offer.nodes for item in bought(one)] == [1]
    able = MarketSnapshot(by_provider={**shown.by_provider, OTHER: replace(second, no_gangs="")})
    (item,) = bought(decide(world_of(gang_job(), policy=policy), able, NOW))
    assert item.provider == OTHER


def test_what_each_machine_reads_of_the_store_is_counted() -> None:
    policy = shop_policy(egress=StoreEgress(per_gb=MicroUsdPerGb(50)))
    (one,) = bought(decide(world_of(gang_job(nodes=1), policy=policy), selling(offer()), NOW))
    (four,) = bought(decide(world_of(gang_job(), policy=policy), selling(offer()), NOW))
    assert (egress_cost(one.quote, GB), egress_cost(four.quote, GB)) == (50, 200)
    assert four.intended_at - one.intended_at == timedelta(0)


def test_the_rules_of_a_provider_know_nothing_of_gangs() -> None:
    assert not [name for name in ProviderPolicy.__dataclass_fields__ if "gang" in name or "node" in name]


@every("failure", [LaunchFailure.NO_CAPACITY, LaunchFailure.QUOTA])
def test_what_refuses_several_machines_at_once_is_still_offered_to_fewer(failure: LaunchFailure) -> None:
    world, one = world_of(gang_job()), offer(quotas=(QuotaId("east"),))
    plan = decide(world, selling(one), NOW)
    (item,) = bought(plan)
    world = applied(world, plan)
    world = applied(world, launch_refused(world, item.id, failure, "no", NOW))
    others = {job.id: job for job in (gang_job(2), gang_job(3, nodes=1), gang_job(4, nodes=2))}
    world = replace(world, jobs={**world.jobs, **others}, policy=replace(world.policy, machines_max=99))
    for chosen, nodes in ((2, None), (3, 1), (4, 2)):
        alone = replace(world, jobs={one_id: one for one_id, one in world.jobs.items() if one_id == f"j{chosen}"})
        found = [item.quote.offer.nodes for item in bought(decide(alone, selling(one), NOW + MINUTE / 2))]
        assert found == ([] if nodes is None else [nodes])
    blocked = verdict(decide(replace(world, jobs={JobId("j2"): others[JobId("j2")]}), selling(one), NOW), 2)
    assert blocked.kind is VerdictKind.COOLING
    assert "4 machines at once were refused there a moment ago" in blocked.sentence


def test_a_gang_that_waited_for_a_place_in_vain_leaves_its_pool_to_fewer() -> None:
    one = offer(host_id=None)
    plan = decide(world_of(gang_job()), selling(one), NOW)
    (item,) = bought(plan)
    builder = PlanBuilder(applied(world_of(gang_job()), plan), NOW)
    builder.end_attempt(item.id, EndReason.NO_CAPACITY, "machine 2 of 4 got no place")
    assert [row.subject for row in builder.plan().cooldowns if row.scope is CooldownScope.POOL] == [
        pool_subject(item.quote.offer)
    ]


def test_a_provider_that_starts_fewer_at_once_is_passed_over_and_why_says_so() -> None:
    sold = selling(offer())
    three = MarketSnapshot(by_provider={SHOP: replace(sold.by_provider[SHOP], nodes_max=3)})
    found = verdict(decide(world_of(gang_job()), three, NOW))
    assert found.kind is VerdictKind.NO_MATCH
    assert found.sentence.endswith("shop: it starts 3 machines at once at most")
    assert [item.quote.offer.nodes for item in bought(decide(world_of(gang_job(nodes=3)), three, NOW))] == [3]


def test_what_is_sold_as_several_machines_only_is_no_single_machine_and_no_single_one_is_part_of_several() -> None:
    alone = replace(offer("alone", price=200_000), nodes_max=1)
    gangs = replace(offer("gangs", price=300_000), nodes_min=2, nodes_max=3)
    for nodes, expected in ((1, "alone"), (2, "gangs"), (3, "gangs")):
        (item,) = bought(decide(world_of(gang_job(nodes=nodes)), selling(alone, gangs), NOW))
        assert (item.quote.offer.offer_id, item.quote.offer.nodes) == (expected, nodes)
        assert item.quote.offer.gpu_price == nodes * (200_000 if nodes == 1 else 300_000)
    found = verdict(decide(world_of(gang_job(nodes=4)), selling(alone, gangs), NOW))
    assert found.kind is VerdictKind.NO_MATCH
    assert "2 not sold in that number of machines" in found.sentence


def test_several_machines_above_their_ceiling_are_not_bought_though_a_single_one_is_below_it() -> None:
    alone = replace(offer("alone", price=200_000), nodes_max=1)
    gangs = replace(offer("gangs", price=1_300_000), nodes_min=2)
    plan = decide(world_of(gang_job(nodes=2)), selling(alone, gangs), NOW)
    assert bought(plan) == []
    assert verdict(plan).kind is VerdictKind.ABOVE_CEILING
