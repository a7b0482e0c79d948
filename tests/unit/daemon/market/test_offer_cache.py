"""What the offer cache shows between two answers of a provider."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.daemon.controllers import WakeEvent
from spotd.daemon.market.offer_cache import Evidence, OfferCache
from spotd_providers.contract.values import HostId, InstanceState, Market, Offer, OfferPage
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, instance, listing, offer

SECOND = timedelta(seconds=1)


def shown(offer_cache: OfferCache) -> list[str]:
    offer_index = offer_cache.snapshot().by_provider[SHOP].offer_index
    return sorted(o.offer_id for group in offer_index.by_gpu.values() for o in group)


def page(*offers: Offer) -> OfferPage:
    return OfferPage(offers=offers, at=NOW)


def opened(*offers: Offer) -> OfferCache:
    offer_cache = OfferCache(WakeEvent())
    offer_cache.open(SHOP)
    offer_cache.offers_seen(SHOP, page(*offers), asked_at=NOW)
    return offer_cache


def test_an_offer_we_bought_is_not_shown_before_an_answer_that_can_know_of_it() -> None:
    one, other = offer("a"), offer("b")
    offer_cache = opened(one, other)
    offer_cache.bought(one, at=NOW + 10 * SECOND)
    assert shown(offer_cache) == ["b"]
    offer_cache.offers_seen(SHOP, page(one, other), asked_at=NOW + 9 * SECOND)
    assert shown(offer_cache) == ["b"], "that answer was asked for before the purchase"
    offer_cache.offers_seen(SHOP, page(one, other), asked_at=NOW + 11 * SECOND)
    assert shown(offer_cache) == ["a", "b"], "it is sold again"


def test_what_was_bought_is_not_shown_in_the_other_market_either() -> None:
    bid = offer("a:bid", host_id=HostId("h"))
    is_expensive = offer("a:on-demand", host_id=HostId("h"), market=Market.ON_DEMAND)
    offer_cache = opened(bid, is_expensive, offer("b:on-demand", market=Market.ON_DEMAND))
    offer_cache.bought(is_expensive, at=NOW + SECOND)
    assert shown(offer_cache) == ["b:on-demand"]


def test_another_offer_of_the_same_host_and_a_pool_stay() -> None:
    one, slice_, pool = offer("a", host_id=HostId("h")), offer("b", host_id=HostId("h")), offer("c", host_id=None)
    offer_cache = opened(one, slice_, pool)
    offer_cache.bought(one, at=NOW + SECOND)
    offer_cache.bought(pool, at=NOW + SECOND)
    assert shown(offer_cache) == ["b", "c"]


def of(count: int, name: str = "", *, host: str = "h", gpu: str = "RTX_4090", market: Market = Market.SPOT) -> Offer:
    return replace(offer(name or f"{host}:{count}", host_id=HostId(host), gpu=gpu, market=market), gpu_count=count)


@every(
    "offers, sold, left",
    [
        ([of(1), of(2), of(4), of(8)], 4, ["h:1", "h:2"]),
        ([of(1), of(2), of(4), of(8)], 8, []),
        ([of(4, "a"), of(4, "b"), of(8, "c")], 4, ["b"]),
        ([of(2, "a"), of(2, "b"), of(2, "c"), of(4, "d")], 2, ["b", "c", "d"]),
        ([of(4), of(8), of(8, host="i"), of(8, "l", gpu="L4")], 4, ["i:8", "l"]),
        ([of(4), of(4, "x", market=Market.ON_DEMAND)], 4, []),
    ],
    ids=[
        "one's own host, in every count",
        "the whole of it",
        "parts that are offers of their own",
        "parts and no whole",
        "another host and other GPUs stay",
        "two markets are not two hosts",
    ],
)
def test_what_was_bought_is_not_sold_again_in_another_count(offers: list[Offer], sold: int, left: list[str]) -> None:
    offer_cache = opened(*offers)
    offer_cache.bought(next(o for o in offers if o.gpu_count == sold), at=NOW + SECOND)
    assert shown(offer_cache) == left
    here = {(one.gpu, one.gpu_count) for one in offers if one.host_id == "h"}
    assert offer_cache.snapshot().of_hosts == {(SHOP, "h"): here}, "what it offered is known on"


def test_when_a_kind_was_last_offered_is_kept_when_it_is_gone() -> None:
    seen = Evidence()
    seen.note_kinds(SHOP, [("RTX_4090", 1)], NOW)
    seen.note_kinds(SHOP, [("H100_SXM", 8)], NOW + timedelta(hours=2))
    seen.note_kinds(SHOP, [("RTX_4090", 1)], NOW - timedelta(hours=1))  # of the history, read later
    assert seen.last_offers() == {SHOP: {("RTX_4090", 1): NOW, ("H100_SXM", 8): NOW + timedelta(hours=2)}}


class CountedWakes(WakeEvent):
    count = 0

    def notify(self) -> None:
        self.count += 1


def test_a_list_wakes_the_loop_that_is_new_comes_after_an_error_or_is_awaited() -> None:
    wakes, awaited = CountedWakes(), False
    offer_cache = OfferCache(wakes)
    offer_cache.open(SHOP)
    offer_cache.awaits_list = lambda _provider: awaited
    newest = listing(instance(InstanceState.RUNNING))[SHOP]

    def woken_by(**changes: object) -> int:
        nonlocal newest
        before, newest = wakes.count, replace(newest, at=newest.at + SECOND, **changes)  # type: ignore[arg-type]  # of any field
        offer_cache.machines_listed(SHOP, newest)
        assert offer_cache.listings()[SHOP] is newest
        return wakes.count - before

    assert woken_by() == 1
    assert woken_by() == 0
    assert woken_by(complete=False) == 1
    offer_cache.machines_failed(SHOP, "it does not answer", at=NOW)
    assert woken_by() == 1
    assert woken_by() == 0
    awaited = True
    assert woken_by() == 1
