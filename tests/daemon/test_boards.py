"""What the boards show between two answers of a provider."""

from __future__ import annotations

from datetime import timedelta

from spotd.daemon.bell import Bell
from spotd.daemon.boards import Boards
from spotd_providers.contract.values import HostId, Market, Offer, OfferPage
from tests.core.builders import NOW, SHOP, offer

SECOND = timedelta(seconds=1)


def shown(boards: Boards) -> list[str]:
    shelf = boards.snapshot().boards[SHOP].shelf
    return sorted(o.offer_id for group in shelf.by_gpu.values() for o in group)


def page(*offers: Offer) -> OfferPage:
    return OfferPage(offers=offers, at=NOW)


def opened(*offers: Offer) -> Boards:
    boards = Boards(Bell())
    boards.open(SHOP)
    boards.offers_seen(SHOP, page(*offers), asked_at=NOW)
    return boards


def test_an_offer_we_bought_is_not_shown_before_an_answer_that_can_know_of_it() -> None:
    one, other = offer("a"), offer("b")
    boards = opened(one, other)
    boards.bought(one, at=NOW + 10 * SECOND)
    assert shown(boards) == ["b"]
    boards.offers_seen(SHOP, page(one, other), asked_at=NOW + 9 * SECOND)
    assert shown(boards) == ["b"], "that answer was asked for before the purchase"
    boards.offers_seen(SHOP, page(one, other), asked_at=NOW + 11 * SECOND)
    assert shown(boards) == ["a", "b"], "it is sold again"


def test_what_was_bought_is_not_shown_in_the_other_market_either() -> None:
    bid = offer("a:bid", host_id=HostId("h"))
    dear = offer("a:on-demand", host_id=HostId("h"), market=Market.ON_DEMAND)
    boards = opened(bid, dear, offer("b:on-demand", market=Market.ON_DEMAND))
    boards.bought(dear, at=NOW + SECOND)
    assert shown(boards) == ["b:on-demand"]


def test_another_offer_of_the_same_host_and_a_pool_stay() -> None:
    one, slice_, pool = offer("a", host_id=HostId("h")), offer("b", host_id=HostId("h")), offer("c", host_id=None)
    boards = opened(one, slice_, pool)
    boards.bought(one, at=NOW + SECOND)
    boards.bought(pool, at=NOW + SECOND)
    assert shown(boards) == ["b", "c"]
