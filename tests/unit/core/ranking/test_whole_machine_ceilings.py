"""A ceiling for a whole machine is compared with the price of a whole machine, for any number of GPUs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from spotd.core.bids import bid_limit
from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.world import VerdictKind, World
from spotd.core.ranking.candidates import ceiling_for, total_ceiling
from spotd_jobs.spec.model import GpuAlternative, PriceLimit, Resources
from tests.unit.core.builders import NOW, job, market, offer, shop_policy

JOB = JobId("j1")
GPUS = st.integers(min_value=1, max_value=8)
PRICES = st.integers(min_value=8, max_value=200_000_000)


def world_of(gpu_count: int, limit: PriceLimit) -> World:
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=gpu_count),))
    queued = job(resources=wanted)
    queued = replace(queued, spec=replace(queued.spec, price=limit))
    return World(policy=shop_policy(), jobs={JOB: queued}, attempts={}, intents={})


@given(gpu_count=GPUS, price=PRICES, over=st.integers(min_value=-3, max_value=8), pays_bid=st.booleans())
@example(gpu_count=3, price=1_000_000, over=0, pays_bid=False)
@example(gpu_count=6, price=1_000_000, over=0, pays_bid=False)
@example(gpu_count=7, price=19_200_000, over=0, pays_bid=True)
@example(gpu_count=7, price=19_200_000, over=1, pays_bid=True)
def test_an_offer_at_the_ceiling_of_its_machine_is_bought_and_none_above_it(
    *, gpu_count: int, price: int, over: int, pays_bid: bool
) -> None:
    sold = offer(price=price + over, gpu_count=gpu_count, pays_bid=pays_bid)
    plan = decide(world_of(gpu_count, PriceLimit(machine_hour=price)), market(sold), NOW)
    if over > 0:
        assert not plan.attempts
        assert plan.verdicts[JOB].kind is VerdictKind.ABOVE_CEILING
        assert "is $0.0000 above" not in plan.verdicts[JOB].sentence or over < 50
    else:
        (item,) = plan.attempts.values()
        assert price + over <= item.quote.price.total <= price
        assert price + over <= item.price_max <= price
        assert item.quote.price.per_gpu <= item.ceiling


@given(gpu_count=GPUS, per_gpu=PRICES, over=st.integers(min_value=-3, max_value=8))
def test_a_ceiling_for_one_gpu_allows_exactly_so_many_times_as_much(*, gpu_count: int, per_gpu: int, over: int) -> None:
    sold = offer(price=per_gpu * gpu_count + over, gpu_count=gpu_count)
    plan = decide(world_of(gpu_count, PriceLimit(per_gpu_hour=per_gpu)), market(sold), NOW)
    assert bool(plan.attempts) is (over <= 0)


def test_a_bid_for_several_gpus_is_within_the_ceiling_of_their_machine() -> None:
    world = world_of(3, PriceLimit(machine_hour=1_000_000))
    plan = decide(world, market(offer(price=900_000, gpu_count=3, pays_bid=True, on_demand_price=None)), NOW)
    (item,) = plan.attempts.values()
    assert bid_limit(item, world.jobs[JOB], world.policy) == 1_000_000


@given(gpu_count=GPUS, price=PRICES)
def test_no_total_is_lost_in_the_share_of_a_gpu(*, gpu_count: int, price: int) -> None:
    limit = PriceLimit(machine_hour=price)
    share = ceiling_for("RTX_4090", gpu_count, limit, shop_policy())
    assert share is not None
    assert total_ceiling(share, gpu_count, limit) == price
    assert total_ceiling(share, gpu_count, None) == share * gpu_count
