"""A job of a range of machines: as many as price, budgets and room allow at each attempt."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import MarketSnapshot, gang_of
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd.core.metering import machines_in_use
from spotd.core.pricing import needs_of, quote
from spotd.store.tables import gpu_wanted
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import MicroUsdPerHour, Offer, ProviderName
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy, world_with

OTHER = ProviderName("other")
LOST = EndReason.HOST_LOST


def ranged_job(fewest: int = 2, most: int | None = 4, **changes: object) -> Job:
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), nodes=fewest, nodes_max=most)
    return job(1, resources=wanted, **changes)  # type: ignore[arg-type]  # handed on as they are


def world_of(one: Job, policy: Policy | None = None) -> World:
    return World(policy=policy or shop_policy(), jobs={one.id: one}, attempts={}, intents={})


def selling(*offers: Offer, nodes_max: int = 1024) -> MarketSnapshot:
    found = market(*offers)
    return MarketSnapshot(by_provider={SHOP: replace(found.by_provider[SHOP], no_gangs="", nodes_max=nodes_max)})


def bought(plan: Plan) -> Attempt:
    (item,) = plan.attempts.values()
    return item


def size(plan: Plan) -> int:
    return bought(plan).quote.offer.nodes


def verdict(plan: Plan) -> Verdict:
    return plan.verdicts[JobId("j1")]


def test_the_most_machines_are_bought_that_may_be() -> None:
    world = world_of(ranged_job())
    plan = decide(world, selling(offer()), NOW)
    assert size(plan) == 4
    assert bought(plan).quote.price.total == 4 * 400_000
    assert machines_in_use(applied(world, plan), NOW) == 4
    assert "machines fit" not in verdict(plan).sentence
    assert "4 machines with 1 x RTX_4090" in verdict(plan).sentence


@every(("most", "expected"), [(3, 3), (2, 2)])
def test_the_limit_on_machines_leaves_fewer(most: int, expected: int) -> None:
    plan = decide(world_of(ranged_job(), shop_policy(machines_max=most)), selling(offer()), NOW)
    assert size(plan) == expected
    assert "; no more of 2..4 machines fit price, budgets and what is free" in verdict(plan).sentence


def test_a_limit_below_the_fewest_is_stated_with_the_fewest() -> None:
    plan = decide(world_of(ranged_job(), shop_policy(machines_max=1)), selling(offer()), NOW)
    assert not plan.attempts
    assert verdict(plan).kind is VerdictKind.MACHINES
    assert verdict(plan).sentence.startswith("it needs 2 at once")


def test_a_provider_that_starts_fewer_gives_fewer() -> None:
    assert size(decide(world_of(ranged_job()), selling(offer(), nodes_max=3), NOW)) == 3


def test_a_budget_leaves_as_many_as_it_carries() -> None:
    sizes = {}
    for budget in range(50_000, 1_000_001, 50_000):
        plan = decide(world_of(ranged_job(budget=budget)), selling(offer()), NOW)
        sizes[budget] = size(plan) if plan.attempts else 0
    assert set(sizes.values()) == {0, 2, 3, 4}
    assert sorted(sizes.values()) == list(sizes.values()), "a larger budget never buys fewer"


def test_more_machines_that_cost_more_under_the_ceiling_come_before_fewer_cheap_ones() -> None:
    rules = shop_policy().providers[SHOP]
    policy = shop_policy(providers={SHOP: rules, OTHER: replace(rules, name=OTHER)})
    small, large = selling(offer(price=300_000), nodes_max=2), selling(replace(offer(price=450_000), provider=OTHER))
    both = MarketSnapshot(by_provider={**small.by_provider, OTHER: replace(large.by_provider[SHOP], provider=OTHER)})
    four = decide(world_of(ranged_job(ceiling=450_000), policy), both, NOW)
    assert (size(four), bought(four).provider) == (4, OTHER)
    two = decide(world_of(ranged_job(ceiling=449_999), policy), both, NOW)
    assert (size(two), bought(two).provider) == (2, SHOP)


def test_a_price_above_the_ceiling_is_that_of_the_fewest() -> None:
    plan = decide(world_of(ranged_job(ceiling=300_000)), selling(offer()), NOW)
    assert not plan.attempts
    assert verdict(plan).kind is VerdictKind.ABOVE_CEILING
    assert "2 machines with 1 x RTX_4090" in verdict(plan).sentence


def test_what_the_pool_does_not_give_is_asked_for_with_fewer_machines() -> None:
    world, now, sizes = world_of(ranged_job()), NOW, []
    for _ in range(3):
        plan = decide(world, selling(offer()), now)
        sizes.append(size(plan))
        world = applied(world, plan)
        world = applied(world, launch_refused(world, bought(plan).id, LaunchFailure.NO_CAPACITY, "no", now))
        now += MINUTE / 10
    assert sizes == [4, 3, 2]
    none = decide(world, selling(offer()), now)
    assert not none.attempts
    assert verdict(none).kind is VerdictKind.COOLING
    assert "2 machines at once were refused there a moment ago" in verdict(none).sentence


def test_a_number_that_two_pools_refused_is_not_asked_for_in_a_third() -> None:
    world, now, asked = world_of(ranged_job()), NOW, []
    pools = tuple(offer(f"o{n}", price=400_000 + n) for n in range(20))
    for _ in range(6):
        plan = decide(world, selling(*pools), now)
        asked.append(size(plan))
        world = applied(world, plan)
        world = applied(world, launch_refused(world, bought(plan).id, LaunchFailure.NO_CAPACITY, "no", now))
        now = world.jobs[JobId("j1")].not_before or now + timedelta(seconds=1)
    assert asked == [4, 4, 3, 3, 2, 2]
    assert now - NOW < 2 * MINUTE
    assert size(decide(world, selling(*pools), now)) == 2, "the fewest are asked for wherever they may be"


def running_on(nodes: int) -> World:
    """A job of 2..4 machines that has run on so many for hours."""
    begun = NOW - timedelta(hours=5)
    agreed = quote(gang_of(offer(), nodes), needs_of(ranged_job(), shop_policy()), 1_000_000, begun)
    meter = Meter(rate=agreed.price.total, on_demand_rate=agreed.on_demand, since=begun)
    changes = {"quote": agreed, "meter": meter, "launched_at": begun - MINUTE, "running_at": begun}
    world = world_with(AttemptState.RUNNING, **changes)
    saved = Checkpoint(name="s", attempt=1, step=1, bytes=0, at=NOW - MINUTE, manifest_key="k", sha256="0" * 64)
    owner = replace(world.jobs[JobId("j1")], spec=ranged_job().spec, checkpoints=(saved,))
    return replace(world, jobs={owner.id: owner}, policy=shop_policy(moves_max=3))


def test_what_runs_is_compared_with_as_many_machines_as_it_has() -> None:
    world = running_on(3)
    same = decide(world, selling(offer(), offer("o2")), NOW)
    assert not [item for item in same.attempts.values() if item.stop is not None], "fewer machines are no saving"
    cheaper = decide(world, selling(offer(), offer("o2", price=200_000)), NOW)
    (item,) = cheaper.attempts.values()
    assert item.stop is not None
    assert item.stop.detail.startswith("3 machines with 1 x RTX_4090 at shop/host-o2 for $0.6000 per hour instead of")


def test_a_job_that_left_its_machines_for_cheaper_ones_gets_as_many_as_it_had() -> None:
    """Four at another place would cost more than the three that were left."""
    rules = shop_policy().providers[SHOP]
    policy = shop_policy(moves_max=3, providers={SHOP: rules, OTHER: replace(rules, name=OTHER)})
    small, dear = selling(offer("o2", price=200_000), nodes_max=3), replace(offer(price=390_000), provider=OTHER)
    large = selling(dear)
    both = MarketSnapshot(by_provider={**small.by_provider, OTHER: replace(large.by_provider[SHOP], provider=OTHER)})
    world = replace(running_on(3), policy=policy)
    world = applied(world, decide(world, both, NOW))
    (item,) = world.attempts.values()
    assert item.stop is not None
    owner = replace(world.jobs[JobId("j1")], state=JobState.RECOVERING)
    world = replace(world, attempts={}, jobs={owner.id: owner})
    plan = decide(world, both, NOW)
    [next_] = [one for one in plan.attempts.values() if one.state.counts]
    assert (next_.provider, next_.quote.offer.nodes) == (SHOP, 3)
    world = replace(world, jobs={owner.id: replace(owner, moves=replace(owner.moves, claim=None))})
    [next_] = [one for one in decide(world, both, NOW).attempts.values() if one.state.counts]
    assert (next_.provider, next_.quote.offer.nodes) == (OTHER, 4), "without that it gets as many as it can"


@every("had", [2, 3, 4])
def test_the_next_attempt_may_have_another_size(had: int) -> None:
    world = running_on(had)
    (item,) = world.attempts.values()
    over = replace(item, state=AttemptState.ENDED, ended_at=NOW - MINUTE, machine=MachineState.GONE, end_reason=LOST)
    owner = replace(world.jobs[JobId("j1")], state=JobState.RECOVERING)
    world = replace(world, attempts={item.id: over}, jobs={owner.id: owner})
    for most in (2, 3, 4):
        limited = replace(world, policy=shop_policy(machines_max=most))
        plan = decide(limited, selling(offer()), NOW)
        assert [one.quote.offer.nodes for one in plan.attempts.values() if one.state.counts] == [most]


def test_a_price_of_many_machines_does_not_prove_a_budget_used_up_for_few() -> None:
    spent = replace(ranged_job(budget=400_000), rate_low=None)
    world = world_of(spent)
    plan = decide(world, selling(offer()), NOW)
    after = applied(world, plan).jobs[JobId("j1")]
    assert after.rate_low == MicroUsdPerHour(2 * 400_000)


def test_the_numbers_of_a_wide_range_are_few_and_hold_both_ends() -> None:
    assert Resources(nodes=2, nodes_max=4).sizes == (4, 3, 2)
    assert Resources(nodes=3).sizes == (3,)
    wide = Resources(nodes=2, nodes_max=64).sizes
    assert (wide[0], wide[-1]) == (64, 2)
    assert len(wide) == 6
    assert list(wide) == sorted(set(wide), reverse=True)
    for fewest in range(2, 65):
        for most in range(fewest + 1, 65):
            found = Resources(nodes=fewest, nodes_max=most).sizes
            assert (found[0], found[-1]) == (most, fewest)


def test_a_table_shows_the_range() -> None:
    assert gpu_wanted(ranged_job().spec.resources) == "2..4 x RTX_4090:1"
    assert gpu_wanted(ranged_job(2, None).spec.resources) == "2 x RTX_4090:1"
