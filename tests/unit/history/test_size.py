"""What ninety days cost at 3,000 offers a minute, projected from a few days of fewer offers, and printed."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from spotd.history import History, Retained
from spotd.history.file import SLOT_S
from tests.unit.history.market import VAST, Bazaar

pytestmark = pytest.mark.long

DAY_S = 86_400
START = 1_790_000_000 // DAY_S * DAY_S


def size_of(connection: sqlite3.Connection, table: str) -> tuple[int, int]:
    rows: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608 - our own names
    size: int = connection.execute(
        "SELECT sum(pgsize) FROM dbstat WHERE name IN (SELECT name FROM sqlite_schema WHERE tbl_name = ?)", (table,)
    ).fetchone()[0]
    return rows, size


@pytest.mark.parametrize(("busy", "days"), [(1.0, 8), (10.0, 2)], ids=["usual", "ten times as busy"])
def test_ninety_days_of_three_thousand_offers_stay_far_below_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], busy: float, days: int
) -> None:
    offers = 400
    history, bazaar = History(tmp_path / "prices.sqlite"), Bazaar(offers, busy=busy)
    written = 0
    while bazaar.now < days * DAY_S:
        written += history.record(VAST, bazaar.offers(), complete=True, at=START + bazaar.now)
        while history.step(START + bazaar.now):
            pass
        bazaar.pass_time(3600)
    connection = history._open()[0]
    sizes = {table: size_of(connection, table) for table in ("points", "slots", "markets", "series")}
    history.close()
    by_point = sizes["points"][1] / sizes["points"][0]
    by_slot = sizes["slots"][1] / sizes["slots"][0]
    per_day = written / days * 3000 / offers
    # Offers come and go, so each day brings its newcomers' names; a market row is of a kind, however many offers.
    projected = {
        "changes": 7 * per_day * by_point,
        "slots": 90 * 3000 * (DAY_S / SLOT_S) * by_slot,
        "markets": 90 / days * sizes["markets"][1],
        "names": sizes["series"][1] / offers * 3000 * max(1.0, 90 / days),
    }
    total = sum(projected.values())
    with capsys.disabled():
        parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in projected.items())
        print(f"\n{by_point:.1f} B a change, {by_slot:.1f} B a slot; 90 days: {total / 1e6:.0f} MB ({parts})")
    assert by_point <= 20.5
    assert by_slot <= 32
    assert total < Retained().bytes_max < 200_000_000


def test_a_poll_that_brings_little_costs_little(tmp_path: Path) -> None:
    """As a ratio to reading the same offers once in Python, so that a busy machine slows both."""
    bazaar = Bazaar(3_000)
    history = History(tmp_path / "prices.sqlite")
    history.record(VAST, bazaar.offers(), complete=True, at=START)
    polls, walks = [], []
    for minute in range(1, 12):
        bazaar.pass_time(60)
        offers = bazaar.offers()
        began = time.process_time()
        history.record(VAST, offers, complete=True, at=START + 60 * minute)
        polls.append(time.process_time() - began)
        began = time.process_time()
        for _ in range(3):
            {(o.offer_id, o.gpu, o.gpu_count): (o.gpu_price, o.storage_price) for o in offers}
        walks.append(time.process_time() - began)
    assert sorted(polls)[5] < 4 * sorted(walks)[5]
    history.close()
