"""From changes to how long each price held: nothing counts that nobody looked at, and nothing counts twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spotd.history import file

SINCE, UNTIL = 50, 950
TIMES = st.integers(0, 1_000)
POINTS = st.dictionaries(TIMES, st.none() | st.integers(1, 9), min_size=1, max_size=12).map(
    lambda found: sorted(found.items())
)
WATCHES = st.lists(TIMES, max_size=8, unique=True).map(
    lambda found: list(zip(sorted(found)[::2], sorted(found)[1::2], strict=False))
)


def second_by_second(points: list[file.Point], watches: list[file.Watch]) -> dict[int, int]:
    """The same by looking at each second."""
    prices: dict[int, int] = {}
    for second in range(SINCE, UNTIL):
        held = [price for at, price in points if at <= second]
        watched = any(opens <= second < closes for opens, closes in watches)
        if held and held[-1] is not None and watched:
            prices[second] = held[-1]
    return prices


@given(POINTS, WATCHES)
def test_spells_say_of_every_second_what_the_last_change_said(
    points: list[file.Point], watches: list[file.Watch]
) -> None:
    found = list(file.spells(points, watches, since=SINCE, until=UNTIL))
    prices = {second: price for start, end, price in found for second in range(start, end)}
    assert prices == second_by_second(points, watches)
    assert sum(end - start for start, end, _ in found) == len(prices)


@given(POINTS, WATCHES, st.integers(1, 400))
def test_slots_hold_every_second_once_and_their_extremes(
    points: list[file.Point], watches: list[file.Watch], length: int
) -> None:
    by_second = second_by_second(points, watches)
    kept = {s.number: s for s in file.slots(file.spells(points, watches, since=SINCE, until=UNTIL), length)}
    assert set(kept) == {second // length for second in by_second}
    for number, slot in kept.items():
        prices = sorted(price for second, price in by_second.items() if second // length == number)
        assert (slot.low, slot.high, slot.offered_s) == (prices[0], prices[-1], len(prices))
        assert slot.typical == prices[(len(prices) - 1) // 2]


def test_quantiles_weigh_prices_by_time() -> None:
    assert file.quantiles({100: 80, 200: 15, 900: 5}, (10, 50, 80, 90, 95, 100)) == (100, 100, 100, 200, 200, 900)
    assert file.quantiles({7: 1}, (10, 90)) == (7, 7)


def test_a_packed_distribution_comes_back_whole() -> None:
    prices = file.quantiles(dict.fromkeys(range(10**13, 10**13 + 40), 1), file.MIDDLES_PERMILLE, of=1000)
    assert len(prices) == file.PARTS
    assert file.unpacked(file.packed(prices)) == prices
