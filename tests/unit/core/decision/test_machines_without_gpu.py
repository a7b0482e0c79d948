"""A machine without a GPU, and a job that asks for one: priced as a whole, held to its ceiling, never mixed up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotd.core.decide import decide
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.core.pricing import quote_words
from spotd_jobs.spec.keys import job_file
from spotd_jobs.spec.model import PriceLimit, Resources
from spotd_jobs.spec.parse import parse_job
from spotd_jobs.spec.problems import SpecError
from spotd_providers.contract.values import NO_GPU, MicroUsdPerGpuHour, Offer
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy

LEAST = {"name": "prep", "run": "true", "image": "scratch"}


def cpu_offer(name: str = "c", *, price: int = 40_000, **changes: object) -> Offer:
    return offer(name, price=price, gpu=NO_GPU, gpu_count=0, **{"cpus": 8.0, "memory_mb": 32_000, **changes})


def cpu_job(**changes: object) -> Job:
    return job(resources=Resources(gpu_count=0, cpus=4), **changes)  # type: ignore[arg-type]  # passed on as they are


def bought(one: Job, *offers: Offer, **policy: object) -> list[str]:
    world = World(policy=shop_policy(**policy), jobs={one.id: one}, attempts={}, intents={})
    return [item.quote.offer.offer_id for item in decide(world, market(*offers), NOW).attempts.values()]


def test_a_job_without_a_gpu_gets_the_cheapest_machine_without_one_that_is_large_enough() -> None:
    small, large = cpu_offer("small", price=10_000, cpus=2.0), cpu_offer("large")
    assert bought(cpu_job(), offer("gpu", price=1_000), small, large) == ["large"]


def test_a_job_with_a_gpu_gets_no_machine_without_one() -> None:
    assert bought(job(), cpu_offer(price=1)) == []
    assert bought(job(resources=Resources(min_vram_mb=1)), cpu_offer(price=1)) == []


@every(("ceiling", "launches"), [(40_000, 1), (39_999, 0)])
def test_its_ceiling_is_that_of_the_whole_machine(ceiling: int, launches: int) -> None:
    assert len(bought(cpu_job(ceiling=ceiling), cpu_offer())) == launches
    config = {NO_GPU: MicroUsdPerGpuHour(ceiling)}
    assert len(bought(cpu_job(ceiling=None), cpu_offer(), ceilings=config)) == launches
    one = cpu_job(ceiling=None)
    whole = replace(one, spec=replace(one.spec, price=PriceLimit(machine_hour=ceiling)))
    assert len(bought(whole, cpu_offer())) == launches


def test_a_bid_for_it_stays_under_the_ceiling() -> None:
    one = cpu_job(ceiling=42_000)
    world = World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})
    [item] = decide(world, market(cpu_offer(pays_bid=True)), NOW).attempts.values()
    assert 40_000 <= item.price_max <= 42_000
    assert quote_words(item.quote).startswith("a machine without a GPU at shop, spot")


@every(("cpus", "words"), [(4, " that has 4 CPUs"), (None, "")])
def test_what_it_asks_for_is_said_where_nothing_fits(cpus: int | None, words: str) -> None:
    one = cpu_job()
    one = replace(one, spec=replace(one.spec, resources=replace(one.spec.resources, cpus=cpus)))
    world = World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})
    plan = decide(world, market(offer()), NOW)
    assert plan.jobs[one.id].state is JobState.WAITING_PRICE
    assert (
        f"no machine without a GPU{words} is on offer now (1 offer is another machine)"
        in plan.verdicts[one.id].sentence
    )


def test_a_job_file_without_a_gpu_says_what_it_needs_instead() -> None:
    spec = parse_job({**LEAST, "resources": {"cpus": 4}}, "")
    assert spec.resources == Resources(gpu_count=0, cpus=4)
    assert "gpu_count" not in job_file(spec)["resources"]
    assert parse_job(job_file(spec), "").resources == spec.resources
    assert parse_job({**LEAST, "resources": {"memory": "8GB"}}, "").resources.gpu_count == 0
    for resources in ({}, {"disk": "10GB"}, {"cpus": 4, "gpu_count": 1}):
        with pytest.raises(SpecError, match="cpus = 8 for a machine without a GPU"):
            parse_job({**LEAST, "resources": resources}, "")
