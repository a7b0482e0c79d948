"""Damaged catalogues: no crash, no price that is not in the row, no good row lost to a bad neighbour."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import MICRO
from spotd_providers.kit.shapes import as_model, decode, row_or_none
from spotd_providers.runpod.offers import offers_of
from spotd_providers.runpod.wire import BillingPage, BillingRow, PodPage, PodRow, RunpodSettings, gpu_rows
from tests.cases import every
from tests.fakes.runpod import some_gpus

EVERYTHING = RunpodSettings(amd=True)
ROWS = [gpu.row(cloud="SECURE", count=2, with_stock=True) for gpu in some_gpus()]
POD = {
    "id": "7h9k2m4n6p",
    "name": "spotd-lab-7f3a-1",
    "status": "RUNNING",
    "cost": 0.44,
    "gpu": {"id": "x", "count": 1},
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.sampled_from(["NaN", "1.5", "-1", "\ud800", "1e999", "", "HIGH", "NONE"]),
    st.sampled_from([-1, 0, -0.0, 1e308, 2**63, 2**1024, float("nan"), float("inf")]),
)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def damaged(draw: st.DrawFn, rows: list[dict[str, Any]], inside: str, prices: tuple[str, ...]) -> list[dict[str, Any]]:
    """Two rows of which the first has some fields replaced or dropped, its prices most of all."""
    found = copy.deepcopy(draw(st.lists(st.sampled_from(rows), min_size=2, max_size=2, unique_by=lambda r: r["id"])))
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from([*sorted(rows[0]), *prices * 4]))
        place = found[0].get(inside) if field in prices else found[0]
        if not isinstance(place, dict):
            continue
        if draw(st.booleans()):
            place[field] = draw(junk)
        else:
            place.pop(field, None)
    return found


def _is_price(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def judge_catalogue(rows: list[dict[str, Any]]) -> None:
    """Everything priced out of these rows is a finite, positive figure that the row itself states."""
    understood = gpu_rows(decode(json.dumps({"gpus": rows}).encode(), who="RunPod"))
    assert len(understood.rows) + len(understood.rejected) == len(rows)
    assert rows[1]["id"] in {row.id for row in understood.rows} or rows[0].get("id") == rows[1]["id"]
    for cloud in ("SECURE", "COMMUNITY"):
        offers, rejected = offers_of(understood.rows, cloud, 2, EVERYTHING)
        assert len(offers) + len(rejected) == len(understood.rows)
        for offer in offers:
            stated = next(row["price"][cloud.lower()] for row in rows if row.get("id") == offer.extra["gpu"])
            assert _is_price(stated)
            assert 0 < offer.gpu_price <= 2 * (stated * MICRO + 1)


catalogues = damaged(ROWS, "price", ("secure", "community"))


@given(catalogues)
@settings(max_examples=60, deadline=None)
def test_a_damaged_row_never_becomes_a_false_price(rows: list[dict[str, Any]]) -> None:
    judge_catalogue(rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(catalogues)
@settings(max_examples=6000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_thousands_of_damaged_rows_never_become_a_false_price(rows: list[dict[str, Any]]) -> None:
    judge_catalogue(rows)


@given(st.sampled_from(sorted(POD)), junk)
@settings(max_examples=60, deadline=None)
def test_an_odd_pod_is_kept_as_long_as_its_id_can_be_read(field: str, value: Any) -> None:
    row = row_or_none(PodRow, {**POD, field: value})
    if field != "id":
        assert row is not None
        assert row.id == POD["id"]
        if field != "name":
            assert row.name == POD["name"]


@given(st.dictionaries(st.sampled_from(["podId", "startTime", "endTime", "totalAmount", "gpuAmount"]), junk))
@settings(max_examples=60, deadline=None)
def test_an_odd_bill_is_unreadable_and_no_crash(fields: dict[str, Any]) -> None:
    good = {"podId": "p", "startTime": "2026-03-02T12:00:00Z", "endTime": "2026-03-02T13:00:00Z", "totalAmount": 0.5}
    row = row_or_none(BillingRow, {**good, **fields})
    assert row is None or math.isfinite(row.total)


@every("body", [b"", b"null", b"[]", b"{}", b'{"gpus":null}', b'{"gpus":{}}', b"\xff", b"[" * 9999])
def test_an_answer_without_a_list_of_gpus_is_unavailable(body: bytes) -> None:
    with pytest.raises(Unavailable):
        gpu_rows(decode(body, who="RunPod"))


@every("rows", [None, {}, "rows", 7])
def test_a_page_whose_rows_are_no_list_is_unavailable(rows: Any) -> None:
    for model in (PodPage, BillingPage):
        with pytest.raises(Unavailable):
            as_model(model, {"pods": rows, "records": rows}, who="RunPod", what="a page")


def test_a_gpu_told_twice_is_offered_once() -> None:
    row = replace(some_gpus()[0]).row(cloud="SECURE", count=1, with_stock=True)
    understood = gpu_rows({"gpus": [row, row]})
    assert len(understood.rows) == 1
    assert understood.rejected[0].reason == "the same GPU twice in one answer"
