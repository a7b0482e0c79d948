"""What datasets do to the disk, the price, the plan's words and the books."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Job, disk_gb_for
from spotd.core.domain.market import StoreEgress
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import egress_cost, egress_per_hour, needs_of, quote, restore_time
from spotd.core.ranking.candidates import CandidateCatalogue
from spotd.core.ranking.cost_words import data_words
from spotd_jobs.spec.model import DataSource
from spotd_providers.contract.values import MicroUsdPerGb, Offer, ProviderName
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, report, shop_policy, world_with

GB = 10**9
TB = 10**12
S3 = StoreEgress(per_gb=MicroUsdPerGb(90_000))


def with_data(one: Job, *sizes: int, files: int = 1000) -> Job:
    data = tuple(
        DataSource(source=f"d{n}", path=f"d{n}", sha256="ab" * 32, bytes=size, files=files)
        for n, size in enumerate(sizes)
    )
    return replace(one, spec=replace(one.spec, data=data))


def test_the_disk_holds_the_data_besides() -> None:
    assert disk_gb_for(with_data(job(), 1200 * GB)) == 1321  # a tenth more, and a block for each file
    assert disk_gb_for(with_data(job(), 0, files=10**6)) == 10
    assert disk_gb_for(with_data(job(), 10 * GB, files=10**7)) == 57


def test_a_machine_whose_disk_cannot_hold_it_is_passed_over() -> None:
    small, large = offer("small", price=300_000, disk_gb_max=500), offer("large", price=400_000, disk_gb_max=2000)
    one = with_data(job(), 1200 * GB)
    world = World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})
    (launched,) = decide(world, market(small, large), NOW).attempts.values()
    assert launched.quote.offer.offer_id == large.offer_id


def test_a_terabyte_has_its_words() -> None:
    there = offer(download_mbps=4000.0)
    one = with_data(job(), 1200 * GB)
    quoted = quote(there, needs_of(one, shop_policy()), 1_000_000, NOW, S3.per_gb)
    assert data_words(one, quoted) == "download about 1 h 20 min on each machine at shop, $108.00 egress"
    assert restore_time(one, there) == timedelta(minutes=80)
    assert data_words(job(), quoted) == ""


@every("size", [10**12, 44 * 10**11, 10**15, 10**18, 2**63])
def test_however_large_it_is_the_plan_is_made(size: int) -> None:
    one = with_data(job(), *[size] * 8, files=2**62)
    policy = replace(shop_policy(), egress=S3)
    quoted = quote(offer(disk_gb_max=None), needs_of(one, policy), 1_000_000, NOW, S3.per_gb)
    assert quoted.price.total > 0
    assert data_words(one, quoted)
    world = World(policy=policy, jobs={one.id: one}, attempts={}, intents={})
    decide(world, market(offer()), NOW)


def the(world: World) -> Attempt:
    (attempt,) = world.attempts.values()
    return attempt


def heard(world: World, **words: object) -> World:
    return applied(world, reconcile(world, {}, report(**words), NOW))


def test_a_lost_machine_has_read_what_it_stated_and_one_that_runs_all_of_it() -> None:
    world = world_with(AttemptState.STARTING)
    one = with_data(world.jobs[job().id], 100 * GB)
    world = replace(world, jobs={one.id: one})
    assert AttemptId(job=one.id, number=1) in world.attempts
    world = heard(world, seq=6, phase="code", data_bytes=30 * GB)
    assert the(world).restored_bytes == 30 * GB
    world = heard(world, seq=7, phase="code", data_bytes=10**18)
    assert the(world).restored_bytes == 100 * GB
    world = heard(world, seq=8, phase="run", data_bytes=0)
    assert the(world).restored_bytes == 100 * GB


def from_url(one: Job, *sizes: int) -> Job:
    made = with_data(one, *sizes)
    data = tuple(replace(source, source=f"https://host/{source.source}") for source in made.spec.data)
    return replace(one, spec=replace(one.spec, data=data))


def both(one: Job, stored: int, elsewhere: int) -> Job:
    data = with_data(one, stored).spec.data + from_url(one, elsewhere).spec.data
    return replace(one, spec=replace(one.spec, data=data))


def test_what_a_url_serves_costs_the_hosts_traffic_and_no_egress_of_the_store() -> None:
    there = offer(download_mbps=4000.0, download_price=MicroUsdPerGb(10_000))
    one = from_url(job(), 1200 * GB)
    quoted = quote(there, needs_of(one, shop_policy()), 1_000_000, NOW, S3.per_gb)
    assert data_words(one, quoted) == (
        "download about 1 h 20 min on each machine at shop, $0.00 egress and $12.00 for the machine's own traffic"
    )
    mixed = both(job(), 100 * GB, 1200 * GB)
    quoted = quote(there, needs_of(mixed, shop_policy()), 1_000_000, NOW, S3.per_gb)
    assert "$9.00 egress" in data_words(mixed, quoted)
    assert egress_cost(quoted, 1300 * GB) == 9_000_000


def test_egress_of_a_url_does_not_enter_the_ranking() -> None:
    policy = replace(shop_policy(), egress=S3)
    stored = egress_per_hour(S3.per_gb, needs_of(with_data(job(), 100 * GB), policy))
    assert stored > 0
    assert egress_per_hour(S3.per_gb, needs_of(from_url(job(), 100 * GB), policy)) == 0
    assert egress_per_hour(S3.per_gb, needs_of(both(job(), 100 * GB, TB), policy)) == stored


def test_the_receipt_of_a_url_has_no_egress() -> None:
    costs = []
    for make in (with_data, from_url):
        world = world_with(AttemptState.STARTING)
        one = make(world.jobs[job().id], 100 * GB)
        agreed = quote(the(world).quote.offer, needs_of(one, shop_policy()), 1_000_000, NOW, S3.per_gb)
        attempt = replace(the(world), quote=agreed)
        world = replace(world, jobs={one.id: one}, attempts={attempt.id: attempt})
        ended = the(heard(heard(world, seq=8, phase="run"), seq=9, phase="run"))
        assert ended.restored_bytes == 100 * GB
        costs.append(egress_cost(ended.quote, ended.restored_bytes))
    assert costs == [9_000_000, 0]


def launched_among(one: Job, *offers: Offer) -> Offer:
    world = World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})
    (launched,) = decide(world, market(*offers), NOW).attempts.values()
    return launched.quote.offer


def test_the_time_of_the_download_is_paid_for_and_enters_the_ranking() -> None:
    slow = offer("slow", price=300_000, download_mbps=100.0)
    fast = offer("fast", price=330_000, download_mbps=4000.0)
    assert launched_among(job(), slow, fast).offer_id == "slow"
    # 500 GB take 5.6 hours at 25 MB/s, nearly as long as a usual stay, and 33 minutes at 250 MB/s.
    assert launched_among(with_data(job(), 500 * GB), slow, fast).offer_id == "fast"
    assert (
        launched_among(with_data(job(), 500 * GB), slow, offer("fast", price=900_000, download_mbps=4000.0)).offer_id
        == "slow"
    )
    assert launched_among(from_url(job(), 500 * GB), slow, fast).offer_id == "fast"
    assert launched_among(with_data(job(), GB), slow, fast).offer_id == "slow"


def test_however_many_offers_there_are_the_best_for_the_data_is_found() -> None:
    draw = random.Random(5)
    offers = [
        offer(f"o{n}", price=300_000 + draw.randrange(900_000), download_mbps=draw.choice([None, 50.0, 900.0, 9000.0]))
        for n in range(60)
    ]
    one, policy = with_data(job(), 700 * GB), replace(shop_policy(), egress=S3)
    world = World(policy=policy, jobs={one.id: one}, attempts={}, intents={})
    catalogue = CandidateCatalogue(world, market(*offers), NOW)
    ranked = catalogue.list_for(catalogue.key_of(one))
    while ranked.at(len(ranked.entries)) is not None:
        pass
    totals = [catalogue.ranked_total(ranked, found) for found in ranked.entries]
    assert len(totals) == 60
    assert totals == sorted(totals)
    prices = [catalogue.quote_at(ranked, index).price.total for index in range(60)]
    assert all(total <= ranked.highest_rank(price) for total, price in zip(totals, prices, strict=True))
    (launched,) = decide(world, market(*offers), NOW).attempts.values()
    assert launched.quote.offer == ranked.entries[0]


def test_a_command_that_ended_before_it_was_found_running_has_read_all_of_it() -> None:
    world = world_with(AttemptState.STARTING)
    one = with_data(world.jobs[job().id], 100 * GB)
    world = replace(world, jobs={one.id: one})
    found = heard(world, seq=6, phase="done", exit_reason=EndReason.DONE, exit_code=0)
    assert the(found).restored_bytes == 100 * GB
    found = heard(world, seq=6, phase="done", exit_reason=EndReason.INPUT_ERROR, data_bytes=GB)
    assert the(found).restored_bytes == GB


def in_bucket(one: Job, size: int, near: str = "") -> Job:
    data = tuple(
        replace(source, source="s3://corpus/v1", egress=90_000, near=near) for source in with_data(one, size).spec.data
    )
    return replace(one, spec=replace(one.spec, data=data))


def test_what_a_buckets_owner_asks_is_in_plan_ranking_and_receipt_and_in_no_ceiling() -> None:
    needs, there = needs_of(in_bucket(job(), 100 * GB), shop_policy()), offer()
    quoted = quote(there, needs, 1_000_000, NOW)
    assert "$9.00 egress" in data_words(in_bucket(job(), 100 * GB), quoted)
    assert egress_cost(quoted, 50 * GB) == 4_500_000
    assert egress_cost(quoted, 100 * GB) == egress_cost(quoted, 100 * GB + 1) == 9_000_000
    assert egress_cost(quoted, -1) == 0
    assert egress_per_hour(MicroUsdPerGb(0), needs, there) > 0
    plain = quote(there, needs_of(from_url(job(), 100 * GB), shop_policy()), 1_000_000, NOW)
    assert quoted.price == plain.price


def test_a_machine_beside_the_bucket_reads_for_nothing_and_comes_first_by_that_alone() -> None:
    needs = needs_of(in_bucket(job(), 100 * GB, near="eu-west-1"), shop_policy())
    costs = [
        quote(replace(offer(), provider=ProviderName(provider), region=region), needs, 1_000_000, NOW).url_cost
        for provider, region in (("aws", "eu-west-1"), ("aws", "us-west-2"), ("shop", "eu-west-1"))
    ]
    assert costs == [0, 2_000_000, 9_000_000]
