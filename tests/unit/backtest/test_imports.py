"""Recorded lists as statements: what is kept of them, in which parts, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from spotd.backtest.recorded import BacktestRefused
from spotd.backtest.traces import CHANGES_AT_ONCE, OFFERS_AT_ONCE, RecordedPrices, TraceDefaults, read_lists

HEAD = "at,provider,offer,gpu,count,price,market\n"
NOW = 1_793_491_200  # 2026-11-01T00:00:00Z
DAY_S = 86_400
SINCE = NOW - 90 * DAY_S


def read(folder: Path, *lines: str) -> RecordedPrices:
    place = folder / "list.csv"
    place.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return read_lists(place, since=SINCE, now=NOW, defaults=TraceDefaults())


def test_a_list_becomes_one_statement_for_its_whole_span(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "2026-10-30T00:00:00Z,vast,1,RTX_4090,2,0.31,spot",
        "2026-10-30T01:00:00Z,vast,1,RTX_4090,2,0.31,spot",
        "2026-10-30T02:00:00Z,vast,1,RTX_4090,2,0.40,spot",
        "2026-10-31T00:00:00Z,aws,p5,H100,8,20,on-demand",
    )
    ((body, size),) = found.requests()
    assert size == found.prices == 3
    assert (body["since_s"], body["until_s"]) == (NOW - 2 * DAY_S, NOW - DAY_S + 1)
    assert body["offers"][0]["changes"] == [[NOW - 2 * DAY_S, 310_000], [NOW - 2 * DAY_S + 7200, 400_000]]
    assert body["offers"][1]["market"] == "on-demand"


def test_what_is_too_old_is_left_out_but_for_the_price_that_it_leaves(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "2020-01-01T00:00:00Z,vast,1,RTX_4090,1,0.31,spot",
        "2026-10-31T00:00:00Z,vast,2,RTX_4090,1,0.50,spot",
        "2099-01-01T00:00:00Z,vast,2,RTX_4090,1,0.60,spot",
    )
    ((body, _),) = found.requests()
    changes = {row["offer"]: row["changes"] for row in body["offers"]}
    assert changes == {"1": [[SINCE, 310_000]], "2": [[NOW - DAY_S, 500_000]]}
    assert (body["since_s"], body["until_s"]) == (SINCE, NOW)
    assert [note.split(" ", 1)[0] for note in found.notes] == ["1", "1"]


def test_a_list_of_another_year_holds_nothing(tmp_path: Path) -> None:
    found = read(tmp_path, "2099-01-01T00:00:00Z,vast,2,RTX_4090,1,0.60,spot")
    assert (list(found.requests()), found.prices) == ([], 0)


@pytest.mark.parametrize(
    "line",
    [
        "9999-12-31T23:59:59Z,vast,1,RTX_4090,1,0.31,spot",
        "2026-10-30T00:00:00Z,vast,1,RTX_4090,1,NaN,spot",
        "2026-10-30T00:00:00Z,vast,1,RTX_4090,1,-1,spot",
        "2026-10-30T00:00:00Z,vast,1,RTX_4090,1,1e308,spot",
        "2026-10-30T00:00:00Z,vast,1,RTX_4090,0,0.31,spot",
        "2026-10-30T00:00:00Z,vast,1,RTX_4090",
    ],
)
def test_a_line_that_cannot_be_true_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(BacktestRefused, match=r"list\.csv:2"):
        read(tmp_path, line)


def test_of_very_many_prices_of_one_second_the_last_is_kept(tmp_path: Path) -> None:
    many = [f"2026-10-30T00:00:00Z,vast,1,RTX_4090,1,0.{number:06},spot" for number in range(1, 100_000)]
    found = read(tmp_path, *many, "2026-10-31T00:00:00Z,vast,1,RTX_4090,1,0.5,spot")
    assert found.prices == 2


def test_requests_stay_small_and_together_cover_each_offer_once(tmp_path: Path) -> None:
    offers = [f"2026-10-30T00:00:00Z,vast,o{number},RTX_4090,1,0.3,spot" for number in range(OFFERS_AT_ONCE + 1)]
    busy = [
        f"{datetime.fromtimestamp(NOW - DAY_S + second, UTC).isoformat()},vast,busy,RTX_4090,1,0.{second + 100000},spot"
        for second in range(2 * CHANGES_AT_ONCE + 5)
    ]
    found = read(tmp_path, *offers, *busy)
    bodies = [body for body, _ in found.requests()]
    assert all(sum(len(row["changes"]) for row in body["offers"]) <= CHANGES_AT_ONCE for body in bodies)
    spans = [(body["since_s"], body["until_s"]) for body in bodies if body["offers"][0]["offer"] == "busy"]
    assert spans[0][0] == found.since
    assert spans[-1][1] == found.until
    assert all(first[1] == second[0] for first, second in pairwise(spans))
    assert sum(len(body["offers"]) for body in bodies) == OFFERS_AT_ONCE + 1 + len(spans)
