"""The best offer is the one for which least would be agreed, and a bid is no higher than keeps it the best."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.pricing import gpu_price_within, needs_of, quote, quote_words, repriced, usual_bid
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, Offer, ProviderName
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, market, offer, shop_policy

POD = ProviderName("pod")


def two_providers() -> Policy:
    policy = shop_policy()
    rules = replace(policy.providers[SHOP], fee_ppm=1_200_000)
    return replace(policy, providers={SHOP: rules, POD: replace(rules, name=POD, fee_ppm=1_000_000)})


def bought(*offers: Offer, policy: Policy | None = None, ceiling: int = 2_000_000) -> Attempt:
    world = World(policy=policy or shop_policy(), jobs={job().id: job(ceiling=ceiling)}, attempts={}, intents={})
    offer_cache = {
        name: ProviderOffers(
            provider=name, offer_index=build_offer_index(tuple(o for o in offers if o.provider == name)), at=NOW
        )
        for name in {o.provider for o in offers}
    }
    (item,) = decide(world, MarketSnapshot(by_provider=offer_cache), NOW).attempts.values()
    return item


def bid(name: str, floor: int, **changes: object) -> Offer:
    return offer(name, price=floor, pays_bid=True, **changes)


def test_a_fixed_price_below_the_bid_that_would_be_placed_is_the_cheaper_one() -> None:
    """As it was seen: $0.3589 was agreed by a bid where a fixed $0.3414 stood beside it."""
    marketplace = bid("ask", 271_900)
    fixed = replace(offer("pod", price=341_400), provider=POD)
    item = bought(marketplace, fixed, policy=two_providers())
    assert (item.provider, item.quote.price.total) == (POD, 341_400)


def test_fee_disk_and_traffic_count_before_a_bid_is_compared() -> None:
    policy = two_providers()
    cheap_gpu = bid("ask", 250_000, storage_price=MicroUsdPerGbMonth(7_200_000))
    fixed = replace(offer("pod", price=400_000), provider=POD)
    item = bought(cheap_gpu, fixed, policy=policy)
    assert item.provider == POD
    assert item.quote.price.total < 250_000 * 1.1 * 1.2 + 100_000 * 1.2


def test_of_two_bids_the_one_that_would_be_lower_wins() -> None:
    assert bought(bid("a", 300_000), bid("b", 290_000)).quote.offer.offer_id == "b"
    item = bought(bid("a", 300_000), bid("b", 299_000))
    assert item.price_max == 328_900


def test_a_bid_has_its_whole_headroom_where_nothing_else_is_near() -> None:
    assert bought(bid("a", 300_000)).price_max == 330_000
    assert bought(bid("a", 300_000), offer("b", price=900_000)).price_max == 330_000


def test_a_bid_stays_within_the_ceiling_whatever_its_headroom() -> None:
    item = bought(bid("a", 300_000), offer("b", price=320_000), ceiling=310_000)
    assert (item.quote.offer.offer_id, item.price_max) == ("a", 310_000)


def test_both_figures_of_a_bid_are_said() -> None:
    item = bought(bid("a", 300_000))
    words = quote_words(item.quote)
    assert "bidding $0.3300/GPU-h (lowest winning bid $0.3000/GPU-h)" in words
    assert "bidding" not in quote_words(bought(offer("b")).quote)


def test_an_on_demand_offer_of_a_bid_market_is_not_bid_for() -> None:
    assert usual_bid(offer("a", price=300_000, market=Market.ON_DEMAND, pays_bid=True), 100_000) == 300_000


@given(
    floors=st.lists(st.integers(1_000, 1_900_000), min_size=1, max_size=6),
    prices=st.lists(st.integers(1_000, 1_900_000), max_size=6),
    fee=st.sampled_from([1_000_000, 1_200_000]),
)
def test_no_machine_is_agreed_above_what_another_would_have_been(
    floors: list[int], prices: list[int], fee: int
) -> None:
    policy = two_providers()
    policy = replace(policy, providers={**policy.providers, SHOP: replace(policy.providers[SHOP], fee_ppm=fee)})
    bids = [bid(f"b{n}", floor) for n, floor in enumerate(floors)]
    fixed = [replace(offer(f"f{n}", price=price), provider=POD) for n, price in enumerate(prices)]
    item = bought(*bids, *fixed, policy=policy)
    assert all(item.quote.price.total <= price for price in prices)
    assert item.quote.price.per_gpu <= item.ceiling
    assert item.price_max >= item.quote.offer.gpu_price


@given(price=st.integers(0, 10**7), total=st.integers(-(10**6), 10**7), fee=st.sampled_from([1_000_000, 1_234_567]))
def test_the_price_within_a_total_is_the_highest_that_fits(price: int, total: int, fee: int) -> None:
    sold = offer("a", price=price, storage_price=MicroUsdPerGbMonth(100_000))
    agreed = quote(sold, needs_of(job(), shop_policy()), fee, NOW)
    highest = gpu_price_within(agreed, total)
    if highest > 0:
        assert repriced(agreed, highest).price.total <= total
        assert repriced(agreed, MicroUsdPerHour(highest + 2)).price.total > total


@every("headroom", [0, 100_000])
def test_the_ranking_finds_an_admissible_bid_behind_fixed_prices_that_are_not(headroom: int) -> None:
    policy = shop_policy(bid_headroom_ppm=headroom)
    crowd = [offer(f"f{n}", price=505_000 + n) for n in range(30)]
    world = World(policy=policy, jobs={job().id: job(ceiling=500_000)}, attempts={}, intents={})
    plan = decide(world, market(*crowd, bid("b", 500_000)), NOW)
    assert [a.quote.offer.offer_id for a in plan.attempts.values()] == ["b"]
