"""Damaged search answers: no crash, no price that is not in the row, no good row lost to a bad neighbour."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import MICRO, Market
from spotd_providers.kit.shapes import as_model
from spotd_providers.testkit.clock import START
from spotd_providers.vastai.offers import OnDemandPrices, offers_of
from spotd_providers.vastai.wire import ChargePage, InstancePage, VastSettings, offer_rows
from tests.cases import every
from tests.fakes.vastai import Quirks, some_asks
from tests.fakes.vastai.rows import ask_row
from tests.unit.providers.vastai.payloads import SEARCHES, recorded_rows

EVERYBODY = VastSettings(verified=False, laptops=True, cpu_arch="any")
PRICES = ("dph_base", "min_bid", "storage_cost", "inet_up_cost", "inet_down_cost")
ROWS = [ask_row(ask, kind="bid", allocated_gb=8, now=START, quirks=Quirks()) for ask in some_asks()]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.sampled_from(["NaN", "1.5", "-1", "\ud800", "1e999", ""]),
    st.sampled_from([-1, 0, -0.0, 1e308, 2**63, 2**1024, float("nan"), float("inf")]),
)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Two rows of which the first has some fields replaced, dropped or swapped; and how many were damaged."""
    rows = copy.deepcopy(draw(st.lists(st.sampled_from(ROWS), min_size=2, max_size=2, unique_by=lambda r: r["id"])))
    fields = draw(st.lists(st.sampled_from([*sorted(rows[0]), *PRICES * 4]), min_size=1, max_size=4))
    for field in fields:
        match draw(st.sampled_from(["replace", "replace", "drop", "swap"])):
            case "drop":
                rows[0].pop(field, None)
            case "swap":
                rows[0][field] = rows[0].get(draw(st.sampled_from(PRICES)))
            case _:
                rows[0][field] = draw(junk)
    return rows, len(fields)


def judge(rows: list[dict[str, Any]]) -> None:
    """Everything priced out of these rows is a finite, positive figure that the row itself states."""
    understood = offer_rows(json.dumps({"offers": rows}).encode())
    assert understood.count == len(rows)
    assert rows[1]["id"] in {row.id for row in understood.rows}, "a good row was lost to its neighbour"
    for market in Market:
        offers, rejected = offers_of(understood.rows, market, EVERYBODY, on_demand=OnDemandPrices(understood.rows))
        assert len(offers) + len(rejected) == len(understood.rows)
        for offer in offers:
            row = next(row for row in reversed(rows) if row.get("id") == int(offer.extra["ask"]))
            stated = row["min_bid"] if market is Market.SPOT else row["dph_base"]
            assert type(stated) in (int, float)
            assert math.isfinite(stated)
            assert stated > 0
            assert 0 < offer.gpu_price <= stated * MICRO + 1
            for price in (offer.storage_price, offer.upload_price, offer.download_price):
                assert price >= 0


@given(damaged())
@settings(max_examples=60, deadline=None)
def test_a_damaged_row_never_becomes_a_false_price(case: tuple[list[dict[str, Any]], int]) -> None:
    judge(case[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(damaged())
@settings(max_examples=6000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_thousands_of_damaged_rows_never_become_a_false_price(case: tuple[list[dict[str, Any]], int]) -> None:
    judge(case[0])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_text_is_a_page_or_unavailable(data: st.DataObject) -> None:
    text = bytearray(json.dumps({"offers": ROWS}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        understood = offer_rows(bytes(text))
    except Unavailable:
        return
    for market in Market:
        offers_of(understood.rows, market, EVERYBODY, on_demand=OnDemandPrices(understood.rows))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(st.data())
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_thousands_of_damages_to_recorded_offers_never_become_a_false_price(data: st.DataObject) -> None:
    rows = recorded_rows(data.draw(st.sampled_from(SEARCHES[1:])))
    first, second = copy.deepcopy(data.draw(st.sampled_from(rows))), rows[0]
    first["id"] = second["id"] + 1
    first[data.draw(st.sampled_from([*sorted(first), *PRICES * 6]))] = data.draw(junk)
    judge([first, second])


@every("field", PRICES)
@every("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-0.01", '"0.2"', "true", "[]", "{}", '"\\ud800"', "1e5"])
def test_a_price_that_is_no_price_costs_its_row_and_no_other(field: str, raw: str) -> None:
    mark = "here"
    rows = [{**ROWS[0], field: mark}, ROWS[1]]
    body = json.dumps({"offers": rows}).replace(json.dumps(mark), raw).encode()
    understood = offer_rows(body)
    assert [row.id for row in understood.rows] == [ROWS[1]["id"]]
    assert [item.offer_id for item in understood.rejected] == [str(ROWS[0]["id"])]
    assert field in understood.rejected[0].reason


@every("field", ["cuda_max_good", "geolocation", "cpu_ram", "reliability2", "hosting_type"])
def test_an_odd_detail_is_unknown_and_costs_no_offer_unless_a_filter_needs_it(field: str) -> None:
    rows = offer_rows(json.dumps({"offers": [{**ROWS[0], field: {"new": "shape"}}]}).encode()).rows
    (offer,), _ = offers_of(rows, Market.SPOT, EVERYBODY, on_demand=OnDemandPrices())
    assert offer.gpu_price > 0
    picky = VastSettings(cuda_min=12.0, datacenter=True)
    if field in ("cuda_max_good", "hosting_type"):
        assert not offers_of(rows, Market.SPOT, picky, on_demand=OnDemandPrices())[0]


def test_a_bid_of_nothing_is_no_offer() -> None:
    for nothing in (0, 0.0, None):
        rows = offer_rows(json.dumps({"offers": [{**ROWS[0], "min_bid": nothing}]}).encode()).rows
        offers, rejected = offers_of(rows, Market.SPOT, EVERYBODY, on_demand=OnDemandPrices())
        assert not offers
        assert "min_bid" in rejected[0].reason


def test_the_same_offer_twice_is_one_offer() -> None:
    understood = offer_rows(json.dumps({"offers": [ROWS[0], ROWS[0], ROWS[1]]}).encode())
    assert len(understood.rows) == 2
    assert understood.rejected[0].reason == "the same offer twice in one answer"


@every("body", [b"", b"null", b"[]", b"{}", b'{"offers":null}', b'{"offers":{}}', b"\xff", b"[" * 9999])
def test_an_answer_without_a_list_of_offers_is_unavailable(body: bytes) -> None:
    with pytest.raises(Unavailable):
        offer_rows(body)


@every("model", [InstancePage, ChargePage])
@every("rows", [None, {}, "rows", 7])
def test_a_page_whose_rows_are_no_list_is_unavailable(model: type[Any], rows: Any) -> None:
    with pytest.raises(Unavailable):
        as_model(model, {"instances": rows, "results": rows}, who="vast.ai", what="a page")
