"""The price of a machine over time."""

from __future__ import annotations

from typing import Any

from spotd.lists import rates_of
from tests.cases import every
from tests.unit.api import made_responses as made

ATTEMPT = made.attempt(attempt=2, launched_at="2026-11-21T08:00:00.000Z", effective_usd_h=0.40)


def change(at: str, **given: Any) -> Any:
    data = {"before_usd_h": 0.33, "usd_h": 0.35}
    return made.event(**{"kind": "bid.raised", "attempt": 2, "at": f"2026-11-21T{at}:00.000Z", "data": data, **given})


def test_each_change_of_the_bid_begins_a_period() -> None:
    lowered = change("10:00", kind="bid.lowered", data={"before_usd_h": 0.35, "usd_h": 0.31})
    assert rates_of(ATTEMPT, [change("09:00"), lowered]) == [
        ("2026-11-21T08:00:00.000Z", 0.33),
        ("2026-11-21T09:00:00.000Z", 0.35),
        ("2026-11-21T10:00:00.000Z", 0.31),
    ]


@every(
    "event",
    [
        change("09:00", kind="bid.raising"),
        change("09:00", attempt=1),
        change("09:00", data={}),
        change("09:00", data={"before_usd_h": None, "usd_h": "x"}),
    ],
    ids=["only wanted", "another attempt", "of an earlier version", "no figures"],
)
def test_what_is_no_change_of_its_price_leaves_one_period(event: Any) -> None:
    assert rates_of(ATTEMPT, [event]) == [("2026-11-21T08:00:00.000Z", 0.40)]
