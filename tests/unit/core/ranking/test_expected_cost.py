"""Offers rank by what an hour of the job's work is expected to cost, and reading few of them finds the same ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.author import MachineVerdicts
from spotd.core.budgets import BudgetGuard
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, PaceSample
from spotd.core.domain.market import ELSEWHERE, MarketSnapshot, ProviderOffers, StoreEgress, build_offer_index
from spotd.core.domain.plan import applied
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import NO_EXPERIENCE, Experience, RecordKind, World
from spotd.core.placement import JobPlacement
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import PPM, needs_of, quote, total_per_hour, usual_bid
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, is_admissible
from spotd.core.ranking.expected_cost import USUAL, Costing, rank, total_at
from spotd_jobs.spec.model import GpuAlternative, GpuSpeed, MarketChoice, PriceLimit, Resources
from spotd_providers.contract.values import (
    HostId,
    Interruption,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from tests.cases import every
from tests.unit.core import builders as b
from tests.unit.core.builders import NOW, SHOP, job, market, offer
from tests.unit.core.experiences import experience, experiences, record
from tests.unit.core.ranking.test_remaining_work import saved

POD = ProviderName("pod")
ORDER = {Interruption.NEVER: 0, Interruption.NOTICE: 1, Interruption.SUDDEN: 2}
GPUS = ("H100_SXM", "A100_SXM_80", "RTX_4090")
HOSTS, POOLS = ["h0", "h1", "h2"], ["p0", "p1"]
ANY_GPU = Resources(
    gpu=tuple(GpuAlternative(name=gpu, count=n) for gpu in GPUS for n in (1, 4)), market=MarketChoice.AUTO
)


def policy() -> Policy:
    shop = b.shop_policy()
    rules = replace(shop.providers[SHOP], fee_ppm=1_200_000)
    return replace(shop, providers={SHOP: rules, POD: replace(rules, name=POD, fee_ppm=990_000)})


def snapshot(offers: list[Offer]) -> MarketSnapshot:
    return MarketSnapshot(
        by_provider={
            name: ProviderOffers(
                provider=name, offer_index=build_offer_index(tuple(o for o in offers if o.provider == name)), at=NOW
            )
            for name in (SHOP, POD)
        }
    )


def world(*jobs: Job, known: Experience = NO_EXPERIENCE, limits: Policy | None = None) -> World:
    return World(policy=limits or policy(), jobs={j.id: j for j in jobs}, attempts={}, intents={}, experience=known)


def catalogue(state: World, offers: list[Offer]) -> CandidateCatalogue:
    return CandidateCatalogue(state, snapshot(offers), NOW)


def bought(state: World, offers: list[Offer]) -> list[Attempt]:
    return list(decide(state, snapshot(offers), NOW).attempts.values())


OFFERS = st.lists(
    st.builds(
        Offer,
        provider=st.sampled_from([SHOP, POD]),
        offer_id=st.sampled_from([OfferId(f"o{n}") for n in range(50)]),
        host_id=st.sampled_from([None, *map(HostId, HOSTS)]),
        pool=st.sampled_from([PoolId(p) for p in POOLS]),
        market=st.sampled_from(Market),
        interruption=st.sampled_from(Interruption),
        gpu=st.sampled_from(GPUS),
        gpu_count=st.sampled_from([1, 4]),
        gpu_price=st.integers(90_000, 120_000).map(MicroUsdPerHour) | st.integers(0, 4_000_000).map(MicroUsdPerHour),
        pays_bid=st.booleans(),
        storage_price=st.sampled_from([0, 70_000, 3_000_000]).map(MicroUsdPerGbMonth),
        download_price=st.sampled_from([0, 20_000, 900_000]).map(MicroUsdPerGb),
        capacity_score=st.none() | st.integers(1, 10),
        hazard_ppm=st.none() | st.sampled_from([0, 500, 90_000, 10**9]),
    ),
    max_size=14,
    unique_by=lambda o: (o.provider, o.offer_id),
)
SPEEDS = st.sampled_from(
    [
        (),
        (GpuSpeed(name="H100", ppm=1_000_000), GpuSpeed(name="A100-80GB", ppm=420_000)),
        (GpuSpeed(name="RTX 4090", ppm=1_000),),
        (GpuSpeed(name="H100", ppm=1_000_000_000), GpuSpeed(name="A100", ppm=1_000)),
    ]
)
PACES = st.sampled_from(
    [
        (),
        (
            PaceSample(attempt=1, gpu="H100_SXM", gpu_count=1, steps=900, span=timedelta(hours=1)),
            PaceSample(attempt=2, gpu="RTX_4090", gpu_count=4, steps=300, span=timedelta(hours=1)),
        ),
    ]
)
EGRESS = st.sampled_from(
    [
        StoreEgress(),
        StoreEgress(per_gb=MicroUsdPerGb(90_000)),
        StoreEgress(per_gb=MicroUsdPerGb(90_000), near={(SHOP, ""): MicroUsdPerGb(0)}),
        StoreEgress(per_gb=MicroUsdPerGb(1_000_000), near={(POD, ELSEWHERE): MicroUsdPerGb(5)}),
    ]
)
PRICES = st.builds(PriceLimit, per_gpu_hour=st.integers(20_000, 3_000_000)) | st.builds(
    PriceLimit, machine_hour=st.integers(20_000, 3_000_000)
)
JOBS = st.builds(
    lambda speed, paces, size: job(
        resources=ANY_GPU,
        ceiling=None,
        paces=paces,
        checkpoints=(saved(1, bytes=size),) if size else (),
        spec={"speed": speed},
    ),
    SPEEDS,
    PACES,
    st.sampled_from([0, 10**9, 10**12]),
)


def reading(state: World, egress: StoreEgress) -> World:
    """The same where the owner of the checkpoint store asks for what is read."""
    return replace(state, policy=replace(state.policy, egress=egress))


def by_hand(state: World, wanted: Job, offers: list[Offer]) -> list[tuple[int, int, str, str]]:
    """Every offer with its rank, best first, by the formula and nothing else."""
    costing = Costing.of(state.policy, state.experience, (), NOW)
    terms, needs = costing.terms_of(wanted), needs_of(wanted, state.policy)
    plain = Costing.of(state.policy, NO_EXPERIENCE, (), NOW) if terms is None else costing
    found = []
    for one in offers:
        fee, headroom = state.policy.providers[one.provider].fee_ppm, state.policy.bid_headroom_ppm
        gpu_price = usual_bid(one, headroom) if one.pays_bid else one.gpu_price
        ranked = rank(total_per_hour(one, needs, fee, gpu_price), plain.expect(one, needs, terms or USUAL))
        found.append((ranked, ORDER[one.interruption], one.provider, one.offer_id))
    return sorted(found)


@given(OFFERS, JOBS, PRICES, experiences([SHOP, POD], HOSTS, POOLS), EGRESS)
def test_what_is_found_by_reading_little_is_what_reading_all_finds(
    offers: list[Offer], wanted: Job, price: PriceLimit, known: Experience, egress: StoreEgress
) -> None:
    wanted = replace(wanted, spec=replace(wanted.spec, price=price))
    state = reading(world(wanted, known=known), egress)
    shelves = catalogue(state, offers)
    ranked = [(q.offer.provider, q.offer.offer_id) for q in shelves.ranked(shelves.list_for(shelves.key_of(wanted)))]
    expected = by_hand(state, wanted, offers)
    assert ranked == [row[2:] for row in expected]

    by_id = {(o.provider, o.offer_id): o for o in offers}
    admissible = []
    for row in expected:
        one = by_id[row[2], row[3]]  # type: ignore[index]  # the row holds the ids as plain text
        fee = state.policy.providers[one.provider].fee_ppm
        priced = quote(one, needs_of(wanted, state.policy), fee, NOW)
        if is_admissible(priced, ceiling_for(one.gpu, one.gpu_count, price, state.policy), price):
            admissible.append((one.provider, one.offer_id))
    builder, market = PlanBuilder(state, NOW), snapshot(offers)
    verdicts = MachineVerdicts(builder, state, market)
    placement = JobPlacement(builder, state, market, BudgetGuard(state, NOW), verdicts)
    fitting = placement.catalogue.list_for(placement.catalogue.key_of(wanted))
    found = [q.offer for q, _ in placement.admissible.under_ceiling(wanted, fitting, defaultdict(int))]
    assert [(o.provider, o.offer_id) for o in found] == admissible


@given(OFFERS, JOBS, experiences([SHOP, POD], HOSTS, POOLS), EGRESS)
def test_the_bounds_of_a_rank_hold_for_every_offer(
    offers: list[Offer], wanted: Job, known: Experience, egress: StoreEgress
) -> None:
    state = reading(world(wanted, known=known), egress)
    shelves = catalogue(state, offers)
    fitting = shelves.list_for(shelves.key_of(wanted))
    ranked = [(q, shelves.ranked_total(fitting, q.offer)) for q in shelves.ranked(fitting)]
    for q, value in ranked:
        assert fitting.least_rank(q) <= value <= fitting.highest_rank(q.price.total) + 1
        assert total_at(value, fitting.expect(q.offer)) <= q.price.total * (PPM + 100_000) // PPM + 2
    for n, (q, _) in enumerate(ranked):
        assert all(later.price.total >= fitting.lowest_total_from(q) - 1 for later, _ in ranked[n:])


def todays_rank(one: Offer, wanted: Job, limits: Policy) -> tuple[int, int, str, str]:
    """By the formula of a spotd that had no speeds and no experience."""
    scarcity = 0 if one.capacity_score is None else 5_000 * (10 - one.capacity_score)
    premium = scarcity + max(0, min(one.hazard_ppm or 0, 100_000)) * 22 // 60
    gpu_price = usual_bid(one, limits.bid_headroom_ppm) if one.pays_bid else one.gpu_price
    total = total_per_hour(one, needs_of(wanted, limits), limits.providers[one.provider].fee_ppm, gpu_price)
    return (total + total * premium // PPM, ORDER[one.interruption], one.provider, one.offer_id)


@pytest.mark.long
@given(OFFERS, JOBS.filter(lambda j: not j.spec.speed and not j.paces))
def test_where_nothing_is_known_offers_rank_as_they_always_did(offers: list[Offer], wanted: Job) -> None:
    state = world(wanted)
    shelves = catalogue(state, offers)
    ranked = [(q.offer.provider, q.offer.offer_id) for q in shelves.ranked(shelves.list_for(shelves.key_of(wanted)))]
    assert ranked == [row[2:] for row in sorted(todays_rank(o, wanted, state.policy) for o in offers)]


@given(OFFERS, JOBS, PRICES, experiences([SHOP, POD], HOSTS, POOLS), st.randoms(use_true_random=False))
def test_the_order_of_offers_and_jobs_changes_nothing(
    offers: list[Offer], wanted: Job, price: PriceLimit, known: Experience, random: object
) -> None:
    spec = replace(wanted.spec, price=price)
    jobs = [
        replace(wanted, id=JobId(f"j{n}"), spec=spec, submitted_at=wanted.submitted_at + timedelta(seconds=n))
        for n in range(3)
    ]
    plan = decide(world(*jobs, known=known), snapshot(offers), NOW)
    random.shuffle(offers)  # type: ignore[attr-defined]  # a random.Random
    random.shuffle(jobs)  # type: ignore[attr-defined]  # a random.Random
    other = decide(world(*jobs, known=dict(reversed(list(known.items())))), snapshot(offers), NOW)
    assert {i: a.quote for i, a in plan.attempts.items()} == {i: a.quote for i, a in other.attempts.items()}
    assert plan.verdicts == other.verdicts


def of_price_alone(one: Offer) -> Offer:
    """An offer of which its provider states nothing but the price."""
    free = MicroUsdPerGb(0)
    return replace(one, capacity_score=None, hazard_ppm=None, pays_bid=False, download_price=free)


@given(
    OFFERS.map(lambda some: [of_price_alone(o) for o in some]),
    JOBS,
    PRICES,
    experiences([SHOP, POD], HOSTS, POOLS),
    st.integers(0, 13),
    st.integers(0, 100),
    st.none() | st.integers(1_000, 2_000_000),
)
def test_a_lower_price_never_takes_the_machine_from_a_job(
    offers: list[Offer],
    wanted: Job,
    price: PriceLimit,
    known: Experience,
    which: int,
    percent: int,
    budget: int | None,
) -> None:
    wanted = replace(wanted, spec=replace(wanted.spec, price=price, job_budget=budget))
    if not offers:
        return
    state = world(wanted, known=known)
    cheaper = list(offers)
    one = cheaper[which % len(cheaper)]
    cheaper[which % len(cheaper)] = replace(one, gpu_price=MicroUsdPerHour(one.gpu_price * percent // 100))
    if bought(state, offers):
        assert bought(state, cheaper)


# --- cases -----------------------------------------------------------------------------------------------------


def two_kinds(**spec: object) -> Job:
    return job(resources=ANY_GPU, ceiling=5_000_000, spec=spec)


SLOW_CHEAP = offer("slow", price=5_200_000, gpu="A100_SXM_80", gpu_count=4)
FAST_DEAR = offer("fast", price=14_000_000, gpu="H100_SXM", gpu_count=4)
THREE_TIMES = (GpuSpeed(name="A100-80GB", ppm=333_333), GpuSpeed(name="H100", ppm=1_000_000))


def chosen(state: World, *offers: Offer) -> list[str]:
    return [a.quote.offer.offer_id for a in decide(state, market(*offers), NOW).attempts.values()]


def one_provider(*jobs: Job, known: Experience = NO_EXPERIENCE) -> World:
    return world(*jobs, known=known, limits=b.shop_policy())


def test_the_machine_that_finishes_for_less_is_taken_although_it_costs_more_per_hour() -> None:
    assert chosen(one_provider(two_kinds(speed=THREE_TIMES)), SLOW_CHEAP, FAST_DEAR) == ["fast"]


def test_without_speeds_machines_count_alike() -> None:
    assert chosen(one_provider(two_kinds()), SLOW_CHEAP, FAST_DEAR) == ["slow"]


def test_a_budget_that_carries_only_the_slow_machine_takes_the_slow_machine() -> None:
    wanted = two_kinds(speed=THREE_TIMES)
    wanted = replace(wanted, spec=replace(wanted.spec, job_budget=1_500_000))
    assert chosen(one_provider(wanted), FAST_DEAR) == []
    assert chosen(one_provider(wanted), SLOW_CHEAP, FAST_DEAR) == ["slow"]


def test_a_bid_is_no_higher_than_leaves_the_machine_the_best_beside_a_faster_one() -> None:
    slow = replace(SLOW_CHEAP, gpu_price=MicroUsdPerHour(4_500_000), pays_bid=True)
    [item] = decide(one_provider(two_kinds(speed=THREE_TIMES)), market(slow, FAST_DEAR), NOW).attempts.values()
    assert item.quote.offer.offer_id == "fast" or item.price_max * 3 <= 14_000_000


def test_where_machines_were_lost_a_slightly_dearer_quiet_pool_is_taken() -> None:
    loud, quiet = offer("loud", price=400_000, host_id=None), offer("quiet", price=405_000, host_id=None)
    assert chosen(one_provider(job()), loud, quiet) == ["loud"]
    known = experience(
        record(RecordKind.LOSSES_PROVIDER, "spot", 6, 60), record(RecordKind.LOSSES_POOL, "spot pool-loud", 6, 20)
    )
    assert chosen(one_provider(job(), known=known), loud, quiet) == ["quiet"]
    assert chosen(one_provider(job(), known=known), loud) == ["loud"]


def test_a_long_restart_makes_the_same_losses_weigh_more() -> None:
    losses = (
        record(RecordKind.LOSSES_PROVIDER, "spot", 6, 60),
        record(RecordKind.LOSSES_POOL, "spot pool-loud", 6, 20),
    )
    quick = experience(*losses, record(RecordKind.STARTS, "scratch", 100, 1))
    slow = experience(*losses, record(RecordKind.STARTS, "scratch", 100, 150))
    loud, quiet = offer("loud", price=400_000, host_id=None), offer("quiet", price=412_000, host_id=None)
    assert chosen(one_provider(job(), known=quick), loud, quiet) == ["loud"]
    assert chosen(one_provider(job(), known=slow), loud, quiet) == ["quiet"]


@every("faults", [1, 1_000], ids=["one", "a thousand"])
def test_a_host_that_failed_ranks_behind_and_is_taken_where_nothing_else_is_sold(faults: int) -> None:
    known = experience(record(RecordKind.FAILED_STARTS, "host-a", faults))
    bad, good = offer("a", price=400_000), offer("b", price=415_000)
    assert chosen(one_provider(job(), known=known), bad, good) == ["b"]
    assert chosen(one_provider(job(), known=known), bad) == ["a"]
    assert chosen(one_provider(job(ceiling=900_000), known=known), bad, offer("c", price=540_000)) == ["a"]


def test_a_plan_with_records_is_applied_like_a_commit() -> None:
    before = world(known=experience(record(RecordKind.FAILED_STARTS, "h", 2)))
    [old] = before.experience.values()
    plan = decide(before, snapshot([]), NOW)
    after = applied(before, replace(plan, experience={old.id: replace(old, count=0)}))
    assert after.experience == {}
