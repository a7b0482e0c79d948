"""Hours of owners, where clocks are set forward and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from spotd_providers.kit.hours import weekly_hours
from tests.cases import every

FORWARD = datetime(2026, 3, 29, 1, tzinfo=UTC)
"""In Berlin 2:00 becomes 3:00."""
BACK = datetime(2026, 10, 25, 1, tzinfo=UTC)
"""In Berlin 3:00 becomes 2:00."""


def is_owners(text: str, at: datetime) -> bool:
    return weekly_hours([text], "Europe/Berlin").next_begin(at) == at


@every(
    ("window", "begin", "end"),
    [
        pytest.param(
            "Sun 02:30-03:15", FORWARD - timedelta(minutes=30), FORWARD + timedelta(minutes=15), id="in the gap"
        ),
        pytest.param(
            "Sun 01:00-02:30", FORWARD - timedelta(hours=1), FORWARD + timedelta(minutes=30), id="into the gap"
        ),
        pytest.param(
            "Sun 02:15-02:45", BACK - timedelta(minutes=45), BACK + timedelta(minutes=45), id="the hour twice"
        ),
        pytest.param("Sun 00:00-08:00", BACK - timedelta(hours=3), BACK + timedelta(hours=6), id="nine hours"),
    ],
)
def test_hours_that_clocks_skip_or_repeat_are_the_owners_in_each_reading(
    window: str, begin: datetime, end: datetime
) -> None:
    assert weekly_hours([window], "Europe/Berlin").next_begin(begin - timedelta(hours=2)) == begin
    minutes = [begin + timedelta(minutes=step) for step in range(int((end - begin).total_seconds()) // 60)]
    assert all(is_owners(window, at) for at in minutes)
    assert not is_owners(window, end)
    assert not is_owners(window, begin - timedelta(minutes=1))


@pytest.mark.long
@every("zone", ["Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns", "Pacific/Apia"])
def test_the_next_begin_never_goes_back_and_is_never_past(zone: str) -> None:
    hours = weekly_hours(["Mon-Fri 08:00-18:00", "Sun 01:59-02:01", "Sat"], zone)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    begins = []
    for _ in range(365 * 24):
        begin = hours.next_begin(at)
        assert begin is not None
        assert at <= begin <= at + timedelta(days=8)
        begins.append(begin)
        at += timedelta(hours=1)
    assert all(before <= after for before, after in pairwise(begins))
