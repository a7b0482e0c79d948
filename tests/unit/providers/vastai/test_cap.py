"""A search shows 64 offers at most: what the queue needs is found all the same, within the searches of a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd_providers.contract.errors import RateLimited, Unavailable
from spotd_providers.contract.values import Market, OfferQuery
from spotd_providers.testkit.clock import START, FakeClock
from spotd_providers.testkit.serve import Call
from spotd_providers.vastai.plugin import VastProvider
from spotd_providers.vastai.searching import PROBE_POLLS, SEARCHES_PER_POLL, OfferSearch, SearchResult
from spotd_providers.vastai.wire import OfferRows, VastSettings, offer_rows
from tests.cases import every
from tests.fakes.vastai import Ask, Quirks
from tests.fakes.vastai.asks import selected
from tests.fakes.vastai.rows import ask_row
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import play

SPOT = (Market.SPOT,)
RAM = {"H100 SXM": 81_559, "H200": 143_771, "L40S": 46_068, "A40": 46_068, "RTX A6000": 49_140, "RTX 5090": 32_607}
H100 = OfferQuery(gpus=("H100_SXM",), markets=SPOT)


def asks(
    count: int, *, gpu: str = "RTX 3090", first: int = 1, price: float = 0.1, step: float = 0.001, gpus: int = 1
) -> list[Ask]:
    return [
        Ask(
            ask_id=first + n,
            machine_id=10_000 + first + n,
            gpu_name=gpu,
            gpu_ram=RAM.get(gpu, 24_564),
            min_bid=round(price + n * step, 6),
            dph_base=round(price + n * step, 6),
            slots=frozenset(range(gpus)),
            machine_gpus=gpus,
        )
        for n in range(count)
    ]


class Shop:
    """Answers searches as the service does, cut off at `cap`."""

    def __init__(self, *sold: Ask, cap: int | None = 64) -> None:
        self.sold = list(sold)
        self.cap = cap
        self.bodies: list[Mapping[str, Any]] = []
        self.failures: dict[int, Exception] = {}

    async def search(self, body: Mapping[str, Any]) -> OfferRows:
        self.bodies.append(body)
        failure = self.failures.get(len(self.bodies))
        if failure is not None:
            raise failure
        rows = [ask_row(ask, kind=body["type"], allocated_gb=8, now=START, quirks=Quirks()) for ask in self.sold]
        found = selected(rows, body)[: self.cap]
        return offer_rows(json.dumps({"offers": found}).encode())


def searcher(shop: Shop, clock: FakeClock | None = None, **more: Any) -> OfferSearch:
    return OfferSearch(shop.search, VastSettings(), clock or FakeClock(), **more)


def polled(one: OfferSearch, query: OfferQuery, *, times: int = 1, clock: FakeClock | None = None) -> SearchResult:
    found = None
    for _ in range(times):
        found = anyio.run(one.found, query)
        if clock is not None:
            clock.advance(timedelta(minutes=1))
    assert found is not None
    return found


def ids(found: SearchResult, market: Market = Market.SPOT) -> set[int]:
    return {row.id for row in found.rows[market]}


def test_a_gpu_that_a_job_waits_for_is_found_behind_hundreds_of_cheaper_ones() -> None:
    shop = Shop(*asks(500), *asks(3, gpu="H100 SXM", first=5_000, price=2.0))
    found = polled(searcher(shop), H100)
    assert ids(found) >= {5_000, 5_001, 5_002}
    assert found.complete
    assert found.whole == {("H100_SXM", 0)}
    assert [body.get("gpu_name") for body in shop.bodies] == [None, {"in": ["H100 SXM"]}]


def test_without_the_cap_two_searches_read_the_whole_market() -> None:
    shop = Shop(*asks(500), *asks(3, gpu="H100 SXM", first=5_000, price=2.0), cap=None)
    found = polled(searcher(shop), OfferQuery(gpus=("H100_SXM",), watched=("RTX_4090",)))
    assert (len(ids(found)), found.complete, found.whole, found.note) == (503, True, frozenset(), "")
    assert len(shop.bodies) == 2


@every("cap", [17, 40, 90, 300])
def test_a_cap_that_nobody_knew_of_is_learned_from_a_gpu_that_only_its_name_finds(cap: int) -> None:
    wanted = asks(cap + 20, gpu="H100 SXM", first=5_000, price=2.0)
    shop, clock = Shop(*asks(500), *wanted, cap=cap), FakeClock()
    one = searcher(shop, clock)
    found = polled(one, H100, times=2, clock=clock)
    assert {i for i in ids(found) if i >= 5_000} == {ask.ask_id for ask in wanted}
    assert found.whole == {("H100_SXM", 0)}


def test_a_gpu_that_nobody_sells_is_asked_for_by_its_name_every_ten_minutes() -> None:
    shop, clock = Shop(*asks(501), cap=None), FakeClock()
    found = polled(searcher(shop, clock), H100, times=21, clock=clock)
    assert found.complete
    assert sum("gpu_name" in body for body in shop.bodies) == 3


def test_a_search_by_name_that_fails_costs_nothing_else() -> None:
    shop = Shop(*asks(501), cap=None)
    shop.failures[2] = Unavailable("away")
    assert polled(searcher(shop), H100).complete


@every("rows", [63, 64, 65, 100, 127, 128, 129, 200])
def test_a_cursor_of_prices_goes_on_where_a_page_ends(rows: int) -> None:
    shop = Shop(*asks(100), *asks(rows, gpu="H100 SXM", first=5_000, price=2.0))
    found = polled(searcher(shop), H100)
    assert {i for i in ids(found) if i >= 5_000} == set(range(5_000, 5_000 + rows))
    assert found.complete


@every("rows", [64, 65, 128, 180])
def test_a_price_that_fills_more_than_a_page_is_walked_through_by_machine(rows: int) -> None:
    tied = asks(rows, gpu="H100 SXM", first=5_000, price=2.0, step=0.0)
    dearer = asks(5, gpu="H100 SXM", first=9_000, price=3.0)
    shop = Shop(*asks(64), *tied, *dearer)
    one = searcher(shop)
    found = polled(one, H100)
    assert {i for i in ids(found) if i >= 5_000} == {ask.ask_id for ask in [*tied, *dearer]}
    assert found.complete


def test_a_tie_in_the_middle_and_pages_behind_it_are_read() -> None:
    sold = [
        *asks(30, gpu="H100 SXM", first=5_000, price=1.0),
        *asks(100, gpu="H100 SXM", first=6_000, price=2.0, step=0.0),
        *asks(20, gpu="H100 SXM", first=7_000, price=3.0),
    ]
    found = polled(searcher(Shop(*asks(64), *sold)), H100)
    assert {i for i in ids(found) if i >= 5_000} == {ask.ask_id for ask in sold}
    assert found.complete


def test_one_machine_with_more_asks_of_one_price_than_a_page_ends_and_says_that_some_are_missing() -> None:
    same = asks(200, gpu="H100 SXM", first=5_000, price=2.0, step=0.0)
    for ask in same:
        ask.machine_id = 7
    shop = Shop(*asks(64), *same, *asks(3, gpu="H100 SXM", first=9_000, price=3.0))
    found = polled(searcher(shop), H100)
    assert not found.complete
    assert len(shop.bodies) <= 1 + SEARCHES_PER_POLL
    assert {9_000, 9_001, 9_002} <= ids(found), "what costs more than the tie is read all the same"


class Deaf(Shop):
    """Ignores every filter but the name of the GPU, as a service that was changed may."""

    async def search(self, body: Mapping[str, Any]) -> OfferRows:
        return await super().search(
            {key: value for key, value in body.items() if key not in ("dph_total", "machine_id")}
        )


class Strict(Shop):
    """Refuses a search by machine."""

    async def search(self, body: Mapping[str, Any]) -> OfferRows:
        if "machine_id" in body:
            self.bodies.append(body)
            raise Unavailable("vast.ai refused the search: no such column")
        return await super().search(body)


@every("kind", [Deaf, Strict])
def test_a_service_that_does_not_know_the_cursor_is_not_asked_for_ever_and_the_page_is_not_whole(
    kind: type[Shop],
) -> None:
    shop = kind(*asks(64), *asks(300, gpu="H100 SXM", first=5_000, price=2.0, step=0.0))
    found = polled(searcher(shop), H100)
    assert not found.complete
    assert found.whole == frozenset()
    assert len(shop.bodies) <= SEARCHES_PER_POLL
    assert len([i for i in ids(found) if i >= 5_000]) >= 64


def test_jobs_that_need_eight_gpus_do_not_see_the_offers_of_one_first() -> None:
    sold = [
        *asks(500, gpu="H100 SXM", first=5_000, price=2.0),
        *asks(2, gpu="H100 SXM", first=9_000, price=16.0, gpus=8),
    ]
    shop = Shop(*sold)
    found = polled(searcher(shop), OfferQuery(gpus=("H100_SXM",), gpu_counts=(8,), markets=SPOT))
    assert {9_000, 9_001} <= ids(found)
    assert (found.complete, found.whole) == (True, frozenset({("H100_SXM", 8)}))


def test_a_job_that_names_no_gpu_gets_the_cheapest_with_enough_memory() -> None:
    sold = asks(100, first=5_000)
    for ask in sold:
        ask.gpu_ram = 8_192
    shop = Shop(*sold, *asks(3, gpu="A40", first=9_000, price=1.0))
    for ask in shop.sold[100:]:
        ask.gpu_ram = 46_068
    found = polled(searcher(shop), OfferQuery(vram_mb_min=40_000, gpu_counts=(1,), markets=SPOT))
    assert {9_000, 9_001, 9_002} <= ids(found)


def test_when_nobody_names_a_gpu_one_search_a_market_is_made_and_said_to_be_cut_off() -> None:
    shop = Shop(*asks(500))
    found = polled(searcher(shop), OfferQuery(), times=3)
    assert (found.complete, found.whole, len(ids(found))) == (False, frozenset(), 64)
    assert "names a GPU" in found.note
    assert len(shop.bodies) == 6


def test_names_that_vast_spells_alike_share_a_search_and_unknown_ones_are_asked_for_as_they_are() -> None:
    shop = Shop(*asks(64))
    polled(searcher(shop), OfferQuery(gpus=("A100_SXM_80", "A100_SXM_40", "RTX_6090"), markets=SPOT))
    assert [body.get("gpu_name") for body in shop.bodies[1:]] == [
        {"in": ["A100 SXM", "A100 SXM4"]},
        {"in": ["RTX 6090"]},
    ]


def test_many_gpus_are_asked_for_in_turn_within_the_budget_and_shown_for_some_minutes() -> None:
    names = ("H100_SXM", "RTX_4090", "RTX_5090", "L40S", "A40", "RTX_A6000", "L4", "H200_SXM")
    spelled = ("H100 SXM", "RTX 4090", "RTX 5090", "L40S", "A40", "RTX A6000", "L4", "H200")
    shop = Shop(
        *asks(64), *(ask for n, s in enumerate(spelled) for ask in asks(2, gpu=s, first=5_000 + 100 * n, price=2))
    )
    clock = FakeClock()
    one = searcher(shop, clock)
    query = OfferQuery(gpus=names)
    polls: list[SearchResult] = []
    for poll in range(4):
        before = len(shop.bodies)
        polls.append(polled(one, query, clock=clock))
        assert len(shop.bodies) - before <= SEARCHES_PER_POLL, poll
    found = polls[-1]
    assert {i for i in ids(found) if i >= 5_000} == {5_000 + 100 * n + k for n in range(8) for k in (0, 1)}
    assert not found.complete, "not all of them were asked for in this poll"
    shop.sold = shop.sold[:64]
    found = polled(one, query, times=6, clock=clock)
    assert not [i for i in ids(found) if i >= 5_000], "what nobody has seen for minutes is shown no more"


def test_a_watch_list_of_twenty_gpus_costs_two_searches_a_poll_beside_what_jobs_need() -> None:
    shop = Shop(*asks(64))
    clock = FakeClock()
    one = searcher(shop, clock)
    watched = tuple(f"RTX_{n}" for n in range(7000, 7020))
    polled(one, OfferQuery(gpus=("H100_SXM",), watched=watched), clock=clock)
    before = len(shop.bodies)
    polled(one, OfferQuery(gpus=("H100_SXM",), watched=watched), times=20, clock=clock)
    assert len(shop.bodies) - before == 20 * 4
    asked = {body["gpu_name"]["in"][0] for body in shop.bodies if "gpu_name" in body}
    assert asked == {"H100 SXM", *(name.replace("_", " ") for name in watched)}


def test_the_whole_market_is_tried_again_after_an_hour_of_narrow_searches() -> None:
    shop = Shop(*asks(200))
    one = searcher(shop)
    polled(one, H100)
    shop.cap = None
    found = polled(one, H100, times=PROBE_POLLS)
    assert (found.complete, len(ids(found))) == (True, 200)


def test_a_search_that_fails_in_the_middle_leaves_what_was_read_and_one_that_fails_first_is_told() -> None:
    shop = Shop(*asks(64), *asks(300, gpu="H100 SXM", first=5_000, price=2.0))
    shop.failures = {4: RateLimited("too often", retry_after=timedelta(seconds=5))}
    one = searcher(shop)
    found = polled(one, H100)
    assert (len([i for i in ids(found) if i >= 5_000]), found.complete) == (127, False)
    shop.failures = {len(shop.bodies) + 1: Unavailable("down")}
    with pytest.raises(Unavailable):
        polled(one, H100)


def test_a_poll_stops_where_the_next_search_would_wait_for_long() -> None:
    shop = Shop(*asks(64), *asks(300, gpu="H100 SXM", first=5_000, price=2.0))
    room = iter([True, False])
    found = polled(searcher(shop, has_room=lambda: next(room)), H100)
    assert (len([i for i in ids(found) if i >= 5_000]), found.complete) == (127, False)


def test_a_clock_that_was_set_back_drops_what_was_held() -> None:
    names = ("H100_SXM", "RTX_4090", "RTX_5090", "L40S", "A40", "RTX_A6000", "L4", "H200_SXM")
    shop = Shop(*asks(64), *asks(2, gpu="H100 SXM", first=5_000, price=2.0))
    clock = FakeClock()
    one = searcher(shop, clock)
    polled(one, OfferQuery(gpus=names, markets=SPOT))
    shop.sold = shop.sold[:64]
    clock.advance(timedelta(hours=-8))
    assert not [i for i in ids(polled(one, OfferQuery(gpus=names[::-1], markets=SPOT))) if i >= 5_000]


# --- through the provider and the fake -------------------------------------------------------------------------


def big_market(h: VastHarness) -> None:
    h.cloud.asks.clear()
    for ask in [*asks(300), *asks(100, gpu="H100 SXM", first=5_000, price=2.0)]:
        h.cloud.asks[ask.ask_id] = ask


@pytest.mark.parametrize("cap", [64, None])
def test_an_h100_is_found_with_the_cap_and_without_within_the_searches_of_a_minute(
    cap: int | None, tmp_path: Path
) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        big_market(h)
        page = await provider.offers(OfferQuery(gpus=("H100_SXM",)))
        shown = {offer.offer_id for offer in page.offers if offer.gpu == "H100_SXM" and offer.market is Market.SPOT}
        assert len(shown) == 100
        assert page.complete
        assert (("H100_SXM", 0) in page.whole) is (cap is not None)
        assert len({offer.offer_id for offer in page.offers}) == len(page.offers)
        began = h.clock.now()
        for _ in range(10):
            await provider.offers(OfferQuery(gpus=("H100_SXM",)))
        assert all(r.status == 200 for r in h.requests(Call.OFFERS)), "it was asked too often"
        sent = len(h.requests(Call.OFFERS))
        assert provider.requests_sent >= sent
        assert h.clock.now() - began >= timedelta(minutes=(sent - 16) / 8)

    play(tmp_path, story, Quirks(search_rows_max=cap))


def test_the_fake_refuses_what_the_service_refuses(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        search = provider._client.search
        with pytest.raises(Unavailable, match="no such column"):
            await search({"q": {"gpu_name": {"eq": "A40"}}})
        with pytest.raises(Unavailable, match="no such column"):
            await search({"type": "bid", "colour": {"eq": "red"}})
        some = next(iter(h.cloud.asks))
        assert (await search({"type": "bid", "id": {"eq": some}})).count == 0
        assert (await search({"type": "bid", "ask_contract_id": {"eq": some}})).count == 1

    play(tmp_path, story)
