"""What is asked of vast.ai's search, which hosts the settings keep out, and how prices of both markets meet."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spotd_providers.contract.errors import RateLimited, Unavailable
from spotd_providers.contract.values import Interruption, Market, OfferQuery
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import Call, Canned
from spotd_providers.vastai.offers import OnDemandPrices, country, offers_of, search_body
from spotd_providers.vastai.plugin import PLUGIN, VastProvider
from spotd_providers.vastai.wire import OfferRow, VastSettings, offer_rows
from tests.cases import every
from tests.fakes.vastai import Ask, Quirks
from tests.fakes.vastai.rows import ask_row
from tests.unit.providers.vastai.harness import VastHarness
from tests.unit.providers.vastai.stories import play

STRICT = VastSettings(
    verified=True,
    datacenter=True,
    reliability_min=0.98,
    cuda_min=12.4,
    direct_ports_min=2,
    duration_min="3d",
    bandwidth_price_max=0.01,
)
GOOD = Ask(ask_id=7, machine_id=70, hosting_type=1)


def rows_of(*asks: Ask, kind: str = "bid", quirks: Quirks | None = None, **more: Any) -> tuple[OfferRow, ...]:
    made = [ask_row(a, kind=kind, allocated_gb=8, now=START, quirks=quirks or Quirks()) | more for a in asks]
    understood = offer_rows(json.dumps({"offers": made}).encode())
    assert not understood.rejected
    return understood.rows


def test_both_markets_are_searched_for_all_rows_priced_with_our_disk(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        await provider.offers(OfferQuery(disk_gb=64))
        bodies = {body["type"]: body for body in (json.loads(r.body) for r in h.requests(Call.OFFERS))}
        assert set(bodies) == {"bid", "on-demand"}
        for body in bodies.values():
            assert (body["limit"], body["allocated_storage"]) == (3000, 64.0)
            assert body["verified"] == {"eq": True}
            assert body["rentable"] == {"eq": True}
            assert body["external"] == {"eq": False}
        assert bodies["on-demand"]["rented"] == {"eq": False}
        assert "rented" not in bodies["bid"]

    play(tmp_path, story)


def test_only_the_market_that_is_wanted_is_searched(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        page = await provider.offers(OfferQuery(markets=(Market.SPOT,)))
        assert {offer.market for offer in page.offers} == {Market.SPOT}
        assert len(h.requests(Call.OFFERS)) == 1

    play(tmp_path, story)


@every(("stated", "score"), [(196.8, 196.8), (0, None), (None, None), (-1.0, None), ("fast", None), (1e300, None)])
def test_an_offer_has_the_benchmark_of_its_machine_and_never_fails_by_it(stated: object, score: float | None) -> None:
    rows = rows_of(GOOD, dlperf=stated)
    [offer] = offers_of(rows, Market.SPOT, VastSettings(), on_demand=OnDemandPrices())[0]
    assert offer.speed_score == score


def test_every_filter_is_sent_to_vast() -> None:
    body = search_body(STRICT, 10, Market.SPOT)
    assert body["datacenter"] == {"eq": True}
    assert body["reliability"] == {"gte": 0.98}
    assert body["cuda_max_good"] == {"gte": 12.4}
    assert body["direct_port_count"] == {"gte": 2}
    assert body["duration"] == {"gte": 3 * 86400.0}
    assert body["inet_up_cost"] == body["inet_down_cost"] == {"lte": 0.01}


@every(
    ("change", "reason"),
    [
        ({"verification": "unverified"}, "verified"),
        ({"verification": "deverified"}, "verified"),
        ({"hosting_type": 0}, "datacentre"),
        ({"reliability": 0.97}, "reliability"),
        ({"cuda_max_good": 12.2}, "CUDA"),
        ({"direct_port_count": 1}, "direct ports"),
        ({"duration_s": 2 * 86400.0}, "on offer for"),
        ({"inet_up_cost": 0.02}, "traffic"),
        ({"inet_down_cost": 0.02}, "traffic"),
        ({"gpu_name": "RTX 4080 laptop"}, "laptop"),
        ({"rentable": False}, "rentable"),
        ({"more": {"cpu_arch": "arm64"}}, "arm64"),
        ({"more": {"external": True}}, "external"),
    ],
)
def test_a_host_that_vast_should_have_left_out_is_left_out_here_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    kept, _ = offers_of(rows_of(GOOD), Market.SPOT, STRICT, on_demand=OnDemandPrices())
    assert len(kept) == 1
    offers, rejected = offers_of(rows_of(replace(GOOD, **change)), Market.SPOT, STRICT, on_demand=OnDemandPrices())
    assert not offers
    assert reason in rejected[0].reason


def test_what_somebody_rents_can_be_bid_on_but_not_bought() -> None:
    rows = rows_of(GOOD, rented=True)
    assert offers_of(rows, Market.SPOT, STRICT, on_demand=OnDemandPrices())[0]
    offers, rejected = offers_of(rows, Market.ON_DEMAND, STRICT, on_demand=OnDemandPrices())
    assert not offers
    assert rejected[0].reason == "already rented"


def test_a_bid_is_judged_by_the_on_demand_search_where_bid_rows_hide_the_base_price() -> None:
    is_expensive = replace(GOOD, min_bid=0.5, dph_base=0.4)
    bids = rows_of(is_expensive, quirks=Quirks(base_shows_bid=True))
    blind, _ = offers_of(bids, Market.SPOT, STRICT, on_demand=OnDemandPrices())
    assert [offer.on_demand_price for offer in blind] == [None]
    prices = OnDemandPrices(rows_of(is_expensive, kind="on-demand"))
    offers, rejected = offers_of(bids, Market.SPOT, STRICT, on_demand=prices)
    assert not offers
    assert "above the on-demand price" in rejected[0].reason


def test_the_on_demand_price_of_the_same_hardware_is_found_under_another_ask() -> None:
    prices = OnDemandPrices(rows_of(replace(GOOD, ask_id=8, dph_base=0.44), kind="on-demand"))
    (offer,), _ = offers_of(rows_of(GOOD, quirks=Quirks(base_shows_bid=True)), Market.SPOT, STRICT, on_demand=prices)
    assert offer.on_demand_price == 440_000


def test_an_offer_says_all_that_a_price_needs() -> None:
    (offer,), _ = offers_of(rows_of(GOOD), Market.SPOT, STRICT, on_demand=OnDemandPrices())
    assert (offer.gpu, offer.gpu_count, offer.gpu_vram_mb) == ("RTX_4090", 1, 24564)
    assert (offer.gpu_price, offer.on_demand_price, offer.pays_bid) == (200_000, 400_000, True)
    assert (offer.storage_price, offer.upload_price, offer.download_price) == (150_000, 4_000, 3_000)
    assert (offer.host_id, offer.pool, offer.interruption) == ("70", "70", Interruption.SUDDEN)
    assert (offer.region, offer.extra["location"]) == ("CA", "Quebec, CA")
    assert (offer.cuda_max, offer.disk_gb_max, offer.duration_max) == ("12.8", 800, timedelta(days=30))


@every(
    ("text", "code"), [("Quebec, CA", "CA"), (", US", "US"), (None, ""), ("", ""), ("Mars", "Mars"), ("a, b, de", "DE")]
)
def test_regions_are_country_codes(text: str | None, code: str) -> None:
    assert country(text) == code


def test_a_page_as_long_as_its_limit_is_not_complete(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        assert (await provider.offers(h.query())).complete

    play(tmp_path, story)
    with_limit = VastSettings(offers_max=3)

    async def cut(h: VastHarness, _: VastProvider) -> None:
        h.settings = lambda: VastSettings(base_url=h.served.url, offers_max=with_limit.offers_max)  # type: ignore[method-assign] # this harness, other settings
        async with h.opened() as provider:
            page = await provider.offers(h.query())
            assert not page.complete
            assert len(page.offers) == 6

    play(tmp_path / "cut", cut)


def test_the_daily_search_quota_is_waited_out_until_midnight(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        await provider.offers(h.query())
        with pytest.raises(RateLimited, match="daily search quota") as limited:
            await provider.offers(h.query())
        assert limited.value.retry_after == timedelta(hours=12)

    play(tmp_path, story, Quirks(search_quota=2))


def test_a_search_that_vast_refuses_is_unavailable_and_quotes_no_more_than_its_words(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        body = b'{"success":false,"error":"invalid_args","msg":"error 400/3400: odd query near deadbeef12345678"}'
        h.faults.answer(Call.OFFERS, Canned(status=400, body=body))
        with pytest.raises(Unavailable, match="400/3400") as refused:
            await provider.offers(h.query())
        assert "deadbeef" not in str(refused.value)

    play(tmp_path, story)


def test_many_polls_stay_below_ten_searches_a_minute(tmp_path: Path) -> None:
    async def story(h: VastHarness, provider: VastProvider) -> None:
        start = h.clock.now()
        for _ in range(20):
            await provider.offers(h.query())
        assert h.clock.now() - start >= timedelta(minutes=4)
        assert all(r.status == 200 for r in h.requests(Call.OFFERS))

    play(tmp_path, story)


@every(
    "wrong",
    [
        {"base_url": "http://console.vast.ai"},
        {"base_url": "console.vast.ai"},
        {"base_url": "https://user@console.vast.ai"},
        {"duration_min": "soon"},
        {"reliability_min": 1.5},
        {"cuda_min": float("nan")},
        {"offers_max": 0},
        {"cpu_arch": "riscv"},
        {"api_key": "x"},
        {"verifed": True},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        VastSettings.model_validate(wrong)


@every(
    ("url", "loopback"),
    [
        ("https://console.vast.ai", False),
        ("http://127.0.0.1:8080", True),
        ("http://localhost:1", True),
        ("http://[::1]:9/", True),
        ("https://127.example.org", False),
    ],
)
def test_hosts_share_our_files_only_where_the_market_is_this_computer(url: str, loopback: bool) -> None:
    traits = PLUGIN.traits(VastSettings(base_url=url))
    assert traits.hosts_share_filesystem is loopback
    assert (traits.ends_itself_by, traits.ends_itself_at) == ("vast", url.rstrip("/"))
    assert traits.default_fee_multiplier == "1.20"
    assert 4000 < traits.start_script_bytes_max < 4096
